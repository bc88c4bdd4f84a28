"""Least recently used, exactly, at a few array operations per batch.

    ring      [ 7 3 9 3 5 7 . . . . ]     every use appends the slot; nothing is ever moved
    position    0 1 2 3 4 5
              head ^         ^ tail
    stamp     7 -> 5   3 -> 3   9 -> 2   5 -> 4        where a slot was appended last, -1 = not evictable

An entry is live if and only if its slot's stamp is its own position (here positions 2, 3, 4 and 5). Victims are the
first live entries from `head`. When the ring is full its live entries move to the front: the ring has twice as many
entries as there are slots, so that happens at most once per as many uses as there are slots: O(1) per use.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from stowage.core.geometry import BoolArray, IntArray

_WINDOW_MIN = 64
"""Ring entries looked at together, at least: fewer would make a step of `victims` cost more than it saves."""


class LRU:
    """Exact least-recently-used order over slots 0 .. `slots` - 1. See `Policy` for what the methods promise."""

    __slots__ = ("_head", "_positions", "_ring", "_stamp", "_tail")

    def __init__(self, slots: int, capacity: int | None = None) -> None:
        """`capacity`: how many of the slots it can ever hold; it needs nothing of that."""
        assert slots >= 0
        entries = 2 * slots + _WINDOW_MIN
        self._ring: IntArray = np.zeros(entries, np.int64)
        self._positions: IntArray = np.arange(entries, dtype=np.int64)
        self._stamp: IntArray = np.full(slots, -1, np.int64)
        self._head = 0
        self._tail = 0

    def admit(self, slots: IntArray, keys: list[bytes], parents: IntArray) -> None:
        """New chunks are the most recently used, the last one most of all."""
        self.insert(slots)

    def insert(self, slots: IntArray, used: bool = True) -> None:
        """Make the slots the most recently used, the last one most of all. Of a repeated slot the last entry counts."""
        end = self._tail + len(slots)
        if end > len(self._ring):
            self._compact(len(slots))
            end = self._tail + len(slots)
        self._ring[self._tail : end] = slots
        self._stamp[slots] = self._positions[self._tail : end]
        self._tail = end

    def remove(self, slots: IntArray) -> None:
        """Take the slots out of the order."""
        self._stamp[slots] = -1

    def holds(self, slots: IntArray) -> BoolArray:
        """Which of the slots are in the order."""
        there: BoolArray = self._stamp.take(slots) >= 0
        return there

    def victims(self, count: int) -> IntArray:
        """Take out and return the `count` least recently used slots, oldest first, or all there are."""
        taken = [self._take(count)]
        missing = count - len(taken[0])
        while missing > 0 and self._head < self._tail:
            taken.append(self._take(missing))
            missing -= len(taken[-1])
        return taken[0] if len(taken) == 1 else np.concatenate(taken)

    def __len__(self) -> int:
        return int(np.count_nonzero(self._stamp >= 0))

    def __iter__(self) -> Iterator[int]:
        """The slots from the least to the most recently used."""
        return iter(self._live().tolist())

    def check(self) -> None:
        """Assert that the ring's live entries are exactly the stamped slots."""
        assert 0 <= self._head <= self._tail <= len(self._ring) == len(self._positions)
        live = self._live()
        assert len(live) == len(self), "a stamped slot has no live entry in the ring"
        assert len(np.unique(live)) == len(live), "a slot is live twice"

    def _live(self) -> IntArray:
        window = self._ring[self._head : self._tail]
        live: IntArray = window[self._stamp[window] == self._positions[self._head : self._tail]]
        return live

    def _take(self, count: int) -> IntArray:
        """Take up to `count` victims from the next stretch of the ring."""
        end = min(self._head + max(2 * count, _WINDOW_MIN), self._tail)
        window = self._ring[self._head : end]
        live = (self._stamp[window] == self._positions[self._head : end]).nonzero()[0][:count]
        taken: IntArray = window[live]
        # Entries before the last one taken are dead now; the stretch is used up unless it held more than was asked for.
        self._head = self._head + int(live[-1]) + 1 if 0 < len(live) == count else end if count else self._head
        self._stamp[taken] = -1
        return taken

    def _compact(self, room: int) -> None:
        """Move the live entries to the front; afterwards at least `room` entries are left."""
        live = self._live()
        entries = len(live) + room
        if entries > len(self._ring):
            self._ring = np.zeros(2 * entries, np.int64)
            self._positions = np.arange(2 * entries, dtype=np.int64)
        self._ring[: len(live)] = live
        self._stamp[live] = self._positions[: len(live)]
        self._head, self._tail = 0, len(live)
