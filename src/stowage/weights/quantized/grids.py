"""The values that a quantized form has: its codes, and what they mean with a group's scale and least value.

A scale and a least value are found by search: several ranges are tried, codes are rounded to each, and the scale and
the least value are then fitted to the codes by least squares, some times over. What a format can hold of them (float16,
six bits, a power of two) is what codes are rounded to.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final, Protocol

import torch
from torch import Tensor

from stowage.errors import CheckpointError

_SHRUNK: Final = (1.0, 0.95, 0.9, 0.85, 0.8)
"""Shares of a group's range that are tried: the codes with the least squared error are kept."""
_FITTED: Final = 3
"""How often codes are chosen for a scale and a least value, which are then fitted to the codes by least squares."""
_SUPER_GROUPS: Final = 8
"""Groups whose scales are multiples of one number."""
_SIX_BITS: Final = 63
_FP4: Final = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_FP4_BETWEEN: Final = (0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0)
_EXPONENT_OF_MOST: Final = 2
"""Of 6, the greatest number of 4 bits."""


@dataclass(frozen=True, slots=True)
class Scales:
    """``scales`` and ``leasts`` (outputs, groups), float32, as the format gives them back. ``shared`` (outputs,
    groups / 8, 2), where those are multiples of two numbers: these.
    """

    scales: Tensor
    leasts: Tensor
    shared: Tensor


def refuse_infinite(values: Tensor) -> None:
    """Raises CheckpointError for NaN and infinity among what was found of a weight."""
    if not bool(torch.isfinite(values).all()):
        raise CheckpointError(
            "a weight of this checkpoint is NaN or infinite, so it cannot be packed: download the checkpoint again."
        )


class Grid(Protocol):
    """The values of a form. ``group``: inputs that share a scale; ``span``: inputs whose scales are found together."""

    @property
    def group(self) -> int: ...
    @property
    def span(self) -> int: ...
    def scales(self, grouped: Tensor, counts: Tensor) -> Scales:
        """Those that were found to have the least squared error in the weights ``grouped`` (outputs, groups, inputs),
        of which each input's ``counts`` (groups, inputs) times. Raises CheckpointError for NaN, infinity and what the
        format cannot hold.
        """

    def codes(self, values: Tensor, scales: Tensor, leasts: Tensor) -> Tensor:
        """The nearest to ``values``, whole numbers in float32; shapes are broadcast."""

    def meant(self, codes: Tensor, scales: Tensor, leasts: Tensor) -> Tensor:
        """What ``codes`` stand for."""


@dataclass(frozen=True, slots=True)
class Steps:
    """Codes from 0 to ``most`` times a scale, plus a least value, float16 both. ``centred``: the least value is the
    scale times so much less than 0, and is not kept.
    """

    group: int
    most: int
    centred: int = 0

    @property
    def span(self) -> int:
        return self.group

    def codes(self, values: Tensor, scales: Tensor, leasts: Tensor) -> Tensor:
        return ((values - leasts) / torch.where(scales == 0, 1, scales)).round_().clamp_(0, self.most)

    def meant(self, codes: Tensor, scales: Tensor, leasts: Tensor) -> Tensor:
        return codes * scales + leasts

    def scales(self, grouped: Tensor, counts: Tensor) -> Scales:
        low, high = grouped.amin(dim=2), grouped.amax(dim=2)
        shares = counts / counts.sum(dim=1, keepdim=True)
        best_error = torch.full_like(low, float("inf"))
        best = (low, low)
        for share in _SHRUNK:
            scale, least = self._range(low * share, high * share)
            for _ in range(_FITTED):
                kept = self._kept(scale, least)
                codes = self.codes(grouped, kept[0][..., None], kept[1][..., None])
                values = self.meant(codes, kept[0][..., None], kept[1][..., None])
                error = ((values - grouped).square() * shares).sum(dim=2)
                better = error < best_error
                best_error = torch.where(better, error, best_error)
                best = (torch.where(better, kept[0], best[0]), torch.where(better, kept[1], best[1]))
                scale, least = self._fitted(grouped, codes, shares, scale, least)
        return Scales(*best, best[0].new_zeros(len(low), 0, 2))

    def _range(self, low: Tensor, high: Tensor) -> tuple[Tensor, Tensor]:
        """The scale and the least value that codes reach from ``low`` to ``high`` with."""
        if self.centred:  # one more code below 0 than above it: the farther end is put there, whatever its sign
            return torch.where(high > -low, high, low) / -self.centred, low
        return ((high - low) / self.most).clamp_(min=0), low

    def _kept(self, scale: Tensor, least: Tensor) -> tuple[Tensor, Tensor]:
        scale = scale.half().float()
        least = scale * -self.centred if self.centred else least.half().float()
        if not (bool(torch.isfinite(scale).all()) and bool(torch.isfinite(least).all())):
            raise CheckpointError(
                "a weight of this checkpoint is NaN, infinite, or too large for the scales of few bits, so it cannot "
                "be packed: download the checkpoint again, or try --weights int8."
            )
        return scale, least

    def _fitted(
        self, grouped: Tensor, codes: Tensor, shares: Tensor, scale: Tensor, least: Tensor
    ) -> tuple[Tensor, Tensor]:
        """By least squares; as they were where all codes are one."""
        middle = torch.full_like(scale, self.centred) if self.centred else (codes * shares).sum(dim=2)
        apart = (codes - middle[..., None]) * shares
        spread = (apart * (codes - middle[..., None])).sum(dim=2)
        found = (apart * grouped).sum(dim=2) / torch.where(spread > 0, spread, 1)
        scale = torch.where((spread > 0) & ((found > 0) | bool(self.centred)), found, scale)
        return scale, torch.where(spread > 0, (grouped * shares).sum(dim=2) - scale * middle, least)


