"""A worker's KV cache as bytes: which runs of bytes make up a block, and copies between them and the arena.

Owns nothing: the KV cache is vLLM's, the arena the scheduler's. Blocks move whole and opaque, because what is inside is
the backend's business (a CPU backend packs keys for its instructions). A block of a group is the runs of its layers one
after the other, in the order of the layers' names; padding between and behind them is not stored.

    layer's tensor   [blocks, ...]     block b:  |== run 0 ==|..padding..|== run 1 ==|
    arena            slot, block, rank           |== run 0 ==|== run 1 ==|  next layer ...
"""

from __future__ import annotations

import ctypes
import itertools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from stowage.core.copy_plan import CopyPlan
from stowage.core.geometry import IntArray, SlabClass
from stowage.errors import TransferError, UnsupportedModelError

__all__ = ["Copies", "GroupBytes", "Rank", "SharedArena", "group_bytes", "runs_of"]

Rank = tuple[int, int]
"""Pipeline rank and tensor rank."""

_RUNS_MAX = 4096
"""Of one tensor's block. More would be a layout that scatters single elements: copying it would take for ever."""


@dataclass(frozen=True)
class GroupBytes:
    """A group's blocks on this rank. ``runs``: uint8 views ``[blocks, length]`` of the KV cache. ``layout``: text."""

    runs: tuple[Tensor, ...]
    layout: str

    @property
    def bytes_per_block(self) -> int:
        """Bytes of one block on this rank, without padding."""
        return sum(run.shape[1] for run in self.runs)


def group_bytes(caches: Mapping[str, Tensor | Sequence[Tensor]], layers: Iterable[str], num_blocks: int) -> GroupBytes:
    """The blocks of the layers of one group, from the tensors that are really allocated (case C): each once, however
    many layers share it.

    Raises ``UnsupportedModelError`` for a tensor whose first dimension is not its blocks.
    """
    runs: dict[tuple[int, int, int], Tensor] = {}
    texts = []
    for name in sorted(set(layers) & set(caches)):
        cache = caches[name]
        for tensor in [cache] if isinstance(cache, Tensor) else cache:
            for run in runs_of(tensor, num_blocks, name):
                runs.setdefault((run.data_ptr(), run.stride(0), run.shape[1]), run)
            ratio = tensor.shape[0] // num_blocks
            texts.append(f"{name}:{tensor.dtype}:{ratio}:{tuple(tensor.shape[1:])}:{tuple(tensor.stride()[1:])}")
    return GroupBytes(tuple(runs.values()), ";".join(texts))


def runs_of(tensor: Tensor, num_blocks: int, name: str = "") -> list[Tensor]:
    """``[blocks, length]`` views over the bytes of ``tensor``, ``[blocks * ratio, ...]`` with any strides."""
    if not num_blocks or not tensor.numel():
        return []
    if tensor.shape[0] % num_blocks:
        raise UnsupportedModelError(
            f"The KV cache of layer {name!r} has shape {tuple(tensor.shape)}, which is not {num_blocks} blocks. This "
            "attention backend's layout is not known here; choose another with --attention-backend."
        )
    ratio, item = tensor.shape[0] // num_blocks, tensor.element_size()
    inner = [(ratio, tensor.stride(0)), *zip(tensor.shape[1:], tensor.stride()[1:], strict=True)]
    inner = sorted(((count, stride * item) for count, stride in inner if count > 1), key=lambda d: d[1])
    length = item
    outer: list[tuple[int, int]] = []
    for count, stride in inner:
        if stride == length and not outer:
            length *= count
        else:
            outer.append((count, stride))
    offsets = [sum(at) for at in itertools.product(*[range(0, n * stride, stride) for n, stride in reversed(outer)])]
    if len(offsets) > _RUNS_MAX:
        raise UnsupportedModelError(
            f"The KV cache of layer {name!r} scatters a block over {len(offsets)} offsets. Choose another layout, such "
            "as VLLM_KV_CACHE_LAYOUT=HND."
        )
    block_bytes = ratio * tensor.stride(0) * item
    begin = tensor.storage_offset() * item
    empty = torch.empty(0, dtype=torch.uint8, device=tensor.device)
    storage = tensor.untyped_storage()
    return [empty.clone().set_(storage, begin + at, (num_blocks, length), (block_bytes, 1)) for at in offsets]


@dataclass(frozen=True)
class SharedArena:
    """Where workers find the arena. ``offsets``: by rank and group, where the rank's share of a block begins.
    ``lease``: the file of the engine's part of the node's budget, which workers hold too; or empty.
    """

    path: str
    nbytes: int
    slabs: tuple[SlabClass, ...]
    bytes_per_block: tuple[int, ...]
    offsets: dict[Rank, tuple[int, ...]]
    lease: str = ""


