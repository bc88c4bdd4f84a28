"""The ``Cache`` that models see: ``update()`` scatters new keys and values into the pool, recurrent layers find their
state in it.

Owns nothing: blocks belong to the pool, the step says where tokens go. One instance lives as long as the engine;
``bind_states`` points its recurrent layers at the states of the sequences in the coming forward, ``unbind_states``
takes them back.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache, LinearAttentionLayer

from stowage.engine.pool import BlockPool
from stowage.engine.step import current


class _AttentionLayer:
    """Stands in ``Cache.layers`` for an attention layer, whose keys and values lie in the pool."""

    is_sliding = False
    is_compileable = False
    supports_early_init = False


class PagedCache(Cache):  # type: ignore[misc]
    """``past_key_values`` of a paged forward."""

    def __init__(self, layer_count: int, recurrent: BlockPool | None) -> None:
        self._recurrent = recurrent
        linear = set(recurrent.group.layers) if recurrent else set()
        layers: list[Any] = [LinearAttentionLayer() if i in linear else _AttentionLayer() for i in range(layer_count)]
        super().__init__(layers=layers)
        self._bound: list[int] = []

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Put the new tokens of one layer into their blocks. Keys and values are ``[batch, heads, length, dim]``;
        handed back as they came.
        """
        group = current.get().of_layer[layer_idx]
        views = group.pool.views[layer_idx]
        tokens = group.rows.shape[0]
        new = [t.transpose(1, 2).reshape(tokens, t.shape[1], t.shape[3]) for t in (key_states, value_states)]
        if len(views) == 1:  # latent and rope key share one row
            new = [torch.cat(new, dim=-1)]
        for view, states in zip(views, new, strict=True):
            view.index_put_((group.rows, group.places), states)
        return key_states, value_states

    def get_seq_length(self, layer_idx: int = 0) -> Any:
        """How far each token's position is ahead of its place in the flattened step, ``[tokens]``.

        Llama-4 adds this to ``arange(length)`` to get positions for its attention temperature; so every token gets its
        own.
        """
        positions = current.get().positions
        return positions - torch.arange(positions.shape[0])

    def bind_states(self, blocks: Sequence[int], fresh: bool) -> None:
        """Point the recurrent layers at the states in ``blocks``; ``fresh`` states are at their sequence's beginning.

        One sequence is bound in place, so the model's own in-place updates land in the pool; several are gathered and
        written back by ``unbind_states``.
        """
        if self._recurrent is None:
            return
        self._bound = list(blocks)
        for index in self._recurrent.group.layers:
            convolution, recurrent = (self._bind(view) for view in self._recurrent.views[index])
            layer: Any = self.layers[index]
            layer.conv_states[0], layer.recurrent_states[0] = convolution, recurrent
            layer.conv_kernel_size[0] = convolution.shape[-1]
            layer.dtype, layer.device = convolution.dtype, convolution.device
            layer.is_conv_states_initialized[0] = layer.is_recurrent_states_initialized[0] = True
            layer.has_previous_state[0] = not fresh

    def _bind(self, view: Tensor) -> Tensor:
        if len(self._bound) == 1:
            return view[self._bound[0] : self._bound[0] + 1]
        return view[torch.tensor(self._bound)]

    def unbind_states(self) -> None:
        """Write the states of several sequences back into their blocks."""
        if self._recurrent is None or len(self._bound) == 1:
            return
        rows = torch.tensor(self._bound)
        for index in self._recurrent.group.layers:
            layer: Any = self.layers[index]
            for view, state in zip(
                self._recurrent.views[index], (layer.conv_states[0], layer.recurrent_states[0]), strict=True
            ):
                view[rows] = state
