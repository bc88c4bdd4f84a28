"""The cache layout of a model: groups of layers that share one cache geometry, and their blocks.

Owns the types and how a group's tensors lie in its blocks. What the layers of a model are, ``cache_layers`` says; which
of them make a group, the layout of each executor. Also owns what is refused by its config alone, and the longest
sequence that a model is run with.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from stowage.core.geometry import ALIGNMENT_BYTES, Group, Kind, round_up
from stowage.errors import UnsupportedModelError
from stowage.models.families import DECODERS, NO_TEXT_MODELS, OUTER, PROVED, REFUSED

_BATCH_DEPENDENT_ROPE = ("dynamic", "longrope")
_CONTEXT_UNKNOWN_TOKENS = 1 << 20
"""Of a model whose config states none: nothing in it depends on the position."""


State = tuple[str, int]
"""Where a recurrent tensor lies in a layer of Transformers' cache: attribute, and index of the state."""


@dataclass(frozen=True, slots=True)
class LayerTensor:
    """One cached tensor of a layer. ``shape`` is per row for attention layers (``[heads, head_dim]``), per sequence for
    recurrent ones; there is one for ``every`` so many tokens. ``name``: in Transformers' cache; the paged engine's own
    rows have none.
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
    readers: tuple[int, ...] = ()
    """Later layers that have no keys and values of their own and read these."""

    @property
    def states(self) -> tuple[State, ...]:
        """Where each tensor of a recurrent layer lies in Transformers' cache."""
        split = (tensor.name.partition("/") for tensor in self.tensors)
        return tuple((name, int(index)) for name, _, index in split)

    @property
    def nbytes(self) -> int:
        """Of one row, or of the state."""
        return sum(tensor.nbytes for tensor in self.tensors)


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
    for rope in rope_settings(config):
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


def rope_settings(config: Any) -> list[Mapping[str, Any]]:
    """What a config says of rotary embeddings: once, or for each kind of layer."""
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
    for rope in rope_settings(config):
        if rope.get("rope_type") in _BATCH_DEPENDENT_ROPE:
            limits.append(int(rope.get("original_max_position_embeddings") or limits[0]))
    return min(limits)


def visible(kind: Kind, window: int, queries: Any, keys: Any) -> Any:
    """Which key positions each query position reads: integer arrays, or tensors of any device; as booleans."""
    allowed = keys <= queries
    if kind is Kind.SLIDING:
        allowed = allowed & (keys > queries - window)
    elif kind is Kind.CHUNKED:
        allowed = allowed & (keys >= queries // window * window)
    return allowed


def lay_out_groups(
    layers: Sequence[Layer], alike: Callable[[Layer], Hashable], block_tokens: Mapping[Kind, int], chunk_blocks: int
) -> tuple[BlockLayout, ...]:
    """A block for each group of layers that are ``alike``, in the order in which they first come.

    ``block_tokens``: by kind; the recurrent entry is the grid on which snapshots may be taken. ``chunk_blocks``: blocks
    per chunk of the attention groups. Groups with one row for several tokens have whole rows in a block.
    """
    if not layers:
        raise UnsupportedModelError("the model keeps no state between tokens: there is nothing to reuse.")
    groups: dict[Hashable, list[Layer]] = {}
    for layer in layers:
        groups.setdefault(alike(layer), []).append(layer)
    return tuple(
        lay_out(index, members, *chunk_of(members[0], block_tokens, chunk_blocks))
        for index, members in enumerate(groups.values())
    )


def chunk_of(layer: Layer, block_tokens: Mapping[Kind, int], chunk_blocks: int) -> tuple[int, int]:
    """Tokens of a block, and blocks of a chunk, of the group that ``layer`` is in."""
    tokens = block_tokens[layer.kind]
    size = math.lcm(tokens, layer.tensors[0].every)
    return size, 1 if layer.kind is Kind.RECURRENT else max(1, chunk_blocks * tokens // size)


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
            end += round_up(tensor.nbytes * rows, ALIGNMENT_BYTES)
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
