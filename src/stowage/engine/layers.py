"""What a model keeps per layer: found out by reading its config and confirmed by forwards of a few tokens.

Owns the classification of layers into cache kinds and the grouping of layers that share one cache geometry. Never
guesses: a layer whose probed state or mask contradicts its config, or a family whose resume has not been proved, is
refused with ``UnsupportedModelError``.

Kinds come from the text config as Transformers reads it for its own ``DynamicCache``; shapes and dtypes from the state
that such a cache holds after a forward (``probing``); which keys a query sees from the rule of the mask that the model
made (Transformers 5.17: multi-head latent attention keeps the latent and the rope key; linear layers keep a convolution
state, a float32 recurrent state, or both; hybrid layers keep both kinds; layers that share keys keep nothing).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray

from stowage.core.geometry import Group, Kind
from stowage.engine.families import ALONE, DECODERS, NO_TEXT_MODELS, OUTER, PROVED, REFUSED
from stowage.errors import UnsupportedModelError

if TYPE_CHECKING:
    from stowage.engine.probing import Probe, Read, State

TENSOR_ALIGNMENT_BYTES = 64
_WINDOWED = {"sliding_attention": Kind.SLIDING, "hybrid_sliding": Kind.SLIDING, "chunked_attention": Kind.CHUNKED}
_FULL = ("full_attention", "hybrid")
_RECURRENT = ("linear_attention", "conv", "hybrid", "hybrid_sliding")
_BATCH_DEPENDENT_ROPE = ("dynamic", "longrope")
_CONTEXT_UNKNOWN_TOKENS = 1 << 20
"""Of a model whose config states none: nothing in it depends on the position."""


@dataclass(frozen=True, slots=True)
class LayerTensor:
    """One cached tensor of a layer. ``shape`` is per row for attention layers (``[heads, head_dim]``), per sequence for
    recurrent ones; there is one for ``every`` so many tokens. ``name``: in Transformers' cache (``fallback``).
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    name: str = ""
    every: int = 1

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
    states: tuple[State, ...] = ()
    readers: tuple[int, ...] = ()
    """Later layers that have no keys and values of their own and read these."""


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
    """All groups of a model.

    ``ragged``: sequences may share one flattened forward: no layer takes the tokens of a forward for one sequence.
    ``layers``: entries of the model's cache. ``continues``: recurrent layers go on from a state with several tokens at
    once; else with single ones only. ``own_rows``: the model gives logits of the asked tokens only. ``alone``: one
    sequence at a time, with Transformers' own attention (``fallback``). ``placeholders``: tokens that no prompt may
    have, because they stand for what is no text.
    """

    blocks: tuple[BlockLayout, ...]
    ragged: bool
    context_tokens: int
    vocab: int
    layers: int = 0
    continues: bool = True
    own_rows: bool = True
    alone: bool = False
    placeholders: frozenset[int] = frozenset()

    @property
    def groups(self) -> tuple[Group, ...]:
        return tuple(layout.group for layout in self.blocks)

    @property
    def recurrent(self) -> BlockLayout | None:
        return next((b for b in self.blocks if b.group.kind is Kind.RECURRENT), None)


def refuse_unsupported(config: Any) -> None:
    """Raise ``UnsupportedModelError`` for what this version cannot run exactly, before any weight is read."""
    family = config.model_type
    if family in OUTER:
        inner = config.get_text_config(decoder=True).model_type
        raise UnsupportedModelError(
            f"models of type {family!r} with a text model of type {inner!r} are not supported: it is not proved that "
            f"their text is what the text model answers alone. Supported: {', '.join(sorted(OUTER[family]))}."
        )
    reason = REFUSED.get(family) or NO_TEXT_MODELS.get(family)
    if reason is not None:
        raise UnsupportedModelError(f"models of type {family!r} are not supported: {reason}")
    if family not in PROVED:
        raise UnsupportedModelError(
            f"models of type {family!r} are not supported yet, and an answer that may be wrong is not given. "
            f"Supported: {', '.join(sorted(PROVED | OUTER.keys()))}."
        )
    _refuse_bidirectional(config)
    _refuse_window_of_one(config)


