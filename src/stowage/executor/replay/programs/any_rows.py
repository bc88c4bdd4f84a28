"""Merges the lists of steps of a few numbers of rows into one list for any number of rows.

    rows                       7          11          13      any
    rows of a linear layer     7          11          13      1 per row
    a buffer's offset     12,672      18,816      21,888      1,920, and 1,536 per row
    a view's shape    (1, 7, 64) (1, 11, 64) (1, 13, 64)      (1, 1 per row, 64)

The steps must make the same calls, and every number in them must be a linear function of the rows. Other growth, such
as quadratic, is refused, and so is an operation that reads more of a constant tensor.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from operator import itemgetter
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from stowage.executor.replay.backend import CaptureError
from stowage.executor.replay.calls.call_list import RecordedCalls, TracedStep, listed
from stowage.executor.replay.programs.buffers import ARENA, CALLED, CONSTANT, RESULT, STEP, Buffer, Size
from stowage.executor.replay.programs.encoding import reads_more
from stowage.executor.replay.programs.paging import StepAddresses
from stowage.executor.replay.programs.program import Program
from stowage.executor.replay.programs.writer import ProgramPlan, View, Writer, put, tensor_of
from stowage.weights.quantized.codes import PackedMatrix


@dataclass(frozen=True, slots=True)
class _Varying:
    """A value that differs for each number of rows."""

    at: Callable[[int], Any]


@dataclass(frozen=True, slots=True)
class RecordedRows:
    """The ``calls`` of a step, with ``functions`` and ``values`` for any number of rows. ``shown``: by slot, the values
    that are views of the arena. ``room``: the arena's size; programs read its address from ``addresses``.
    """

    calls: RecordedCalls
    functions: Any
    values: Any
    shown: Any
    addresses: array[int]
    room: Size

    def replay(self, given: Sequence[Tensor]) -> Tensor:
        """Make the calls with a step's inputs, whose first has its rows; returns the logits, and frees the arena."""
        rows = len(given[0])
        room = torch.empty(self.room.at(rows), dtype=torch.uint8)
        self.addresses[0] = room.data_ptr()
        values = list(at(self.values, rows))
        for index, view in at(self.shown, rows).items():
            values[index] = view.of(room)
        functions = zip(self.calls.calls, at(self.functions, rows), strict=True)
        calls = tuple(replace(call, function=function) for call, function in functions)
        return replace(self.calls, calls=calls, values=tuple(values)).replay(given)


def for_any_rows(plans: Sequence[ProgramPlan], rows: Sequence[int]) -> RecordedRows:
    """Merges the ``plans`` of steps of at least three numbers of ``rows`` into one list. Raises ``CaptureError`` where
    that is not possible.
    """
    lines = _Lines(rows)
    _check(any(plans[0].lowered), "no call of it is a program's")
    _compare(plans)
    arenas = [one.buffers.used(ARENA) for one in plans]
    sizes = [lines.size([buffer.nbytes for buffer in alike]) for alike in zip(*arenas, strict=True)]
    room = put(arenas[0], sizes)
    for others in arenas[1:]:
        for buffer, other in zip(arenas[0], others, strict=True):
            other.offset = buffer.offset
    writers = [Writer(one, (), count) for one, count in zip(plans, rows, strict=True)]
    steps = [writer.traced() for writer in writers]
    functions = lines.through([[call.function for call in step.calls] for step in steps])
    values = lines.through([_used(step) for step in steps])
    shown = lines.through([writer.shown for writer in writers])
    return RecordedRows(listed(steps[0]), functions, values, shown, writers[0].addresses, room)


def _used(step: TracedStep) -> list[Any]:
    """The values of ``step`` that its calls ask for."""
    asked = {index for call in step.calls for index in call.arguments}
    return [value if index in asked else None for index, value in enumerate(step.values)]


def _compare(plans: Sequence[ProgramPlan]) -> None:
    """Raise ``CaptureError`` unless they are of the same calls, programs and memory."""
    for of_call in _side_by_side([one.step.calls for one in plans]):
        _check(_alike([call[1:] for call in of_call]), "other calls")
    for kind in (ARENA, CONSTANT, CALLED, RESULT, STEP):
        for buffers in _side_by_side([one.buffers.used(kind) for one in plans]):
            _check(kind != CONSTANT or all(_same(buffers[0], other) for other in buffers[1:]), "other constants")
            _check(_alike([(buffer.root, buffer.first, buffer.last) for buffer in buffers]), "other memory")
    for lowered in _side_by_side([one.lowered for one in plans]):
        _check(_alike([one is None for one in lowered]), "other programs")
        for operations in _side_by_side([one or () for one in lowered]):
            _check(not any(reads_more(operations[0], other) for other in operations[1:]), "more of a constant")