@dataclass(frozen=True, slots=True)
class NestedSteps(Steps):
    """A grid like `Steps`, with scales, and how far the least values are below 0, that are up to 63 times a float16
    that eight groups share.
    """

    @property
    def span(self) -> int:
        return self.group * _SUPER_GROUPS

    def scales(self, grouped: Tensor, counts: Tensor) -> Scales:
        # not super(): a slotted dataclass is another class than the one that is written here
        found = Steps.scales(self, grouped, counts)
        pairs = torch.stack([found.scales, -found.leasts.clamp(max=0)], dim=-1)
        pairs = pairs.view(len(pairs), -1, _SUPER_GROUPS, 2)
        shared = (pairs.amax(dim=2) / _SIX_BITS).half().float()
        times = (pairs / torch.where(shared > 0, shared, 1)[:, :, None]).round_().clamp_(0, _SIX_BITS)
        scales, below = (times * shared[:, :, None]).flatten(1, 2).unbind(-1)
        return Scales(scales, -below, shared)


@dataclass(frozen=True, slots=True)
class Float4:
    """Numbers of 4 bits (E2M1: 0, 0.5, 1, 1.5, 2, 3, 4, 6 and their negatives) times a power of two."""

    group: int

    @property
    def span(self) -> int:
        return self.group

    def codes(self, values: Tensor, scales: Tensor, leasts: Tensor) -> Tensor:
        between = torch.tensor(_FP4_BETWEEN, device=values.device)
        share = (values / scales + leasts).contiguous()
        return torch.bucketize(share.abs(), between).float() + 8 * (share < 0)

    def meant(self, codes: Tensor, scales: Tensor, leasts: Tensor) -> Tensor:
        numbers = torch.tensor((*_FP4, *(-number for number in _FP4)), device=codes.device)
        return numbers[codes.long()] * scales + leasts

    def scales(self, grouped: Tensor, counts: Tensor) -> Scales:
        most = grouped.abs().amax(dim=2)
        refuse_infinite(most)
        # frexp: most = mantissa * 2^exponent, and mantissa is from 0.5 to 1
        exponent = (torch.frexp(most).exponent - 1 - _EXPONENT_OF_MOST).clamp(-126, 126)
        zeros, best, best_error = torch.zeros_like(most), most, torch.full_like(most, float("inf"))
        for more in (0, 1):  # the greatest is beyond 6, and cut; or there is room
            scale = ((exponent + more + 127) << 23).view(torch.float32)  # the power of two, to the bit
            codes = self.codes(grouped, scale[..., None], zeros[..., None])
            error = ((self.meant(codes, scale[..., None], zeros[..., None]) - grouped).square() * counts).sum(dim=2)
            best = torch.where(error < best_error, scale, best)
            best_error = torch.minimum(error, best_error)
        return Scales(best, zeros, zeros.new_zeros(len(zeros), 0, 2))


GRIDS: Final[Mapping[str, Grid]] = {
    **{f"int4_{group}": Steps(group, 15) for group in (32, 64, 128)},
    "q4_0": Steps(32, 15, 8),
    "q5_0": Steps(32, 31, 16),
    "q5_1": Steps(32, 31),
    "q4_k": NestedSteps(32, 15),
    "q5_k": NestedSteps(32, 31),
    "mxfp4_block": Float4(32),
}
"""By the name of a form."""
