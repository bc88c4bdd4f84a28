"""Maps keys to slots: one hash table, and a small one of replacements.

A key maps to the slot of its ready chunk, or of its first chunk in flight. A second slot is a replacement: it is kept
separately, outside look-ups, until it takes the place of the first.

Which slots are ready, free or pinned is the ledger's to know; nothing here depends on it. Every method takes a batch;
but for replacements, which are rare, none loops over keys in Python.
"""

from __future__ import annotations

from itertools import compress, repeat
from typing import Final, TypeAlias

import numpy as np

from stowage.core.geometry import BoolArray, IntArray, MaskArray
from stowage.core.table import make_slots

ABSENT: Final = -1
"""In an array of slots: no slot."""

After: TypeAlias = "bytes | list[bytes] | None"
"""The key of the chunk before the first of a prompt's; or, of chunks of several prompts, the one before each, empty
where there is none."""

_NOT_THERE = repeat(ABSENT)


def present_slots(slots: IntArray) -> IntArray:
    """Those that are slots, not ABSENT."""
    there = slots >= 0
    return slots if all_true(there) else slots[there]


def all_true(which: BoolArray) -> bool:
    """Whether all are true. For the short arrays of one prompt several times as fast as `all`."""
    return 0 not in which.tobytes()


def all_zero(masks: MaskArray) -> bool:
    """Whether all are 0. As `all_true`."""
    return not masks.tobytes().strip(b"\0")


class KeyMap:
    """A map from keys to slots. `replacements`, key to slot, is to be read only: most of the time it is empty."""

    __slots__ = ("_slots", "replacements")

    def __init__(self, slots: int) -> None:
        self._slots = make_slots(slots)
        self.replacements: dict[bytes, int] = {}

    # What is there

    def find(self, keys: list[bytes]) -> IntArray:
        """The slot of each key, or ABSENT. The caller may change the array."""
        slots = np.empty(len(keys), np.int64)
        self._slots.find(keys, slots)
        return slots

    def slot_of(self, key: bytes | None) -> int:
        """The slot of one key, or ABSENT."""
        return ABSENT if key is None else self._slots.slot_of(key)

    def find_replacements(self, keys: list[bytes]) -> IntArray:
        """The slot of each key's replacement, or ABSENT."""
        return np.fromiter(map(self.replacements.get, keys, _NOT_THERE), np.int64, len(keys))

    def has_none(self, keys: list[bytes]) -> bool:
        """Whether all keys are absent. While there are replacements it is not looked into: False."""
        return not self.replacements and self._slots.has_none(keys)

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
        return len(self._slots) + len(self.replacements) - before >= len(slots)

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
        replaced = present_slots(self.find(changed))
        self._slots.set(changed, np.fromiter(newer.values(), np.int64, len(newer)))
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

    def forget(self, keys: list[bytes]) -> None:
        """The keys become absent."""
        self._slots.drop(keys)

    def items(self) -> list[tuple[bytes, int]]:
        """Every key with its slot; replacements too."""
        return [*self._slots.items(), *self.replacements.items()]

    def check(self) -> None:
        """Assert every invariant. Linear in the keys."""
        self._slots.check()
        slots = [slot for _, slot in self.items()]
        assert len(set(slots)) == len(slots), "two keys lead to one slot"
