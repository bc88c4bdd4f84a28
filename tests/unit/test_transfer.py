"""Copies between device rows and arena slots: exactly the planned bytes move, and nothing else changes."""

from __future__ import annotations

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from stowage.core.geometry import Geometry, Group, Kind, split_arena
from stowage.core.plan import CopyPlan
from stowage.transfer.cpu import SHARED_BYTES_MIN, CpuTransfer

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


def test_long_runs_and_short_ones_move_whole() -> None:
    """They are copied in two ways."""
    size = SHARED_BYTES_MIN // 4
    slabs = split_arena(Geometry((Group(0, Kind.FULL, 16, PER_CHUNK, size),)), 4 * SHARED_BYTES_MIN)
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
