"""The groups of a model's cache as users hold it: Transformers' own, as ``models.cache_layers`` finds it.

Owns what a cache of a user's cannot hold, or tokens do not determine: it is refused with ``UnsupportedModelError``.
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
from stowage.models.cache_layers import layers_of, refuse_small_windows, states_of
from stowage.models.compat import keeps_nothing
from stowage.models.layout import BlockLayout, ModelLayout, lay_out_groups, refuse_positions

_KNOWN = (DynamicLayer, DynamicSlidingWindowLayer, LinearAttentionLayer, LinearAttentionAndFullAttentionLayer)
"""Classes of layers that ``caches`` can fill."""


@dataclass(frozen=True, slots=True)
class CacheLayout:
    """The groups of a model's cache, and the device of each layer that keeps something."""

    model: ModelLayout
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
            "stowage.offload(DIR, weights='*=resident', model_class='AutoModelForCausalLM')"
        )
    refuse_positions(config)


def classify(cache: DynamicCache, block_tokens: Mapping[Kind, int], chunk_blocks: int) -> CacheLayout:
    """The layout of a model's cache; ``cache`` is a fresh one of it after a forward of some tokens, one row.

    ``block_tokens``: tokens per block for each kind of group. Raises ``UnsupportedModelError``.
    """
    for index, kept in enumerate(cache.layers):
        if type(kept) not in _KNOWN and not keeps_nothing(kept):
            raise UnsupportedModelError(
                f"layer {index} has a cache of class {type(kept).__name__}, which is not supported yet."
            )
    layers = layers_of(cache)
    refuse_small_windows(layers)
    if all(layer.kind is Kind.RECURRENT for layer in layers):
        raise UnsupportedModelError(
            "no layer of the model attends to earlier tokens, so its cache does not say how many it has seen; models "
            "of recurrent layers alone are not supported yet."
        )
    blocks = lay_out_groups(layers, lambda layer: (layer.kind, layer.window), block_tokens, chunk_blocks)
    model = ModelLayout(blocks, ragged=False, context_tokens=0, vocab=0, layers=len(cache.layers))
    return CacheLayout(model, {layer.index: _device(cache.layers[layer.index]) for layer in layers})


def _device(kept: Any) -> torch.device:
    """Of its states where it has some, else of its keys."""
    states = [getattr(kept, name)[index] for name, index in states_of(kept)]
    found: torch.device = (states or [kept.keys])[0].device
    return found
