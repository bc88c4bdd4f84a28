"""Plans on examples: a chunk at the window's edge (case D), absent chunks, and blocks already on the device."""

from __future__ import annotations

import numpy as np
import pytest

from stowage.core.copy_plan import CopyPlan, Incomplete, load_plan, store_plan
from stowage.core.geometry import NULL_BLOCK, Group, IntArray, Kind, MaskArray
from stowage.core.groups import strategy

WINDOWED = Group(3, Kind.SLIDING, 4, 3, 100, window=7)
NOTHING = np.zeros(0, dtype=np.bool_)


def ints(*values: int) -> IntArray:
    return np.array(values, dtype=np.int64)


def masks(*values: int) -> MaskArray:
    return np.array(values, dtype=np.uint64)


def copies(plan: CopyPlan) -> list[tuple[int, int, int]]:
    return list(zip(plan.blocks.tolist(), plan.slots.tolist(), plan.offsets.tolist(), strict=True))


def test_case_d_freed_leading_blocks_are_neither_copied_nor_counted() -> None:
    table = ints(NULL_BLOCK, NULL_BLOCK, 9, 4, 5, 6, 7)
    chunks, valid = strategy(WINDOWED).storable(26, 0, table)
    plan = store_plan(WINDOWED, chunks, valid, ints(20, 10), table)
    assert copies(plan) == [(9, 20, 2), (4, 10, 0), (5, 10, 1), (6, 10, 2)]
    assert (plan.group, plan.copies, plan.bytes(WINDOWED)) == (3, 4, 400)


def test_chunks_without_a_slot_are_left_out() -> None:
    table = ints(1, 2, 3, 4, 5, 6)
    plan = store_plan(WINDOWED, ints(0, 1), masks(0b111, 0b111), ints(-1, 8), table)
    assert copies(plan) == [(4, 8, 0), (5, 8, 1), (6, 8, 2)]
    none = store_plan(WINDOWED, ints(), masks(), ints(), table)
    assert (none.copies, none.bytes(WINDOWED)) == (0, 0)


def test_a_mask_that_claims_a_null_block_is_a_bug() -> None:
    with pytest.raises(AssertionError, match="null block"):
        store_plan(WINDOWED, ints(0), masks(0b111), ints(5), ints(1, NULL_BLOCK, 3))


def test_a_load_copies_only_what_the_boundary_needs() -> None:
    """Window 7: a resume at 20 reads tokens 14..19, blocks 3 and 4, the first two of chunk 1."""
    table = ints(NULL_BLOCK, NULL_BLOCK, NULL_BLOCK, 40, 41, 42)
    plan = load_plan(strategy(WINDOWED), 20, ints(-1, 8), masks(0, 0b011), table, NOTHING)
    assert isinstance(plan, CopyPlan)
    assert copies(plan) == [(40, 8, 0), (41, 8, 1)]


def test_blocks_already_on_the_device_are_not_copied_nor_looked_for() -> None:
    table = ints(NULL_BLOCK, NULL_BLOCK, NULL_BLOCK, 40, 41)
    already = np.array([False, False, False, True, False])
    plan = load_plan(strategy(WINDOWED), 20, {1: 8}, masks(0, 0b010), table, already)
    assert isinstance(plan, CopyPlan)
    assert copies(plan) == [(41, 8, 1)]
    already[4] = True
    nothing = load_plan(strategy(WINDOWED), 20, {}, masks(), table, already)
    assert isinstance(nothing, CopyPlan)
    assert nothing.copies == 0


@pytest.mark.parametrize(
    ("slots", "valid", "missing"),
    [
        (ints(4, 8), masks(0b111, 0b010), [1]),  # block 3 was not valid when it was stored
        (ints(4, -1), masks(0b111, 0b111), [1]),
        (ints(4), masks(0b111, 0b111), [1]),
        (ints(4, 8), masks(0b111), [1]),
        (ints(4, 8), masks(0b011, 0b111), [0]),  # block 2, of the chunk before
        (ints(), masks(), [0, 1]),
    ],
)
def test_an_absent_block_makes_the_load_incomplete(slots: IntArray, valid: MaskArray, missing: list[int]) -> None:
    """Window 10: a resume at 20 reads tokens 11..19, blocks 2, 3 and 4."""
    wider = Group(0, Kind.SLIDING, 4, 3, 100, window=10)
    plan = load_plan(strategy(wider), 20, slots, valid, np.arange(5), NOTHING)
    assert isinstance(plan, Incomplete)
    assert plan.chunks.tolist() == missing


