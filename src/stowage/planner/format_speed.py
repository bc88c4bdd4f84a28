"""Measures matrix products with quantized formats, published and our own, relative to unquantized matrices.

Part of the machine's measurement (``compute``): the engine's products, with matrices that are larger than caches. Also
the notes about formats that are slower than unquantized weights. Formats without kernels (in another dtype, or where
nothing was compiled) are much slower, and are not measured.
"""

from __future__ import annotations

import contextlib
import mmap
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from math import prod
from typing import Any, Final

import torch

from stowage.executor import kernels
from stowage.executor.determinism.row_invariance import RowInvariance
from stowage.native.memory import anonymous, in_huge_pages
from stowage.planner.machine import INT8, NARROW_WIDTH, Machine
from stowage.planner.shapes import USUAL_WIDTH, Model
from stowage.weights.quantized.blocks import BlockMatrix
from stowage.weights.quantized.codes import FORMS, Form, PackedMatrix
from stowage.weights.quantized.formats import FORMATS, PLAIN, Spec
from stowage.weights.quantized.i_quants import I_QUANTS, is_readable
from stowage.weights.quantized.row_major import by_outputs, is_by_inputs

_OUTPUTS = {1: 16384, 8: 8192, 128: 2048}
"""Outputs of matrices of the usual width, by rows: so many that distributing work to threads takes negligible time."""
ROWS: Final = tuple(_OUTPUTS)
_BYTES = 128 << 20
_PASS_S = 0.004
_ROUNDS = 4
_LEAST: Final = 1.05
"""Smaller differences are noise, and not reported."""
Times = dict[str, dict[int, float]]


