"""Decode steps on a device as graphs, such as CUDA's: a ``ReplayBackend`` of the replay cache.

A decode step of a small model is hundreds of kernels of a few microseconds each, and starting them takes the host
longer than the device needs for them. A recorded step is started as one.

Owns the shapes that are recorded and their static inputs. A step of n single tokens is padded to a shape that was
recorded: so many sequences, and block tables for so many tokens.

    sequences   1, 2, 4, 8, 16, 24, 32, ...  as vLLM has them
    tokens      256, 320, 384, 448, 512, ... what the longest sequence of the step has; tables are that wide

    fill       ids, positions, blocks, offsets, tables of n sequences -> static inputs, one copy; the rest is padding
    replay     every kernel of the forward, on the static inputs
    read       logits of the n sequences

Padding is a sequence of one token whose keys, and state, lie in the padding block; it is zeroed again in the same step,
and never read. A recording is made with padding alone, so nothing of a sequence is touched, and whatever a model
does with numbers on the host is frozen with other numbers than those of the first real step.

Bytes: static inputs and what recordings take are counted. The limit is taken from the device's KV budget (``share``).
Never samples, never allocates blocks.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from stowage.core.geometry import Group, Kind
from stowage.core.groups import GroupStrategy
from stowage.errors import first_line
from stowage.executor.batch import ForwardStep, GroupStep, Work
from stowage.executor.block_pool import PADDING_BLOCK, BlockPool
from stowage.executor.decode_attention import Attend, Tables
from stowage.executor.fused.recurrent_kernels import StateRows
from stowage.executor.replay.cache import ReplayCache, Rules, StepShape
from stowage.executor.replay.recorder import CaptureError, Recorder, Recording
from stowage.models.probing import RAISED_BY_MODELS

__all__ = ["GraphBackend", "Graphs", "Inputs", "StaticSteps", "is_decode", "rules", "share", "with_share"]

SHARE, SHARE_LEAST_BYTES, SHARE_MOST_BYTES = 16, 8 << 20, 512 << 20
"""One part in so many of the KV budget is for recordings. Below the least nothing is recorded: torch takes memory for
them in pieces of 2 and 20 MiB.
"""
TOKENS_LEAST = 256
GRAPHS_MAX = 96
BOUND = {torch.float32: 1e-3, torch.float16: 2e-2, torch.bfloat16: 1e-1}
"""By how much logits may differ from the plain step's, as a share of the largest: rows of other batches are rounded
otherwise.
"""


def rules(dtype: torch.dtype, *, exact: bool = False) -> Rules:
    """For a model that computes in ``dtype``; ``exact``: in steps of the same shape (``StaticSteps.compute``), and no
    bit may differ. A recording takes as long as a few steps, and some shapes only pass by.
    In some trials a router of experts that was near a tie may choose another one, or the host may be busy.
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


