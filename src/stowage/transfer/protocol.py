"""What a transfer is: two methods that carry out a plan's copies between device blocks and arena slots.

Copies may go on after the method has returned. On the device they are in order with everything that is computed: blocks
may be used, and given to others, at once. In host memory they are not: before ``Ticket.done``, slots that are stored
into hold nothing, and slots that are loaded from must stay as they are.
"""

from __future__ import annotations

from typing import Any, Protocol

from stowage.core.copy_plan import CopyPlan

__all__ = ["Ticket", "Transfer"]


class Ticket(Protocol):
    """Copies that were begun together."""

    @property
    def done(self) -> bool:
        """Whether host memory is no longer read or written for them, whatever became of them; nor for any that were
        begun earlier in the same direction.
        """
        ...

    def wait(self) -> None:
        """Until they are done. Raises ``TransferError`` when any of them failed."""
        ...


class Transfer(Protocol):
    """Copies whole blocks as opaque bytes. ``storage`` is a group's device storage, ``[rows, bytes_per_block]``
    uint8. ``None`` instead of a ticket: all copies were made before the method returned.
    """

    def store(self, plan: CopyPlan, storage: Any) -> Ticket | None:
        """Device to host. Raises ``TransferError`` when any copy failed; the slots then hold nothing that may be
        used.
        """
        ...

    def load(self, plan: CopyPlan, storage: Any) -> Ticket | None:
        """Host to device. Raises ``TransferError`` when any copy failed; the blocks then hold nothing that may be
        used.
        """
        ...

    def close(self) -> None:
        """Wait for what is under way and give the arena back."""
        ...
