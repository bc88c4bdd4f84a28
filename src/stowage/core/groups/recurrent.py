"""Recurrent state (Mamba, linear attention): a resume needs the one snapshot taken exactly at the boundary.

A group with `spared_tokens` holds the first part of an attention block for boundaries inside that block, like a state.
At multiples of `spared_tokens`, the block ends, a resume needs none.

chunk    |    0    |    1    |    2    |       chunk i = the state after exactly (i + 1) * block_tokens tokens
taken              *                   *       presence is sparse: snapshots are large, and taken at a few boundaries
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from stowage.core.geometry import BoolArray, MaskArray
from stowage.core.groups.base import GroupStrategy, expand_masks


def snapshot_spacing(wanted_tokens: int, grid: int) -> int:
    """The distance between snapshots: `wanted_tokens` rounded down to a multiple of `grid`, but at least `grid`."""
    return max(grid, wanted_tokens // grid * grid)


@dataclass(frozen=True, slots=True)
class Recurrent(GroupStrategy):
    """One snapshot per chunk, of one block: `block_table[i]` is that after (i + 1) * block_tokens tokens."""

    def needed_blocks(self, boundary: int) -> range:
        self._check_boundary(boundary)
        snapshots = boundary // self.group.block_tokens
        if self.group.spared_tokens and boundary % self.group.spared_tokens == 0:
            return range(snapshots, snapshots)
        return range(max(snapshots - 1, 0), snapshots)

    def resume_points(self, masks: MaskArray, limit: int, step: int) -> BoolArray:
        snapshots = self._boundaries(limit, step) // self.group.block_tokens
        # taken[n]: is there a state after n blocks of tokens? The empty state, n = 0, always is.
        taken = np.zeros(int(snapshots[-1]) + 1, dtype=np.bool_)
        present = expand_masks(masks, 1)[: len(taken) - 1]
        taken[0] = True
        taken[1 : len(present) + 1] = present
        if self.group.spared_tokens:
            taken[:: self.group.spared_tokens // self.group.block_tokens] = True
        return taken[snapshots]

    def first_live_block(self, position: int) -> int:
        """Always 0: snapshots do not expire with the position; their owner decides when to drop them."""
        return 0
