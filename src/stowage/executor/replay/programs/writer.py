"""Compiles a traced step to programs: each run of calls between two that stay in Python is one call of the kernels.

    norm linear view mul neg cat mul add ... put attend view linear add norm ...   ->   one program
    topk (of experts)                                                              ->   stays a call

A token of a small model takes half its time in calls that compute next to nothing: a rotary embedding is thirteen of
them per layer. A program is a list of numbers (``native/kernels/program.h``); ``operations`` and ``paging`` lower calls
to it.

Owns the offsets of results in the ``Arena``, where dead results make room for others. The logits have memory of their
own, since they are the caller's. Parameters are kept alive, and their addresses are those of the trace: reading 300
addresses anew takes as long as a layer, since weights have evicted them from the caches. The addresses of Python calls'
results are read in each replay.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor

from stowage.executor.replay.calls.call_list import RecordedCalls, TracedCall, TracedStep, compact, listed
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
from stowage.executor.replay.programs.encoding import Operation, UnsupportedCall
from stowage.executor.replay.programs.fusion import fused
from stowage.executor.replay.programs.operations import operations
from stowage.executor.replay.programs.paging import Paging
from stowage.executor.replay.programs.program import Arena, Program


@dataclass(frozen=True, slots=True)
class ProgramPlan:
    """What is known of a step before its programs are written: ``lowered``, the operations of each call (``None``: it
    stays a Python call), and ``needed``, see ``_needed``.
    """

    step: TracedStep
    buffers: Buffers
    paging: Paging
    lowered: Sequence[list[Operation] | None]
    needed: dict[int, int]


def with_programs(step: TracedStep, arena: Arena) -> RecordedCalls:
    """``step`` with programs for all runs of calls that can be lowered."""
    plan = planned(step, arena)
    if not any(plan.lowered):
        return listed(step)
    there = plan.buffers.used(ARENA)
    room = arena.room(put(there, [Size(buffer.nbytes) for buffer in there]).nbytes)
    writer = Writer(plan, (room,))
    writer.addresses[0] = room.data_ptr()
    traced = writer.traced()
    values = list(traced.values)
    for index, view in writer.shown.items():
        values[index] = view.of(room)
    return listed(compact(replace(traced, values=tuple(values))))


def planned(step: TracedStep, arena: Arena, *, any_rows: bool = False) -> ProgramPlan:
    """The plan of ``step``, which is ``batch.current``; ``any_rows``: it must hold for other numbers of rows, too."""
    try:
        buffers = Buffers(step, arena.tables, any_rows)
        paging = Paging(buffers)
        lowered = [_lowered(buffers, paging, call) for call in step.calls]
    except UnsupportedCall:  # attention, or what it reads, is Python's
        buffers = Buffers(step, arena.tables, any_rows)
        paging = Paging(buffers)
        lowered = [operations(buffers, call) for call in step.calls]
    lowered = fused(lowered)
    result = buffers.lies_in(step.result)
    if result is not None and result.kind == ARENA:
        result.kind = RESULT
    needed = _needed(step, buffers, lowered)
    buffers.drop_tensors()
    return ProgramPlan(step, buffers, paging, lowered, needed)


def _lowered(buffers: Buffers, paging: Paging, call: TracedCall) -> list[Operation] | None:
    done = paging.operations(call)
    return operations(buffers, call) if done is None else done


def _needed(step: TracedStep, buffers: Buffers, lowered: Sequence[Sequence[Operation] | None]) -> dict[int, int]:
    """By slot, the values that Python calls need, or programs that do not know their address, and the last call that
    needs each. Records in ``buffers`` which calls use them.
    """
    needed = {step.result: len(step.calls)}

    def need(indices: Sequence[int], until: int) -> None:
        for index in indices:
            needed[index] = max(needed.get(index, 0), until)

    for at in reversed(range(len(step.calls))):
        call, done = step.calls[at], lowered[at]
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
    """Whether the value needs no Python call: it is in the arena, or it is a program's result."""
    buffer = buffers.lies_in(index)
    return buffer is not None and (buffer.kind == ARENA or (buffer.kind == RESULT and buffer.root == index))


def put(buffers: Sequence[Buffer], sizes: Sequence[Size]) -> Size:
    """Give ``buffers`` of these ``sizes`` offsets apart from all used at the same time; returns the size of all."""
    there: list[tuple[Buffer, Size, Size]] = []
    total = Size(0)
    for buffer, size in sorted(zip(buffers, sizes, strict=True), key=lambda pair: pair[0].first):
        there = [one for one in there if one[0].last >= buffer.first]
        ends = [end.aligned() for _, _, end in there]
        last = Size(max((end.nbytes for end in ends), default=0), max((end.per_row for end in ends), default=0))
        buffer.offset = next(
            begin
            for begin in (Size(0), *sorted(ends), last)
            if all(begin.plus(size).within(other) or end.within(begin) for _, other, end in there)
        )
        end = buffer.offset.plus(size)
        there.append((buffer, buffer.offset, end))
        total = Size(max(total.nbytes, end.nbytes), max(total.per_row, end.per_row))
    return total.aligned()


class View(NamedTuple):
    """A tensor in the arena, at byte ``begin``."""

    begin: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: torch.dtype

    def of(self, room: Tensor) -> Tensor:
        """That tensor, where ``room`` is the arena."""
        return room.view(self.dtype).as_strided(self.shape, self.strides, self.begin // self.dtype.itemsize)


class Writer:
    """Writes a step's calls anew, with programs. Slot 0 of addresses is for the arena's. ``rows``: the number of rows
    that buffers' offsets are for; ``kept``: tensors that programs keep alive besides constants. ``shown``: by slot, the
    values that are views of the arena.
    """

    def __init__(self, plan: ProgramPlan, kept: tuple[Tensor, ...], rows: int = 0) -> None:
        self._plan, self._step, self._buffers, self._rows = plan, plan.step, plan.buffers, rows
        self._values = list(self._step.values)
        constants = self._buffers.used(CONSTANT)
        others = [buffer for kind in (CALLED, RESULT, STEP) for buffer in self._buffers.used(kind)]
        self._slots = {id(buffer): 1 + at for at, buffer in enumerate((*constants, *others))}
        self._kept = (*kept, *(tensor_of(buffer).detach() for buffer in constants))
        self.addresses = array("q", [0, *(buffer.address for buffer in constants)] + [0] * len(others))
        self.shown = {index: view for index in plan.needed if (view := self._in_arena(index)) is not None}
        self._calls: list[TracedCall] = []
        self._program: list[Operation] = []
        self._views: list[TracedCall] = []

    def _in_arena(self, index: int) -> View | None:
        """The view that is the value in slot ``index``, if it lies in the arena."""
        place = self._buffers.place(index)
        if place is None or place.buffer.kind != ARENA:
            return None
        return View(place.buffer.offset.at(self._rows) + place.offset, place.shape, place.strides, place.dtype)

    def traced(self) -> TracedStep:
        """The step with programs."""
        if self._buffers.used(STEP):
            there = self._plan.paging.addresses(self.addresses, lambda buffer: self._slots[id(buffer)])
            self._calls.append(TracedCall(there, (), self._new_value()))
        needed = self._plan.needed
        for call, done in zip(self._step.calls, self._plan.lowered, strict=True):
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
        """Write what must precede the next Python call: the program, and then views of its results."""
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
            self._calls.append(TracedCall(program, arguments, index if index >= 0 else self._new_value()))
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
    """The tensor at the buffer's beginning."""
    assert buffer.tensor is not None, "only the arena's buffers may be no tensor's"
    return buffer.tensor
