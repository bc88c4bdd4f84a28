"""Chunked-local attention: a query reads the tokens of its own attention chunk up to itself.

attention chunk 4:   [0 1 2 3][4 5 6 7][8 ...    a query at 6 reads 4, 5, 6; a resume at 8 needs nothing
"""

from __future__ import annotations

from dataclasses import dataclass

from stowage.core.geometry import IntArray
from stowage.core.groups.base import Paged


@dataclass(frozen=True, slots=True)
class Chunked(Paged):
    """A query at p reads [p // window * window, p], with the window being the attention chunk's size."""

    def first_tokens(self, positions: IntArray) -> IntArray:
        return positions // self.group.window * self.group.window
