"""Plans moved by a simulated device and arena: totals agree, null blocks are never read, load∘store is the identity."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from hypothesis import example, given
from hypothesis import strategies as st

from stowage.core.copy_plan import CopyPlan, Incomplete, load_plan, store_plan
from stowage.core.geometry import NULL_BLOCK, Group, IntArray, Kind, MaskArray
from stowage.core.groups import strategy
from tests.property.cache_groups import groups

WIPED = -999


@dataclass
class Machine:
    """A device of blocks and an arena of slots, each block being one number. Copies refuse what is not there."""

    device: IntArray
    arena: IntArray

    def store(self, plan: CopyPlan) -> None:
        for block, slot, offset in moves(plan):
            assert block != NULL_BLOCK, "a null block is read"
            assert self.device[block] != WIPED
            assert self.arena[slot, offset] == WIPED, "a block is stored twice"
            self.arena[slot, offset] = self.device[block]

    def load(self, plan: CopyPlan) -> None:
        for block, slot, offset in moves(plan):
            assert block != NULL_BLOCK, "a null block is written"
            assert self.arena[slot, offset] != WIPED, "bytes are loaded that nobody stored"
            assert self.device[block] == WIPED, "a block is loaded twice"
            self.device[block] = self.arena[slot, offset]


def moves(plan: CopyPlan) -> list[tuple[int, int, int]]:
    moved = list(zip(plan.blocks.tolist(), plan.slots.tolist(), plan.offsets.tolist(), strict=True))
    assert all(block >= 0 and slot >= 0 and offset >= 0 for block, slot, offset in moved)
    return moved


def check_totals(plan: CopyPlan, group: Group) -> None:
    """Case D: sums over chunks equal the copies, however the totals are come by."""
    plan.check()
    per_slot = [moves(plan).count(move) for move in set(moves(plan))]
    assert per_slot == [1] * plan.copies, "a copy is listed twice"
    counts = {slot: plan.slots.tolist().count(slot) for slot in plan.slots.tolist()}
    assert sum(counts.values()) == plan.copies == len(plan.blocks) == len(plan.slots) == len(plan.offsets)
    assert plan.bytes(group) == plan.copies * group.bytes_per_block
    assert all(count <= group.blocks_per_chunk for count in counts.values())
    assert all(array.dtype == np.int64 for array in (plan.blocks, plan.slots, plan.offsets))


@st.composite
def block_tables(draw: st.DrawFn, group: Group, blocks: int, first_live: int) -> IntArray:
    """Distinct device blocks in any order; blocks that no query sees are freed, and a few others are gone too."""
    table = np.array(draw(st.permutations(range(blocks + 3))), dtype=np.int64)[:blocks]
    if draw(st.booleans()):
        table[:first_live] = NULL_BLOCK
    if group.kind is Kind.RECURRENT or draw(st.integers(0, 3)) == 0:
        table[draw(st.lists(st.integers(0, max(blocks - 1, 0)), max_size=3 if blocks else 0))] = NULL_BLOCK
    return table


@given(st.data(), groups(), st.integers(0, 90))
@example(
    data=None, group=Group(0, Kind.SLIDING, 2, 4, 8, window=7), progress=33
)  # case D: the window's edge in a chunk
@example(data=None, group=Group(0, Kind.FULL, 1, 64, 8), progress=70)
def test_load_after_store_is_the_identity_on_valid_blocks(
    data: st.DataObject | None, group: Group, progress: int
) -> None:
    kind, per_chunk = strategy(group), group.blocks_per_chunk
    blocks = -(-progress // group.block_tokens)
    first_live = kind.first_live_block(progress)
    if data is None:
        table = np.where(np.arange(blocks) < first_live, NULL_BLOCK, np.arange(blocks)[::-1])
    else:
        table = data.draw(block_tables(group, blocks, first_live))
    machine = Machine(np.full(blocks + 4, WIPED), np.full((blocks + 1, per_chunk), WIPED))
    content = np.arange(blocks) + 1000
    machine.device[table[table != NULL_BLOCK]] = content[table != NULL_BLOCK]

    first_chunk = 0 if data is None else data.draw(st.integers(0, 2))
    chunks, masks = kind.storable(progress, first_chunk, table)
    slots = np.arange(len(chunks))[::-1].copy()
    if data is not None and len(slots) and data.draw(st.booleans()):
        slots[data.draw(st.lists(st.integers(0, len(slots) - 1), max_size=2))] = -1
    plan = store_plan(group, chunks, masks, slots, table)
    check_totals(plan, group)
    assert plan.copies == sum(int(mask).bit_count() for mask, slot in zip(masks, slots, strict=True) if slot >= 0)
    machine.store(plan)
    machine.device[:] = WIPED

    known_slots, known_masks = by_chunk(chunks, masks, slots, progress // group.chunk_tokens)
    stored = {chunk * per_chunk + bit for chunk, mask in enumerate(known_masks.tolist()) for bit in range(per_chunk)
              if mask >> bit & 1 and known_slots[chunk] >= 0}  # fmt: skip
    new_table = np.arange(blocks)[::-1] + 2
    for boundary in range(0, progress + 1, group.block_tokens):
        machine.device[:] = WIPED
        already = np.zeros(blocks, dtype=np.bool_)
        if data is not None and blocks:
            already[data.draw(st.lists(st.integers(0, blocks - 1), max_size=2))] = True
        machine.device[new_table[already]] = content[already]
        given_slots = known_slots if boundary % 2 else dict(enumerate(known_slots.tolist()))
        loaded = load_plan(kind, boundary, given_slots, known_masks, new_table, already)
        needed = set(kind.needed_blocks(boundary))
        missing = needed - stored - set(np.flatnonzero(already).tolist())
        if missing:
            assert isinstance(loaded, Incomplete)
            assert loaded.chunks.tolist() == sorted({block // per_chunk for block in missing})
            continue
        assert isinstance(loaded, CopyPlan)
        check_totals(loaded, group)
        machine.load(loaded)
        for block in needed:
            assert machine.device[new_table[block]] == content[block]
        assert loaded.copies == len(needed - set(np.flatnonzero(already).tolist()))


def by_chunk(chunks: IntArray, masks: MaskArray, slots: IntArray, count: int) -> tuple[IntArray, MaskArray]:
    """What the store would answer of chunks 0 to count - 1."""
    known_slots, known_masks = np.full(count, -1, dtype=np.int64), np.zeros(count, dtype=np.uint64)
    known_slots[chunks], known_masks[chunks] = slots, masks
    return known_slots, known_masks
