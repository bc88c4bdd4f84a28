"""Decode steps on a CPU as lists of calls: a ``ReplayBackend`` of the replay cache.

A token of a small model takes a third of its time in Python around the computation: modules that call modules, argument
checks, shape queries. For steps of single tokens all of that has the same outcome every time. So one step is traced
while the model computes it (``recording``), and later steps of as many tokens make the same calls with their own
tensors.

Owns how a step's tensors are passed to a list of calls, and the rules for trusting one: its logits and recurrent states
must be bit-identical to the model's. A model that cannot be traced runs its own Python code.
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
from stowage.executor.hooks import Hooks
from stowage.executor.replay.backend import CaptureError, StepShape
from stowage.executor.replay.cache import ReplayCache, Rules
from stowage.executor.replay.calls.call_list import RecordedCalls, TracedStep, listed
from stowage.executor.replay.calls.position_tables import PositionTables
from stowage.executor.replay.calls.recording import recorded
from stowage.executor.replay.programs.program import Arena
from stowage.executor.replay.programs.writer import with_programs
from stowage.weights.offloaded_parameter import OffloadedError
from stowage.weights.source import WeightSource

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
"""Index of the positions in ``ModelStep.given``."""


@dataclass(frozen=True, slots=True)
class ModelStep:
    """A step of single tokens, as the model computes it.

    Args:
        given: the step's input tensors; the first has one number per token, the second the positions, (1, tokens), or
            (tokens, 1) where states are ``gathered``.
        forward: the model's own code, to be called while ``bound`` is open.
        bound: the context in which ``forward`` reads and writes the recurrent states; yields them.
        states: the same states as rows of their pools.
        gathered: whether ``bound`` copies the states out of their pools, and back.
    """

    given: tuple[Tensor, ...]
    forward: Callable[[], Tensor]
    bound: Callable[[], AbstractContextManager[Sequence[Tensor]]]
    states: Callable[[], Sequence[StateRows]]
    gathered: bool


class CallBackend:
    """A ``ReplayBackend`` of ``model``, whose forwards run in ``mode``. ``weights``: delivers offloaded weights."""

    def __init__(self, model: nn.Module, mode: RowInvariance | None, weights: WeightSource | None) -> None:
        self._model = model
        self._mode = mode
        self._weights = weights
        self._hooks = Hooks(model, weights)
        self.arena = Arena()
        """The working memory of programs."""
        self._tables = PositionTables()

    def shape(self, step: ModelStep) -> StepShape:
        return StepShape(step.given[0].shape[0])

    def states(self, step: ModelStep) -> Sequence[StateRows]:
        return step.states()

    def record(self, shape: StepShape, step: ModelStep) -> tuple[RecordedCalls, Tensor | None]:
        """See ``ReplayBackend``; tracing computes the step."""
        logits, traced = self.traced(step)
        try:
            return (with_programs(traced, self.arena) if kernels.is_built() else listed(traced)), logits
        except OffloadedError as error:
            raise CaptureError(f"what it computes with has gone when it is looked at: {error}") from error

    def traced(self, step: ModelStep) -> tuple[Tensor, TracedStep]:
        """The logits of ``step``, and its trace. Raises ``CaptureError``."""
        if self._hooks.there:
            raise CaptureError("its modules have hooks")
        moving = {id(one) for one in self._weights.moving} if self._weights is not None else ()
        kept = [one for one in (*self._model.parameters(), *self._model.buffers()) if id(one) not in moving]
        with step.bound() as states:
            logits, traced = recorded(step.forward, step.given, states, kept, self._mode)
        if self._mode is not None and self._mode.exact:
            traced = self._tables.looked_up(traced, traced.given[_POSITIONS], along=0 if step.gathered else 1)
        return logits, traced

    def plain(self, step: ModelStep) -> Tensor:
        """The logits of ``step`` by the model's own code."""
        with step.bound(), self._mode or nullcontext():
            return step.forward()

    def replay(self, recording: RecordedCalls, step: ModelStep) -> Tensor:
        """See ``ReplayBackend``. Gathered states are changed in their pools instead, if all calls can do that."""
        return self.run_recorded(partial(self._made, recording, step))

    def run_recorded(self, made: Callable[[], Tensor]) -> Tensor:
        """What ``made``, a replay, returns; offloaded weights are delivered for it."""
        return made() if self._weights is None else self._weights.run_recorded(made)

    def _made(self, recording: RecordedCalls, step: ModelStep) -> Tensor:
        if step.gathered and recording.in_place is not None:
            return recording.replay((*step.given, *step.states()), in_place=True)
        with step.bound() as states:
            return recording.replay((*step.given, *states))

    def nbytes(self, recordings: Iterable[RecordedCalls]) -> int:
        """0: a list keeps references to the model's tensors, and Python numbers; its results are in the ``Arena``."""
        return 0

    def forget(self) -> None:
        """Does nothing: there is no memory beside the lists."""


RecordedSteps = ReplayCache[ModelStep, RecordedCalls]


def recorded_steps(model: nn.Module, mode: RowInvariance | None, weights: WeightSource | None = None) -> RecordedSteps:
    """A replay cache for the decode steps of ``model``; arguments as for ``CallBackend``."""
    return ReplayCache(CallBackend(model, mode, weights), RULES)
