"""Evictable slots by class, in runs: slots that were used together, those that should leave first in front.

    class 0    [7 3 9] . [4 4] . [2 8 1]          every use appends a run; nothing is ever moved
    class 1    [5 0]                 time ──>
    stamp      slot -> the number of its entry, or OUT, or HELD

An entry is live if its slot's stamp is its own number; of a slot that was used again the older entry is dead. Runs are
in order of time, so the first and the last live run of a class hold its oldest and its youngest slots. Dead entries are
dropped when a run comes to an end of its class, and all of them when there are more entries than twice the slots: O(1)
per use.

HELD: passed over, because another chunk that is still there needs it; the owner says when it may go.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from typing import Final

import numpy as np

from stowage.core.geometry import IntArray

OUT: Final = -1
HELD: Final = -2
_SLACK: Final = 64


class Run:
    """Slots that were used together; entry i has the number `first` + i, and those before `begin` are dead or taken."""

    __slots__ = ("begin", "first", "of_class", "slots", "time")

    def __init__(self, of_class: int, time: int, first: int, slots: IntArray) -> None:
        self.of_class = of_class
        self.time = time
        self.first = first
        self.slots = slots
        self.begin = 0


class Runs:
    """Evictable slots in runs. `stamp` is the owner's to read, and to write OUT or HELD into."""

    __slots__ = ("_entries", "_limit", "_next", "_of_class", "stamp")

    def __init__(self, slots: int) -> None:
        self.stamp: IntArray = np.full(slots, OUT, np.int64)
        self._of_class: dict[int, deque[Run]] = {}
        self._next = 0
        self._entries = 0
        self._limit = 2 * slots + _SLACK

    def append(self, slots: IntArray, classes: IntArray, time: int) -> None:
        """The slots were used now. Those of one class stay in their order. Of a repeated slot one entry is live."""
        for of_class in np.unique(classes).tolist():
            some = slots[classes == of_class]
            run = Run(of_class, time, self._next, some)
            self.stamp[some] = np.arange(self._next, self._next + len(some))
            self._next += len(some)
            self._entries += len(some)
            self._of_class.setdefault(of_class, deque()).append(run)
        if self._entries > self._limit:
            self._compact()

    def ends(self) -> list[Run]:
        """The first and the last run of every class, their dead beginnings skipped."""
        ends: list[Run] = []
        for of_class in list(self._of_class):
            runs = self._of_class[of_class]
            while runs and not self.skip_dead(runs[0]):
                self._entries -= len(runs.popleft().slots)
            while len(runs) > 1 and not self.skip_dead(runs[-1]):
                self._entries -= len(runs.pop().slots)
            if not runs:
                del self._of_class[of_class]
                continue
            ends.append(runs[0])
            if len(runs) > 1:
                ends.append(runs[-1])
        return ends

    def live(self, run: Run) -> IntArray:
        """The indices of the run's live entries, from `begin` on."""
        rest = self.stamp[run.slots[run.begin :]]
        return np.flatnonzero(rest == np.arange(run.first + run.begin, run.first + len(run.slots))) + run.begin

    def skip_dead(self, run: Run) -> bool:
        """Begin with the run's first live entry. Whether it has one."""
        begin = run.begin
        if begin < len(run.slots) and self.stamp[run.slots[begin]] == run.first + begin:
            return True
        live = self.live(run)
        run.begin = int(live[0]) if len(live) else len(run.slots)
        return len(live) > 0

    def _compact(self) -> None:
        self._entries = 0
        for of_class, runs in list(self._of_class.items()):
            kept: deque[Run] = deque()
            for run in runs:
                slots = run.slots[self.live(run)]
                if len(slots):
                    kept.append(Run(of_class, run.time, self._next, slots))
                    self.stamp[slots] = np.arange(self._next, self._next + len(slots))
                    self._next += len(slots)
                    self._entries += len(slots)
            if kept:
                self._of_class[of_class] = kept
            else:
                del self._of_class[of_class]

    def __iter__(self) -> Iterator[Run]:
        return (run for runs in self._of_class.values() for run in runs)

    def check(self) -> None:
        """Assert that every stamped slot has its entry, and that runs are in order of time."""
        lives = [run.slots[self.live(run)] for run in self]
        live = np.concatenate(lives) if lives else np.empty(0, np.int64)
        assert len(np.unique(live)) == len(live) == np.count_nonzero(self.stamp >= 0), "a stamped slot has no entry"
        assert self._entries == sum(len(run.slots) for run in self) <= self._limit, "entries are not as counted"
        for runs in self._of_class.values():
            times = [run.time for run in runs]
            assert times == sorted(times), "runs are out of order"
