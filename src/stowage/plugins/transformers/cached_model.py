"""The model whose prefixes a `PrefixCache` keeps: its identity, and a proof that it can continue from a cache.

Owns the weights' identity and its guard. Everything that a stored byte depends on is found out once; before every use a
cheap check raises an error if the model was changed meanwhile.

Not every family can be continued from a cache with more than one token: some silently restart their recurrent state,
some keep a state in their modules, and some attend to tokens that come later. So each model is tried once, with two
prompts that begin alike. What both begin with must be computed alike, and the last token of one whatever was computed
before its prompt went on. A prompt in two pieces must come much nearer to the prompt computed whole than the same two
pieces do when the states that the first one left are zeroed in between.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache

from stowage.core.geometry import Kind
from stowage.errors import ModelError, RequestError, UnsupportedModelError
from stowage.executor import attention
from stowage.models import identity
from stowage.models.adapters import refuse_adapters
from stowage.models.probing import RAISED_BY_MODELS, cache_name
from stowage.plugins.transformers.caches import held
from stowage.plugins.transformers.layout import CacheLayout, classify, refuse_config
from stowage.weights.fingerprint import config_bytes
from stowage.weights.module_code import hooks_of_others
from stowage.weights.offloaded_parameter import OffloadedParameter

_ALIKE_TOKENS, _PIECE_TOKENS, _REST_TOKENS = 8, 24, 2
_NEARER = 0.5
_ROUNDING = 0.02
"""More than rounding changes logits in 16 bits, of their norm. A model that attends to later tokens changed those of
each token by 0.3 or more."""
_APART = 0.3
"""Keys of the same tokens differ by rounding, some hundredths in 16 bits; those of others by about 1.4, both of their
norm."""


class CachedModel:
    """The model of a `PrefixCache`. ``model``: a Transformers causal model in evaluation mode, its weights in memory,
    on whatever devices.

    Raises ``UnsupportedModelError`` for a model whose caches cannot be named or continued, ``ModelError`` for one in
    training mode. Reads every weight once.
    """

    def __init__(self, model: Any, block_tokens: Mapping[Kind, int], chunk_blocks: int) -> None:
        self.model = model
        _refuse(model)
        self.layout = self._prove(block_tokens, chunk_blocks)
        self.identity = identity.of_parameters(model)
        self._mark = _mark(model)

    def check(self) -> None:
        """Raise ``ModelError`` when the model is not what it was: then its caches are not what they would be called."""
        _refuse_training(self.model)
        if _mark(self.model) != self._mark:
            raise ModelError(
                "the model's weights, config or hooks were changed since this PrefixCache was made, so prefixes "
                "would be kept under a name that is not theirs: close it and make a new one."
            )

    @property
    def attention(self) -> str:
        return str(getattr(self.model.config, "_attn_implementation", ""))

    @torch.no_grad()
    def forward(self, ids: Tensor, begin: int, cache: Any) -> Tensor:
        """Compute tokens ``ids`` ``[rows, tokens]``, the first of which stands at ``begin``, on top of ``cache``; the
        logits of the last, ``[rows, vocab]``. Waits until the device is done.
        """
        last = self._logits(ids, begin, cache, logits_to_keep=1)[:, -1]
        float(last[0, 0])
        return last

    def _logits(self, ids: Tensor, begin: int, cache: Any, logits_to_keep: int = 0) -> Tensor:
        """``[rows, tokens, vocab]``; ``logits_to_keep``: of so many tokens at the end, 0: of all."""
        positions = torch.arange(begin, begin + ids.shape[1], device=ids.device)[None].expand(ids.shape[0], -1)
        given = {cache_name(self.model): cache, "logits_to_keep": logits_to_keep}
        found: Tensor = self.model(input_ids=ids, position_ids=positions, use_cache=True, **given).logits
        return found

    @torch.no_grad()
    def check_rows(self, cache: Any, tokens: list[list[int]]) -> None:
        """Raise ``RequestError`` where the rows of ``cache`` are not of ``tokens``, by row: a beam search leaves them
        in another order than that of the sequences that it returns. Looks at the first layer that has keys, which
        costs what the model computes up to them.
        """
        ids = torch.tensor(tokens, device=self.model.device)
        try:
            self.forward(ids, 0, _FirstKeys(config=self.model.config))
        except _Found as found:
            index, keys = found.index, found.keys
        layer = next(la for block in self.layout.blocks for la in block.layers if la.index == index)
        here = held(cache.layers[index], layer, len(tokens))
        if here is None:
            return
        expected = keys[:, :, here.first :].float()
        apart = (here.tensors[0][:, :, : expected.shape[2]].float() - expected).norm(dim=(1, 3))
        if bool((apart > _APART * expected.norm(dim=(1, 3))).any()):
            raise RequestError(
                "the cache's rows hold other tokens than ids, by row, so it cannot be kept: a beam search (num_beams) "
                "leaves them in another order than its sequences. Compute one of the sequences with prefill(), which "
                "keeps it."
            )

    @torch.no_grad()
    def _prove(self, block_tokens: Mapping[Kind, int], chunk_blocks: int) -> CacheLayout:
        try:
            return self._tried(block_tokens, chunk_blocks)
        except RAISED_BY_MODELS as error:
            raise UnsupportedModelError(
                f"a model of type {self.model.config.model_type!r} does not run with Transformers' dynamic cache, in "
                f"which prefixes are kept: {error}. It is not supported here."
            ) from error

    def _tried(self, block_tokens: Mapping[Kind, int], chunk_blocks: int) -> CacheLayout:
        ids, other = self._prompts()
        begin, rest = ids[:, :_PIECE_TOKENS], ids[:, _PIECE_TOKENS:]
        whole, cache = self._logits(ids, 0, self._fresh()), self._fresh()
        self.forward(begin, 0, cache)
        layout = classify(cache, block_tokens, chunk_blocks)
        again, after = copy.deepcopy(cache), copy.deepcopy(cache)
        alone = self.forward(rest[:, :1], _PIECE_TOKENS, cache)
        apart = _distances(whole, self._logits(other, 0, self._fresh()))[:_ALIKE_TOKENS]
        if bool((apart > _ROUNDING).all()):
            raise self._unlike("attends to tokens that come later", "Transformers gives it no causal mask")
        between = self.forward(rest[:, :1], _PIECE_TOKENS, after)
        if not torch.equal(alone, between) and (ids.device.type == "cpu" or _far(alone, between) > _ROUNDING):
            raise self._unlike(
                "keeps a state outside of its cache", "another prompt changes what it goes on to compute"
            )
        continued = self.forward(rest, _PIECE_TOKENS, again)
        recurrent = [la for b in layout.blocks if b.group.kind is Kind.RECURRENT for la in b.layers]
        for name in sorted({name for layer in recurrent for name, _ in layer.states}):
            cache = self._fresh()
            self.forward(begin, 0, cache)
            for layer in recurrent:
                for state in getattr(cache.layers[layer.index], name).values():
                    state.zero_()
            forgotten = self.forward(rest, _PIECE_TOKENS, cache)
            if _far(whole, continued) > _NEARER * _far(whole, forgotten):
                raise self._unlike(
                    "that goes on from a cache with more than one token does not compute what it computes in one go",
                    "Transformers forgets a recurrent state then",
                )
        return layout

    def _fresh(self) -> DynamicCache:
        return DynamicCache(config=self.model.config)

    def _prompts(self) -> tuple[Tensor, Tensor]:
        """Two that begin alike and end otherwise."""
        at, vocab = torch.arange(_PIECE_TOKENS + _REST_TOKENS)[None], int(self.model.config.vocab_size)
        ids = (7919 * at + 13) % vocab
        other = torch.where(at < _ALIKE_TOKENS, ids, (6007 * at + 29) % vocab)
        return ids.to(self.model.device), other.to(self.model.device)

    def _unlike(self, what: str, why: str) -> UnsupportedModelError:
        return UnsupportedModelError(
            f"a model of type {self.model.config.model_type!r} {what} ({why}): a restored prefix would change answers. "
            "It is not supported."
        )


class _Found(Exception):
    """The first keys of a forward: its end."""

    def __init__(self, index: int, keys: Tensor) -> None:
        super().__init__(index)
        self.index, self.keys = index, keys


class _FirstKeys(DynamicCache):  # type: ignore[misc]
    """Ends a forward at the first keys."""

    def update(self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any) -> Any:
        raise _Found(layer_idx, key_states)


def _distances(one: Tensor, other: Tensor) -> Tensor:
    """Of each token's logits, as parts of their norm."""
    parts: Tensor = (one.float() - other.float()).norm(dim=-1) / one.float().norm(dim=-1)
    return parts.flatten()


