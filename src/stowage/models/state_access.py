"""Hands a fallback model its cached state and finds it after a forward: some have an argument, a class or a holder of
their own.

Owns the way between such a holder and the layers of one cache, which ``pooled`` puts into the pools. What is kept in
modules is taken out of them after every forward, so that prompts can take turns.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.utils.hooks import RemovableHandle
from transformers import DynamicCache
from transformers.cache_utils import LinearAttentionLayer

from stowage.models import compat
from stowage.models.probing import cache_name, takes_rows
from stowage.weights.module_code import FamilyHook


class Keeper:
    """The state of models that are handed Transformers' own dynamic cache and keep nothing elsewhere."""

    def fresh(self, config: Any) -> DynamicCache:
        """A cache before the first token."""
        return DynamicCache(config=config)

    def hand(self, model: Any, cache: DynamicCache, begin: int) -> dict[str, Any]:
        """What the coming forward is called with. ``cache`` is as after ``begin`` tokens."""
        return {cache_name(model): cache}

    def fetch(self, model: Any, cache: DynamicCache) -> None:
        """The forward is done: put what it left elsewhere into ``cache``."""

    @contextmanager
    def at_work(self, model: Any) -> Iterator[None]:
        """Encloses a forward."""
        yield

    def keep_weights(self, model: Any) -> None:
        """From now on ``model`` computes what it did without writing to its weights, whoever runs it. For weights that
        are packed, or come by turns, or are still to be read as they are.
        """


class _Eager(Keeper):
    """Doge makes its mask by itself out of the one that it is given. ``sdpa`` gives it none for a prompt in one go,
    which then reads its own future (Transformers 5.17).
    """

    @contextmanager
    def at_work(self, model: Any) -> Iterator[None]:
        before = model.config._attn_implementation
        model.config._attn_implementation = "eager"
        try:
            yield
        finally:
            model.config._attn_implementation = before


class _Positions(Keeper):
    """Qwen4 (experimental) notes on its cache where all tokens stand; that cache is one for all prompts here."""

    def hand(self, model: Any, cache: DynamicCache, begin: int) -> dict[str, Any]:
        known = torch.arange(begin, device=model.device).expand(3, 1, begin) if begin else None
        compat.put_indexer_positions(cache, known)
        return super().hand(model, cache, begin)


class _Lightning(Keeper):
    """MiniMax has a class of its own, with a list of states beside the layers."""

    def fresh(self, config: Any) -> DynamicCache:
        from transformers.models.minimax.modeling_minimax import MiniMaxCache

        class States(MiniMaxCache):  # type: ignore[misc]
            """It lies where other models' recurrent states do."""

            def __init__(self) -> None:
                DynamicCache.__init__(self, config=config)

            def __len__(self) -> int:
                return len(self.layers)

            def get_linear_cache(self, layer_idx: int) -> Any:
                layer = self.layers[layer_idx]
                return layer.recurrent_states[0] if layer.has_previous_state[0] else None

            def set_linear_cache(self, layer_idx: int, linear_cache: Any) -> None:
                layer = self.layers[layer_idx]
                layer.recurrent_states[0], layer.has_previous_state[0] = linear_cache, True

        return States()


class _InModules(Keeper):
    """RecurrentGemma keeps the states of its recurrent layers in their modules."""

    def fresh(self, config: Any) -> DynamicCache:
        cache = DynamicCache(config=config)
        for index, kind in enumerate(config.layers_block_type):
            if kind == "recurrent":
                cache.layers[index] = LinearAttentionLayer()
        return cache

    def hand(self, model: Any, cache: DynamicCache, begin: int) -> dict[str, Any]:
        for block, layer in _recurrent(model, cache):
            block.conv1d_state, block.rg_lru.recurrent_states = layer.conv_states[0], layer.recurrent_states[0]
        return super().hand(model, cache, begin)

    def fetch(self, model: Any, cache: DynamicCache) -> None:
        for block, layer in _recurrent(model, cache):
            layer.conv_states[0], block.conv1d_state = block.conv1d_state, None
            layer.recurrent_states[0], block.rg_lru.recurrent_states = block.rg_lru.recurrent_states, None


class _Tuples(Keeper):
    """xLSTM has a class of its own, of three states for each layer, and writes them in place."""

    def fresh(self, config: Any) -> DynamicCache:
        cache = DynamicCache()
        cache.layers = [LinearAttentionLayer(number_of_states=3) for _ in range(config.num_hidden_layers)]
        return cache

    def hand(self, model: Any, cache: DynamicCache, begin: int) -> dict[str, Any]:
        from transformers.models.xlstm.modeling_xlstm import xLSTMCache

        if cache.layers[0].recurrent_states[0] is None:
            own = xLSTMCache(model.config, 1, dtype=model.dtype, device=model.device)
            for index, layer in enumerate(cache.layers):
                layer.recurrent_states.update(enumerate(own.rnn_state[index]))
        else:
            own = object.__new__(xLSTMCache)  # its states are there already, and they are large
            own.rnn_state = {index: _in_order(layer) for index, layer in enumerate(cache.layers)}
        own.seqlen_offset = torch.tensor([begin], device=model.device)
        return {cache_name(model): own}


