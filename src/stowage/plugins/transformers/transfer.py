"""Copies between the tensors of a Transformers cache and arena slots, as plans say; the device is any that torch has.

Owns the order of bytes inside a block: layer after layer as the layout says, each ``[heads, block_tokens, dim]`` (a
cache has its tokens inside its heads, so that is the order in which they copy fastest), or ``[*state]`` for a recurrent
layer. A plan's block is the sequence's own: block b holds the tokens from ``b * block_tokens`` on.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from stowage.core.copy_plan import CopyPlan
from stowage.core.geometry import Kind, SlabClass, slab_of_groups
from stowage.models.layout import BlockLayout
from stowage.plugins.transformers.caches import SwappedBlocks
from stowage.transfer.runs import runs


class CacheTransfer:
    """Copies between Transformers caches and the arena. ``arena``: all its bytes, uint8. ``slabs``: its slab classes;
    each group belongs to one.
    """

    def __init__(self, arena: NDArray[np.uint8], slabs: Sequence[SlabClass], blocks: Sequence[BlockLayout]) -> None:
        self._arena = torch.from_numpy(arena)
        self._slab_of = slab_of_groups(slabs)
        self._blocks = blocks

    def store(self, plan: CopyPlan, cache: Mapping[int, SwappedBlocks], row: int) -> int:
        """Cache to host: row ``row`` of every layer of the plan's group, by layer index. Done when it returns; how many
        bytes. The tensors may lie on any device.
        """
        group = self._blocks[plan.group].group
        for block, offset, count in runs(plan, self._slab_of[plan.group], group.bytes_per_block):
            for index, part, host in self._parts(plan.group, offset, count):
                host.copy_(_slice(cache[index], part, row, block, count, group.block_tokens, group.kind))
        return plan.bytes(group)

    def load(self, plan: CopyPlan, cache: Mapping[int, SwappedBlocks], row: int) -> None:
        """Host to cache: the reverse, into tensors in ordinary memory."""
        group = self._blocks[plan.group].group
        for block, offset, count in runs(plan, self._slab_of[plan.group], group.bytes_per_block):
            for index, part, host in self._parts(plan.group, offset, count):
                _slice(cache[index], part, row, block, count, group.block_tokens, group.kind).copy_(host)

    def _parts(self, group: int, offset: int, count: int) -> list[tuple[int, int, Tensor]]:
        """Layer, tensor, and ``[count, heads, block_tokens, dim]`` (or ``[*state]``) over the arena, of each tensor of
        ``count`` blocks that lie one after the other from byte ``offset`` on.
        """
        layout = self._blocks[group]
        size, tokens = layout.group.bytes_per_block, layout.group.block_tokens
        rows = self._arena[offset : offset + count * size].view(count, size)
        recurrent = layout.group.kind is Kind.RECURRENT
        found = []
        for layer in layout.layers:
            for part, (tensor, offset) in enumerate(zip(layer.tensors, layout.offsets[layer.index], strict=True)):
                shape = tensor.shape if recurrent else (tensor.shape[0], tokens, tensor.shape[1])
                nbytes = tensor.nbytes * (1 if recurrent else tokens)
                typed = rows[:, offset : offset + nbytes].view(tensor.dtype).view(count, *shape)
                found.append((layer.index, part, typed[0] if recurrent else typed))
        return found

    def close(self) -> None:
        """Give the arena back."""
        self._arena = torch.empty(0, dtype=torch.uint8)


def _slice(held: SwappedBlocks, part: int, row: int, block: int, count: int, block_tokens: int, kind: Kind) -> Tensor:
    """What ``count`` blocks from ``block`` on hold of one tensor, ordered as in the arena. A view where the tensor lies
    in ordinary memory, else a copy there.
    """
    tensor = held.tensors[part][row]
    if kind is not Kind.RECURRENT:
        begin = block * block_tokens - held.first
        assert begin >= 0 and begin + count * block_tokens <= tensor.shape[1], "blocks that the cache does not hold"
        tensor = tensor[:, begin : begin + count * block_tokens]
    tensor = tensor.detach().cpu()
    if kind is Kind.RECURRENT:
        return tensor
    return tensor.view(tensor.shape[0], count, block_tokens, tensor.shape[2]).transpose(0, 1)
