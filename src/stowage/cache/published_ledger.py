"""A ledger that other engines of the machine can read: its masks and serial numbers lie in a `HostTable`."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import numpy as np

from stowage.cache.ledger import Ledger
from stowage.cache.policy import LRU, MakePolicy
from stowage.core.geometry import IntArray
from stowage.core.key import KEY_BYTES
from stowage.storage.host_table import HostTable


class PublishedLedger(Ledger):
    """A `Ledger` that writes its chunks into a `HostTable`, from their `commit` until their slot is free."""

    __slots__ = ("_table",)

    def __init__(self, slots_per_class: Sequence[int], policy: MakePolicy = LRU, *, table: HostTable) -> None:
        super().__init__(slots_per_class, policy)
        self._table = table
        self._masks, self._serial = table.masks, table.serials

    @classmethod
    def over(cls, table: HostTable) -> partial[PublishedLedger]:
        """What makes one for a flow."""
        return partial(cls, table=table)

    def _take_new(self, slab: int, keys: list[bytes], state: np.uint8) -> IntArray:
        slots = super()._take_new(slab, keys, state)
        if len(slots):
            self._table.keys[slots] = np.frombuffer(b"".join(keys[: len(slots)]), np.uint8).reshape(-1, KEY_BYTES)
        return slots

    def commit(self, slots: IntArray) -> None:
        super().commit(slots)
        self._table.changes[0] += 1
