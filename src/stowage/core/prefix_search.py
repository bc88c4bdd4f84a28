"""Finds how much of a prompt's prefix a remote store has, with few existence queries.

    keys      0  1  2  3  4  5  6  7  8  9 10 11      in the order of the prompt
    round 1   +        +        -        -     -      evenly spaced keys
    round 2               +  -                        between the last present and the first absent one
    assumed   +  +  +  +  +                           all before the last present one are assumed present

A chunk is stored after those before it, and stores evict the oldest first; where the assumption is wrong, the load
fails for that chunk. Not every position is kept: of recurrent states every `stride`-th snapshot and those at the ends
of prompts, of windows those at certain positions. The search runs over these "anchors", and then asks about all
positions between the last present anchor and the next.

State machine: `ask` says which positions to ask about, `answer` takes the replies. No I/O, no clock.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, NamedTuple

import numpy as np

from stowage.core.geometry import BoolArray, IntArray

_UNKNOWN: Final = -1
_ABSENT: Final = 0
_PRESENT: Final = 1


class Anchors(NamedTuple):
    """Anchors of the search: positions, ascending, each of which is stored before any later one. Without any, all
    positions are asked about, the last first. `behind`: positions before the last present anchor that are asked about
    too, because a window may reach back there.
    """

    positions: tuple[int, ...] = ()
    behind: int = 0


class Search:
    """Over the positions 0 to len(known) - 1. `known`: True, False, or None where nothing is known yet.

    `first`: how many keys of the prompt come before position 0. `widths`: the most positions to ask about in the first
    round, and in each later one; a cold prompt costs the first number. `certain`: the anchors, instead of every
    `stride`-th position.
    """

    __slots__ = ("_anchors", "_answers", "_asked", "_behind", "_widths")

    def __init__(
        self,
        known: Sequence[bool | None],
        *,
        first: int = 0,
        stride: int = 1,
        widths: tuple[int, int] = (8, 48),
        certain: Anchors | None = None,
    ) -> None:
        assert first >= 0 and stride > 0 and min(widths) > 0
        self._answers = np.array([_UNKNOWN if one is None else int(one) for one in known], np.int8)
        self._anchors: IntArray = np.arange((stride - 1 - first) % stride, len(known), stride)
        self._behind = certain.behind if certain is not None else 0
        if certain is not None:
            self._anchors = np.array(certain.positions, np.int64)
        self._widths = widths
        self._asked = 0

    def ask(self) -> list[int]:
        """The positions to ask about now, ascending; all must be answered. Empty: the search is over."""
        width = self._widths[min(self._asked, 1)]
        self._asked += 1
        begin, end = self._reach()
        positions = self._unknown(self._anchors[begin:end])
        if len(positions):
            return _spread(positions, width)
        after = max(0, int(self._anchors[begin - 1]) + 1 - self._behind) if begin else 0
        before = int(self._anchors[end]) if end < len(self._anchors) else len(self._answers)
        newest: list[int] = self._unknown(np.arange(after, before))[-width:].tolist()
        return newest

    def answer(self, positions: Sequence[int], present: Sequence[bool]) -> None:
        """The replies for these positions."""
        self._answers[list(positions)] = present

    def assumed_present(self) -> list[int]:
        """Positions that were not asked about and are assumed present, because a later one is."""
        positions: list[int] = self._unknown(self._anchors[: self._reach()[0]]).tolist()
        return positions

    def assumed_absent(self) -> list[int]:
        """Positions that were not asked about and are assumed absent, because an earlier one is."""
        end = self._reach()[1]
        first = int(self._anchors[end]) if end < len(self._anchors) else len(self._answers)
        positions: list[int] = self._unknown(np.arange(first, len(self._answers))).tolist()
        return positions

    def _reach(self) -> tuple[int, int]:
        """Anchor counts: up to and including the last one known to be present; before the first known to be absent."""
        answers = self._answers[self._anchors]
        absent = np.flatnonzero(answers == _ABSENT)
        end = int(absent[0]) if len(absent) else len(answers)
        present = np.flatnonzero(answers[:end] == _PRESENT)
        return (int(present[-1]) + 1 if len(present) else 0), end

    def _unknown(self, positions: IntArray) -> IntArray:
        unknown: BoolArray = self._answers[positions] == _UNKNOWN
        return positions[unknown]


def _spread(positions: IntArray, count: int) -> list[int]:
    """At most `count` of the positions, evenly spaced, with the first and the last."""
    if len(positions) <= count:
        chosen: list[int] = positions.tolist()
        return chosen
    found: list[int] = positions[np.linspace(0, len(positions) - 1, count).round().astype(np.int64)].tolist()
    return found
