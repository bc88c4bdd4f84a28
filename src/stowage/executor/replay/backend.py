"""The protocol of replay backends, which record decode steps of one shape: call lists (``calls``) and CUDA graphs
(``graphs``).

Owns the protocol, the shape of a step, and ``CaptureError``. ``cache`` decides when to record.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple, Protocol, TypeVar

from torch import Tensor

from stowage.errors import StowageError
from stowage.executor.fused.recurrent_kernels import StateRows

StepT_contra = TypeVar("StepT_contra", contravariant=True)
RecordingT = TypeVar("RecordingT")


class CaptureError(StowageError):
    """A step cannot be recorded: it reads a tensor's value, synchronizes with the device, or changes a tensor that
    outlives it. The text says what it did. The replay cache catches it, and the model computes.
    """


class StepShape(NamedTuple):
    """Number of sequences, and the tokens of the longest; 0: any number."""

    sequences: int
    tokens: int = 0

    def __str__(self) -> str:
        return f"{self.sequences} sequences" + (f" of {self.tokens} tokens" if self.tokens else "")


class ReplayBackend(Protocol[StepT_contra, RecordingT]):
    """Records and replays steps of one model. Used by one thread."""

    def shape(self, step: StepT_contra) -> StepShape:
        """The smallest shape that fits ``step``."""

    def states(self, step: StepT_contra) -> Sequence[StateRows]:
        """The recurrent states that ``step`` changes, as views."""

    def record(self, shape: StepShape, step: StepT_contra) -> tuple[RecordingT, Tensor | None]:
        """A recording for ``shape``, and ``step``'s logits if it has any. Raises ``CaptureError``, OutOfMemoryError."""

    def replay(self, recording: RecordingT, step: StepT_contra) -> Tensor:
        """The logits of ``step``, in new memory; states are changed in place."""

    def nbytes(self, recordings: Iterable[RecordingT]) -> int:
        """Memory of all ``recordings`` besides the model's."""

    def forget(self) -> None:
        """Free the memory of every recording; none may be replayed afterwards."""
