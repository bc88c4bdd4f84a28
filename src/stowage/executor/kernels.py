"""Linear layers, norms and paged attention in C, with batch-invariant sums: a row's bits depend on no other row.

    linear   y = x w^T         weights in float32, bfloat16, int8, 4 bits and block formats, sums in float32
    norm     root mean square norms
    attend   softmax attention over a pool's blocks, in place: full, sliding, chunked; soft-capping, sinks, latents

A row gives the same bits in a batch of any size, in any piece of a prompt, as prompt or as generated token;
``--deterministic`` relies on that. For few rows they are also faster than torch (``docs/benchmarks.md``), so a CPU uses
them by default. They are built with the package if there is a C compiler; if not, or if ``STOWAGE_PURE_PYTHON`` is set,
torch computes everything.

The kernels have their own thread pool (``native/kernels/team.h``) of torch's size. Idle threads spin briefly for the
next call and yield, since torch's threads (``stowage.openmp``) need the cores too. Without the pool, torch's OpenMP
runtime is used.
"""

from __future__ import annotations

import ctypes
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from stowage.core.geometry import Kind
from stowage.executor.format_numbers import SCALES, number_of, scales_kind
from stowage.executor.tiles import NAME as TILES
from stowage.executor.tiles import try_scoring, try_tiles
from stowage.native import extension as _kernel
from stowage.native import is_built as is_built
from stowage.native import is_wanted
from stowage.weights.quantized.blocks import BlockMatrix
from stowage.weights.quantized.codes import PackedMatrix
from stowage.weights.quantized.formats import BLOCKS, NVFP4_GROUP, Spec

KINDS = {Kind.FULL: 0, Kind.SLIDING: 1, Kind.CHUNKED: 2}
DTYPES = (torch.float32, torch.bfloat16)
_FORMS = {torch.float32: 0, torch.bfloat16: 1, torch.int8: 2, torch.uint8: 3}
_HALVES = {torch.bfloat16: 4, torch.int8: 5}
"""The same, times inputs in bfloat16."""
_DYNAMIC = {torch.float32: 6, torch.bfloat16: 7}
"""Products of activations quantized to 8 bits."""
INTEGER_FORMATS = frozenset("q8_0 q4_0 q4_1 q5_0 q5_1 q4_k q5_k q6_k mxfp4_block mxfp4 int4 gptq awq s8".split())
"""Formats with integer codes, for products with 8-bit activations (see ``is_integer``); our own int8 and int4 are
supported, too."""
REVISION = 7
"""Version of the kernels; incremented whenever the bits of an answer change."""
_INT8_BLOCK = 32
"""Activations that share a scale when quantized to 8 bits."""
ROWS_FEW = 64
"""With more rows torch is faster, because packing a matrix first pays then: 0.96 to 1.26 times with 64 rows, 1.06 to
1.5 with 512 (AVX-512 BF16, matrices of 1,024 to 5,632).
"""
_ROWS_FEW_BESIDE_TILES = 16
"""The same if torch uses bfloat16 tiles (AMX) and the kernels do not."""
NEVER = 1 << 32
"""A position beyond all tokens."""
TOGETHER = 8
"""Most linear layers in one call."""


def _threads_of_torch() -> int:
    """The address of OpenMP's fork function in this process; 0 if it is not found."""
    try:
        return ctypes.cast(ctypes.CDLL(None).GOMP_parallel, ctypes.c_void_p).value or 0
    except AttributeError:  # pragma: no cover - another runtime: one thread then
        return 0


TILES_REFUSED = ""
"""Why this processor's tiles (AMX) are not used; empty: they are, or there are none."""

if is_built():
    _kernel.use_threads(_threads_of_torch())
    TILES_REFUSED = try_tiles(_kernel)
    try_scoring(_kernel)


