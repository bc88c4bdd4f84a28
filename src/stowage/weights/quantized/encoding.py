"""Codes as GGUF lays them: a block's scales and codes side by side, row by row. ``formats`` reads them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Final

import torch
from torch import Tensor

from stowage.weights.quantized.fitting import Codes

_BLOCK: Final = 32


def encoded(name: str, found: Codes) -> Tensor:
    """The bytes of ``found`` in the format called ``name``: uint8, (outputs, bytes of a row)."""
    blocks = found.codes.view(-1, _BLOCK)
    scales, leasts = found.scales.scales.reshape(-1, 1), found.scales.leasts.reshape(-1, 1)
    shared = found.scales.shared.reshape(-1, 2)
    return torch.cat(_PARTS[name](blocks, scales, leasts, shared), dim=1).view(len(found.codes), -1)


def _bytes(numbers: Tensor) -> Tensor:
    """Of float16: two of each."""
    return numbers.half().contiguous().view(torch.uint8)


def _halves(codes: Tensor) -> Tensor:
    """Codes (blocks, n) as bytes (blocks, n / 2): the first half in the low halves."""
    low, high = (codes & 15).chunk(2, dim=-1)
    return low | (high << 4)


def _fifth_bits(codes: Tensor) -> Tensor:
    """(blocks, 32) as 4 bytes of each block: a bit of each code."""
    places = torch.arange(8, dtype=torch.uint8)
    return ((codes >> 4 & 1).view(len(codes), 4, 8) << places).sum(dim=-1, dtype=torch.uint8)


def _q4_0(codes: Tensor, scales: Tensor, _leasts: Tensor, _shared: Tensor) -> list[Tensor]:
    return [_bytes(scales), _halves(codes)]


def _q5_0(codes: Tensor, scales: Tensor, _leasts: Tensor, _shared: Tensor) -> list[Tensor]:
    return [_bytes(scales), _fifth_bits(codes), _halves(codes)]


def _q5_1(codes: Tensor, scales: Tensor, leasts: Tensor, _shared: Tensor) -> list[Tensor]:
    return [_bytes(scales), _bytes(leasts), _fifth_bits(codes), _halves(codes)]


def _mxfp4(codes: Tensor, scales: Tensor, _leasts: Tensor, _shared: Tensor) -> list[Tensor]:
    return [(scales.view(torch.int32) >> 23).to(torch.uint8), _halves(codes)]


def _sixth_bits(scales: Tensor, leasts: Tensor, shared: Tensor) -> list[Tensor]:
    """The two shared numbers of a block of 256, and eight pairs of 6 bits in 12 bytes."""
    pairs = torch.stack([scales, -leasts], dim=-1).view(-1, 8, 2)
    times = (pairs / torch.where(shared > 0, shared, 1)[:, None]).round().to(torch.uint8)
    first, second = times[..., 0], times[..., 1]
    return [
        _bytes(shared),
        first[:, :4] | (first[:, 4:] >> 4 << 6),
        second[:, :4] | (second[:, 4:] >> 4 << 6),
        (first[:, 4:] & 15) | ((second[:, 4:] & 15) << 4),
    ]


def _pairs_of_groups(codes: Tensor) -> Tensor:
    """Eight groups of a block of 256: two at a time, the first in the low halves."""
    return _halves(codes.view(-1, 4, 2 * _BLOCK)).flatten(1)


def _q4_k(codes: Tensor, scales: Tensor, leasts: Tensor, shared: Tensor) -> list[Tensor]:
    return [*_sixth_bits(scales, leasts, shared), _pairs_of_groups(codes)]


def _q5_k(codes: Tensor, scales: Tensor, leasts: Tensor, shared: Tensor) -> list[Tensor]:
    groups = torch.arange(8, dtype=torch.uint8)[:, None]
    fifth = ((codes >> 4 & 1).view(-1, 8, _BLOCK) << groups).sum(dim=1, dtype=torch.uint8)
    return [*_sixth_bits(scales, leasts, shared), fifth, _pairs_of_groups(codes)]


_PARTS: Final[Mapping[str, Callable[[Tensor, Tensor, Tensor, Tensor], list[Tensor]]]] = {
    "q4_0": _q4_0,
    "q5_0": _q5_0,
    "q5_1": _q5_1,
    "q4_k": _q4_k,
    "q5_k": _q5_k,
    "mxfp4_block": _mxfp4,
}
ENCODED: Final = tuple(_PARTS)
"""Formats that are written."""
