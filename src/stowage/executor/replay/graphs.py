"""Decode steps that are recorded once and replayed: CUDA graphs.

A decode step of a small model is hundreds of kernels of a few microseconds each, and starting them takes the host
longer than the device needs for them. A recorded step is started as one.

Owns the shapes that are recorded, their static inputs, and the decision to trust a recording. A step of n single tokens
is padded to a shape that was recorded: so many sequences, and block tables for so many tokens.

    sequences   1, 2, 4, 8, 16, 24, 32, ...  as vLLM has them
    tokens      256, 320, 384, 448, 512, ... what the longest sequence of the step has; tables are that wide

    fill       ids, positions, places, tables of n sequences -> static inputs, one copy; the rest is padding
    replay     every kernel of the forward, on the static inputs
    read       logits of the n sequences

Padding is a sequence of one token whose keys, and state, lie in the padding block; it is zeroed again in the same step,
and nobody reads it. A recording is made with padding alone, so nothing of a sequence is touched, and whatever a model
does with numbers on the host is frozen with other numbers than those of the first real step. That step is computed both
ways, replayed and plainly: where recording fails, logits differ by more than rounding, or the plain step is the quicker
one, steps stay plain.

Bytes: static inputs and what recordings hold are counted, and stay below ``limit_bytes``, which is taken from the
device's KV budget (``share``). Never samples, never allocates blocks.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from stowage.config.memory import format_size
from stowage.core.geometry import Group, Kind
from stowage.core.groups import GroupStrategy
from stowage.executor.batch import GroupStep, Step, Work
from stowage.executor.block_pool import PADDING_BLOCK, BlockPool
from stowage.executor.decode_attention import Attend, Tables
from stowage.executor.replay.recorder import CaptureError, Recorder, Recording

__all__ = ["Graphs", "Inputs", "share", "with_share"]

logger = logging.getLogger("stowage.engine")
Shape = tuple[int, int]
"""How many sequences, and of how many tokens at most."""

SHARE, SHARE_LEAST_BYTES, SHARE_MOST_BYTES = 16, 8 << 20, 512 << 20
"""One part in so many of the KV budget is for recordings. Below the least nothing is recorded: torch takes memory for
them in pieces of 2 and 20 MiB.
"""
TOKENS_LEAST = 256
STEPS_BEFORE = 4
"""A shape is recorded once it was asked for so often: it takes as long as a few steps, and some shapes only pass by."""
GRAPHS_MAX = 96
TRIALS = 3
"""So many steps may differ, or be slower, before a shape is given up: a router of experts that was near a tie may
choose another one, and the host may have been busy.
"""
BOUND = {torch.float32: 1e-3, torch.float16: 2e-2, torch.bfloat16: 1e-1}
"""By how much logits may differ from the plain step's, as a share of the largest: rows of other batches are rounded
otherwise.
"""


def share(kv_cache_memory_bytes: int) -> int:
    """Bytes of a device's KV budget that recordings may take; 0: it is too small for them."""
    part = min(kv_cache_memory_bytes // SHARE, SHARE_MOST_BYTES)
    return part if part >= SHARE_LEAST_BYTES else 0


def with_share(pool_bytes: int) -> int:
    """The KV budget whose pools have ``pool_bytes`` beside recordings."""
    return pool_bytes + min(-(-pool_bytes // (SHARE - 1)), SHARE_MOST_BYTES)


@dataclass(slots=True)
class Counters:
    """Decode steps. ``captured_steps`` were replayed, ``plain_steps`` were not."""

    captured_steps: int = 0
    plain_steps: int = 0
    refused: int = 0


class Inputs:
    """The static tensors of a shape, int64, in one piece of device memory: one copy fills them.

    ``step`` is the forward that reads them. ``states``: the block of each sequence's recurrent state; not read where
    there is none. Filled with zeros they are padding alone (``PADDING_BLOCK`` is 0).
    """

    def __init__(
        self, shape: Shape, pools: Sequence[BlockPool], strategies: Sequence[GroupStrategy], attend: Attend
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
        rows = 3 + sum(3 + width for _, _, width in self._groups)
        self._host = np.zeros((rows, count), dtype=np.int64)
        device = pools[0].storage.device
        self._device = torch.zeros((rows, count), dtype=torch.int64, device=device)
        ids, positions, self.states = self._device[0], self._device[1], self._device[2]
        self.step = Step(ids, positions, torch.arange(count, device=device), decodes=count)
        self.nbytes = 8 * (self._device.numel() + count)
        at = 3
        for pool, _, width in self._groups:
            written, places, bases = self._device[at], self._device[at + 1], self._device[at + 2]
            blocks = self._device[at + 3 : at + 3 + width].view(count, width)
            group = pool.group
            tables = Tables(blocks, bases, positions, group.kind, group.window, attend)
            part = GroupStep(pool, written, places, decode=tables)
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


@dataclass(slots=True)
class _Graph:
    """One recorded shape. ``trusted``: a replay agreed with the plain step."""

    inputs: Inputs
    recording: Recording
    trusted: bool = False
    trials: int = 0

    def replayed(self, count: int) -> Tensor:
        """Logits of the first ``count`` sequences, in host memory, the caller's own: the next replay overwrites what
        this one leaves on the device.
        """
        self.recording.replay()
        return self.recording.result[:count].to("cpu", copy=True)


@dataclass(slots=True)
class Graphs:
    """The recorded decode steps of one engine.

    ``forward`` computes the logits ``[sequences, vocab]``, float32, of static inputs, on the device; it is what is
    recorded. ``attend``: how single queries read their tables. ``octave``: for how many numbers of tokens there are
    shapes before the number has doubled: one where only what is seen of a table is read, more where all of it is.
    """

    forward: Callable[[Inputs], Tensor]
    pools: Sequence[BlockPool]
    strategies: Sequence[GroupStrategy]
    recorder: Recorder
    attend: Attend
    dtype: torch.dtype
    limit_bytes: int
    max_num_seqs: int
    context_tokens: int
    octave: int = 4
    steps_before: int = STEPS_BEFORE
    clock: Callable[[], float] = time.perf_counter
    counters: Counters = field(default_factory=Counters)
    _graphs: dict[Shape, _Graph] = field(default_factory=dict)
    _asked: dict[Shape, int] = field(default_factory=dict)
    _refused: set[Shape] = field(default_factory=set)
    _too_large: list[Shape] = field(default_factory=list)
    _off: bool = False

    def takes(self, work: Sequence[Work]) -> bool:
        """Whether ``work`` is a decode step: single tokens that go on from a state, all of it on the device."""
        return all(w.count == 1 and w.start > 0 for w in work) and not any(
            table.is_away for w in work for table in w.sequence.tables
        )

    def run(self, work: Sequence[Work], plain: Callable[[], Tensor]) -> Tensor:
        """Logits of ``work`` ``[sequences, vocab]``, float32, in host memory: from a recording, or from ``plain``."""
        graph = self._graph(self.shape(work))
        if graph is None:
            self.counters.plain_steps += 1
            return plain()
        if not graph.trusted:
            self.counters.plain_steps += 1
            return self._try(graph, work, plain)
        self.counters.captured_steps += 1
        graph.inputs.fill(work)
        return graph.replayed(len(work))

    def shape(self, work: Sequence[Work]) -> Shape:
        """The least shape that has room for ``work``."""
        count = len(work)
        sequences = 1 << (count - 1).bit_length() if count <= 8 else -(-count // 8) * 8
        longest = max(w.start for w in work) + 1
        octave = max(TOKENS_LEAST, 1 << (longest - 1).bit_length()) // 2
        tokens = max(TOKENS_LEAST, octave + -((octave - longest) * self.octave // octave) * octave // self.octave)
        return max(count, min(sequences, self.max_num_seqs)), max(longest, min(tokens, self.context_tokens))

    def stats(self) -> dict[str, int]:
        """Counters, and what is recorded."""
        return {
            "captured_steps": self.counters.captured_steps,
            "plain_steps": self.counters.plain_steps,
            "recorded": len(self._graphs),
            "refused": self.counters.refused,
            "bytes": self.nbytes,
            "limit_bytes": self.limit_bytes,
        }

    @property
    def nbytes(self) -> int:
        """Device memory of static inputs and recordings."""
        return self.recorder.nbytes + sum(graph.inputs.nbytes for graph in self._graphs.values())

    def check(self) -> None:
        """Assert what must hold between steps."""
        assert self.nbytes <= self.limit_bytes, "recordings keep more than their share of the device"
        assert len(self._graphs) <= GRAPHS_MAX
        for pool in self.pools:
            assert not bool(pool.storage[PADDING_BLOCK].any()), "the padding block is not zero"

    def close(self) -> None:
        """Give all memory back; steps are plain from now on."""
        self._off = True
        self._forget()

    def _forget(self) -> None:
        self._graphs.clear()
        self.recorder.forget()

    # recording

    def _graph(self, shape: Shape) -> _Graph | None:
        graph = self._graphs.get(shape)
        if graph is not None or self._off or shape in self._refused or len(self._graphs) >= GRAPHS_MAX:
            return graph
        if any(shape[0] >= count and shape[1] >= tokens for count, tokens in self._too_large):
            return None
        self._asked[shape] = self._asked.get(shape, 0) + 1
        return self._record(shape) if self._asked[shape] > self.steps_before else None

    def _record(self, shape: Shape) -> _Graph | None:
        inputs = Inputs(shape, self.pools, self.strategies, self.attend)
        try:
            recording = self.recorder.capture(lambda: self.forward(inputs))
        except torch.OutOfMemoryError:
            self._give_up(shape)
            return None
        except CaptureError as error:
            self._refuse("a decode step cannot be recorded as a CUDA graph, so all are computed plainly: %s", error)
            self._off = True
            self._forget()
            return None
        self._graphs[shape] = _Graph(inputs, recording)
        if self.nbytes > self.limit_bytes:
            self._give_up(shape)
        return self._graphs.get(shape)

    def _give_up(self, shape: Shape) -> None:
        """``shape`` is too large, and so is what is larger."""
        self._refuse(
            "CUDA graphs may take %s of the device, and one of %d sequences of %d tokens is too much beside the "
            "others: such steps are computed plainly",
            format_size(self.limit_bytes),
            *shape,
        )
        self._too_large.append(shape)
        self._forget()  # one pool serves all: nothing of it is given back while any is left

    def _refuse(self, text: str, *values: object) -> None:
        self.counters.refused += 1
        logger.warning(text, *values, extra={"stowage_event": "graphs"})

    # trusting

    def _try(self, graph: _Graph, work: Sequence[Work], plain: Callable[[], Tensor]) -> Tensor:
        """Compute ``work`` both ways, and answer with the plain one. Keys are written again, the plain ones last;
        recurrent states are put back in between. The first replay brings the recording to the device, the second one
        is timed.
        """
        before = self._states(work)
        for _ in range(2):
            began_s = self.clock()
            graph.inputs.fill(work)
            found = graph.replayed(len(work))
            replayed_s = self.clock() - began_s
            for (view, rows), state in before:
                view[rows] = state
        began_s = self.clock()
        expected = plain()
        plain_s = self.clock() - began_s
        graph.trials += 1
        agreed = _agree(found, expected, BOUND.get(self.dtype, BOUND[torch.float32]))
        graph.trusted = agreed and replayed_s <= plain_s
        if not graph.trusted and graph.trials >= TRIALS:
            difference = f"its logits differ by {float((found - expected).abs().max()):.3g}; please report it"
            self._distrust(graph.inputs.shape, "it is no quicker" if agreed else difference)
        return expected

    def _states(self, work: Sequence[Work]) -> list[tuple[tuple[Tensor, Tensor], Tensor]]:
        saved = []
        for pool in self.pools:
            if pool.group.kind is Kind.RECURRENT:
                blocks = [int(w.sequence.tables[pool.group.index].blocks[0]) for w in work]
                rows = torch.tensor(blocks, device=pool.storage.device)
                saved += [((view, rows), view[rows]) for views in pool.views.values() for view in views]
        return saved

    def _distrust(self, shape: Shape, why: str) -> None:
        self._refuse(
            "decode steps of up to %d sequences of %d tokens are computed plainly, not as a CUDA graph: %s", *shape, why
        )
        self._refused.add(shape)
        del self._graphs[shape]  # its memory stays in the pool, for the others


def _agree(found: Tensor, expected: Tensor, bound: float) -> bool:
    """Whether logits are the same but for rounding. Infinite ones (a model may rule tokens out) must be the same."""
    finite = expected.isfinite()
    if not torch.equal(finite, found.isfinite()) or not torch.equal(found[~finite], expected[~finite]):
        return False
    largest = float(expected[finite].abs().max()) if bool(finite.any()) else 0.0
    return bool((found - expected)[finite].abs().le(bound * largest).all())
