"""Matrices in the format in which they were published, and the modules that compute with quantized matrices.

Instead of its weight, a linear layer has one parameter for each tensor of its format (``q4_k``; ``mxfp4_blocks`` and
``mxfp4_scales``; ``fp8_codes``; our own ``int8`` ...); stacked experts have the same with a first dimension of experts.
The bytes are those of the checkpoint. ``executor.kernels`` multiplies with them directly; without kernels, torch
multiplies after some outputs at a time were dequantized.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Final

import torch
from torch import Tensor, nn

from stowage.weights.quantized.codes import TILE_ELEMENTS, Form, PackedMatrix
from stowage.weights.quantized.formats import Spec, dequantized, outputs_of, outputs_together, unpacks_at_once

Packing = Spec | Form
"""How a matrix is packed: in a published format, or in a form of ours."""
_TILE_ELEMENTS_AT_ONCE: Final = 1 << 26
"""Where dequantizing needs no memory besides its result: 128 MiB of bfloat16, so that all but some output layers are
one product, with the same bits as a plain layer. 2^24 were no quicker on an H100."""
_UNPACKING_BYTES: Final = 16
"""Memory for each number that is dequantized at a time: codes as integers, values in float32, the result."""


def parameter_names(spec: Packing, own: str = "", pieces: int = 1) -> dict[str, str]:
    """The parameter's name for each part of ``spec``: behind ``own``, the name of a stack of experts, or without it in
    a linear layer. With several ``pieces``, for each part of each piece.
    """
    if pieces > 1:
        each = (parameter_names(spec, f"{own}_{number}") for number in range(pieces))
        return {f"{number}.{part}": name for number, names in enumerate(each) for part, name in names.items()}
    before = f"{own}_" if own else ""
    return {part: f"{before}{spec.name}_{part}".removesuffix("_") for part in spec.tensors()}


class BlockMatrix(PackedMatrix):
    """A weight (outputs, inputs) as ``parts``, the tensors of ``spec``. ``transposed``: (inputs, outputs) instead."""

    __slots__ = ("parts", "spec")

    def __init__(
        self, spec: Spec, parts: Mapping[str, Tensor], values_dtype: torch.dtype, transposed: bool = False
    ) -> None:
        self.spec, self.parts, self.values_dtype, self.transposed = spec, parts, values_dtype, transposed

    @property
    def shape(self) -> torch.Size:
        sizes = (self.spec.outputs, self.spec.inputs)
        return torch.Size(sizes[::-1] if self.transposed else sizes)

    @property
    def device(self) -> torch.device:
        return next(iter(self.parts.values())).device

    @property
    def is_here(self) -> bool:
        """Whether the bytes are in memory: an offloaded parameter is not contiguous."""
        return all(part.is_contiguous() for part in self.parts.values())

    @torch.no_grad()
    def multiply(self, x: Tensor, bias: Tensor | None = None, linear: Callable[..., Tensor] | None = None) -> Tensor:
        """``x`` (..., inputs) with the transpose of the matrix, plus ``bias``: (..., outputs). See PackedMatrix."""
        product = linear or nn.functional.linear
        tiles = self._tiles(x.dtype)
        if len(tiles) == 1:
            return product(x, self._values(0, self.spec.outputs, x.dtype), bias)
        out = x.new_empty(*x.shape[:-1], self.spec.outputs)
        for begin, end in tiles:
            own = None if bias is None else bias[begin:end]
            out[..., begin:end] = product(x, self._values(begin, end, x.dtype), own)
        return out

    def as_linear_weight(self) -> BlockMatrix:
        return BlockMatrix(self.spec, self.parts, self.values_dtype)

    def int8_parts(self) -> None:
        """Nothing: the format is not one of ours. See PackedMatrix."""

    def int4_parts(self) -> None:
        """Nothing: the format is not one of ours. See PackedMatrix."""

    @torch.no_grad()
    def lookup_rows(self, ids: Tensor) -> Tensor:
        """The rows of ``ids`` (any shape): (..., inputs). For formats of one tensor, which may hold some rows only."""
        rows = self.parts[""][ids.reshape(-1)]
        values = dequantized(replace(self.spec, outputs=len(rows)), {"": rows}, self.values_dtype)
        return values.view(*ids.shape, self.spec.inputs)

    @torch.no_grad()
    def dequantized(self) -> Tensor:
        """The weights as a new tensor, for code that does more with them than multiply."""
        whole = torch.empty(self.spec.outputs, self.spec.inputs, dtype=self.values_dtype, device=self.device)
        for begin, end in self._tiles(self.values_dtype):
            whole[begin:end] = self._values(begin, end, self.values_dtype)
        return whole.t() if self.transposed else whole

    def _tiles(self, dtype: torch.dtype) -> list[tuple[int, int]]:
        step = _tile(self.spec, unpacks_at_once(self.spec, self.parts, dtype))
        return [(at, min(at + step, self.spec.outputs)) for at in range(0, self.spec.outputs, step)]

    def _values(self, begin: int, end: int, dtype: torch.dtype) -> Tensor:
        return dequantized(*outputs_of(self.spec, self.parts, begin, end), dtype)


class BlockRows(PackedMatrix):
    """One weight that checkpoints hold as several ``matrices``, one behind the other, or with ``interleaved`` rows."""

    __slots__ = ("interleaved", "matrices")

    def __init__(self, matrices: Sequence[BlockMatrix], interleaved: bool) -> None:
        self.matrices, self.interleaved = tuple(matrices), interleaved
        self.values_dtype, self.transposed = matrices[0].values_dtype, matrices[0].transposed

    @property
    def shape(self) -> torch.Size:
        outputs = sum(matrix.spec.outputs for matrix in self.matrices)
        sizes = (outputs, self.matrices[0].spec.inputs)
        return torch.Size(sizes[::-1] if self.transposed else sizes)

    @property
    def device(self) -> torch.device:
        return self.matrices[0].device

    def multiply(self, x: Tensor, bias: Tensor | None = None, linear: Callable[..., Tensor] | None = None) -> Tensor:
        out = self.joined([matrix.multiply(x, None, linear) for matrix in self.matrices])
        return out if bias is None else out.add_(bias)

    def joined(self, outputs: Sequence[Tensor]) -> Tensor:
        """The product with the whole weight (..., outputs), from the products with each matrix."""
        return joined(outputs, -1, self.interleaved)

    def as_linear_weight(self) -> BlockRows:
        return BlockRows([matrix.as_linear_weight() for matrix in self.matrices], self.interleaved)

    def dequantized(self) -> Tensor:
        return joined(
            [matrix.dequantized() for matrix in self.matrices], -1 if self.transposed else 0, self.interleaved
        )


def matrix_of(spec: Packing, parts: Mapping[str, Tensor], dtype: torch.dtype, transposed: bool = False) -> PackedMatrix:
    """A weight (outputs, inputs) as ``parts``, the tensors of ``spec``; see BlockMatrix."""
    if isinstance(spec, Spec):
        return BlockMatrix(spec, parts, dtype, transposed)
    packed = parts[""]
    return PackedMatrix(spec, packed if packed.dim() == 1 else packed.reshape(-1), dtype, transposed)


class BlockLinear(nn.Module):
    """A linear layer whose weight is the tensors of ``spec``. ``heads``: the number of heads whose outputs have their
    two halves interleaved, in llama.cpp's rotary layout; the forward de-interleaves them. 0: no such heads.
    """

    def __init__(self, spec: Packing, bias: nn.Parameter | None, dtype: torch.dtype, heads: int = 0) -> None:
        super().__init__()
        self.spec, self.dtype, self.heads = spec, dtype, heads
        self.in_features, self.out_features = spec.inputs, spec.outputs
        self._names, self.block_specs = parameter_names(spec), (spec,)
        register(self, spec, "", ())
        self.register_parameter("bias", bias)
        self._is_hf_initialized = True  # Transformers would fill what it knows with random numbers

    def forward(self, x: Tensor) -> Tensor:
        matrix: Any = self.matrix  # dispatches to torch function modes, which may have kernels for it
        out = nn.functional.linear(x, matrix, self._parameters["bias"])
        if not self.heads:
            return out
        return out.reshape(*out.shape[:-1], self.heads, -1, 2).transpose(-1, -2).reshape(out.shape)

    @property
    def matrix(self) -> PackedMatrix:
        return matrix_of(self.spec, parts_of(self, self._names), self.dtype)

    def become(self, spec: Packing, parts: Mapping[str, Tensor]) -> None:
        """Have the same weight as ``parts``, the tensors of another ``spec``."""
        before, self._names = self._names, parameter_names(spec)
        self.spec, self.block_specs = spec, (spec,)
        exchange(self, before, self._names, parts)

    @property
    def weight(self) -> Tensor:
        """Dequantized, as a new tensor, for code that does more with it than a linear layer."""
        return deinterleave_heads(self.matrix.dequantized(), self.heads)

    def extra_repr(self) -> str:
        return f"in_features={self.in_features}, out_features={self.out_features}, format={self.spec.name}"


def packings(model: nn.Module) -> list[Packing]:
    """How the matrices of ``model`` that it multiplies with are packed; a stack of experts counts once."""
    return [spec for module in model.modules() for spec in getattr(module, "block_specs", ())]


def unpacking_bytes(model: nn.Module, dtype: torch.dtype, at_once: bool) -> int:
    """Memory in bytes that multiplying with inputs in ``dtype`` needs for dequantized weights where there are no
    kernels. ``at_once``: on a device, which may dequantize without further memory.
    """
    specs = {spec for spec in packings(model) if isinstance(spec, Spec)}
    each = [_UNPACKING_BYTES * min(s.outputs, _tile(s)) * s.inputs for s in specs]
    if at_once:
        each += [dtype.itemsize * min(s.outputs, _tile(s, at_once)) * s.inputs for s in specs]
    return max(each, default=0)


def _tile(spec: Spec, at_once: bool = False) -> int:
    """How many outputs are dequantized at a time."""
    together = outputs_together(spec)
    return max(1, (_TILE_ELEMENTS_AT_ONCE if at_once else TILE_ELEMENTS) // spec.inputs // together) * together


def deinterleave_heads(values: Tensor, heads: int) -> Tensor:
    """``values`` (outputs, inputs) with the interleaved halves of each head one after the other. 0 heads: unchanged."""
    if not heads:
        return values
    return values.reshape(heads, -1, 2, values.shape[1]).transpose(1, 2).reshape(values.shape)


def joined(each: Sequence[Tensor], dim: int, interleaved: bool) -> Tensor:
    """Tensors of one shape concatenated along ``dim``, or, if ``interleaved``, alternating along it."""
    if not interleaved:
        return torch.cat(list(each), dim=dim)
    dim %= each[0].dim()
    return torch.stack(list(each), dim=dim + 1).flatten(dim, dim + 1)


def put_linear(model: nn.Module, path: str, spec: Packing, dtype: torch.dtype, heads: int = 0) -> BlockLinear:
    """Replace the linear layer at ``path`` by one of ``spec`` on the meta device; ``dtype``: of dequantized values."""
    parent, _, own = path.rpartition(".")
    plain: Any = model.get_submodule(path)
    layer = BlockLinear(spec, plain.bias, dtype, heads)
    setattr(model.get_submodule(parent), own, layer)
    return layer


def put_matrix(module: nn.Module, own: str, spec: Packing, dtype: torch.dtype, looks_up: bool = False) -> None:
    """Replace parameter ``own`` of another kind of module, an embedding or a router, by parameters of ``spec`` on the
    meta device. ``looks_up``: an embedding whose forward only looks up rows.
    """
    delattr(module, own)
    register(module, spec, "", ())
    if not isinstance(module, nn.Embedding):  # embeddings may have a scale that Transformers initializes
        module._is_hf_initialized = True  # type: ignore[assignment]  # see above
    plain: Any = type(module)
    module.__class__ = _with_matrix(plain, own, spec, dtype, looks_up)


@functools.lru_cache(maxsize=256)
def _with_matrix(plain: Any, own: str, spec: Packing, dtype: torch.dtype, looks_up: bool) -> type[nn.Module]:
    names = parameter_names(spec)
    matrix = property(lambda self: matrix_of(spec, parts_of(self, names), dtype))
    members = {own: matrix, "looks_up": looks_up, "block_specs": () if looks_up else (spec,)}
    return type(f"Block{plain.__name__}", (plain,), members)


def register(module: nn.Module, spec: Packing, own: str, before: tuple[int, ...]) -> None:
    """Register parameters of ``spec`` on the meta device, named after ``own``, with leading dimensions ``before``."""
    names = parameter_names(spec, own)
    tensors = spec.tensors() if isinstance(spec, Spec) else spec.tensors(stacked=bool(before))
    for part, (shape, dtype) in tensors.items():
        empty = torch.empty((*before, *shape), dtype=dtype, device="meta")
        module.register_parameter(names[part], nn.Parameter(empty, requires_grad=False))


def exchange(
    module: nn.Module, before: Mapping[str, str], names: Mapping[str, str], parts: Mapping[str, Tensor]
) -> None:
    """Replace the parameters called ``before`` by ``parts``, called ``names``."""
    for name in before.values():
        del module._parameters[name]
    for part, name in names.items():
        module.register_parameter(name, nn.Parameter(parts[part], requires_grad=False))


def parts_of(module: nn.Module, names: Mapping[str, str]) -> dict[str, Tensor]:
    """The tensors of ``module`` whose names are ``names``, by part."""
    return {part: module._parameters[name] for part, name in names.items()}  # type: ignore[misc]
