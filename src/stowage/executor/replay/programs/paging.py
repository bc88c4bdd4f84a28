"""Lowers ``PagedCache.update`` and ``paged_attention`` to operations, where the kernels compute them, and the look-up
of what depends on positions alone.

Owns the addresses of the tensors in ``batch.current``: a group's, where its new tokens are written and which blocks
they read, and its positions. Everything else of a group is the same in each step of single tokens. Either all of a
step's layers are lowered or none: an attention reads the layer that was updated before it.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import torch
from torch import Tensor

from stowage.core.geometry import ALIGNMENT_BYTES
from stowage.executor import kernels
from stowage.executor.attention import paged_attention
from stowage.executor.batch import GroupStep, current
from stowage.executor.block_pool import BlockPool
from stowage.executor.paged_cache import PagedCache
from stowage.executor.replay.calls.call_list import TracedCall, arguments_of
from stowage.executor.replay.calls.position_tables import PositionTables
from stowage.executor.replay.programs.buffers import Address, Buffer, Buffers
from stowage.executor.replay.programs.encoding import (
    ATTEND,
    COPY,
    LOOK_UP_ROWS,
    NOWHERE,
    PUT,
    STACKED,
    Operand,
    Operation,
    UnsupportedCall,
    bits,
    check,
    new,
    pointwise,
    read,
    whole,
)

_UPDATE: Any = PagedCache.update.__wrapped__  # type: ignore[attr-defined]
_ATTENTION: Any = paged_attention.__wrapped__  # type: ignore[attr-defined]
_ANY: Final = 1 << 62
"""More rows than there are: ``PositionTables`` has those that are asked for."""


@dataclass(frozen=True, slots=True)
class _Group:
    """The addresses of the tensors of the same names of ``of_layer[layer]``."""

    layer: int
    blocks: Address
    offsets: Address
    table: Address
    runs: Address


@dataclass(frozen=True, slots=True)
class _Reads:
    """The inputs of an attention; ``numbers``: its scale and soft cap."""

    layer: int
    where: _Group
    group: GroupStep
    heads: int
    numbers: tuple[int, int]
    sinks: tuple[int | Address, ...]


@dataclass(frozen=True, slots=True, eq=False)
class StepAddresses:
    """Sets the addresses that change with each step, in the slots that programs read. ``groups``: a layer, and slots of
    its blocks, offsets, table and runs; ``tables``: slots of the numbers of their rows, and of each; ``offloaded``:
    slots of a layer's keys and values in host memory, or of its latents; ``latents``: an attention, its heads, and
    slots of the matrices for queries and mixed latents.
    """

    addresses: array[int]
    groups: tuple[tuple[int, tuple[int, ...]], ...]
    tables: tuple[tuple[PositionTables, tuple[int, ...]], ...]
    offloaded: tuple[tuple[BlockPool, int, tuple[int, ...]], ...]
    latents: tuple[tuple[Any, int, tuple[int, ...]], ...]

    def __call__(self) -> None:
        step, addresses = current.get(), self.addresses
        for layer, slots in self.groups:
            group = step.of_layer[layer]
            assert group.runs is not None, "single tokens are computed in one way"
            there = group.blocks, group.offsets, group.runs.table, group.runs.runs
            for slot, tensor in zip(slots, there, strict=True):
                addresses[slot] = tensor.data_ptr()
        for tables, slots in self.tables:
            assert step.furthest is not None, "positions are in host memory"
            for slot, address in zip(slots, tables.addresses(step.positions, step.furthest), strict=True):
                addresses[slot] = address
        for pool, layer, slots in self.offloaded:
            if pool.offloaded:
                for slot, tensor in zip(slots, pool.offloaded[layer], strict=True):
                    addresses[slot] = tensor.data_ptr()
        for module, heads, slots in self.latents:
            for slot, tensor in zip(slots, step.latent_weights.of(module, heads), strict=True):
                addresses[slot] = tensor.data_ptr()


@dataclass(slots=True)
class Paging:
    """Lowers the calls of the step of ``buffers``, which is ``batch.current`` meanwhile."""

    buffers: Buffers
    _groups: dict[int, _Group] = field(default_factory=dict)
    _offloaded: dict[int, tuple[BlockPool, tuple[Address, ...]]] = field(default_factory=dict)
    _latents: list[tuple[Any, int, tuple[Address, Address]]] = field(default_factory=list)
    _tables: list[tuple[PositionTables, tuple[Address, ...]]] = field(default_factory=list)
    _written: int | None = None

    def operations(self, call: TracedCall) -> list[Operation] | None:
        """The operations; ``None``: another call. Raises ``UnsupportedCall`` for one that only Python can make."""
        function, args, named = arguments_of(call.function, [self.buffers.at(index) for index in call.arguments])
        if function is _UPDATE:
            return self._update(*args[1:4])
        if function is _ATTENTION:
            return self._attention(args, named, self.buffers.step.objects[call.result])
        if getattr(function, "__func__", None) is PositionTables.rows:
            return self._looked_up(function.__self__, self.buffers.step.objects[call.result])
        return None

    def _looked_up(self, tables: PositionTables, found: Sequence[Tensor]) -> list[Operation] | None:
        """The rows of the step's positions in each of ``tables``; ``None``: they are no rows of contiguous numbers."""
        step = current.get(None)
        whole_rows = all(self.buffers.is_new(one) and one.is_contiguous() for one in found)
        if step is None or not (whole_rows and tables.in_rows):
            return None
        rows = len(step.positions)
        chosen, *places = (self.buffers.of_steps() for _ in range(1 + len(found)))
        self._tables.append((tables, (chosen, *places)))
        done = []
        for out, place in zip(found, places, strict=True):
            row = out.nbytes // rows
            done.append(Operation((LOOK_UP_ROWS, self.buffers.made(out), place, chosen, rows, _ANY, row, row, 0, 0, 0)))
        return done

    def addresses(self, addresses: array[int], slot: Callable[[Buffer], int]) -> StepAddresses:
        """The call that must precede each replay."""
        groups = tuple(
            (one.layer, tuple(slot(address.buffer) for address in (one.blocks, one.offsets, one.table, one.runs)))
            for one in self._groups.values()
        )
        offloaded = tuple(
            (pool, layer, tuple(slot(address.buffer) for address in there))
            for layer, (pool, there) in self._offloaded.items()
        )
        tables = tuple((tables, tuple(slot(address.buffer) for address in there)) for tables, there in self._tables)
        latents = tuple(
            (module, heads, tuple(slot(address.buffer) for address in there)) for module, heads, there in self._latents
        )
        return StepAddresses(addresses, groups, tables, offloaded, latents)

    def _group(self, layer: int) -> tuple[_Group, GroupStep]:
        step = current.get(None)
        if step is None:
            raise UnsupportedCall
        group = step.of_layer[layer]
        check(group.runs is not None)
        if id(group) not in self._groups:
            addresses = [self.buffers.of_steps() for _ in range(4)]
            self._groups[id(group)] = _Group(layer, *addresses)
        return self._groups[id(group)], group

    def _update(self, key: Tensor, value: Tensor, layer: int) -> list[Operation]:
        where, group = self._group(layer)
        self._written = layer
        done = []
        views = group.pool.views[layer]
        if len(views) == 1:  # latent and rope key share one row
            views = views[0][..., : key.shape[3]], views[0][..., key.shape[3] :]
        for view, states in zip(views, (key, value), strict=True):
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
            done.append(Operation((PUT, *words)))
        return done

    def _attention(self, args: list[Any], named: dict[str, Any], found: Any) -> list[Operation]:
        module, query = args[:2]
        layer = int(module.layer_idx) if self._written is None else self._written
        self._written = None
        where, group = self._group(layer)
        batch, heads, length, width = query.shape
        check(self.buffers.is_new(found[0]) and self.buffers.is_ours(query) and (batch == 1 or length == 1))
        scale = named.get("scaling", args[5] if len(args) > 5 else None)
        numbers = bits(width**-0.5 if scale is None else scale), bits(named.get("softcap") or 0.0)
        sinks, done = self._sinks(named.get("s_aux"))
        reads = _Reads(layer, where, group, heads, numbers, sinks)
        each, out = query.transpose(1, 2).flatten(0, 1), found[0].flatten(0, 1)
        self.buffers.made(found[0])
        if group.pool.layout.layers[0].latent:
            return done + self._latents_read(module, each, out, reads)
        begin, more = self._in_order(each)
        return [*done, *more, *self._attended(begin, width, group.pool.views[layer], reads, new(self.buffers, out))]

    def _attended(
        self, query: Address, width: int, views: Sequence[Tensor], reads: _Reads, out: Operand
    ) -> list[Operation]:
        """The attention of queries of ``width`` into ``out``, which is contiguous."""
        keys, values = views
        runs, half = reads.group.runs, out.dtype is torch.bfloat16
        assert runs is not None
        check(keys.stride(3) == values.stride(3) == 1)
        kv_heads = keys.shape[2]
        offloaded = self._offloaded_of(reads.group.pool, reads.layer)
        words: list[int | Address] = [ATTEND, query, out.address]
        for view, there in zip(views, (offloaded[0], offloaded[-1]), strict=True):
            unit = ALIGNMENT_BYTES // view.element_size()
            words += [self.buffers.address_of(view), *view.stride()[:3], there, unit]
        words += [reads.where.table, reads.where.runs, *reads.sinks, runs.runs.shape[0], kv_heads]
        words += [reads.heads // kv_heads, width, values.shape[3], runs.block_tokens, runs.window]
        rounded_from = current.get().rounded_from if half else kernels.NEVER
        return [Operation((*words, kernels.KINDS[runs.kind], *reads.numbers, int(half), rounded_from))]

    def _latents_read(self, module: Any, query: Tensor, out: Tensor, reads: _Reads) -> list[Operation]:
        """``attention._paged_latent`` of ``query`` ``[tokens, heads, width]``."""
        weights = current.get().latent_weights
        check(not self.buffers.any_rows)  # each token has operations of its own
        check(weights.stays(module) and module.kv_b_proj.weight.dtype is query.dtype)
        (tokens, heads, width), size = query.shape, query.element_size()
        for_queries, for_values = weights.of(module, heads)
        rank, nope = for_queries.shape[1:]
        wide = rank + width - nope
        there = self.buffers.of_steps(), self.buffers.of_steps()
        self._latents.append((module, heads, there))
        seen, mixed = (self.buffers.temporary(tokens * heads * numbers * size) for numbers in (wide, rank))
        done = []
        for token, rows in enumerate(query[..., :nope]):
            given = self.buffers.address_of(rows), rows.stride(0)
            done.append(self._per_head(given, for_queries, there[0], (_after(seen, token * heads * wide * size), wide)))
        turned, place = query[..., nope:], Operand(_after(seen, rank * size), query.dtype, (heads * wide, wide, 1))
        done.append(pointwise(turned.shape, COPY, place, read(self.buffers, turned, turned.shape)))
        view = reads.group.pool.views[reads.layer][0]
        to = Operand(mixed, query.dtype, whole((tokens, heads, rank)))
        done += self._attended(seen, wide, (view, view[..., :rank]), reads, to)
        for token, rows in enumerate(out):
            begin, end = _after(mixed, token * heads * rank * size), self.buffers.made(out)
            end = _after(end, token * rows.numel() * size)
            done.append(self._per_head((begin, rank), for_values, there[1], (end, rows.shape[1])))
        return done

    def _per_head(
        self, given: tuple[Address, int], weight: Tensor, lies: Address, to: tuple[Address, int]
    ) -> Operation:
        """``kernels.per_head`` of one token: address and stride, in numbers, of its rows, and of the results.
        ``lies``: the address of ``weight`` ``[heads, outputs, inputs]``.
        """
        check(weight[0].is_contiguous())
        form, halves = kernels.form_of(weight, kernels.of_plain(weight[0]))
        check(halves or weight.dtype is torch.float32)
        (heads, outputs, inputs), size = weight.shape, weight.element_size()
        words = (STACKED, heads, *NOWHERE, 1, given[0], heads, inputs, given[1], 0, form, int(halves))
        matrix = (lies, *NOWHERE, to[0], outputs, inputs, 0, *NOWHERE, 1, 0)
        return Operation((*words, *matrix, to[1] * size, weight.stride(0) * size, 0, 0))

    def _in_order(self, tensor: Tensor) -> tuple[Address, list[Operation]]:
        """The address of a contiguous form of ``tensor``, and the operations that make it."""
        if tensor.is_contiguous():
            return self.buffers.address_of(tensor), []
        address = self.buffers.temporary(tensor.nbytes)
        copy = Operand(address, tensor.dtype, whole(tensor.shape))
        return address, [pointwise(tensor.shape, COPY, copy, read(self.buffers, tensor, tensor.shape))]

    def _sinks(self, sinks: Any) -> tuple[tuple[int | Address, ...], list[Operation]]:
        if sinks is None:
            return NOWHERE, []
        address = self.buffers.temporary(sinks.numel() * 4)
        wide = Operand(address, torch.float32, whole(sinks.shape))
        return (address,), [pointwise(sinks.shape, COPY, wide, read(self.buffers, sinks, sinks.shape))]

    def _offloaded_of(self, pool: BlockPool, layer: int) -> tuple[Address, ...]:
        if layer not in self._offloaded:
            self._offloaded[layer] = pool, tuple(self.buffers.of_steps() for _ in pool.views[layer])
        return self._offloaded[layer][1]


def _after(address: Address, nbytes: int) -> Address:
    """The address ``nbytes`` further on."""
    return address._replace(offset=address.offset + nbytes)
