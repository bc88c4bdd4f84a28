"""Store and load plans: lists of block copies between device blocks and arena slots (case D).

A plan is its list of copies. Its totals are derived from the list and never kept beside it, so that they cannot
disagree with it.

    store   device block blocks[i]  ->  block offsets[i] of arena slot slots[i]
    load    block offsets[i] of arena slot slots[i]  ->  device block blocks[i]

Invariants: no copy names NULL_BLOCK or an absent slot; copies are ordered by chunk, then by offset.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TypeAlias, TypeVar

import numpy as np
import numpy.typing as npt

from stowage.core.geometry import NULL_BLOCK, BoolArray, Group, IntArray, MaskArray, SlabClass
from stowage.core.groups.base import GroupStrategy, expand_masks


@dataclass(frozen=True, slots=True, eq=False)
class CopyPlan:
    """Block copies of one group. The three arrays have one element per copy, int64, and are not written to again."""

    group: int
    blocks: IntArray
    slots: IntArray
    offsets: IntArray

    @property
    def copies(self) -> int:
        """Blocks to copy."""
        return len(self.blocks)

    def addresses(self, slab: SlabClass, block_bytes: int) -> IntArray:
        """Where each copy's block begins in the arena, whose slots of the plan's group are ``slab``."""
        return slab.offset_bytes + (self.slots - slab.first_slot) * slab.slot_bytes + self.offsets * block_bytes

    def bytes(self, group: Group) -> int:
        """Bytes that the copies move; `group` is the group that the plan is for."""
        assert group.index == self.group, (group.index, self.group)
        return self.copies * group.bytes_per_block

    def check(self) -> None:
        """Verify the invariants."""
        assert len(self.blocks) == len(self.slots) == len(self.offsets)
        assert not np.any(self.blocks == NULL_BLOCK), "a plan names a null block"
        assert not np.any(self.slots < 0), "a plan names an absent slot"
        assert not np.any(self.offsets < 0)


@dataclass(frozen=True, slots=True, eq=False)
class Incomplete:
    """There is no plan to resume at a boundary: these chunks (indices, ascending) lack a block that it needs."""

    chunks: IntArray


_Scalar = TypeVar("_Scalar", bound=np.generic)
ChunkSlots: TypeAlias = "IntArray | Mapping[int, int]"


def store_plan(group: Group, chunks: IntArray, masks: MaskArray, slots: IntArray, block_table: IntArray) -> CopyPlan:
    """The copies that store the valid blocks of `chunks` into `slots`; a slot of -1 means: do not store that chunk.

    `chunks` and `masks` are what `GroupStrategy.storable` said of this block table. A mask that claims a block which
    the table does not hold is a bug.
    """
    assert len(chunks) == len(masks) == len(slots), (len(chunks), len(masks), len(slots))
    valid = expand_masks(masks, group.blocks_per_chunk).reshape(len(chunks), group.blocks_per_chunk)
    rows, offsets = np.nonzero(valid & (slots >= 0)[:, np.newaxis])
    plan = CopyPlan(group.index, block_table[chunks[rows] * group.blocks_per_chunk + offsets], slots[rows], offsets)
    plan.check()
    return plan


def load_plan(
    strategy: GroupStrategy,
    boundary: int,
    chunk_slots: ChunkSlots,
    masks: MaskArray,
    block_table: IntArray,
    already: BoolArray,
) -> CopyPlan | Incomplete:
    """The copies of all that a group lacks on the device to resume at `boundary`, possibly none, or the chunks that
    forbid it.

    `chunk_slots` names the arena slot of each chunk, as an array from chunk 0 on or as a mapping; -1, or missing:
    absent. `masks[i]` are the valid blocks of chunk i. `already[b]`: the sequence's block b is valid on the device and
    is not copied. Arrays may end early: what is beyond them is absent. `block_table` must hold a block for every copy.
    """
    per_chunk = strategy.group.blocks_per_chunk
    needed = strategy.needed_blocks(boundary)
    wanted = np.arange(needed.start, needed.stop, dtype=np.int64)
    wanted = wanted[~_padded(already, needed.stop, False)[wanted]]
    chunks, offsets = np.divmod(wanted, per_chunk)
    chunk_count = strategy.needed(boundary).stop
    slots = _slots_array(chunk_slots, chunk_count)[chunks]
    valid = expand_masks(_padded(masks, chunk_count, 0), per_chunk)[wanted]
    absent = ~valid | (slots < 0)
    if absent.any():
        return Incomplete(np.unique(chunks[absent]))
    plan = CopyPlan(strategy.group.index, block_table[wanted], slots, offsets)
    plan.check()
    return plan


def _slots_array(chunk_slots: ChunkSlots, chunk_count: int) -> IntArray:
    if isinstance(chunk_slots, np.ndarray):
        return _padded(chunk_slots, chunk_count, -1)
    return np.array([chunk_slots.get(chunk, -1) for chunk in range(chunk_count)], dtype=np.int64)


def _padded(values: npt.NDArray[_Scalar], length: int, fill: int) -> npt.NDArray[_Scalar]:
    """The first `length` values, filled up where there are fewer."""
    padded = np.full(length, fill, dtype=values.dtype)
    kept = values[:length]
    padded[: len(kept)] = kept
    return padded
