"""Prompts on a CPU as lists of calls: a ``ReplayBackend`` of the replay cache.

A prompt makes the same calls whatever its tokens are, and however many: only numbers differ, along with its rows. So
short parts of it are written down, of three lengths, and become one list for any (``programs.any_rows``).

    step of 3 sequences, 900 rows    ->   7, 11 and 13 tokens more than the least are written down, 40 are tried

Owns which parts these are, and that a list is trusted which gives the model's bits for one that is several times as
long. For each number of sequences there is one list. What is computed for it, the step computes once more: a token's
bits are its own, so its keys stay what they are.
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
from stowage.executor.replay.programs.writer import sketched

__all__ = ["LEAST", "PromptStep", "RecordedPrompts", "is_known", "recorded_prompts"]

_WRITTEN: Final = (7, 11, 13)
_TRIED: Final = 40
_KNOWN: Final = frozenset({"transformers", "torch", "stowage"})
LEAST: Final = _TRIED
"""So many tokens the longest run of a step must have, so that its parts can be written down and tried."""

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
    """A step with prompts, of so many ``sequences``.

    Args:
        given: see ``ModelStep``.
        part: the step with so many tokens of its longest run, and two of others, as ``batch.current`` and as the model
            computes it.
    """

    sequences: int
    given: tuple[Tensor, ...]
    part: Callable[[int], AbstractContextManager[ModelStep]]


class _PromptBackend:
    """``calls``: what writes steps of the same model down."""

    def __init__(self, calls: CallBackend) -> None:
        self._calls = calls

    def shape(self, step: PromptStep) -> StepShape:
        """See ``ReplayBackend``."""
        return StepShape(step.sequences)

    def states(self, step: PromptStep) -> Sequence[StateRows]:
        """See ``ReplayBackend``: none."""
        return ()

    def record(self, shape: StepShape, step: PromptStep) -> tuple[RecordedRows, None]:
        """See ``ReplayBackend``."""
        sketches, rows = [], []
        for tokens in _WRITTEN:
            with step.part(tokens) as part:
                written = self._calls.written(part)[1]
                sketches.append(sketched(written, self._calls.arena, any_rows=True))
                rows.append(len(part.given[0]))
        found = for_any_rows(sketches, rows)
        with step.part(_TRIED) as part:
            try:
                replayed = self._calls.again(partial(found.replay, part.given))
            except (RuntimeError, ValueError, IndexError, TypeError) as error:
                raise CaptureError(f"the same calls fail with {_TRIED} tokens: {error}") from error
            if not torch.equal(replayed, self._calls.plain(part)):
                raise CaptureError("the same calls gave something else")
        return found, None

    def replay(self, recording: RecordedRows, step: PromptStep) -> Tensor:
        """See ``ReplayBackend``."""
        return self._calls.again(partial(recording.replay, step.given))

    def nbytes(self, recordings: Iterable[RecordedRows]) -> int:
        """A list keeps numbers; what it computes with is there for a step."""
        return 0

    def forget(self) -> None:
        """Nothing is kept beside the lists."""


RecordedPrompts = ReplayCache[PromptStep, RecordedRows]


def is_known(model: nn.Module) -> bool:
    """Whether it is made of classes of which it is known that they do the same for any number of tokens: code of users
    may do something else for more than are tried.
    """
    return all(type(module).__module__.partition(".")[0] in _KNOWN for module in model.modules())


def recorded_prompts(steps: RecordedSteps) -> RecordedPrompts:
    """The recorded prompts of the model that these are the ``steps`` of."""
    assert isinstance(steps.backend, CallBackend), "lists of calls are made by this"
    return ReplayCache(_PromptBackend(steps.backend), _RULES)
