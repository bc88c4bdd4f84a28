"""What the kernels call the formats of ``weights.quantized.formats``, which have the same order there.

They are told what i-quants look up before they see the first of these: nothing is imported for other models.
"""

from __future__ import annotations

import functools
from typing import Final

from stowage.native import extension
from stowage.weights.quantized.i_quants import I_QUANTS, table

__all__ = ["number_of"]

_FORMATS: Final = (
    "",  # plain numbers
    *"q8_0 q4_0 q4_1 q5_0 q5_1 iq4_nl mxfp4_block f32 f16 bf16 mxfp4 fp8 int4 gptq awq packed4".split(),
    *"q2_k q3_k q4_k q5_k q6_k iq4_xs iq2_xxs iq2_xs iq2_s iq3_xxs iq3_s iq1_s iq1_m".split(),
    "inputs_first",  # plain numbers too
)


@functools.cache
def number_of(name: str) -> int:
    """Of the format ``name``. ``packed4``: 4 bits that `stowage pack` writes."""
    if name in I_QUANTS:
        extension.use_grids(table())
    return _FORMATS.index(name)
