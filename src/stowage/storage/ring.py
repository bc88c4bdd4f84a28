"""Room for pieces of any length, one behind the other, the oldest making way for the newest.

    [ . . gone . . | oldest | ... | newest | free ]          and when the end is reached, from the beginning again:
    [ newest | free | oldest | ... | . . . . . gone ]

Owns positions and their order, not the bytes. Not for several threads at once.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from itertools import pairwise
from typing import Final

__all__ = ["ALIGNED", "Piece", "Ring"]

ALIGNED: Final = 64
"""Pieces begin on a line of the processor's cache."""


@dataclass(slots=True, eq=False)
class Piece:
    """The bytes from `start` on, before `end`."""

    start: int
    end: int

    @property
    def nbytes(self) -> int:
        return self.end - self.start


class Ring:
    """Invariants (`check`): pieces do not overlap, and lie in the order in which they came."""

    def __init__(self, nbytes: int) -> None:
        self.bytes = nbytes
        self._pieces: deque[Piece] = deque()
        self._head = 0

    def take(self, nbytes: int) -> Piece | None:
        """A piece of so many bytes, more than none, behind the newest one. None: the oldest has to go first."""
        assert 0 < nbytes <= self.bytes, "longer than the ring"
        if not self._pieces:
            self._head = 0
        start, tail = self._head, self._pieces[0].start if self._pieces else self.bytes
        if self._pieces and start <= tail:
            if nbytes > tail - start:
                return None
        elif nbytes > self.bytes - start:
            if not self._pieces or nbytes > tail:
                return None
            start = 0
        piece = Piece(start, start + nbytes)
        self._pieces.append(piece)
        self._head = min(self.bytes, _aligned(piece.end))
        return piece

    def shorten(self, piece: Piece, nbytes: int) -> None:
        """The newest piece needs so many bytes only; none: it was not needed."""
        assert piece is self._pieces[-1] and nbytes <= piece.nbytes, "only the newest one can be shortened"
        piece.end = piece.start + nbytes
        self._head = min(self.bytes, _aligned(piece.end))
        if not nbytes:
            self._pieces.pop()

    def drop_oldest(self) -> Piece:
        """The one that is gone now."""
        return self._pieces.popleft()

    def check(self) -> None:
        """Assert the invariants."""
        ends = [(piece.start, piece.end) for piece in self._pieces]
        turns = sum(before[0] >= after[0] for before, after in pairwise(ends))
        assert turns <= 1, "not in their order"
        ordered = sorted(ends)
        assert all(before[1] <= after[0] for before, after in pairwise(ordered)), "they overlap"
        assert all(0 <= start < end <= self.bytes for start, end in ends), "outside of the ring"


def _aligned(position: int) -> int:
    return -(-position // ALIGNED) * ALIGNED