def _far(one: Tensor, other: Tensor) -> float:
    """The distance of the last token's logits."""
    return float(_distances(one.view(-1, one.shape[-1])[-1], other[-1]))


_NOT_RESUMED = {
    "minimax": "has a cache of a class of its own, which generate() makes by itself and takes from nobody",
    "mpt": "is given its whole prompt again by generate(), whatever its cache has seen, which gives another answer",
}


def _refuse_training(model: Any) -> None:
    if model.training:
        raise ModelError("the model is in training mode, where dropout changes its cache: call model.eval() first.")


def _refuse(model: Any) -> None:
    config = getattr(model, "config", None)
    if config is None or not hasattr(model, "generate"):
        raise UnsupportedModelError(
            f"a {type(model).__name__} is no Transformers model that generates: give one that from_pretrained() made."
        )
    refuse_config(config)
    if config.model_type in _NOT_RESUMED:
        raise UnsupportedModelError(
            f"a model of type {config.model_type!r} {_NOT_RESUMED[config.model_type]}. It is not supported here; a "
            "stowage.Engine runs it."
        )
    if getattr(config, "_attn_implementation", "") == attention.NAME:
        raise UnsupportedModelError("a stowage.Engine runs this model object: close it first, or load the model twice.")
    refuse_adapters(model)
    _refuse_training(model)
    placed = getattr(model, "stowage", None) is not None
    kept = dict(model.named_parameters()) if placed else model.state_dict()
    for name, value in {**dict(model.named_buffers()), **kept}.items():
        if type(value) not in (Tensor, torch.nn.Parameter, OffloadedParameter):
            raise UnsupportedModelError(
                f"{name} is a {type(value).__name__}, no plain tensor: what a quantised model computes with cannot be "
                "named here yet; it is not supported."
            )
        if value.device.type == "meta":
            raise UnsupportedModelError(f"{name} is not in memory (device 'meta'): load the model whole.")


def _mark(model: Any) -> int:
    """Changes whenever a parameter or buffer is replaced, moved, written in place by an operation, the config is
    changed, or an adapter, a hook or another forward is put in.

    What is written through ``parameter.data`` goes unseen.
    """
    found: list[object] = [bool(getattr(model, "peft_config", None)), getattr(model.config, "_attn_implementation", "")]
    source = getattr(model, "stowage", None)
    own = source.hooks if source is not None else frozenset()
    moving = {id(parameter) for parameter in source.moving} if source is not None else frozenset()
    found += [config_bytes(model), hooks_of_others(model, own)]
    found += [id(module.__dict__.get("forward")) for module in model.modules()]
    for parameter in (*model.parameters(), *model.buffers()):
        if id(parameter) in moving:  # offloaded, unless another thread computes: nobody can write to it
            found.append((id(parameter), parameter.dtype))
            continue
        version = 0 if parameter.is_inference() else parameter._version
        found.append((parameter.data_ptr(), version, parameter.dtype))
    return hash(tuple(found))
