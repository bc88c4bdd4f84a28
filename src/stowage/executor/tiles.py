"""Before tiles of bfloat16 (AMX) are used: do they give the bits of the kernels for few rows, on this very processor?

Owns the trial, and with it the decision. Kernels multiply many rows by tiles and few rows by vectors, and a row's bits
must not depend on which of both it was (``native/kernels/tiles.h``). How a processor's tiles add up is in Intel's
reference; that it is so is seen here, once in each process, on numbers that tell one order of sums from another. If one
bit differs, tiles are left alone: answers are exact in another way then (``determinism.cuts``).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

NAME = "amx_bf16"
_SHAPES = ((5, 1, 1), (7, 31, 17), (16, 64, 16), (17, 513, 33), (33, 576, 48), (40, 1100, 70), (600, 96, 20))
"""Rows, inputs, outputs: edges of tiles, of segments, and of what is laid out at a time."""
_FORMS = {torch.bfloat16: 4, torch.int8: 5}
_FEW = 4


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
        against = next((name for name, x, weight in _cases() if not _same(kernel, x, weight)), "")
        if not against:
            kernel.trust_tiles()
    finally:
        kernel.use_instructions(None)
    return against and f"this processor's tiles of bfloat16 add up {against} in another way than Stowage's kernels"


def _same(kernel: Any, x: Tensor, weight: Tensor) -> bool:
    """Whether all rows at once give the bits of a few at a time; what is no number is one, whatever its bits."""
    many = _product(kernel, x, weight, threads=2)
    few = torch.cat([_product(kernel, part, weight, threads=1) for part in torch.split(x, _FEW)])
    differ = many.view(torch.int32) != few.view(torch.int32)
    return not bool((differ & ~(many.isnan() & few.isnan())).any())


def _product(kernel: Any, x: Tensor, weight: Tensor, threads: int) -> Tensor:
    rows, inputs = x.shape
    out, scales = torch.empty(rows, len(weight)), torch.ones(len(weight))
    layer = (weight.data_ptr(), scales.data_ptr(), out.data_ptr(), len(weight), weight.stride(0), 0, 0, 0, 0)
    kernel.linear(x.data_ptr(), rows, inputs, x.stride(0), 0, _FORMS[weight.dtype], False, threads, *layer)
    return out


def _cases() -> Iterator[tuple[str, Tensor, Tensor]]:
    """What is multiplied, and what it is called."""
    generator = torch.Generator().manual_seed(25)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator)

    def spread(*shape: int, middle: int = 0) -> Tensor:
        """Numbers whose sizes differ by up to 2^40."""
        exponents = torch.randint(-20, 21, shape, generator=generator) + middle
        return torch.ldexp(normal(*shape), exponents).bfloat16()

    def any_finite(*shape: int) -> Tensor:
        numbers = torch.randint(-(1 << 15), 1 << 15, shape, generator=generator, dtype=torch.int16)
        found = numbers.view(torch.bfloat16)
        return torch.where(found.isfinite(), found, 0)

    for rows, inputs, outputs in _SHAPES:
        ours, theirs = (rows, inputs), (outputs, inputs)
        codes = torch.randint(-128, 128, theirs, generator=generator, dtype=torch.int8)
        yield "common numbers", normal(*ours).bfloat16(), normal(*theirs).bfloat16()
        yield "codes of one byte", normal(*ours).bfloat16(), codes
        yield "small numbers beside large ones", spread(*ours), spread(*theirs)
        yield "numbers near the least", spread(*ours, middle=-63), spread(*theirs, middle=-63)
        yield "numbers of any size", any_finite(*ours), any_finite(*theirs)
        large = torch.tensor([1.0, 2.0**24, -(2.0**24), 0.0, -1.0, 2.0**-24])  # 1 is lost beside 2^24, or is not
        picked = torch.randint(len(large), theirs, generator=generator)
        yield "what cancels out", torch.ones(ours, dtype=torch.bfloat16), large[picked].bfloat16()
