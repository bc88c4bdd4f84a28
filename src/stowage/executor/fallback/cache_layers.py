"""Transformers' cache layers that keep their tensors in the device pools: the ``Cache`` that fallback models see.

Owns the copies between a layer's tensors and the blocks of one sequence. A model that reads a layer's keys gets a
contiguous copy of them, which lives while that layer computes; new keys go into the pool at once. So besides the pools
there is never more than one layer's keys and values in memory, and the bytes are those that Transformers' own layer
would have returned (``trial``).

    update(new keys)  ->  written to the blocks of tokens [start, end)
                      ->  returns tokens [0, end), or those of the window, as one tensor  [1, heads, tokens, dim]
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import cache as remembered
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from torch import Tensor
from transformers import DynamicCache
from transformers.cache_utils import DynamicSlidingWindowLayer, LinearAttentionLayer

from stowage.core.geometry import NULL_BLOCK, Kind
from stowage.executor.block_pool import BlockPool
from stowage.executor.block_table import OFFLOADED
from stowage.models.layout import ModelLayout


class BlockPart(NamedTuple):
    """Rows ``[begin, end)`` lie in ``whole`` blocks from ``block`` on, or (0) in that one from row ``offset`` on."""

    begin: int
    end: int
    block: int
    offset: int
    whole: int


class TokenSpan:
    """A forward computes ``count`` tokens of one sequence from ``start`` on; ``BlockTable.addresses`` by group."""

    def __init__(self, start: int, count: int, addresses: Sequence[NDArray[np.int64]]) -> None:
        self.start, self.end, self.addresses = start, start + count, addresses
        self._known: dict[tuple[int, int, int, int], list[BlockPart]] = {}

    def parts(self, group: int, per_block: int, first: int, end: int) -> list[BlockPart]:
        """Where rows ``[first, end)`` of ``group`` lie, ``per_block`` in a block; blocks side by side are one part."""
        asked = (group, per_block, first, end)
        if asked not in self._known:
            self._known[asked] = list(_parts(self.addresses[group], per_block, first, end))
        return self._known[asked]


def _parts(addresses: NDArray[np.int64], per_block: int, first: int, end: int) -> Iterator[BlockPart]:
    edges = [0, *(np.flatnonzero(np.diff(addresses) != 1) + 1).tolist(), len(addresses)]
    for begin, stop in pairwise(edges):  # blocks whose numbers follow one another
        at, last = max(first, begin * per_block), min(end, stop * per_block)
        while at < last:
            index, offset = divmod(at, per_block)
            whole = 0 if offset else (last - at) // per_block
            upto = at + whole * per_block if whole else min(last, (index + 1) * per_block)
            yield BlockPart(at, upto, int(addresses[index]), offset, whole)
            at = upto


class PooledRows:
    """One tensor of one layer, tensor ``part`` of layer ``layer`` of ``pool``: ``[blocks, heads, rows, dim]``. Blocks
    may be offloaded, but those that are written are not.
    """

    def __init__(self, pool: BlockPool, layer: int, part: int) -> None:
        self._pool, self._layer, self._part = pool, layer, part
        self._view = pool.views[layer][part]
        self._group, self._rows = pool.group.index, self._view.shape[2]

    def put(self, at: TokenSpan, first: int, new: Tensor) -> None:
        """``new`` ``[1, heads, rows, dim]`` becomes the rows from ``first`` on."""
        for part in at.parts(self._group, self._rows, first, first + new.shape[2]):
            assert part.block > NULL_BLOCK, "rows are put into a block that the device does not have"
            self._inside(part).copy_(self._outside(part, new[0], first))

    def get(self, at: TokenSpan, first: int, end: int) -> Tensor:
        """Rows ``[first, end)`` as ``[1, heads, rows, dim]``, in one piece."""
        out = self._view.new_empty((1, self._view.shape[1], end - first, self._view.shape[3]))
        for part in at.parts(self._group, self._rows, first, end):
            self._outside(part, out[0], first).copy_(self._inside(part))
        return out

    def _inside(self, part: BlockPart) -> Tensor:
        """The part in the pool: ``[heads, rows, dim]``, or ``[heads, blocks, rows, dim]``."""
        view, block = self._view, part.block
        if block < 0:
            assert block <= OFFLOADED, "a block is read that is nowhere"
            view, block = self._pool.offloaded[self._layer][self._part][OFFLOADED - block :], 0
        if part.whole:
            return view[block : block + part.whole].transpose(0, 1)
        return view[block, :, part.offset : part.offset + part.end - part.begin]

    def _outside(self, part: BlockPart, rows: Tensor, first: int) -> Tensor:
        """The part in a tensor ``[heads, rows, dim]`` of the rows from ``first`` on, in the same shape."""
        mine = rows[:, part.begin - first : part.end - first]
        return mine.unflatten(1, (part.whole, self._rows)) if part.whole else mine  # type: ignore[no-untyped-call]


class PooledState:
    """One tensor of one layer that has the same size after any number of tokens: ``view`` is ``[blocks, ...]``."""

    def __init__(self, view: Tensor, group: int) -> None:
        self._view, self._group = view, group

    def of(self, at: TokenSpan) -> Tensor:
        """The sequence's state ``[1, ...]``, a view of the pool."""
        block = int(at.addresses[self._group][0])
        return self._view[block : block + 1]


