"""The protocol of transfers: carry out a plan's copies between device blocks and arena slots.

Copies may be asynchronous. On the device they are in order with all computing: blocks may be used, and given to other
sequences, at once. In host memory they are not: until ``CopyTicket.done``, slots that are stored into have no valid
content, and slots that are loaded from must not change.
"""

from __future__ import annotations

from typing import Any, Protocol

from stowage.core.copy_plan import CopyPlan


class CopyTicket(Protocol):
    """Asynchronous copies that were begun together."""

    @property
    def done(self) -> bool:
        """Whether these copies, and earlier ones in this direction, no longer touch host memory, failed or not."""

    def wait(self) -> None:
        """Until they are done. Raises ``TransferError`` when any of them failed."""


class BlockTransfer(Protocol):
    """Copies whole blocks as opaque bytes. ``storage`` is a group's device storage, ``[rows, bytes_per_block]``
    uint8. ``None`` instead of a ticket: all copies were made before the method returned.
    """

    def store(self, plan: CopyPlan, storage: Any) -> CopyTicket | None:
        """Device to host. Raises ``TransferError`` when any copy failed; the slots' content is invalid then."""

    def load(self, plan: CopyPlan, storage: Any) -> CopyTicket | None:
        """Host to device. Raises ``TransferError`` when any copy failed; the blocks' content is invalid then."""

    def close(self) -> None:
        """Wait for copies in flight and give the arena back."""
