"""What Transformers' own cache of a model keeps, layer by layer, as groups of the core.

Owns the classification: it goes by the class of each layer of the model's ``DynamicCache`` and by what such a cache
holds after a forward, never by the model's name. A class that is not known here, and a config under which a token's
state depends on more than the tokens before it, are refused with ``UnsupportedModelError``.

    DynamicLayer                            full and latent attention: keys, values  [rows, heads, tokens, dim]
    DynamicSlidingWindowLayer               sliding, chunked-local: those of the last window - 1 tokens
    LinearAttentionLayer                    recurrent: convolution states, recurrent states  [rows, ...]
    LinearAttentionAndFullAttentionLayer    both

A chunked-local layer is a sliding one here: Transformers keeps the same tokens for both, and what is put back is
exactly what was there.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from transformers import DynamicCache
from transformers.cache_utils import (
    DynamicLayer,
    DynamicSlidingWindowLayer,
    LinearAttentionAndFullAttentionLayer,
    LinearAttentionLayer,
)

from stowage.core.geometry import Kind
from stowage.errors import UnsupportedModelError
from stowage.models.layout import BlockLayout, Layer, LayerTensor, ModelLayout, lay_out, refuse_positions

_WINDOW_LEAST = 4
_ATTENTION = (DynamicLayer, DynamicSlidingWindowLayer, LinearAttentionAndFullAttentionLayer)
_LINEAR = (LinearAttentionLayer, LinearAttentionAndFullAttentionLayer)

State = tuple[str, int]
"""Where a recurrent tensor lies: attribute of the cache layer, index of the state."""


@dataclass(frozen=True, slots=True)
class CacheLayout:
    """The groups of a model's cache of ``layers`` layers; for recurrent ones where each tensor lies; the device of
    each.
    """

    model: ModelLayout
    layers: int
    states: Mapping[int, tuple[State, ...]]
    devices: Mapping[int, torch.device]

    @property
    def blocks(self) -> tuple[BlockLayout, ...]:
        return self.model.blocks


def refuse_config(config: Any) -> None:
    """Raise ``UnsupportedModelError`` for what a prefix of tokens does not determine, or no dynamic cache holds."""
    if getattr(config, "is_encoder_decoder", False):
        raise UnsupportedModelError("encoder-decoder models have a cache per input, not per prefix; not supported.")
    if config.get_text_config(decoder=True) is not config:
        raise UnsupportedModelError(
            f"models of type {config.model_type!r} take more than text: the same tokens may stand for other pictures "
            "or sounds, so tokens do not name their cache. Load its text model alone: "
            "stowage.offload(DIR, weights='*=resident')"
        )
    refuse_positions(config)


def classify(model: Any, cache: DynamicCache, block_tokens: Mapping[Kind, int], chunk_blocks: int) -> CacheLayout:
    """The layout of ``model``'s cache; ``cache`` is a fresh one of it after a forward of some tokens, one row.

    ``block_tokens``: tokens per block for each kind of group. Raises ``UnsupportedModelError``.
    """
    layers: list[Layer] = []
    states: dict[int, tuple[State, ...]] = {}
    devices: dict[int, torch.device] = {}
    for index, layer in enumerate(cache.layers):
        if type(layer) not in (*_ATTENTION, *_LINEAR):
            raise UnsupportedModelError(
                f"layer {index} has a cache of class {type(layer).__name__}, which is not supported yet."
            )
        if isinstance(layer, DynamicLayer) and layer.is_initialized:
            layers.append(_attention(index, layer))
            devices[index] = layer.keys.device
        if isinstance(layer, LinearAttentionLayer) and (found := _states(layer)):
            states[index] = found
            tensors = tuple(getattr(layer, name)[place] for name, place in found)
            layers.append(
                Layer(index, Kind.RECURRENT, 0, tuple(LayerTensor(tuple(t.shape[1:]), t.dtype) for t in tensors))
            )
            devices[index] = tensors[0].device
    if all(layer.kind is Kind.RECURRENT for layer in layers):
        raise UnsupportedModelError(
            "no layer of the model attends to earlier tokens, so its cache does not say how many it has seen; models "
            "of recurrent layers alone are not supported yet."
        )
    blocks = _group(layers, block_tokens, chunk_blocks)
    return CacheLayout(ModelLayout(blocks, ragged=False, context_tokens=0, vocab=0), len(cache.layers), states, devices)


def _attention(index: int, layer: DynamicLayer) -> Layer:
    window = layer.sliding_window if isinstance(layer, DynamicSlidingWindowLayer) else 0
    if window and window < _WINDOW_LEAST:
        raise UnsupportedModelError(f"layer {index} has a window of {window} tokens; the least supported is 4.")
    kind = Kind.SLIDING if window else Kind.FULL
    return Layer(index, kind, window, tuple(LayerTensor((t.shape[1], t.shape[3]), t.dtype) for t in _both(layer)))


def _both(layer: DynamicLayer) -> tuple[torch.Tensor, torch.Tensor]:
    return layer.keys, layer.values


def _states(layer: LinearAttentionLayer) -> tuple[State, ...]:
    """The tensors that the layer holds, state by state."""
    return tuple(
        (name, place)
        for place in range(layer.number_of_states)
        for name in ("conv_states", "recurrent_states")
        if getattr(layer, name)[place] is not None
    )


def _group(layers: list[Layer], block_tokens: Mapping[Kind, int], chunk_blocks: int) -> tuple[BlockLayout, ...]:
    by_geometry: dict[tuple[Kind, int], list[Layer]] = {}
    for layer in layers:
        by_geometry.setdefault((layer.kind, layer.window), []).append(layer)
    return tuple(
        lay_out(index, members, block_tokens[kind], 1 if kind is Kind.RECURRENT else chunk_blocks)
        for index, ((kind, _), members) in enumerate(by_geometry.items())
    )
