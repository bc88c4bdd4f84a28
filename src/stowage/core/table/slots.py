"""A table from keys to slot numbers that the caller chooses. A slot has at most one key.

`Slots` is one dict; `native.Slots` is that in C, which does not pause to grow and stays fast with millions of keys.
"""

from __future__ import annotations

from collections import deque
from itertools import repeat
from typing import Final

import numpy as np

from stowage.core.geometry import IntArray

_ABSENT: Final = repeat(-1)


class Slots:
    """A table from keys to slots. Every method takes a batch; none loops in Python."""

    __slots__ = ("_slot_of",)

    def __init__(self, slots: int) -> None:
        self._slot_of: dict[bytes, int] = {}

    def __len__(self) -> int:
        """Number of keys that have a slot."""
        return len(self._slot_of)

    def set(self, keys: list[bytes], slots: IntArray) -> None:
        """Give each key its slot, instead of the one that it had; of a repeated key the last one counts."""
        self._slot_of.update(zip(keys, slots.tolist(), strict=True))

    def find(self, keys: list[bytes], slots: IntArray) -> None:
        """Fill the array: the slot of each key, -1 where it has none."""
        slots[:] = np.fromiter(map(self._slot_of.get, keys, _ABSENT), np.int64, len(keys))

    def slot_of(self, key: bytes) -> int:
        """The slot of one key, -1 where it has none."""
        return self._slot_of.get(key, -1)

    def has_none(self, keys: list[bytes]) -> bool:
        """Whether no key has a slot."""
        return self._slot_of.keys().isdisjoint(keys)

    def drop(self, keys: list[bytes]) -> None:
        """Take the keys' slots away. Raises KeyError at the first key that has none."""
        deque(map(self._slot_of.pop, keys), maxlen=0)

    def items(self) -> list[tuple[bytes, int]]:
        """Every key with its slot."""
        return list(self._slot_of.items())

    def check(self) -> None:
        """Assert the invariant. Linear in the keys."""
        assert len(set(self._slot_of.values())) == len(self._slot_of), "two keys lead to one slot"
