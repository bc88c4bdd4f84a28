"""Matrices in every published block format, of random bytes that mean numbers."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from stowage.weights.quantized.formats import BLOCKS, PLAIN, Spec


def q1_0(raw: NDArray[np.uint8]) -> NDArray[np.float32]:
    """The values of rows of it, as ggml's ``dequantize_row_q1_0`` has them: the package gguf knows only its size."""
    blocks = raw.reshape(-1, 18)
    halves = blocks[:, :2].copy().view(np.float16).astype(np.float32)
    signs = np.unpackbits(blocks[:, 2:], axis=1, bitorder="little")
    return np.where(signs, halves, -halves).reshape(*raw.shape[:-1], -1)


def raw_bytes(*shape: int, seed: int = 0) -> Tensor:
    return torch.randint(0, 256, shape, dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))


def shapes_of(spec: Spec) -> list[Spec]:
    """The format with matrices of other sizes: no multiple of anything that its blocks allow."""
    by_inputs = spec.name in ("gptq", "awq")
    sizes = [(40, 512), (8, 4096 + 512)] if by_inputs else [(37, 256), (5, 4096 + 512), (301, 768)]
    if spec.format.values <= 32 and (spec.group or 32) < 128:  # no multiple of 128 inputs
        sizes.append((24 if by_inputs else 7, 4096 + 576))
    return [replace(spec, outputs=n, inputs=k) for n, k in sizes]


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
    if "" in parts:
        tame(spec.name, parts[""].view(-1, spec.format.nbytes))
    return parts


HALVES = {
    "q4_1": (0, 2),
    "q5_1": (0, 2),
    "q4_k": (0, 2),
    "q5_k": (0, 2),
    "q2_k": (80, 82),
    "q3_k": (108,),
    "q6_k": (208,),
    "tq1_0": (52,),
    "tq2_0": (64,),
}
"""Where the scales of a block are, in formats that do not begin with one."""


def tame(name: str, blocks: Tensor) -> None:
    """Make scales of ``blocks`` (blocks, bytes) no infinities."""
    if name in PLAIN:
        blocks &= 0xBB
    elif name == "iq1_m":  # in four parts of four bits
        blocks[:, 49::2] &= 0xBF
    else:
        for at in HALVES.get(name, (0,)):
            blocks[:, at if name == "mxfp4_block" else at + 1] &= 0xBB


def scale(name: str, blocks: Tensor, value: float) -> None:
    """Give ``blocks`` of halves and codes this scale, and this least value where they have one."""
    low, high = torch.tensor([value], dtype=torch.float16).view(torch.uint8).tolist()
    if name == "iq1_m":
        for at, part in enumerate((low & 15, low >> 4, high & 15, high >> 4)):
            blocks[:, 49 + 2 * at] = (blocks[:, 49 + 2 * at] & 15) | part << 4
    else:
        for at in HALVES.get(name, (0,)):
            blocks[:, at : at + 2] = torch.tensor([low, high], dtype=torch.uint8)


SPECS = [
    *(Spec(name, 300, 512) for name in BLOCKS),
    Spec("mxfp4", 300, 512),
    *(Spec("nvfp4", 300, 512, block_rows=rows, divides=not rows) for rows in (0, 64)),
    *(Spec("fp8", 300, 512, group, block_rows) for group, block_rows in ((128, 128), (0, 1), (0, 0))),
    *(Spec("s8", 300, 512, group, rows, scale_dtype=torch.bfloat16) for group, rows in ((0, 1), (32, 1), (0, 0))),
    *(Spec("u8", 300, 512, group, scale_dtype=dtype) for group, dtype in ((0, torch.bfloat16), (128, torch.float32))),
    *(Spec("int4", 304, 512, 64, zeros=zeros, scale_dtype=torch.bfloat16) for zeros in (False, True)),
    Spec("int4", 304, 512, 128, zeros=True, scale_dtype=torch.float16),
    *(Spec(name, 304, 512, group, scale_dtype=torch.float16) for name in ("gptq", "awq") for group in (32, 128)),
]