def measure(dtype: torch.dtype) -> tuple[Times, Times]:
    """``Machine.formats`` and ``Machine.narrow`` for ``dtype``: time of each format relative to unquantized weights, by
    rows; with activations in 8 bits under names that end in ``INT8``. Empty where there are no kernels.
    """
    if not kernels.wanted(torch.device("cpu"), dtype):
        return {}, {}
    plain_name = str(dtype).removeprefix("torch.")
    usual: Times = {}
    narrow: Times = {plain_name: {}}
    with contextlib.closing(anonymous(_BYTES)) as plain_memory, contextlib.closing(anonymous(_BYTES)) as memory:
        filled = [_filled(each) for each in (plain_memory, memory)]
        for rows, outputs in _OUTPUTS.items():
            shapes = ((outputs, USUAL_WIDTH), (outputs * USUAL_WIDTH // NARROW_WIDTH, NARROW_WIDTH))
            plain = [list(filled[0].view(dtype).view(-1, *shape)) for shape in shapes]
            for name in (plain_name, *_names()):
                matrices = (
                    plain if name == plain_name else [_matrices(name, filled[1], *shape, dtype) for shape in shapes]
                )
                for way, (wide_times, narrow_times) in _times(name, plain, matrices, rows).items():
                    narrow.setdefault(way, {})[rows] = narrow_times
                    if name != plain_name:
                        usual.setdefault(way, {})[rows] = wide_times
                del matrices
            del plain
        del filled
    return usual, narrow


def is_ours(name: str) -> bool:
    """Whether only `stowage pack` writes this format."""
    return name == "int8" or name.startswith("int4_")


def with_int8(model: Model, machine: Machine) -> Model:
    """``model`` with the names of products with activations in 8 bits, where there are such, and of its attention."""
    known = machine.formats.get(model.dtype, {})

    def renamed(parts: Mapping[str, Mapping[str, int]]) -> dict[str, dict[str, int]]:
        return {
            part: {name + INT8 if name + INT8 in known else name: count for name, count in counts.items()}
            for part, counts in parts.items()
        }

    attended = model.dtype + INT8 if model.dtype + INT8 in machine.attention else ""
    return replace(model, formats=renamed(model.formats), outputs=renamed(model.outputs), attended=attended)


def notes(formats: Sequence[str], dtype: str, machine: Machine) -> tuple[str, ...]:
    """A sentence for each of ``formats`` slower on ``machine`` than plain ``dtype``, and one for those not measured."""
    known = machine.formats.get(dtype, {})
    found, unknown = [], sorted(name for name in formats if name not in known)
    if unknown:
        why = "that was not measured for this machine."
        if machine.measured and not known:
            why = "it has no kernels for them, so they are unpacked at every step, which is much slower."
            if dtype == "float16" and "bfloat16" in machine.formats:
                why += " In bfloat16 it has: --dtype bfloat16."
        found.append(f"{', '.join(unknown)}: predicted as if they were as quick as {dtype}; {why}")
    for name in sorted(set(formats) - set(unknown)):
        times = machine.format_times(dtype, {name: 1.0}, 1)
        if times > _LEAST:
            found.append(
                f"{name} is computed at {1 / times:.2f} of the speed of {dtype} on this processor, for one token "
                "from memory; it takes fewer bytes of memory and of a disk."
            )
    return tuple(found)


def _times(
    name: str, plain: Sequence[Sequence[Any]], matrices: Sequence[Sequence[Any]], rows: int
) -> dict[str, tuple[float, float]]:
    """Time relative to an unquantized matrix of the usual width, of a matrix of the usual and of the narrow width, by
    each way to multiply with it: medians of interleaved passes.
    """
    exact, rounding = (RowInvariance(linear=True, exact=True, int8=int8).alone for int8 in (False, True))
    inputs = [torch.ones(rows, width, dtype=plain[0][0].dtype) for width in (USUAL_WIDTH, NARROW_WIDTH)]
    ways = {name: exact}
    packed = isinstance(matrices[0][0], PackedMatrix)
    if packed and kernels.int8_product(inputs[0], matrices[0][0]) is not None:
        ways[name + INT8] = rounding
    passes = [(partial(exact, inputs[0]), plain[0])]
    for way in ways.values():
        passes += [(partial(way, x), each) for x, each in zip(inputs, matrices, strict=True)]
    rounds = [[_pass_s(*one) for one in passes] for _ in range(_ROUNDS)][1:]
    times = [statistics.median(each[at] / each[0] for each in rounds) for at in range(1, len(passes))]
    return dict(zip(ways, zip(times[::2], times[1::2], strict=True), strict=True))


def _pass_s(multiply: Callable[[Any], Any], matrices: Sequence[Any]) -> float:
    """Seconds for one of the matrices, of as many as take some milliseconds."""
    began_s, elapsed_s = time.perf_counter(), 0.0
    for done, matrix in enumerate(matrices, 1):
        multiply(matrix)
        elapsed_s = time.perf_counter() - began_s
        if elapsed_s > _PASS_S:
            return elapsed_s / done
    return max(elapsed_s / len(matrices), 1e-9)


def _filled(memory: mmap.mmap) -> torch.Tensor:
    """Bytes in huge pages, as weights have them, that are valid numbers in every format."""
    in_huge_pages(memory)
    return torch.frombuffer(memory, dtype=torch.uint8).fill_(0x33)


def _names() -> Iterator[str]:
    """Of all formats that are measured."""
    yield from (n for n in FORMATS if n not in PLAIN and (n not in I_QUANTS or is_readable()))
    yield from (name for name in FORMS if name not in FORMATS)


def _matrices(name: str, memory: torch.Tensor, outputs: int, inputs: int, dtype: torch.dtype) -> list[Any]:
    """As many as ``memory`` has room for: together larger than caches."""
    if name not in FORMATS:
        form = Form(name, outputs, inputs)
        count = memory.numel() // form.nbytes
        rows = memory[: count * form.nbytes].view(count, form.nbytes)
        return [PackedMatrix(form, row, dtype) for row in rows]
    group = 128 if name in ("fp8", "int4", "gptq", "awq") else 0
    block_rows = {"fp8": 128, "nvfp4": 0}.get(name, 1)
    spec = Spec(name, outputs, inputs, group, block_rows, scale_dtype=torch.bfloat16)
    spec = by_outputs(spec) if is_by_inputs(spec) else spec  # as they are in memory
    sizes = {part: prod(shape) * kind.itemsize for part, (shape, kind) in spec.tensors().items()}
    found = []
    for at in range(0, memory.numel() - sum(sizes.values()) + 1, sum(sizes.values())):
        parts, begin = {}, at
        for part, (shape, kind) in spec.tensors().items():
            parts[part] = memory[begin : begin + sizes[part]].view(kind).view(shape)
            begin += sizes[part]
        found.append(BlockMatrix(spec, parts, dtype))
    return found