def refuse_positions(config: Any) -> None:
    """Raise ``UnsupportedModelError`` where a token's cached state depends on more than the tokens before it."""
    for rope in _rope_settings(config):
        if rope.get("rope_type") in _BATCH_DEPENDENT_ROPE:
            raise UnsupportedModelError(
                f"rope type {rope['rope_type']!r} computes its frequencies from the longest sequence of a batch, "
                "so an answer would depend on its neighbours; it is not supported yet."
            )
    _refuse_bidirectional(config)
    _refuse_window_of_one(config)


def _refuse_bidirectional(config: Any) -> None:
    """``vision`` (Gemma 4) says that a picture's tokens see each other; text is causal all the same."""
    if config.model_type in DECODERS and not config.is_decoder:
        raise UnsupportedModelError(
            f"this {config.model_type!r} reads what comes after a token too, so it cannot go on from what it computed. "
            'One that was made to generate has "is_decoder": true in its config.json.'
        )
    if getattr(config, "use_bidirectional_attention", False) not in (False, None, "vision"):
        raise UnsupportedModelError("bidirectional attention has no causal KV cache; it is not supported.")


def _refuse_window_of_one(config: Any) -> None:
    """With one, Transformers itself gives another answer from its cache than without (5.17 to 5.23)."""
    text = config.get_text_config(decoder=True)
    used = "sliding_attention" in (getattr(text, "layer_types", None) or ["sliding_attention"])
    if getattr(text, "sliding_window", None) == 1 and getattr(text, "use_sliding_window", True) and used:
        raise UnsupportedModelError(
            "sliding_window is 1 in the model's config: Transformers computes something else then token by token than "
            "at once, so there is no right answer. It is not supported."
        )


def _rope_settings(config: Any) -> list[Mapping[str, Any]]:
    rope = getattr(config, "rope_parameters", None) or {}
    nested = [v for v in rope.values() if isinstance(v, Mapping)]
    return nested or [rope]


def context_tokens(config: Any) -> int:
    """The longest sequence that the model is run with.

    Frequencies of dynamic and long rope change for the whole batch, what is cached included, once its longest sequence
    exceeds the length that the model was first trained with. Up to there they are constant, and an answer depends on
    its own tokens alone; so that is the limit.
    """
    stated = getattr(config, "max_position_embeddings", None) or getattr(config, "max_seq_len", None)  # (MPT)
    limits = [int(stated) if stated else _CONTEXT_UNKNOWN_TOKENS]
    for rope in _rope_settings(config):
        if rope.get("rope_type") in _BATCH_DEPENDENT_ROPE:
            limits.append(int(rope.get("original_max_position_embeddings") or limits[0]))
    return min(limits)


def probe(model: Any, block_tokens: Mapping[Kind, int], chunk_blocks: int) -> ModelLayout:
    """Classify ``model``'s layers and lay out one block per group.

    Args:
        model: a Transformers causal model on its device, in evaluation mode.
        block_tokens: tokens per block for each kind of group. The recurrent entry is the grid on which snapshots may be
        taken. chunk_blocks: blocks per chunk of the attention groups.

    Raises ``UnsupportedModelError`` when what the model does, does not fit its config.
    """
    from stowage.engine.probing import look

    config = model.config
    refuse_unsupported(config)
    if config.model_type in ALONE:
        from stowage.engine.fallback import looking

        return looking.probe(model, block_tokens, chunk_blocks)
    seen = look(model)
    layers = _classify(config, seen)
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
        ragged=all(layer.kind is not Kind.RECURRENT for layer in layers),
        context_tokens=context_tokens(config),
        vocab=int(config.vocab_size),
        layers=len(seen.cache.layers),
        continues=seen.continues,
        own_rows=seen.own_rows,
    )


