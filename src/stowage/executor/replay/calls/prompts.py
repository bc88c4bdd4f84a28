"""Prompts on a CPU as lists of calls: a ``ReplayBackend`` of the replay cache.

A prompt makes the same calls whatever its tokens are, and however many: only sizes differ, linearly with its rows. So
short parts of it, of three lengths, are traced and merged into one list for any length (``programs.any_rows``).

    step of 3 sequences, 900 rows    ->   parts of 7, 11 and 13 tokens more than the least are traced, 40 are tried

Owns which parts these are, and the trial: a list is trusted if it is bit-identical to the model for a part that is
several times as long. There is one list for each number of sequences. The step then computes the traced tokens again;
a token's bits do not depend on its neighbours, so its keys stay the same.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from typing import Final

import torch
from torch import Tensor, nn

from stowage.executor.fused.recurrent_kernels import StateRows
from stowage.executor.replay.backend import CaptureError, StepShape
from stowage.executor.replay.cache import ReplayCache, Rules
from stowage.executor.replay.calls.backend import CallBackend, ModelStep, RecordedSteps
from stowage.executor.replay.programs.any_rows import RecordedRows, for_any_rows
from stowage.executor.replay.programs.writer import planned

_WRITTEN: Final = (7, 11, 13)
_TRIED: Final = 40
_KNOWN: Final = frozenset({"transformers", "torch", "stowage"})
LEAST: Final = _TRIED
"""Tokens that the longest sequence of a step must have, so that its parts can be traced and tried."""

_STEPS_BEFORE: Final = 6
"""Recording takes about as long as it saves in ten prompts of 512 tokens (SmolLM2: 230 ms), or eight of 40."""

_RULES: Final = Rules(
    noun="list of calls of a prompt",
    level=logging.DEBUG,
    warm_steps=_STEPS_BEFORE,
    recordings_max=64,
    trials_max=1,
    bound=0.0,
    quicker=False,
    first_ends_all=True,
    trusts=True,
)


@dataclass(frozen=True, slots=True)
class PromptStep:
    """A step with prompts. ``given``: see ``ModelStep``. ``part``: a context that makes a part of the step
    ``batch.current``, and yields it: so many tokens of the longest sequence, and two of each other.
    """

    sequences: int
    given: tuple[Tensor, ...]
    part: Callable[[int], AbstractContextManager[ModelStep]]


class _PromptBackend:
    """The ``ReplayBackend`` of prompts. ``calls``: the backend that traces steps of the same model."""

    def __init__(self, calls: CallBackend) -> None:
        self._calls = calls

    def shape(self, step: PromptStep) -> StepShape:
        return StepShape(step.sequences)

    def states(self, step: PromptStep) -> Sequence[StateRows]:
        """See ``ReplayBackend``: none."""
        return ()

    def record(self, shape: StepShape, step: PromptStep) -> tuple[RecordedRows, None]:
        plans, rows = [], []
        for tokens in _WRITTEN:
            with step.part(tokens) as part:
                traced = self._calls.traced(part)[1]
                plans.append(planned(traced, self._calls.arena, any_rows=True))
                rows.append(len(part.given[0]))
        found = for_any_rows(plans, rows)
        with step.part(_TRIED) as part:
            try:
                replayed = self._calls.run_recorded(partial(found.replay, part.given))
            except (RuntimeError, ValueError, IndexError, TypeError) as error:
                raise CaptureError(f"the same calls fail with {_TRIED} tokens: {error}") from error
            if not torch.equal(replayed, self._calls.plain(part)):
                raise CaptureError("the same calls gave something else")
        return found, None

    def replay(self, recording: RecordedRows, step: PromptStep) -> Tensor:
        return self._calls.run_recorded(partial(recording.replay, step.given))

    def nbytes(self, recordings: Iterable[RecordedRows]) -> int:
        """0: a list keeps numbers only."""
        return 0

    def forget(self) -> None:
        """Does nothing: there is no memory beside the lists."""


RecordedPrompts = ReplayCache[PromptStep, RecordedRows]


def is_known(model: nn.Module) -> bool:
    """Whether all modules are of libraries that are known to do the same for any number of tokens. Users' own code may
    do something else for more tokens than are tried.
    """
    return all(type(module).__module__.partition(".")[0] in _KNOWN for module in model.modules())


def recorded_prompts(steps: RecordedSteps) -> RecordedPrompts:
    """A replay cache for the prompts of the model whose decode steps ``steps`` replays."""
    assert isinstance(steps.backend, CallBackend), "lists of calls are made by this"
    return ReplayCache(_PromptBackend(steps.backend), _RULES)