@dataclass(frozen=True, slots=True)
class _Lines:
    """Fits values that are constant, or linear, in these numbers of ``rows``."""

    rows: Sequence[int]

    def size(self, found: Sequence[int]) -> Size:
        """The size of memory that took ``found`` bytes."""
        begin, per_row = self._line(np.array(found))
        size = Size(int(begin), int(per_row))
        _check(size.nbytes >= 0 and size.per_row >= 0, "less memory")
        return size

    def through(self, found: Sequence[Any]) -> Any:
        """The common value of ``found``, one for each number of rows; else a ``_Varying``."""
        first = found[0]
        if all(one is first for one in found) or isinstance(first, StepAddresses):
            return first
        _check(_alike([type(one) for one in found]), "values of other types")
        parts = _parts(found)
        if parts is not None:
            make, each = parts
            through = [self.through(values) for values in _side_by_side(each)]
            varies = any(isinstance(part, _Varying) for part in through)
            return _Varying(lambda rows: make([at(part, rows) for part in through])) if varies else first
        if type(first) in (int, array):
            _check(type(first) is int or _alike([len(one) for one in found]), "other programs")
            begin, per_row = self._line(np.array(found))
            _check(bool((per_row >= 0).all()), "less of something")  # with enough rows it has less than nothing
            if not per_row.any():
                return first
            return _Varying(lambda rows: begin + per_row * rows if begin.ndim else int(begin + per_row * rows))
        _check(not isinstance(first, Tensor) and _alike(found), "other values")
        return first

    def _line(self, found: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        per_row = (found[1] - found[0]) // (self.rows[1] - self.rows[0])
        begin = found[0] - per_row * self.rows[0]
        on_it = all((one == begin + per_row * count).all() for one, count in zip(found, self.rows, strict=True))
        _check(on_it, "a number that grows otherwise than its rows")
        return np.asarray(begin), np.asarray(per_row)


def at(value: Any, rows: int) -> Any:
    """``value`` for a step of this many rows."""
    return value.at(rows) if isinstance(value, _Varying) else value


def _parts(found: Sequence[Any]) -> tuple[Callable[[list[Any]], Any], list[list[Any]]] | None:
    """How to rebuild values of one type from parts, and the parts of each; ``None``: they have no parts."""
    first = found[0]
    if isinstance(first, Program):
        own = [[one.code, one.inputs, one.result] for one in found]
        return lambda parts: Program(parts[0], first.addresses, first.kept, *parts[1:]), own
    if isinstance(first, View):
        return lambda parts: View(*parts), [list(one) for one in found]
    if type(first) in (tuple, list, torch.Size):
        return type(first), [list(one) for one in found]
    if isinstance(first, dict):
        _check(_alike([list(one) for one in found]), "values of other names")
        return lambda parts: dict(zip(first, parts, strict=True)), [list(one.values()) for one in found]
    if isinstance(first, slice):
        return lambda parts: slice(*parts), [[one.start, one.stop, one.step] for one in found]
    if isinstance(first, partial):
        return lambda parts: partial(parts[0], *parts[1], **parts[2]), [
            [one.func, one.args, one.keywords] for one in found
        ]
    if isinstance(first, itemgetter):
        return lambda parts: itemgetter(*parts), [list(one.__reduce__()[1]) for one in found]
    if isinstance(first, PackedMatrix):  # made anew by each access to a module's weight
        names = [name for kind in type(first).__mro__ for name in getattr(kind, "__slots__", ())]
        return _refuse_matrix, [[getattr(one, name, None) for name in names] for one in found]
    return None


def _refuse_matrix(_parts: list[Any]) -> Any:
    raise CaptureError("a matrix of it has as many rows as there are tokens")


def _side_by_side(found: Sequence[Sequence[Any]]) -> list[tuple[Any, ...]]:
    _check(_alike([len(one) for one in found]), "more or less of something")
    return list(zip(*found, strict=True))


def _alike(found: Sequence[Any]) -> bool:
    return all(one == found[0] for one in found[1:])


def _same(one: Buffer, other: Buffer) -> bool:
    """Whether both have the same numbers, and are constants."""
    a, b = tensor_of(one), tensor_of(other)
    return one.address == other.address or (a.shape == b.shape and a.dtype is b.dtype and torch.equal(a, b))


def _check(good: bool, what: str) -> None:
    if not good:
        raise CaptureError(f"with another number of rows it has {what}")
