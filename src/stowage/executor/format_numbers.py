"""The numbers of quantization formats and of types of scales in the C kernels, which list them in the same order.

The lookup tables of i-quants are passed to the kernels when the first such format is used.
"""

from __future__ import annotations

import functools
from typing import Final

import torch

from stowage.native import extension
from stowage.weights.quantized.i_quants import I_QUANTS, table

_FORMATS: Final = (
    "",  # not quantized
    *"q8_0 q4_0 q4_1 q5_0 q5_1 iq4_nl mxfp4_block f32 f16 bf16 mxfp4 fp8 int4 gptq awq packed4 nvfp4 s8 u8".split(),
    *"q2_k q3_k q4_k q5_k q6_k iq4_xs iq2_xxs iq2_xs iq2_s iq3_xxs iq3_s iq1_s iq1_m tq1_0 tq2_0 q1_0".split(),
    "inputs_first",  # not quantized, input-major (transposed)
)
SCALES: Final = {torch.float32: 0, torch.float16: 1, torch.bfloat16: 2, torch.uint8: 3}
_GLOBAL: Final = {False: 4, True: 5}
"""Scales of float8_e4m3fn, which are multiplied by a global scale, or divided by it."""


def scales_kind(dtype: torch.dtype, divides: bool) -> int:
    """The number of scales of ``dtype``; ``divides``: see ``Spec``."""
    return _GLOBAL[divides] if dtype is torch.float8_e4m3fn else SCALES[dtype]


@functools.cache
def number_of(name: str) -> int:
    """The number of the format ``name``. ``packed4``: the 4 bits of `stowage pack`."""
    if name in I_QUANTS:
        extension.use_grids(table())
    return _FORMATS.index(name)
