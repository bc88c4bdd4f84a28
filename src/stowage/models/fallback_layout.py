"""The groups of a model that the fallback runs: Transformers' own cache as ``cache_layers`` finds it, in blocks."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch

from stowage.core.geometry import Kind
from stowage.models.cache_layers import layers_of, refuse_small_windows
from stowage.models.families import SINGLY
from stowage.models.layout import Layer, ModelLayout, chunk_of, context_tokens, lay_out_groups
from stowage.models.state_access import forward, keeper_of

LOOK_TOKENS = 6


def probe(model: Any, block_tokens: Mapping[Kind, int], chunk_blocks: int) -> ModelLayout:
    """See ``paged_layout.probe``: the layout of a model that the fallback runs. ``executor.fallback.trial`` proves it.

    A snapshot is of use where every other group has whole chunks.
    """
    config = model.config
    layers = cache_layers_of(model)
    refuse_small_windows(layers)
    paged = (chunk_of(layer, block_tokens, chunk_blocks) for layer in layers if layer.kind is not Kind.RECURRENT)
    grid = math.lcm(block_tokens[Kind.RECURRENT], *(size * count for size, count in paged))
    blocks = lay_out_groups(
        layers,
        lambda layer: (layer.kind, layer.window, layer.tensors[0].every),
        {**block_tokens, Kind.RECURRENT: grid},
        chunk_blocks,
    )
    return ModelLayout(
        blocks,
        ragged=False,
        context_tokens=context_tokens(config),
        vocab=int(config.vocab_size),
        continues=config.model_type not in SINGLY,
        alone=True,
    )


@torch.inference_mode()
def cache_layers_of(model: Any) -> list[Layer]:
    """What its cache keeps, after enough tokens that every layer holds all that it ever does."""
    cache = keeper_of(model).fresh(model.config)
    rates = [layer.compress_rate for layer in cache.layers if hasattr(layer, "compress_rate")]
    count = min(max([LOOK_TOKENS, *(rate + 1 for rate in rates)]), context_tokens(model.config))
    forward(model, [(7919 * index + 13) % int(model.config.vocab_size) for index in range(count)], 0, cache)
    return layers_of(cache)
