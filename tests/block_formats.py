"""Matrices in every published block format, of random bytes that mean numbers."""

from __future__ import annotations

import torch
from torch import Tensor

from stowage.weights.quantized.formats import BLOCKS, Spec


def raw_bytes(*shape: int, seed: int = 0) -> Tensor:
    return torch.randint(0, 256, shape, dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))


def parts_of(spec: Spec, seed: int = 0) -> dict[str, Tensor]:
    """Bytes at random that mean numbers."""
    parts = {}
    for number, (part, (shape, dtype)) in enumerate(spec.tensors().items()):
        if dtype.is_floating_point and dtype.itemsize > 1:
            parts[part] = torch.rand(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)
            continue
        raw = raw_bytes(*shape[:-1], shape[-1] * dtype.itemsize, seed=seed + number)
        raw = raw % 112 if dtype is torch.float8_e4m3fn else raw % 16 + 115 if part == "scales" else raw
        parts[part] = raw.view(dtype)
    if "" in parts:  # scales of a block, wherever they lie, are then no infinities
        parts[""] &= 0xBB
    return parts


SPECS = [
    *(Spec(name, 300, 512) for name in BLOCKS),
    Spec("mxfp4", 300, 512),
    *(Spec("fp8", 300, 512, group, tall) for group, tall in ((128, 128), (0, 1), (0, 0))),
    *(Spec("int4", 304, 512, 64, zeros=zeros, scale_dtype=torch.bfloat16) for zeros in (False, True)),
    Spec("int4", 304, 512, 128, zeros=True, scale_dtype=torch.float16),
    *(Spec(name, 304, 512, group, scale_dtype=torch.float16) for name in ("gptq", "awq") for group in (32, 128)),
]
