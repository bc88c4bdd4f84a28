"""ARC: two orders, of what was used once and of what was used again; the memory of both says how to share the slots.

    once   [ least recently used ... ]    leaves first while it holds more than `share` slots
    again  [ least recently used ... ]

After Megiddo and Modha, "ARC: a self-tuning, low overhead replacement cache" (FAST 2003). A key that comes back soon
after it left `once` says that `once` was too short, one that left `again` the opposite: `share` moves by one slot, or
by the ratio of the two memories where that is more. Differences to the paper: pinned slots are in neither order,
chunks come and go in batches, and the memory is the table of `history`, which holds up to a few times as many keys as
there are slots. O(1) per operation.
"""

from __future__ import annotations

from typing import Final

import numpy as np
from numpy.typing import NDArray

from stowage.cache.policy.base import NONE
from stowage.cache.policy.history import History, Prints, fingerprints
from stowage.cache.policy.lru import LRU
from stowage.core.geometry import IntArray

_ONCE, _AGAIN = 0, 1
_OUT: Final = -1


class ARC:
    """The ARC policy. Slots are 0 .. `slots` - 1, of which it holds at most `capacity`."""

    __slots__ = (
        "_capacity",
        "_history",
        "_left",
        "_lengths",
        "_order_of",
        "_orders",
        "_past",
        "_print",
        "_where",
        "share",
    )

    def __init__(self, slots: int, capacity: int | None = None) -> None:
        self._capacity = slots if capacity is None else capacity
        self._orders = (LRU(slots), LRU(slots))
        self._lengths = [0, 0]
        self._where: NDArray[np.int8] = np.full(slots, _OUT, np.int8)
        self._order_of: NDArray[np.int8] = np.zeros(slots, np.int8)
        self._print: Prints = np.zeros(slots, np.uint64)
        self._history = History(self._capacity)
        self._past: NDArray[np.int8] = np.zeros(self._history.capacity, np.int8)
        self._left = [0, 0]
        self.share = 0.0

    def admit(self, slots: IntArray, keys: list[bytes], parents: IntArray) -> None:
        """New chunks were used once, those that are remembered again."""
        self._print[slots] = fingerprints(keys)
        indices = self._history.take(self._print[slots])
        known = indices >= 0
        came = np.bincount(self._past[indices[known]], minlength=2).tolist()
        once, again = max(self._left[_ONCE], 1), max(self._left[_AGAIN], 1)
        self.share = min(self.share + came[_ONCE] * max(1.0, again / once), float(self._capacity))
        self.share = max(self.share - came[_AGAIN] * max(1.0, once / again), 0.0)
        for order in (_ONCE, _AGAIN):
            self._left[order] -= came[order]
        self._order_of[slots] = known
        self.insert(slots, used=False)

    def insert(self, slots: IntArray, used: bool = True) -> None:
        """What is used now was used again."""
        self.remove(slots)
        if used:
            self._order_of[slots] = _AGAIN
        order_of = self._order_of[slots]
        self._where[slots] = order_of
        for order in (_ONCE, _AGAIN):
            mine = slots[order_of == order]
            self._orders[order].insert(mine)
            self._lengths[order] += len(np.unique(mine))

    def remove(self, slots: IntArray) -> None:
        """Not evictable. A slot remembers its order."""
        once = np.unique(slots)
        for order in (_ONCE, _AGAIN):
            mine = once[self._where[once] == order]
            self._orders[order].remove(mine)
            self._lengths[order] -= len(mine)
        self._where[slots] = _OUT

    def victims(self, count: int) -> IntArray:
        """Least recently used of `once` while that has more than its share, then of `again`."""
        excess = self._lengths[_ONCE] - int(self.share)
        first = self._take(_ONCE, min(count, max(0, excess)))
        second = self._take(_AGAIN, count - len(first))
        return np.concatenate((first, second, self._take(_ONCE, count - len(first) - len(second))))

    def _take(self, order: int, count: int) -> IntArray:
        slots = self._orders[order].victims(count) if count > 0 else NONE
        self._lengths[order] -= len(slots)
        self._where[slots] = _OUT
        indices, replaced = self._history.put(self._print[slots])
        for left in (_ONCE, _AGAIN):
            self._left[left] -= int(np.count_nonzero(self._past[indices[replaced]] == left))
        indices = indices[indices >= 0]
        self._past[indices] = order
        self._left[order] += len(indices)
        return slots

    def __len__(self) -> int:
        return sum(self._lengths)

    def check(self) -> None:
        """Assert that every evictable slot is in its order, and that lengths are as counted."""
        self._history.check()
        every = np.arange(len(self._where))
        for order in (_ONCE, _AGAIN):
            self._orders[order].check()
            held = self._orders[order].holds(every)
            assert np.array_equal(held, self._where == order), "a slot is in another's order"
            assert self._lengths[order] == np.count_nonzero(held), "an order is not as long as counted"
        assert sum(self._left) == len(self._history) and min(self._left) >= 0, "what left is not as counted"
        assert 0 <= self.share <= self._capacity, "the share is out of range"
