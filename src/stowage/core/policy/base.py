"""What an eviction policy is: an order over the slots that may be evicted now.

The ledger tells a policy which slots are evictable: ready, current and pinned by nobody. A slot in use is not known to
the policy at all, so no policy can evict it, and choosing victims never has to skip one.
"""

from __future__ import annotations

from typing import Protocol

from stowage.core.geometry import IntArray

__all__ = ["Policy"]


class Policy(Protocol):
    """An order over evictable slots. Every method is batched; its cost is linear in the batch, amortised."""

    def insert(self, slots: IntArray) -> None:
        """The slots were used and are evictable; the last one was used last. A slot that is known already moves."""
        ...

    def remove(self, slots: IntArray) -> None:
        """The slots are not evictable any more (pinned, replaced or freed). Unknown slots are ignored."""
        ...

    def victims(self, count: int) -> IntArray:
        """Take out and return the `count` slots that should leave first, or all there are."""
        ...

    def __len__(self) -> int:
        """How many slots are evictable."""
        ...

    def check(self) -> None:
        """Assert the policy's invariants."""
        ...
