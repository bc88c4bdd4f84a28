"""A worker's KV cache as bytes: which runs of bytes make up a block, and copies between them and the arena.

Owns nothing: the KV cache is vLLM's, the arena the scheduler's. What is inside of a block is the backend's business (a
CPU backend packs keys for its instructions), so its pieces (see ``division``) move opaque. A piece is the runs of its
tensor one after the other; padding between and behind them is not stored.

    layer's tensor   [blocks, ...]     block b:  |== run 0 ==|..padding..|== run 1 ==|
    arena            slot, block, piece          |== run 0 ==|== run 1 ==|  next piece ...
"""

from __future__ import annotations

import ctypes
import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from blake3 import blake3
from numpy.typing import NDArray
from torch import Tensor

from stowage.core.copy_plan import CopyPlan
from stowage.core.geometry import BoolArray, IntArray, SlabClass
from stowage.errors import TransferError, UnsupportedModelError
from stowage.plugins.vllm.division import Naming, Piece, Rank, Share

_RUNS_MAX = 4096
"""Of one tensor's block. More would be a layout that scatters single elements: copying it would take for ever."""


@dataclass(frozen=True)
class GroupBytes:
    """A group's blocks on this rank. ``runs``: uint8 views ``[blocks, length]`` of the KV cache, and of which of the
    ``pieces`` each is a part, ascending.
    """

    runs: tuple[Tensor, ...]
    piece_of_run: tuple[int, ...]
    pieces: tuple[Piece, ...]


def group_bytes(
    caches: Mapping[str, Tensor | Sequence[Tensor]], layers: Iterable[str], num_blocks: int, naming: Naming
) -> GroupBytes:
    """The blocks of the layers of one group, from the tensors that are really allocated (case C): each once, however
    many layers share it.

    Raises ``UnsupportedModelError`` for a tensor whose first dimension is not its blocks.
    """
    runs: dict[tuple[int, int, int], tuple[Tensor, int]] = {}
    pieces: list[Piece] = []
    for layer in sorted(set(layers) & set(caches)):
        for name, tensor in _tensors(caches[layer], layer, naming):
            found = {(run.data_ptr(), run.stride(0), run.shape[1]): run for run in runs_of(tensor, num_blocks, layer)}
            fresh = {address: run for address, run in found.items() if address not in runs}
            if fresh:
                runs |= {address: (run, len(pieces)) for address, run in fresh.items()}
                layout = _layout(tensor, num_blocks, naming.backends.get(layer, ""))
                pieces.append(Piece(name, sum(run.shape[1] for run in fresh.values()), layout))
    return GroupBytes(tuple(run for run, _ in runs.values()), tuple(at for _, at in runs.values()), tuple(pieces))


def _tensors(cache: Tensor | Sequence[Tensor], layer: str, naming: Naming) -> Iterator[tuple[str, Tensor]]:
    """Names and bytes of the pieces of a layer. vLLM's attention caches are ``[blocks, heads, tokens, content]``."""
    heads = naming.single(layer)
    for number, tensor in enumerate([cache] if isinstance(cache, Tensor) else cache):
        if heads and tensor.ndim == 4 and tensor.shape[1] == len(heads):
            yield from ((f"{name} #{number}", tensor[:, at : at + 1]) for at, name in enumerate(heads))
        else:
            yield f"{naming.whole(layer)} #{number}", tensor


