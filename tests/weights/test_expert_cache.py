"""The cache of experts by itself: right bytes or NaN at every place, memory within its frames, what leaves first."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from stowage.core.geometry import PAGE_BYTES
from stowage.errors import StorageError
from stowage.weights import reader
from stowage.weights.checkpoint import Segment
from stowage.weights.experts.cache import ExpertCache, Stacks
from stowage.weights.experts.eviction import ExpertUsage
from stowage.weights.file import File
from stowage.weights.parameter_location import ParameterLocation
from stowage.weights.reader import Read, Readers

LAYERS, EXPERTS = 3, 5
UP, DOWN = (EXPERTS, 2 * PAGE_BYTES // 32, 8), (EXPERTS, 8, 3 * PAGE_BYTES // 32)
"""Of two pages and of three for each expert."""


@pytest.fixture(scope="module")
def table(tmp_path_factory: pytest.TempPathFactory) -> Iterator[File]:
    path = tmp_path_factory.mktemp("experts") / "table"
    values = np.random.default_rng(0).random(LAYERS * EXPERTS * 5 * PAGE_BYTES // 4 + 5000, np.float32)
    path.write_bytes(values.tobytes())
    file = File.open(path)
    yield file
    file.close()


def cache_of(
    table: File, frames: int, phase: int, kinds: str, timeout_s: float = 60.0
) -> tuple[ExpertCache, Readers, list[list[nn.Parameter]], list[list[Tensor]]]:
    """``kinds``: where a layer's parameters lie: one after the other in the file, in two pieces of it, or in memory."""
    truth, layers, at = [], [], phase
    raw = torch.from_numpy(np.fromfile(table.path, np.uint8))
    for layer in range(LAYERS):
        locations, values, kind = [], [], kinds[layer % len(kinds)]
        for shape in (UP, DOWN):
            nbytes = 4 * int(np.prod(shape))
            value = raw[at : at + nbytes].clone().view(torch.float32).view(shape)
            half = nbytes // 2 + 1024
            pieces = (Segment(table, at, half), Segment(table, at + half, nbytes - half))
            whole = (Segment(table, at, nbytes),)
            host = value.clone() if kind == "h" else None
            segments = {"f": whole, "p": pieces, "h": ()}[kind]
            locations.append(
                ParameterLocation(shape, torch.float32, segments, host, at % 64 if kind == "f" else phase % 64)
            )
            values.append(value)
            at += nbytes
        truth.append(values)
        layers.append(
            Stacks(EXPERTS, [nn.Parameter(torch.empty(1), requires_grad=False) for _ in locations], locations)
        )
    readers = Readers()
    edges = sum(PAGE_BYTES * (EXPERTS + 1) for location in locations for _ in range(LAYERS)) if phase else 0
    frame_bytes = (5 - 2 * bool(phase)) * PAGE_BYTES
    cache_bytes = (frames + 1) * frame_bytes + edges
    cache = ExpertCache(layers, cache_bytes, readers, timeout_s)
    assert cache.frames == frames
    assert cache.nbytes <= cache_bytes
    return cache, readers, [list(layer.parameters) for layer in layers], truth


Forwards = st.lists(st.tuples(st.integers(0, LAYERS - 1), st.sets(st.integers(0, EXPERTS + 1))), max_size=15)


@settings(max_examples=25)
@given(
    Forwards,
    st.integers(EXPERTS, LAYERS * EXPERTS),
    st.sampled_from([0, 8, 4040]),
    st.sampled_from(["f", "fph"]),
    st.booleans(),
)
def test_what_is_chosen_is_there_and_what_is_away_is_nan(
    table: File, forwards: list[tuple[int, set[int]]], frames: int, phase: int, kinds: str, waits: bool
) -> None:
    cache, readers, parameters, truth = cache_of(table, frames, phase, kinds)
    for layer, experts in forwards:
        cache.take(layer, torch.tensor(sorted(experts), dtype=torch.int64)[None], waits)
        real = experts & set(range(EXPERTS))
        came = []
        for expert in sorted(real) if waits else cache.arriving(layer, real):
            came.append(expert)
            for parameter, values in zip(parameters[layer], truth[layer], strict=True):
                assert torch.equal(parameter[expert], values[expert])
        assert set(came) == real
        cache.give_back(layer)
        cache.give_back(layer)
        cache.check()
    there = 0
    for layer in range(LAYERS):
        for expert in range(EXPERTS):
            here = [torch.equal(p[expert], v[expert]) for p, v in zip(parameters[layer], truth[layer], strict=True)]
            offloaded = [bool(p[expert].isnan().any()) for p in parameters[layer]]
            assert here == [not gone for gone in offloaded]
            assert len(set(here)) == 1
            there += here[0]
    assert there <= frames
    assert cache._memory.used_bytes <= frames * cache._memory.frame_bytes
    assert readers.close()
    cache.close(ended=True)
    assert all(bool(p.isnan().any()) for layer in parameters for p in layer), "all are offloaded"


def test_a_disk_that_fails_leaves_nothing_half_read(tmp_path: Path, table: File) -> None:
    file = File.open(table.path)
    cache, readers, parameters, truth = cache_of(file, 7, 0, "f")
    cache.take(0, torch.tensor([[0, 1]]))
    cache.give_back(0)
    kept = os.dup(file.fd), os.dup(file.direct)
    null = os.open(tmp_path, os.O_RDONLY)
    for fd in (file.fd, file.direct):
        os.dup2(null, fd)
    for _ in range(3):
        with pytest.raises(StorageError, match="could not be read"):
            cache.take(1, torch.tensor([[0, 1, 2, 3, 4]]))
        cache.give_back(1)
        cache.check()
    cache.take(0, torch.tensor([[0]]))  # what is there is there
    assert torch.equal(parameters[0][0][0], truth[0][0][0])
    cache.give_back(0)
    for ticket in cache._filling.values():  # as an engine does after a forward that failed
        ticket.wait(60.0)
    for fd, good in zip((file.fd, file.direct), kept, strict=True):
        os.dup2(good, fd)
    for layer in range(LAYERS):
        cache.take(layer, torch.arange(EXPERTS)[None])
        assert all(torch.equal(p, v) for p, v in zip(parameters[layer], truth[layer], strict=True))
        cache.give_back(layer)
        cache.check()
    assert readers.close()
    file.close()


