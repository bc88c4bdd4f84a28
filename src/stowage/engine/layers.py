"""What a model keeps per layer: found out by reading its config and confirmed by one tiny forward.

Owns the classification of layers into cache kinds and the grouping of layers that share one cache geometry. Never
guesses: a layer whose probed state contradicts its config, or a family whose resume has not been proved, is refused
with ``UnsupportedModelError``.

Kinds come from ``layer_types`` of the text config; shapes and dtypes from the state that Transformers' own
``DynamicCache`` holds after a forward of a few tokens (Transformers 5.17: multi-head latent attention keeps the latent
and the rope key; linear layers keep a convolution state and a float32 recurrent state).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from stowage.core.geometry import Group, Kind
from stowage.errors import UnsupportedModelError

PROBE_TOKENS = 3
TENSOR_ALIGNMENT_BYTES = 64

# model_type -> forwards of several sequences may be flattened into one ([1, tokens]) without changing any of them
FAMILIES: Mapping[str, bool] = {
    "llama": True,
    "qwen3": True,
    "gemma3_text": True,
    "llama4_text": True,
    "deepseek_v3": True,
    "qwen3_next": False,
    "nemotron_h": False,
}
_KINDS = {
    "full_attention": Kind.FULL,
    "sliding_attention": Kind.SLIDING,
    "chunked_attention": Kind.CHUNKED,
    "linear_attention": Kind.RECURRENT,
}
_BATCH_DEPENDENT_ROPE = ("dynamic", "longrope")


@dataclass(frozen=True, slots=True)
class LayerTensor:
    """One cached tensor of a layer. ``shape`` is per token for attention layers (``[heads, head_dim]``), per sequence
    for recurrent ones.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True, slots=True)
class Layer:
    """One layer that keeps a state between tokens."""

    index: int
    kind: Kind
    window: int
    tensors: tuple[LayerTensor, ...]
    latent: bool = False


@dataclass(frozen=True, slots=True)
class BlockLayout:
    """One group of layers and where each layer's tensors lie inside a block: the geometry, and the bytes behind it.

    A block holds all layers of its group back to back (``offsets[layer][i]`` in bytes, 64-byte aligned), so that it
    moves between device and host as one copy.
    """

    group: Group
    layers: tuple[Layer, ...]
    offsets: Mapping[int, tuple[int, ...]]


@dataclass(frozen=True, slots=True)
class ModelLayout:
    """All groups of a model, and whether sequences may share one flattened forward."""

    blocks: tuple[BlockLayout, ...]
    ragged: bool
    context_tokens: int
    vocab: int

    @property
    def groups(self) -> tuple[Group, ...]:
        return tuple(layout.group for layout in self.blocks)

    @property
    def recurrent(self) -> BlockLayout | None:
        return next((b for b in self.blocks if b.group.kind is Kind.RECURRENT), None)


def refuse_unsupported(config: Any) -> None:
    """Raise ``UnsupportedModelError`` for what this version cannot run exactly, before any weight is read."""
    family = config.model_type
    if family not in FAMILIES:
        raise UnsupportedModelError(
            f"models of type {family!r} are not supported yet, and an answer that may be wrong is not given. "
            f"Supported: {', '.join(FAMILIES)}."
        )
    refuse_positions(config)
    if getattr(config, "attn_logit_softcapping", None):
        raise UnsupportedModelError("attention logit soft-capping is not supported yet.")


def refuse_positions(config: Any) -> None:
    """Raise ``UnsupportedModelError`` where a token's cached state depends on more than the tokens before it."""
    for rope in _rope_settings(config):
        if rope.get("rope_type") in _BATCH_DEPENDENT_ROPE:
            raise UnsupportedModelError(
                f"rope type {rope['rope_type']!r} computes its frequencies from the longest sequence of a batch, "
                "so an answer would depend on its neighbours; it is not supported yet."
            )
    if getattr(config, "use_bidirectional_attention", False):
        raise UnsupportedModelError("bidirectional attention has no causal KV cache; it is not supported.")


def _rope_settings(config: Any) -> list[Mapping[str, Any]]:
    rope = getattr(config, "rope_parameters", None) or {}
    nested = [v for v in rope.values() if isinstance(v, Mapping)]
    return nested or [rope]


