"""Copies between device rows and arena slots: exactly the planned bytes move, and nothing else changes."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from stowage.core.copy_plan import CopyPlan
from stowage.core.geometry import Geometry, Group, IntArray, Kind, split_arena
from stowage.transfer.cpu import PARALLEL_BYTES_MIN, CpuTransfer, copy_one_by_one, copy_runs
from tests.native import needs_native
from tests.threads import using_threads

BLOCK_BYTES, PER_CHUNK, ROWS = 192, 4, 17


@given(st.data())
def test_load_after_store_is_the_identity(data: st.DataObject) -> None:
    groups = (
        Group(0, Kind.FULL, 16, PER_CHUNK, BLOCK_BYTES),
        Group(1, Kind.SLIDING, 16, PER_CHUNK, 3 * BLOCK_BYTES * 10, window=32),
    )
    slabs = split_arena(Geometry(groups), 1 << 20)
    slab = next(slab for slab in slabs if 0 in slab.groups)
    arena = np.full(max(s.end_bytes for s in slabs), 7, dtype=np.uint8)
    transfer = CpuTransfer(arena, slabs)
    rows = data.draw(st.lists(st.integers(1, ROWS - 1), unique=True, min_size=1))
    places = data.draw(
        st.lists(
            st.tuples(st.integers(slab.first_slot, slab.first_slot + 3), st.integers(0, PER_CHUNK - 1)),
            unique=True,
            min_size=len(rows),
            max_size=len(rows),
        ).filter(lambda found: len(found) == len(rows))
        if len(rows) <= 16
        else st.nothing()
    )
    slots, offsets = (np.array(part, dtype=np.int64) for part in zip(*places, strict=True))
    plan = CopyPlan(0, np.array(rows, dtype=np.int64), slots, offsets)
    device = torch.randint(0, 256, (ROWS, BLOCK_BYTES), dtype=torch.uint8)
    before = device.clone()
    transfer.store(plan, device)
    for row, slot, offset in zip(rows, slots.tolist(), offsets.tolist(), strict=True):
        begin = slab.slot_offset_bytes(slot) + offset * BLOCK_BYTES
        assert bytes(arena[begin : begin + BLOCK_BYTES]) == bytes(before[row].numpy())
    assert int((arena != 7).sum()) <= len(rows) * BLOCK_BYTES
    device[rows] = 0
    untouched = [row for row in range(ROWS) if row not in rows]
    device[untouched] = 99
    transfer.load(plan, device)
    assert torch.equal(device[rows], before[rows])
    assert bool((device[untouched] == 99).all())


@pytest.mark.parametrize("pure", ["0", "1"])
def test_long_runs_and_short_ones_move_whole(monkeypatch: pytest.MonkeyPatch, pure: str) -> None:
    """In Python they are copied in two ways; in C by several threads."""
    monkeypatch.setenv("STOWAGE_PURE_PYTHON", pure)
    size = PARALLEL_BYTES_MIN // 4
    slabs = split_arena(Geometry((Group(0, Kind.FULL, 16, PER_CHUNK, size),)), 4 * PARALLEL_BYTES_MIN)
    arena = np.zeros(slabs[0].end_bytes, dtype=np.uint8)
    transfer = CpuTransfer(arena, slabs)
    rows = np.array([1, 2, 3, 4, 5, 6, 7, 8, 11, 9], dtype=np.int64)  # of eight and of one
    chunks = slabs[0].first_slot + np.arange(10) // PER_CHUNK
    plan = CopyPlan(0, rows, chunks, np.arange(10) % PER_CHUNK)
    device = torch.randint(1, 256, (13, size), dtype=torch.uint8)
    before = device.clone()
    transfer.store(plan, device)
    assert np.array_equal(arena[: 10 * size].reshape(10, size), before[rows].numpy()) and not arena[10 * size :].any()
    device[:] = 0
    transfer.load(plan, device)
    assert torch.equal(device[rows], before[rows]) and not device[[0, 10, 12]].any()


def columns(*runs: tuple[int, int, int]) -> list[IntArray]:
    return [np.array(column, np.int64) for column in zip(*runs, strict=True)]


def memory(array: NDArray[np.uint8]) -> tuple[int, int]:
    return array.ctypes.data, array.nbytes


@needs_native
def test_there_is_a_kernel_and_it_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("stowage.transfer.cpu.copy_one_by_one", None)
    source, target = np.arange(8, dtype=np.uint8), np.zeros(8, np.uint8)
    copy_runs(memory(source), memory(target), *columns((2, 5, 3)))
    assert target.tolist() == [0, 0, 0, 0, 0, 2, 3, 4]


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_threads_copy_what_one_by_one_copies(data: st.DataObject) -> None:
    """Up to 24 MiB in runs of very different lengths: pieces end within runs, and hold many."""
    rng = np.random.default_rng(data.draw(st.integers(0, 99)))
    longest = data.draw(st.sampled_from([1, 700, 64 << 10, 3 << 20]))
    count = data.draw(st.integers(0, min(2000, (24 << 20) // longest)))
    lengths = rng.integers(0, longest + 1, count)
    begins = np.append(0, lengths.cumsum())[:-1]
    order = rng.permutation(count)
    places = np.empty(count, np.int64)
    places[order] = np.append(0, (lengths[order] + 1).cumsum())[:-1]  # a byte between any two stays as it is
    source = rng.integers(1, 255, int(lengths.sum()) + 1, dtype=np.uint8)
    found, expected = (np.zeros(int(lengths.sum()) + count + 1, np.uint8) for _ in range(2))
    with using_threads(data.draw(st.sampled_from([1, 2, 7]))):
        copy_runs(memory(source), memory(found), begins, places, lengths)
    copy_one_by_one(memory(source), memory(expected), begins, places, lengths)
    assert np.array_equal(found, expected)


@pytest.mark.parametrize("copy", [copy_runs, copy_one_by_one])
@pytest.mark.parametrize("run", [(-1, 0, 1), (0, -1, 1), (0, 0, -1), (8, 0, 1), (0, 6, 3), (0, 0, 9), (9, 9, 0)])
def test_nothing_is_copied_from_or_to_beside_the_memory(copy: Callable[..., None], run: tuple[int, int, int]) -> None:
    source, target = np.ones(8, np.uint8), np.zeros(8, np.uint8)
    with pytest.raises(ValueError, match="do not lie in their memory"):
        copy(memory(source), memory(target), *columns((0, 0, 4), run))
    assert not target.any()
    copy(memory(source), memory(target), *columns((8, 8, 0)))
