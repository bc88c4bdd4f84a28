"""Unpacks matrices in published formats on a device by one kernel each.

torch would need ten or more, memory for each of them, and constants from the host, which a CUDA graph cannot have.

Owns when the kernels are used, and their shapes. Each sort of matrix is tried when it is first seen: its first outputs
must be to the bit what torch makes of them, or torch does the work: exact or absent.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import Any, Protocol

import torch
from torch import Tensor

from stowage.cuda.compiling import errors, is_wanted
from stowage.errors import reason

logger = logging.getLogger("stowage.engine")
_SIDE_BY_SIDE = frozenset(
    "q8_0 q4_0 q4_1 q5_0 q5_1 q2_k q3_k q4_k q5_k q6_k iq4_nl iq4_xs mxfp4_block mxfp4 nvfp4 int4".split()
)
_BY_ROWS = frozenset(("fp8", "s8", "u8"))
_APART = _BY_ROWS | frozenset(("gptq", "awq"))
FORMATS = _SIDE_BY_SIDE | _APART
"""Those that the kernels know. Of others torch makes numbers, which is several times slower."""
_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_WIDTHS = {"q2_k": 16, "q3_k": 16, "q6_k": 16, "nvfp4": 16}
"""Values of a group that have one scale, where these are not 32."""
_VALUES = 4096
"""That a program unpacks."""
_COLUMNS = (128, 64, 32)
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32}


class Matrix(Protocol):
    """What is asked of a format's description; see ``weights.quantized.formats``."""

    @property
    def name(self) -> str: ...
    @property
    def outputs(self) -> int: ...
    @property
    def inputs(self) -> int: ...
    @property
    def group_size(self) -> int: ...
    @property
    def rows_per_scale(self) -> int: ...
    @property
    def divides(self) -> bool: ...


Dequantize = Callable[[Any, Mapping[str, Tensor], torch.dtype], Tensor]
Cut = Callable[[Any, Mapping[str, Tensor]], tuple[Any, Mapping[str, Tensor]]]


class Unpacking:
    """How one published format is unpacked on a device. ``reference``: the same by torch. ``cut``: the first outputs of
    a matrix, as a matrix of their own.
    """

    def __init__(self, reference: Dequantize, cut: Cut) -> None:
        self._reference, self._cut = reference, cut
        self._trusted: dict[tuple[object, ...], bool] = {}

    def takes(self, spec: Matrix, parts: Mapping[str, Tensor], dtype: torch.dtype) -> bool:
        """Whether the kernels unpack this matrix. Tries the first of a sort, unless a graph is being captured."""
        if not _fits(spec, parts, dtype):
            return False
        given = [(part.device, part.dtype) for part in parts.values()]
        sort = (spec.name, dtype, spec.group_size, spec.rows_per_scale, spec.inputs, *given)
        known = self._trusted.get(sort)
        if known is None and not _is_capturing(given[0][0]):
            known = self._trusted[sort] = is_wanted() and self._is_right(spec, parts, dtype)
        return bool(known)

    def _is_right(self, spec: Matrix, parts: Mapping[str, Tensor], dtype: torch.dtype) -> bool:
        try:
            few, own = self._cut(spec, parts)
            found, expected = unpack(few, own, dtype), self._reference(few, own, dtype)
            bits = _INTEGERS[dtype.itemsize]
            if torch.equal(found.view(bits), expected.view(bits)):
                return True
            why = "its values are not torch's"
        except errors() as error:
            why = f"{type(error).__name__}: {reason(error)}"
        logger.warning(
            "the kernel that unpacks %s cannot be used here, so torch does it, which is several times slower: %s",
            spec.name,
            why,
            extra={"stowage_event": "unpacking"},
        )
        return False

    def __call__(self, spec: Matrix, parts: Mapping[str, Tensor], dtype: torch.dtype) -> Tensor:
        """The values (outputs, inputs) of a matrix that it ``takes``."""
        return unpack(spec, parts, dtype)


def _fits(spec: Matrix, parts: Mapping[str, Tensor], dtype: torch.dtype) -> bool:
    """Whether the kernels know the format, and the parts lie as they read them."""
    if dtype not in _DTYPES:
        return False
    if spec.name in _SIDE_BY_SIDE:
        return all(part.is_contiguous() for part in parts.values())
    # these may have groups of any width; a program's columns must share one scale
    in_one = spec.group_size % _COLUMNS[-1] == 0 or spec.group_size >= spec.inputs
    return spec.name in _APART and in_one and all(part.dim() < 2 or part.stride(-1) == 1 for part in parts.values())


def unpack(spec: Matrix, parts: Mapping[str, Tensor], dtype: torch.dtype) -> Tensor:
    """The values (outputs, inputs) of ``parts``, of the shapes of ``spec``, in ``dtype``."""
    first = next(iter(parts.values()))
    out = torch.empty(spec.outputs, spec.inputs, dtype=dtype, device=first.device)
    if not out.numel():
        return out
    launch = _side_by_side if spec.name in _SIDE_BY_SIDE else _apart
    with torch.cuda.device_of(out):  # type: ignore[no-untyped-call]  # Triton launches on the one in use
        launch(spec, parts, out)
    return out


def _side_by_side(spec: Matrix, parts: Mapping[str, Tensor], out: Tensor) -> None:
    from stowage.cuda.unpacking import kernels

    blocks = next(parts[part] for part in ("", "blocks", "codes") if part in parts).view(torch.uint8)
    scales, zeros = parts.get("scales", blocks), parts.get("globals", parts.get("zeros"))
    width = _WIDTHS.get(spec.name, 32)
    groups, at_once = out.numel() // width, _VALUES // width
    super_block, alike = 256 if spec.name.endswith(("_k", "_xs")) else 32, spec.group_size // width
    if spec.name == "nvfp4":
        scales, super_block, alike = scales.view(torch.uint8), width, spec.rows_per_scale
    kernels.side_by_side[(-(-groups // at_once),)](
        blocks,
        scales,
        blocks if zeros is None else zeros,
        out,
        groups,
        spec.inputs // width,
        alike,
        FORMAT=spec.name,
        ZEROS=spec.divides if spec.name == "nvfp4" else zeros is not None,
        BYTES=blocks.numel() * super_block // out.numel(),
        WIDTH=width,
        GROUPS=at_once,
        num_warps=4,
        enable_fp_fusion=False,
    )


def _apart(spec: Matrix, parts: Mapping[str, Tensor], out: Tensor) -> None:
    from stowage.cuda.unpacking import kernels

    codes, scales = parts["codes"], parts["scales"]
    if spec.name in _BY_ROWS:
        codes = codes.view(torch.uint8)
        scales = scales.reshape(-(-spec.outputs // spec.rows_per_scale), -1)
    columns = next((c for c in _COLUMNS if spec.group_size % c == 0), _COLUMNS[-1])
    columns = _COLUMNS[0] if spec.group_size >= spec.inputs else columns
    rows = _VALUES // columns
    kernels.apart[(-(-spec.outputs // rows), -(-spec.inputs // columns))](
        codes,
        scales,
        parts.get("zeros", codes),
        out,
        spec.outputs,
        spec.inputs,
        codes.stride(0),
        scales.stride(0),
        parts.get("zeros", codes).stride(0),
        spec.group_size,
        spec.rows_per_scale,
        FORMAT=spec.name,
        POWERS=scales.dtype is torch.uint8,
        ROWS=rows,
        COLUMNS=columns,
        num_warps=4,
        enable_fp_fusion=False,
    )


def _is_capturing(device: torch.device) -> bool:
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()
