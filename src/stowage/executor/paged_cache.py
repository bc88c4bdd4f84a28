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

from stowage.executor.batch import current
from stowage.executor.block_pool import BlockPool
from stowage.executor.fused.recurrent_kernels import StateRows
from stowage.executor.replay.calls.recording import one_call


class _AttentionLayer:
    """Stands in ``Cache.layers`` for an attention layer, whose keys and values lie in the pool."""

    is_sliding = False
    is_compileable = False
    supports_early_init = False


class PagedCache(Cache):  # type: ignore[misc]
    """What a model gets as ``past_key_values`` in a paged forward: the cache that writes to the pools."""

    def __init__(self, layer_count: int, recurrent: BlockPool | None) -> None:
        self._recurrent = recurrent
        self._states = {la.index: la.states for la in recurrent.layout.layers} if recurrent else {}
        layers: list[Any] = [_AttentionLayer() for _ in range(layer_count)]
        for index, states in self._states.items():
            layers[index] = LinearAttentionLayer(number_of_states=1 + max(number for _, number in states))
        self._lying = [view for index in self._states for view in recurrent.views[index]] if recurrent else []
        super().__init__(layers=layers)
        self._bound: list[int] | Tensor = []

    @one_call
    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Put a layer's new keys and values ``[batch, heads, length, dim]`` into blocks; returned as they came."""
        step = current.get()
        step.written = layer_idx
        group = step.of_layer[layer_idx]
        views = group.pool.views[layer_idx]
        tokens = group.blocks.shape[0]
        new = [t.transpose(1, 2).reshape(tokens, t.shape[1], t.shape[3]) for t in (key_states, value_states)]
        if len(views) == 1:  # latent and rope key share one row
            new = [torch.cat(new, dim=-1)]
        for view, states in zip(views, new, strict=True):
            view.index_put_((group.blocks, group.offsets), states)
        return key_states, value_states

    def get_seq_length(self, layer_idx: int = 0) -> Any:
        """How far each token's position is ahead of its index in the flattened step, ``[tokens]``.

        Llama-4 adds this to ``arange(length)`` to get positions for its attention temperature; so every token gets its
        own.
        """
        positions = current.get().positions
        return positions - torch.arange(positions.shape[0], device=positions.device)

    def bind_states(self, blocks: Sequence[int] | Tensor, fresh: bool) -> None:
        """Point the recurrent layers at the states in ``blocks``; ``fresh`` states are at their sequence's beginning.

        One sequence is bound in place, so the model's own in-place updates land in the pool; several, or those that a
        tensor on the device names, are gathered and written back by ``unbind_states``.
        """
        if self._recurrent is None:
            return
        self._bound = blocks if isinstance(blocks, Tensor) else list(blocks)
        for index, states in self._states.items():
            layer: Any = self.layers[index]
            for (name, number), view in zip(states, self._recurrent.views[index], strict=True):
                state = self._bind(view)
                getattr(layer, name)[number] = state
                getattr(layer, f"is_{name}_initialized")[number] = True
                if name == "conv_states":
                    layer.conv_kernel_size[number] = state.shape[-1]
                layer.dtype, layer.device = state.dtype, state.device
                layer.has_previous_state[number] = not fresh

    def _bind(self, view: Tensor) -> Tensor:
        if self._in_place:
            return view[self._bound[0] : self._bound[0] + 1]
        if isinstance(self._bound, Tensor):
            return view[self._bound]
        return torch.cat([view[block : block + 1] for block in self._bound])  # half the time of ``view[rows]``

    @property
    def _in_place(self) -> bool:
        return not isinstance(self._bound, Tensor) and len(self._bound) == 1

    def _rows(self) -> Tensor:
        assert self._recurrent is not None
        if isinstance(self._bound, Tensor):
            return self._bound
        return torch.tensor(self._bound, device=self._recurrent.storage.device)

    def rows_of(self, blocks: Sequence[int]) -> list[StateRows]:
        """What ``bind_states`` would gather, where it lies, in the order of ``bound_states``."""
        rows = torch.tensor(blocks)
        return [StateRows(view, rows) for view in self._lying]

    def bound_states(self) -> list[Tensor]:
        """What ``bind_states`` has bound: a forward changes it in place."""
        return [
            getattr(self.layers[at], name)[number] for at, states in self._states.items() for name, number in states
        ]

    def unbind_states(self) -> None:
        """Write the states of several sequences back into their blocks, and let go of them."""
        if self._recurrent is None or self._in_place:
            return
        rows = self._rows()
        for index, states in self._states.items():
            for (name, number), view in zip(states, self._recurrent.views[index], strict=True):
                view[rows] = getattr(self.layers[index], name)[number]
                getattr(self.layers[index], name)[number] = None
