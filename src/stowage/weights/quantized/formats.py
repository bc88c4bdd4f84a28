"""Published block formats: the tensors that each keeps a matrix in, and what their bytes mean, exactly.

A matrix of ``outputs`` x ``inputs`` lies row by row; along a row, some values share a scale. GGUF keeps such a block's
scale and codes side by side, in one tensor of bytes; the others keep them in several tensors:

    GGUF                 ""        uint8 (outputs, bytes of a row)
    mxfp4 (gpt-oss)      blocks    uint8 (outputs, inputs / 32, 16)
                         scales    uint8 (outputs, inputs / 32)
    nvfp4                codes     uint8 (outputs, inputs / 2)
                         scales    float8_e4m3fn (outputs, inputs / 16)
                         globals   float32 (outputs / block_rows)
    fp8                  codes     float8_e4m3fn (outputs, inputs)
                         scales    (outputs / block_rows, inputs / group), uint8: powers of two
    s8, u8 (compressed-  codes     uint8 (outputs, inputs): s8 with a sign, u8 128 more
        tensors)         scales    as fp8
    int4 (compressed-    codes     int32 (outputs, inputs / 8)
        tensors)         scales    (outputs, inputs / group)
                         zeros     int32 (outputs / 8, inputs / group)
    gptq                 codes     int32 (inputs / 8, outputs)
                         scales    (inputs / group, outputs)
                         zeros     int32 (inputs / group, outputs / 8)
    awq                  codes     int32 (inputs, outputs / 8)
                         scales and zeros as gptq

``dequantized`` is the reference that kernels are held to: values in float32, each computed as ggml, Transformers and
compressed-tensors do; what is computed with in bfloat16 is those values rounded once to the nearest. What the blocks of
GGUF mean stands in ``ggml_blocks`` and ``i_quants``. A scale of NVFP4 is divided by the matrix's global one as
compressed-tensors writes it, and multiplied by it as NVIDIA's Model Optimizer does; that is rounded to float32, and so
is its product with what a code means.

Sources: OCP Microscaling Formats 1.0; Transformers' ``integrations/mxfp4.py`` and ``finegrained_fp8.py``;
compressed-tensors' ``pack_quantized``, ``naive_quantized``, ``mxfp4`` and ``nvfp4``; Model Optimizer's
``NVFP4QTensor``; AutoGPTQ; AutoAWQ.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Final, Protocol

import torch
from torch import Tensor

from stowage.errors import CheckpointError
from stowage.weights.quantized.ggml_blocks import IN_BLOCKS, fp4, power_of
from stowage.weights.quantized.i_quants import I_QUANTS

_SUPER: Final = 256
_AWQ_ORDER: Final = (0, 4, 1, 5, 2, 6, 3, 7)
"""Output 8 j + i of AWQ is in the nibble of this number, counted from the lowest bits."""
OUTPUTS_TOGETHER: Final = 128
"""A matrix can be cut at multiples of so many outputs, or of more where those that share a scale do not meet there."""
NVFP4_GROUP: Final = 16
MXFP4_GROUP: Final = 32
"""Inputs that share a scale."""
_GPTQ_LESS: Final = 0x11111111
"""What GPTQ's first format stores less than a word of eight zero points is."""


@dataclass(frozen=True, slots=True)
class BlockFormat:
    """A published block format: ``values`` of a row lie in ``nbytes`` of it. ``ggml``: the type's number in a GGUF
    file; -1 for those that none has, whose codes alone are counted.
    """

    name: str
    values: int
    nbytes: int
    ggml: int = -1

    def row_bytes(self, inputs: int) -> int:
        """Raises CheckpointError for a row that is no whole number of blocks."""
        if inputs % self.values:
            raise CheckpointError(
                f"a row of {inputs} values is no whole number of {self.name} blocks of {self.values}: the file is "
                "damaged, or was written by another program than it says; download it again."
            )
        return inputs // self.values * self.nbytes


