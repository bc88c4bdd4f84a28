"""A circular log: pieces of any length, one behind the other, the oldest making way for the newest.

    [ . . gone . . | oldest | ... | newest | free ]          and when the end is reached, from the beginning again:
    [ newest | free | oldest | ... | . . . . . gone ]

Owns the pieces and their order, not the bytes. Not for several threads at once.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import Generic, TypeVar

from stowage.core.geometry import ALIGNMENT_BYTES, round_up


@dataclass(slots=True, eq=False)
class Piece:
    """The bytes from `start` on, before `end`. Subclasses say what they are."""

    start: int
    end: int

    @property
    def nbytes(self) -> int:
        return self.end - self.start


P = TypeVar("P", bound=Piece)


class CircularLog(Generic[P]):
    """Invariants (`check`): pieces do not overlap, and lie in the order in which they came."""

    def __init__(self, nbytes: int) -> None:
        self.bytes = nbytes
        self._pieces: deque[P] = deque()

    def space(self, nbytes: int) -> int | None:
        """Where so many bytes, more than none, are free behind the newest piece. None: the oldest has to go first."""
        assert 0 < nbytes <= self.bytes, "longer than the log"
        if not self._pieces:
            return 0
        head, tail = round_up(self._pieces[-1].end, ALIGNMENT_BYTES), self._pieces[0].start
        if self._pieces[-1].start < tail:  # it has begun from the beginning again
            return head if nbytes <= tail - head else None
        if nbytes <= self.bytes - head:
            return head
        return 0 if nbytes <= tail else None

    def append(self, piece: P) -> None:
        """The newest piece, at the beginning of the last `space`, and as long at the most."""
        self._pieces.append(piece)

    @property
    def oldest(self) -> P:
        """The one that has to go next."""
        return self._pieces[0]

    def drop_oldest(self) -> None:
        """Its bytes are free."""
        self._pieces.popleft()

    def __iter__(self) -> Iterator[P]:
        """From the oldest on."""
        return iter(self._pieces)

    def check(self) -> None:
        """Assert the invariants."""
        ends = [(piece.start, piece.end) for piece in self._pieces]
        turns = sum(before[0] >= after[0] for before, after in pairwise(ends))
        assert turns <= 1, "not in their order"
        ordered = sorted(ends)
        assert all(before[1] <= after[0] for before, after in pairwise(ordered)), "they overlap"
        assert all(0 <= start < end <= self.bytes for start, end in ends), "outside of the log"