def wanted(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether the kernels compute a model of this device and dtype."""
    return is_wanted() and device.type == "cpu" and dtype in DTYPES


def torch_is_faster(dtype: torch.dtype) -> bool:
    """Whether torch is several times faster with many rows of this dtype, because it uses instructions (bfloat16 tiles
    or dot products) that the kernels do not.
    """
    if dtype is not torch.bfloat16 or not torch.cpu._is_avx512_bf16_supported():
        return False
    return not _kernel.multiplies_halves() or (torch.cpu._is_amx_tile_supported() and instructions() != TILES)


def instructions() -> str:
    """The instruction set in use: others round differently."""
    name: str = _kernel.use_instructions(None)
    return name


def supports(x: Tensor, weight: Tensor) -> bool:
    """Whether ``linear`` can compute this."""
    return (
        weight.dim() == 2
        and weight.dtype in DTYPES
        and x.dtype is weight.dtype
        and 1 in weight.stride()
        and weight.device.type == "cpu"
        and x.shape[-1] == weight.shape[1] > 0
    )


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """``x`` ``[..., inputs]`` times ``weight`` ``[outputs, inputs]``, plus ``bias``; see ``supports``."""
    return linear_of(x, of_plain(weight), bias)


def has_few_rows(x: Tensor) -> bool:
    """Whether ``linear`` is faster than torch for ``x``; always, if torch has no instructions for its dtype."""
    most = _ROWS_FEW_BESIDE_TILES if torch_is_faster(x.dtype) else ROWS_FEW
    few = x.numel() <= most * x.shape[-1]
    return few or (x.dtype is torch.bfloat16 and not torch.cpu._is_avx512_bf16_supported())


def product(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """``linear``, or torch's if that is faster: so bits depend on the number of rows."""
    multiply = linear if has_few_rows(x) else torch.nn.functional.linear
    return multiply(x, weight, bias)


def supports_blocks(x: Tensor, matrix: BlockMatrix) -> bool:
    """Whether ``linear_of`` can multiply with this: its bytes are here, and inputs and scales meet at 32 inputs."""
    on_cpu = all(part.device.type == "cpu" for part in matrix.parts.values())
    return x.dtype in DTYPES and on_cpu and matrix.is_here and matrix.spec.meets_at(32)


def supports_lookup(ids: Tensor, weight: object) -> bool:
    """Whether ``look_up`` can do this."""
    if not isinstance(weight, BlockMatrix) or weight.spec.name not in BLOCKS or weight.transposed:
        return False
    on_cpu = ids.device.type == weight.parts[""].device.type == "cpu"
    known = ids.dtype is torch.int64 and weight.values_dtype in DTYPES
    return on_cpu and weight.is_here and known and weight.spec.meets_at(32)


def look_up(ids: Tensor, matrix: BlockMatrix) -> Tensor:
    """The rows of ``ids`` (any shape) of a matrix in a format of one tensor: (..., inputs). See ``supports_lookup``.
    Raises IndexError for a row that there is not.
    """
    rows, ids = matrix.parts[""], ids.contiguous()
    inputs, half = matrix.spec.inputs, matrix.values_dtype is torch.bfloat16
    out = torch.empty((*ids.shape, inputs), dtype=matrix.values_dtype)
    _kernel.look_up(
        *(ids.data_ptr(), ids.numel(), rows.data_ptr(), out.data_ptr()),
        *(rows.shape[0], inputs, rows.stride(0), number_of(matrix.spec.name), half),
    )
    return out


@dataclass(frozen=True, slots=True)
class Matrix:
    """How the kernel reads a matrix. ``codes``, with a row stride of ``row`` elements (of a format: bytes), ``scales``
    and ``zeros`` (zero points, or global scales). ``group``, ``block_rows``: inputs and outputs per scale; ``form``:
    number of its format, 0: none; ``kind``: dtype of its scales.
    """

    codes: Tensor
    outputs: int
    row: int
    scales: Tensor | None = None
    zeros: Tensor | None = None
    group: int = 0
    form: int = 0
    block_rows: int = 1
    kind: int = 0
    int8: bool = False
    """Whether activations are quantized to 8 bits, with a scale for each 32, and multiplied as integers."""


def of_plain(weight: Tensor, scales: Tensor | None = None) -> Matrix:
    """A matrix that ``linear`` supports, or ``int8`` codes ``[outputs, inputs]`` with float32 ``scales`` ``[outputs]``.
    A transposed matrix is read input-major, without a copy.
    """
    if weight.stride(1) == 1:
        return Matrix(weight, weight.shape[0], weight.stride(0), scales)
    return Matrix(weight, weight.shape[0], weight.stride(1), form=number_of("inputs_first"))


def of_int4(dtype: torch.dtype, codes: Tensor, scales: Tensor, group: int) -> Matrix:
    """Our int4, for activations of ``dtype``. ``codes`` ``[outputs, inputs / 2]``, uint8: the low nibbles are the first
    half of an output's inputs. ``scales`` ``[2, outputs, inputs / group]``, float16: factor and offset of each group.
    Weights are rounded to bfloat16 if ``dtype`` is.
    """
    if dtype is not torch.bfloat16:
        return Matrix(codes, codes.shape[0], codes.stride(0), scales, group=group)
    return _of_packed4(codes, scales, group)


def _of_packed4(codes: Tensor, scales: Tensor, group: int) -> Matrix:
    kind = SCALES[torch.float16]
    return Matrix(codes, codes.shape[0], codes.stride(0), scales, scales[1], group, number_of("packed4"), 1, kind)


def is_integer(spec: Spec) -> bool:
    """Whether a matrix of ``spec`` can be multiplied with 8-bit activations: of s8, with a scale for each output."""
    of_outputs = spec.group_size == spec.inputs and spec.rows_per_scale == 1
    return spec.name in INTEGER_FORMATS and (spec.name != "s8" or of_outputs)


def int8_product(x: Tensor, weight: PackedMatrix) -> Matrix | None:
    """``weight`` for activations ``x`` to be quantized to 8 bits; ``None``: its codes are not integers."""
    if x.dtype not in DTYPES or x.shape[-1] % _INT8_BLOCK:
        return None
    if isinstance(weight, BlockMatrix):
        if not (is_integer(weight.spec) and supports_blocks(x, weight)):
            return None
        found = replace(of_blocks(weight), int8=True)
        return replace(found, form=0) if weight.spec.name == "s8" else found  # as our own int8 lies
    if (parts := weight.int8_parts()) is not None:
        return replace(of_plain(*parts), int8=True)
    parts = weight.int4_parts()
    return None if parts is None else replace(_of_packed4(*parts, weight.form.group), int8=True)


def of_blocks(matrix: BlockMatrix) -> Matrix:
    """A matrix in the format that it was published in, of which ``supports_blocks``. To the bit its products are those
    with its values in the type of the inputs.
    """
    spec, parts = matrix.spec, matrix.parts
    codes = next(iter(parts.values()))
    scales, zeros = beside_codes(parts)
    row = codes.stride(0) * codes.element_size()
    group = {"mxfp4": 32, "nvfp4": NVFP4_GROUP}.get(spec.name, spec.group_size)
    kind = 0 if scales is None else scales_kind(scales.dtype, spec.divides)
    return Matrix(codes, spec.outputs, row, scales, zeros, group, number_of(spec.name), spec.rows_per_scale, kind)


def beside_codes(parts: Mapping[str, Tensor]) -> tuple[Tensor | None, Tensor | None]:
    """Scales, and zero points or global scales, where a format has them apart."""
    return parts.get("scales"), parts.get("globals", parts.get("zeros"))


def linears(x: Tensor, matrices: Sequence[Matrix]) -> list[Tensor]:
    """``linear_of`` with up to ``TOGETHER`` ``matrices`` of one form and group, without biases, in one call."""
    form, narrow = form_of(x, matrices[0])
    dtype = x.dtype if narrow else torch.float32
    outs = [x.new_empty((*x.shape[:-1], matrix.outputs), dtype=dtype) for matrix in matrices]
    _multiply(x, list(zip(matrices, outs, strict=True)), form, narrow)
    return [out if out.dtype is x.dtype else out.to(x.dtype) for out in outs]


def linear_of(x: Tensor, matrix: Matrix, bias: Tensor | None = None) -> Tensor:
    """``x`` ``[..., inputs]``, float32 or bfloat16, times any matrix that the kernels read, plus ``bias``."""
    if bias is None:
        return linears(x, [matrix])[0]
    out = x.new_empty((*x.shape[:-1], matrix.outputs), dtype=torch.float32)
    _multiply(x, [(matrix, out)], form_of(x, matrix)[0], False)
    out += bias
    return out if out.dtype is x.dtype else out.to(x.dtype)


def form_of(x: Tensor, matrix: Matrix) -> tuple[int, bool]:
    """The kernel's number for this product, and whether it reads and writes bfloat16."""
    if matrix.int8:
        return _DYNAMIC[x.dtype], x.dtype is torch.bfloat16
    numbers = x.dtype if matrix.form else matrix.codes.dtype
    if x.dtype is torch.bfloat16 and numbers in _HALVES:
        return _HALVES[numbers], True
    return _FORMS[numbers], False


def _multiply(x: Tensor, layers: list[tuple[Matrix, Tensor]], form: int, narrow: bool) -> None:
    """``x`` times each layer's matrix into its output tensor, float32 or (``narrow``) of the dtype of ``x``."""
    inputs = x.shape[-1]
    rows = x if x.dim() == 2 else x.reshape(-1, inputs)
    rows = cast_input(rows, form)
    if rows.stride(1) != 1 or layers[0][0].form:
        rows = rows.contiguous()
    if not rows.numel():
        return
    each: list[int] = []
    for matrix, out in layers:
        each += kernel_arguments(matrix, out.data_ptr())
    group, threads = layers[0][0].group, torch.get_num_threads()
    _kernel.linear(rows.data_ptr(), rows.shape[0], inputs, rows.stride(0), group, form, narrow, threads, *each)


def cast_input(x: Tensor, form: int) -> Tensor:
    """``x`` in the dtype that the kernel reads for the product number ``form``."""
    return x.float() if form in _FORMS.values() else x


def kernel_arguments(matrix: Matrix, out: int, further: Sequence[int] = (0, 0, 0)) -> tuple[int, ...]:
    """The kernel's arguments for ``matrix``, with its outputs at address ``out``. ``further``: byte offsets to add to
    the addresses of codes, scales and zero points.
    """
    parts = zip((matrix.codes, matrix.scales, matrix.zeros), further, strict=True)
    codes, scales, zeros = (0 if part is None else part.data_ptr() + more for part, more in parts)
    return codes, scales, out, matrix.outputs, matrix.row, matrix.form, zeros, matrix.block_rows, matrix.kind


def per_head(x: Tensor, weight: Tensor) -> Tensor:
    """``x [rows, heads, inputs]`` times each head's ``weight [heads, outputs, inputs]``, of one dtype, any stride."""
    x, weight = x.contiguous(), weight if weight[0].is_contiguous() else weight.contiguous()
    (rows, heads, inputs), outputs = x.shape, weight.shape[1]
    form, halves = form_of(x, of_plain(weight[0]))
    given = cast_input(x, form)
    out = x.new_empty((heads, rows, outputs), dtype=x.dtype if halves else torch.float32)
    at, w, y = given.data_ptr(), weight.data_ptr(), out.data_ptr()
    step, w_step, y_step = given[:1, :1].nbytes, weight.stride(0) * weight.element_size(), out[:1].nbytes
    threads = torch.get_num_threads()
    for head in range(heads if rows else 0):  # as `_multiply` calls it; tensors of each head take longer than this
        _kernel.linear(
            *(at + head * step, rows, inputs, heads * inputs, 0, form, halves, threads),
            *(w + head * w_step, 0, y + head * y_step, outputs, inputs, 0, 0, 1, 0),
        )
    return out.transpose(0, 1).to(x.dtype).contiguous()


def norm(x: Tensor, weight: Tensor, eps: float, more: float, *, rounded: bool) -> Tensor:
    """RMS norm of ``x`` ``[..., width]``, contiguous, times ``weight + more`` (``weight``: ``[width]``, of its dtype).
    ``rounded``: normalized values are rounded to the dtype of ``x`` before the multiplication.
    """
    out = torch.empty_like(x)
    width = weight.shape[0]
    half = x.dtype is torch.bfloat16
    count, threads = x.numel() // width, torch.get_num_threads()
    _kernel.norm(
        x.data_ptr(), weight.data_ptr(), out.data_ptr(), count, width, eps, more, half, 0 if rounded else 1, threads
    )
    return out


@dataclass(frozen=True, slots=True)
class AttentionRuns:
    """Which keys the tokens of a step read. ``table``: ``BlockTable.addresses`` of all runs, concatenated. ``runs``
    ``[runs, 5]``: first token in the step, number of tokens, position of the first, begin of its part of ``table``, and
    the position of that part's first key.
    """

    table: Tensor
    runs: Tensor
    kind: Kind
    window: int
    block_tokens: int


def attend(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    steps: AttentionRuns,
    scale: float,
    *,
    softcap: float = 0.0,
    sinks: Tensor | None = None,
    offloaded: tuple[Tensor, Tensor] | None = None,
    rounded_from: int = NEVER,
) -> Tensor:
    """Attention ``[tokens, heads, value_dim]`` of ``query`` ``[tokens, heads, dim]`` over ``keys`` and ``values``
    ``[blocks, block_tokens, kv_heads, dim]`` of a pool, which hold the step's tokens already. ``offloaded``: the
    same for blocks in host memory. ``rounded_from``: from this position on, attention weights of bfloat16 queries are
    rounded to bfloat16, which is faster.
    """
    keys_offloaded, values_offloaded = offloaded or (None, None)
    tokens, heads, width = query.shape
    kv_heads, value_width = keys.shape[2], values.shape[3]
    query = query.contiguous()
    out, half = query.new_empty((tokens, heads, value_width)), query.dtype is torch.bfloat16
    sinks = None if sinks is None else sinks.float().contiguous()
    _kernel.attention(
        query.data_ptr(),
        out.data_ptr(),
        _strided(keys, keys_offloaded),
        _strided(values, values_offloaded),
        steps.table.data_ptr(),
        steps.runs.data_ptr(),
        0 if sinks is None else sinks.data_ptr(),
        steps.runs.shape[0],
        kv_heads,
        heads // kv_heads,
        width,
        value_width,
        steps.block_tokens,
        steps.window,
        KINDS[steps.kind],
        scale,
        softcap,
        half,
        half,
        rounded_from if half else NEVER,
        torch.get_num_threads(),
    )
    return out


def _strided(view: Tensor, offloaded: Tensor | None) -> tuple[int, int, int, int, int, int]:
    assert view.stride(3) == 1, "a head's numbers lie side by side"
    assert offloaded is None or offloaded.stride()[1:] == view.stride()[1:], "a block looks the same everywhere"
    there = (0, 0) if offloaded is None else (offloaded.data_ptr(), offloaded.stride(0))
    return view.data_ptr(), view.stride(0), view.stride(1), view.stride(2), *there
