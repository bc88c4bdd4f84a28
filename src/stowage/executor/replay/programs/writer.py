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
from dataclasses import replace

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
    begin_of,
)
from stowage.executor.replay.programs.fusion import fused
from stowage.executor.replay.programs.operations import NotTaken, Operation, operations
from stowage.executor.replay.programs.paging import Paging
from stowage.executor.replay.programs.program import Arena, Program

__all__ = ["with_programs"]

_ALIGNMENT = 64


def with_programs(step: WrittenStep, arena: Arena) -> RecordedCalls:
    """``step``, with programs for all runs of calls that can be made by one."""
    try:
        buffers = Buffers(step, arena.tables)
        paging = Paging(buffers)
        taken = [_taken(buffers, paging, call) for call in step.calls]
    except NotTaken:  # attention, or what it reads, is Python's
        buffers = Buffers(step, arena.tables)
        paging = Paging(buffers)
        taken = [operations(buffers, call) for call in step.calls]
    if not any(taken):
        return listed(step)
    taken = fused(taken)
    result = buffers.lies_in(step.result)
    if result is not None and result.kind == ARENA:
        result.kind = RESULT
    needed = _needed(step, buffers, taken)
    room = arena.room(_put(buffers.used(ARENA)))
    writer = _Writer(step, buffers, paging, room)
    for index in needed:
        writer.show(index)
    return listed(writer.written(taken, needed))


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


def _put(buffers: Sequence[Buffer]) -> int:
    """Give each of ``buffers`` its offset, where nothing is that is used at the same time; bytes of all."""
    there: list[Buffer] = []
    total = 0
    for buffer in sorted(buffers, key=lambda buffer: buffer.first):
        there = sorted((one for one in there if one.last >= buffer.first), key=lambda one: one.offset)
        buffer.offset = 0
        for one in there:
            if buffer.end <= one.offset:
                break
            buffer.offset = max(buffer.offset, -(-one.end // _ALIGNMENT) * _ALIGNMENT)
        there.append(buffer)
        total = max(total, buffer.end)
    return -(-total // _ALIGNMENT) * _ALIGNMENT


class _Writer:
    """Writes a step's calls down once more, with programs. Slot 0 is the arena."""

    def __init__(self, step: WrittenStep, buffers: Buffers, paging: Paging, room: Tensor) -> None:
        self._step, self._buffers, self._paging, self._room = step, buffers, paging, room
        self._values = list(step.values)
        constants = buffers.used(CONSTANT)
        others = [*buffers.used(CALLED), *buffers.used(RESULT), *buffers.used(STEP)]
        self._slots = {id(buffer): 1 + at for at, buffer in enumerate((*constants, *others))}
        self._kept = (room, *(_tensor(buffer).detach() for buffer in constants))
        known = [room.data_ptr(), *(buffer.address for buffer in constants)]
        self._addresses = array("q", known + [0] * len(others))
        self._calls: list[WrittenCall] = []
        self._program: list[Operation] = []
        self._views: list[WrittenCall] = []

    def show(self, index: int) -> None:
        """Have the value ``index`` there from the beginning, if it lies in the arena."""
        buffer, tensor = self._buffers.lies_in(index), self._step.objects.get(index)
        if buffer is not None and buffer.kind == ARENA and isinstance(tensor, Tensor):
            begin = buffer.offset + begin_of(tensor) - buffer.address
            typed = self._room.view(tensor.dtype)
            self._values[index] = typed.as_strided(tensor.shape, tensor.stride(), begin // tensor.element_size())

    def written(self, taken: Sequence[Sequence[Operation] | None], needed: dict[int, int]) -> WrittenStep:
        """The step as it is made from now on."""
        if self._buffers.used(STEP):
            there = self._paging.addresses(self._addresses, lambda buffer: self._slots[id(buffer)])
            self._calls.append(WrittenCall(there, (), self._new_value()))
        for call, done in zip(self._step.calls, taken, strict=True):
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
            inputs = tuple((self._slots[id(buffer)], _tensor(buffer).stride()) for buffer in called)
            code = array("q", [number for operation in self._program for number in self._numbers(operation)])
            results = [buffer for buffer in used.values() if buffer.kind == RESULT]
            given, index = None, -1
            if results and not self._is_given(results[0]):
                tensor, index = _tensor(results[0]), results[0].root
                given = (self._slots[id(results[0])], tuple(tensor.shape), tensor.stride(), tensor.dtype)
            program = Program(code, self._addresses, self._kept, inputs, given)
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
                found += (0, word.buffer.offset + word.offset)
            else:
                found += (self._slots[id(word.buffer)], word.offset)
        return found

    def _new_value(self) -> int:
        self._values.append(None)
        return len(self._values) - 1


def _tensor(buffer: Buffer) -> Tensor:
    assert buffer.tensor is not None, "only the arena's buffers may be no tensor's"
    return buffer.tensor
