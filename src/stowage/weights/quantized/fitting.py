"""How a matrix becomes codes of 4 bits: a scale and a least value for each group of inputs, and the nearest codes.

What counts is the error of a layer's outputs, not that of its weights. ``Inputs`` says what a layer reads: an error in
a weight counts by the mean square of its input, and what the rounding of one input does to the outputs is made up for
by the weights of those that come after it and vary with it. Without it all weights count alike.

Source: Frantar et al., *GPTQ: Accurate Post-Training Quantization for Generative Pre-trained Transformers*, 2022.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor

from stowage.errors import CheckpointError

__all__ = ["INPUTS_TOGETHER", "Codes", "Inputs", "fit"]

INPUTS_TOGETHER: Final = 2048
"""Inputs that make up for each other's errors. All would take memory and time by the square of their number."""
_SHRUNK: Final = (1.0, 0.95, 0.9, 0.85, 0.8)
"""Shares of a group's range that are tried: the codes with the least squared error are kept."""
_FITTED: Final = 3
"""How often codes are chosen for a scale and a least value, which are then fitted to the codes by least squares."""
_MOST: Final = 15
_DAMPED: Final = 0.01
"""Of the inputs' mean square, added to each: inputs that were never seen may come."""
_LEAST_WEIGHT: Final = 1e-3
"""Of the mean: no input counts less."""


@dataclass(frozen=True, slots=True)
class Inputs:
    """``weights`` (inputs,): how much each counts. ``factors``: for each ``INPUTS_TOGETHER`` of them the upper Cholesky
    factor of their products' inverse.
    """

    weights: Tensor
    factors: tuple[Tensor, ...]

    @staticmethod
    def of(rows: Tensor, counts: Tensor | None = None) -> Inputs | None:
        """Of what a layer read: (tokens, inputs). ``counts`` (tokens,): how much an error counts at each, none below 0.
        ``None`` where that says nothing: zeros, or numbers that are none.
        """
        rows, squares, factors = rows.float(), [], []
        if counts is not None:
            rows = rows * (counts.float() / counts.float().mean()).sqrt()[:, None]
        for some in torch.split(rows, INPUTS_TOGETHER, dim=1):
            products = some.t() @ some / len(some)
            mean = products.diagonal().mean()
            if not (bool(torch.isfinite(products).all()) and mean > 0):
                return None
            squares.append(products.diagonal() + _LEAST_WEIGHT * mean)
            products.diagonal().add_(_DAMPED * mean)
            lower, failed = torch.linalg.cholesky_ex(products)
            if failed:
                return None
            factors.append(torch.linalg.cholesky(torch.cholesky_inverse(lower), upper=True))
        return Inputs(torch.cat(squares), tuple(factors))

    @property
    def remaining(self) -> Tensor:
        """What the square of an error in each input's weights counts when others have made up for it: (inputs,)."""
        return torch.cat([factor.diagonal() for factor in self.factors]).square().reciprocal()


@dataclass(frozen=True, slots=True)
class Codes:
    """A weight is code * scale + least. ``scales``, ``leasts`` (outputs, groups), float16; ``codes`` (outputs,
    inputs), uint8.
    """

    scales: Tensor
    leasts: Tensor
    codes: Tensor


def fit(weight: Tensor, group: int, inputs: Inputs | None = None) -> Codes:
    """``weight`` (outputs, inputs), float32, in groups of ``group`` inputs. Raises CheckpointError for NaN, infinity
    and what is too large for float16.
    """
    if inputs is None:
        grouped = weight.view(len(weight), -1, group)
        scales, leasts = _fitted(grouped, grouped.new_ones(group))
        return Codes(scales, leasts, _nearest(grouped, scales, leasts).to(torch.uint8).view(weight.shape))
    parts = [
        _fit_in_order(some, group, counts, factor)
        for some, counts, factor in zip(
            torch.split(weight, INPUTS_TOGETHER, dim=1),
            torch.split(inputs.weights, INPUTS_TOGETHER),
            inputs.factors,
            strict=True,
        )
    ]
    return Codes(*(torch.cat([getattr(part, name) for part in parts], dim=1) for name in Codes.__slots__))


def _fit_in_order(weight: Tensor, group: int, counts: Tensor, factor: Tensor) -> Codes:
    """One input after the other: its error, as far as they vary with it, is taken off the weights of later ones."""
    left = weight.clone()
    scales, leasts, codes = [], [], torch.empty(weight.shape, dtype=torch.uint8)
    for begin in range(0, weight.shape[1], group):
        end = begin + group
        now = left[:, begin:end].t().contiguous()  # (group, outputs): an input's weights lie side by side
        scale, least = _fitted(now.t()[:, None], counts[begin:end])
        scales.append(scale)
        leasts.append(least)
        step, low = torch.where(scale > 0, scale, 1).float()[:, 0], least.float()[:, 0]
        errors = torch.empty_like(now)
        for at in range(group):
            code = ((now[at] - low) / step).round_().clamp_(0, _MOST)
            codes[:, begin + at] = code.to(torch.uint8)
            own = factor[begin + at]
            errors[at] = (now[at] - (code * scale.float()[:, 0] + low)) / own[begin + at]
            now[at + 1 :].addr_(own[begin + at + 1 : end], errors[at], alpha=-1)
        left[:, end:].addmm_(errors.t(), factor[begin:end, end:], alpha=-1)
    return Codes(torch.cat(scales, dim=1), torch.cat(leasts, dim=1), codes)


def _fitted(grouped: Tensor, counts: Tensor) -> tuple[Tensor, Tensor]:
    """The scale and the least value of each group of ``grouped`` (outputs, groups, inputs) that were found to have the
    least squared error, of which each input's ``counts`` times: (outputs, groups), float16.
    """
    low, high = grouped.amin(dim=2), grouped.amax(dim=2)
    shares = counts / counts.sum()
    mean = (grouped * shares).sum(dim=2)
    best_error = torch.full_like(low, float("inf"))
    best = (low.half(), low.half())
    for share in _SHRUNK:
        least = low * share
        scale = ((high * share - least) / _MOST).clamp_(min=0)
        for _ in range(_FITTED):
            halves = (scale.half(), least.half())
            _refuse_infinite(*halves)
            codes = _nearest(grouped, *halves)
            values = codes * halves[0].float()[..., None] + halves[1].float()[..., None]
            error = ((values - grouped).square() * shares).sum(dim=2)
            better = error < best_error
            best_error = torch.where(better, error, best_error)
            best = (torch.where(better, halves[0], best[0]), torch.where(better, halves[1], best[1]))
            middle = (codes * shares).sum(dim=2)
            apart = (codes - middle[..., None]) * shares
            spread = (apart * codes).sum(dim=2)
            found = (apart * grouped).sum(dim=2) / torch.where(spread > 0, spread, 1)
            scale = torch.where((spread > 0) & (found > 0), found, scale)
            least = torch.where(spread > 0, mean - scale * middle, least)
    return best


def _nearest(grouped: Tensor, scale: Tensor, least: Tensor) -> Tensor:
    step = torch.where(scale > 0, scale, 1).float()
    return ((grouped - least.float()[..., None]) / step[..., None]).round_().clamp_(0, _MOST)


def _refuse_infinite(*numbers: Tensor) -> None:
    if not all(bool(torch.isfinite(one).all()) for one in numbers):
        raise CheckpointError(
            "a weight of this checkpoint is NaN, infinite, or too large for 4-bit scales, so it cannot be packed: "
            "download the checkpoint again, or try --weights int8."
        )
