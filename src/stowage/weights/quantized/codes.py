"""Our own quantized matrices, `stowage pack`: their byte layout, packing, and multiplication.

int8                      float32 scale per output channel, then int8 codes; weight = code * scale
int4_32, int4_64, int4_128  per group of 32, 64 or 128 inputs a float16 scale and a float16 minimum (all scales first),
                          then 4-bit codes; weight = code * scale + minimum. Byte ``j`` of a channel has input ``j`` in
                          its low nibble, and input ``j + inputs / 2`` in its high nibble
q4_0 to mxfp4_block       GGUF's formats (``formats``), which are packed here and multiplied by ``blocks``

Codes of int8 and int4 begin at a multiple of 64 bytes; a matrix ends at one, or at a page from 64 KiB on. Scales come
first because an offloaded weight reads as bytes of ones: such a scale is NaN, and so is every result.

A weight is dequantized tile by tile (some output channels), in memory that stays in the CPU's cache and is reused. So
it needs little extra memory, and reading fewer bytes pays for the dequantization.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor

from stowage.core.geometry import ALIGNMENT_BYTES, PAGE_BYTES, round_up
from stowage.weights.quantized.encoding import ENCODED, encoded
from stowage.weights.quantized.fitting import Codes, Inputs, fit
from stowage.weights.quantized.formats import Spec
from stowage.weights.quantized.grids import GRIDS, refuse_infinite

GROUPS: Final = (32, 64, 128)
FORMS: Final = ("int8", *(f"int4_{group}" for group in GROUPS), *ENCODED)
_WHOLE_PAGES_FROM: Final = 64 << 10
TILE_ELEMENTS: Final = 1 << 19
"""Unpacked at once: 2 MiB in float32. Less costs calls, more falls out of the cache (measured: 128 to 1,024 rows of
2,048 are alike, 8,192 take twice as long)."""
_TILE_ELEMENTS_GPU: Final = 1 << 24
"""On other devices, whose kernels are many times as wide."""
_ROWS_NATIVE_MOST: Final = 16
"""Up to so many tokens torch's own kernel for int8 is the quicker one in bfloat16 (12 ms against 62 for one token)."""


def form_of(name: str) -> str:
    """How the tensor called ``name`` is packed: one of ``FORMS``, or empty. Packed tensors end in their form."""
    return next((form for form in FORMS if name.endswith((f".{form}", f"_{form}"))), "")


