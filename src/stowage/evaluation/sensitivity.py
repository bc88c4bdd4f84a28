"""Which matrices stay in 8 bits when a model is packed in 4: those whose 4 bits change its answers most, for a byte.

That is measured. The model reads a piece of text once as it is, and then once for each linear layer with that layer
alone in 4 bits. The layer's sensitivity is the mean Kullback-Leibler divergence of the next token's distribution. The
divergences of several layers are taken to add up, so layers get 8 bits in the order of divergence per byte that this
costs, while the average of bits allows it. Stacked experts are not measured, and are in 4 bits.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

import torch
from torch import Tensor, nn

from stowage.config.memory import Memory
from stowage.engine.memory_budget import weights_budget
from stowage.errors import ConfigError, ModelError
from stowage.models import loading
from stowage.weights.quantized.codes import PackedMatrix
from stowage.weights.quantized.modules import Target, targets

__all__ = ["Packable", "choose", "chosen"]

_TOKENS: Final = 512
_COMPARED: Final = 64
"""Tokens whose distributions are compared at once: of a large vocabulary each is a megabyte."""


@dataclass(frozen=True, slots=True)
class Packable:
    """A matrix that can be packed: its weights, and its bytes in 4 and in 8 bits. Equal bytes: it has no choice."""

    path: str
    weights: int
    bytes_4: int
    bytes_8: int

    @staticmethod
    def of(target: Target, group: int) -> Packable:
        count = max(1, target.experts)
        in_4 = target.form("int4", group)
        in_8 = in_4 if target.experts else target.form("int8", group)
        weights = count * target.outputs * target.inputs
        return Packable(target.path, weights, count * in_4.nbytes, count * in_8.nbytes)

    @property
    def more_bytes(self) -> int:
        """What 8 bits cost."""
        return self.bytes_8 - self.bytes_4


def choose(
    model: str,
    memory: Memory,
    text: str,
    group: int,
    bits: float,
    progress: Callable[[int, int], None] = lambda _done, _all: None,
) -> frozenset[str]:
    """Paths of those matrices of ``model`` that stay in 8 bits (see `chosen`). It lies within the budgets of
    ``memory``, and reads the first 512 tokens of ``text``.

    Raises ConfigError where even 4 bits take more than ``bits``, ModelError without a tokenizer or with too short a
    text, and whatever loading raises.
    """
    budget = partial(weights_budget, memory, None) if memory.places_weights else None
    loaded = loading.load(model, budget=budget)
    try:
        if loaded.tokenizer is None:
            raise ModelError(f"{model} has no tokenizer, so it reads no text to measure its matrices on.")
        ids = torch.tensor([list(loaded.tokenizer.encode(text))[:_TOKENS]])
        if ids.shape[1] < 2:
            raise ModelError("the text is too short to measure matrices on: --eval FILE takes a longer one.")
        found = {target.path: target for target in targets(loaded.model)}
        sizes = [Packable.of(target, group) for target in found.values()]
        chosen(sizes, {}, bits)  # before what takes long
        divergences, expected = {}, _log_probabilities(loaded.model, ids)
        asked = [one.path for one in sizes if one.more_bytes]
        for number, path in enumerate(asked):
            progress(number, len(asked))
            with _in_4_bits(found[path], group):
                divergences[path] = _divergence(expected, _log_probabilities(loaded.model, ids))
        progress(len(asked), len(asked))
        return chosen(sizes, divergences, bits)
    finally:
        if loaded.weights is not None and loaded.owns_weights:
            loaded.weights.close()


def chosen(sizes: Sequence[Packable], divergences: Mapping[str, float], bits: float) -> frozenset[str]:
    """Paths of those that stay in 8 bits, so that a packed weight takes at most ``bits`` on average, scales counted.
    ``divergences``: by path, what 4 bits do to the next token's distribution, in nats.

    Raises ConfigError where even 4 bits take more.
    """
    weights, used = sum(one.weights for one in sizes), sum(one.bytes_4 for one in sizes)
    allowed = bits * weights / 8
    if used > allowed:
        raise ConfigError(
            f"--bits {bits:g} is less than weights in 4 bits take here with their scales, and with what has to be in 8 "
            f"bits: give {8 * used / weights + 0.005:.2f} or more, or a larger --group."
        )
    kept = set[str]()
    measured = [one for one in sizes if one.path in divergences]
    for one in sorted(measured, key=lambda one: divergences[one.path] / one.more_bytes, reverse=True):
        if used + one.more_bytes <= allowed:
            used += one.more_bytes
            kept.add(one.path)
    return frozenset(kept)


@torch.no_grad()
def _log_probabilities(model: Any, ids: Tensor) -> Tensor:
    """Of the next token, after each of ``ids`` [1, tokens]: (tokens, vocabulary), float32."""
    logits: Tensor = model(input_ids=ids, use_cache=False).logits[0]
    return logits.float().log_softmax(-1)


def _divergence(expected: Tensor, found: Tensor) -> float:
    pairs = zip(torch.split(expected, _COMPARED), torch.split(found, _COMPARED), strict=True)
    return sum(float((a.exp() * (a - b)).sum()) for a, b in pairs) / len(expected)


@contextlib.contextmanager
def _in_4_bits(target: Target, group: int) -> Iterator[None]:
    """The layer of ``target`` computes with its weight in 4 bits, made anew from where the weight lies meanwhile."""
    form = target.form("int4", group)

    def compute(layer: nn.Module, given: tuple[Tensor, ...], _plain: Tensor) -> Tensor:
        linear: Any = layer
        matrix = PackedMatrix(form, form.pack(linear.weight.detach().cpu()).to(given[0].device), linear.weight.dtype)
        return matrix.multiply(given[0], linear.bias)

    # before other hooks: one of them may take the weight away again
    handle = target.module.register_forward_hook(compute, prepend=True)
    try:
        yield
    finally:
        handle.remove()
