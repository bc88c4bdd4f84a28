"""Sliding-window attention: a query reads itself and the window - 1 tokens before it.

window 5, a query at p:   . . . [p-4 p-3 p-2 p-1 p]      so a resume at b needs [b - 4, b), and with window 1 nothing
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from stowage.core.geometry import IntArray
from stowage.core.groups.base import Paged


@dataclass(frozen=True, slots=True)
class Sliding(Paged):
    """A query at p reads [max(0, p - (window - 1)), p]."""

    def first_tokens(self, positions: IntArray) -> IntArray:
        return np.maximum(positions - (self.group.window - 1), 0)
