"""Decode steps on a device as graphs, such as CUDA's: a ``ReplayBackend`` of the replay cache.

A decode step of a small model is hundreds of kernels of a few microseconds each, and starting them takes the host
longer than the device needs for them. A recorded step is started as one.

Owns the recordings of ``static_steps``, and the rules for trusting one. Recording uses padding only: it touches no
sequence, and values that a model reads to the host are frozen with other values than those of the first real step, so
that the trial notices.

Bytes: static inputs and what recordings take are counted. The limit is taken from the device's KV budget (``budget``).
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from stowage.core.geometry import Kind
from stowage.errors import first_line
from stowage.executor.batch import Work
from stowage.executor.fused.recurrent_kernels import StateRows
from stowage.executor.replay.backend import CaptureError, StepShape
from stowage.executor.replay.cache import ReplayCache, Rules
from stowage.executor.replay.graphs.recorder import Recorder, Recording
from stowage.executor.static_steps import Inputs, StaticSteps
from stowage.models.probing import RAISED_BY_MODELS

GRAPHS_MAX = 96
BOUND = {torch.float32: 1e-3, torch.float16: 2e-2, torch.bfloat16: 1e-1}
"""How far logits may be from the plain step's, relative to the largest: batches of other sizes round otherwise."""


def rules(dtype: torch.dtype, *, exact: bool = False) -> Rules:
    """The rules for a model that computes in ``dtype``. ``exact``: the model computes steps of the same shape
    (``StaticSteps.compute``), and no bit may differ. Several warm steps, because a recording takes as long as a few
    steps, and some shapes occur only briefly. Several trials, because a router that is near a tie may choose another
    expert, or the host may be busy.
    """
    return Rules(
        noun="CUDA graph",
        level=logging.WARNING,
        warm_steps=4,
        recordings_max=GRAPHS_MAX,
        trials_max=3,
        bound=0.0 if exact else BOUND.get(dtype, BOUND[torch.float32]),
        quicker=True,
        first_ends_all=False,
    )


@dataclass(frozen=True, slots=True)
class RecordedGraph:
    """A recorded forward, and the static inputs that it reads."""

    inputs: Inputs
    recording: Recording


@dataclass(slots=True)
class GraphBackend:
    """A ``ReplayBackend``: graphs of one engine's decode steps.

    ``forward`` computes the logits ``[sequences, vocab]``, float32, of static inputs, on the device; it is what is
    recorded.
    """

    forward: Callable[[Inputs], Tensor]
    steps: StaticSteps
    recorder: Recorder

    def shape(self, step: Sequence[Work]) -> StepShape:
        return self.steps.shape(step)

    def states(self, step: Sequence[Work]) -> list[StateRows]:
        found = []
        for pool in self.steps.pools:
            if pool.group.kind is Kind.RECURRENT:
                blocks = [int(w.sequence.tables[pool.group.index].blocks[0]) for w in step]
                rows = torch.tensor(blocks, device=pool.storage.device)
                found += [StateRows(view, rows) for views in pool.views.values() for view in views]
        return found

    def record(self, shape: StepShape, step: Sequence[Work]) -> tuple[RecordedGraph, None]:
        """See ``ReplayBackend``. With padding alone: ``step`` is not computed."""
        inputs = self.steps.inputs(shape)
        try:
            return RecordedGraph(inputs, self.recorder.capture(lambda: self.forward(inputs))), None
        except torch.OutOfMemoryError:
            raise
        except RAISED_BY_MODELS as error:
            raise CaptureError(first_line(error)) from error

    def replay(self, recording: RecordedGraph, step: Sequence[Work]) -> Tensor:
        """See ``ReplayBackend``. Logits are copied to host memory: the next replay overwrites those on the device."""
        recording.inputs.fill(step)
        recording.recording.replay()
        return recording.recording.result[: len(step)].to("cpu", copy=True)

    def nbytes(self, recordings: Iterable[RecordedGraph]) -> int:
        """Device memory of static inputs and recordings."""
        return self.recorder.nbytes + sum(recording.inputs.nbytes for recording in recordings)

    def forget(self) -> None:
        self.recorder.forget()


Graphs = ReplayCache[Sequence[Work], RecordedGraph]
