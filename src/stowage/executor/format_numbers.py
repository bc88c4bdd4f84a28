"""The numbers of quantization formats in the C kernels, which list them in the same order.

The lookup tables of i-quants are passed to the kernels when the first such format is used.
"""

from __future__ import annotations

import functools
from typing import Final

from stowage.native import extension
from stowage.weights.quantized.i_quants import I_QUANTS, table

_FORMATS: Final = (
    "",  # not quantized
    *"q8_0 q4_0 q4_1 q5_0 q5_1 iq4_nl mxfp4_block f32 f16 bf16 mxfp4 fp8 int4 gptq awq packed4".split(),
    *"q2_k q3_k q4_k q5_k q6_k iq4_xs iq2_xxs iq2_xs iq2_s iq3_xxs iq3_s iq1_s iq1_m".split(),
    "inputs_first",  # not quantized, input-major (transposed)
)


@functools.cache
def number_of(name: str) -> int:
    """The number of the format ``name``. ``packed4``: the 4 bits of `stowage pack`."""
    if name in I_QUANTS:
        extension.use_grids(table())
    return _FORMATS.index(name)
