"""How long products with matrices in published formats and in our own packed forms take, against plain numbers.

Owns the measurement, which is a part of the machine's (``compute``): products as the engine makes them, with matrices
that no cache holds. And what is told of a format that is slower than plain numbers. Formats without kernels (another
type than these compute in, or no compiled part) are much slower by their nature, and are not measured.
"""

from __future__ import annotations

import contextlib
import mmap
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from math import prod
from typing import Any, Final

import torch

from stowage.core.memory import anonymous, in_huge_pages
from stowage.executor import kernels
from stowage.executor.determinism.row_invariance import RowInvariance
from stowage.planner.machine import INT8, Machine
from stowage.weights.quantized.blocks import BlockMatrix
from stowage.weights.quantized.codes import FORMS, Form, PackedMatrix
from stowage.weights.quantized.formats import FORMATS, PLAIN, Spec
from stowage.weights.quantized.i_quants import I_QUANTS, is_readable

__all__ = ["is_ours", "measure", "notes", "with_int8"]

ROWS: Final = (1, 8, 128)
_OUTPUTS, _INPUTS = 4096, 2048
_BYTES = 128 << 20
_PASS_S = 0.006
_ROUNDS = 4
_LEAST: Final = 1.05
"""Noise is not told."""


def measure(dtype: torch.dtype) -> dict[str, dict[int, float]]:
    """How many times as long as plain numbers of ``dtype`` each format takes, by rows; with activations in 8 bits under
    names that end in ``INT8``. Empty where there are no kernels.
    """
    if not kernels.wanted(torch.device("cpu"), dtype):
        return {}
    exact, rounding = (RowInvariance(linear=True, exact=True, int8=int8).alone for int8 in (False, True))
    inputs = {rows: torch.ones(rows, _INPUTS, dtype=dtype) for rows in ROWS}
    with contextlib.closing(anonymous(_BYTES)) as plain_memory, contextlib.closing(anonymous(_BYTES)) as memory:
        filled = [_filled(each) for each in (plain_memory, memory)]
        plain = list(filled[0].view(dtype).view(-1, _OUTPUTS, _INPUTS))
        found = {}
        for name, matrices in _matrices(filled[1], dtype):
            ways = {name: exact}
            if kernels.int8_product(inputs[1], matrices[0]) is not None:
                ways[name + INT8] = rounding
            for way, multiply in ways.items():
                found[way] = {
                    rows: _times(partial(exact, x), plain, partial(multiply, x), matrices) for rows, x in inputs.items()
                }
            del matrices
        del plain, filled
    return found


def is_ours(name: str) -> bool:
    """Whether it is a form that only `stowage pack` writes."""
    return name == "int8" or name.startswith("int4_")


def with_int8(formats: Mapping[str, Mapping[str, int]], dtype: str, machine: Machine) -> dict[str, dict[str, int]]:
    """``Model.formats`` by the names of products with activations in 8 bits, where there are such."""
    known = machine.formats.get(dtype, {})
    return {
        part: {name + INT8 if name + INT8 in known else name: count for name, count in counts.items()}
        for part, counts in formats.items()
    }


def notes(formats: Sequence[str], dtype: str, machine: Machine) -> tuple[str, ...]:
    """A sentence for each of ``formats`` that is slower on ``machine`` than plain numbers, for a model that is run in
    ``dtype``; and one for those of which that is not known.
    """
    known = machine.formats.get(dtype, {})
    found, unknown = [], sorted(name for name in formats if name not in known)
    if unknown:
        why = "that was not measured for this machine."
        if machine.measured and not known:
            why = "it has no kernels for them, so they are unpacked at every step, which is much slower."
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
    plainly: Callable[[Any], Any], plain: Sequence[Any], multiply: Callable[[Any], Any], matrices: Sequence[Any]
) -> float:
    """How many times as long the second way takes for a matrix: the median of passes in turn."""
    found = []
    for _ in range(_ROUNDS):
        plain_s, own_s = _pass_s(plainly, plain), _pass_s(multiply, matrices)
        found.append(own_s / plain_s)
    return statistics.median(found[1:])


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
    """Bytes in huge pages, as those of weights, that mean numbers in each format."""
    in_huge_pages(memory)
    return torch.frombuffer(memory, dtype=torch.uint8).fill_(0x33)


def _matrices(memory: torch.Tensor, dtype: torch.dtype) -> Iterator[tuple[str, list[Any]]]:
    """Of each format as many as ``memory`` has room for: together larger than caches."""
    for name in FORMATS:
        if name in PLAIN or (name in I_QUANTS and not is_readable()):
            continue
        group = 128 if name in ("fp8", "int4", "gptq", "awq") else 0
        zeros, tall = name in ("gptq", "awq"), 128 if name == "fp8" else 1
        spec = Spec(name, _OUTPUTS, _INPUTS, group, tall, zeros, torch.bfloat16)
        sizes = {part: prod(shape) * kind.itemsize for part, (shape, kind) in spec.tensors().items()}
        found = []
        for at in range(0, memory.numel() - sum(sizes.values()) + 1, sum(sizes.values())):
            parts, begin = {}, at
            for part, (shape, kind) in spec.tensors().items():
                parts[part] = memory[begin : begin + sizes[part]].view(kind).view(shape)
                begin += sizes[part]
            found.append(BlockMatrix(spec, parts, dtype))
        yield name, found
    for name in FORMS:
        form = Form(name, _OUTPUTS, _INPUTS)
        if form.spec is None:
            count = memory.numel() // form.nbytes
            rows = memory[: count * form.nbytes].view(count, form.nbytes)
            yield name, [PackedMatrix(form, row, dtype) for row in rows]
