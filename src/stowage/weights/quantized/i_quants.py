"""What the bytes of GGUF's i-quants mean, by torch: codes that are looked up in grids, eight or four values at a time.

The grids are large tables of numbers, and ggml's own. They come from the package ``gguf``, which GGUF files need in any
case: for torch as they are, and for the kernels as one table, ``table``, which these are handed once.

Every value is exact in float32: a half, times a small whole number and a half, times a code of at most six bits. So
the order in which they are multiplied does not matter.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

_GRIDS: Final = ("IQ2_XXS", "IQ2_XS", "IQ2_S", "IQ3_XXS", "IQ3_S", "IQ1_S")


def is_readable() -> bool:
    """Whether the package is there that has the grids."""
    try:
        import gguf.quants  # noqa: F401
    except ImportError:
        return False
    return True


@functools.cache
def _grid(name: str) -> NDArray[np.int8]:
    """Values (codes, values of a code), eighths of them for IQ1."""
    from gguf import quants

    kind = getattr(quants, name)
    kind.init_grid()
    grid: NDArray[np.int8] = kind.grid.reshape(kind.grid_shape).astype(np.int8)
    # what IQ1 adds to a grid's values or takes from them, an eighth, stands in the grid: it is there twice
    return np.concatenate([8 * grid + 1, 8 * grid - 1]) if name == "IQ1_S" else grid


@functools.cache
def _signs() -> NDArray[np.uint8]:
    """Of each 7 bits the 8 signs that they stand for: the last one makes their number even."""
    seven = np.arange(128, dtype=np.uint8)
    return (seven | (np.bitwise_count(seven) & 1) << 7).astype(np.uint8)


@functools.cache
def table() -> bytes:
    """What the kernels look up, 8 bytes at a time: bytes that are 255 where a sign is set, for 8 signs and for those
    that 7 bits stand for, and the grids.
    """
    bits = np.unpackbits(np.arange(256, dtype=np.uint8)[:, None], axis=1, bitorder="little") * np.uint8(255)
    return b"".join([bits.tobytes(), bits[_signs()].tobytes(), *(_grid(name).tobytes() for name in _GRIDS)])


@functools.cache
def _on(device: torch.device, name: str) -> Tensor:
    with torch.inference_mode(False):  # else it could not be used outside of that mode
        values = torch.from_numpy(_signs() if name == "signs" else _grid(name))
        return values.to(device, torch.uint8 if name == "signs" else torch.float32)


def _looked_up(name: str, codes: Tensor) -> Tensor:
    return _on(codes.device, name)[codes.long()].flatten(1)


def _signed(values: Tensor, signs: Tensor) -> Tensor:
    """``values`` (blocks, 256), negated where a bit of ``signs`` (blocks, 32) is set."""
    shifts = torch.arange(8, dtype=torch.uint8, device=signs.device)
    return torch.where(((signs[..., None] >> shifts) & 1).flatten(1).bool(), -values, values)


def _words(raw: Tensor, nbytes: int) -> Tensor:
    """Whole numbers of so many bytes, wherever these lie."""
    shifts = torch.arange(0, 8 * nbytes, 8, device=raw.device)
    return (raw.reshape(*raw.shape[:-1], -1, nbytes).long() << shifts).sum(-1)


def _bits(words: Tensor, count: int, step: int) -> Tensor:
    """Numbers that begin at every so many bits of each word, one after the other."""
    return (words[..., None] >> torch.arange(0, count * step, step, device=words.device)).flatten(1)


def _scaled(half: Tensor, factor: float, numbers: Tensor, values: Tensor) -> Tensor:
    """Times a half, times ``numbers`` (blocks, scales) and a half, times ``factor``."""
    scales = half.contiguous().view(torch.float16).float() * factor * (numbers.float() + 0.5)
    return (scales[..., None] * values.view(*scales.shape, -1)).flatten(1)


def _seven(words: Tensor) -> Tensor:
    """Signs of which each word has four times 7 bits."""
    return _on(words.device, "signs")[_bits(words, 4, 7) & 127]


def _iq2_xxs(raw: Tensor) -> Tensor:
    eights = raw[:, 2:].reshape(-1, 8, 8)
    words = _words(eights[..., 4:], 4)[..., 0]
    values = _signed(_looked_up("IQ2_XXS", eights[..., :4].flatten(1)), _seven(words))
    return _scaled(raw[:, :2], 0.25, words >> 28, values)


def _iq2_xs(raw: Tensor) -> Tensor:
    words = _words(raw[:, 2:66], 2)
    values = _signed(_looked_up("IQ2_XS", words & 511), _on(raw.device, "signs")[words >> 9])
    return _scaled(raw[:, :2], 0.25, _bits(raw[:, 66:], 2, 4) & 15, values)


def _iq2_s(raw: Tensor) -> Tensor:
    codes = raw[:, 2:34].long() | (_bits(raw[:, 66:74], 4, 2).long() & 3) << 8
    return _scaled(raw[:, :2], 0.25, _bits(raw[:, 74:], 2, 4) & 15, _signed(_looked_up("IQ2_S", codes), raw[:, 34:66]))


def _iq3_xxs(raw: Tensor) -> Tensor:
    words = _words(raw[:, 66:], 4)
    return _scaled(raw[:, :2], 0.5, words >> 28, _signed(_looked_up("IQ3_XXS", raw[:, 2:66]), _seven(words)))


def _iq3_s(raw: Tensor) -> Tensor:
    codes = raw[:, 2:66].long() | (_bits(raw[:, 66:74], 8, 1).long() & 1) << 8
    return _scaled(raw[:, :2], 2, _bits(raw[:, 106:], 2, 4) & 15, _signed(_looked_up("IQ3_S", codes), raw[:, 74:106]))


def _iq1_s(raw: Tensor) -> Tensor:
    words = _words(raw[:, 34:], 2)
    less = (words >> 15 << 11).repeat_interleave(4, dim=1)
    values = _looked_up("IQ1_S", raw[:, 2:34].long() | (_bits(words, 4, 3) & 7) << 8 | less)
    return _scaled(raw[:, :2], 0.25, words >> 12 & 7, values)


def _iq1_m(raw: Tensor) -> Tensor:
    """The half is in the highest four bits of four words."""
    words = _words(raw[:, 48:], 2)
    parts = words >> 12 << torch.arange(0, 16, 4, device=raw.device)
    half = parts.sum(1, keepdim=True).to(torch.int32).view(torch.uint8)[:, :2]
    values = _looked_up("IQ1_S", raw[:, :32].long() | (_bits(raw[:, 32:48], 2, 4).long() & 15) << 8)
    return _scaled(half, 0.25, _bits(words, 4, 3) & 7, values)


I_QUANTS: Final[Mapping[str, Callable[[Tensor], Tensor]]] = {
    "iq2_xxs": _iq2_xxs,
    "iq2_xs": _iq2_xs,
    "iq2_s": _iq2_s,
    "iq3_xxs": _iq3_xxs,
    "iq3_s": _iq3_s,
    "iq1_s": _iq1_s,
    "iq1_m": _iq1_m,
}