def probe(model: Any, block_tokens: Mapping[Kind, int], chunk_blocks: int) -> ModelLayout:
    """Classify ``model``'s layers and lay out one block per group.

    Args:
        model: a Transformers causal model on its device, in evaluation mode.
        block_tokens: tokens per block for each kind of group. The recurrent entry is the grid on which snapshots may be
        taken. chunk_blocks: blocks per chunk of the attention groups.

    Raises ``UnsupportedModelError`` when the probed state does not fit the config.
    """
    config = model.config
    refuse_unsupported(config)
    layers = _probe_layers(model)
    if not layers:
        raise UnsupportedModelError("the model keeps no state between tokens: there is nothing to reuse.")
    by_geometry: dict[tuple[Any, ...], list[Layer]] = {}
    for layer in layers:
        geometry = (layer.kind, layer.window, layer.latent)
        by_geometry.setdefault(geometry, []).append(layer)
    blocks = []
    for index, members in enumerate(by_geometry.values()):
        kind = members[0].kind
        per_chunk = 1 if kind is Kind.RECURRENT else chunk_blocks
        blocks.append(lay_out(index, members, block_tokens[kind], per_chunk))
    return ModelLayout(
        blocks=tuple(blocks),
        ragged=FAMILIES[config.model_type],
        context_tokens=int(config.max_position_embeddings),
        vocab=int(config.vocab_size),
    )


@torch.inference_mode()
def _probe_layers(model: Any) -> list[Layer]:
    from transformers import DynamicCache

    config = model.config
    cache = DynamicCache(config=config)
    ids = torch.zeros((1, PROBE_TOKENS), dtype=torch.long, device=model.device)
    positions = torch.arange(PROBE_TOKENS, device=model.device)[None]
    model(input_ids=ids, position_ids=positions, past_key_values=cache, use_cache=True, logits_to_keep=1)
    declared = getattr(config, "layer_types", None) or ["full_attention"] * len(cache.layers)
    found = [_classify(config, i, name, cache.layers[i]) for i, name in enumerate(declared[: len(cache.layers)])]
    return [layer for layer in found if layer is not None]


def _classify(config: Any, index: int, declared: str, state: Any) -> Layer | None:
    """The layer at ``index`` from its declared type and its probed cache layer; ``None`` for a layer that keeps
    nothing.
    """
    keys = getattr(state, "keys", None)
    linear = getattr(state, "recurrent_states", {}).get(0)
    if keys is None and linear is None:
        return None
    kind = _KINDS.get(declared)
    both = keys is not None and linear is not None
    if kind is None or both or (kind is Kind.RECURRENT) != (linear is not None):
        raise UnsupportedModelError(f"layer {index} is declared as {declared!r}, but its state says otherwise.")
    if kind is Kind.RECURRENT:
        return Layer(index, kind, 0, _recurrent_tensors(index, state))
    latent = bool(getattr(config, "kv_lora_rank", None))
    return Layer(index, kind, _window(config, kind), _attention_tensors(index, keys, state.values, latent), latent)


def _recurrent_tensors(index: int, state: Any) -> tuple[LayerTensor, ...]:
    if state.conv_states[0] is None:
        raise UnsupportedModelError(f"layer {index} has no convolution state beside its recurrent one.")
    return tuple(LayerTensor(tuple(t.shape[1:]), t.dtype) for t in (state.conv_states[0], state.recurrent_states[0]))


def _attention_tensors(index: int, keys: Any, values: Any, latent: bool) -> tuple[LayerTensor, ...]:
    """Per-token shapes. Of multi-head latent attention, latent and rope key lie side by side in one row per token, so
    that absorbed attention reads them without a copy.
    """
    for tensor in (keys, values):
        if tensor.shape[2] != PROBE_TOKENS:
            raise UnsupportedModelError(f"layer {index} keeps {tensor.shape[2]} positions for {PROBE_TOKENS} tokens.")
    if latent:
        return (LayerTensor((1, keys.shape[3] + values.shape[3]), keys.dtype),)
    return tuple(LayerTensor((t.shape[1], t.shape[3]), t.dtype) for t in (keys, values))


def _window(config: Any, kind: Kind) -> int:
    if kind is Kind.SLIDING:
        return int(config.sliding_window)
    if kind is Kind.CHUNKED:
        return int(config.attention_chunk_size)
    return 0


def lay_out(index: int, members: list[Layer], block_tokens: int, per_chunk: int) -> BlockLayout:
    """One block of group ``index``: its ``members``, all of one geometry, back to back."""
    kind = members[0].kind
    tokens = 1 if kind is Kind.RECURRENT else block_tokens
    offsets: dict[int, tuple[int, ...]] = {}
    end = 0
    for layer in members:
        starts = []
        for tensor in layer.tensors:
            starts.append(end)
            end += -(-tensor.nbytes * tokens // TENSOR_ALIGNMENT_BYTES) * TENSOR_ALIGNMENT_BYTES
        offsets[layer.index] = tuple(starts)
    group = Group(
        index=index,
        kind=kind,
        block_tokens=block_tokens,
        blocks_per_chunk=per_chunk,
        bytes_per_block=end,
        window=members[0].window,
        layers=tuple(layer.index for layer in members),
    )
    return BlockLayout(group, tuple(members), offsets)