class Pooled:
    """The cache of a fallback model, with its tensors in the pools. ``cache``, a new one for the fallback model, whose
    layers are replaced. One instance lives as long as its runner; ``begin`` and ``end`` enclose every forward.
    """

    def __init__(self, cache: DynamicCache, layout: ModelLayout, pools: Sequence[BlockPool]) -> None:
        self.cache = cache
        self._pooled: list[Any] = []
        rows: dict[int, dict[str, PooledRows]] = {}
        states: dict[int, dict[str, PooledState]] = {}
        for block, pool in zip(layout.blocks, pools, strict=True):
            for layer in block.layers:
                for part, (tensor, view) in enumerate(zip(layer.tensors, pool.views[layer.index], strict=True)):
                    if layer.kind is Kind.RECURRENT:
                        states.setdefault(layer.index, {})[tensor.name] = PooledState(view, block.group.index)
                    else:
                        rows.setdefault(layer.index, {})[tensor.name] = PooledRows(pool, layer.index, part)
        for index in sorted({*rows, *states}):
            plain = cache.layers[index]
            stand_in: Any = _pooled(type(plain), index in rows)  # type: ignore[arg-type]
            layer = stand_in(vars(plain), rows.get(index, {}), states.get(index, {}))
            cache.layers[index] = layer
            self._pooled.append(layer)

    def begin(self, at: TokenSpan) -> None:
        """The coming forward computes ``at``: layers are as after the tokens before it."""
        for layer in self._pooled:
            layer.begin(at)

    def end(self) -> None:
        """The forward is done: put what layers keep by themselves into the pool."""
        for layer in self._pooled:
            layer.end()


class _Layer:
    """Base of the replacement layers: the fields of the layer that it replaces, and its tensors' slots in the pool."""

    def __init__(
        self, fields: Mapping[str, Any], rows: Mapping[str, PooledRows], states: Mapping[str, PooledState]
    ) -> None:
        self.__dict__.update(fields)
        self.rows, self.states = rows, states
        self.at = TokenSpan(0, 0, ())

    def begin(self, at: TokenSpan) -> None:
        self.at = at

    def end(self) -> None:
        pass

    def swap(self, new: Mapping[str, Tensor], first: int) -> list[Tensor]:
        """Write the new tokens' rows ``[1, heads, tokens, dim]``; returns all rows from ``first`` on."""
        for name, tensor in new.items():
            self.rows[name].put(self.at, self.at.start, tensor)
        return [self.rows[name].get(self.at, first, self.at.end) for name in new]


