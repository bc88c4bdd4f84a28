"""Reads what a Transformers cache holds, and builds one from stored chunks.

Owns ``RecordingWindow``, the one cache layer of ours: a sliding-window layer forgets what leaves its window, and what
was computed for a prompt should outlive that. Otherwise the layers are Transformers' own, so a restored cache is what
``generate()`` would have made itself.

    tokens      0          first              length
    window      . . . . . . . . . [ keys, values ]     what attention sees: the last window - 1
    record      . . . . [==========================]   what ``keep`` can still store, until it has
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer, LinearAttentionLayer

from stowage.core.geometry import Kind
from stowage.errors import RequestError
from stowage.models.layout import Layer, State
from stowage.plugins.transformers.layout import CacheLayout

_ORIGIN = "stowage_origin"
"""Attribute of a restored cache; copies of the cache have it too."""


@dataclass(frozen=True, slots=True)
class Origin:
    """What a cache was restored for: keys of which namespace, and the prompt's rows. ``in_pieces``: how many of its
    tokens ``PrefixCache`` computed or restored.
    """

    namespace: bytes
    rows: list[list[int]]
    in_pieces: int = 0


def set_origin(cache: DynamicCache, namespace: bytes, rows: list[list[int]], in_pieces: int) -> None:
    """Mark ``cache`` as restored for a prompt."""
    setattr(cache, _ORIGIN, Origin(namespace, rows, in_pieces))


def in_pieces(cache: DynamicCache) -> int:
    """How many tokens of ``cache`` were not computed by ``generate``."""
    origin = getattr(cache, _ORIGIN, None)
    return 0 if origin is None else int(origin.in_pieces)


class RecordingWindow(DynamicSlidingWindowLayer):  # type: ignore[misc]
    """Transformers' sliding-window layer, which also remembers the tokens that left its window.

    Attention sees exactly what it sees with the layer that this one stands in for.
    """

    def __init__(self, sliding_window: int) -> None:
        super().__init__(sliding_window=sliding_window)
        self._record: list[tuple[Tensor, Tensor]] = []
        self._first = 0

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """See ``DynamicSlidingWindowLayer``; both are ``[rows, heads, tokens, dim]``."""
        self._record.append((key_states.detach(), value_states.detach()))
        seen: tuple[Tensor, Tensor] = super().update(key_states, value_states, *args, **kwargs)
        return seen

    def resume(self, keys: Tensor, values: Tensor, length: int) -> None:
        """Be as after ``length`` tokens, of which these are the last."""
        self.lazy_initialization(keys, values)
        self.keys, self.values, self.cumulative_length = keys, values, length
        self._record, self._first = [(keys, values)], length - keys.shape[2]

    def recorded(self) -> tuple[int, Tensor, Tensor] | None:
        """The first token that is remembered, and keys and values from there on; ``None`` when there are none."""
        if len(self._record) > 1:
            merged = (torch.cat([pair[side] for pair in self._record], dim=2) for side in (0, 1))
            self._record = [(next(merged), next(merged))]
        return (self._first, *self._record[0]) if self._record else None

    def let_go(self, position: int) -> None:
        """Forget the tokens before ``position``."""
        found = self.recorded()
        if found is None or position <= found[0]:
            return
        first, keys, values = found
        cut = position - first
        self._record = [(keys[:, :, cut:].clone(), values[:, :, cut:].clone())] if cut < keys.shape[2] else []
        self._first = position

    def _forget(self) -> None:
        self._record, self._first = [], self.cumulative_length

    def crop(self, tokens_to_remove: int) -> None:
        super().crop(tokens_to_remove)
        found = self.recorded()
        if found is None or self.cumulative_length <= found[0]:
            self._forget()
            return
        first, keys, values = found
        kept = self.cumulative_length - first
        self._record = [(keys[:, :, :kept], values[:, :, :kept])]

    def reset(self) -> None:
        super().reset()
        self._forget()

    def reorder_cache(self, beam_idx: Tensor) -> None:
        super().reorder_cache(beam_idx)
        self._forget()

    def batch_repeat_interleave(self, repeats: int) -> None:
        super().batch_repeat_interleave(repeats)
        self._forget()

    def batch_select_indices(self, indices: Tensor) -> None:
        super().batch_select_indices(indices)
        self._forget()


def fresh(config: Any) -> DynamicCache:
    """An empty cache for a model, whose sliding layers remember."""
    cache = DynamicCache(config=config)
    cache.layers = [
        RecordingWindow(layer.sliding_window) if type(layer) is DynamicSlidingWindowLayer else layer
        for layer in cache.layers
    ]
    return cache


@dataclass(frozen=True, slots=True)
class SwappedBlocks:
    """What one layer of a cache holds: tensors whose token 0 (dimension 2) is the sequence's token ``first``; of a
    recurrent layer its states, after all tokens.
    """

    first: int
    tensors: tuple[Tensor, ...]


def check(cache: Any, layout: CacheLayout, namespace: bytes) -> None:
    """Raise ``RequestError`` for anything but a dynamic cache of this model on its device."""
    if not isinstance(cache, DynamicCache):
        raise RequestError(
            f"a {type(cache).__name__} cannot be kept: give the DynamicCache that restore() or prefill() returned and "
            "that generate(past_key_values=...) has filled. Static, quantised and encoder-decoder caches are not "
            "supported."
        )
    if getattr(cache, "offloading", False):
        raise RequestError("an offloaded cache cannot be kept: its layers move while it is read.")
    if len(cache.layers) != layout.model.layers:
        raise RequestError(
            f"the cache has {len(cache.layers)} layers and the model's has {layout.model.layers}: it is empty, or "
            "another model's."
        )
    origin = getattr(cache, _ORIGIN, None)
    if origin is not None and origin.namespace != namespace:
        raise RequestError("the cache was restored by another PrefixCache, for another model, salt or setting.")


def check_tokens(cache: DynamicCache, tokens: list[list[int]], length: int) -> bool:
    """Raise ``RequestError`` unless ``tokens``, by row, can be what the cache has seen in ``length`` tokens. Returns
    whether it was restored for the prompt that they begin with; of others nothing is known.
    """
    if len(tokens[0]) < length:
        raise RequestError(
            f"the cache has seen {length} tokens and ids has only {len(tokens[0])}: give all of them, the prompt and "
            "what was generated, as generate() returns them."
        )
    origin = getattr(cache, _ORIGIN, None)
    if origin is None:
        return False
    known = min(length, len(origin.rows[0]))
    if len(origin.rows) != len(tokens) or any(a[:known] != b[:known] for a, b in zip(origin.rows, tokens, strict=True)):
        raise RequestError("ids does not begin with the prompt that this cache was restored for.")
    return True


def length_of(cache: DynamicCache, layout: CacheLayout) -> int:
    """Tokens that the cache has seen. Raises ``RequestError`` when its layers disagree."""
    attending = [la.index for b in layout.blocks if b.group.kind is not Kind.RECURRENT for la in b.layers]
    lengths = {int(cache.layers[index].get_seq_length()) for index in attending}
    if len(lengths) != 1:
        raise RequestError(f"the cache's layers have seen different numbers of tokens: {sorted(lengths)}.")
    return lengths.pop()


def held(layer: Any, kind: Layer, rows: int) -> SwappedBlocks | None:
    """What a cache's ``layer`` holds of what the layout says of it; ``None`` when it holds nothing that can be used.

    Raises ``RequestError`` when it is not a layer of this model, or not of this batch.
    """
    if kind.kind is Kind.RECURRENT:
        tensors = [t for name, index in kind.states if (t := getattr(layer, name, {}).get(index)) is not None]
        if [(tuple(t.shape), t.dtype) for t in tensors] != [((rows, *t.shape), t.dtype) for t in kind.tensors]:
            return None
        return SwappedBlocks(0, tuple(tensors))
    found = _attention(layer)
    if found is None:
        return None
    for tensor, wanted in zip(found.tensors, kind.tensors, strict=True):
        if (tensor.shape[0], tensor.shape[1], tensor.shape[3]) != (rows, *wanted.shape) or tensor.dtype != wanted.dtype:
            raise RequestError(
                f"layer {kind.index} of the cache holds {tensor.dtype} of shape {tuple(tensor.shape)}; this model's "
                f"with {rows} rows holds {wanted.dtype} of shape ({rows}, {wanted.shape[0]}, tokens, "
                f"{wanted.shape[1]})."
            )
    return found


def _attention(layer: Any) -> SwappedBlocks | None:
    if isinstance(layer, RecordingWindow):
        found = layer.recorded()
        return SwappedBlocks(found[0], found[1:]) if found is not None else None
    if not getattr(layer, "is_initialized", False):
        return None
    return SwappedBlocks(layer.get_seq_length() - layer.keys.shape[2], (layer.keys, layer.values))


def put_attention(layer: DynamicLayer, keys: Tensor, values: Tensor, length: int) -> None:
    """Fill a fresh layer: keys and values are ``[rows, heads, tokens, dim]``, of the last tokens before ``length``."""
    if isinstance(layer, RecordingWindow):
        most = layer.sliding_window - 1
        layer.resume(keys[:, :, -most:], values[:, :, -most:], length)
        return
    DynamicLayer.lazy_initialization(layer, keys, values)
    layer.keys, layer.values = keys, values


def put_states(layer: LinearAttentionLayer, states: Sequence[State], tensors: Sequence[Tensor]) -> None:
    """Fill a fresh layer with recurrent states, ``[rows, ...]`` each. The layer writes into them from now on."""
    for (name, index), tensor in zip(states, tensors, strict=True):
        LinearAttentionLayer.lazy_initialization(layer, **{name: tensor, "state_idx": index})
        getattr(layer, name)[index].copy_(tensor)
        layer.has_previous_state[index] = True
