"""Which slot a key leads to: one map, the replacements beside it, and the trails that shorten the way through it.

    keys ── trail of the first key ── slots          a beginning that was stored, or found, together
       └─── map, one probe per key ── slots          everything else

A key leads to one slot, that of its ready chunk or of its first one on its way. A second slot is a replacement: it is
kept apart and in no look-up until it takes the place of the first. Trails hold only what the map says: a slot that
loses its key is cut out of them.

Which slots are ready, free or pinned is the ledger's to know; nothing here depends on it. Every method takes a batch;
but for replacements, which are rare, none loops over keys in Python.
"""

from __future__ import annotations

from itertools import compress, repeat
from typing import Final

import numpy as np

from stowage.cache.trails import Trails
from stowage.core.geometry import BoolArray, IntArray, MaskArray
from stowage.core.table import make_slots

__all__ = ["ABSENT", "KeyMap", "holds", "is_empty", "taken"]

ABSENT: Final = -1
"""In an array of slots: no slot."""

_NOT_THERE = repeat(ABSENT)
_NONE: IntArray = np.empty(0, np.int64)


def taken(slots: IntArray) -> IntArray:
    """Those that are slots, not ABSENT."""
    there = slots >= 0
    return slots if holds(there) else slots[there]


def holds(which: BoolArray) -> bool:
    """Whether all are true. For the short arrays of one prompt several times as fast as `all`."""
    return 0 not in which.tobytes()


def is_empty(masks: MaskArray) -> bool:
    """Whether all are 0. As `holds`."""
    return not masks.tobytes().strip(b"\0")


class KeyMap:
    """See the module. `replacements`, key to slot, is to be read only: most of the time it is empty."""

    __slots__ = ("_slots", "_trails", "replacements")

    def __init__(self, slots: int) -> None:
        self._slots = make_slots(slots)
        self._trails = Trails(slots)
        self.replacements: dict[bytes, int] = {}

    # What is there

    def find(self, keys: list[bytes]) -> IntArray:
        """The slot of each key, or ABSENT. The caller may change the array."""
        slots = self.look_up(keys)
        return slots if slots.flags.owndata else slots.copy()

    def slot_of(self, key: bytes | None) -> int:
        """The slot of one key, or ABSENT."""
        return ABSENT if key is None else self._slots.slot_of(key)

    def look_up(self, keys: list[bytes]) -> IntArray:
        """As `find`, but maybe a view of a trail, which nobody may change."""
        if len(keys) < self._trails.keys_min:
            return self._probe(keys)
        # A long prompt may lie on thousands of trails, one per batch that was stored: a loop, not a recursion.
        parts: list[IntArray] = []
        begin = 0
        while len(keys) - begin >= self._trails.keys_min:
            first = self._slots.slot_of(keys[begin])
            followed = self._trails.follow(first, keys, begin) if first >= 0 else _NONE
            if not len(followed):
                break
            parts.append(followed)
            begin += len(followed)
        if begin < len(keys):
            rest = keys[begin:]
            slots = self._probe(rest)
            self._learn(rest, slots)
            parts.append(slots)
        return parts[0] if len(parts) == 1 else np.concatenate(parts)

    def find_replacements(self, keys: list[bytes]) -> IntArray:
        """The slot of each key's replacement, or ABSENT."""
        return np.fromiter(map(self.replacements.get, keys, _NOT_THERE), np.int64, len(keys))

    def has_none(self, keys: list[bytes]) -> bool:
        """Whether all keys are absent. While there are replacements it is not looked into: False."""
        return not self.replacements and self._slots.has_none(keys)

    def _probe(self, keys: list[bytes]) -> IntArray:
        slots = np.empty(len(keys), np.int64)
        self._slots.find(keys, slots)
        return slots

    def _learn(self, keys: list[bytes], slots: IntArray) -> None:
        """Keep the beginning that was found as a trail, if it is long enough to be one and repeats no key."""
        absent = (slots < 0).nonzero()[0]
        count = int(absent[0]) if len(absent) else len(keys)
        if count >= self._trails.keys_min and len(set(keys[:count])) == count:
            self._trails.cut(slots[:count])
            self._trails.add(keys[:count], slots[:count])

    # What changes

    def add(self, keys: list[bytes], slots: IntArray) -> None:
        """The first keys, which are absent and distinct, get these slots."""
        self._slots.set(keys if len(slots) == len(keys) else keys[: len(slots)], slots)

    def add_or_replace(self, keys: list[bytes], slots: IntArray, all_new: bool) -> bool:
        """Each key gets its slot, as a replacement where it has one. `all_new`: none of them has.

        Whether each got its own: a repeated key keeps one slot, and the others lead nowhere.
        """
        before = len(self._slots) + len(self.replacements)
        keys = keys if len(slots) == len(keys) else keys[: len(slots)]
        ready = None if all_new else self.find(keys) >= 0
        if ready is None or not ready.any():
            self._slots.set(keys, slots)
        else:
            self._slots.set(list(compress(keys, (~ready).tolist())), slots[~ready])
            self.replacements.update(zip(compress(keys, ready.tolist()), slots[ready].tolist(), strict=True))
        if len(self._slots) + len(self.replacements) - before < len(slots):
            return False
        if all_new:
            self._trails.add(keys, slots)
        return True

    def replace(self, keys: list[bytes], slots: IntArray) -> IntArray:
        """Those of the slots that are replacements become the slots of their keys. The slots that they replaced.

        There may be fewer: a key may have lost its older slot meanwhile.
        """
        newer: dict[bytes, int] = {}
        for key, slot in zip(keys, slots.tolist(), strict=True):
            if self.replacements.get(key) == slot:
                del self.replacements[key]
                newer[key] = slot
        changed = list(newer)
        replaced = taken(self._probe(changed))
        self._slots.set(changed, np.fromiter(newer.values(), np.int64, len(newer)))
        self._trails.cut(replaced)
        return replaced

    def withdraw(self, keys: list[bytes], slots: IntArray) -> IntArray:
        """Forget those of the slots that are replacements. The others."""
        others = []
        for key, slot in zip(keys, slots.tolist(), strict=True):
            if self.replacements.get(key) == slot:
                del self.replacements[key]
            else:
                others.append(slot)
        return np.array(others, np.int64)

    def forget(self, keys: list[bytes], slots: IntArray) -> None:
        """The keys, whose slots these are, become absent."""
        self._trails.cut(slots)
        self._slots.drop(keys)

    def items(self) -> list[tuple[bytes, int]]:
        """Every key with its slot; replacements too."""
        return [*self._slots.items(), *self.replacements.items()]

    def check(self) -> None:
        """Assert every invariant. Linear in the keys."""
        self._slots.check()
        slots = [slot for _, slot in self.items()]
        assert len(set(slots)) == len(slots), "two keys lead to one slot"
        self._trails.check(self._probe)