class _Columns(Keeper):
    """RWKV is handed five tensors that have all its layers as columns, and writes them in place. At its first forward
    it divides weights of its deeper layers by powers of two, which must not be where they are packed, lie in a file or
    come by turns: what those layers compute is divided instead, with the same bits. Where it has been done it stays so.
    """

    def fresh(self, config: Any) -> DynamicCache:
        cache = DynamicCache()
        cache.layers = [LinearAttentionLayer(number_of_states=5)]
        return cache

    def hand(self, model: Any, cache: DynamicCache, begin: int) -> dict[str, Any]:
        layer = cache.layers[0]
        if layer.recurrent_states[0] is None:
            shape = (1, model.config.hidden_size, model.config.num_hidden_layers)
            dtypes = [model.dtype] * 2 + [torch.float32] * 3
            for index, dtype in enumerate(dtypes):
                layer.recurrent_states[index] = torch.zeros(shape, dtype=dtype, device=model.device)
        if not begin:
            layer.recurrent_states[4].fill_(-1e30)
        return {"state": list(_in_order(layer))}

    @contextmanager
    def at_work(self, model: Any) -> Iterator[None]:
        hooks = _divided(model)
        try:
            yield
        finally:
            if hooks:
                model.rwkv.layers_are_rescaled = False
            for hook in hooks:
                hook.remove()

    def keep_weights(self, model: Any) -> None:
        _divided(model)


def _divided(model: Any) -> list[RemovableHandle]:
    """What divides the outputs of an RWKV model's deeper layers from now on; none where its weights are divided, or
    their outputs are already.
    """
    inner, every = getattr(model, "rwkv", model), model.config.rescale_every
    if inner.layers_are_rescaled or not every:
        return []
    last = [(layer, 2 ** (i // every)) for i, block in enumerate(inner.blocks) if i >= every for layer in _last(block)]
    hooks = [layer.register_forward_hook(FamilyHook(_divide, by)) for layer, by in last]
    inner.layers_are_rescaled = True
    return hooks


def _last(block: Any) -> tuple[Any, Any]:
    """The linear layers of a block of RWKV whose outputs are added to what goes through all blocks."""
    return block.attention.output, block.feed_forward.value


def _divide(by: int, module: Any, args: Any, out: Tensor) -> Tensor:
    return out / by


def _in_order(layer: Any) -> tuple[Tensor, ...]:
    return tuple(layer.recurrent_states[index] for index in range(layer.number_of_states))


def _recurrent(model: Any, cache: DynamicCache) -> Iterator[tuple[Any, Any]]:
    for block, layer in zip(model.model.layers, cache.layers, strict=True):
        if isinstance(layer, LinearAttentionLayer):
            yield block.temporal_block, layer


_PLAIN = Keeper()
_KEEPERS: Mapping[str, Keeper] = {
    "doge": _Eager(),
    "qwen4_exp_text": _Positions(),
    "minimax": _Lightning(),
    "recurrent_gemma": _InModules(),
    "xlstm": _Tuples(),
    "rwkv": _Columns(),
}


def keeper_of(model: Any) -> Keeper:
    """Of this family."""
    return _KEEPERS.get(model.config.model_type, _PLAIN)


def forward(model: Any, tokens: Sequence[int], begin: int, cache: Any, *, every_logit: bool = False) -> Tensor:
    """Compute ``tokens``, of which the first stands at ``begin``, on top of ``cache``. The logits of the last, ``[1,
    vocab]``, or of all, ``[tokens, vocab]``; float32, in host memory.
    """
    keeper = keeper_of(model)
    ids = torch.tensor([tokens], device=model.device)
    asked: dict[str, Any] = {"logits_to_keep": 0 if every_logit else 1} if takes_rows(model) else {}
    if "position_ids" in inspect.signature(model.forward).parameters:
        asked["position_ids"] = torch.arange(begin, begin + len(tokens), device=model.device)[None]
    with keeper.at_work(model):
        out = model(input_ids=ids, use_cache=True, **keeper.hand(model, cache, begin), **asked)
    keeper.fetch(model, cache)
    logits: Tensor = out.logits[0]
    return (logits if every_logit else logits[-1:]).float().cpu()
