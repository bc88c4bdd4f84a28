"""The matrices of a quantised checkpoint: which tensors of its files are one, and in which format.

Owns the names that tools give the tensors of a matrix. Each is held to the shape and the type that its format has, so
what is computed with later lies in the files to the last byte. Layouts: see ``weights.quantized.formats``.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import Final

import torch
from torch import Tensor

from stowage.errors import CheckpointError, UnsupportedModelError
from stowage.models.published.method import Method
from stowage.weights.checkpoint import Stored
from stowage.weights.quantized.formats import PLAIN, Spec, dequantized, gptq_first

_PLAIN: Final = {dtype: name for name, dtype in PLAIN.items()}
_CODES: Final = re.compile(r"(.+)\.(?:weight_packed|qweight)")
_BESIDE: Final = re.compile(
    r".+\.(?:(?:weight|input|output|q|k|v)_scale(?:_inv|_2)?|weight_(?:zero_point|shape|g_idx|global_scale)"
    r"|input_zero_point|input_global_scale|qzeros|scales|g_idx|activation_scale)"
)
_EIGHTS: Final = 0x88888888 - (1 << 32)
"""Eight zero points of 8 in a word."""
_NO_ORDER: Final = -1
"""In an order that compressed-tensors has made and never filled: inputs are in groups as they lie (its
``forward_helpers.py``).
"""
_SMOOTHED: Final = ("pre_quant_scale", "svdquant_lora_a")
"""What Model Optimizer writes beside weights that mean nothing without it."""
_ZERO: Final = "weight_zero_point"
_GLOBAL: Final = "weight_global_scale"
_STACKED: Final = re.compile(r"(.+)_(?:blocks|scales)")


def base_of(name: str) -> str | None:
    """Which parameter the tensor called ``name`` is, or is the codes of, before anything is renamed; ``None`` for what
    belongs to another: scales, zero points, sizes.
    """
    if (codes := _CODES.fullmatch(name)) is not None:
        return f"{codes[1]}.weight"
    if (stack := _STACKED.fullmatch(name)) is not None and "experts" in name:
        return stack[1] if name.endswith("_blocks") else None
    return None if _BESIDE.fullmatch(name) else name


@dataclass(frozen=True, slots=True)
class Matrix:
    """One matrix in the files: its tensors by part, and its format; none of plain numbers of the type that is run.
    ``second``: its zero points are those of GPTQ's second format.
    """

    parts: Mapping[str, Stored]
    spec: Spec | None = None
    second: bool = False

    def numbers(self, dtype: torch.dtype) -> Tensor:
        """Its values, read. Raises CheckpointError."""
        if self.spec is None:
            return self.parts[""].read().to(dtype)
        own = {part: kind for part, (_, kind) in self.spec.tensors().items()}
        shapes = {part: shape for part, (shape, _) in self.spec.tensors().items()}
        read = {part: stored.read().view(own[part]).view(shapes[part]) for part, stored in self.parts.items()}
        if self.second:
            read["zeros"] = gptq_first(read["zeros"])
        return dequantized(self.spec, read, dtype)


@dataclass(frozen=True, slots=True)
class Matrices:
    """The quantised matrices of a checkpoint. Those of the files in which ``stored`` lies, for a model that is run in
    ``dtype``. ``second``: in GPTQ's second format.
    """

    stored: Mapping[str, Stored]
    method: Method
    dtype: torch.dtype
    second: bool = False

    def get(self, name: str) -> Stored:
        """Raises CheckpointError where it is missing."""
        found = self.stored.get(name)
        if found is None:
            raise CheckpointError(
                f"the checkpoint is incomplete: it has no {name}, which its model needs. Download it again."
            )
        return found

    def of(self, name: str, shape: tuple[int, ...]) -> Matrix:
        """The matrix (outputs, inputs) whose weight would be called ``name``.

        Raises CheckpointError for what is missing or does not fit, UnsupportedModelError for what is not read.
        """
        base = name.removesuffix(".weight")
        if f"{base}.weight_packed" in self.stored:
            found = self._compressed(base, shape)
        elif f"{base}.qweight" in self.stored:
            found = self._by_words(base, shape)
        elif self.get(name).dtype is torch.uint8 and f"{name}_scale_2" in self.stored:
            found = self._nvfp4(base, name, shape, "weight_scale_2")
        elif self.get(name).dtype is torch.float8_e4m3fn:
            found = self._fp8(base, name, shape)
        elif self.get(name).dtype is torch.int8:
            found = self._whole("s8", base, self.get(name), shape)
        else:
            found = self._numbers(name)
        self._check(name, found, shape)
        return found

    def is_stacked(self, name: str) -> bool:
        """Whether all experts' matrices lie under ``name``, quantised."""
        stored = self.stored.get(name)
        codes = stored is not None and len(stored.shape) == 3 and stored.dtype is torch.float8_e4m3fn
        return f"{name}_blocks" in self.stored or (codes and self._scales(name) is not None)

    def stacked(self, name: str, shape: tuple[int, ...]) -> Matrix:
        """All experts' matrices (experts, outputs, inputs) of MXFP4 or FP8, whose parts have experts in front."""
        if (scales := self._scales(name)) is not None:
            return self._stacked_fp8(name, scales, shape)
        spec = Spec("mxfp4", shape[1], shape[2])
        found = Matrix({part: self.get(f"{name}_{part}") for part in ("blocks", "scales")}, spec)
        for part, (own, dtype) in spec.tensors().items():
            stored = found.parts[part]
            if prod(stored.shape) != shape[0] * prod(own) or stored.dtype is not dtype or stored.shape[0] != shape[0]:
                raise unexpected_tensor(f"{name}_{part}", stored, (shape[0], *own))
        return found

    def _stacked_fp8(self, name: str, scales: Stored, shape: tuple[int, ...]) -> Matrix:
        """Gates and what they gate, one below the other, have two scales at least, as Transformers writes them."""
        experts, outputs, inputs = shape
        block_rows, group = self._shared(scales.shape[1:], outputs)
        if scales.shape[1:2] == (2,) and outputs % 2 == 0 and not block_rows < outputs <= 2 * block_rows:
            block_rows = outputs // 2
        spec = Spec("fp8", outputs, inputs, group, block_rows, scale_dtype=scales.dtype)
        found = Matrix({"codes": self.get(name), "scales": scales}, spec)
        for part, (own, dtype) in spec.tensors().items():
            stored = found.parts[part]
            sizes = [[size for size in shape if size != 1] for shape in (stored.shape[1:], own)]
            if stored.shape[:1] != (experts,) or sizes[0] != sizes[1] or stored.dtype is not dtype:
                raise unexpected_tensor(name, stored, (experts, *own))
        return found

    def _scales(self, name: str) -> Stored | None:
        """Those of the codes of FP8 called ``name``."""
        return self.stored.get(f"{name}_scale_inv") or self.stored.get(f"{name}_scale")

    def _shared(self, shape: Sequence[int], outputs: int) -> tuple[int, int]:
        """Outputs and inputs that share one of so many scales."""
        rows, columns = (*shape, 1, 1)[:2]
        return {1: 0, outputs: 1}.get(rows, self.method.block[0]), {1: 0}.get(columns, self.method.block[1])

    def _numbers(self, name: str) -> Matrix:
        plain = self.get(name)
        if plain.dtype is self.dtype:
            return Matrix({"": plain})
        if plain.dtype not in _PLAIN or len(plain.shape) != 2:
            raise UnsupportedModelError(f"{name} is of the type {plain.dtype}, which is not computed with here.")
        return Matrix({"": plain}, Spec(_PLAIN[plain.dtype], plain.shape[0], plain.shape[1]))

    def _fp8(self, base: str, name: str, shape: tuple[int, ...]) -> Matrix:
        codes = self.get(name)
        scales = self._scales(f"{base}.weight")
        if scales is None:
            raise CheckpointError(f"the checkpoint is incomplete: {name} has no scales. Download it again.")
        block_rows, group = self._shared(scales.shape, shape[0])
        return Matrix(
            {"codes": codes, "scales": scales},
            Spec("fp8", shape[0], shape[1], group, block_rows, scale_dtype=scales.dtype),
        )

    def _compressed(self, base: str, shape: tuple[int, ...]) -> Matrix:
        codes, scales = self.get(f"{base}.weight_packed"), self.get(f"{base}.weight_scale")
        zeros = self.stored.get(f"{base}.{_ZERO}")
        if zeros is not None and zeros.dtype is torch.int8:
            raise UnsupportedModelError(
                f"{base} has zero points that are not packed as its weights are (int8), which is not read. Give "
                "another checkpoint of the model."
            )
        if codes.dtype is torch.uint8:
            powers = scales.dtype is torch.uint8
            return self._mxfp4(base, codes, scales, shape) if powers else self._nvfp4(base, codes.name, shape, _GLOBAL)
        if zeros is None and self.method.has_zeros:
            self.get(f"{base}.{_ZERO}")
        if codes.dtype is torch.int32 and codes.shape == (shape[0], shape[1] // 4):  # 4 codes of 8 bits in a word
            return self._whole("u8", base, replace(codes, shape=shape), shape)
        group = self._group(base, scales, shape[1], scales.shape[-1] if scales.shape else 0)
        self._refuse_order(f"{base}.weight_g_idx", shape[1], group)
        spec = Spec("int4", shape[0], shape[1], group, zeros=zeros is not None, scale_dtype=scales.dtype)
        return Matrix({"codes": codes, "scales": scales} | ({} if zeros is None else {"zeros": zeros}), spec)

    def _whole(self, name: str, base: str, codes: Stored, shape: tuple[int, ...]) -> Matrix:
        """Of compressed-tensors, in a byte each: s8 or u8. Older files have zero points that are all 0."""
        scales, zeros = self.get(f"{base}.weight_scale"), self.stored.get(f"{base}.{_ZERO}")
        if zeros is not None and bool(zeros.read().any()):
            raise UnsupportedModelError(
                f"{base} has zero points beside whole numbers in bytes, which is not read. Give another checkpoint of "
                "the model."
            )
        count = scales.shape[1] if len(scales.shape) == 2 else 1
        group = self._group(base, scales, shape[1], count) if count > 1 else 0
        self._refuse_order(f"{base}.weight_g_idx", shape[1], group or shape[1], in_bytes=True)
        rows = self._shared(scales.shape, shape[0])[0]
        spec = Spec(name, shape[0], shape[1], group, rows, scale_dtype=scales.dtype)
        return Matrix({"codes": replace(codes, dtype=torch.uint8), "scales": scales}, spec)

    def _mxfp4(self, base: str, codes: Stored, scales: Stored, shape: tuple[int, ...]) -> Matrix:
        """Of compressed-tensors, whose bytes lie as gpt-oss has them."""
        self._refuse_beside("MXFP4", base, (_ZERO, _GLOBAL))
        spec = Spec("mxfp4", shape[0], shape[1])
        if codes.shape == (shape[0], shape[1] // 2):
            codes = replace(codes, shape=spec.tensors()["blocks"][0])
        return Matrix({"blocks": codes, "scales": scales}, spec)

    def _refuse_beside(self, what: str, base: str, names: Sequence[str]) -> None:
        odd_ones = [name for name in names if f"{base}.{name}" in self.stored]
        if odd_ones:
            raise UnsupportedModelError(
                f"{base} is quantised to {what} with a {odd_ones[0]}, which is not computed with here. Give another "
                "checkpoint of the model."
            )

    def _nvfp4(self, base: str, codes: str, shape: tuple[int, ...], own: str) -> Matrix:
        """``own``: the global scale as it is called, which is a divisor where compressed-tensors wrote it."""
        self._refuse_beside("NVFP4", base, (*_SMOOTHED, _ZERO))
        names = {"codes": codes, "scales": f"{base}.weight_scale", "globals": f"{base}.{own}"}
        spec = Spec("nvfp4", shape[0], shape[1], block_rows=0, divides=own == _GLOBAL)
        return Matrix({part: self.get(name) for part, name in names.items()}, spec)

    def _by_words(self, base: str, shape: tuple[int, ...]) -> Matrix:
        """GPTQ's and AWQ's."""
        scales = self.get(f"{base}.scales")
        group = self._group(base, scales, shape[1], scales.shape[0] if scales.shape else 0)
        self._refuse_order(f"{base}.g_idx", shape[1], group)
        spec = Spec(self.method.name, shape[0], shape[1], group, zeros=True, scale_dtype=scales.dtype)
        names = {"codes": f"{base}.qweight", "scales": f"{base}.scales", "zeros": f"{base}.qzeros"}
        found = Matrix({part: self.get(name) for part, name in names.items()}, spec, self.second)
        if not self.method.second and self.shows_second(found.parts["zeros"]) is not self.second:
            raise UnsupportedModelError(
                f"{base} stores zero points in another format of gptq than others do (8 in the second is 7 in the "
                "first): which weights are meant is not known. Give another checkpoint of the model."
            )
        return found

    def shows_second(self, zeros: Stored) -> bool:
        """Whether these are of GPTQ's second format, whatever the config calls it: without asymmetry they are 8, which
        the first stores as 7. A row is looked at.
        """
        row = 4 * zeros.shape[-1] if len(zeros.shape) == 2 and zeros.dtype is torch.int32 and all(zeros.shape) else 0
        if not row or self.method.name != "gptq" or self.method.stated.get("sym", True) is False:
            return False
        return bool(
            replace(zeros, shape=zeros.shape[1:], span=replace(zeros.span, length=row)).read().eq(_EIGHTS).all()
        )

    def _group(self, base: str, scales: Stored, inputs: int, count: int) -> int:
        """Inputs that share a scale, of which there are ``count`` in a row."""
        if len(scales.shape) != 2 or not count or inputs % count:
            raise CheckpointError(
                f"{base} has scales of the shape {scales.shape} for {inputs} inputs, which fit into no groups. "
                "Download the checkpoint again."
            )
        group, sizes = inputs // count, self.method.groups
        cut = next((size for size in sizes if -(-inputs // size) == count > 1), 0)
        if cut and group not in sizes:
            raise UnsupportedModelError(
                f"{base} has {inputs} inputs in groups of {cut}, the last of which is cut, which is not read. Give "
                "another checkpoint of the model."
            )
        return group

    def _refuse_order(self, name: str, inputs: int, group: int, *, in_bytes: bool = False) -> None:
        ordered = group < inputs and self.method.is_ordered(in_bytes=in_bytes)
        order = self.get(name) if ordered else self.stored.get(name)
        if order is None or order.shape == (0,):
            return
        stored = order.read().long()
        if name.endswith(".weight_g_idx") and order.shape == (inputs,) and bool((stored == _NO_ORDER).any()):
            return
        if order.shape != (inputs,) or not torch.equal(stored, torch.arange(inputs) // group):
            raise UnsupportedModelError(
                f"{name} puts inputs into groups in another order than they lie in (act-order, desc_act), which would "
                "need every input moved at every step. Give a checkpoint that was quantised without it."
            )

    def _check(self, name: str, found: Matrix, shape: tuple[int, ...]) -> None:
        if found.spec is None:
            if found.parts[""].shape != shape:
                raise unexpected_tensor(name, found.parts[""], shape)
            return
        if (found.spec.outputs, found.spec.inputs) != shape:
            raise unexpected_tensor(name, found.parts[""], shape)
        if found.spec.name in _PLAIN.values():
            return
        for part, (own, dtype) in found.spec.tensors().items():
            stored = found.parts[part]
            shapes = [[size for size in shape if size != 1] for shape in (stored.shape, own)]  # (n,) or (n, 1)
            if shapes[0] != shapes[1] or stored.dtype is not dtype:
                raise unexpected_tensor(name, stored, own)


def unexpected_tensor(name: str, found: Stored, shape: Sequence[int]) -> CheckpointError:
    """What is said of a tensor of another shape or type."""
    kind = str(found.dtype).removeprefix("torch.")
    return CheckpointError(
        f"{found.name} in {found.span.path} is {found.shape} of {kind}, and as a part of {name} it would be "
        f"{tuple(shape)}: config.json and the files are of different checkpoints, or of a format that is not read. "
        "Download both again."
    )