FORMATS: Final[Mapping[str, BlockFormat]] = {
    each.name: each
    for each in (
        BlockFormat("f32", 1, 4, 0),
        BlockFormat("f16", 1, 2, 1),
        BlockFormat("q4_0", 32, 18, 2),
        BlockFormat("q4_1", 32, 20, 3),
        BlockFormat("q5_0", 32, 22, 6),
        BlockFormat("q5_1", 32, 24, 7),
        BlockFormat("q8_0", 32, 34, 8),
        BlockFormat("q2_k", _SUPER, 84, 10),
        BlockFormat("q3_k", _SUPER, 110, 11),
        BlockFormat("q4_k", _SUPER, 144, 12),
        BlockFormat("q5_k", _SUPER, 176, 13),
        BlockFormat("q6_k", _SUPER, 210, 14),
        BlockFormat("iq2_xxs", _SUPER, 66, 16),
        BlockFormat("iq2_xs", _SUPER, 74, 17),
        BlockFormat("iq3_xxs", _SUPER, 98, 18),
        BlockFormat("iq1_s", _SUPER, 50, 19),
        BlockFormat("iq4_nl", 32, 18, 20),
        BlockFormat("iq3_s", _SUPER, 110, 21),
        BlockFormat("iq2_s", _SUPER, 82, 22),
        BlockFormat("iq4_xs", _SUPER, 136, 23),
        BlockFormat("iq1_m", _SUPER, 56, 29),
        BlockFormat("bf16", 1, 2, 30),
        BlockFormat("tq1_0", _SUPER, 54, 34),
        BlockFormat("tq2_0", _SUPER, 66, 35),
        BlockFormat("mxfp4_block", 32, 17, 39),
        BlockFormat("q1_0", 128, 18, 41),
        BlockFormat("mxfp4", 32, 16),
        BlockFormat("nvfp4", 16, 8),
        BlockFormat("fp8", 1, 1),
        BlockFormat("s8", 1, 1),
        BlockFormat("u8", 1, 1),
        BlockFormat("int4", 8, 4),
        BlockFormat("gptq", 8, 4),
        BlockFormat("awq", 8, 4),
    )
}
PLAIN: Final[Mapping[str, torch.dtype]] = {"f32": torch.float32, "f16": torch.float16, "bf16": torch.bfloat16}
"""Those of single numbers."""
SINGLE_CODES: Final = {"fp8": torch.float8_e4m3fn, "s8": torch.uint8, "u8": torch.uint8}
"""Those of codes of a byte each, by rows, whose scales lie apart."""
BLOCKS: Final = tuple(name for name, each in FORMATS.items() if each.ggml >= 0)
"""Those of one tensor of bytes."""


