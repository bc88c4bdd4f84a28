"""What the bytes of GGUF's blocks mean, by torch: each function gets blocks ``(blocks, bytes)`` and gives their values.

Values are in float32, each computed with ggml's operations in ggml's order. Most formats leave no choice: a code times
its scale is exact in float32, so only what is added to that is rounded. Constants come from the host once for each
device: a CUDA graph can have none.

Sources: ggml's ``ggml-quants.c`` and the ``gguf`` package.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Final

import torch
from torch import Tensor

_FP4: Final = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)
_NOT_LINEAR: Final = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)
"""What the codes of IQ4 mean."""


@functools.cache
def _on(device: torch.device, values: tuple[float, ...]) -> Tensor:
    with torch.inference_mode(False):  # else it could not be used outside of that mode
        return torch.tensor(values, dtype=torch.float32, device=device)


def _half(raw: Tensor) -> Tensor:
    """Two bytes of each block as a number (blocks, 1)."""
    return raw.contiguous().view(torch.float16).float()


def _halves(codes: Tensor) -> Tensor:
    """The low halves of bytes, then their high halves: (blocks, 2 x bytes)."""
    return torch.cat([codes & 15, codes >> 4], dim=-1)


def _fifth_bits(raw: Tensor) -> Tensor:
    """32 bits in 4 bytes of each block, as 16 where set."""
    shifts = torch.arange(8, dtype=torch.uint8, device=raw.device)
    return (((raw[..., None] >> shifts) & 1) << 4).flatten(1)


def _q8_0(raw: Tensor) -> Tensor:
    return _half(raw[:, :2]) * raw[:, 2:].contiguous().view(torch.int8).float()


def _q4_0(raw: Tensor) -> Tensor:
    return _half(raw[:, :2]) * (_halves(raw[:, 2:]).float() - 8)


def _q4_1(raw: Tensor) -> Tensor:
    return _half(raw[:, :2]) * _halves(raw[:, 4:]).float() + _half(raw[:, 2:4])


def _q5_0(raw: Tensor) -> Tensor:
    return _half(raw[:, :2]) * ((_halves(raw[:, 6:]) | _fifth_bits(raw[:, 2:6])).float() - 16)


def _q5_1(raw: Tensor) -> Tensor:
    codes = _halves(raw[:, 8:]) | _fifth_bits(raw[:, 4:8])
    return _half(raw[:, :2]) * codes.float() + _half(raw[:, 2:4])


def _not_linear(codes: Tensor) -> Tensor:
    return _on(codes.device, _NOT_LINEAR)[codes.long()]


def _iq4_nl(raw: Tensor) -> Tensor:
    return _half(raw[:, :2]) * _not_linear(_halves(raw[:, 2:]))


def _iq4_xs(raw: Tensor) -> Tensor:
    """A scale of 6 bits for each 32 values: low bits side by side, high ones in a word of 16 bits."""
    low = _in_turn(raw[:, 4:8], 4)
    scales = (low | (_in_turn(raw[:, 2:4], 2) << 4)).float() - 32
    codes = _halves(raw[:, 8:].reshape(-1, 8, 16))
    return (_half(raw[:, :2]) * scales)[..., None] * _not_linear(codes)


def _in_turn(raw: Tensor, width: int) -> Tensor:
    """Numbers of ``width`` bits along the bytes, from the lowest bits of each up."""
    shifts = torch.arange(0, 8, width, dtype=torch.uint8, device=raw.device)
    return ((raw[..., None] >> shifts) & ((1 << width) - 1)).flatten(-2)


def _quarters(raw: Tensor) -> Tensor:
    """Codes of 2 bits in two times 32 bytes: the lowest bits of all 32 first, (blocks, 8, 32)."""
    shifts = torch.arange(0, 8, 2, dtype=torch.uint8, device=raw.device)[:, None]
    return ((raw.reshape(-1, 2, 1, 32) >> shifts) & 3).reshape(-1, 8, 32)


def _q2_k(raw: Tensor) -> Tensor:
    scales = _half(raw[:, 80:82]) * (raw[:, :16] & 15).float()
    leasts = _half(raw[:, 82:84]) * (raw[:, :16] >> 4).float()
    return scales[..., None] * _quarters(raw[:, 16:80]).reshape(-1, 16, 16).float() - leasts[..., None]


def _q3_k(raw: Tensor) -> Tensor:
    """The third bit of a code says that it is not less by four. Sixteen scales of 6 bits: low halves in 8 bytes."""
    high = torch.cat([(raw[:, 104:108] >> shift) & 3 for shift in (0, 2, 4, 6)], dim=1)
    scales = _half(raw[:, 108:]) * ((_halves(raw[:, 96:104]) | (high << 4)).float() - 32)
    shifts = torch.arange(8, dtype=torch.uint8, device=raw.device)[:, None]
    codes = _quarters(raw[:, 32:96]) | (((raw[:, None, :32] >> shifts) & 1) << 2)
    return scales[..., None] * (codes.reshape(-1, 16, 16).float() - 4)


def _scales_k(raw: Tensor) -> tuple[Tensor, Tensor]:
    """Scales and least values (blocks, 8, 1) of a block of 256: two halves, and eight pairs of 6 bits in 12 bytes."""
    bits = raw[:, 4:16]
    first, second, mixed = bits[:, :4], bits[:, 4:8], bits[:, 8:]
    scales = torch.cat([first & 63, (mixed & 15) | ((first >> 6) << 4)], dim=1).float()
    leasts = torch.cat([second & 63, (mixed >> 4) | ((second >> 6) << 4)], dim=1).float()
    return (_half(raw[:, :2]) * scales)[..., None], (_half(raw[:, 2:4]) * leasts)[..., None]


def _q4_k(raw: Tensor) -> Tensor:
    scales, leasts = _scales_k(raw)
    return scales * _halves(raw[:, 16:].reshape(-1, 4, 32)).reshape(-1, 8, 32).float() - leasts


def _q5_k(raw: Tensor) -> Tensor:
    scales, leasts = _scales_k(raw)
    shifts = torch.arange(8, dtype=torch.uint8, device=raw.device)[:, None]
    fifth = ((raw[:, None, 16:48] >> shifts) & 1) << 4
    codes = _halves(raw[:, 48:].reshape(-1, 4, 32)).reshape(-1, 8, 32) | fifth
    return scales * codes.float() - leasts


def _q6_k(raw: Tensor) -> Tensor:
    low = _halves(raw[:, :128].reshape(-1, 2, 64)).reshape(-1, 2, 4, 32)
    shifts = torch.arange(0, 8, 2, dtype=torch.uint8, device=raw.device)[:, None]
    high = ((raw[:, 128:192].reshape(-1, 2, 1, 32) >> shifts) & 3) << 4
    scales = _half(raw[:, 208:]) * raw[:, 192:208].contiguous().view(torch.int8).float()
    return scales[..., None] * ((low | high).reshape(-1, 16, 16).float() - 32)


def _digits(raw: Tensor, count: int) -> Tensor:
    """The first so many digits, to the base of three, of bytes that are fractions of 256, of all bytes in turn."""
    powers = 3 ** torch.arange(count, dtype=torch.int32, device=raw.device)[:, None]
    return ((raw[:, None].to(torch.int32) * powers & 255) * 3 >> 8).flatten(1)


def _tq1_0(raw: Tensor) -> Tensor:
    codes = [_digits(raw[:, :32], 5), _digits(raw[:, 32:48], 5), _digits(raw[:, 48:52], 4)]
    return _half(raw[:, 52:]) * (torch.cat(codes, dim=1).float() - 1)


def _tq2_0(raw: Tensor) -> Tensor:
    return _half(raw[:, 64:]) * (_quarters(raw[:, :64]).flatten(1).float() - 1)


def _q1_0(raw: Tensor) -> Tensor:
    """Each bit is a sign."""
    return _half(raw[:, :2]) * (_in_turn(raw[:, 2:], 1).float() * 2 - 1)


def power_of(exponents: Tensor) -> Tensor:
    """2^(e - 127) of bytes (E8M0; 255 is no number)."""
    wide = exponents.to(torch.int32)
    bits = torch.where(wide == 0, 1 << 22, wide << 23)
    return torch.where(wide == 255, torch.nan, bits.view(torch.float32))


def _mxfp4_block(raw: Tensor) -> Tensor:
    return power_of(raw[:, :1]) * fp4(_halves(raw[:, 1:]))


def fp4(codes: Tensor) -> Tensor:
    """The numbers that 4-bit floating-point codes (E2M1, 0 to 15) mean, of the same shape."""
    return _on(codes.device, _FP4)[codes.long()]


IN_BLOCKS: Final[Mapping[str, Callable[[Tensor], Tensor]]] = {
    "q8_0": _q8_0,
    "q4_0": _q4_0,
    "q4_1": _q4_1,
    "q5_0": _q5_0,
    "q5_1": _q5_1,
    "q2_k": _q2_k,
    "q3_k": _q3_k,
    "q4_k": _q4_k,
    "q5_k": _q5_k,
    "q6_k": _q6_k,
    "iq4_nl": _iq4_nl,
    "iq4_xs": _iq4_xs,
    "mxfp4_block": _mxfp4_block,
    "q1_0": _q1_0,
    "tq1_0": _tq1_0,
    "tq2_0": _tq2_0,
}
