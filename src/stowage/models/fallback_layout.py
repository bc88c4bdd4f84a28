"""What Transformers' own cache of a model keeps, layer by layer, as groups of the core.

Owns the classification: it goes by the class of each cache layer and by what it holds after a forward. A class that is
not known here is refused with ``UnsupportedModelError``.

    DynamicLayer                    keys, values of all tokens                        full
    DynamicIndexedLayer             and the keys of an indexer (DeepSeek-V3.2)        full
    with ``idx_keys``               the same (MiniMax-M3)                             full
    DynamicSlidingWindowLayer       keys, values of the last window - 1 tokens        sliding
    with compressors (DeepSeek-V4)  the same,                                         sliding
                                    one entry for every ``compress_rate`` tokens,     full, a row for so many tokens
                                    tokens that are not compressed yet, and what      recurrent: small, and known by
                                    the next entry takes from the last window         the number of tokens alone
    with linear attention           convolution and recurrent states                  recurrent

Counters (tokens seen, entries made) follow from the number of tokens, so none is kept.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

import torch
from transformers import DynamicCache
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
from stowage.models.families import SINGLY
from stowage.models.layout import Layer, LayerTensor, ModelLayout, context_tokens, lay_out
from stowage.models.probing import states_of
from stowage.models.state_access import forward, keeper_of

LOOK_TOKENS = 6
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


def probe(model: Any, block_tokens: Mapping[Kind, int], chunk_blocks: int) -> ModelLayout:
    """See ``layout.probe``: the layout of a model that the fallback runs. ``executor.fallback.trial`` proves it.

    ``block_tokens``: tokens per block for each kind; groups with one row for several tokens have whole rows in a block.
    """
    config = model.config
    layers = [layer for index, kept in enumerate(_look(model).layers) for layer in _layers(index, kept)]
    layout = _lay_out(layers, block_tokens, chunk_blocks)
    return replace(
        layout,
        context_tokens=context_tokens(config),
        vocab=int(config.vocab_size),
        continues=config.model_type not in SINGLY,
    )


@torch.inference_mode()
def _look(model: Any) -> DynamicCache:
    """A cache after enough tokens that every layer holds all that it ever does."""
    cache = keeper_of(model).fresh(model.config)
    rates = [layer.compress_rate for layer in cache.layers if hasattr(layer, "compress_rate")]
    count = min(max([LOOK_TOKENS, *(rate + 1 for rate in rates)]), context_tokens(model.config))
    forward(model, [(7919 * place + 13) % int(model.config.vocab_size) for place in range(count)], 0, cache)
    return cache


def _layers(index: int, kept: Any) -> Iterator[Layer]:
    """The parts of one cache layer, each of one geometry."""
    compressing = _is_compressing(kept)
    if not compressing and type(kept) not in _KNOWN and not _is_indexed(kept):
        raise UnsupportedModelError(f"layer {index} has a cache of class {type(kept).__name__}, which is not known.")
    if isinstance(kept, DynamicLayer) and kept.is_initialized:
        yield _attention(index, kept)
    if isinstance(kept, LinearAttentionLayer) and (states := states_of(kept)):
        named = ((f"{name}/{place}", getattr(kept, name)[place]) for name, place in states)
        yield Layer(index, Kind.RECURRENT, 0, tuple(LayerTensor(tuple(t.shape[1:]), t.dtype, n) for n, t in named))
    if compressing:
        rate = kept.compress_rate
        rows = {f"compressed_kv/{name}": entries for name, entries in kept.compressed_kv.items()}
        yield Layer(
            index, Kind.FULL, 0, tuple(LayerTensor((1, t.shape[-1]), t.dtype, n, rate) for n, t in rows.items())
        )
        yield Layer(index, Kind.RECURRENT, 0, tuple(_between(kept, rate)))


def _is_compressing(kept: Any) -> bool:
    """Whether it is a window with compressors, and nothing else."""
    own = set(vars(kept)) - set(vars(DynamicSlidingWindowLayer(1))) - {"dtype", "device"}
    return isinstance(kept, DynamicSlidingWindowLayer) and "compressed_kv" in own and own <= _COMPRESSED


def _is_indexed(kept: Any) -> bool:
    """Whether it is a layer of all tokens with ``idx_keys``, and nothing else."""
    own = set(vars(kept)) - set(vars(DynamicLayer())) - {"dtype", "device"}
    return isinstance(kept, DynamicLayer) and own == {"idx_keys"}


def _attention(index: int, kept: DynamicLayer) -> Layer:
    window = int(kept.sliding_window) if isinstance(kept, DynamicSlidingWindowLayer) else 0
    if window and window < _WINDOW_LEAST:
        raise UnsupportedModelError(f"layer {index} has a window of {window} tokens; the least is {_WINDOW_LEAST}.")
    named = {"keys": kept.keys} if kept.values is kept.keys else {"keys": kept.keys, "values": kept.values}
    tensors = [LayerTensor((t.shape[1], t.shape[3]), t.dtype, name) for name, t in named.items()]
    if isinstance(kept, DynamicIndexedLayer) and kept.is_indexer_initialized:
        tensors.append(LayerTensor((1, kept.indexer_keys.shape[2]), kept.indexer_keys.dtype, "indexer_keys"))
    if getattr(kept, "idx_keys", None) is not None:
        tensors.append(LayerTensor((1, kept.idx_keys.shape[3]), kept.idx_keys.dtype, "idx_keys"))
    return Layer(index, Kind.SLIDING if window else Kind.FULL, window, tuple(tensors))


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


def _lay_out(layers: list[Layer], block_tokens: Mapping[Kind, int], chunk_blocks: int) -> ModelLayout:
    if not layers:
        raise UnsupportedModelError("the model keeps no state between tokens: there is nothing to reuse.")
    members: dict[tuple[Kind, int, int], list[Layer]] = {}
    for layer in layers:
        members.setdefault((layer.kind, layer.window, layer.tensors[0].every), []).append(layer)
    tokens = {key: math.lcm(block_tokens[key[0]], key[2]) for key in members}
    chunks = {key: max(1, chunk_blocks * block_tokens[key[0]] // size) for key, size in tokens.items()}
    paged = [size * chunks[key] for key, size in tokens.items() if key[0] is not Kind.RECURRENT]
    blocks = []
    for index, (key, some) in enumerate(members.items()):
        recurrent = key[0] is Kind.RECURRENT  # a snapshot is of use where every other group has whole chunks
        size = math.lcm(tokens[key], *paged) if recurrent else tokens[key]
        blocks.append(lay_out(index, some, size, 1 if recurrent else chunks[key]))
    return ModelLayout(tuple(blocks), ragged=False, context_tokens=0, vocab=0, alone=True)
