"""The longest reusable prefix of a prompt: the largest boundary that every cache group can serve.

tokens             0    128   256   384   512
full attention     |#################|              all chunks up to 384
window of 128      |     |###########|              chunks 128 to 384: it can resume at 256 and at 384
recurrent state    |           *                    a snapshot at 256
the answer                     256
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from stowage.core.geometry import Group, Kind, MaskArray
from stowage.core.groups.base import GroupStrategy


def longest_boundary(
    strategies: Sequence[GroupStrategy], masks: Sequence[MaskArray], prompt_tokens: int, step: int
) -> int:
    """The largest multiple of `step` that is <= prompt_tokens - 1 and that every group can resume at.

    `masks[g][i]` are the valid blocks of chunk i of strategies[g]; 0 or beyond the end: absent. `step` is a multiple of
    every group's (`Geometry.boundary_tokens`). At least the last token of a prompt is left to compute, for its logits.
    Without a common boundary: 0. Linear in the number of chunks.
    """
    assert strategies and len(masks) == len(strategies), (len(masks), len(strategies))
    limit = prompt_tokens - 1
    for strategy, mask in zip(strategies, masks, strict=True):
        if strategy.group.kind is Kind.FULL:  # can resume anywhere up to its first gap, which bounds the others' search
            group = strategy.group  # also inside the block after that: its first tokens may be in a group of their own
            limit = min(limit, (_leading_blocks(group, mask) + 1) * group.block_tokens - group.boundary_tokens)
    others = [pair for pair in zip(strategies, masks, strict=True) if pair[0].group.kind is not Kind.FULL]
    if limit < step or not others:
        return max(0, limit // step * step)
    servable = np.logical_and.reduce([strategy.resume_points(mask, limit, step) for strategy, mask in others])
    return int(np.flatnonzero(servable)[-1]) * step


def _leading_blocks(group: Group, masks: MaskArray) -> int:
    """How many blocks are valid before the first that is not."""
    full = group.full_mask
    short = ((masks & np.uint64(full)) != full).nonzero()[0]
    if not len(short):
        return len(masks) * group.blocks_per_chunk
    first = int(short[0])
    gap = ~int(masks[first]) & full
    return first * group.blocks_per_chunk + (gap & -gap).bit_length() - 1
