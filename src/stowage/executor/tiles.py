"""The start-up trials of bfloat16 instructions: do they give the bits of the kernels for few rows on this processor?

Owns the trials, and with them the decision. Tiles (AMX): kernels multiply many rows by tiles and few rows by vectors,
and a row's bits must not depend on which of both it was (``native/kernels/tiles.h``). How a processor's tiles add up is
in Intel's reference; that it is so is seen here, once in each process, on numbers that tell one order of sums from
another. If one bit differs, tiles are left alone: answers are exact in another way then (``determinism.pieces``).

Of attention: the scores of many rows are products of pairs (AVX512_BF16) or of tiles, and must have the bits of fused
products in float32 (``native/kernels/pair_scores.h``). If one differs, scores are computed in float32.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

NAME = "amx_bf16"
_SHAPES = ((5, 1, 1), (7, 31, 17), (16, 64, 16), (17, 513, 33), (33, 576, 48), (40, 1100, 70), (600, 96, 20))
"""Rows, inputs, outputs: edges of tiles, of segments, and of what is laid out at a time."""
_HALVES, _BYTES, _ROUNDED = 4, 5, 7
"""Forms of a product, as the kernels number them: bfloat16, bytes, and bytes by inputs that are rounded to 8 bits."""
_FEW = 4
_FLOATS = "avx512"
_HEADS = ((16, 30), (24, 70), (80, 45), (128, 100), (256, 64))
"""Numbers of a head, and keys: one lane's product, some left over, an odd number of them, the most of a tile."""


def try_tiles(kernel: Any) -> str:
    """Have ``kernel`` (the extension) use tiles from now on if they stand the trial. Returns what was found against
    them: empty where it stood it, and where there are none.
    """
    try:
        kernel.use_instructions(NAME)
    except ValueError:
        return ""
    against = ""
    try:
        against = next((name for name, x, weight, form in _cases() if not _same(kernel, x, weight, form)), "")
        if not against:
            kernel.trust_tiles()
    finally:
        kernel.use_instructions(None)
    return against and f"this processor's tiles add up {against} in another way than Stowage's kernels"


def try_scoring(kernel: Any) -> None:
    """Have attention of ``kernel``, as it is chosen, use instructions for bfloat16 if they stand the trial."""
    name = kernel.use_instructions(None)
    if name not in ("avx512_bf16", NAME):
        return
    generator, rows, block_tokens = torch.Generator().manual_seed(25), 30, 16

    def numbers(*shape: int) -> Tensor:
        return torch.ldexp(torch.randn(shape, generator=generator), _exponents(shape, 4, generator)).bfloat16()

    def attended(way: str, rounded_from: int, query: Tensor, keys: Tensor, first: int) -> Tensor:
        """By two query heads to one of keys, which are their own values."""
        width = query.shape[2]
        out, table, run = torch.empty(query.shape), torch.arange(len(keys)), torch.tensor([0, rows, first, 0, 0])
        lie = (keys.data_ptr(), keys.stride(0), keys.stride(1), 0, 0, 0)
        sizes = (1, 1, 2, width, width, block_tokens, 0, 0)
        kernel.use_instructions(way)
        kernel.attention(query.data_ptr(), out.data_ptr(), lie, lie, table.data_ptr(), run.data_ptr(), 0, *sizes,
                         width**-0.5 / 64, 0.0, True, False, rounded_from, 1)  # fmt: skip
        return out.view(torch.int32)

    try:
        for width, length in _HEADS:
            case = numbers(rows, 2, width), numbers(-(-length // block_tokens), block_tokens, width), length - rows
            for rounded_from in (0, length):  # all rows, and none
                if not torch.equal(attended(_FLOATS, rounded_from, *case), attended(name, rounded_from, *case)):
                    return
        kernel.trust_scoring()
    finally:
        kernel.use_instructions(None)


def _exponents(shape: tuple[int, ...], most: int, generator: torch.Generator) -> Tensor:
    return torch.randint(-most, most + 1, shape, generator=generator)


def _same(kernel: Any, x: Tensor, weight: Tensor, form: int) -> bool:
    """Whether all rows at once give the bits of a few at a time; what is no number is one, whatever its bits."""
    many = _product(kernel, x, weight, form, threads=2)
    few = torch.cat([_product(kernel, part, weight, form, threads=1) for part in torch.split(x, _FEW)])
    differ = many.view(torch.int32) != few.view(torch.int32)
    return not bool((differ & ~(many.isnan() & few.isnan())).any())


def _product(kernel: Any, x: Tensor, weight: Tensor, form: int, threads: int) -> Tensor:
    rows, inputs = x.shape
    out, scales = torch.empty(rows, len(weight)), torch.ones(len(weight))
    layer = (weight.data_ptr(), scales.data_ptr(), out.data_ptr(), len(weight), weight.stride(0), 0, 0, 1, 0)
    kernel.linear(x.data_ptr(), rows, inputs, x.stride(0), 0, form, False, threads, *layer)
    return out


def _cases() -> Iterator[tuple[str, Tensor, Tensor, int]]:
    """What is multiplied, in which form, and what it is called."""
    generator = torch.Generator().manual_seed(25)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator)

    def spread(*shape: int, middle: int = 0) -> Tensor:
        """Numbers whose sizes differ by up to 2^40."""
        return torch.ldexp(normal(*shape), _exponents(shape, 20, generator) + middle).bfloat16()

    def any_finite(*shape: int) -> Tensor:
        numbers = torch.randint(-(1 << 15), 1 << 15, shape, generator=generator, dtype=torch.int16)
        found = numbers.view(torch.bfloat16)
        return torch.where(found.isfinite(), found, 0)

    for rows, inputs, outputs in _SHAPES:
        ours, theirs = (rows, inputs), (outputs, inputs)
        codes = torch.randint(-128, 128, theirs, generator=generator, dtype=torch.int8)
        yield "common numbers", normal(*ours).bfloat16(), normal(*theirs).bfloat16(), _HALVES
        yield "codes of one byte", normal(*ours).bfloat16(), codes, _BYTES
        if inputs % 32 == 0:
            yield "bytes", spread(*ours), codes, _ROUNDED
        yield "small numbers beside large ones", spread(*ours), spread(*theirs), _HALVES
        yield "numbers near the least", spread(*ours, middle=-63), spread(*theirs, middle=-63), _HALVES
        yield "numbers of any size", any_finite(*ours), any_finite(*theirs), _HALVES
        large = torch.tensor([1.0, 2.0**24, -(2.0**24), 0.0, -1.0, 2.0**-24])  # 1 is lost beside 2^24, or is not
        picked = torch.randint(len(large), theirs, generator=generator)
        yield "what cancels out", torch.ones(ours, dtype=torch.bfloat16), large[picked].bfloat16(), _HALVES