def test_boundary_zero_needs_nothing() -> None:
    for kind, window, per_chunk in ((Kind.FULL, 0, 2), (Kind.SLIDING, 1, 2), (Kind.RECURRENT, 0, 1)):
        group = Group(0, kind, 16, per_chunk, 1, window)
        plan = load_plan(strategy(group), 0, ints(), masks(), ints(), NOTHING)
        assert isinstance(plan, CopyPlan)
        assert plan.copies == 0


def test_a_snapshot_is_loaded_into_its_block() -> None:
    state = Group(1, Kind.RECURRENT, 528, 1, 1000)
    table = ints(NULL_BLOCK, 3)
    plan = load_plan(strategy(state), 1056, ints(-1, 6), masks(0, 1), table, NOTHING)
    assert isinstance(plan, CopyPlan)
    assert copies(plan) == [(3, 6, 0)]
    absent = load_plan(strategy(state), 528, ints(-1, 6), masks(0, 1), table, NOTHING)
    assert isinstance(absent, Incomplete)


def test_a_load_without_a_block_to_fill_is_a_bug() -> None:
    with pytest.raises(AssertionError, match="null block"):
        load_plan(strategy(WINDOWED), 20, ints(4, 8), masks(7, 7), ints(0, 1, 2, NULL_BLOCK, 4), NOTHING)


def test_the_top_bit_of_a_wide_chunk_is_copied() -> None:
    wide = Group(0, Kind.FULL, 1, 64, 10)
    table = np.arange(100, 164)
    chunks, valid = strategy(wide).storable(64, 0, table)
    plan = store_plan(wide, chunks, valid, ints(2), table)
    assert copies(plan)[-1] == (163, 2, 63)
    loaded = load_plan(strategy(wide), 64, ints(2), valid, table, NOTHING)
    assert isinstance(loaded, CopyPlan)
    assert copies(loaded) == copies(plan)


@pytest.mark.parametrize("as_mapping", [False, True])
def test_what_is_beyond_the_arrays_is_absent(as_mapping: bool) -> None:
    """Window 7: a resume at 20 reads blocks 3 and 4 of chunk 1, whose slot, then whose mask is missing."""
    windowed, table = strategy(WINDOWED), ints(0, 0, 0, 5, 6)
    slots = {0: 7} if as_mapping else ints(7)
    with_slot = {0: 7, 1: 8} if as_mapping else ints(7, 8)
    for known, valid in ((slots, masks(0b111, 0b111)), (with_slot, masks(0b111)), (slots, masks(0b111))):
        plan = load_plan(windowed, 20, known, valid, table, NOTHING)
        assert isinstance(plan, Incomplete) and plan.chunks.tolist() == [1]
    plan = load_plan(windowed, 16, with_slot, masks(0b111), table, NOTHING)
    assert isinstance(plan, Incomplete) and plan.chunks.tolist() == [1], "of which the first block only is needed"
    plan = load_plan(windowed, 20, with_slot, masks(0b111, 0b111), table, NOTHING)
    assert isinstance(plan, CopyPlan) and copies(plan) == [(5, 8, 0), (6, 8, 1)]


def test_the_check_finds_what_no_plan_may_name() -> None:
    CopyPlan(0, ints(1, 2), ints(0, 0), ints(0, 1)).check()
    for blocks, slots, offsets, says in (
        (ints(1, NULL_BLOCK), ints(0, 0), ints(0, 1), "^a plan names a null block$"),
        (ints(1, 2), ints(0, -1), ints(0, 1), "^a plan names an absent slot$"),
        (ints(1, 2), ints(0, 0), ints(0, -1), "^$"),
        (ints(1, 2), ints(0), ints(0, 1), "^$"),
        (ints(1, 2), ints(0, 0), ints(0), "^$"),
    ):
        with pytest.raises(AssertionError, match=says):
            CopyPlan(0, blocks, slots, offsets).check()