class Copies:
    """Carries out plans between ``groups`` and ``arena``, all its bytes, in which this rank's share of a block begins
    at ``offsets[group]``.
    """

    def __init__(
        self, groups: Sequence[GroupBytes], arena: NDArray[np.uint8], shared: SharedArena, offsets: Sequence[int]
    ) -> None:
        self._groups = groups
        self._arena = arena
        self._shared = shared
        self._offsets = offsets
        self._slab_of = {group: slab for slab in shared.slabs for group in slab.groups}
        self._on_host = all(run.device.type == "cpu" for group in groups for run in group.runs)

    def store(self, plan: CopyPlan) -> int:
        """Device to arena, how many bytes. Done when it returns; on an accelerator in the order of its stream."""
        if self._on_host:
            return self._move(plan, to_arena=True)
        arena = torch.from_numpy(self._arena)
        for block, address in zip(plan.blocks.tolist(), self._addresses(plan).tolist(), strict=True):
            for run in self._groups[plan.group].runs:
                arena[address : address + run.shape[1]].copy_(run[block])
                address += run.shape[1]
        return plan.copies * self._groups[plan.group].bytes_per_block

    def load(self, plan: CopyPlan) -> int:
        """Arena to device; the reverse."""
        if self._on_host:
            return self._move(plan, to_arena=False)
        arena = torch.from_numpy(self._arena)
        for block, address in zip(plan.blocks.tolist(), self._addresses(plan).tolist(), strict=True):
            for run in self._groups[plan.group].runs:
                run[block].copy_(arena[address : address + run.shape[1]])
                address += run.shape[1]
        return plan.copies * self._groups[plan.group].bytes_per_block

    def _addresses(self, plan: CopyPlan) -> IntArray:
        """Where each copy's block begins in the arena: this rank's share of it. Raises TransferError for a plan that
        reaches outside of either memory, rather than write there.
        """
        slab = self._slab_of[plan.group]
        for values, first, end in (
            (plan.blocks, 0, min((run.shape[0] for run in self._groups[plan.group].runs), default=0)),
            (plan.slots, slab.first_slot, slab.first_slot + slab.slots),
            (plan.offsets, 0, slab.slot_bytes // max(1, self._shared.bytes_per_block[plan.group])),
        ):
            if plan.copies and not (first <= int(values.min()) and int(values.max()) < end):
                raise TransferError(f"a plan of group {plan.group} names addresses outside of [{first}, {end})")
        slots = slab.offset_bytes + (plan.slots - slab.first_slot) * slab.slot_bytes
        addresses: IntArray = (
            slots + plan.offsets * self._shared.bytes_per_block[plan.group] + self._offsets[plan.group]
        )
        return addresses

    def _move(self, plan: CopyPlan, *, to_arena: bool) -> int:
        """Plain memory on both sides. Runs that lie side by side on both sides move as one; other threads run
        meanwhile, since ``memmove`` is called without the interpreter's lock.
        """
        runs = self._groups[plan.group].runs
        if not plan.copies or not runs:
            return 0
        lengths = np.array([run.shape[1] for run in runs], dtype=np.int64)
        begins = np.concatenate([[0], np.cumsum(lengths)[:-1]])
        pointers = np.array([run.data_ptr() for run in runs], dtype=np.int64)
        strides = np.array([run.stride(0) for run in runs], dtype=np.int64)
        host = ((self._addresses(plan) + self._arena.ctypes.data)[:, np.newaxis] + begins).ravel()
        device = (pointers + plan.blocks[:, np.newaxis] * strides).ravel()
        sizes = np.tile(lengths, plan.copies)
        joined = (np.diff(host) == sizes[:-1]) & (np.diff(device) == sizes[:-1])
        first = np.concatenate([[True], ~joined])
        at = np.flatnonzero(first)
        sizes = np.add.reduceat(sizes, at)
        sources, targets = (device[at], host[at]) if to_arena else (host[at], device[at])
        for source, target, size in zip(sources.tolist(), targets.tolist(), sizes.tolist(), strict=True):
            ctypes.memmove(target, source, size)
        return int(sizes.sum())


def offsets(bytes_per_block: Mapping[Rank, Sequence[int]]) -> dict[Rank, tuple[int, ...]]:
    """By group, where each rank's share of a block begins: one after the other, in the order of the ranks."""
    found: dict[Rank, tuple[int, ...]] = {}
    begins: list[int] = []
    for rank, sizes in sorted(bytes_per_block.items()):
        begins = begins or [0] * len(sizes)
        found[rank] = tuple(begins)
        begins = [begin + size for begin, size in zip(begins, sizes, strict=True)]
    return found