@dataclass(frozen=True, slots=True)
class Form:
    """How a matrix of ``outputs`` x ``inputs`` is packed: ``name`` is one of ``FORMS``."""

    name: str
    outputs: int
    inputs: int

    @property
    def spec(self) -> Spec | None:
        """What it is as a published format, which ``blocks`` computes with; ``None``: it is one of ours."""
        return Spec(self.name, self.outputs, self.inputs) if self.name in ENCODED else None

    @property
    def group(self) -> int:
        """Inputs that share a scale; all of them in int8."""
        return self.inputs if self.name == "int8" else GRIDS[self.name].group

    @property
    def fits(self) -> bool:
        """Whether a matrix of that size can be packed like that."""
        together = self.inputs if self.name == "int8" else GRIDS[self.name].span
        return self.inputs % together == 0

    @property
    def scales_bytes(self) -> int:
        return 4 * self.outputs if self.name == "int8" else 4 * self.outputs * (self.inputs // self.group)

    @property
    def codes_at(self) -> int:
        return round_up(self.scales_bytes, ALIGNMENT_BYTES)

    @property
    def row_bytes(self) -> int:
        """Of one output channel's codes; of a published format with their scales."""
        if (spec := self.spec) is not None:
            return spec.format.row_bytes(self.inputs)
        return self.inputs if self.name == "int8" else self.inputs // 2

    @property
    def nbytes(self) -> int:
        if self.spec is not None:
            return self.outputs * self.row_bytes
        used = self.codes_at + self.outputs * self.row_bytes
        return round_up(used, PAGE_BYTES if used >= _WHOLE_PAGES_FROM else ALIGNMENT_BYTES)

    def tensors(self, stacked: bool = False) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
        """Shape and type of its one tensor; see ``Spec.tensors``. ``stacked``: that of one of many experts, in pages if
        they are whole.
        """
        piece = PAGE_BYTES if self.nbytes % PAGE_BYTES == 0 else self.nbytes
        return {"": ((self.nbytes // piece, piece) if stacked else (self.nbytes,), torch.uint8)}

    def rows(self, on_gpu: bool) -> int:
        """Output channels that are unpacked at once; ``on_gpu``: on another device than the CPU."""
        return min(self.outputs, max(1, (_TILE_ELEMENTS_GPU if on_gpu else TILE_ELEMENTS) // self.inputs))

    def pack(self, weight: Tensor, inputs: Inputs | None = None) -> Tensor:
        """The bytes of ``weight`` (outputs, inputs): uint8, (nbytes,). ``inputs``: what it is multiplied with, where
        that is known. Raises CheckpointError for NaN and infinity.
        """
        assert weight.shape == (self.outputs, self.inputs)
        packed = torch.zeros(self.nbytes, dtype=torch.uint8)
        for begin, end in self.tiles():
            values = weight[begin:end].float().contiguous()
            if self.name == "int8":
                at, codes = self.codes_at, self._int8(values, packed, begin)
            else:
                found = fit(values, GRIDS[self.name], inputs)
                if self.spec is not None:
                    at, codes = 0, encoded(self.name, found)
                else:
                    at, codes = self.codes_at, self._int4(found, packed, begin)
            packed[at + begin * self.row_bytes :][: codes.numel()] = codes.view(-1)
        return packed

    def tiles(self, on_gpu: bool = False) -> Iterator[tuple[int, int]]:
        """Output channels that are packed and unpacked together: begin and end; see ``rows``."""
        rows = self.rows(on_gpu)
        for begin in range(0, self.outputs, rows):
            yield begin, min(begin + rows, self.outputs)

    def _int8(self, values: Tensor, packed: Tensor, begin: int) -> Tensor:
        scales = values.abs().amax(dim=1) / 127
        refuse_infinite(scales)
        packed[4 * begin : 4 * (begin + len(values))] = scales.view(torch.uint8)
        codes = torch.round(values / torch.where(scales > 0, scales, 1)[:, None])
        return codes.clamp_(-127, 127).to(torch.int8).view(torch.uint8)

    def _int4(self, found: Codes, packed: Tensor, begin: int) -> Tensor:
        for part, kept in enumerate((found.scales.scales, found.scales.leasts)):
            at = part * (self.scales_bytes // 2) + begin * kept.shape[1] * 2
            raw = kept.half().contiguous().view(torch.uint8).view(-1)
            packed[at : at + raw.numel()] = raw
        half = self.inputs // 2
        return found.codes[:, :half] | (found.codes[:, half:] << 4)


def _tile_dtype(x: Tensor) -> torch.dtype:
    """What weights are unpacked to for inputs ``x``: 16 bits only where the processor, or the device, multiplies those
    itself (else 128 tokens took 4 times as long as in float32); sums of codes are too large for float16.
    """
    quick = x.device.type != "cpu" or torch.ops.mkldnn._is_mkldnn_bf16_supported()
    return torch.bfloat16 if quick and x.dtype is torch.bfloat16 else torch.float32


class _Workspace(threading.local):
    """Memory to unpack weights into, one for each thread, device and type; as large as the largest tile so far."""

    def __init__(self) -> None:
        self._held: dict[tuple[torch.device, torch.dtype, str], Tensor] = {}

    def get(self, device: torch.device, dtype: torch.dtype, elements: int, use: str = "weights") -> Tensor:
        held = self._held.get((device, dtype, use))
        if held is None or held.numel() < elements:
            with torch.inference_mode(False):  # else it could not be used outside of that mode
                held = self._held[device, dtype, use] = torch.empty(elements, dtype=dtype, device=device)
        return held[:elements]


_workspace = _Workspace()


def workspace_bytes(forms: Sequence[Form], on_gpu: bool = False) -> int:
    """What unpacking takes besides, in the thread that computes, at most: a number of float32 and a code each.
    ``on_gpu``: on another device than the CPU.
    """
    most = max((form.rows(on_gpu) * form.inputs for form in forms), default=0)
    return most * (torch.float32.itemsize + 1)


class PackedMatrix:
    """A quantized matrix: ``packed`` bytes as a matrix of ``form``, in the place of a weight that is multiplied with.
    Whoever wants its values gets them in ``values_dtype``. ``transposed``: what computes with it takes it for (inputs,
    outputs).
    """

    __slots__ = ("form", "packed", "transposed", "values_dtype")
    _is_hf_initialized: Final = True
    """Transformers would fill it with random numbers."""

    def __init__(self, form: Form, packed: Tensor, values_dtype: torch.dtype, transposed: bool = False) -> None:
        self.form, self.packed, self.values_dtype, self.transposed = form, packed, values_dtype, transposed

    @property
    def shape(self) -> torch.Size:
        sizes = (self.form.outputs, self.form.inputs)
        return torch.Size(sizes[::-1] if self.transposed else sizes)

    @property
    def dtype(self) -> torch.dtype:
        """Of its values: a model may compute in the type of its weights."""
        return self.values_dtype

    @property
    def device(self) -> torch.device:
        """Where it lies: a model may bring its inputs there."""
        return self.packed.device

    def dim(self) -> int:
        return 2

    def as_linear_weight(self) -> PackedMatrix:
        """The same for a linear layer, whatever the module takes it for."""
        return PackedMatrix(self.form, self.packed, self.values_dtype)

    @torch.no_grad()
    def multiply(self, x: Tensor, bias: Tensor | None = None, linear: Callable[..., Tensor] | None = None) -> Tensor:
        """``x`` (..., inputs) with the transpose of the matrix, plus ``bias``: (..., outputs).

        Tiles are multiplied by ``linear``; without one by torch's, so that a mode of torch that has its own is obeyed.
        """
        form = self.form
        rows = x.reshape(-1, form.inputs)
        if linear is None and self._native(rows):
            parts = self.int8_parts()
            assert parts is not None
            out = torch._weight_int8pack_mm(rows.contiguous(), parts[0], parts[1].to(x.dtype))
        else:
            rows, product = rows.to(_tile_dtype(x)), linear or torch.nn.functional.linear
            out = rows.new_empty(len(rows), form.outputs)
            for begin, end in form.tiles(x.device.type != "cpu"):
                tile, factors = self._codes(begin, end, rows.dtype)
                out[:, begin:end] = product(rows, tile)
                if factors is not None:
                    out[:, begin:end] *= factors
            out = out.to(x.dtype)
        if bias is not None:
            out += bias
        return out.view(*x.shape[:-1], form.outputs)

    def lookup_rows(self, ids: Tensor) -> Tensor:
        """The rows of ``ids`` (any shape): (..., inputs)."""
        form, rows = self.form, ids.reshape(-1)
        if form.name != "int8" or self.transposed:
            return self.dequantized()[ids]
        codes = self.packed[form.codes_at :][: form.outputs * form.inputs].reshape(form.outputs, -1)[rows]
        scales = self.packed[: form.scales_bytes].reshape(form.outputs, 4)[rows].view(torch.float32)
        return (codes.view(torch.int8) * scales).to(self.values_dtype).view(*ids.shape, form.inputs)

    @torch.no_grad()
    def dequantized(self) -> Tensor:
        """The weights as one tensor, new memory: for whoever does more with them than multiply."""
        form = self.form
        whole = torch.empty(form.outputs, form.inputs, dtype=self.values_dtype, device=self.packed.device)
        for begin, end in form.tiles(self.packed.device.type != "cpu"):
            tile, factors = self._codes(begin, end, torch.float32)
            whole[begin:end] = tile if factors is None else tile * factors[:, None]
        return whole.t() if self.transposed else whole

    @classmethod
    def __torch_function__(
        cls, function: Any, _types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """What torch does with a matrix of ours: multiplications are ours, anything else gets the values."""
        kwargs = kwargs or {}
        if len(args) > 1 and isinstance(args[0], Tensor) and isinstance(args[1], cls):
            if function is torch.nn.functional.linear and not args[1].transposed:
                return args[1].multiply(args[0], args[2] if len(args) > 2 else kwargs.get("bias"))
            if function in _PRODUCTS and args[1].transposed:
                return args[1].multiply(args[0])
            if function is torch.nn.functional.embedding:
                return args[1].lookup_rows(args[0])
        given = [a.dequantized() if isinstance(a, cls) else a for a in args]
        return function(*given, **{k: v.dequantized() if isinstance(v, cls) else v for k, v in kwargs.items()})

    def int8_parts(self) -> tuple[Tensor, Tensor] | None:
        """Codes (outputs, inputs) and scales (outputs,) where they lie, for whoever multiplies with them as they are;
        ``None`` in 4 bits, and while the bytes are offloaded.
        """
        form = self.form
        if form.name != "int8" or self.packed.stride(0) != 1:
            return None
        codes = self.packed[form.codes_at :][: form.outputs * form.inputs].view(torch.int8)
        return codes.view(form.outputs, form.inputs), self.packed[: form.scales_bytes].view(torch.float32)

    def int4_parts(self) -> tuple[Tensor, Tensor] | None:
        """Codes (outputs, inputs / 2) and scales (2, outputs, groups), the least values behind the factors, where they
        lie; ``None`` in 8 bits, and while the bytes are offloaded.
        """
        form = self.form
        if form.name == "int8" or self.packed.stride(0) != 1:
            return None
        codes = self.packed[form.codes_at :][: form.outputs * form.row_bytes].view(form.outputs, form.row_bytes)
        return codes, self.packed[: form.scales_bytes].view(torch.float16).view(2, form.outputs, -1)

    def _native(self, rows: Tensor) -> bool:
        """Whether torch's own kernel is used: it is quick in bfloat16, slow in float32, and wants bytes in place."""
        few = rows.dtype is torch.bfloat16 and self.form.name == "int8" and len(rows) <= _ROWS_NATIVE_MOST
        few = few and rows.device.type == "cpu"
        there = self.packed.stride(0) == 1 and self.form.inputs % 32 == 0
        return few and there and not torch._C._len_torch_function_stack()  # a mode may want each row by itself

    def _codes(self, begin: int, end: int, dtype: torch.dtype) -> tuple[Tensor, Tensor | None]:
        """Output channels from ``begin`` to ``end`` in memory that the next call uses again, and what their products
        are still to be multiplied with.
        """
        form, count = self.form, end - begin
        raw = self.packed[form.codes_at + begin * form.row_bytes :][: count * form.row_bytes]
        tile = _workspace.get(raw.device, dtype, count * form.inputs).view(count, form.inputs)
        if form.name == "int8":
            tile.copy_(raw.view(torch.int8).reshape(count, form.inputs))
            return tile, self.packed[4 * begin : 4 * end].contiguous().view(torch.float32).to(dtype)
        self._unpack_halves(raw.reshape(count, form.row_bytes), tile)
        groups = form.inputs // form.group
        grouped = tile.view(count, groups, form.group)
        for part, apply in enumerate((grouped.mul_, grouped.add_)):
            at = part * (form.scales_bytes // 2) + 2 * begin * groups
            values = self.packed[at : at + 2 * count * groups].contiguous().view(torch.float16)
            apply(values.to(dtype).view(count, groups, 1))
        return tile, None

    def _unpack_halves(self, raw: Tensor, tile: Tensor) -> None:
        half = self.form.row_bytes
        bits = _workspace.get(raw.device, torch.uint8, raw.numel(), "halves").view(raw.shape)
        torch.bitwise_and(raw, 15, out=bits)
        tile[:, :half].copy_(bits)
        torch.bitwise_right_shift(raw, 4, out=bits)
        tile[:, half:].copy_(bits)


_PRODUCTS: Final = (torch.matmul, torch.mm, Tensor.matmul, Tensor.__matmul__, Tensor.mm)
