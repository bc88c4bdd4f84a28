"""What records a function's work on a device and replays it, with what its tensors hold by then.

Owns the protocol. ``experimental.cuda_graphs`` has the one for CUDA devices.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from stowage.errors import StowageError


class CaptureError(StowageError):
    """A function cannot be recorded: it waits for the device, reads from it, or needs memory of the host. Its text says
    what it did. ``graphs`` catches it: the step is computed plainly.
    """


@dataclass(frozen=True, slots=True)
class Recording:
    """``replay`` does what was recorded; afterwards ``result``, always the same tensor, holds what came out."""

    replay: Callable[[], None]
    result: Tensor


class Recorder(Protocol):
    """What records on one device. One thread uses it."""

    @property
    def nbytes(self) -> int:
        """Device memory that the recordings hold together."""
        ...

    def capture(self, function: Callable[[], Tensor]) -> Recording:
        """Record ``function``, which may be run a few times before and must be happy with that. Raises
        ``CaptureError``, or ``torch.OutOfMemoryError``.
        """
        ...

    def forget(self) -> None:
        """Give the memory of every recording back; none may be replayed any more."""
        ...
