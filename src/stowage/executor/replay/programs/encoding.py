"""The encoding of a program's operations in numbers and addresses ("words"), as ``native/kernels/program.h`` reads it.

    elementwise: 3, function, 4 sizes, and of the result and of one or two operands: address, is bfloat16, 4 strides

Owns these numbers, and the forms that several kinds of operations share.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from stowage.executor.replay.programs.buffers import CONSTANT, Address, Buffer, Buffers

LINEAR, NORM, POINTWISE, PUT, ATTEND, STACKED, ROTATE, LOOK_UP_ROWS = range(1, 9)
"""Kinds of operations."""
_READ_AT = {LINEAR: (2,), NORM: (1,), ROTATE: (1, 2, 6, 11), LOOK_UP_ROWS: (3,)}
"""The words of an operation that are addresses of rows that it reads."""
COPY, NEGATE, ADD, SUBTRACT, MULTIPLY, LOOK_UP = range(6)
"""Elementwise functions."""
_DIMS = 4
NOWHERE = (-1, 0)
"""An address of nothing."""


@dataclass(frozen=True, slots=True)
class Operation:
    """One operation of a program: numbers and addresses."""

    words: tuple[int | Address, ...]

    def buffers(self) -> list[Buffer]:
        """The buffers that it reads or writes."""
        return [word.buffer for word in self.words if isinstance(word, Address)]


def reads_more(one: Operation, other: Operation) -> bool:
    """Whether ``other``, the same operation for another number of rows, reads more of a constant than ``one``."""
    words = one.words
    if words[0] != POINTWISE:
        return words[0] in _READ_AT and any(_is_constant(words[at]) for at in _READ_AT[words[0]])
    grown = [at for at in range(_DIMS) if words[2 + at] != other.words[2 + at]]
    sides = [at for at, word in enumerate(words) if _is_constant(word)]
    return any(words[at + 2 + dim] != 0 for at in sides for dim in grown)


def _is_constant(word: int | Address) -> bool:
    return isinstance(word, Address) and word.buffer.kind == CONSTANT


class UnsupportedCall(Exception):
    """The kernels cannot make this call."""


class Operand(NamedTuple):
    """An operand: address, type and strides."""

    address: Address
    dtype: torch.dtype
    strides: Sequence[int]


def check(good: bool) -> None:
    """Raises ``UnsupportedCall`` unless ``good``."""
    if not good:
        raise UnsupportedCall


def read(buffers: Buffers, tensor: Any, shape: Sequence[int]) -> Operand:
    """A tensor as an operand, broadcast to ``shape``."""
    check(buffers.is_ours(tensor))
    return Operand(buffers.address_of(tensor), tensor.dtype, tensor.expand(shape).stride())


def new(buffers: Buffers, tensor: Tensor) -> Operand:
    """A new result of a program as an operand."""
    return Operand(buffers.made(tensor), tensor.dtype, tensor.stride())


def whole(shape: Sequence[int]) -> tuple[int, ...]:
    """Strides of a contiguous tensor."""
    return torch.empty(shape, device="meta").stride()


def folded(shape: Sequence[int], strides: Sequence[Sequence[int]]) -> tuple[list[int], list[list[int]]]:
    """Shape and strides with as few dimensions as possible: those of size 1 are dropped, neighbours are merged."""
    sizes: list[int] = []
    steps: list[list[int]] = [[] for _ in strides]
    for at, size in enumerate(shape):
        if size == 1:
            continue
        own = [stride[at] for stride in strides]
        if sizes and all(step[-1] == size * one for step, one in zip(steps, own, strict=True)):
            sizes[-1] *= size
            for step, one in zip(steps, own, strict=True):
                step[-1] = one
            continue
        sizes.append(size)
        for step, one in zip(steps, own, strict=True):
            step.append(one)
    return sizes, steps


def pointwise(shape: Sequence[int], way: int, out: Operand, *sides: Operand) -> Operation:
    """``out`` by the elementwise function ``way`` of one or two operands."""
    every = (out, *sides)
    sizes, steps = folded(shape, [side.strides for side in every])
    missing = _DIMS - len(sizes)
    check(missing >= 0)
    words: list[int | Address] = [POINTWISE, way, *(1,) * missing, *sizes]
    for side, step in zip(every, steps, strict=True):
        words += [side.address, int(side.dtype is torch.bfloat16), *(0,) * missing, *step]
    if len(sides) == 1:
        words += [*NOWHERE, 0, *(0,) * _DIMS]
    return Operation(tuple(words))


def bits(number: float) -> int:
    """A float's 64 bits as an integer."""
    return int(struct.unpack("q", struct.pack("d", number))[0])
