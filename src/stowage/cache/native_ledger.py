"""The ledger with the common case of a step in C: chunks that are all new, and free slots for them.

    Ledger         arrays of numpy: states, masks, keys, parents           all cases, checks
        └── lent as buffers ──> native Ledger (native/tables)              reserve, evict, commit

A server's step stores a few chunks, and comes after it has walked through all its requests: then a dozen of numpy's
functions are each waited for, with all that they read, from memory. So one call does what they would. Where the case is
another one (a key that is there already, one that is replaced or repeated), or nothing was compiled, `ledger.py` does
the work; tests drive both and compare them.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from stowage.cache.keymap import After
from stowage.cache.ledger import Ledger
from stowage.cache.policy import LRU, MakePolicy
from stowage.core.geometry import IntArray, MaskArray
from stowage.native import extension as _native
from stowage.native import is_wanted

__all__ = ["NativeLedger", "make_ledger"]


def make_ledger(slots_per_class: Sequence[int], policy: MakePolicy = LRU) -> Ledger:
    """The quicker of both, unless it is not there or not wanted."""
    return (NativeLedger if is_wanted() else Ledger)(slots_per_class, policy)


class NativeLedger(Ledger):
    """See the module."""

    __slots__ = ("_kernel",)

    def __init__(self, slots_per_class: Sequence[int], policy: MakePolicy = LRU) -> None:
        super().__init__(slots_per_class, policy)
        arrays = self._state, self._masks, self._masks_coming, self._key_of, self._class_of
        lines = self._parent, self._parent_serial, self._serial
        assert isinstance(self._map.table, _native.Slots)
        self._kernel = _native.Ledger(self._map.table, (*arrays, *lines))

    def reserve(self, slab: int, keys: list[bytes], masks: MaskArray, after: After = None) -> IntArray:
        """See `Ledger`."""
        count = len(keys)
        short = count - self._free_count[slab]
        rare = bool(self._map.replacements)
        if 0 < short <= len(self._policies[slab]) and not rare and self._kernel.all_new(keys, masks):
            self._make_free(slab, short)
        slots = np.empty(count, np.int64)
        free, free_count = self._free[slab], self._free_count[slab]
        if rare or not self._kernel.reserve(keys, masks, after, free, free_count, slots):
            return super().reserve(slab, keys, masks, after)
        self._free_count[slab] = free_count - count
        self._coming += count
        return slots

    def _make_free(self, slab: int, count: int) -> None:
        """Evict so many, which are taken after those slots that are free, and in the order of the policy."""
        victims = self._policies[slab].victims(count)
        self._free_count[slab] = self._kernel.evict(victims, self._free[slab], self._free_count[slab])
        self.evictions += len(victims)

    def commit(self, slots: IntArray) -> None:
        """See `Ledger`."""
        order, parents = np.empty(len(slots), np.int64), np.empty(len(slots), np.int64)
        keys = None if self._map.replacements else self._kernel.commit(slots, order, parents)
        if keys is None:
            super().commit(slots)
            return
        self._coming -= len(slots)
        self._policies[self._class_of.item(slots.item(0))].admit(order, keys, parents)
