"""Classifies what Transformers' own cache of a model keeps in each layer; every cache layout is made from this.

Owns it: it goes by the class of each layer of a ``DynamicCache`` and by what it holds after a forward, never by a
model's name. A class that is not known here is refused with ``UnsupportedModelError``. Who lays groups out takes the
layers as they come from here, or refuses some: ``paged_layout``, ``fallback_layout``, ``plugins.transformers.layout``.

    DynamicLayer                    keys, values of all tokens                        full
    DynamicIndexedLayer             and the keys of an indexer (DeepSeek-V3.2)        full
    with ``idx_keys``               the same (MiniMax-M3)                             full
    DynamicSlidingWindowLayer       keys, values of the last window - 1 tokens        sliding
    with compressors (DeepSeek-V4)  the same,                                         sliding
                                    one entry for every ``compress_rate`` tokens,     full, a row for so many tokens
                                    tokens that are not compressed yet, and what      recurrent: small, and known by
                                    the next entry takes from the last window         the number of tokens alone
    with linear attention           convolution and recurrent states                  recurrent
    that only stands in for one     nothing                                           none

A chunked-local layer is a sliding one here: Transformers keeps the same tokens for both. Counters (tokens seen, entries
made) follow from the number of tokens, so none is kept.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from transformers.cache_utils import (
    DynamicIndexedLayer,
    DynamicLayer,
    DynamicSlidingWindowLayer,
    LinearAttentionAndFullAttentionLayer,
    LinearAttentionAndSlidingWindowAttentionLayer,
    LinearAttentionLayer,
)

from stowage.core.geometry import Kind
from stowage.errors import UnsupportedModelError
from stowage.models import compat
from stowage.models.layout import Layer, LayerTensor, State

_KNOWN = (
    DynamicLayer,
    DynamicIndexedLayer,
    DynamicSlidingWindowLayer,
    LinearAttentionLayer,
    LinearAttentionAndFullAttentionLayer,
    LinearAttentionAndSlidingWindowAttentionLayer,
)
_COMPRESSED = frozenset("compress_rate buffer_kv buffer_gate compressed_kv entry_count overlap_kv overlap_gate".split())
"""What a layer with compressors has besides its window."""
_WINDOW_LEAST = 4


def layers_of(cache: Any) -> list[Layer]:
    """What ``cache`` keeps; several parts of one cache layer, each of one geometry, follow one another.

    ``cache``: Transformers' own, after a forward of one prompt that is long enough that each layer holds all it does.
    """
    return [layer for index, kept in enumerate(cache.layers) for layer in _parts(index, kept)]


def refuse_small_windows(layers: list[Layer]) -> None:
    """Raise ``UnsupportedModelError`` for windows of which Transformers' cropping leaves nothing to go on from."""
    for layer in layers:
        if 0 < layer.window < _WINDOW_LEAST:
            raise UnsupportedModelError(
                f"layer {layer.index} has a window of {layer.window} tokens; the least is {_WINDOW_LEAST}."
            )


def states_of(kept: Any) -> tuple[State, ...]:
    """Which recurrent tensors a layer of Transformers' cache holds, state by state."""
    return tuple(
        (name, index)
        for index in range(getattr(kept, "number_of_states", 0))
        for name in ("conv_states", "recurrent_states")
        if getattr(kept, name)[index] is not None
    )


def _parts(index: int, kept: Any) -> Iterator[Layer]:
    if compat.keeps_nothing(kept):
        return
    compressing = _is_compressing(kept)
    if not compressing and type(kept) not in _KNOWN and not _is_indexed(kept):
        raise UnsupportedModelError(f"layer {index} has a cache of class {type(kept).__name__}, which is not known.")
    if isinstance(kept, DynamicLayer) and kept.is_initialized:
        window = int(kept.sliding_window) if isinstance(kept, DynamicSlidingWindowLayer) else 0
        yield Layer(index, Kind.SLIDING if window else Kind.FULL, window, tuple(_rows(kept)))
    if isinstance(kept, LinearAttentionLayer) and (states := states_of(kept)):
        named = ((f"{name}/{index}", getattr(kept, name)[index]) for name, index in states)
        yield Layer(index, Kind.RECURRENT, 0, tuple(LayerTensor(tuple(t.shape[1:]), t.dtype, n) for n, t in named))
    if compressing:
        rate = kept.compress_rate
        entries = kept.compressed_kv.items()
        rows = (LayerTensor((1, t.shape[-1]), t.dtype, f"compressed_kv/{name}", rate) for name, t in entries)
        yield Layer(index, Kind.FULL, 0, tuple(rows))
        yield Layer(index, Kind.RECURRENT, 0, tuple(_between(kept, rate)))


def _is_compressing(kept: Any) -> bool:
    """Whether it is a window with compressors, and nothing else."""
    own = set(vars(kept)) - set(vars(DynamicSlidingWindowLayer(1))) - {"dtype", "device"}
    return isinstance(kept, DynamicSlidingWindowLayer) and "compressed_kv" in own and own <= _COMPRESSED


def _is_indexed(kept: Any) -> bool:
    """Whether it is a layer of all tokens with ``idx_keys``, and nothing else."""
    own = set(vars(kept)) - set(vars(DynamicLayer())) - {"dtype", "device"}
    return isinstance(kept, DynamicLayer) and own == {"idx_keys"}


def _rows(kept: DynamicLayer) -> Iterator[LayerTensor]:
    """What it keeps of each token."""
    named = {"keys": kept.keys} if kept.values is kept.keys else {"keys": kept.keys, "values": kept.values}
    for name, tensor in named.items():
        yield LayerTensor((tensor.shape[1], tensor.shape[3]), tensor.dtype, name)
    if isinstance(kept, DynamicIndexedLayer) and kept.is_indexer_initialized:
        yield LayerTensor((1, kept.indexer_keys.shape[2]), kept.indexer_keys.dtype, "indexer_keys")
    if getattr(kept, "idx_keys", None) is not None:
        yield LayerTensor((1, kept.idx_keys.shape[3]), kept.idx_keys.dtype, "idx_keys")


def _between(kept: Any, rate: int) -> Iterator[LayerTensor]:
    """What compressors keep between two entries: tokens that came since the last one, and what the next takes over."""
    for name in kept.compressed_kv:
        for attribute in ("buffer_kv", "buffer_gate"):
            tensor = getattr(kept, attribute)[name]
            yield LayerTensor((rate - 1, tensor.shape[2]), tensor.dtype, f"{attribute}/{name}")
        for attribute in ("overlap_kv", "overlap_gate"):
            tensor = getattr(kept, attribute, {}).get(name)
            if tensor is not None:
                yield LayerTensor(tuple(tensor.shape[1:]), tensor.dtype, f"{attribute}/{name}")
