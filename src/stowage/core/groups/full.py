"""Full attention, MLA included: a query reads every token before it; a resume needs all chunks before the boundary."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from stowage.core.geometry import IntArray
from stowage.core.groups.base import Paged


@dataclass(frozen=True, slots=True)
class Full(Paged):
    """A query at p reads [0, p]; nothing is ever freed."""

    def first_tokens(self, positions: IntArray) -> IntArray:
        return np.zeros_like(positions)

    def first_live_block(self, position: int) -> int:
        return 0
