"""The protocol of eviction policies: an order over the slots that may be evicted now.

The ledger tells a policy which slots are evictable: ready, current and pinned by nobody. A slot in use is not in the
order at all, so no policy can evict it, and choosing victims never has to skip one. A policy may remember keys of
chunks that have left; how many is bounded by the slots that it was made for.

    admit ──> evictable ──(remove: pinned)──> in use ──(insert: unpinned)──> evictable ──> victims
"""

from __future__ import annotations

from typing import Protocol

import numpy as np

from stowage.core.geometry import IntArray

NONE: IntArray = np.empty(0, np.int64)
"""No slots."""


class Policy(Protocol):
    """An order over evictable slots. Every method is batched; its cost is linear in the batch, amortised."""

    def admit(self, slots: IntArray, keys: list[bytes], parents: IntArray) -> None:
        """The slots hold new chunks and are evictable; the last one was used last.

        `parents[i]` is the slot of the chunk that comes before chunk i in its prompt, -1 where that is not known.
        """

    def insert(self, slots: IntArray, used: bool = True) -> None:
        """The slots are evictable again; the last one was used last. A slot that is in the order already moves.

        Not `used`: somebody read the bytes to copy them elsewhere, which says nothing about their worth.
        """

    def remove(self, slots: IntArray) -> None:
        """The slots are not evictable any more (pinned, replaced or freed). Unknown slots are ignored."""

    def victims(self, count: int) -> IntArray:
        """Take out and return the `count` slots that should leave first, or all there are. Their chunks are gone."""

    def __len__(self) -> int:
        """How many slots are evictable."""

    def check(self) -> None:
        """Assert the policy's invariants."""
