"""Tables of what a step computes from positions alone, above all the cosines and sines of rotary embeddings.

    positions -> float, times frequencies, cat, cos, times, to bfloat16   ->   a row of a table for each token
                                           sin, times, to bfloat16

These are some dozen calls of a step that compute next to nothing. A model's table is made by these same calls, for many
positions at once. That is bit-identical if a row depends on its own position only, which is tested before the table is
used: with positions in another order and among others, and by each recording with its own positions. Calls that fail
the test are not replaced; nor are those of complex numbers, or of modes in which bits may depend on neighbours.
Positions beyond the table are computed by the traced calls.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import prod
from operator import itemgetter
from typing import Any, Final

import torch
from torch import Tensor

from stowage.executor.replay.calls.call_list import PART, WHOLE, TracedCall, TracedStep
from stowage.executor.replay.calls.recordable import ALLOWED, flat

_BYTES_MOST: Final = 8 << 20
"""Of a model's table: 16,384 positions of heads of 128 numbers in bfloat16."""
_ROWS_LEAST: Final = 256
_CALLS_LEAST: Final = 4
"""Fewer calls take no longer than a look-up."""


@dataclass(frozen=True, slots=True)
class _Calls:
    """The calls of a step that depend on the value ``positions`` alone; ``results``: those that other calls use."""

    calls: tuple[TracedCall, ...]
    values: tuple[Any, ...]
    positions: int
    results: tuple[int, ...]

    def __call__(self, positions: Tensor) -> list[Tensor]:
        values = list(self.values)
        values[self.positions] = positions
        for call in self.calls:
            values[call.result] = call.function(*(values[index] for index in call.arguments))
        return [values[index] for index in self.results]


class PositionTables:
    """The table of one model, made by the first recording that has such calls. One thread uses it."""

    def __init__(self) -> None:
        self._made_by: _Calls | None = None
        self._along = 1
        self._dims: list[int] = []
        """For each result, the dimension along which there is a row for each position."""
        self._results: list[Tensor] = []
        """The table, a tensor for each result: rows of positions from 0 on."""
        self._row_bytes = 0
        self._addresses: list[int] = []
        """Of the tensors of the table."""
        self._beyond: list[Tensor] = []
        """What the last step read that went beyond the table."""

    @property
    def nbytes(self) -> int:
        """Memory of the table."""
        return sum(one.nbytes for one in self._results)

    def looked_up(self, step: TracedStep, positions: int, along: int) -> TracedStep:
        """``step`` with one look-up instead of all calls that depend on the value ``positions`` alone, a tensor of two
        dimensions with the tokens ``along`` one of them. Unchanged where the look-up would not give the same numbers.
        """
        own, fixed = _depending(step, positions)
        if len(own) < _CALLS_LEAST:
            return step
        calls = tuple(step.calls[number] for number in sorted(own | fixed))
        found = _Calls(calls, step.values, positions, _asked(step, own))
        if not self._serves(found, step, along):
            return step
        together, first = len(step.values), min(own)
        asked = [TracedCall(itemgetter(n), (together,), index, PART) for n, index in enumerate(found.results)]
        rest = [call for number, call in enumerate(step.calls) if number > first and number not in own]
        made = [*step.calls[:first], TracedCall(self.rows, (positions,), together), *asked, *rest]
        objects = step.objects | {together: tuple(step.objects[index] for index in found.results)}
        return replace(step, calls=_needed(made, step.result), values=(*step.values, None), objects=objects)

    def rows(self, positions: Tensor) -> list[Tensor]:
        """The results of the calls for ``positions``."""
        if not self._reaches(int(positions.numpy().max())):  # torch takes longer for so few
            assert self._made_by is not None, "who looks up has seen the table"
            return self._made_by(positions)
        wanted = positions.view(-1)
        return [one.index_select(dim, wanted) for one, dim in zip(self._results, self._dims, strict=True)]

    @property
    def in_rows(self) -> bool:
        """Whether each tensor of the table is one row after the other, each of contiguous numbers."""
        return all(prod(one.shape[:dim]) == 1 for one, dim in zip(self._results, self._dims, strict=True))

    def addresses(self, positions: Tensor, furthest: int) -> list[int]:
        """Of numbers of rows, one for each of ``positions`` ``[tokens]``, of which ``furthest`` is the last, and of
        tensors that have these rows (see ``in_rows``), one for each result. Valid until the next call.
        """
        if self._reaches(furthest):
            return [positions.data_ptr(), *self._addresses]
        assert self._made_by is not None, "who looks up has seen the table"
        made = self._made_by(positions.unsqueeze(1 - self._along))
        self._beyond = [torch.arange(len(positions)), *(one.contiguous() for one in made)]
        return [one.data_ptr() for one in self._beyond]

    def _serves(self, calls: _Calls, step: TracedStep, along: int) -> bool:
        """Whether the table has the results of ``calls`` in ``step``."""
        here = step.objects[calls.positions]
        found: list[Any] = [step.objects.get(index) for index in calls.results]
        if not found or not all(isinstance(one, Tensor) for one in found):
            return False
        if self._made_by is None and not self._begin(calls, here, found, along):
            return False
        if len(found) != len(self._dims) or not self._reaches(int(here.max())):
            return False
        return all(_same(*pair) for pair in zip(self.rows(here), found, strict=True))

    def _begin(self, calls: _Calls, here: Tensor, found: Sequence[Any], along: int) -> bool:
        """Make the table. Returns whether each row depends on its own position only, not on its neighbours or order."""
        count = here.numel()
        order = torch.cat([here.reshape(-1).flip(0), here.new_zeros(1)])
        try:
            tried = calls(order.unsqueeze(1 - along))
        except (RuntimeError, TypeError, IndexError):  # the trace works for its own number of tokens only
            return False
        dims = [_dim(one, other, count) for one, other in zip(found, tried, strict=True)]
        for one, other, dim in zip(found, tried, dims, strict=True):
            if dim < 0 or not _same(one, other.narrow(dim, 0, count).flip(dim)):
                return False
        self._made_by, self._along, self._dims = calls, along, dims
        self._results = [one.narrow(dim, 0, 0) for one, dim in zip(tried, dims, strict=True)]
        self._row_bytes = sum(one.nbytes for one in found) // count
        return True

    def _reaches(self, position: int) -> bool:
        """Whether the table has a row for ``position``; it grows where it may."""
        if position < self._results[0].shape[self._dims[0]]:
            return True
        rows = max(_ROWS_LEAST, 1 << position.bit_length())
        if rows * self._row_bytes > _BYTES_MOST or self._made_by is None:
            return False
        made = self._made_by(torch.arange(rows).unsqueeze(1 - self._along))
        self._results = [one.contiguous() for one in made]
        self._addresses = [one.data_ptr() for one in self._results]
        return True