class _Full(_Layer):
    """Replaces ``DynamicLayer``, and layers with the keys of an indexer."""

    def begin(self, at: TokenSpan) -> None:
        super().begin(at)
        self.length, self.is_initialized = at.start, at.start > 0

    def update(self, key_states: Tensor, value_states: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        self.length, self.is_initialized = self.at.end, True
        keys, values = self.swap({"keys": key_states, "values": value_states}, 0)
        return keys, values

    def update_indexer(self, indexer_key_states: Tensor) -> Tensor:
        (keys,) = self.swap({"indexer_keys": indexer_key_states[:, None]}, 0)
        return keys[:, 0]

    def update_index(self, idx_k: Tensor) -> Tensor:
        (keys,) = self.swap({"idx_keys": idx_k}, 0)
        return keys

    def get_seq_length(self) -> int:
        return self.length

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.length + query_length, 0


class _Window(_Layer):
    """Replaces ``DynamicSlidingWindowLayer``, which gets its mask's sizes from ``cumulative_length``."""

    sliding_window: int

    def begin(self, at: TokenSpan) -> None:
        super().begin(at)
        self.cumulative_length, self.is_initialized = at.start, at.start > 0

    def update(self, key_states: Tensor, value_states: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        self.cumulative_length, self.is_initialized = self.at.end, True
        first = max(0, self.at.start - self.sliding_window + 1)
        new = {"keys": key_states, "values": value_states} if "values" in self.rows else {"keys": key_states}
        found = self.swap(new, first)
        return found[0], found[-1]


class _Compressed(_Window):
    """A window with compressors: see ``transformers.models.deepseek_v4``."""

    compress_rate: int
    compressed_kv: dict[str, Any]
    entry_count: dict[str, int]

    def begin(self, at: TokenSpan) -> None:
        super().begin(at)
        entries, waiting = divmod(at.start, self.compress_rate)
        self.entry_count = dict.fromkeys(self.compressed_kv, entries)
        for name, state in self.states.items():
            attribute, of = name.split("/")
            held = state.of(at)[:, :waiting] if attribute.startswith("buffer") else state.of(at)
            there = waiting if attribute.startswith("buffer") else entries
            getattr(self, attribute)[of] = held if there else None

    def update_compressor_states(self, name: str, compressed: Tensor) -> Tensor:
        """Append new entries ``[1, entries, dim]``; returns all entries."""
        rows, known = self.rows[f"compressed_kv/{name}"], self.entry_count[name]
        rows.put(self.at, known, compressed[:, None])
        self.entry_count[name] = known + compressed.shape[1]
        return rows.get(self.at, 0, self.entry_count[name])[:, 0]

    def end(self) -> None:
        for name, state in self.states.items():
            attribute, of = name.split("/")
            tensor = getattr(self, attribute)[of]
            if tensor is not None:
                state.of(self.at)[:, : tensor.shape[1]].copy_(tensor)
            getattr(self, attribute)[of] = None


class _Linear(_Layer):
    """Layers with convolution or recurrent states, which models write in place, or replace."""

    def begin(self, at: TokenSpan) -> None:
        super().begin(at)
        for name, state in self.states.items():
            attribute, number = name.split("/")
            held = state.of(at)
            if not at.start:
                held.zero_()
            getattr(self, attribute)[int(number)] = held
            getattr(self, f"is_{attribute}_initialized")[int(number)] = True
            if attribute == "conv_states":
                self.conv_kernel_size[int(number)] = held.shape[-1]
            self.dtype, self.device = held.dtype, held.device
            self.has_previous_state[int(number)] = at.start > 0

    conv_kernel_size: dict[int, int]
    has_previous_state: dict[int, bool]

    def end(self) -> None:
        for name, state in self.states.items():
            attribute, number = name.split("/")
            held, tensor = state.of(self.at), getattr(self, attribute)[int(number)]
            if tensor.data_ptr() != held.data_ptr():
                held.copy_(tensor)
            getattr(self, attribute)[int(number)] = None


@remembered
def _pooled(plain: Any, attends: bool) -> Any:
    """The class that replaces the cache layer class ``plain``. ``attends``: it keeps keys."""
    parts: list[type[Any]] = []
    if issubclass(plain, LinearAttentionLayer):
        parts.append(_Linear)
    if attends and not issubclass(plain, DynamicSlidingWindowLayer):
        parts.append(_Full)
    elif attends:
        parts.append(_Compressed if hasattr(plain, "update_compressor_states") else _Window)
    own = {"_layer_type": None}  # a class with a name there would be registered instead of the plain one
    return type(f"Pooled{plain.__name__}", (*parts, plain), own)
