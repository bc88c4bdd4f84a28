"""The buffers of a traced step's tensors. A buffer is memory that one call allocates; views share their base's buffer.

Owns buffers and their kinds; ``operations`` says which calls make them, ``writer`` where they are put in the arena.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from stowage.core.geometry import ALIGNMENT_BYTES, round_up
from stowage.executor.replay.calls.call_list import TracedStep

ARENA, CALLED, CONSTANT, RESULT, STEP = range(5)
"""Whose memory a buffer is, in this order: the arena's; of an input of the step, or of a result of a Python call; of a
constant; of the logits, which are the caller's own; of a tensor of ``batch.current``.
"""
NUMBERS = (torch.float32, torch.bfloat16)


class Size(NamedTuple):
    """A number of bytes that is linear in a step's rows."""

    nbytes: int
    per_row: int = 0

    def at(self, rows: int) -> int:
        """The bytes for a step of this many rows."""
        return self.nbytes + self.per_row * rows

    def plus(self, other: Size) -> Size:
        """The sum of both."""
        return Size(self.nbytes + other.nbytes, self.per_row + other.per_row)

    def within(self, other: Size) -> bool:
        """Whether it is no more than ``other``, however many rows there are."""
        return self.nbytes <= other.nbytes and self.per_row <= other.per_row

    def aligned(self) -> Size:
        """The size rounded up to multiples of ``ALIGNMENT_BYTES``, for any number of rows."""
        return Size(round_up(self.nbytes, ALIGNMENT_BYTES), round_up(self.per_row, ALIGNMENT_BYTES))


@dataclass(slots=True, eq=False)
class Buffer:
    """Memory of ``nbytes`` at ``address``, in the traced step. ``root``: the slot of the value that is a tensor at its
    beginning; ``tensor``: that tensor. Calls ``first`` to ``last`` use it. ``offset``: its place in the arena.
    """

    kind: int
    nbytes: int
    address: int = 0
    root: int = -1
    tensor: Tensor | None = None
    first: int = -1
    last: int = -1
    offset: Size = field(default_factory=lambda: Size(0))

    def use(self, at: int) -> None:
        """Call ``at`` uses it."""
        self.first = at if self.first < 0 else min(self.first, at)
        self.last = max(self.last, at)


class Place(NamedTuple):
    """A tensor's buffer, byte offset in it, shape and strides."""

    buffer: Buffer
    offset: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: torch.dtype


class Address(NamedTuple):
    """An address: a buffer, and a byte offset in it."""

    buffer: Buffer
    offset: int


