"""Keeps what will save the most recompute per byte and time: learned from uses, aware of the prefix tree.

    admit ──> seen before? (history of keys that left) ──> class: how often, how quickly used ──> runs of the class
    victims <── leaves first <── least index (hazard) among the oldest and the youngest run of every class

- **Worth.** All chunks of a slab class have the same bytes and save the same number of tokens, so what tells them apart
  is how soon they are used again: `hazard` learns that, per class of past, and gives an index, the uses that can be
  expected per unit of time that a slot is held. A chunk that left is remembered, so a conversation that comes back the
  second time is not a stranger, and a prompt that never comes back displaces only others like it.
- **Prefix.** Attention needs every chunk before a hit, and a chunk's recompute is cheaper than that of those behind it
  only as long as those before it are there. So a chunk leaves after those that continue it: one with children is held
  back until the last child has left, and then goes next. When all children are pinned it goes anyway.
- **Order.** The index first rises with age (nobody comes back at once) and then falls, so the least of a class is that
  of its oldest or its youngest chunks: two candidates per class. Equal indices, and all of them until something was
  learned, mean least recently used first, tails before heads.

Time is the count of uses. Cost per use, admission or victim: O(1) array operations amortised, with a bounded pass over
all classes per batch of victims; learning, once per so many uses as there are slots, goes on in
steps, one with each batch of victims.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from stowage.cache.policy.base import NONE
from stowage.cache.policy.hazard import NEVER, Floats, Hazard, age_bucket, best_rate, class_of
from stowage.cache.policy.history import History, Prints, fingerprints
from stowage.cache.policy.runs import HELD, OUT, Run, Runs
from stowage.core.geometry import BoolArray, IntArray

_REMEMBERED: Final = 16
"""Keys that are remembered after they left, per slot, ..."""
_REMEMBERED_MAX: Final = 1 << 20
"""... but not more than these, unless there are more slots: 67 MB. A bigger memory would mostly be read past the
processor's caches, at every chunk that leaves or comes; and millions of slots are a long past themselves."""
_LEARN_MIN: Final = 512
"""Uses before anything is learned, and between two times."""
_MEMORY: Final = 16
"""What was learned counts half after this many times the uses that fill slots and history."""
PAST: Final = np.dtype([("last", np.int64), ("gap", np.int32), ("uses", np.int16), ("class", np.int16)])
"""What is known of a chunk that has left: 16 bytes, because there are many of them, and each is a cache miss."""
_PAST_GAP_MAX: Final = 1 << 30
_PAST_USES_MAX: Final = 1 << 14
"""More is the same class."""
_LEARNED: Final = object()