def _layout(tensor: Tensor, num_blocks: int, backend: str) -> str:
    """In which order the runs of a tensor hold its elements: its dimensions from the outermost to the innermost."""
    if not num_blocks or not tensor.numel():
        return ""
    counts = [tensor.shape[0] // num_blocks, *tensor.shape[1:]]
    axes = sorted(zip(tensor.stride(), range(tensor.ndim), counts, strict=True), reverse=True)
    return " ".join([str(tensor.dtype), *(f"{axis}:{count}" for _, axis, count in axes if count > 1), backend])


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


@dataclass(frozen=True, eq=False)
class SharedArena:
    """Where workers find the arena. ``shares``: by rank and group, what the rank copies of a block. ``lease``: the file
    of the engine's part of the node's budget, which workers hold too; or empty.
    """

    path: str
    nbytes: int
    slabs: tuple[SlabClass, ...]
    bytes_per_block: tuple[int, ...]
    shares: dict[Rank, tuple[Share, ...]]
    lease: str = ""


class _Runs:
    """The runs of bytes that a copy moves of each block of a group. ``begins``: where they begin in a stored block."""

    def __init__(self, group: GroupBytes, share: Share, pieces: BoolArray) -> None:
        lengths = np.array([run.shape[1] for run in group.runs], dtype=np.int64)
        owner = np.array(group.piece_of_run, dtype=np.int64)
        before = np.cumsum(lengths) - lengths
        first = np.searchsorted(owner, owner)  # the first run of each run's piece
        mine = pieces[owner]
        self.begins = (share.offsets[owner] + before - before[first])[mine]
        self.lengths = lengths[mine]
        self.views = [run for run, moves in zip(group.runs, mine.tolist(), strict=True) if moves]
        self.pointers = np.array([run.data_ptr() for run in self.views], dtype=np.int64)
        self.strides = np.array([run.stride(0) for run in self.views], dtype=np.int64)


class Copies:
    """Carries out plans between ``groups`` and ``arena``, all its bytes. ``shares``: this rank's, by group."""

    def __init__(
        self, groups: Sequence[GroupBytes], arena: NDArray[np.uint8], shared: SharedArena, shares: Sequence[Share]
    ) -> None:
        self._groups = groups
        self._arena = arena
        self._shared = shared
        self._twins = [share.twins for share in shares]
        pairs = list(zip(groups, shares, strict=True))
        self._loads = [_Runs(group, share, np.ones(len(group.pieces), dtype=np.bool_)) for group, share in pairs]
        self._stores = [_Runs(group, share, share.stores) for group, share in pairs]
        self._slab_of = {group: slab for slab in shared.slabs for group in slab.groups}
        self._on_host = all(run.device.type == "cpu" for group in groups for run in group.runs)

    def store(self, plan: CopyPlan) -> int:
        """Device to arena what this rank stores of each block, how many bytes. Done when it returns; on an accelerator
        in the order of its stream.
        """
        return self._copy(plan, self._stores[plan.group], to_arena=True)

    def load(self, plan: CopyPlan) -> int:
        """Arena to device, all that this rank holds of each block."""
        return self._copy(plan, self._loads[plan.group], to_arena=False)

    def digests(self, plan: CopyPlan) -> dict[int, bytes]:
        """Of what other ranks hold too of the blocks of a plan, by the number of those ranks together."""
        group, twins = self._groups[plan.group], self._twins[plan.group].tolist()
        found = {number: blake3() for number in sorted({*twins} - {-1})}
        if found:
            blocks = torch.from_numpy(plan.blocks).to(group.runs[0].device)
            for run, piece in zip(group.runs, group.piece_of_run, strict=True):
                if twins[piece] in found:
                    found[twins[piece]].update(run[blocks].cpu().numpy().tobytes())
        return {number: digest.digest() for number, digest in found.items()}

    def _copy(self, plan: CopyPlan, runs: _Runs, *, to_arena: bool) -> int:
        if not plan.copies or not runs.views:
            return 0
        addresses = self._addresses(plan)
        if self._on_host:
            return self._move(plan, addresses, runs, to_arena=to_arena)
        arena = torch.from_numpy(self._arena)
        ranges = list(zip(runs.views, runs.begins.tolist(), runs.lengths.tolist(), strict=True))
        for block, address in zip(plan.blocks.tolist(), addresses.tolist(), strict=True):
            for run, begin, length in ranges:
                stored = arena[address + begin : address + begin + length]
                if to_arena:
                    stored.copy_(run[block])
                else:
                    run[block].copy_(stored)
        return int(plan.copies * runs.lengths.sum())

    def _addresses(self, plan: CopyPlan) -> IntArray:
        """Where each copy's block begins in the arena. Raises TransferError for a plan that reaches outside."""
        slab = self._slab_of[plan.group]
        for values, first, end in (
            (plan.blocks, 0, min((run.shape[0] for run in self._groups[plan.group].runs), default=0)),
            (plan.slots, slab.first_slot, slab.first_slot + slab.slots),
            (plan.offsets, 0, slab.slot_bytes // max(1, self._shared.bytes_per_block[plan.group])),
        ):
            if plan.copies and not (first <= int(values.min()) and int(values.max()) < end):
                raise TransferError(f"a plan of group {plan.group} names addresses outside of [{first}, {end})")
        return plan.addresses(slab, self._shared.bytes_per_block[plan.group])

    def _move(self, plan: CopyPlan, addresses: IntArray, runs: _Runs, *, to_arena: bool) -> int:
        """Plain memory on both sides. Runs that lie side by side on both sides move as one; other threads run
        meanwhile, since ``memmove`` is called without the interpreter's lock.
        """
        host = ((addresses + self._arena.ctypes.data)[:, np.newaxis] + runs.begins).ravel()
        device = (runs.pointers + plan.blocks[:, np.newaxis] * runs.strides).ravel()
        sizes = np.tile(runs.lengths, plan.copies)
        joined = (np.diff(host) == sizes[:-1]) & (np.diff(device) == sizes[:-1])
        first = np.concatenate([[True], ~joined])
        at = np.flatnonzero(first)
        sizes = np.add.reduceat(sizes, at)
        sources, targets = (device[at], host[at]) if to_arena else (host[at], device[at])
        for source, target, size in zip(sources.tolist(), targets.tolist(), sizes.tolist(), strict=True):
            ctypes.memmove(target, source, size)
        return int(sizes.sum())
