"""Static inputs of decode steps: tensors at fixed addresses, which each step of their shape fills anew.

Owns the shapes and their inputs. A step of n single tokens is padded to a shape: so many sequences, and block tables
for so many tokens. It is computed as it is (``StaticSteps.compute``), or recorded and replayed (``replay.graphs``).

    sequences   1, 2, 4, 8, 16, 24, 32, ...  as vLLM has them; or always the same number
    tokens      256, 320, 384, 448, 512, ... what the longest sequence of the step has; tables are that wide

    fill       ids, positions, blocks, offsets, tables of n sequences -> static inputs, one copy; the rest is padding
    compute    every kernel of the forward, on the static inputs
    read       logits of the n sequences

Padding is a sequence of one token whose keys, and state, lie in the padding block; it is zeroed again in the same step,
and never read. Never samples, never allocates blocks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from stowage.core.geometry import Kind
from stowage.core.groups import GroupStrategy
from stowage.executor.batch import ForwardStep, GroupStep, Work
from stowage.executor.block_pool import PADDING_BLOCK, BlockPool, blocks_needed
from stowage.executor.decode_attention import Attend, Tables
from stowage.executor.replay.backend import StepShape

TOKENS_LEAST = 256


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
            (pool, strategy, blocks_needed(pool.group, tokens, 0))
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
