"""Packed tensors by the readers' threads: read in one step, unpacked in another; the same bytes, and all reads end."""

from __future__ import annotations

import gc
import random
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from stowage.core import read_buffers
from stowage.errors import StorageError
from stowage.weights import reader
from stowage.weights.checkpoint import Checkpoint
from stowage.weights.lossless import writer
from stowage.weights.lossless.packed_tensor import FRAME_BYTES, PackedTensor
from stowage.weights.reader import Read, Readers
from tests.native import needs_native

pytestmark = needs_native
NUMBERS = 1 << 20
WAIT_S = 60.0


@pytest.fixture
def packed(tmp_path: Path) -> Iterator[tuple[Checkpoint, dict[str, bytes]]]:
    """A packed file, and the bytes of its tensors; one of them is not packed."""
    generator = torch.Generator().manual_seed(0)
    tensors = {f"w{n}": torch.randn(NUMBERS + 33 * n, generator=generator).to(torch.bfloat16) for n in range(4)}
    tensors["noise"] = torch.randint(0, 255, (NUMBERS,), dtype=torch.uint8, generator=generator)
    for kind in ("raw", "packed"):
        (tmp_path / kind).mkdir()
    save_file(tensors, tmp_path / "raw" / "model.safetensors", {"format": "pt"})
    written = writer.write(
        [tmp_path / "raw" / "model.safetensors"], tmp_path / "raw", tmp_path / "packed", lambda _done, _all: None
    )
    assert (written.packed, written.kept) == (4, 1)
    checkpoint = Checkpoint([tmp_path / "packed" / "model.safetensors"])
    yield checkpoint, {name: tensor.view(torch.uint8).numpy().tobytes() for name, tensor in tensors.items()}
    checkpoint.close()


def tensor_of(checkpoint: Checkpoint, name: str) -> PackedTensor:
    file = checkpoint.tensors[name].file
    assert isinstance(file, PackedTensor)
    return file


def whole(checkpoint: Checkpoint, name: str) -> tuple[Read, bytearray]:
    segment = checkpoint.tensors[name]
    into = bytearray(segment.length)
    return Read(segment.file, segment.offset, memoryview(into)), into


def idle(readers: Readers) -> bool:
    """Whether nothing is lent and nothing waits."""
    work = readers._work
    work.read_buffers.check()
    return not (work.read_buffers._held_bytes or work.packed or work.arrived)


