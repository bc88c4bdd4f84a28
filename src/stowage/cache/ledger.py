"""The ledger: which chunk is in which host slot, and in which state.

    FREE -> RESERVED -> READY -> FREE      a store: reserve, commit (or abort), evicted
    FREE -> FILLING  -> READY -> FREE      a promotion: fill, commit_filled (or abort), evicted
                        READY -> STALE -> FREE     replaced by a chunk with more valid blocks while pinned
    FREE -> PRIVATE -> FREE                one owner, outside look-ups, never evicted

Slots are numbered across all slab classes. A key has at most one READY slot (the only ones that `lookup` and `find`
see) and at most one in flight (RESERVED or FILLING); `keymap` maps the key to exactly these. A slot's mask is 0 until
it is READY, which hides it from look-ups. The eviction policy of a class has exactly the READY slots without pins.

Every method takes a batch and costs a few dictionary passes in C and a few array operations; none loops over keys in
Python. Keys of a batch are in prompt order. If slots run out, the first keys get them; among chunks used together the
first counts as most recently used, so that the head of a prefix outlives its tail.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import compress
from typing import Any

import numpy as np
from numpy.typing import NDArray

from stowage.cache.keymap import ABSENT, After, KeyMap, all_true
from stowage.cache.policy import LRU, MakePolicy
from stowage.cache.slot_states import FILLING, FREE, IN_FLIGHT, ONLY_READY, PRIVATE, READY, RESERVED, STALE, adds_blocks
from stowage.core.geometry import BoolArray, IntArray, MaskArray

_NONE: IntArray = np.empty(0, np.int64)
_NO_SLOT: IntArray = np.array([ABSENT])


class Ledger:
    """States, keys, masks and pins of all slots; the first `slots_per_class[0]` belong to slab class 0, and so on."""

    __slots__ = (
        *"_class_of _first_slots _free _free_count _key_of _map _masks _masks_in_flight _parent _parent_serial".split(),
        *"_pins _policies _serial _stale _state _in_flight evictions without_room".split(),
    )

    def __init__(self, slots_per_class: Sequence[int], policy: MakePolicy = LRU) -> None:
        total = sum(slots_per_class)
        self._map = KeyMap(total)
        self._state: NDArray[np.uint8] = np.full(total, 0, np.uint8)  # written: the first use of new pages takes long
        self._pins: NDArray[np.int64] = np.full(total, 0, np.int64)
        # One mask more than slots: ABSENT (-1) as an index reads the last one, which is always 0.
        self._masks: MaskArray = np.full(total + 1, 0, np.uint64)
        self._masks_in_flight: MaskArray = np.full(total, 0, np.uint64)
        self._key_of: NDArray[Any] = np.full(total, None, object)
        self._class_of = np.repeat(np.arange(len(slots_per_class)), slots_per_class)
        self._first_slots = np.concatenate(([0], np.cumsum(slots_per_class, dtype=np.int64)))
        # A stack of free slots per class, the lowest on top.
        self._free = [
            np.arange(end - 1, start - 1, -1, dtype=np.int64)
            for start, end in zip(self._first_slots[:-1].tolist(), self._first_slots[1:].tolist(), strict=True)
        ]
        self._free_count = [len(free) for free in self._free]
        self._policies = [policy(total, slots) for slots in slots_per_class]
        # The slot of the previous chunk of the prompt; valid only while that slot's serial number is unchanged.
        self._parent: IntArray = np.full(total, ABSENT, np.int64)
        self._parent_serial: IntArray = np.full(total, 0, np.int64)
        self._serial: IntArray = np.full(total + 1, 0, np.int64)
        self._stale = self._in_flight = 0  # `_in_flight`: RESERVED or FILLING
        self.evictions = self.without_room = 0

    # What is there

    def lookup(self, keys: list[bytes]) -> MaskArray:
        """The valid blocks of each key's ready chunk, 0 where there is none."""
        return self._masks.take(self._map.find(keys))

    def find(self, keys: list[bytes]) -> IntArray:
        """The ready slot of each key, or ABSENT."""
        return self.find_masks(keys)[0]

    def find_masks(self, keys: list[bytes]) -> tuple[IntArray, MaskArray]:
        """The ready slot of each key, or ABSENT; and its valid blocks, 0 where there is none."""
        slots = self._map.find(keys)
        masks = self._masks.take(slots)
        ready = masks != 0
        return slots if all_true(ready) else np.where(ready, slots, ABSENT), masks

    def find_in_flight(self, keys: list[bytes]) -> IntArray:
        """The slot of each key that is being stored or promoted, or ABSENT."""
        slots = self._map.find(keys)
        slots[self._masks.take(slots) != 0] = ABSENT
        if self._map.replacements:
            newer = self._map.find_replacements(keys)
            return np.where(newer >= 0, newer, slots)
        return slots

    def masks(self, slots: IntArray) -> MaskArray:
        """The valid blocks of slots; 0 for ABSENT."""
        return self._masks.take(slots)

    def keys(self, slots: IntArray) -> list[bytes]:
        """The keys of slots that are in use."""
        keys: list[bytes] = self._key_of.take(slots).tolist()
        return keys

    def are_still(self, slots: IntArray, keys: list[bytes]) -> bool:
        """A quick check that these are these keys' ready slots. May be False although they are; `find` is exact."""
        return not self._stale and self.keys(slots) == keys and all_true(self._masks.take(slots) != 0)

    def states(self, slots: IntArray) -> NDArray[np.uint8]:
        """The `State` of slots."""
        return self._state.take(slots)

    def used(self, slab: int) -> int:
        """Slots of a class that are not free."""
        return len(self._free[slab]) - self._free_count[slab]

    def pinned(self) -> int:
        """How many slots are pinned, private ones included."""
        evictable = sum(map(len, self._policies))
        return sum(self.used(slab) for slab in range(len(self._free))) - evictable - self._in_flight

    def filling(self) -> IntArray:
        """The slots that a lower tier fills, ascending."""
        return np.flatnonzero(self._state == FILLING)

    # Store

    def reserve(self, slab: int, keys: list[bytes], masks: MaskArray, after: After = None) -> IntArray:
        """A slot of class `slab` for each key that would gain blocks by being stored, ABSENT for the others.

        ABSENT: empty mask; ready with a mask that is not a strict subset; in flight already; repeated in the batch; no
        room. Ready chunks of the batch count as used now, so a batch evicts its own chunks last. `after`: the key
        before the first one in the prompt; for chunks of several prompts, a list of the key before each.
        """
        all_new = self._map.has_none(keys)
        known = _NONE if all_new else self._map.find(keys)
        wanted = masks != 0 if all_new else self._worth_storing(keys, masks, known)
        if not all_true(wanted):
            keys, masks = list(compress(keys, wanted.tolist())), masks[wanted]
        slots = self._take_new(slab, keys, RESERVED)  # may evict the chunk `after`: look that up afterwards
        before = self._map.find(after) if isinstance(after, list) else np.array([self._map.slot_of(after)])
        self.without_room += len(keys) - len(slots)
        self._masks_in_flight[slots] = masks[: len(slots)]
        keys = keys[: len(slots)]
        if not self._map.add_or_replace(keys, slots, all_new):
            slots = self._without_repeated(keys, slots)
        elif len(slots) == len(wanted):
            self._set_parents(slots, before, slots)
            return slots
        result = np.full(len(wanted), ABSENT, np.int64)
        indices = np.flatnonzero(wanted)[: len(slots)]
        result[indices] = slots
        line = result if all_new else np.where(result >= 0, result, known)
        there = slots >= 0
        self._set_parents(slots[there], before, line, indices[there])
        return result

    def commit(self, slots: IntArray) -> None:
        """RESERVED or FILLING -> READY, unpinned. A key's older chunk is freed, or is STALE while it is pinned."""
        assert self._all_in_flight(slots), "commit of a slot that is not on its way"
        self._in_flight -= len(slots)
        older = self._map.replace(self.keys(slots), slots) if self._map.replacements else _NONE
        self._masks[slots] = self._masks_in_flight.take(slots)
        self._state[slots] = READY
        self._admit(slots)
        if len(older):
            self._replace(older)

    def abort(self, slots: IntArray) -> None:
        """RESERVED or FILLING -> FREE."""
        assert self._all_in_flight(slots), "abort of a slot that is not on its way"
        self._in_flight -= len(slots)
        mapped = self._map.withdraw(self.keys(slots), slots) if self._map.replacements else slots
        self._map.forget(self.keys(mapped))
        self._release(slots)

    # Promote

    def fill(self, slab: int, keys: list[bytes]) -> IntArray:
        """A FILLING slot per key, ABSENT where there is no room. Keys are distinct, neither ready nor in flight."""
        slots = self._take_new(slab, keys, FILLING)
        assert len(set(keys)) == len(keys), "a key is filled twice"
        self._map.add(keys, slots)
        self._set_parents(slots, _NO_SLOT, slots)
        if len(slots) == len(keys):
            return slots
        return np.concatenate((slots, np.full(len(keys) - len(slots), ABSENT, np.int64)))

    def commit_filled(self, slots: IntArray, masks: MaskArray) -> None:
        """FILLING -> READY with the masks that came with the bytes."""
        self._masks_in_flight[slots] = masks
        self.commit(slots)

    # Use

    def pin(self, slots: IntArray) -> None:
        """Pin ready slots; pins are counted. A repeated slot is pinned that often."""
        assert not self._state.take(slots).tobytes().strip(ONLY_READY), "pin of a slot that is not ready"
        np.add.at(self._pins, slots, 1)
        self._remove(slots)

    def unpin(self, slots: IntArray, used: bool = True) -> None:
        """Undo one pin of each. Slots without pins become evictable, or free if stale.

        `used`: they served a prompt; otherwise they were only copied elsewhere.
        """
        np.subtract.at(self._pins, slots, 1)
        left = self._pins.take(slots)
        idle = slots
        if left.tobytes().strip(b"\0"):
            assert left.min() >= 0, "unpin of a slot that is not pinned"
            idle = slots[left == 0]
        if self._stale:
            stale = self._state.take(idle) == STALE
            gone = np.unique(idle[stale])
            self._stale -= len(gone)
            self._release(gone)
            idle = idle[~stale]
        self._insert(idle, used)

    def drop(self) -> int:
        """Evict every evictable chunk. Returns how many there were."""
        before = self.evictions
        for slab, policy in enumerate(self._policies):
            self._release(self._evict(slab, len(policy)))
        return self.evictions - before

    # Private chunks

    def take_private(self, slab: int, keys: list[bytes]) -> IntArray:
        """A pinned PRIVATE slot per key. Where there is no room for all: ABSENT for each, and nothing is evicted."""
        short = len(keys) - self._free_count[slab]
        if short > 0 and short > len(self._policies[slab]):
            return np.full(len(keys), ABSENT, np.int64)
        slots = self._take(slab, len(keys))
        self._key_of[slots] = keys
        self._state[slots] = PRIVATE
        self._pins[slots] = 1
        return slots

    def drop_private(self, slots: IntArray) -> None:
        """PRIVATE -> FREE."""
        assert (self._state.take(slots) == PRIVATE).all(), "drop of a slot that is not private"
        self._pins[slots] = 0
        self._release(slots)

    # Inside

    def _all_in_flight(self, slots: IntArray) -> bool:
        return not self._state.take(slots).tobytes().strip(IN_FLIGHT)

    def _by_class(self, slots: IntArray) -> Iterable[tuple[int, IntArray]]:
        """The slots of each class, in their order."""
        if len(self._free) == 1:
            return ((0, slots),) if len(slots) else ()
        classes = self._class_of.take(slots)
        return [(slab, slots[classes == slab]) for slab in np.unique(classes).tolist()]

    def _insert(self, slots: IntArray, used: bool = True) -> None:
        """Used together, now. The first counts as most recent: a prompt's head serves more prompts than its tail."""
        for slab, some in self._by_class(slots):
            self._policies[slab].insert(some[::-1], used)

    def _admit(self, slots: IntArray) -> None:
        """As `_insert`, for slots that became ready."""
        for slab, some in self._by_class(slots):
            some = some[::-1]
            parents = self._parent.take(some)
            same = self._serial.take(parents) == self._parent_serial.take(some)
            self._policies[slab].admit(
                some, self.keys(some), parents if all_true(same) else np.where(same, parents, ABSENT)
            )

    def _set_parents(self, slots: IntArray, before: IntArray, line: IntArray, indices: IntArray | None = None) -> None:
        """Set the parent of each slot: its predecessor in `line` (at `indices`, or all); `before` precedes `line`."""
        if not len(slots):
            return
        parents = np.concatenate((before, line[:-1]))[: len(line)]
        if indices is not None:
            parents = parents[indices]
        self._parent[slots] = parents
        self._parent_serial[slots] = self._serial.take(parents)

    def _remove(self, slots: IntArray) -> None:
        for slab, some in self._by_class(slots):
            self._policies[slab].remove(some)

    def _take(self, slab: int, count: int) -> IntArray:
        """Up to `count` slots of a class out of the free ones, then out of the policy's victims."""
        if count and not self._free_count[slab]:
            return self._evict(slab, count)
        left = max(0, self._free_count[slab] - count)
        slots = self._free[slab][left : self._free_count[slab]][::-1].copy()
        self._free_count[slab] = left
        missing = count - len(slots)
        return slots if missing == 0 else np.concatenate((slots, self._evict(slab, missing)))

    def _take_new(self, slab: int, keys: list[bytes], state: np.uint8) -> IntArray:
        """Slots for the first keys, as many as can be had, not mapped yet."""
        slots = self._take(slab, len(keys))
        self._in_flight += len(slots)
        self._serial[slots] += 1
        self._key_of[slots] = keys[: len(slots)]
        self._state[slots] = state
        return slots

    def _worth_storing(self, keys: list[bytes], masks: MaskArray, known: IntArray) -> BoolArray:
        """Which chunks gain blocks and are not on their way. Those that are ready count as used now. `known`: slots."""
        held = self._masks.take(known)
        ready = known[held != 0]
        self._insert(ready[self._pins.take(ready) == 0])
        wanted: BoolArray = adds_blocks(masks, held) & ((known < 0) | (held != 0))
        if self._map.replacements:
            wanted &= self._map.find_replacements(keys) < 0
        return wanted

    def _without_repeated(self, keys: list[bytes], slots: IntArray) -> IntArray:
        """Release the slots of repeated keys that the map does not lead to; ABSENT at their indices."""
        vain = slots != self.find_in_flight(keys)
        self._in_flight -= int(np.count_nonzero(vain))
        self._release(slots[vain])
        return np.where(vain, ABSENT, slots)

    def _evict(self, slab: int, count: int) -> IntArray:
        """Evict up to `count` chunks; returns their slots, for the caller to give a state."""
        slots = self._policies[slab].victims(count)
        self._map.forget(self.keys(slots))
        self._masks[slots] = 0
        self.evictions += len(slots)
        return slots

    def _replace(self, slots: IntArray) -> None:
        """Retire READY slots whose keys have a newer one: STALE while pinned, else FREE."""
        self._remove(slots)
        pinned = self._pins.take(slots) > 0
        self._state[slots[pinned]] = STALE
        self._stale += int(np.count_nonzero(pinned))
        self._release(slots[~pinned])

    def _release(self, slots: IntArray) -> None:
        """Any state -> FREE. The slots are distinct and in no map and no policy."""
        self._state[slots] = FREE
        self._masks[slots] = 0
        self._key_of[slots] = None
        for slab, some in self._by_class(slots):
            count = self._free_count[slab]
            self._free[slab][count : count + len(some)] = some
            self._free_count[slab] = count + len(some)

    def check(self) -> None:
        """Assert every invariant. Linear in the slots."""
        states, total = self._state, len(self._state)
        assert (self._pins >= 0).all() and self._masks[total] == 0
        free = [free[:count] for free, count in zip(self._free, self._free_count, strict=True)]
        all_free = np.concatenate(free) if free else _NONE
        assert len(np.unique(all_free)) == len(all_free), "a slot is free twice"
        assert np.array_equal(np.sort(all_free), np.flatnonzero(states == FREE)), "free slots and states disagree"
        for slab, some in enumerate(free):
            assert (self._class_of[some] == slab).all(), "a free slot is in another class"
        assert (self._pins[(states == FREE) | (states == RESERVED) | (states == FILLING)] == 0).all()
        assert (self._pins[(states == STALE) | (states == PRIVATE)] > 0).all()
        assert (self._masks[:total][states == FREE] == 0).all()
        assert (self._masks[:total][states == READY] != 0).all()
        assert self._stale == np.count_nonzero(states == STALE)
        in_flight = (states == RESERVED) | (states == FILLING)
        assert (self._masks[:total][in_flight] == 0).all(), "a chunk on its way can be looked up"
        self._map.check()
        mapped = self._map.items()
        slots = sorted(slot for _, slot in mapped)
        assert slots == np.flatnonzero((states == READY) | in_flight).tolist(), "map and states disagree"
        assert in_flight[list(self._map.replacements.values())].all(), "a replacement is not on its way"
        for key, slot in mapped:
            assert self._key_of[slot] == key, "map and keys disagree"
        for slab, policy in enumerate(self._policies):
            policy.check()
            evictable = (states == READY) & (self._pins == 0) & (self._class_of == slab)
            assert len(policy) == np.count_nonzero(evictable), "the policy does not know exactly the evictable slots"
        assert self.pinned() == np.count_nonzero(self._pins), "slots on their way were miscounted"

    def check_pins(self, holders: Sequence[IntArray]) -> None:
        """Assert that every pin is held by exactly these, besides the owners of private slots."""
        expected = (self._state == PRIVATE).astype(np.int64)
        for slots in holders:
            np.add.at(expected, slots, 1)
        assert np.array_equal(expected, self._pins), "a pin is held by nobody, or a holder has no pin"