def _depending(step: TracedStep, positions: int) -> tuple[set[int], set[int]]:
    """The calls of ``step`` that depend on ``positions`` and no other input, and the constant calls that they need.
    Views that only other calls use are not among them.
    """
    unknown = ({*step.given, *step.states} | {call.result for call in step.calls}) - {positions}
    changed = {_storage(one) for call in step.calls if not _is_pure(call) for one in _tensors(step, call)}
    changed.discard(_storage(step.objects[positions]))  # a step does not change its inputs
    depends = {positions}
    found: list[int] = []
    for number, call in enumerate(step.calls):
        if not _is_pure(call) or not unknown.isdisjoint(call.arguments):
            continue
        if any(_storage(one) in changed or _is_complex(one) for one in _tensors(step, call)):
            continue
        if _is_complex(step.objects.get(call.result)):
            continue
        unknown.discard(call.result)
        found.append(number)
        if not depends.isdisjoint(call.arguments):
            depends.add(call.result)
    own: set[int] = set()
    fixed: set[int] = set()
    wanted: set[int] = set()
    for number in reversed(found):
        call = step.calls[number]
        if call.result in wanted or (call.result in depends and not _is_view(step, call)):
            (own if call.result in depends else fixed).add(number)
            wanted.update(call.arguments)
    return own, fixed


def _asked(step: TracedStep, numbers: set[int]) -> tuple[int, ...]:
    """The results of the calls ``numbers`` that others need."""
    others = {index for n, call in enumerate(step.calls) if n not in numbers for index in call.arguments}
    others.add(step.result)
    return tuple(index for index in (step.calls[number].result for number in sorted(numbers)) if index in others)


def _needed(calls: Sequence[TracedCall], result: int) -> tuple[TracedCall, ...]:
    """``calls`` without those whose results nothing needs any more."""
    wanted, kept = {result}, []
    for call in reversed(calls):
        if not _is_pure(call) or call.result in wanted:
            wanted.update(call.arguments)
            kept.append(call)
    return tuple(reversed(kept))


def _is_pure(call: TracedCall) -> bool:
    """Whether the call is a pure function of its arguments."""
    return call.name in ALLOWED or call.name in (PART, WHOLE)


def _is_view(step: TracedStep, call: TracedCall) -> bool:
    found = step.objects.get(call.result)
    return isinstance(found, Tensor) and _storage(found) in map(_storage, _tensors(step, call))


def _is_complex(found: Any) -> bool:
    """Whether it is a complex tensor: torch multiplies these in ways that round differently."""
    return isinstance(found, Tensor) and found.is_complex()


def _tensors(step: TracedStep, call: TracedCall) -> list[Tensor]:
    """The tensors among the call's arguments."""
    values = [step.objects.get(index, step.values[index]) for index in call.arguments]
    return [value for value in flat(values) if isinstance(value, Tensor)]


def _storage(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _same(one: Tensor, other: Tensor) -> bool:
    return one.dtype is other.dtype and torch.equal(one, other)


def _dim(one: Tensor, more: Tensor, count: int) -> int:
    """The only dimension in which the shapes differ, ``one`` having ``count`` rows and ``more`` one more; else -1."""
    if one.dim() != more.dim() or one.dtype is not more.dtype:
        return -1
    other = [dim for dim in range(one.dim()) if one.shape[dim] != more.shape[dim]]
    fits = len(other) == 1 and one.shape[other[0]] == count and more.shape[other[0]] == count + 1
    return other[0] if fits else -1