def test_a_disk_that_hangs_has_a_deadline(table: File, monkeypatch: pytest.MonkeyPatch) -> None:
    """A frame that may still be written to is given to nobody."""
    answers = threading.Event()
    fill = reader._fill

    def hangs(read: Read, buffer: reader._Buffer) -> None:
        answers.wait(60)
        fill(read, buffer)

    cache, readers, parameters, truth = cache_of(table, 5, 0, "f", timeout_s=0.05)
    monkeypatch.setattr(reader, "_fill", hangs)
    for _ in range(2):
        with pytest.raises(StorageError, match="within"):
            cache.take(0, torch.tensor([[0, 1, 2]]))
        cache.give_back(0)
        with pytest.raises(StorageError, match="within"):
            cache.take(1, torch.arange(EXPERTS)[None])
        cache.give_back(1)
        cache.check()
        assert (cache._frame[0, :3] >= 0).all(), "they are still being written to"
    answers.set()
    cache._timeout_s = 60.0
    for layer in (1, 0):
        cache.take(layer, torch.arange(EXPERTS)[None])
        assert all(torch.equal(p, v) for p, v in zip(parameters[layer], truth[layer], strict=True))
        cache.give_back(layer)
    assert readers.close()


def test_experts_that_are_there_do_not_wait_for_those_that_are_read(
    table: File, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache, readers, _, _ = cache_of(table, EXPERTS, 0, "f")
    cache.take(0, torch.tensor([[3, 4]]))
    cache.give_back(0)
    may_read = threading.Event()
    fill = reader._fill

    def waits(read: Read, buffer: reader._Buffer) -> None:
        may_read.wait(60)
        fill(read, buffer)

    monkeypatch.setattr(reader, "_fill", waits)
    cache.take(0, torch.tensor([[1, 3, 4]]), waits=False)
    arriving = cache.arriving(0, [1, 3, 4])
    assert [next(arriving), next(arriving)] == [3, 4]
    may_read.set()
    assert list(arriving) == [1]
    cache.give_back(0)
    cache.check()
    assert readers.close()


def test_an_expert_that_was_on_its_way_when_a_forward_ended_is_read_again(table: File) -> None:
    """Its read was given up while it was queued, which no thread has said yet."""
    cache, readers, parameters, truth = cache_of(table, EXPERTS, 0, "f")
    cache.take(0, torch.tensor([[3, 4]]))
    ticket = reader.Ticket(1)
    cache._filling[int(cache._frame[0, 3])] = ticket
    cache.reset()
    threading.Timer(0.2, ticket.ended, [StorageError("reading was given up")]).start()
    cache.take(0, torch.tensor([[3, 4]]), waits=False)
    for expert in cache.arriving(0, [3, 4]):
        for parameter, values in zip(parameters[0], truth[0], strict=True):
            assert torch.equal(parameter[expert], values[expert])
    cache.give_back(0)
    cache.check()
    assert cache.misses == 3
    assert readers.close()


def test_a_scan_empties_no_cache(table: File) -> None:
    """All experts of all layers again and again, as prompts have them: what fits stays."""
    cache, readers, _, _ = cache_of(table, 10, 0, "f")
    for _ in range(6):
        before = cache.hits
        for layer in range(LAYERS):
            cache.take(layer, torch.arange(EXPERTS)[None])
            cache.give_back(layer)
    assert cache.hits - before >= 10 - EXPERTS
    assert readers.close()


def test_favourites_stay() -> None:
    """An expert that every second token chooses is expected before one that was chosen once, in any layer."""
    uses = ExpertUsage(4, 8)
    for token in range(60):
        for layer in range(4):
            chosen = np.zeros(8, np.int64)
            chosen[[0 if token % 2 else 1, 2 + token % 6]] = 1
            uses.note(layer, chosen, 1)
    layers, experts = np.divmod(np.arange(32), 8)
    for now in range(4):
        distances = uses.distances(layers, experts, now).reshape(4, 8)
        assert distances[:, :2].max() < distances[:, 2:].min()
        nearest = (now + 1) % 4
        assert distances[nearest, 0] == distances[:, 0].min()


def test_a_read_that_an_earlier_forward_left_behind_fails_for_it_alone(
    table: File, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache, readers, parameters, truth = cache_of(table, EXPERTS, 0, "f")
    mended, fill = threading.Event(), File.fill

    def fill_or_fail(self: File, into: memoryview, offset: int, *, whole_pages: bool) -> None:
        if not mended.is_set():
            mended.wait(60.0)
            raise OSError("gone")
        fill(self, into, offset, whole_pages=whole_pages)

    monkeypatch.setattr(File, "fill", fill_or_fail)
    cache.take(0, torch.arange(EXPERTS)[None], waits=False)
    cache.give_back(0)
    timer = threading.Timer(0.3, mended.set)
    timer.start()
    cache.take(1, torch.arange(EXPERTS)[None])  # it needs every frame
    assert all(torch.equal(p, v) for p, v in zip(parameters[1], truth[1], strict=True))
    cache.give_back(1)
    cache.check()
    timer.join()
    assert readers.close()
