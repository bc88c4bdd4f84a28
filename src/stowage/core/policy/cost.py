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
all classes per batch of victims; learning looks at a bounded sample, once per so many uses as there are slots.
"""

from __future__ import annotations

from typing import Final

import numpy as np

from stowage.core.geometry import BoolArray, IntArray
from stowage.core.policy.hazard import NEVER, Hazard, age_bucket, class_of
from stowage.core.policy.history import History, Prints, fingerprints
from stowage.core.policy.runs import HELD, OUT, Run, Runs

__all__ = ["CostAware"]

_REMEMBERED: Final = 16
"""Keys that are remembered after they left, per slot."""
_LEARN_MIN: Final = 512
"""Uses before anything is learned, and between two times."""
_MEMORY: Final = 16
"""What was learned counts half after this many times the uses that fill slots and history."""
_NONE: IntArray = np.empty(0, np.int64)


class CostAware:
    """See the module. Slots are 0 .. `slots` - 1, of which it holds at most `capacity`."""

    __slots__ = (
        "_class",
        "_clock",
        "_due",
        "_fade_at",
        "_gap",
        "_held",
        "_here",
        "_history",
        "_kids",
        "_last",
        "_learn_at",
        "_parent",
        "_parent_serial",
        "_past_class",
        "_past_gap",
        "_past_last",
        "_past_uses",
        "_period",
        "_print",
        "_runs",
        "_serial",
        "_uses",
        "hazard",
    )

    def __init__(self, slots: int, capacity: int | None = None) -> None:
        capacity = slots if capacity is None else capacity
        self._runs = Runs(slots)
        self._here: BoolArray = np.zeros(slots, np.bool_)
        self._print: Prints = np.zeros(slots, np.uint64)
        self._uses: IntArray = np.zeros(slots, np.int64)
        self._gap: IntArray = np.zeros(slots, np.int64)
        self._last: IntArray = np.zeros(slots, np.int64)
        self._class: IntArray = np.zeros(slots, np.int64)
        # A chunk's parent is a slot and the serial number of what was in it; one that was replaced is no parent.
        self._serial: IntArray = np.zeros(slots + 1, np.int64)
        self._parent: IntArray = np.full(slots, -1, np.int64)
        self._parent_serial: IntArray = np.zeros(slots, np.int64)
        self._kids: IntArray = np.zeros(slots, np.int64)
        self._held: list[int] = []
        self._due: list[int] = []
        self._history = History(_REMEMBERED * capacity)
        places = self._history.places
        self._past_uses: IntArray = np.zeros(places, np.int64)
        self._past_gap: IntArray = np.zeros(places, np.int64)
        self._past_last: IntArray = np.zeros(places, np.int64)
        self._past_class: IntArray = np.zeros(places, np.int64)
        self.hazard = Hazard(places + capacity)
        self._clock = 0
        self._period = max(_LEARN_MIN, capacity)
        self._learn_at = _LEARN_MIN
        self._fade_at = _MEMORY * (places + capacity)

    def admit(self, slots: IntArray, keys: list[bytes], parents: IntArray) -> None:
        """New chunks; those whose keys are remembered go on where they were."""
        replaced = slots[self._here[slots]]
        self._forget(replaced)
        self.hazard.forgotten(self._class[replaced], self._last[replaced], self._clock)
        self._clock += len(slots)
        prints = fingerprints(keys)
        places = self._history.take(prints)
        known = places >= 0
        found = places[known]
        ages = self._clock - self._past_last[places]
        self.hazard.reused(self._past_class[found], self._past_last[found], self._clock)
        self._uses[slots] = np.where(known, self._past_uses[places] + 1, 0)
        self._gap[slots] = np.where(known, np.minimum(self._past_gap[places], ages), NEVER)
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
        if self._clock >= self._learn_at:
            self._learn()
        taken: list[IntArray] = []
        missing = count
        while missing > 0:
            some = self._take_due(missing) if self._due else self._take_least(missing)
            if some is None:
                break
            taken.append(some)
            missing -= len(some)
        if not taken:
            return _NONE
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

    def _take_due(self, count: int) -> IntArray:
        """Chunks that were held back and have no children any more."""
        some, self._due = self._due[-count:], self._due[:-count]
        slots: IntArray = np.unique(np.array(some, np.int64))
        slots = np.compress((self._runs.stamp[slots] == HELD) & (self._kids[slots] == 0), slots)
        self._leave(slots)
        return slots

    def _take_least(self, count: int) -> IntArray | None:
        """Up to `count` chunks of the run with the least index; none if its first one had to be held. None: no run."""
        ends = self._runs.ends()
        if not ends:
            return self._take_held(count)
        run = ends[0] if len(ends) == 1 else self._least(ends)
        places = self._runs.live(run)[:count]
        slots = run.slots[places]
        parents = self._parents(slots)
        # In a run a chunk follows its child: that one has left when its turn comes.
        left = np.zeros(len(slots), np.int64)
        left[1:] = parents[:-1] == slots[1:]
        needed = np.flatnonzero(self._kids[slots] != left)
        leaves = int(needed[0]) if len(needed) else len(slots)
        if leaves == 0:
            self._hold(run, int(places[0]))
            return _NONE
        run.begin = int(places[leaves - 1]) + 1
        self._leave(slots[:leaves])
        return slots[:leaves]

    def _least(self, ends: list[Run]) -> Run:
        """The run with the least index, the oldest of them."""
        classes = np.array([run.of_class for run in ends])
        times = np.array([run.time for run in ends])
        index = self.hazard.index[classes, age_bucket(self._clock - times)]
        return ends[int(np.lexsort((times, index))[0])]

    def _hold(self, run: Run, place: int) -> None:
        slot = int(run.slots[place])
        run.begin = place + 1
        self._runs.stamp[slot] = HELD
        self._held.append(slot)
        if len(self._held) > 2 * len(self._here) + 64:
            self._held = np.flatnonzero(self._runs.stamp == HELD).tolist()

    def _take_held(self, count: int) -> IntArray | None:
        """No leaf is left to take: chunks that were held back go, the last one held first."""
        some: list[int] = []
        while self._held and len(some) < count:
            slot = self._held.pop()
            if self._runs.stamp[slot] == HELD and slot not in some:
                some.append(slot)
        if not some:
            return None
        slots = np.array(some, np.int64)
        self._leave(slots)
        return slots

    def _parents(self, slots: IntArray) -> IntArray:
        """The slot of each chunk's parent, -1 where it is gone or not known."""
        parents = self._parent[slots]
        return np.where(self._serial[parents] == self._parent_serial[slots], parents, -1)

    def _leave(self, slots: IntArray) -> None:
        self._runs.stamp[slots] = OUT
        self._forget(slots)

    def _remember(self, slots: IntArray) -> None:
        """What is known of chunks that have left."""
        places, replaced = self._history.put(self._print[slots])
        older = places[replaced]
        self.hazard.forgotten(self._past_class[older], self._past_last[older], self._clock)
        lost = slots[places < 0]
        self.hazard.forgotten(self._class[lost], self._last[lost], self._clock)
        slots, places = slots[places >= 0], places[places >= 0]
        self._past_uses[places] = self._uses[slots]
        self._past_gap[places] = self._gap[slots]
        self._past_last[places] = self._last[slots]
        self._past_class[places] = self._class[slots]

    def _forget(self, slots: IntArray) -> None:
        """The chunks are not there any more; their parents have lost a child."""
        parents = self._parents(slots)
        self._here[slots] = False
        self._serial[slots] += 1
        parents = parents[parents >= 0]
        np.subtract.at(self._kids, parents, 1)
        self._due += parents[(self._kids[parents] == 0) & (self._runs.stamp[parents] == HELD)].tolist()

    def _learn(self) -> None:
        self.hazard.learn(self._clock)
        self._learn_at = self._clock + min(self._period, max(_LEARN_MIN, self._clock // 8))
        if self._clock >= self._fade_at:
            self.hazard.fade()
            self._fade_at = self._clock + _MEMORY * (self._history.places + self._period)

    def check(self) -> None:
        """Assert the invariants. Linear in the slots and in what is remembered."""
        self._runs.check()
        self._history.check()
        assert self._here[self._runs.stamp != OUT].all(), "a slot without a chunk is evictable"
        self.hazard.check(int(np.count_nonzero(self._here)) + len(self._history))
        slots = np.flatnonzero(self._here)
        parents = self._parents(slots)
        kids = np.bincount(parents[parents >= 0], minlength=len(self._kids))
        assert np.array_equal(kids[slots], self._kids[slots]), "children are not as counted"
        held = np.flatnonzero(self._runs.stamp == HELD)
        assert np.isin(held, self._held).all(), "a chunk that is held is not listed"
        childless = held[self._kids[held] == 0]
        assert np.isin(childless, self._due).all(), "a chunk without children is held, and not due"
