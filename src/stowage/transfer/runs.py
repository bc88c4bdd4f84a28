"""Merges a plan's copies into runs: neighbouring blocks that are contiguous on both sides."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from stowage.core.copy_plan import CopyPlan
from stowage.core.geometry import IntArray, SlabClass

BlockRun = tuple[int, int, int]


def runs(plan: CopyPlan, slab: SlabClass, block_bytes: int) -> Iterator[BlockRun]:
    """``(first block, its byte offset in the arena, number of blocks)`` of each run."""
    return zip(*(column.tolist() for column in columns_of_runs(plan, slab, block_bytes)), strict=True)


def columns_of_runs(plan: CopyPlan, slab: SlabClass, block_bytes: int) -> tuple[IntArray, IntArray, IntArray]:
    """As ``runs``, as three arrays."""
    offsets = plan.addresses(slab, block_bytes)
    breaks = np.flatnonzero((np.diff(plan.blocks) != 1) | (np.diff(offsets) != block_bytes)) + 1
    begins = np.concatenate([[0], breaks]) if plan.copies else breaks
    ends = np.append(begins[1:], plan.copies)
    return plan.blocks[begins], offsets[begins], ends - begins
