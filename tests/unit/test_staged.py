"""Staged transfers: the bytes that a plain copy moves, in order, within bounds; what a failure leaves."""

from __future__ import annotations

from unittest.mock import patch

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from stowage.core.copy_plan import CopyPlan
from stowage.core.geometry import Geometry, Group, Kind, split_arena
from stowage.errors import TransferError
from stowage.transfer import staged
from stowage.transfer.cpu import CpuTransfer
from stowage.transfer.staged import StagedTransfer, SynchronousCopies
from tests.late_copies import RUBBISH, LateCopies

BLOCK_BYTES, PER_CHUNK, ROWS = 192, 4, 17
GROUPS = (
    Group(0, Kind.FULL, 16, PER_CHUNK, BLOCK_BYTES),
    Group(1, Kind.SLIDING, 16, PER_CHUNK, 3 * BLOCK_BYTES * 10, window=32),
)
SLABS = split_arena(Geometry(GROUPS), 1 << 20)


def arena_of() -> np.ndarray:
    return np.full(max(slab.end_bytes for slab in SLABS), 7, dtype=np.uint8)


def plan_of(rows: list[int], places: list[tuple[int, int]]) -> CopyPlan:
    first = next(slab for slab in SLABS if 0 in slab.groups).first_slot
    slots, offsets = (np.array(part, dtype=np.int64) for part in zip(*places, strict=True))
    return CopyPlan(0, np.array(rows, dtype=np.int64), first + slots, offsets)


@given(
    st.permutations(range(1, ROWS)),
    st.permutations([(slot, offset) for slot in range(4) for offset in range(PER_CHUNK)]),
    st.integers(1, ROWS - 1),
    st.sampled_from([1, BLOCK_BYTES, 3 * BLOCK_BYTES, 1 << 20]),
    st.booleans(),
)
def test_the_bytes_of_a_plain_copy(
    rows: list[int], places: list[tuple[int, int]], count: int, staging_bytes: int, in_order: bool
) -> None:
    places = sorted(places[:count]) if in_order else places[:count]
    plan = plan_of(rows[:count], places)
    device = torch.randint(0, 256, (ROWS, BLOCK_BYTES), dtype=torch.uint8)
    expected, arena = arena_of(), arena_of()
    CpuTransfer(expected, SLABS).store(plan, device)
    transfer, loaded = StagedTransfer(arena, SLABS, SynchronousCopies(device.device)), torch.full_like(device, 99)
    with patch.object(staged, "STAGING_BYTES", staging_bytes):
        assert transfer.store(plan, device) is None and transfer.load(plan, loaded) is None
    assert np.array_equal(arena, expected)
    assert torch.equal(loaded[rows[:count]], device[rows[:count]])
    assert bool((loaded[[0, *rows[count:]]] == 99).all())


def test_blocks_of_a_slot_cross_over_as_one() -> None:
    class Counting(SynchronousCopies):
        crossed: list[int] = []  # noqa: RUF012 - of this one test

        def to_host(self, staging, host, runs):  # type: ignore[no-untyped-def]
            self.crossed.append(len(runs))
            return super().to_host(staging, host, runs)

    transfer = StagedTransfer(arena_of(), SLABS, Counting(torch.device("cpu")))
    places = [(slot, offset) for slot in range(3) for offset in range(PER_CHUNK)]
    device = torch.zeros((ROWS, BLOCK_BYTES), dtype=torch.uint8)
    transfer.store(plan_of([9, 3, 1, 12, 4, 5, 6, 2, 16, 15, 10, 11], places), device)
    assert Counting.crossed == [3], "slots are larger than what four blocks take"


def test_blocks_may_be_reused_at_once_and_slots_may_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(staged, "STAGING_BYTES", BLOCK_BYTES)
    device = torch.randint(0, 256, (ROWS, BLOCK_BYTES), dtype=torch.uint8)
    before, arena, copies = device.clone(), arena_of(), LateCopies(patience=9)
    transfer = StagedTransfer(arena, SLABS, copies)
    plan = plan_of([3, 1, 2], [(0, 0), (0, 1), (1, 3)])
    ticket = transfer.store(plan, device)
    device.zero_()
    assert ticket is not None and not ticket.done and int((arena == RUBBISH).sum()) >= 3 * BLOCK_BYTES
    ticket.wait()
    assert ticket.done
    back = torch.zeros_like(device)
    second = transfer.load(plan, back)
    assert torch.equal(back[[3, 1, 2]], before[[3, 1, 2]]) and second is not None and not copies.violations
    transfer.close()
    assert not copies.coming.open, "closing waits for what is being read"


def test_staging_buffers_in_flight_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(staged, "IN_FLIGHT_BYTES_MAX", 4 * BLOCK_BYTES)
    monkeypatch.setattr(staged, "STAGING_BYTES", BLOCK_BYTES)
    copies = LateCopies(patience=1 << 30)
    transfer = StagedTransfer(arena_of(), SLABS, copies)
    device = torch.zeros((ROWS, BLOCK_BYTES), dtype=torch.uint8)
    for slot in range(4):
        transfer.store(plan_of([1, 2, 3, 4], [(slot, offset) for offset in range(PER_CHUNK)]), device)
    assert copies.begun == 16 and copies.most_bytes == 4 * BLOCK_BYTES


@pytest.mark.parametrize("method", ["gather", "to_host", "to_device", "scatter"])
def test_an_error_of_the_device_leaves_nothing_under_way(method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(staged, "STAGING_BYTES", BLOCK_BYTES)
    copies = LateCopies(patience=1 << 30)
    transfer = StagedTransfer(arena_of(), SLABS, copies)
    device = torch.zeros((ROWS, BLOCK_BYTES), dtype=torch.uint8)
    plan = plan_of([1, 2, 3], [(0, 0), (0, 1), (0, 2)])
    real, calls = getattr(copies, method), []

    def breaks(*args):  # type: ignore[no-untyped-def]
        calls.append(args)
        if len(calls) == 3:
            raise RuntimeError("the device is lost")
        return real(*args)

    monkeypatch.setattr(copies, method, breaks)
    begin = transfer.store if method in ("gather", "to_host") else transfer.load
    with pytest.raises(TransferError, match="the device is lost"):
        begin(plan, device)
    assert len(calls) == 3 and not copies.leaving.open
    assert not copies.coming.open, "slots are read although the load has failed"


def test_a_copy_that_fails_on_its_way_fails_whoever_waits() -> None:
    copies = LateCopies(failing=[1])
    transfer = StagedTransfer(arena_of(), SLABS, copies)
    device = torch.zeros((ROWS, BLOCK_BYTES), dtype=torch.uint8)
    tickets = [transfer.store(plan_of([1], [(slot, 0)]), device) for slot in range(3)]
    tickets[0].wait()
    with pytest.raises(TransferError):
        tickets[1].wait()
    tickets[2].wait()
