"""Where the tensors of a written step lie: in which buffer, which is memory that one call has made. Views lie in the
buffer of what they are views of.

Owns buffers and their kinds; ``operations`` says which calls make them, ``programs`` where they are put.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from stowage.executor.replay.calls.call_list import WrittenStep

ARENA, CALLED, CONSTANT, RESULT, STEP = range(5)
"""Whose memory a buffer is: the arena's; that of a tensor which the step was given, or a call of Python gave; that of
one which stays as it is; that of the logits, which are the caller's own; that of one which ``batch.current`` has.
"""
NUMBERS = (torch.float32, torch.bfloat16)


class Size(NamedTuple):
    """Bytes of a step: so many, and so many more for each of its rows."""

    nbytes: int
    per_row: int = 0

    def at(self, rows: int) -> int:
        """In a step of so many rows."""
        return self.nbytes + self.per_row * rows

    def plus(self, other: Size) -> Size:
        """Both."""
        return Size(self.nbytes + other.nbytes, self.per_row + other.per_row)

    def within(self, other: Size) -> bool:
        """Whether it is no more than ``other``, however many rows there are."""
        return self.nbytes <= other.nbytes and self.per_row <= other.per_row

    def aligned(self, unit: int) -> Size:
        """The least from this one up, of whole units for any number of rows."""
        return Size(-(-self.nbytes // unit) * unit, -(-self.per_row // unit) * unit)


@dataclass(slots=True, eq=False)
class Buffer:
    """Memory of ``nbytes`` from ``address`` on, in the step that was written down. ``root``: the index of the value
    that is a tensor from its beginning on; ``tensor``: that one. Calls ``first`` to ``last`` use it. ``offset``: where
    in the arena it is put.
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
    """Where a tensor begins in a buffer, and its form."""

    buffer: Buffer
    offset: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: torch.dtype


class Address(NamedTuple):
    """An address: so many bytes from a buffer's beginning."""

    buffer: Buffer
    offset: int


@dataclass(slots=True)
class Buffers:
    """Where the tensors of ``step`` lie, as far as its calls were looked at. ``tables``: all results of functions of
    single numbers, by the function; they outlive the step.
    """

    step: WrittenStep
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
        """The value ``index`` of the step."""
        return self.step.objects.get(index, self.step.values[index])

    def buffer(self, tensor: Tensor) -> Buffer | None:
        """Where it lies, if that is known."""
        return self._of_storage.get(_storage(tensor))

    def place(self, index: int) -> Place | None:
        """Where a value lies, if it is a tensor and that is known."""
        if self._places is not None:
            return self._places.get(index)
        value = self.step.objects.get(index)
        if not isinstance(value, Tensor) or (buffer := self.buffer(value)) is None:
            return None
        return Place(buffer, begin_of(value) - buffer.address, tuple(value.shape), value.stride(), value.dtype)

    def lies_in(self, index: int) -> Buffer | None:
        """The buffer of a value, if that is known."""
        place = self.place(index)
        return None if place is None else place.buffer

    def let_go(self) -> None:
        """Keep where tensors lie, and none of them but constants: those of all layers take much more than a step does.
        Nothing more is asked of calls then.
        """
        places = {index: self.place(index) for index in self.step.objects}
        self._places = {index: place for index, place in places.items() if place is not None}
        for buffer in self._all:
            if buffer.kind != CONSTANT and (own := buffer.tensor) is not None:
                buffer.tensor = torch.empty_strided(own.shape, own.stride(), dtype=own.dtype, device="meta")
        self._of_storage.clear()
        self.step.objects.clear()

    def is_ours(self, value: Any) -> bool:
        """Whether it is a tensor that a program may read: of numbers, and no state, which is elsewhere in each step."""
        usual = isinstance(value, Tensor) and value.dtype in NUMBERS and value.device.type == "cpu"
        return usual and value.layout is torch.strided and value.numel() > 0 and _storage(value) not in self._states

    def is_new(self, value: Any) -> bool:
        """Whether it is one whose memory was not there before."""
        return self.is_ours(value) and self.buffer(value) is None and value.storage_offset() == 0

    def address_of(self, tensor: Tensor) -> Address:
        """Where it begins; one that no call has made is a constant."""
        buffer = self.buffer(tensor) or self._add(CONSTANT, tensor)
        return Address(buffer, begin_of(tensor) - buffer.address)

    def made(self, tensor: Tensor) -> Address:
        """Where it begins; one that is new is made by a program."""
        buffer = self.buffer(tensor) or self._add(ARENA, tensor)
        return Address(buffer, begin_of(tensor) - buffer.address)

    def called(self, found: Any) -> None:
        """A call of Python has given this."""
        if isinstance(found, Tensor) and _storage(found) not in self._states and self.buffer(found) is None:
            self._add(CALLED, found)

    def forget(self, found: Any) -> None:
        """Where these tensors lie, others lay until now."""
        for tensor in found:
            if isinstance(tensor, Tensor):
                self._of_storage.pop(_storage(tensor), None)

    def temporary(self, nbytes: int) -> Address:
        """New memory of no tensor."""
        self._all.append(Buffer(ARENA, nbytes))
        return Address(self._all[-1], 0)

    def of_steps(self) -> Address:
        """What each step has somewhere else."""
        self._all.append(Buffer(STEP, 0))
        return Address(self._all[-1], 0)

    def undo(self, count: int) -> None:
        """Only the first ``count`` buffers are there after all."""
        gone = {id(buffer) for buffer in self._all[count:]}
        self._of_storage = {key: buffer for key, buffer in self._of_storage.items() if id(buffer) not in gone}
        del self._all[count:]

    @property
    def count(self) -> int:
        """How many buffers there are."""
        return len(self._all)

    def used(self, kind: int) -> list[Buffer]:
        """Buffers of that kind which a call uses."""
        return [buffer for buffer in self._all if buffer.kind == kind and buffer.last >= 0]

    def _add(self, kind: int, tensor: Tensor) -> Buffer:
        root = self._index_of.get(id(tensor), -1)
        buffer = Buffer(kind, _extent(tensor), begin_of(tensor), root, tensor)
        self._of_storage[_storage(tensor)] = buffer
        self._all.append(buffer)
        return buffer


def begin_of(tensor: Tensor) -> int:
    """Its address, also if nothing is in it."""
    return _storage(tensor) + int(tensor.storage_offset()) * tensor.element_size()


def _storage(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _extent(tensor: Tensor) -> int:
    """Bytes from its first number to its last: what was filled up for torch has more behind it."""
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return (last + 1) * tensor.element_size() if tensor.numel() else 0
