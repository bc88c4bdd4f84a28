"""How a matrix becomes codes of few bits: a scale and a least value for each group of inputs, and the nearest codes.

What counts is the error of a layer's outputs, not that of its weights. ``Inputs`` says what a layer reads: an error in
a weight counts by the mean square of its input, and what the rounding of one input does to the outputs is made up for
by the weights of those that come after it and vary with it. Without it all weights count alike.

Source: Frantar et al., *GPTQ: Accurate Post-Training Quantization for Generative Pre-trained Transformers*, 2022.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor

from stowage.weights.quantized.grids import Grid, Scales

INPUTS_TOGETHER: Final = 2048
"""Inputs that make up for each other's errors. All would take memory and time by the square of their number."""
_DAMPED: Final = 0.01
"""Of the inputs' mean square, added to each: inputs that were never seen may come."""
_LEAST_WEIGHT: Final = 1e-3
"""Of the mean: no input counts less."""


@dataclass(frozen=True, slots=True)
class Inputs:
    """What is known of a matrix's inputs. ``weights`` (inputs,): how much each counts. ``factors``: for each
    ``INPUTS_TOGETHER`` of them the upper Cholesky factor of their products' inverse.
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
    """A fitted matrix: ``codes`` (outputs, inputs), uint8, and what of each group they are to be read with."""

    scales: Scales
    codes: Tensor


def fit(weight: Tensor, grid: Grid, inputs: Inputs | None = None) -> Codes:
    """``weight`` (outputs, inputs), float32, as ``grid`` has it. Raises CheckpointError for what it cannot hold."""
    if inputs is None:
        grouped = weight.view(len(weight), -1, grid.group)
        found = grid.scales(grouped, grouped.new_ones(grouped.shape[1:]))
        codes = grid.codes(grouped, found.scales[..., None], found.leasts[..., None])
        return Codes(found, codes.to(torch.uint8).view(weight.shape))
    parts = [
        _fit_in_order(some, grid, counts, factor)
        for some, counts, factor in zip(
            torch.split(weight, INPUTS_TOGETHER, dim=1),
            torch.split(inputs.weights, INPUTS_TOGETHER),
            inputs.factors,
            strict=True,
        )
    ]
    return Codes(_joined([part.scales for part in parts]), torch.cat([part.codes for part in parts], dim=1))


def errors(weight: Tensor, grid: Grid, counts: Tensor) -> Tensor:
    """The squared error of each output of ``weight`` (outputs, inputs) as ``grid`` has it, where each input counts
    ``counts`` (inputs,) times and none makes up for another: (outputs,). Raises CheckpointError as ``fit`` does.
    """
    grouped, counts = weight.view(len(weight), -1, grid.group), counts.view(-1, grid.group)
    found = grid.scales(grouped, counts)
    scales, leasts = found.scales[..., None], found.leasts[..., None]
    values = grid.meant(grid.codes(grouped, scales, leasts), scales, leasts)
    return ((values - grouped).square() * counts).sum(dim=(1, 2))


def _joined(parts: Sequence[Scales]) -> Scales:
    return Scales(*(torch.cat([getattr(part, name) for part in parts], dim=1) for name in Scales.__slots__))


def _fit_in_order(weight: Tensor, grid: Grid, counts: Tensor, factor: Tensor) -> Codes:
    """One input after the other: its error, as far as they vary with it, is taken off the weights of later ones."""
    left = weight.clone()
    found, codes = [], torch.empty(weight.shape, dtype=torch.uint8)
    for begin in range(0, weight.shape[1], grid.span):
        end = begin + grid.span
        now = left[:, begin:end].t().contiguous()  # (span, outputs): an input's weights lie side by side
        grouped = now.t().reshape(len(weight), -1, grid.group)
        found.append(grid.scales(grouped, counts[begin:end].view(-1, grid.group)))
        scales, leasts = (part.t().contiguous() for part in (found[-1].scales, found[-1].leasts))
        errors = torch.empty_like(now)
        for at in range(grid.span):
            scale, least, own = scales[at // grid.group], leasts[at // grid.group], factor[begin + at]
            code = grid.codes(now[at], scale, least)
            codes[:, begin + at] = code.to(torch.uint8)
            errors[at] = (now[at] - grid.meant(code, scale, least)) / own[begin + at]
            now[at + 1 :].addr_(own[begin + at + 1 : end], errors[at], alpha=-1)
        left[:, end:].addmm_(errors.t(), factor[begin:end, end:], alpha=-1)
    return Codes(_joined(found), codes)
