"""Decode steps on a CPU as lists of calls: a ``ReplayBackend`` of the replay cache.

A token of a small model takes a third of its time in what lies around the computation: modules that call modules,
checks of their arguments, questions for shapes. For steps of single tokens all of that comes out the same every time.
So one step is written down while the model computes it (``recording``), and later steps of as many tokens make the
same calls with their own tensors.

Owns how a step is handed to a list of calls, and the rules for trusting one: it must give the model's own bits, logits
and recurrent states. A model that cannot be recorded runs through its own Python.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Final

from torch import Tensor, nn

from stowage.executor import kernels
from stowage.executor.determinism.row_invariance import RowInvariance
from stowage.executor.fused.recurrent_kernels import StateRows
from stowage.executor.replay.backend import CaptureError, StepShape
from stowage.executor.replay.cache import ReplayCache, Rules
from stowage.executor.replay.calls.call_list import RecordedCalls, WrittenStep, listed
from stowage.executor.replay.calls.hooks import Hooks
from stowage.executor.replay.calls.position_tables import PositionTables
from stowage.executor.replay.calls.recording import recorded
from stowage.executor.replay.programs.program import Arena
from stowage.executor.replay.programs.writer import with_programs
from stowage.weights.offloaded_parameter import OffloadedError
from stowage.weights.source import WeightSource

__all__ = ["CallBackend", "ModelStep", "RecordedSteps", "recorded_steps"]

RULES: Final = Rules(
    noun="list of calls",
    level=logging.DEBUG,
    warm_steps=1,
    recordings_max=64,
    trials_max=1,
    bound=0.0,
    quicker=False,
    first_ends_all=True,
)

_POSITIONS: Final = 1
"""Which of the tensors that a step is given has its tokens' positions."""


@dataclass(frozen=True, slots=True)
class ModelStep:
    """A step of single tokens, as the model computes it.

    Args:
        given: the tensors that every step has of its own, one number for each token in the first; the second has their
            positions, (1, tokens), or (tokens, 1) where states are ``gathered``.
        forward: the model's own code, while ``bound`` is open.
        bound: gives the recurrent states as ``forward`` sees and changes them.
        states: the same where they lie.
        gathered: whether ``bound`` copies them, and copies them back.
    """

    given: tuple[Tensor, ...]
    forward: Callable[[], Tensor]
    bound: Callable[[], AbstractContextManager[Sequence[Tensor]]]
    states: Callable[[], Sequence[StateRows]]
    gathered: bool


class CallBackend:
    """Lists of calls of ``model``, whose forwards are computed in ``mode``. ``weights``: what brings those that are not
    in memory for good.
    """

    def __init__(self, model: nn.Module, mode: RowInvariance | None, weights: WeightSource | None = None) -> None:
        self._model = model
        self._mode = mode
        self._weights = weights
        self._hooks = Hooks(model, weights)
        self.arena = Arena()
        """What programs work in."""
        self._tables = PositionTables()

    def shape(self, step: ModelStep) -> StepShape:
        """See ``ReplayBackend``."""
        return StepShape(len(step.given[0]))

    def states(self, step: ModelStep) -> Sequence[StateRows]:
        """See ``ReplayBackend``."""
        return step.states()

    def record(self, shape: StepShape, step: ModelStep) -> tuple[RecordedCalls, Tensor | None]:
        """See ``ReplayBackend``; the step is computed on the way."""
        logits, written = self.written(step)
        try:
            return (with_programs(written, self.arena) if kernels.is_built() else listed(written)), logits
        except OffloadedError as error:
            raise CaptureError(f"what it computes with has gone when it is looked at: {error}") from error

    def written(self, step: ModelStep) -> tuple[Tensor, WrittenStep]:
        """The logits of ``step``, and the calls that it takes. Raises ``CaptureError``."""
        if self._hooks.there:
            raise CaptureError("its modules have hooks")
        moving = {id(one) for one in self._weights.moving} if self._weights is not None else ()
        kept = [one for one in (*self._model.parameters(), *self._model.buffers()) if id(one) not in moving]
        with step.bound() as states:
            logits, written = recorded(step.forward, step.given, states, kept, self._mode)
        if self._mode is not None and self._mode.exact:
            written = self._tables.looked_up(written, written.given[_POSITIONS], along=0 if step.gathered else 1)
        return logits, written

    def plain(self, step: ModelStep) -> Tensor:
        """The logits of ``step`` by the model's own code."""
        with step.bound(), self._mode or nullcontext():
            return step.forward()

    def replay(self, recording: RecordedCalls, step: ModelStep) -> Tensor:
        """See ``ReplayBackend``. States that would be gathered are changed where they lie, if all calls can do that."""
        return self.again(partial(self._made, recording, step))

    def again(self, made: Callable[[], Tensor]) -> Tensor:
        """What ``made`` gives, which is a step of the model that was written down."""
        return made() if self._weights is None else self._weights.again(made)

    def _made(self, recording: RecordedCalls, step: ModelStep) -> Tensor:
        if step.gathered and recording.in_place is not None:
            return recording.replay((*step.given, *step.states()), in_place=True)
        with step.bound() as states:
            return recording.replay((*step.given, *states))

    def nbytes(self, recordings: Iterable[RecordedCalls]) -> int:
        """A list keeps the model's own tensors, and numbers of Python; for its results see ``Arena``."""
        return 0

    def forget(self) -> None:
        """Nothing is kept beside the lists."""


RecordedSteps = ReplayCache[ModelStep, RecordedCalls]


def recorded_steps(model: nn.Module, mode: RowInvariance | None, weights: WeightSource | None = None) -> RecordedSteps:
    """The recorded steps of ``model``, whose forwards are computed in ``mode``, and whose ``weights`` may move."""
    return ReplayCache(CallBackend(model, mode, weights), RULES)
