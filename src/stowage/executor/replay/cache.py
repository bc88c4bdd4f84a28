"""The replay cache: recorded decode steps by shape, on every device.

A decode step makes the same calls, and starts the same kernels, whatever its tokens are. So a shape (a number of
sequences, and their most tokens) is recorded once, and later steps of that shape are replayed:

    seen       the model computes; after ``warm_steps`` such steps the shape is recorded
    recorded   the next step is computed by both, compared, and the model's answer is returned
    trusted    steps are replayed
    refused    the model computes from now on

Owns these states, the limits and the counters. A recording is dropped when its trial fails ``trials_max`` times. If
recordings exceed ``limit_bytes``, the newest is dropped with all larger shapes, and the others are recorded again. A
step that cannot be recorded at all ends replay for all shapes.

Recording and replaying is done by a ``ReplayBackend``: call lists on a CPU (``calls.backend``), graphs on a device
(``graphs.backend``).
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import Generic, TypeVar

import torch
from torch import Tensor

from stowage.config.memory import format_size
from stowage.executor.replay.backend import CaptureError, ReplayBackend, StepShape

logger = logging.getLogger("stowage.engine")
StepT = TypeVar("StepT")
RecordingT = TypeVar("RecordingT")


@dataclass(frozen=True, slots=True)
class Rules:
    """When a shape is recorded and trusted.

    Args:
        noun: what a recording is called in the log.
        level: the log level of a refusal.
        warm_steps: steps of a shape that the model computes before it is recorded.
        recordings_max: shapes that are recorded at a time.
        trials_max: trials that may fail before a shape is refused.
        bound: by how much logits may differ from the model's, as a share of the largest; 0: neither logits nor
            recurrent states may differ in a single bit.
        quicker: whether a replay must not be slower than the model.
        first_ends_all: whether the first refused shape ends replay for all shapes.
        trusts: whether a recording needs no trial, because the backend has tried it.
    """

    noun: str
    level: int
    warm_steps: int
    recordings_max: int
    trials_max: int
    bound: float
    quicker: bool
    first_ends_all: bool
    trusts: bool = False


@dataclass(slots=True)
class ReplayCounters:
    """Decode steps that were replayed, and that the model computed; shapes that were refused."""

    replayed_steps: int = 0
    plain_steps: int = 0
    refused: int = 0


class _State(Enum):
    SEEN, RECORDED, TRUSTED, REFUSED = auto(), auto(), auto(), auto()


@dataclass(slots=True)
class _Entry(Generic[RecordingT]):
    """A shape. There is a recording while it is ``RECORDED`` or ``TRUSTED``."""

    state: _State = _State.SEEN
    seen: int = 0
    trials: int = 0
    recording: RecordingT | None = None


@dataclass(slots=True)
class ReplayCache(Generic[StepT, RecordingT]):
    """The recorded decode steps of one model. One thread uses it. ``limit_bytes``: what recordings may take."""

    backend: ReplayBackend[StepT, RecordingT]
    rules: Rules
    limit_bytes: int = 0
    clock: Callable[[], float] = time.perf_counter
    counters: ReplayCounters = field(default_factory=ReplayCounters)
    why: str = ""
    """Why replay has ended for all shapes; empty: it has not."""
    _entries: dict[StepShape, _Entry[RecordingT]] = field(default_factory=dict)
    _too_large: list[StepShape] = field(default_factory=list)

    def run(self, step: StepT, plain: Callable[[], Tensor]) -> Tensor:
        """Logits of ``step``: replayed, or by the model (``plain``)."""
        shape = self.backend.shape(step)
        entry = self._entries.get(shape)
        if entry is not None and entry.state is _State.TRUSTED and entry.recording is not None:
            self.counters.replayed_steps += 1
            return self.backend.replay(entry.recording, step)
        self.counters.plain_steps += 1
        if entry is None:
            entry = self._entries[shape] = _Entry()
        if self._is_due(shape, entry):
            logits = self._record(shape, entry, step)
            if logits is not None:
                return logits
        if entry.recording is None:
            return plain()
        if entry.state is _State.TRUSTED:
            return self.backend.replay(entry.recording, step)
        return self._try(shape, entry, entry.recording, step, plain)

    @property
    def recorded(self) -> list[StepShape]:
        """Shapes that have a recording."""
        return [shape for shape, entry in self._entries.items() if entry.recording is not None]

    @property
    def nbytes(self) -> int:
        """Memory of all recordings."""
        return self.backend.nbytes(entry.recording for entry in self._entries.values() if entry.recording is not None)

    def stats(self) -> dict[str, int]:
        """The counters, and the number and size of recordings."""
        return {
            "captured_steps": self.counters.replayed_steps,
            "plain_steps": self.counters.plain_steps,
            "recorded": len(self.recorded),
            "refused": self.counters.refused,
            "bytes": self.nbytes,
            "limit_bytes": self.limit_bytes,
        }

    def check(self) -> None:
        """Assert what must hold between steps."""
        assert self.nbytes <= self.limit_bytes, "recordings keep more than their share of the memory"
        assert len(self.recorded) <= self.rules.recordings_max
        for entry in self._entries.values():
            assert (entry.recording is not None) == (entry.state in (_State.RECORDED, _State.TRUSTED))

    def close(self) -> None:
        """Free all recordings; the model computes from now on."""
        self.why = "closed"
        self._forget()

    # recording

    def _is_due(self, shape: StepShape, entry: _Entry[RecordingT]) -> bool:
        """Whether ``shape``, which has come once more, is to be recorded now."""
        if self.why or entry.state is not _State.SEEN or len(self.recorded) >= self.rules.recordings_max:
            return False
        if any(shape.sequences >= large.sequences and shape.tokens >= large.tokens for large in self._too_large):
            return False
        entry.seen += 1
        return entry.seen > self.rules.warm_steps

    def _record(self, shape: StepShape, entry: _Entry[RecordingT], step: StepT) -> Tensor | None:
        """Record ``shape``. Returns the logits of ``step``, if recording has computed them."""
        before = self._copied_states(step)
        try:
            entry.recording, logits = self.backend.record(shape, step)
        except torch.OutOfMemoryError:
            self._put_back(step, before)
            self._give_up(shape)
            return None
        except CaptureError as error:
            self._put_back(step, before)
            self._end(str(error))
            return None
        entry.state, entry.trials = _State.TRUSTED if self.rules.trusts else _State.RECORDED, 0
        if self.nbytes > self.limit_bytes:
            self._give_up(shape)
        return logits

    def _give_up(self, shape: StepShape) -> None:
        """Refuse ``shape`` and all larger ones: their recordings need too much memory."""
        self._refuse(
            f"{self.rules.noun}s may take {format_size(self.limit_bytes)} of the device, and one of {shape} is too "
            "much beside the others: such steps are computed plainly"
        )
        self._too_large.append(shape)
        self._forget()  # all recordings share one memory pool, which is freed only when none is left

    def _end(self, why: str) -> None:
        self._refuse(f"a step cannot be recorded as a {self.rules.noun}, so all are computed plainly: {why}")
        self.why = why
        self._forget()

    def _forget(self) -> None:
        for entry in self._entries.values():
            if entry.recording is not None:
                entry.recording, entry.state = None, _State.SEEN
        self.backend.forget()

    def _refuse(self, text: str) -> None:
        self.counters.refused += 1
        logger.log(self.rules.level, "%s", text, extra={"stowage_event": "graphs"})

    # trusting

    def _try(
        self,
        shape: StepShape,
        entry: _Entry[RecordingT],
        recording: RecordingT,
        step: StepT,
        plain: Callable[[], Tensor],
    ) -> Tensor:
        """Compute ``step`` by replay and by the model, and return the model's logits. Keys are written twice, the
        model's last; recurrent states are restored in between. Where speed is compared, the first replay is a warm-up,
        and the second one is timed.
        """
        before = self._copied_states(step)
        for _ in range(2 if self.rules.quicker else 1):
            began_s = self.clock()
            found = self.backend.replay(recording, step)
            replayed_s = self.clock() - began_s
            after = self._copied_states(step)
            self._put_back(step, before)
        began_s = self.clock()
        expected = plain()
        plain_s = self.clock() - began_s
        entry.trials += 1
        pairs = [(found, expected), *zip(after, self._copied_states(step), strict=True)]
        why = self._against(pairs, replayed_s, plain_s)
        if not why:
            entry.state = _State.TRUSTED
        elif self.rules.first_ends_all:
            self._end(why)
        elif entry.trials >= self.rules.trials_max:
            self._refuse(f"decode steps of up to {shape} are computed plainly, not as a {self.rules.noun}: {why}")
            entry.state, entry.recording = _State.REFUSED, None  # its memory stays in the shared pool
        return expected

    def _against(self, pairs: Sequence[tuple[Tensor, Tensor]], replayed_s: float, plain_s: float) -> str:
        """Why a recording must not be trusted that gave the first of each of ``pairs`` (logits, states) where the model
        gave the second; empty where it may be trusted.
        """
        found, expected = pairs[0]
        if not self.rules.bound:
            if not all(_same(*pair) for pair in pairs):
                return "the same calls gave something else"
        elif not _agree(found, expected, self.rules.bound):
            return f"its logits differ by {float((found - expected).abs().max()):.3g}; please report it"
        return "it is no quicker" if self.rules.quicker and replayed_s > plain_s else ""

    def _copied_states(self, step: StepT) -> list[Tensor]:
        return [state.view[state.rows] for state in self.backend.states(step)]

    def _put_back(self, step: StepT, saved: Sequence[Tensor]) -> None:
        for state, values in zip(self.backend.states(step), saved, strict=True):
            state.view[state.rows] = values


def _same(a: Tensor, b: Tensor) -> bool:
    """Whether two tensors are bit-identical."""
    return a.shape == b.shape and torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8))


def _agree(found: Tensor, expected: Tensor, bound: float) -> bool:
    """Whether logits differ by rounding only. Infinite ones (of tokens that a model excludes) must be the same."""
    finite = expected.isfinite()
    if not torch.equal(finite, found.isfinite()) or not torch.equal(found[~finite], expected[~finite]):
        return False
    largest = float(expected[finite].abs().max()) if bool(finite.any()) else 0.0
    return bool((found - expected)[finite].abs().le(bound * largest).all())
