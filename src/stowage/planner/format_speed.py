"""Which published formats this processor computes slower than bfloat16: measured, for one token.

Owns the measurement: products with a matrix that no cache holds, a few times, in this process. Formats without kernels
(another type than these compute in, or no compiled part) are slower by their nature, and are not measured.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Final

import torch

from stowage.executor import kernels
from stowage.weights.quantized.blocks import BlockMatrix
from stowage.weights.quantized.formats import Spec

__all__ = ["slower_than_plain", "speeds"]

_OUTPUTS, _INPUTS = 4096, 8192
_TIMES: Final = 5
_PLAIN: Final = ("f32", "f16", "bf16")
_LEAST: Final = 1.05
"""Noise is not told."""


def slower_than_plain(formats: Iterable[str], dtype: str, *, int8: bool = False) -> tuple[str, ...]:
    """A sentence for each of ``formats`` that is slower here than bfloat16, for a model that is run in ``dtype``;
    ``int8``: with activations in 8 bits where there are such products.
    """
    chosen = sorted({name for name in formats if name not in _PLAIN})
    if not chosen:
        return ()
    run = getattr(torch, dtype)
    if not kernels.wanted(torch.device("cpu"), run):
        why = f"in {dtype} there are none for them" if kernels.is_built() else "they are not built"
        return (f"{', '.join(chosen)}: unpacked without kernels at every step, much slower than bfloat16 ({why}).",)
    found = speeds(chosen, run, int8=int8)
    return tuple(
        f"{name} is computed at {1 / times:.2f} of the speed of bfloat16 on this processor, for one token from memory; "
        "it takes fewer bytes of memory and of a disk."
        for name, times in found.items()
        if times > _LEAST
    )


def speeds(formats: Iterable[str], dtype: torch.dtype, *, int8: bool = False) -> Mapping[str, float]:
    """How many times as long as in bfloat16 the product of one token with a matrix of each format takes."""
    x = torch.ones(1, _INPUTS, dtype=dtype)
    plain = torch.full((_OUTPUTS, _INPUTS), 0.5, dtype=torch.bfloat16).to(dtype)
    matrices = {name: _matrix(name, dtype) for name in formats}
    least = dict.fromkeys(("", *matrices), float("inf"))
    for _ in range(_TIMES):  # by turns: what else the machine does hits all of them
        least[""] = min(least[""], _seconds(partial(kernels.linear, x, plain)))
        for name, matrix in matrices.items():
            own = (kernels.int8_product(x, matrix) if int8 else None) or kernels.of_blocks(matrix)
            least[name] = min(least[name], _seconds(partial(kernels.linear_of, x, own)))
    return {name: least[name] / least[""] for name in matrices}


def _seconds(call: Callable[[], object]) -> float:
    began = time.perf_counter()
    call()
    return time.perf_counter() - began


def _matrix(name: str, dtype: torch.dtype) -> BlockMatrix:
    group = 128 if name in ("fp8", "int4", "gptq", "awq") else 0
    zeros = name in ("gptq", "awq")
    spec = Spec(name, _OUTPUTS, _INPUTS, group, 128 if name == "fp8" else 1, zeros, torch.bfloat16)
    parts = {
        part: torch.full((*shape[:-1], shape[-1] * kind.itemsize), 0x33, dtype=torch.uint8).view(kind)
        for part, (shape, kind) in spec.tensors().items()
    }
    return BlockMatrix(spec, parts, dtype)