def _classify(config: Any, seen: Probe) -> list[Layer]:
    from transformers.cache_utils import get_layer_types_and_kwargs

    from stowage.engine.probing import states_of

    declared, _ = get_layer_types_and_kwargs(config.get_text_config(decoder=True))
    layers: list[Layer] = []
    for index, state in enumerate(seen.cache.layers):
        name = declared[index] if index < len(declared) else "full_attention"
        states = states_of(state)
        if bool(states) and name not in _RECURRENT:
            raise _contradicts(index, name, "it keeps a recurrent state")
        if index in seen.cache.handed:
            layers.append(_attention_layer(index, name, state, seen))
        if states:
            tensors = (getattr(state, attribute)[place] for attribute, place in states)
            kept = tuple(LayerTensor(tuple(t.shape[1:]), t.dtype) for t in tensors)
            layers.append(Layer(index, Kind.RECURRENT, 0, kept, states=states))
    read = {r.source for r in seen.reads}
    if read != set(seen.cache.handed):
        raise UnsupportedModelError("some layers cache keys that no attention reads; this is not supported yet.")
    return layers


def _contradicts(index: int, declared: str, finding: str) -> UnsupportedModelError:
    return UnsupportedModelError(f"layer {index} is declared as {declared!r}, but {finding}.")


def _attention_layer(index: int, declared: str, state: Any, seen: Probe) -> Layer:
    """The layer from its declared type, its probed cache layer, and how its keys were read."""
    kind = Kind.FULL if declared in _FULL else _WINDOWED.get(declared)
    if kind is None:
        raise UnsupportedModelError(f"layer {index} is declared as {declared!r}, which is not supported yet.")
    window = int(state.sliding_window) if kind is not Kind.FULL else 0
    reads = [read for read in seen.reads if read.source == index]
    for read in reads:
        if read.window not in (None, window or None) or not _mask_agrees(kind, window, read, seen.logits.device):
            raise _contradicts(index, declared, f"layer {read.layer} reads its keys under another mask")
    if len({read.latent for read in reads}) > 1:
        raise UnsupportedModelError(f"layer {index} is read as cached and expanded; this is not supported yet.")
    latent = any(read.latent for read in reads)
    keys, values = seen.cache.handed[index]
    readers = tuple(read.layer for read in reads if read.layer != index)
    return Layer(index, kind, window, _attention_tensors(index, keys, values, latent), latent, readers=readers)


def _mask_agrees(kind: Kind, window: int, read: Read, device: torch.device) -> bool:
    """Whether the mask shows a query what this kind of layer keeps for it, at positions around every edge."""
    if read.rule is None:
        return kind is Kind.FULL
    edges = [0, 1, window - 1, window, window + 1, 2 * window - 1, 2 * window, 3 * window + 1, 100_003]
    positions = np.unique([abs(edge) for edge in edges])
    around = np.unique([p + offset - far for p in positions for far in (0, window) for offset in (-1, 0, 1)])
    keys = around[around >= 0]
    queries, seen_keys = (torch.from_numpy(given).to(device) for given in (positions, keys))
    zero = torch.tensor(0, device=device)
    shown = read.rule(zero, zero, queries[:, None], seen_keys[None]).expand(len(positions), len(keys)).cpu()
    return bool((shown.numpy() == visible(kind, window, positions[:, None], keys[None])).all())


def visible(kind: Kind, window: int, queries: NDArray[np.int64], keys: NDArray[np.int64]) -> NDArray[np.bool_]:
    """Which key positions each query position reads."""
    allowed = keys <= queries
    if kind is Kind.SLIDING:
        allowed = allowed & (keys > queries - window)
    elif kind is Kind.CHUNKED:
        allowed = allowed & (keys >= queries // window * window)
    return allowed


def _attention_tensors(index: int, keys: Any, values: Any, latent: bool) -> tuple[LayerTensor, ...]:
    """Per-token shapes. Of multi-head latent attention, latent and rope key lie side by side in one row per token, so
    that absorbed attention reads them without a copy.
    """
    from stowage.engine.probing import PROBE_TOKENS

    for tensor in (keys, values):
        if tensor.shape[2] != PROBE_TOKENS:
            raise UnsupportedModelError(f"layer {index} keeps {tensor.shape[2]} positions for {PROBE_TOKENS} tokens.")
    if latent:
        return (LayerTensor((1, keys.shape[3] + values.shape[3]), keys.dtype),)
    return tuple(LayerTensor((t.shape[1], t.shape[3]), t.dtype) for t in (keys, values))


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
            rows = tokens // tensor.every
            end += -(-tensor.nbytes * rows // TENSOR_ALIGNMENT_BYTES) * TENSOR_ALIGNMENT_BYTES
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