def share(kv_cache_memory_bytes: int) -> int:
    """Bytes of a device's KV budget that recordings may take; 0: it is too small for them."""
    part = min(kv_cache_memory_bytes // SHARE, SHARE_MOST_BYTES)
    return part if part >= SHARE_LEAST_BYTES else 0


def with_share(pool_bytes: int) -> int:
    """The KV budget whose pools have ``pool_bytes`` beside recordings."""
    return pool_bytes + min(-(-pool_bytes // (SHARE - 1)), SHARE_MOST_BYTES)


class Inputs:
    """The static tensors of a shape, int64, in one piece of device memory: one copy fills them.

    ``step`` is the forward that reads them. ``states``: the block of each sequence's recurrent state; not read where
    there is none. Filled with zeros they are padding alone (``PADDING_BLOCK`` is 0).
    """

    def __init__(
        self, shape: StepShape, pools: Sequence[BlockPool], strategies: Sequence[GroupStrategy], attend: Attend
    ) -> None:
        assert PADDING_BLOCK == 0, "zeros are padding"
        count, tokens = shape
        self.shape = shape
        self._groups = [
            (pool, strategy, _width(pool.group, tokens))
            for pool, strategy in zip(pools, strategies, strict=True)
            if pool.group.kind is not Kind.RECURRENT
        ]
        self._recurrent = next((pool.group.index for pool in pools if pool.group.kind is Kind.RECURRENT), None)
        height = 3 + sum(3 + width for _, _, width in self._groups)
        self._host = np.zeros((height, count), dtype=np.int64)
        device = pools[0].storage.device
        self._device = torch.zeros((height, count), dtype=torch.int64, device=device)
        ids, positions, self.states = self._device[0], self._device[1], self._device[2]
        self.step = ForwardStep(ids, positions, torch.arange(count, device=device), decodes=count)
        self.nbytes = 8 * (self._device.numel() + count)
        at = 3
        for pool, _, width in self._groups:
            written, offsets, bases = self._device[at], self._device[at + 1], self._device[at + 2]
            blocks = self._device[at + 3 : at + 3 + width].view(count, width)
            group = pool.group
            tables = Tables(blocks, bases, positions, group.kind, group.window, attend)
            part = GroupStep(pool, written, offsets, decode=tables)
            self.step.of_layer.update(dict.fromkeys(pool.views, part))
            at += 3 + width

    def fill(self, work: Sequence[Work]) -> None:
        """Let the next replay compute ``work``; what is left over is padding."""
        self._host[:] = 0
        count = self.shape[0]
        starts = np.array([w.start for w in work], dtype=np.int64)
        filled = len(work)
        self._host[0, :filled] = [w.sequence.tokens[w.start] for w in work]
        self._host[1, :filled] = starts
        if self._recurrent is not None:
            self._host[2, :filled] = [w.sequence.tables[self._recurrent].blocks[0] for w in work]
        at = 3
        for pool, strategy, width in self._groups:
            size = pool.group.block_tokens
            blocks = self._host[at + 3 : at + 3 + width].reshape(count, width)
            self._host[at + 1, :filled] = starts % size
            for i, item in enumerate(work):
                first = strategy.first_live_block(item.start)
                seen = item.sequence.tables[pool.group.index].blocks[first : item.start // size + 1]
                assert (seen > PADDING_BLOCK).all(), "a query needs a block that is gone"
                blocks[i, : len(seen)] = seen
                self._host[at, i] = seen[-1]
                self._host[at + 2, i] = first * size
            at += 3 + width
        self._device.copy_(torch.from_numpy(self._host))


def _width(group: Group, tokens: int) -> int:
    """Blocks that one query reads at most in a sequence of up to ``tokens`` tokens."""
    every = -(-tokens // group.block_tokens)
    if group.kind is Kind.FULL:
        return every
    return min(every, -(-group.window // group.block_tokens) + 1)


def is_decode(work: Sequence[Work]) -> bool:
    """Whether ``work`` is a decode step: single tokens that go on from a state, all of it on the device."""
    return all(w.count == 1 and w.start > 0 for w in work) and not any(
        table.is_away for w in work for table in w.sequence.tables
    )


@dataclass(frozen=True, slots=True)
class RecordedGraph:
    """A recorded forward, and the static inputs that it reads."""

    inputs: Inputs
    recording: Recording


@dataclass(slots=True)
class StaticSteps:
    """Decode steps (``is_decode``) of one engine as static inputs, in few shapes.

    ``attend``: how single queries read their tables. ``octave``: for how many numbers of tokens there are shapes before
    the number has doubled: one where only what is seen of a table is read, more where all of it is. ``rows``: every
    shape has so many sequences; 0: as few as a step fits into.
    """

    pools: Sequence[BlockPool]
    strategies: Sequence[GroupStrategy]
    attend: Attend
    max_num_seqs: int
    context_tokens: int
    octave: int = 4
    rows: int = 0

    def shape(self, step: Sequence[Work]) -> StepShape:
        """The least shape that has room for ``step``."""
        count = len(step)
        sequences = 1 << (count - 1).bit_length() if count <= 8 else -(-count // 8) * 8
        longest = max(w.start for w in step) + 1
        octave = max(TOKENS_LEAST, 1 << (longest - 1).bit_length()) // 2
        tokens = max(TOKENS_LEAST, octave + -((octave - longest) * self.octave // octave) * octave // self.octave)
        sequences = self.rows or max(count, min(sequences, self.max_num_seqs))
        return StepShape(sequences, max(longest, min(tokens, self.context_tokens)))

    def inputs(self, shape: StepShape) -> Inputs:
        """Of padding alone."""
        return Inputs(shape, self.pools, self.strategies, self.attend)

    def compute(self, step: Sequence[Work], forward: Callable[[Inputs], Tensor]) -> Tensor:
        """What ``forward`` gives for ``step`` in its shape, as a recording of it would: its logits, in host memory."""
        inputs = self.inputs(self.shape(step))
        inputs.fill(step)
        return forward(inputs)[: len(step)].cpu()


@dataclass(slots=True)
class GraphBackend:
    """Graphs of one engine's decode steps.

    ``forward`` computes the logits ``[sequences, vocab]``, float32, of static inputs, on the device; it is what is
    recorded.
    """

    forward: Callable[[Inputs], Tensor]
    steps: StaticSteps
    recorder: Recorder

    def shape(self, step: Sequence[Work]) -> StepShape:
        """See ``ReplayBackend``."""
        return self.steps.shape(step)

    def states(self, step: Sequence[Work]) -> list[StateRows]:
        """See ``ReplayBackend``."""
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
        """See ``ReplayBackend``."""
        self.recorder.forget()


Graphs = ReplayCache[Sequence[Work], RecordedGraph]
