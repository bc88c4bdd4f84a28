"""The groups of a model that the paged executor runs: what ``cache_layers`` finds, confirmed by what attention reads.

Never guesses: a layer whose state or mask contradicts its config is refused with ``UnsupportedModelError``. Kinds come
from the text config as Transformers reads it for its own ``DynamicCache``; shapes and dtypes from the state that such a
cache holds after a forward; which keys a query sees from the rule of the mask that the model made (``probing``). Of
multi-head latent attention the latent and the rope key are kept; layers that share keys keep nothing.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from stowage.core.geometry import Kind
from stowage.errors import UnsupportedModelError
from stowage.models.cache_layers import layers_of
from stowage.models.compat import declared_layer_types
from stowage.models.layout import Layer, LayerTensor, ModelLayout, context_tokens, lay_out_groups, visible
from stowage.models.probing import PROBE_TOKENS, Probe, Read, look

_WINDOWED = {"sliding_attention": Kind.SLIDING, "hybrid_sliding": Kind.SLIDING, "chunked_attention": Kind.CHUNKED}
_FULL = ("full_attention", "hybrid")
_RECURRENT = ("linear_attention", "conv", "hybrid", "hybrid_sliding")


def probe(model: Any, block_tokens: Mapping[Kind, int], chunk_blocks: int, identity: str) -> ModelLayout:
    """Classify the layers of ``model``, which is on its device and in evaluation mode, and lay out one block per group.

    ``block_tokens``: by kind of group; of recurrent ones, the grid on which snapshots may be taken. ``chunk_blocks``:
    blocks per chunk of the attention groups. ``identity``: see ``probing.look``.

    Raises ``UnsupportedModelError`` when what the model does, does not fit its config. Whether its family is one that
    is run, the caller asks first (``layout.refuse_unsupported``).
    """
    config, seen = model.config, look(model, identity)
    layers = layers_read(config, seen)
    return ModelLayout(
        blocks=lay_out_groups(layers, lambda one: (one.kind, one.window, one.latent), block_tokens, chunk_blocks),
        ragged=all(layer.kind is not Kind.RECURRENT for layer in layers),
        context_tokens=context_tokens(config),
        vocab=int(config.vocab_size),
        layers=len(seen.cache.layers),
        continues=seen.continues,
        own_rows=seen.own_rows,
    )


def layers_read(config: Any, seen: Probe) -> list[Layer]:
    """What the model of ``config`` keeps for the paged executor."""
    declared = declared_layer_types(config.get_text_config(decoder=True))
    layers: list[Layer] = []
    for layer in layers_of(seen.cache):
        name = declared[layer.index] if layer.index < len(declared) else "full_attention"
        if layer.kind is not Kind.RECURRENT:
            layer = _as_read(layer, name, seen)
        elif name not in _RECURRENT:
            raise _contradicts(layer.index, name, "it keeps a recurrent state")
        layers.append(layer)
    if {read.source for read in seen.reads} != set(seen.cache.handed):
        raise UnsupportedModelError("some layers cache keys that no attention reads; this is not supported yet.")
    return layers


def _contradicts(index: int, declared: str, finding: str) -> UnsupportedModelError:
    return UnsupportedModelError(f"layer {index} is declared as {declared!r}, but {finding}.")


def _as_read(layer: Layer, declared: str, seen: Probe) -> Layer:
    """The layer from its declared type and how its keys were read."""
    index = layer.index
    kind = Kind.FULL if declared in _FULL else _WINDOWED.get(declared)
    if kind is None:
        raise UnsupportedModelError(f"layer {index} is declared as {declared!r}, which is not supported yet.")
    window = layer.window if kind is not Kind.FULL else 0
    reads = [read for read in seen.reads if read.source == index]
    for read in reads:
        if read.window not in (None, window or None) or not _mask_agrees(kind, window, read, seen.logits.device):
            raise _contradicts(index, declared, f"layer {read.layer} reads its keys under another mask")
    if len({read.latent for read in reads}) > 1:
        raise UnsupportedModelError(f"layer {index} is read as cached and expanded; this is not supported yet.")
    latent = any(read.latent for read in reads)
    keys, values = seen.cache.handed[index]
    readers = tuple(read.layer for read in reads if read.layer != index)
    return Layer(index, kind, window, _rows(index, keys, values, latent), latent, readers)


def _mask_agrees(kind: Kind, window: int, read: Read, device: torch.device) -> bool:
    """Whether the mask shows a query what this kind of layer keeps for it, at positions around every edge."""
    if read.rule is None:
        return kind is Kind.FULL
    if device.type == "meta":
        return True
    edges = [0, 1, window - 1, window, window + 1, 2 * window - 1, 2 * window, 3 * window + 1, 100_003]
    positions = np.unique([abs(edge) for edge in edges])
    around = np.unique([p + offset - far for p in positions for far in (0, window) for offset in (-1, 0, 1)])
    keys = around[around >= 0]
    queries, seen_keys = (torch.from_numpy(given).to(device) for given in (positions, keys))
    zero = torch.tensor(0, device=device)
    shown = read.rule(zero, zero, queries[:, None], seen_keys[None]).expand(len(positions), len(keys)).cpu()
    return bool((shown.numpy() == visible(kind, window, positions[:, None], keys[None])).all())


def _rows(index: int, keys: Any, values: Any, latent: bool) -> tuple[LayerTensor, ...]:
    """Per-token shapes. Of multi-head latent attention, latent and rope key lie side by side in one row per token, so
    that absorbed attention reads them without a copy.
    """
    for tensor in (keys, values):
        if tensor.shape[2] != PROBE_TOKENS:
            raise UnsupportedModelError(f"layer {index} keeps {tensor.shape[2]} positions for {PROBE_TOKENS} tokens.")
    if latent:
        return (LayerTensor((1, keys.shape[3] + values.shape[3]), keys.dtype),)
    return tuple(LayerTensor((t.shape[1], t.shape[3]), t.dtype) for t in (keys, values))
