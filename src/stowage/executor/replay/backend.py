"""What records decode steps of one shape and replays them: lists of calls (``calls``) and graphs (``graphs``) both do.

Owns the protocol, the shape of a step, and the error of one that cannot be recorded. ``cache`` says when.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple, Protocol, TypeVar

from torch import Tensor

from stowage.errors import StowageError
from stowage.executor.fused.recurrent_kernels import StateRows

__all__ = ["CaptureError", "ReplayBackend", "StepShape"]

StepT_contra = TypeVar("StepT_contra", contravariant=True)
RecordingT = TypeVar("RecordingT")


class CaptureError(StowageError):
    """A step cannot be recorded: it asks a tensor for a number, waits for the device, or changes what it must not. Its
    text says what it did. The replay cache catches it: the model computes.
    """


class StepShape(NamedTuple):
    """How many sequences, and of how many tokens at most; 0: of any number."""

    sequences: int
    tokens: int = 0

    def __str__(self) -> str:
        return f"{self.sequences} sequences" + (f" of {self.tokens} tokens" if self.tokens else "")


class ReplayBackend(Protocol[StepT_contra, RecordingT]):
    """What records and replays steps of one model. One thread uses it."""

    def shape(self, step: StepT_contra) -> StepShape:
        """The least shape that has room for ``step``."""
        ...

    def states(self, step: StepT_contra) -> Sequence[StateRows]:
        """The recurrent states that ``step`` changes, where they lie."""
        ...

    def record(self, shape: StepShape, step: StepT_contra) -> tuple[RecordingT, Tensor | None]:
        """A recording for ``shape``, and the logits of ``step`` if they were computed on the way. Raises
        ``CaptureError``, or ``torch.OutOfMemoryError``.
        """
        ...

    def replay(self, recording: RecordingT, step: StepT_contra) -> Tensor:
        """The logits of ``step``, which are the caller's own; states are changed where they lie."""
        ...

    def nbytes(self, recordings: Iterable[RecordingT]) -> int:
        """Memory that ``recordings``, which are all there are, take besides the model's."""
        ...

    def forget(self) -> None:
        """Give the memory of every recording back; none is replayed any more."""
        ...