@pytest.mark.parametrize("threads", [1, 4])
@pytest.mark.parametrize("staged", [1, 300 << 10, None])
def test_every_read_gives_the_bytes_of_the_tensor(
    packed: tuple[Checkpoint, dict[str, bytes]], threads: int, staged: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However little memory lies between, and whatever is asked for beside it."""
    if staged is not None:
        monkeypatch.setattr(read_buffers, "HELD_BYTES_MAX", staged)
    checkpoint, raw = packed
    readers, chance = Readers(threads), random.Random(threads)
    asked: list[tuple[bytearray, bytes]] = []
    tickets = []
    for _ in range(12):
        reads = []
        for name in chance.choices(list(raw), k=3):
            begin = chance.choice((0, FRAME_BYTES, chance.randrange(len(raw[name]))))
            expected = raw[name][begin : begin + chance.choice((1, 100, FRAME_BYTES, 3 << 20))]
            into = bytearray(len(expected))
            segment = checkpoint.tensors[name]
            reads.append(Read(segment.file, segment.offset + begin, memoryview(into)))
            asked.append((into, expected))
        tickets.append(readers.start(reads))
    for ticket in tickets:
        ticket.wait(WAIT_S)
        ticket.raise_error()
    assert all(into == expected for into, expected in asked)
    assert readers.close() and idle(readers)


def test_the_next_part_is_read_before_the_last_one_is_unpacked(
    packed: tuple[Checkpoint, dict[str, bytes]], monkeypatch: pytest.MonkeyPatch
) -> None:
    steps: list[str] = []
    for step in ("fetch", "unpack"):
        real = getattr(PackedTensor, step)

        def told(self: PackedTensor, *asked: Any, real: Any = real, step: str = step) -> None:
            steps.append(step)
            real(self, *asked)

        monkeypatch.setattr(PackedTensor, step, told)
    monkeypatch.setattr(read_buffers, "HELD_BYTES_MAX", 2 << 20)  # of parts that take 1.4 MiB: two
    monkeypatch.setattr(reader, "_UNPACKING", 0)
    readers = Readers(1)
    into = [bytearray(2 * NUMBERS) for _ in range(4)]
    ticket = readers.start([Read(tensor_of(packed[0], f"w{n}"), 0, memoryview(one)) for n, one in enumerate(into)])
    ticket.wait(WAIT_S)
    ticket.raise_error()
    assert readers.close()
    assert steps == ["fetch", "fetch", "unpack", "fetch", "unpack", "fetch", "unpack", "unpack"]
    assert all(one == packed[1][f"w{n}"][: 2 * NUMBERS] for n, one in enumerate(into))


def test_a_damaged_part_costs_its_reads_and_no_others(
    packed: tuple[Checkpoint, dict[str, bytes]], monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoint, raw = packed
    bad = tensor_of(checkpoint, "w1")
    with bad.path.open("r+b") as file:
        file.seek(int(bad._at[3]))
        file.write(b"\xff" * 32)
    monkeypatch.setattr(read_buffers, "HELD_BYTES_MAX", 1)
    readers = Readers(2)
    for _ in range(5):
        read, _ = whole(checkpoint, "w1")
        good, into = whole(checkpoint, "w2")
        before = whole(checkpoint, "w1")[1]
        failed, went_well = readers.start([read]), readers.start([good])
        part = readers.start([Read(bad, 0, memoryview(before)[: 3 * FRAME_BYTES])])
        for ticket in (failed, went_well, part):
            ticket.wait(WAIT_S)
        with pytest.raises(StorageError, match="pack the checkpoint again"):
            failed.raise_error()
        went_well.raise_error()
        part.raise_error()
        assert into == raw["w2"] and before[: 3 * FRAME_BYTES] == raw["w1"][: 3 * FRAME_BYTES]
    assert readers.close() and idle(readers)


def test_a_file_that_was_cut_is_told(packed: tuple[Checkpoint, dict[str, bytes]]) -> None:
    checkpoint, raw = packed
    tensor = tensor_of(checkpoint, "w2")
    with tensor.path.open("r+b") as file:
        file.truncate(int(tensor._at[-1]) - 2 * FRAME_BYTES)
    readers = Readers(2)
    read, _ = whole(checkpoint, "w2")
    good, into = whole(checkpoint, "w0")
    failed, went_well = readers.start([read]), readers.start([good])
    for ticket in (failed, went_well):
        ticket.wait(WAIT_S)
    with pytest.raises(StorageError, match="ends too early"):
        failed.raise_error()
    went_well.raise_error()
    assert into == raw["w0"]
    assert readers.close() and idle(readers)


def test_where_memory_lacks_reads_fail_and_the_next_ones_do_not(
    packed: tuple[Checkpoint, dict[str, bytes]], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(_nbytes: int) -> memoryview:
        raise OSError("no memory")

    readers = Readers(2)
    with monkeypatch.context() as patch:
        patch.setattr(read_buffers, "pages", refuse)
        failed = readers.start([whole(packed[0], "w0")[0], whole(packed[0], "w1")[0]])
        failed.wait(WAIT_S)
    with pytest.raises(StorageError, match="no memory"):
        failed.raise_error()
    read, into = whole(packed[0], "w0")
    ticket = readers.start([read])
    ticket.wait(WAIT_S)
    assert ticket.error is None and into == packed[1]["w0"]
    assert readers.close() and idle(readers)


@pytest.mark.parametrize("closes", [True, False])
def test_what_was_begun_ends_when_they_are_closed_or_dropped(
    packed: tuple[Checkpoint, dict[str, bytes]], closes: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(read_buffers, "HELD_BYTES_MAX", 1)
    readers = Readers(3)
    asked = [whole(packed[0], name) for name in packed[1]] * 3
    ticket, threads = readers.start([read for read, _ in asked]), readers._threads
    if closes:
        assert readers.close()
    del readers
    gc.collect()
    ticket.wait(WAIT_S)
    ticket.raise_error()
    for thread in threads:
        thread.join(WAIT_S)
        assert not thread.is_alive()
    assert all(into == packed[1][name] for (_, into), name in zip(asked, list(packed[1]) * 3, strict=True))


@pytest.mark.parametrize("step", ["fetch", "unpack"])
def test_what_is_given_up_is_written_to_no_more(
    packed: tuple[Checkpoint, dict[str, bytes]], step: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A step that has begun is waited for, those behind it are not done."""
    begun, answers = threading.Event(), threading.Event()
    real = getattr(PackedTensor, step)

    def hangs(self: PackedTensor, *asked: Any) -> None:
        begun.set()
        assert answers.wait(WAIT_S)
        real(self, *asked)

    monkeypatch.setattr(PackedTensor, step, hangs)
    monkeypatch.setattr(reader, "_PACKED_BYTES", FRAME_BYTES)
    readers = Readers(2)
    asked = [whole(packed[0], f"w{n}") for n in range(4)]
    ticket = readers.start([read for read, _ in asked])
    assert begun.wait(WAIT_S)
    with pytest.raises(StorageError, match="within"):
        readers.drain(0.02)
    threading.Timer(0.05, answers.set).start()
    readers.drain(WAIT_S)
    for _, into in asked:
        into[:] = bytes(len(into))
    ticket.wait(WAIT_S)
    with pytest.raises(StorageError, match="cancelled"):
        ticket.raise_error()
    again, into = whole(packed[0], "w3")
    after = readers.start([again])
    after.wait(WAIT_S)
    after.raise_error()
    assert into == packed[1]["w3"]
    assert readers.close() and idle(readers)
    assert not any(any(into) for _, into in asked)
