"""A traced step, and the list of calls that replays it.

Owns the form of both, and how long each value is kept. ``recording`` makes traces.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from operator import itemgetter
from typing import Any, NamedTuple

from torch import Tensor

from stowage.executor import kernels
from stowage.executor.fused.recurrent_kernels import StateRows


@dataclass(frozen=True, slots=True)
class _Call:
    """One call of a list: ``values[result] = function(*pick(values))``; afterwards the values ``over`` are dead."""

    function: Callable[..., Any]
    pick: Callable[[list[Any]], tuple[Any, ...]]
    result: int
    over: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class RecordedCalls:
    """The calls of a step. ``values``: the constants, with empty slots for all else; ``given``: the slots of a step's
    input tensors; ``result``: the slot of its logits; ``in_place``: the calls for states that are passed as
    ``StateRows``; ``None``: some call needs states as tensors.
    """

    calls: tuple[_Call, ...]
    values: tuple[Any, ...]
    given: tuple[int, ...]
    result: int
    in_place: tuple[_Call, ...] | None

    def replay(self, given: Sequence[Tensor | StateRows], *, in_place: bool = False) -> Tensor:
        """Make the calls, or those of ``in_place``, and return the logits."""
        values = list(self.values)
        for index, tensor in zip(self.given, given, strict=True):
            values[index] = tensor
        calls = self.in_place if in_place else self.calls
        assert calls is not None, "states are gathered for these calls"
        for call in calls:
            values[call.result] = call.function(*call.pick(values))
            for index in call.over:
                values[index] = None
        logits: Tensor = values[self.result]
        return logits


PART, WHOLE, ARRIVAL = "part of a tuple", "tuple of parts", "weights that come"


class TracedCall(NamedTuple):
    """One call of a trace: ``values[result] = function(*(values[index] for index in arguments))``. ``name``: of a torch
    function that does not change its arguments; ``"linear"``: several linear layers; ``PART``, ``WHOLE``: takes a value
    out of a tuple, or makes a tuple of values; ``ARRIVAL``: delivers offloaded weights, which are valid for a while.
    """

    function: Callable[..., Any]
    arguments: tuple[int, ...]
    result: int
    name: str = ""


@dataclass(frozen=True, slots=True)
class TracedStep:
    """The trace of one step. ``values``, ``given`` and ``result`` as in ``RecordedCalls``; ``objects``: by slot, the
    tensors of the traced step itself; ``states``: slots of the inputs that the step changes; ``idle``: results of calls
    that are left out where states are changed in their pools; ``None``: they cannot be.
    """

    calls: tuple[TracedCall, ...]
    values: tuple[Any, ...]
    objects: dict[int, Any]
    given: tuple[int, ...]
    states: frozenset[int]
    result: int
    idle: frozenset[int] | None


def compact(step: TracedStep) -> TracedStep:
    """``step`` with the values alone that its calls give and take: a list copies all of them in each replay."""
    used = {index for call in step.calls for index in (*call.arguments, call.result)}
    slots = sorted(used | {*step.given, step.result})
    new = {index: at for at, index in enumerate(slots)}
    calls = tuple(
        call._replace(arguments=tuple(new[index] for index in call.arguments), result=new[call.result])
        for call in step.calls
    )
    return replace(
        step,
        calls=calls,
        values=tuple(step.values[index] for index in slots),
        given=tuple(new[index] for index in step.given),
        result=new[step.result],
        objects={},
        states=frozenset(),
        idle=None if step.idle is None else frozenset(new[index] for index in step.idle if index in new),
    )


def listed(step: TracedStep) -> RecordedCalls:
    """``step`` as a list that can be replayed."""
    last = {index: at for at, call in enumerate(step.calls) for index in (*call.arguments, call.result)}
    made = {call.result for call in step.calls} | set(step.given)
    over: dict[int, list[int]] = {}
    for index, at in last.items():
        if index in made and index != step.result:
            over.setdefault(at, []).append(index)
    calls = tuple(
        _Call(call.function, _picker(call.arguments), call.result, tuple(over.get(at, ())))
        for at, call in enumerate(step.calls)
    )
    idle = step.idle
    in_place = None if idle is None else tuple(call for call in calls if call.result not in idle)
    return RecordedCalls(calls, step.values, step.given, step.result, in_place)


def linears(x: Tensor, *weights: Tensor) -> list[Tensor]:
    """Several linear layers of one input, in one call of the kernels."""
    return kernels.linears(x, [kernels.of_plain(weight) for weight in weights])


def arguments_of(function: Any, given: Sequence[Any]) -> tuple[Any, list[Any], dict[str, Any]]:
    """The function behind a traced ``function``, with the arguments that it gets for ``given``."""
    args, named = list(given), {}
    if isinstance(function, partial) and function.func is with_names:
        function, names = function.args
        named, args = dict(zip(names, args, strict=False)), args[len(names) :]
    if isinstance(function, partial) and not function.args:
        function, named = function.func, {**function.keywords, **named}
    return function, args, named


def gather_list(*values: Any) -> list[Any]:
    """``values`` as a list."""
    return list(values)


def gather_tuple(*values: Any) -> tuple[Any, ...]:
    """``values`` as a tuple."""
    return values


def with_names(function: Callable[..., Any], names: tuple[str, ...], *values: Any) -> Any:
    """Calls ``function``; the first of ``values`` are its keyword arguments ``names``, the others are positional."""
    return function(*values[len(names) :], **dict(zip(names, values, strict=False)))


def _picker(indices: tuple[int, ...]) -> Callable[[list[Any]], tuple[Any, ...]]:
    if not indices:
        return lambda values: ()
    if len(indices) == 1:
        return partial(_pick_one, indices[0])
    return itemgetter(*indices)


def _pick_one(index: int, values: list[Any]) -> tuple[Any, ...]:
    return (values[index],)
