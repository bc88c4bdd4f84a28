"""The protocol of recorders, which capture a function's work on a device and replay it on its tensors' new content.

``executor.device`` picks the recorder of a device.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from torch import Tensor


class Recording(Protocol):
    """A captured function."""

    @property
    def result(self) -> Tensor:
        """The result of the latest replay; always the same tensor."""

    def replay(self) -> None:
        """Run the captured work again."""


class Recorder(Protocol):
    """Captures work on one device. One thread uses it."""

    @property
    def nbytes(self) -> int:
        """Device memory that the recordings hold together."""

    def capture(self, function: Callable[[], Tensor]) -> Recording:
        """Capture ``function``, after a few calls of it as a warm-up. Raises what it and the device raise."""

    def forget(self) -> None:
        """Free the memory of every recording; none may be replayed any more."""