class CostAware:
    """The cost-aware policy. Slots are 0 .. `slots` - 1, of which it holds at most `capacity`."""

    __slots__ = (
        "_class",
        "_clock",
        "_current",
        "_due",
        "_fade_at",
        "_gap",
        "_held",
        "_here",
        "_history",
        "_kids",
        "_last",
        "_learn_at",
        "_learning",
        "_parent",
        "_parent_serial",
        "_past",
        "_period",
        "_print",
        "_runs",
        "_serial",
        "_uses",
        "hazard",
    )

    def __init__(
        self, slots: int, capacity: int | None = None, best_rate: Callable[[Floats], Floats] = best_rate
    ) -> None:
        """`best_rate`: a quicker way to do what that of `hazard` does."""
        capacity = slots if capacity is None else capacity
        self._make_order(slots)
        self._current: Run | None = None
        self._held: list[int] = []
        self._due: list[int] = []
        # Written now: the first use of new pages would take longer than everything else that is done with a chunk.
        self._here: BoolArray = np.full(slots, False)
        self._print: Prints = np.full(slots, 0, np.uint64)
        self._uses: IntArray = np.full(slots, 0, np.int64)
        self._gap: IntArray = np.full(slots, 0, np.int64)
        self._last: IntArray = np.full(slots, 0, np.int64)
        self._class: IntArray = np.full(slots, 0, np.int64)
        # A chunk's parent is a slot and the serial number of what was in it; one that was replaced is no parent.
        self._serial: IntArray = np.full(slots + 1, 0, np.int64)
        self._parent: IntArray = np.full(slots, -1, np.int64)
        self._parent_serial: IntArray = np.full(slots, 0, np.int64)
        self._kids: IntArray = np.full(slots, 0, np.int64)
        self._history = History(max(capacity, min(_REMEMBERED * capacity, _REMEMBERED_MAX)))
        past_max = self._history.capacity
        self._past: NDArray[np.void] = np.full(2 * past_max, 0, np.int64).view(PAST)
        self.hazard = Hazard(past_max + capacity, best_rate)
        self._learning: Iterator[None] | None = None
        self._clock = 0
        self._period = max(_LEARN_MIN, capacity)
        self._learn_at = _LEARN_MIN
        self._fade_at = _MEMORY * (past_max + capacity)

    def admit(self, slots: IntArray, keys: list[bytes], parents: IntArray) -> None:
        """New chunks; those whose keys are remembered go on where they were."""
        replaced = slots[self._here[slots]]
        self._forget(replaced)
        self.hazard.forgotten(self._class[replaced], self._last[replaced], self._clock)
        self._clock += len(slots)
        prints = fingerprints(keys)
        indices = self._history.take(prints)
        self._uses[slots] = 0
        self._gap[slots] = NEVER
        known = indices >= 0
        if known.any():
            again, past = slots[known], self._past[indices[known]]
            self.hazard.reused(past["class"], past["last"], self._clock)
            self._uses[again] = past["uses"].astype(np.int64) + 1
            self._gap[again] = np.minimum(past["gap"], self._clock - past["last"])
        self._print[slots] = prints
        self._here[slots] = True
        self._serial[slots] += 1
        self._kids[slots] = 0
        self._parent[slots] = parents
        self._parent_serial[slots] = self._serial[parents]
        np.add.at(self._kids, parents[parents >= 0], 1)
        self._enter(slots, slots)

    def insert(self, slots: IntArray, used: bool = True) -> None:
        """Back in the order. Only a use changes what is known of a chunk."""
        if used:
            self._clock += len(slots)
            once = np.unique(slots) if len(slots) > 1 else slots
            self.hazard.reused(self._class[once], self._last[once], self._clock)
            self._uses[once] += 1
            self._gap[once] = np.minimum(self._gap[once], self._clock - self._last[once])
            self._enter(once, slots)
        else:
            self._runs.append(slots, self._class[slots], self._clock)

    def remove(self, slots: IntArray) -> None:
        """Out of the order; it may come back."""
        self._runs.stamp[slots] = OUT

    def victims(self, count: int) -> IntArray:
        """Least index first; of a prompt the last chunk first."""
        self._learn()
        taken: list[IntArray] = []
        missing = count
        self._current = None
        while missing > 0:
            some = self._take_listed(self._due, missing, childless=True) if self._due else NONE
            if not len(some):
                run = self._least_run()
                if run is None:
                    some = self._take_listed(self._held, missing, childless=False)
                    if not len(some):
                        break
                else:
                    some = self._take_leaves(run, missing)
            taken.append(some)
            missing -= len(some)
        if not taken:
            return NONE
        gone = np.concatenate(taken)
        self._remember(gone)
        return gone

    def __len__(self) -> int:
        return int(np.count_nonzero(self._runs.stamp != OUT))

    # Inside

    def _enter(self, once: IntArray, slots: IntArray) -> None:
        """The slots were used now, in this order; `once` has each once."""
        self._last[once] = self._clock
        self._class[once] = class_of(self._uses[once], self._gap[once])
        self.hazard.wait(self._class[once], self._clock)
        self._runs.append(slots, self._class[slots], self._clock)

    def _take_listed(self, listed: list[int], count: int, childless: bool) -> IntArray:
        """Up to `count` chunks that are held back, from the end of the list; of entries that are out of date none."""
        some: dict[int, None] = {}
        while listed and len(some) < count:
            slot = listed.pop()
            if self._runs.stamp[slot] == HELD and not (childless and self._kids[slot]):
                some[slot] = None
        slots = np.array(list(some), np.int64)
        self._leave(slots)
        return slots

    def _least_run(self) -> Run | None:
        """The run with the least index, the oldest of them; of equal ones that of the highest class.

        It stays the least until it is empty: while victims are taken nothing is appended.
        """
        if self._current is not None and self._runs.skip_dead(self._current):
            return self._current
        ends = self._runs.ends()
        if not ends:
            return None
        classes = np.array([run.of_class for run in ends])
        times = np.array([run.time for run in ends])
        index = self.hazard.index[classes, age_bucket(self._clock - times)]
        self._current = ends[int(np.lexsort((-classes, times, index))[0])]
        return self._current

    def _take_leaves(self, run: Run, count: int) -> IntArray:
        """Up to `count` chunks from the front of the run; none if the first one had to be held back."""
        indices = self._runs.live(run)[:count]
        slots = run.slots[indices]
        parents = self._parents(slots)
        # In a run a chunk follows its child: that one has left when its turn comes.
        left = np.zeros(len(slots), np.int64)
        left[1:] = parents[:-1] == slots[1:]
        needed = np.flatnonzero(self._kids[slots] != left)
        leaves = int(needed[0]) if len(needed) else len(slots)
        if leaves == 0:
            self._hold(run, int(indices[0]))
            return NONE
        run.begin = int(indices[leaves - 1]) + 1
        self._leave(slots[:leaves])
        return slots[:leaves]

    def _hold(self, run: Run, index: int) -> None:
        slot = int(run.slots[index])
        run.begin = index + 1
        self._runs.stamp[slot] = HELD
        self._held.append(slot)
        if len(self._held) > 2 * len(self._here) + 64:
            self._held = self._listed(self._held)[::-1]

    def _listed(self, listed: list[int]) -> list[int]:
        """Those of a list that are held back, each once, the last one first."""
        return [slot for slot in dict.fromkeys(reversed(listed)) if self._runs.stamp[slot] == HELD]

    def _parents(self, slots: IntArray) -> IntArray:
        """The slot of each chunk's parent, -1 where it is gone or not known."""
        parents = self._parent[slots]
        return np.where(self._serial[parents] == self._parent_serial[slots], parents, -1)

    def _leave(self, slots: IntArray) -> None:
        self._runs.stamp[slots] = OUT
        self._forget(slots)

    def _remember(self, slots: IntArray) -> None:
        """What is known of chunks that have left."""
        indices, replaced = self._history.put(self._print[slots])
        older = self._past[indices[replaced]]
        self.hazard.forgotten(older["class"], older["last"], self._clock)
        kept = indices >= 0
        if not kept.all():
            lost = slots[~kept]
            self.hazard.forgotten(self._class[lost], self._last[lost], self._clock)
            slots, indices = slots[kept], indices[kept]
        past = np.empty(len(slots), PAST)
        past["last"] = self._last[slots]
        past["gap"] = np.minimum(self._gap[slots], _PAST_GAP_MAX)
        past["uses"] = np.minimum(self._uses[slots], _PAST_USES_MAX)
        past["class"] = self._class[slots]
        self._past[indices] = past

    def _forget(self, slots: IntArray) -> None:
        """The chunks are not there any more; their parents have lost a child."""
        parents = self._parents(slots)
        self._here[slots] = False
        self._serial[slots] += 1
        parents = parents[parents >= 0]
        np.subtract.at(self._kids, parents, 1)
        self._due += parents[(self._kids[parents] == 0) & (self._runs.stamp[parents] == HELD)].tolist()
        if len(self._due) > 2 * len(self._here) + 64:
            self._due = self._listed_due()[::-1]

    def _learn(self) -> None:
        """The next step of what is being learned, if it is time: one for each batch of victims."""
        if self._learning is not None:
            if next(self._learning, _LEARNED) is _LEARNED:
                self._learning = None
        elif self._clock >= self._learn_at:
            self._begin_to_learn()

    def _begin_to_learn(self) -> None:
        self._learning = self.hazard.learning(self._clock)
        next(self._learning)
        self._learn_at = self._clock + min(self._period, max(_LEARN_MIN, self._clock // 8))
        if self._clock >= self._fade_at:
            self.hazard.fade()
            self._fade_at = self._clock + _MEMORY * (self._history.capacity + self._period)

    def arrays(self) -> Iterator[NDArray[Any]]:
        """All that is known, for one who works on it in C; what the order is besides is his own."""
        yield from (self._here, self._print, self._uses, self._gap, self._last, self._class)
        yield from (self._serial, self._parent, self._parent_serial, self._kids)
        yield from (*self._history.tables, self._past, *self.hazard.tables)

    def _make_order(self, slots: int) -> None:
        self._runs = Runs(slots)

    def _listed_due(self) -> list[int]:
        return [slot for slot in self._listed(self._due) if self._kids[slot] == 0]

    def order(self) -> tuple[list[tuple[int, int, list[int]]], list[int], list[int]]:
        """What is evictable: runs as (class, time, slots); those held back, the last first; those of them that are due.

        For checks and tests. Linear in the slots.
        """
        runs = [(run.of_class, run.time, run.slots[self._runs.live(run)].tolist()) for run in self._runs]
        return sorted(run for run in runs if run[2]), self._listed(self._held), self._listed_due()

    def _check_order(self) -> None:
        self._runs.check()

    def check(self) -> None:
        """Assert the invariants. Linear in the slots and in what is remembered."""
        self._check_order()
        self._history.check()
        runs, listed, due = self.order()
        held = np.array(listed, np.int64)
        evictable = np.concatenate([np.array(run[2], np.int64) for run in runs] + [held])
        assert len(evictable) == len(self), "a chunk that is held is not listed"
        assert self._here[evictable].all(), "a slot without a chunk is evictable"
        self.hazard.check(int(np.count_nonzero(self._here)) + len(self._history))
        slots = np.flatnonzero(self._here)
        parents = self._parents(slots)
        kids = np.bincount(parents[parents >= 0], minlength=len(self._kids))
        assert np.array_equal(kids[slots], self._kids[slots]), "children are not as counted"
        assert set(held[self._kids[held] == 0].tolist()) == set(due), "a chunk without children is held, and not due"