@dataclass(slots=True)
class Buffers:
    """The buffers of ``step``, as far as its calls were visited. ``tables``: by function, its results for all bfloat16
    numbers; they outlive the step.
    """

    step: TracedStep
    tables: dict[Any, Tensor]
    any_rows: bool = False
    """Whether what is written down is for any number of rows."""
    narrow: dict[int, Tensor] = field(default_factory=dict)
    """By the ``id`` of tensors that no call makes: those of fewer bits which have the same numbers."""
    _all: list[Buffer] = field(default_factory=list)
    _of_storage: dict[int, Buffer] = field(default_factory=dict)
    _index_of: dict[int, int] = field(default_factory=dict)
    _states: set[int] = field(default_factory=set)
    _places: dict[int, Place] | None = None

    def __post_init__(self) -> None:
        for index, value in self.step.objects.items():
            self._index_of.setdefault(id(value), index)
        self._states = {_storage(self.step.objects[index]) for index in self.step.states}
        for index in self.step.given:
            self.called(self.step.objects[index])

    def at(self, index: int) -> Any:
        """The value in slot ``index`` of the traced step."""
        return self.step.objects.get(index, self.step.values[index])

    def buffer(self, tensor: Tensor) -> Buffer | None:
        """The buffer of a tensor, if it is known."""
        return self._of_storage.get(_storage(tensor))

    def place(self, index: int) -> Place | None:
        """The place of a value, if it is a tensor with a known buffer."""
        if self._places is not None:
            return self._places.get(index)
        value = self.step.objects.get(index)
        if not isinstance(value, Tensor) or (buffer := self.buffer(value)) is None:
            return None
        return Place(buffer, begin_of(value) - buffer.address, tuple(value.shape), value.stride(), value.dtype)

    def lies_in(self, index: int) -> Buffer | None:
        """The buffer of a value, if it is known."""
        place = self.place(index)
        return None if place is None else place.buffer

    def drop_tensors(self) -> None:
        """Drop all tensors but constants, and keep their places: the tensors of all layers together take much more
        memory than a step does. No more calls may be visited afterwards.
        """
        places = {index: self.place(index) for index in self.step.objects}
        self._places = {index: place for index, place in places.items() if place is not None}
        for buffer in self._all:
            if buffer.kind != CONSTANT and (own := buffer.tensor) is not None:
                buffer.tensor = torch.empty_strided(own.shape, own.stride(), dtype=own.dtype, device="meta")
        self._of_storage.clear()
        self.step.objects.clear()

    def is_ours(self, value: Any) -> bool:
        """Whether a program may read the value: a tensor of ``NUMBERS``, and no state, whose address changes."""
        usual = isinstance(value, Tensor) and value.dtype in NUMBERS and value.device.type == "cpu"
        return usual and value.layout is torch.strided and value.numel() > 0 and _storage(value) not in self._states

    def is_new(self, value: Any) -> bool:
        """Whether the value is a tensor with memory of its own that no earlier call made."""
        return self.is_ours(value) and self.buffer(value) is None and value.storage_offset() == 0

    def address_of(self, tensor: Tensor) -> Address:
        """The address of a tensor; one that no call has made is a constant."""
        buffer = self.buffer(tensor) or self._add(CONSTANT, tensor)
        return Address(buffer, begin_of(tensor) - buffer.address)

    def made(self, tensor: Tensor) -> Address:
        """The address of a result of a program; a new one gets a buffer in the arena."""
        buffer = self.buffer(tensor) or self._add(ARENA, tensor)
        return Address(buffer, begin_of(tensor) - buffer.address)

    def called(self, found: Any) -> None:
        """Register the results of a Python call."""
        if isinstance(found, Tensor) and _storage(found) not in self._states and self.buffer(found) is None:
            self._add(CALLED, found)

    def forget(self, found: Any) -> None:
        """Forget the former buffers at the addresses of these tensors."""
        for tensor in found:
            if isinstance(tensor, Tensor):
                self._of_storage.pop(_storage(tensor), None)

    def temporary(self, nbytes: int) -> Address:
        """The address of new scratch memory."""
        self._all.append(Buffer(ARENA, nbytes))
        return Address(self._all[-1], 0)

    def of_steps(self) -> Address:
        """An address that is set anew for each step."""
        self._all.append(Buffer(STEP, 0))
        return Address(self._all[-1], 0)

    def undo(self, count: int) -> None:
        """Remove all but the first ``count`` buffers."""
        gone = {id(buffer) for buffer in self._all[count:]}
        self._of_storage = {key: buffer for key, buffer in self._of_storage.items() if id(buffer) not in gone}
        del self._all[count:]

    @property
    def count(self) -> int:
        """Number of buffers."""
        return len(self._all)

    def used(self, kind: int) -> list[Buffer]:
        """The buffers of this kind that some call uses."""
        return [buffer for buffer in self._all if buffer.kind == kind and buffer.last >= 0]

    def _add(self, kind: int, tensor: Tensor) -> Buffer:
        root = self._index_of.get(id(tensor), -1)
        buffer = Buffer(kind, _extent(tensor), begin_of(tensor), root, tensor)
        self._of_storage[_storage(tensor)] = buffer
        self._all.append(buffer)
        return buffer


def begin_of(tensor: Tensor) -> int:
    """A tensor's address, also of an empty one."""
    return _storage(tensor) + int(tensor.storage_offset()) * tensor.element_size()


def _storage(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _extent(tensor: Tensor) -> int:
    """Bytes from the tensor's first element to its last."""
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return (last + 1) * tensor.element_size() if tensor.numel() else 0
