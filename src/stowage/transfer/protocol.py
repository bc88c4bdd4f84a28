"""What a transfer is: two methods that carry out a plan's copies between device blocks and arena slots."""

from __future__ import annotations

from typing import Any, Protocol

from stowage.core.plan import CopyPlan


class Transfer(Protocol):
    """Copies whole blocks as opaque bytes. ``storage`` is a group's device storage, ``[rows, bytes_per_block]``
    uint8.
    """

    def store(self, plan: CopyPlan, storage: Any) -> None:
        """Device to host. Raises ``TransferError`` when any copy failed; the slots then hold nothing that may be
        used.
        """
        ...

    def load(self, plan: CopyPlan, storage: Any) -> None:
        """Host to device. Raises ``TransferError`` when any copy failed; the blocks then hold nothing that may be
        used.
        """
        ...

    def close(self) -> None:
        """Give the arena back."""
        ...