@dataclass(frozen=True, slots=True)
class Spec:
    """A matrix ``[outputs, inputs]`` in the format called ``name``.

    A scale is shared by ``group`` inputs (fp8, s8, u8, int4, gptq, awq; 0: all of them) and ``block_rows`` outputs
    (fp8, s8, u8, and the global scales of nvfp4; 0: all of them). ``zeros``: whether there are zero points (int4; gptq
    and awq always have them). ``scale_dtype``: of the scales, where formats differ. ``divides``: whether nvfp4's global
    scales are divisors.
    """

    name: str
    outputs: int
    inputs: int
    group: int = 0
    block_rows: int = 1
    zeros: bool = False
    scale_dtype: torch.dtype = torch.float32
    divides: bool = False

    @property
    def format(self) -> BlockFormat:
        return FORMATS[self.name]

    @property
    def group_size(self) -> int:
        """Inputs that share a scale, at least 1."""
        return self.group or self.inputs

    def meets_at(self, inputs: int) -> bool:
        """Whether scales are for multiples of so many ``inputs``, or for all of them; of nvfp4 two are for 32.
        Kernels read blocks of q1_0 in pairs.
        """
        if self.name == "q1_0":
            return self.inputs % _SUPER == 0
        if self.name == "nvfp4":
            return self.inputs % inputs == 0
        return self.group_size % inputs == 0 or self.group_size == self.inputs

    @property
    def rows_per_scale(self) -> int:
        """Outputs that share a scale, at least 1."""
        return self.block_rows or self.outputs

    def tensors(self) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
        """Shape and type of each tensor, by its part; see the module. Raises CheckpointError for impossible sizes."""
        row, n, k = self.format.row_bytes(self.inputs), self.outputs, self.inputs
        if self.name in BLOCKS:
            return {"": ((n, row), torch.uint8)}
        if self.name == "mxfp4":
            groups = k // MXFP4_GROUP
            return {"blocks": ((n, groups, 16), torch.uint8), "scales": ((n, groups), torch.uint8)}
        groups, tall = -(-k // self.group_size), -(-n // self.rows_per_scale)
        if self.name == "nvfp4":
            sixteens = ((n, k // NVFP4_GROUP), torch.float8_e4m3fn)
            return {"codes": ((n, row), torch.uint8), "scales": sixteens, "globals": ((tall,), torch.float32)}
        if (single := SINGLE_CODES.get(self.name)) is not None:
            return {"codes": ((n, k), single), "scales": ((tall, groups), self.scale_dtype)}
        self._check_groups()
        parts: dict[str, tuple[tuple[int, ...], torch.dtype]]
        if self.name == "int4":
            parts = {"codes": ((n, k // 8), torch.int32), "scales": ((n, groups), self.scale_dtype)}
            return parts | ({"zeros": ((-(-n // 8), groups), torch.int32)} if self.zeros else {})
        codes = (k // 8, n) if self.name == "gptq" else (k, n // 8)
        parts = {"codes": (codes, torch.int32), "scales": ((groups, n), self.scale_dtype)}
        return parts | {"zeros": ((groups, n // 8), torch.int32)}

    def _check_groups(self) -> None:
        if self.group_size % 32 or self.inputs % self.group_size or (self.name != "int4" and self.outputs % 8):
            raise CheckpointError(
                f"a matrix of {self.outputs} x {self.inputs} in {self.name} with groups of {self.group_size} is not "
                "read: groups are whole, of a multiple of 32 inputs, and outputs a multiple of 8. Take the original "
                "checkpoint, or one with groups of 32, 64 or 128."
            )

    @property
    def nbytes(self) -> int:
        """Of all its tensors."""
        total = 0
        for shape, dtype in self.tensors().values():
            count = dtype.itemsize
            for size in shape:
                count *= size
            total += count
        return total


class Unpacker(Protocol):
    """Does what ``dequantized_by_torch`` does, to the bit, on devices of its own."""

    def takes(self, spec: Spec, parts: Mapping[str, Tensor], dtype: torch.dtype) -> bool:
        """Whether it can do it."""

    def __call__(self, spec: Spec, parts: Mapping[str, Tensor], dtype: torch.dtype) -> Tensor:
        """The values (outputs, inputs)."""


_unpackers: Final[dict[str, Unpacker]] = {}


def unpack_with(device_type: str, unpacker: Unpacker) -> None:
    """Let ``unpacker`` unpack what lies on devices of that type."""
    _unpackers[device_type] = unpacker


def unpacks_at_once(spec: Spec, parts: Mapping[str, Tensor], dtype: torch.dtype) -> bool:
    """Whether these become numbers with no memory but for the numbers."""
    unpacker = _unpackers.get(next(iter(parts.values())).device.type)
    return unpacker is not None and unpacker.takes(spec, parts, dtype)


def dequantized(spec: Spec, parts: Mapping[str, Tensor], dtype: torch.dtype = torch.float32) -> Tensor:
    """The matrix (outputs, inputs) that ``parts``, of the shapes of ``spec.tensors()``, mean: computed in float32, and
    rounded to ``dtype`` at the end.
    """
    if unpacks_at_once(spec, parts, dtype):
        return _unpackers[next(iter(parts.values())).device.type](spec, parts, dtype)
    return dequantized_by_torch(spec, parts, dtype)


def dequantized_by_torch(spec: Spec, parts: Mapping[str, Tensor], dtype: torch.dtype = torch.float32) -> Tensor:
    """See ``dequantized``: the reference."""
    whole = _MEANINGS[spec.name](spec, parts) if spec.name not in BLOCKS else _of_blocks(spec, parts[""])
    return whole.reshape(spec.outputs, spec.inputs).to(dtype).contiguous()


def outputs_of(spec: Spec, parts: Mapping[str, Tensor], begin: int, end: int) -> tuple[Spec, dict[str, Tensor]]:
    """Outputs from ``begin``, a multiple of ``outputs_together``, to ``end``, or all, as a matrix of their own."""
    cut = {part: values[begin:end] for part, values in parts.items()}
    shared = "globals" if spec.name == "nvfp4" else "scales" if spec.name in SINGLE_CODES else None
    if shared is not None:
        tall = spec.block_rows
        assert tall == 0 or begin % tall == 0, "outputs with one scale stay together"
        cut[shared] = parts[shared][begin // tall : -(-end // tall)] if tall else parts[shared]
    elif spec.name in ("gptq", "awq"):
        eighth = slice(begin // 8, -(-end // 8))
        cut = {part: values[:, begin:end] for part, values in parts.items()}
        cut["zeros"] = parts["zeros"][:, eighth]
        if spec.name == "awq":
            cut["codes"] = parts["codes"][:, eighth]
    elif spec.zeros:
        cut["zeros"] = parts["zeros"][begin // 8 : -(-end // 8)]
    return replace(spec, outputs=min(end, spec.outputs) - begin), cut


def outputs_together(spec: Spec) -> int:
    """A matrix can be cut at multiples of so many outputs."""
    return -(-OUTPUTS_TOGETHER // max(1, spec.block_rows)) * max(1, spec.block_rows)


def first_outputs(spec: Spec, parts: Mapping[str, Tensor]) -> tuple[Spec, dict[str, Tensor]]:
    """As few as can be cut off."""
    return outputs_of(spec, parts, 0, min(spec.outputs, outputs_together(spec)))


def _of_blocks(spec: Spec, raw: Tensor) -> Tensor:
    if spec.name in PLAIN:
        return raw.contiguous().view(PLAIN[spec.name]).float()
    means = I_QUANTS.get(spec.name) or IN_BLOCKS[spec.name]
    return means(raw.reshape(-1, spec.format.nbytes))


def _pairs(spec: Spec, blocks: Tensor, group: int) -> Tensor:
    """What FP4's codes mean (outputs, groups, ``group``), of which a byte's low half is the first."""
    codes = torch.stack([blocks & 15, blocks >> 4], dim=-1)
    return fp4(codes.reshape(spec.outputs, -1, group))


def _mxfp4(spec: Spec, parts: Mapping[str, Tensor]) -> Tensor:
    scales = power_of(parts["scales"].reshape(spec.outputs, -1))
    return _pairs(spec, parts["blocks"], MXFP4_GROUP) * scales[..., None]


def _nvfp4(spec: Spec, parts: Mapping[str, Tensor]) -> Tensor:
    scales = parts["scales"].float()
    own = parts["globals"].repeat_interleave(spec.rows_per_scale)[: spec.outputs, None]
    scales = scales / own if spec.divides else scales * own
    return _pairs(spec, parts["codes"], NVFP4_GROUP) * scales[..., None]


def _single_codes(spec: Spec, parts: Mapping[str, Tensor]) -> Tensor:
    given = parts["scales"]
    scales = (power_of(given) if given.dtype is torch.uint8 else given.float()).reshape(
        -(-spec.outputs // spec.rows_per_scale), -1
    )
    rows = scales.repeat_interleave(spec.rows_per_scale, dim=0)[: spec.outputs]
    codes = parts["codes"].view(torch.int8) if spec.name == "s8" else parts["codes"]
    values = codes.float() - 128 if spec.name == "u8" else codes.float()
    return values * rows.repeat_interleave(spec.group_size, dim=1)[:, : spec.inputs]


def _nibbles(words: Tensor, dim: int, order: tuple[int, ...] = tuple(range(8))) -> Tensor:
    """Codes 0 to 15 in int32 words, eight along ``dim`` in the place of each; ``order``: which nibble is the next."""
    shifts = torch.tensor([4 * nibble for nibble in order], dtype=torch.int32, device=words.device)
    return (words.movedim(dim, -1)[..., None] >> shifts & 15).flatten(-2).movedim(-1, dim)


def _int4(spec: Spec, parts: Mapping[str, Tensor]) -> Tensor:
    codes = _nibbles(parts["codes"], 1).float().view(spec.outputs, -1, spec.group_size)
    zeros: Tensor | float = 8.0
    if spec.zeros:
        zeros = _nibbles(parts["zeros"], 0)[: spec.outputs].float()[..., None]
    return (codes - zeros) * parts["scales"].float()[..., None]


def _gptq(spec: Spec, parts: Mapping[str, Tensor]) -> Tensor:
    """Zero points are one less than what they mean, as AutoGPTQ's first format has it. One was taken of a word's
    eight at once, so that a zero point of 0 borrowed from the next; adding them at once gives it back.
    """
    return _by_inputs(spec, parts, _nibbles(parts["codes"], 0), _nibbles(parts["zeros"] + _GPTQ_LESS, 1))


def gptq_first(zeros: Tensor) -> Tensor:
    """Words of zero points of GPTQ's second format, int32, as the first stores them."""
    return zeros - _GPTQ_LESS


def _awq(spec: Spec, parts: Mapping[str, Tensor]) -> Tensor:
    codes, zeros = (_nibbles(parts[part], 1, _AWQ_ORDER) for part in ("codes", "zeros"))
    return _by_inputs(spec, parts, codes, zeros)


def zeros_by_outputs(spec: Spec, zeros: Tensor) -> Tensor:
    """Words of zero points of gptq or awq (groups, outputs / 8) as int4 has them (outputs / 8, groups)."""
    if spec.name == "gptq":
        return (zeros + _GPTQ_LESS).t().contiguous()
    codes = _nibbles(zeros, 1, _AWQ_ORDER).view(*zeros.shape, 8)
    shifts = torch.arange(0, 32, 4, dtype=torch.int32)
    return (codes << shifts).sum(-1, dtype=torch.int32).t().contiguous()


def _by_inputs(spec: Spec, parts: Mapping[str, Tensor], codes: Tensor, zeros: Tensor) -> Tensor:
    grouped = codes.float().view(-1, spec.group_size, spec.outputs)
    return ((grouped - zeros.float()[:, None]) * parts["scales"].float()[:, None]).reshape(-1, spec.outputs).t()


_MEANINGS: Final[Mapping[str, Callable[[Spec, Mapping[str, Tensor]], Tensor]]] = {
    "mxfp4": _mxfp4,
    "nvfp4": _nvfp4,
    "fp8": _single_codes,
    "s8": _single_codes,
    "u8": _single_codes,
    "int4": _int4,
    "gptq": _gptq,
    "awq": _awq,
}
