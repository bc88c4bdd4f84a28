"""How much of a prompt need not be computed: the largest boundary that every cache group can serve."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from stowage.core.geometry import MaskArray
from stowage.core.groups.base import GroupStrategy


def longest_boundary(
    strategies: Sequence[GroupStrategy], masks: Sequence[MaskArray], prompt_tokens: int, step: int
) -> int:
    """The largest multiple of `step` that is <= prompt_tokens - 1 and that every group can resume at.

    `masks[g][i]` are the valid blocks of chunk i of strategies[g]; 0 or beyond the end: absent. `step` is a multiple of
    every group's block_tokens (`Geometry.boundary_tokens`). At least the last token of a prompt is left to compute, for
    its logits. Without a common boundary: 0. Linear in the number of chunks.
    """
    assert strategies and len(masks) == len(strategies), (len(masks), len(strategies))
    limit = prompt_tokens - 1
    if limit < step:
        return 0
    servable = strategies[0].resume_points(masks[0], limit, step)
    for strategy, mask in zip(strategies[1:], masks[1:], strict=True):
        servable &= strategy.resume_points(mask, limit, step)
    return int(np.flatnonzero(servable)[-1]) * step
