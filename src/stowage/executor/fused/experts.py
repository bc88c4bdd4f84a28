"""Fused products of stacked experts in published formats: several experts in one call from Python.

    rows of expert 3   | rows of expert 0 | rows of expert 4
    by its matrix        by its matrix      by its matrix       each where it lies in the stack

The bits are those of each expert's product alone.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from stowage.executor import kernels
from stowage.native import extension as _kernel
from stowage.weights.quantized.blocks import BlockMatrix
from stowage.weights.quantized.formats import Spec
from stowage.weights.quantized.stacks import BlockStack, Run


@dataclass(frozen=True, slots=True)
class Stack:
    """Matrices alike, one for each expert: the first, and how many bytes after its codes, scales and zero points (or
    global scales) those of the next one begin.
    """

    first: kernels.Matrix
    apart: tuple[int, ...]


def of_stack(x: Tensor, stack: BlockStack, int8: bool) -> list[Stack] | None:
    """The pieces of ``stack`` as ``stacked`` takes them for inputs ``x``; ``None``: it does not. ``int8``: where they
    are of whole numbers, inputs are rounded to 8 bits.
    """
    found, spec = [], stack.how.spec
    if not isinstance(spec, Spec):
        return None
    for parts in stack.pieces:
        one = BlockMatrix(spec, {part: values[0] for part, values in parts.items()}, stack.dtype)
        matrix = kernels.int8_product(x, one) if int8 else None
        if matrix is None:
            if not kernels.supports_blocks(x, one):
                return None
            matrix = kernels.of_blocks(one)
        each = next(iter(parts.values())), *kernels.beside_codes(parts)
        apart = tuple(0 if part is None else part.stride(0) * part.element_size() for part in each)
        found.append(Stack(matrix, apart))
    return found


def stacked(x: Tensor, stacks: Sequence[Stack], runs: Iterable[Run]) -> list[Tensor]:
    """``x`` ``[rows, inputs]``, for each ``(expert, begin, end)`` of ``runs`` those rows times that expert's matrix of
    each stack: ``[rows, outputs]`` of every stack. Every row is in a run.
    """
    form, halves = kernels.form_of(x, stacks[0].first)
    given = kernels.cast_input(x, form).contiguous()
    outs = [x.new_empty((len(x), stack.first.outputs), dtype=x.dtype if halves else torch.float32) for stack in stacks]
    inputs, group, threads = x.shape[-1], stacks[0].first.group, torch.get_num_threads()
    at, step = given.data_ptr(), given[:1].nbytes
    for expert, begin, end in runs:
        each: list[int] = []
        for stack, out in zip(stacks, outs, strict=True):
            further = [expert * apart for apart in stack.apart]
            each += kernels.kernel_arguments(stack.first, out.data_ptr() + begin * out[:1].nbytes, further)
        _kernel.linear(at + begin * step, end - begin, inputs, inputs, group, form, halves, threads, *each)
    return outs if halves else [out.to(x.dtype) for out in outs]
