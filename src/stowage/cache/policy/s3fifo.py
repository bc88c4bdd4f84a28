"""S3-FIFO: a small queue for newcomers, a main queue for what was used there, a ghost queue of what left the small one.

    admit ──> small ──(used twice or more)──> main ──(not used since the last round)──> gone
                └──(else)──> gone, remembered ──(comes back)──> main

After Yang, Zhang, Qiu, Yue and Rashmi, "FIFO queues are all you need for cache eviction" (SOSP 2023). Uses move
nothing: they count, up to `_USES_MAX`. A slot that is pinned keeps its position in its queue; if its turn comes
meanwhile it loses it, and joins the end of that queue when it is evictable again. Amortised O(1): a slot is passed
over in the main queue at most as often as it was used.
"""

from __future__ import annotations

from typing import Final

import numpy as np
from numpy.typing import NDArray

from stowage.cache.policy.base import NONE
from stowage.cache.policy.history import History, Prints, fingerprints
from stowage.cache.policy.lru import LRU
from stowage.core.geometry import BoolArray, IntArray

_SMALL_SHARE: Final = 0.1
_USES_MAX: Final = 3
_USES_TO_STAY: Final = 2
_SMALL, _MAIN = 0, 1


class S3FIFO:
    """The S3-FIFO policy. Slots are 0 .. `slots` - 1, of which it holds at most `capacity`."""

    __slots__ = ("_evictable", "_history", "_lengths", "_print", "_queue_of", "_queues", "_small_max", "_uses")

    def __init__(self, slots: int, capacity: int | None = None) -> None:
        capacity = slots if capacity is None else capacity
        self._queues = (LRU(slots), LRU(slots))
        self._lengths = [0, 0]
        self._queue_of: NDArray[np.int8] = np.zeros(slots, np.int8)
        self._evictable: BoolArray = np.zeros(slots, np.bool_)
        self._uses: NDArray[np.int8] = np.zeros(slots, np.int8)
        self._print: Prints = np.zeros(slots, np.uint64)
        self._small_max = int(_SMALL_SHARE * capacity)
        self._history = History(capacity)

    def admit(self, slots: IntArray, keys: list[bytes], parents: IntArray) -> None:
        """New chunks join the small queue, those that are remembered the main one."""
        for queue in (_SMALL, _MAIN):
            self._lengths[queue] -= int(np.count_nonzero(self._queues[queue].holds(slots)))
            self._queues[queue].remove(slots)
        self._print[slots] = fingerprints(keys)
        self._queue_of[slots] = self._history.take(self._print[slots]) >= 0
        self._uses[slots] = 0
        self.insert(slots, used=False)

    def insert(self, slots: IntArray, used: bool = True) -> None:
        """A use is counted. Slots that lost their positions join the ends of their queues."""
        if used:
            self._uses[slots] = np.minimum(self._uses[slots] + 1, _USES_MAX)
        self._evictable[slots] = True
        for queue in (_SMALL, _MAIN):
            mine = slots[(self._queue_of[slots] == queue) & ~self._queues[queue].holds(slots)]
            self._queues[queue].insert(mine)
            self._lengths[queue] += len(np.unique(mine))

    def remove(self, slots: IntArray) -> None:
        """Not evictable; the positions are kept."""
        self._evictable[slots] = False

    def victims(self, count: int) -> IntArray:
        """From the small queue while it is longer than its share, else from the main one."""
        taken: list[IntArray] = []
        missing = count
        while missing > 0 and any(self._lengths):
            excess = self._lengths[_SMALL] - self._small_max
            if excess > 0 or not self._lengths[_MAIN]:
                gone = self._take_small(min(missing, max(excess, 1)))
            else:
                gone = self._take_main(missing)
            taken.append(gone)
            missing -= len(gone)
        return np.concatenate(taken) if taken else NONE

    def _take_small(self, count: int) -> IntArray:
        slots = self._pop(_SMALL, count)
        stays = self._uses[slots] >= _USES_TO_STAY
        self._uses[slots] = 0
        self._push_main(slots[stays])
        gone = slots[~stays]
        self._evictable[gone] = False
        self._history.put(self._print[gone])
        return gone

    def _take_main(self, count: int) -> IntArray:
        slots = self._pop(_MAIN, count)
        stays = self._uses[slots] > 0
        self._uses[slots[stays]] -= 1
        self._push_main(slots[stays])
        self._evictable[slots[~stays]] = False
        return slots[~stays]

    def _pop(self, queue: int, count: int) -> IntArray:
        """The first slots of a queue, up to `count`; those in use lose their positions."""
        slots = self._queues[queue].victims(count)
        self._lengths[queue] -= len(slots)
        return slots[self._evictable[slots]]

    def _push_main(self, slots: IntArray) -> None:
        self._queue_of[slots] = _MAIN
        self._queues[_MAIN].insert(slots)
        self._lengths[_MAIN] += len(slots)

    def __len__(self) -> int:
        return int(np.count_nonzero(self._evictable))

    def check(self) -> None:
        """Assert that every evictable slot is in its queue, and in no other."""
        self._history.check()
        every = np.arange(len(self._evictable))
        for queue in (_SMALL, _MAIN):
            self._queues[queue].check()
            held = self._queues[queue].holds(every)
            assert self._lengths[queue] == np.count_nonzero(held), "a queue is not as long as counted"
            assert (self._queue_of[held] == queue).all(), "a slot is in another's queue"
            assert held[self._evictable & (self._queue_of == queue)].all(), "an evictable slot is in no queue"
        assert ((self._uses >= 0) & (self._uses <= _USES_MAX)).all()
