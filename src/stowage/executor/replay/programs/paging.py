"""What a program does in the place of ``PagedCache.update`` and ``paged_attention``, where the kernels compute that.

Owns which buffers hold what a step of ``batch.current`` says of a group: where its new tokens go and which blocks they
read. Everything else of a group is the same in each step of single tokens. Either all of a step's layers are taken or
none: which layer an attention reads is known from what was written before it.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from stowage.executor import kernels
from stowage.executor.attention import paged_attention
from stowage.executor.batch import GroupStep, current
from stowage.executor.block_pool import BlockPool
from stowage.executor.paged_cache import PagedCache
from stowage.executor.replay.calls.call_list import WrittenCall, arguments_of
from stowage.executor.replay.programs.buffers import Address, Buffer, Buffers
from stowage.executor.replay.programs.operations import (
    COPY,
    NOWHERE,
    NotTaken,
    Operation,
    Side,
    bits,
    check,
    new,
    pointwise,
    read,
    whole,
)
from stowage.models.layout import TENSOR_ALIGNMENT_BYTES

_PUT, _ATTEND = 4, 5
_UPDATE: Any = PagedCache.update.__wrapped__  # type: ignore[attr-defined]
_ATTENTION: Any = paged_attention.__wrapped__  # type: ignore[attr-defined]


@dataclass(frozen=True, slots=True)
class _Group:
    """Where the tensors of this name of ``of_layer[layer]`` are."""

    layer: int
    blocks: Address
    offsets: Address
    table: Address
    runs: Address


@dataclass(frozen=True, slots=True, eq=False)
class StepAddresses:
    """Says where a step has what programs read. ``groups``: a layer, and slots of blocks, offsets, table and runs;
    ``away``: slots of a layer's keys and values in host memory.
    """

    addresses: array[int]
    groups: tuple[tuple[int, tuple[int, ...]], ...]
    away: tuple[tuple[BlockPool, int, tuple[int, ...]], ...]

    def __call__(self) -> None:
        step, addresses = current.get(), self.addresses
        for layer, slots in self.groups:
            group = step.of_layer[layer]
            assert group.runs is not None, "single tokens are computed in one way"
            there = group.blocks, group.offsets, group.runs.table, group.runs.runs
            for slot, tensor in zip(slots, there, strict=True):
                addresses[slot] = tensor.data_ptr()
        for pool, layer, slots in self.away:
            if pool.away:
                for slot, tensor in zip(slots, pool.away[layer], strict=True):
                    addresses[slot] = tensor.data_ptr()


@dataclass(slots=True)
class Paging:
    """Of the step that ``buffers`` are of, while it is looked at; ``batch.current`` is that step."""

    buffers: Buffers
    _groups: dict[int, _Group] = field(default_factory=dict)
    _away: dict[int, tuple[BlockPool, Address, Address]] = field(default_factory=dict)
    _written: int | None = None

    def operations(self, call: WrittenCall) -> list[Operation] | None:
        """``None``: it is no such call. Raises ``NotTaken`` if it is one that only Python can make."""
        function, args, named = arguments_of(call.function, [self.buffers.at(index) for index in call.arguments])
        if function is _UPDATE:
            return self._update(*args[1:4])
        if function is _ATTENTION:
            return self._attention(args, named, self.buffers.step.objects[call.result])
        return None

    def addresses(self, addresses: array[int], slot: Callable[[Buffer], int]) -> StepAddresses:
        """What must be called before each replay."""
        groups = tuple(
            (one.layer, tuple(slot(address.buffer) for address in (one.blocks, one.offsets, one.table, one.runs)))
            for one in self._groups.values()
        )
        away = tuple(
            (pool, layer, (slot(keys.buffer), slot(values.buffer)))
            for layer, (pool, keys, values) in self._away.items()
        )
        return StepAddresses(addresses, groups, away)

    def _group(self, layer: int) -> tuple[_Group, GroupStep]:
        step = current.get(None)
        if step is None:
            raise NotTaken
        group = step.of_layer[layer]
        latent = group.pool.layout.layers[0].latent
        tokens = step.ids.shape[0]
        check(not latent and group.runs is not None and step.decodes == tokens == group.runs.runs.shape[0])
        if id(group) not in self._groups:
            addresses = [self.buffers.of_steps() for _ in range(4)]
            self._groups[id(group)] = _Group(layer, *addresses)
        return self._groups[id(group)], group

    def _update(self, key: Tensor, value: Tensor, layer: int) -> list[Operation]:
        where, group = self._group(layer)
        self._written = layer
        done = []
        for view, states in zip(group.pool.views[layer], (key, value), strict=True):
            batch, heads, length, width = states.shape
            check(states.dtype is view.dtype and view.stride(3) == 1 and (states.stride(3) == 1 or width == 1))
            check(self.buffers.is_ours(states) and (batch == 1 or length == 1))
            size = view.element_size()
            token = states.stride(2 if batch == 1 else 0) * size
            words: list[int | Address] = [self.buffers.address_of(view), *(view.stride(at) * size for at in range(3))]
            words += [where.blocks, where.offsets]
            words += [
                self.buffers.address_of(states),
                token,
                states.stride(1) * size,
                batch * length,
                heads,
                width * size,
            ]
            done.append(Operation((_PUT, *words)))
        return done

    def _attention(self, args: list[Any], named: dict[str, Any], found: Any) -> list[Operation]:
        module, query = args[:2]
        layer = int(module.layer_idx) if self._written is None else self._written
        self._written = None
        where, group = self._group(layer)
        keys, values = group.pool.views[layer]
        runs, out = group.runs, found[0]
        assert runs is not None
        batch, heads, length, width = query.shape
        tokens, kv_heads, value_width = batch * length, keys.shape[2], values.shape[3]
        check(self.buffers.is_new(out) and self.buffers.is_ours(query) and keys.stride(3) == values.stride(3) == 1)
        begin, done = self._in_order(query.transpose(1, 2))
        sinks, more = self._sinks(named.get("s_aux"))
        done += more
        half = query.dtype is torch.bfloat16
        sums = self.buffers.temporary(tokens * heads * value_width * 4) if half else self.buffers.made(out)
        scale = named.get("scaling", args[5] if len(args) > 5 else None)
        away = self._away_of(group.pool, layer)
        words: list[int | Address] = [_ATTEND, begin, sums]
        for view, there in zip((keys, values), away, strict=True):
            words += [
                self.buffers.address_of(view),
                *view.stride()[:3],
                there,
                TENSOR_ALIGNMENT_BYTES // view.element_size(),
            ]
        words += [where.table, where.runs, *sinks, runs.runs.shape[0], kv_heads, heads // kv_heads, width, value_width]
        words += [runs.block_tokens, runs.window, kernels.KINDS[runs.kind]]
        words += [bits(width**-0.5 if scale is None else scale), bits(named.get("softcap") or 0.0), int(half)]
        done.append(Operation(tuple(words)))
        if half:
            wide = Side(sums, torch.float32, whole(out.shape))
            done.append(pointwise(out.shape, COPY, new(self.buffers, out), wide))
        return done

    def _in_order(self, tensor: Tensor) -> tuple[Address, list[Operation]]:
        """Its address, once its numbers lie in their order."""
        if tensor.is_contiguous():
            return self.buffers.address_of(tensor), []
        address = self.buffers.temporary(tensor.numel() * tensor.element_size())
        copy = Side(address, tensor.dtype, whole(tensor.shape))
        return address, [pointwise(tensor.shape, COPY, copy, read(self.buffers, tensor, tensor.shape))]

    def _sinks(self, sinks: Any) -> tuple[tuple[int | Address, ...], list[Operation]]:
        if sinks is None:
            return NOWHERE, []
        address = self.buffers.temporary(sinks.numel() * 4)
        wide = Side(address, torch.float32, whole(sinks.shape))
        return (address,), [pointwise(sinks.shape, COPY, wide, read(self.buffers, sinks, sinks.shape))]

    def _away_of(self, pool: BlockPool, layer: int) -> tuple[Address, Address]:
        if layer not in self._away:
            self._away[layer] = (pool, self.buffers.of_steps(), self.buffers.of_steps())
        _, keys, values = self._away[layer]
        return keys, values
