"""Fused linear layers: those that get the very same input one after the other, in one call of the kernels.

    q_proj(x), k_proj(x), v_proj(x)   ->  one call: all threads are busy for three times as long, and woken once
    gate_proj(x), up_proj(x)          ->  one call

Owns which layers these are. It learns them from the first forward of few rows: layers that followed with the same
tensor, while its numbers had not changed. A result is given out for that tensor and that weight only. The first time
that the model does not ask for one of the results, these layers are computed one by one from then on. The bits are the
same: the kernels sum every output by itself.

Weights may come and go: layers are computed together only while the weights of all of them are there.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import Parameter

from stowage.executor import kernels

ROWS_MAX = kernels.ROWS_FEW
"""With more rows one layer keeps the threads busy anyway, and the results would take memory."""


@dataclass(slots=True)
class _Seen:
    """An input that a layer was given while learning, as it was then, and the layers that followed."""

    x: Tensor
    before: Tensor
    weights: list[Tensor]


class FusedLinear:
    """The fused linear layers of one model. One thread uses it."""

    def __init__(self) -> None:
        self._fused: dict[int, tuple[Tensor, ...]] = {}
        """By the first layer's ``id``: all of them. Weights are held, so that no other one gets the ``id``."""
        self._seen: _Seen | None = None
        self._x: Tensor | None = None
        self._ready: dict[int, Tensor] = {}
        self._first = 0

    def linear(self, x: Tensor, weight: Tensor) -> Tensor:
        """``kernels.linear``, which ``kernels.takes``."""
        if self._ready:
            if x is self._x:
                found = self._ready.pop(id(weight), None)
                if found is not None:
                    return found
            self._part()
        if x.numel() > ROWS_MAX * x.shape[-1]:
            return kernels.linear(x, weight)
        weights = self._fused.get(id(weight))
        if weights is None:
            self._learn(x, weight)
        elif len(weights) > 1 and _are_here(weights):
            out, *others = kernels.linears(x, weights)
            self._x, self._first = x, id(weight)
            self._ready = {id(other): found for other, found in zip(weights[1:], others, strict=True)}
            return out
        return kernels.linear(x, weight)

    def fused(self, x: Tensor, weight: Tensor) -> tuple[Tensor, ...]:
        """Which layers are computed together when the one of ``weight`` is asked for; nothing if that is not known."""
        few = x.numel() <= ROWS_MAX * x.shape[-1]
        weights = self._fused.get(id(weight), ()) if few else ()
        return weights if _are_here(weights) else ()

    def end(self) -> None:
        """A forward is over: its tensors are let go."""
        if self._ready:
            self._part()
        if self._seen is not None:
            self._close(self._seen)
        self._x = None

    def _learn(self, x: Tensor, weight: Tensor) -> None:
        seen = self._seen
        if seen is not None:
            if x is seen.x and len(seen.weights) < kernels.TOGETHER and torch.equal(x, seen.before):
                seen.weights.append(weight)
                return
            self._close(seen)
        self._seen = _Seen(x, x.clone(), [weight])

    def _close(self, seen: _Seen) -> None:
        self._seen = None
        weights = {id(weight): weight for weight in seen.weights}
        if len(weights) == len(seen.weights):  # one that is used twice would be computed once
            self._fused[id(seen.weights[0])] = tuple(seen.weights)
        else:
            self._fused |= {key: (weight,) for key, weight in weights.items()}

    def _part(self) -> None:
        """Some were not asked for: the model goes other ways too."""
        self._fused[self._first] = self._fused[self._first][:1]
        self._ready = {}


def _are_here(weights: tuple[Tensor, ...]) -> bool:
    """One that is away is of another class (``weights.away``)."""
    return all(type(weight) is Parameter for weight in weights)
