"""Fused linear layers: those that get the very same input one after the other, in one call of the kernels.

    q_proj(x), k_proj(x), v_proj(x)   ->  one call: all threads are busy for three times as long, and woken once
    gate_proj(x), up_proj(x)          ->  one call

Owns which layers these are. It learns them from the first forward of few rows: layers that followed with the same
tensor, while its numbers had not changed. A result is given out for that tensor and that weight only. The first time
that the model does not ask for one of the results, these layers are computed one by one from then on. The bits are the
same: the kernels sum every output by itself.

Many rows keep the threads busy with one layer, and several results would take memory; but where inputs are rounded to
8 bits, they are then rounded once.

Weights may be offloaded: layers are computed together only while the weights of all of them are in memory.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from stowage.executor import kernels
from stowage.executor.kernels import Matrix
from stowage.weights.quantized.blocks import BlockMatrix

ROWS_MAX = kernels.ROWS_FEW


@dataclass(slots=True)
class _Seen:
    """A layer's input, as it was while learning, and the layers that followed; ``sort``: of all their products."""

    x: Tensor
    before: Tensor
    sort: tuple[Any, ...]
    weights: list[Any]


class FusedLinear:
    """One model's fused linear layers, for one thread. ``matrix``: how the kernel reads a weight, if it does."""

    def __init__(self, matrix: Callable[[Tensor, Any], Matrix | None]) -> None:
        self._matrix = matrix
        self._fused: dict[int, tuple[Any, ...]] = {}
        """By the first layer's key: all of them. Weights are held, so that no other one gets the key."""
        self._seen: _Seen | None = None
        self._x: Tensor | None = None
        self._ready: dict[int, Tensor] = {}
        self._first = 0

    @staticmethod
    def takes(weight: Any) -> bool:
        """Whether layers of such a weight are known again."""
        return type(weight) is Parameter or type(weight) is BlockMatrix

    def linear(self, x: Tensor, weight: Any, matrix: Matrix) -> Tensor:
        """``kernels.linear_of`` ``matrix``, which is that of ``weight``, which it ``takes``."""
        key = _key(weight)
        if self._ready:
            if x is self._x:
                found = self._ready.pop(key, None)
                if found is not None:
                    return found
            self._part()
        few = x.numel() <= ROWS_MAX * x.shape[-1]
        if few or matrix.int8:
            weights = self._fused.get(key)
            if weights is None and few:
                self._learn(x, weight, matrix)
            elif weights is not None and (all_of_them := self._matrices(x, weights)):
                out, *others = kernels.linears(x, all_of_them)
                self._x, self._first = x, key
                self._ready = {_key(other): found for other, found in zip(weights[1:], others, strict=True)}
                return out
        return kernels.linear_of(x, matrix)

    def fused(self, x: Tensor, weight: Parameter) -> tuple[Parameter, ...]:
        """Which layers are computed together when the one of ``weight`` is asked for; nothing if that is not known."""
        few = x.numel() <= ROWS_MAX * x.shape[-1]
        weights = self._fused.get(_key(weight), ()) if few else ()
        return weights if _are_here(weights) else ()

    def end(self) -> None:
        """A forward is over: its tensors are let go."""
        if self._ready:
            self._part()
        if self._seen is not None:
            self._close(self._seen)
        self._x = None

    def _matrices(self, x: Tensor, weights: Sequence[Any]) -> list[Matrix]:
        """Those of layers that can be computed together now; of fewer than two none."""
        if len(weights) < 2 or not _are_here(weights):
            return []
        found = [self._matrix(x, weight) for weight in weights]
        return [matrix for matrix in found if matrix is not None] if None not in found else []

    def _learn(self, x: Tensor, weight: Any, matrix: Matrix) -> None:
        seen, sort = self._seen, (type(weight), matrix.group, kernels.form_of(x, matrix))
        if seen is not None:
            together = x is seen.x and sort == seen.sort and len(seen.weights) < kernels.TOGETHER
            if together and torch.equal(x, seen.before):
                seen.weights.append(weight)
                return
            self._close(seen)
        self._seen = _Seen(x, x.clone(), sort, [weight])

    def _close(self, seen: _Seen) -> None:
        self._seen = None
        weights = {_key(weight): weight for weight in seen.weights}
        if len(weights) == len(seen.weights):  # one that is used twice would be computed once
            self._fused[_key(seen.weights[0])] = tuple(seen.weights)
        else:
            self._fused |= {key: (weight,) for key, weight in weights.items()}

    def _part(self) -> None:
        """Some were not asked for: the model goes other ways too."""
        self._fused[self._first] = self._fused[self._first][:1]
        self._ready = {}


def _parts(weight: Any) -> tuple[Tensor, ...]:
    return tuple(weight.parts.values()) if type(weight) is BlockMatrix else (weight,)


def _key(weight: Any) -> int:
    """A layer's matrix is made anew in every forward; its parameters stay."""
    return id(_parts(weight)[0])


def _are_here(weights: Sequence[Any]) -> bool:
    """One that is offloaded is of another class (``weights.offloaded_parameter``)."""
    return all(type(part) is Parameter for weight in weights for part in _parts(weight))
