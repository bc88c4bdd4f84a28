"""What records a function's work on a device and replays it, with what its tensors hold by then.

Owns the protocol. ``executor.device`` knows what records on which device.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from torch import Tensor


class Recording(Protocol):
    """A function's work on a device."""

    @property
    def result(self) -> Tensor:
        """Always the same tensor: what came out of the latest replay."""
        ...

    def replay(self) -> None:
        """Do what was recorded."""
        ...


class Recorder(Protocol):
    """What records on one device. One thread uses it."""

    @property
    def nbytes(self) -> int:
        """Device memory that the recordings hold together."""
        ...

    def capture(self, function: Callable[[], Tensor]) -> Recording:
        """Record ``function``, which may be run a few times before and must be happy with that. Raises what the
        function and the device raise.
        """
        ...

    def forget(self) -> None:
        """Give the memory of every recording back; none may be replayed any more."""
        ...
