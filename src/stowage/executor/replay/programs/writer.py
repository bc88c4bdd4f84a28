"""Runs of a step's calls as one call of the kernels each: what lies between two calls that only Python can make.

    norm linear view mul neg cat mul add ... put attend view linear add norm ...   ->   one program
    topk (of experts)                                                              ->   stays a call

A token of a small model takes half its time in calls that compute next to nothing: a rotary embedding is thirteen of
them per layer. A program is a list of numbers (``native/kernels/program.h``); which calls it can stand for is said in
``operations`` and ``paging``.

Owns which results lie where in the ``Arena``: those that are not needed any more make room for others. The logits lie
in memory of their own, since they are the caller's. Parameters are kept, and read where they lay when the step was
written down: to ask for 300 addresses takes as long as a layer, since weights have driven them from the caches. What
calls of Python give may lie anywhere.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor

from stowage.executor.replay.calls.call_list import RecordedCalls, WrittenCall, WrittenStep, listed
from stowage.executor.replay.calls.recordable import ALLOWED
from stowage.executor.replay.programs.buffers import (
    ARENA,
    CALLED,
    CONSTANT,
    RESULT,
    STEP,
    Address,
    Buffer,
    Buffers,
    Size,
)
from stowage.executor.replay.programs.fusion import fused
from stowage.executor.replay.programs.operations import operations
from stowage.executor.replay.programs.paging import Paging
from stowage.executor.replay.programs.program import Arena, Program
from stowage.executor.replay.programs.words import NotTaken, Operation

__all__ = ["Sketch", "View", "Writer", "put", "sketched", "tensor_of", "with_programs"]

_ALIGNMENT = 64


@dataclass(frozen=True, slots=True)
class Sketch:
    """What is known of a step before it is written with programs: ``taken``, what programs do in the place of each call
    (``None``: it stays), and ``needed``, see ``_needed``.
    """

    step: WrittenStep
    buffers: Buffers
    paging: Paging
    taken: Sequence[list[Operation] | None]
    needed: dict[int, int]


def with_programs(step: WrittenStep, arena: Arena) -> RecordedCalls:
    """``step``, with programs for all runs of calls that can be made by one."""
    sketch = sketched(step, arena)
    if not any(sketch.taken):
        return listed(step)
    there = sketch.buffers.used(ARENA)
    room = arena.room(put(there, [Size(buffer.nbytes) for buffer in there]).nbytes)
    writer = Writer(sketch, (room,))
    writer.addresses[0] = room.data_ptr()
    written = writer.written()
    values = list(written.values)
    for index, view in writer.shown.items():
        values[index] = view.of(room)
    return listed(replace(written, values=tuple(values)))


def sketched(step: WrittenStep, arena: Arena, *, any_rows: bool = False) -> Sketch:
    """What ``step`` is, which is ``batch.current``; ``any_rows``: steps of other numbers of rows are meant, too."""
    try:
        buffers = Buffers(step, arena.tables, any_rows)
        paging = Paging(buffers)
        taken = [_taken(buffers, paging, call) for call in step.calls]
    except NotTaken:  # attention, or what it reads, is Python's
        buffers = Buffers(step, arena.tables, any_rows)
        paging = Paging(buffers)
        taken = [operations(buffers, call) for call in step.calls]
    taken = fused(taken)
    result = buffers.lies_in(step.result)
    if result is not None and result.kind == ARENA:
        result.kind = RESULT
    needed = _needed(step, buffers, taken)
    buffers.let_go()
    return Sketch(step, buffers, paging, taken, needed)


def _taken(buffers: Buffers, paging: Paging, call: WrittenCall) -> list[Operation] | None:
    done = paging.operations(call)
    return operations(buffers, call) if done is None else done


def _needed(step: WrittenStep, buffers: Buffers, taken: Sequence[Sequence[Operation] | None]) -> dict[int, int]:
    """Values that calls of Python need, or programs that do not know their address, and until which call; how long
    buffers are used is noted.
    """
    needed = {step.result: len(step.calls)}

    def need(indices: Sequence[int], until: int) -> None:
        for index in indices:
            needed[index] = max(needed.get(index, 0), until)

    for at in reversed(range(len(step.calls))):
        call, done = step.calls[at], taken[at]
        if done is None:
            if call.name not in ALLOWED or call.result in needed:
                need(call.arguments, at)
        elif not done and call.result in needed and not _is_there(buffers, call.result):
            need(call.arguments, needed[call.result])
        for buffer in (buffer for operation in done or () for buffer in operation.buffers()):
            buffer.use(at)
            if buffer.kind == CALLED:
                need((buffer.root,), at)
    for index, until in needed.items():
        lies_in = buffers.lies_in(index)
        if lies_in is not None:
            lies_in.use(until)
    return needed


def _is_there(buffers: Buffers, index: int) -> bool:
    """Whether no call of Python has to give this value: it is in the arena, or the very tensor that a program gives."""
    buffer = buffers.lies_in(index)
    return buffer is not None and (buffer.kind == ARENA or (buffer.kind == RESULT and buffer.root == index))


def put(buffers: Sequence[Buffer], sizes: Sequence[Size]) -> Size:
    """Give each of ``buffers``, which take ``sizes``, its offset, where nothing is that is used at the same time; what
    all take.
    """
    there: list[tuple[Buffer, Size, Size]] = []
    total = Size(0)
    for buffer, size in sorted(zip(buffers, sizes, strict=True), key=lambda pair: pair[0].first):
        there = [one for one in there if one[0].last >= buffer.first]
        ends = [end.aligned(_ALIGNMENT) for _, _, end in there]
        last = Size(max((end.nbytes for end in ends), default=0), max((end.per_row for end in ends), default=0))
        buffer.offset = next(
            begin
            for begin in (Size(0), *sorted(ends), last)
            if all(begin.plus(size).within(other) or end.within(begin) for _, other, end in there)
        )
        end = buffer.offset.plus(size)
        there.append((buffer, buffer.offset, end))
        total = Size(max(total.nbytes, end.nbytes), max(total.per_row, end.per_row))
    return total.aligned(_ALIGNMENT)


class View(NamedTuple):
    """A tensor that lies in the arena, from its byte ``begin`` on."""

    begin: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: torch.dtype

    def of(self, room: Tensor) -> Tensor:
        """That tensor, where ``room`` is the arena."""
        return room.view(self.dtype).as_strided(self.shape, self.strides, self.begin // self.dtype.itemsize)


class Writer:
    """Writes a step's calls down once more, with programs. Slot 0 is the arena, whose address is to be put there.
    ``rows``: for how many the offsets of buffers are asked; ``kept``: what programs keep besides constants. ``shown``:
    by their indices, the values that lie in the arena.
    """

    def __init__(self, sketch: Sketch, kept: tuple[Tensor, ...] = (), rows: int = 0) -> None:
        self._sketch, self._step, self._buffers, self._rows = sketch, sketch.step, sketch.buffers, rows
        self._values = list(self._step.values)
        constants = self._buffers.used(CONSTANT)
        others = [buffer for kind in (CALLED, RESULT, STEP) for buffer in self._buffers.used(kind)]
        self._slots = {id(buffer): 1 + at for at, buffer in enumerate((*constants, *others))}
        self._kept = (*kept, *(tensor_of(buffer).detach() for buffer in constants))
        self.addresses = array("q", [0, *(buffer.address for buffer in constants)] + [0] * len(others))
        self.shown = {index: view for index in sketch.needed if (view := self._in_arena(index)) is not None}
        self._calls: list[WrittenCall] = []
        self._program: list[Operation] = []
        self._views: list[WrittenCall] = []

    def _in_arena(self, index: int) -> View | None:
        """The value ``index``, if it lies there."""
        place = self._buffers.place(index)
        if place is None or place.buffer.kind != ARENA:
            return None
        return View(place.buffer.offset.at(self._rows) + place.offset, place.shape, place.strides, place.dtype)

    def written(self) -> WrittenStep:
        """The step as it is made from now on."""
        if self._buffers.used(STEP):
            there = self._sketch.paging.addresses(self.addresses, lambda buffer: self._slots[id(buffer)])
            self._calls.append(WrittenCall(there, (), self._new_value()))
        needed = self._sketch.needed
        for call, done in zip(self._step.calls, self._sketch.taken, strict=True):
            wanted = call.result in needed
            if done:
                self._program += done
            elif done is not None:
                if wanted and not _is_there(self._buffers, call.result):
                    self._views.append(call)
            elif wanted or call.name not in ALLOWED:
                self._flush()
                self._calls.append(call)
        self._flush()
        return replace(self._step, calls=tuple(self._calls), values=tuple(self._values))

    def _flush(self) -> None:
        """What is to be done before the next call of Python: the program, and then views of what it gives."""
        if self._program:
            used = {id(buffer): buffer for operation in self._program for buffer in operation.buffers()}
            called = [buffer for buffer in used.values() if buffer.kind == CALLED]
            inputs = tuple((self._slots[id(buffer)], tensor_of(buffer).stride()) for buffer in called)
            code = array("q", [number for operation in self._program for number in self._numbers(operation)])
            results = [buffer for buffer in used.values() if buffer.kind == RESULT]
            given, index = None, -1
            if results and not self._is_given(results[0]):
                tensor, index = tensor_of(results[0]), results[0].root
                given = (self._slots[id(results[0])], tuple(tensor.shape), tensor.stride(), tensor.dtype)
            program = Program(code, self.addresses, self._kept, inputs, given)
            arguments = tuple(buffer.root for buffer in called)
            self._calls.append(WrittenCall(program, arguments, index if index >= 0 else self._new_value()))
        self._calls += self._views
        self._program, self._views = [], []

    def _is_given(self, result: Buffer) -> bool:
        return any(call.result == result.root for call in self._calls)

    def _numbers(self, operation: Operation) -> list[int]:
        found: list[int] = []
        for word in operation.words:
            if not isinstance(word, Address):
                found.append(word)
            elif word.buffer.kind == ARENA:
                found += (0, word.buffer.offset.at(self._rows) + word.offset)
            else:
                found += (self._slots[id(word.buffer)], word.offset)
        return found

    def _new_value(self) -> int:
        self._values.append(None)
        return len(self._values) - 1


def tensor_of(buffer: Buffer) -> Tensor:
    """That which lies in it from its beginning on."""
    assert buffer.tensor is not None, "only the arena's buffers may be no tensor's"
    return buffer.tensor
