"""What a model calls in a step, as a list of calls that can be replayed without the model's own Python.

Owns what may be in such a list: functions that are known to depend on nothing but their arguments, and whose results
have the same shape for arguments of the same shape. A model that does anything else is refused: it asks a tensor for a
number, changes a tensor that outlives the step, or uses one that is neither its parameter nor made in the step. A call
of the kernels, the pool or attention is one entry, whatever it does inside (``one_call``); they read the current step.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from functools import partial, wraps
from operator import itemgetter
from typing import Any, NamedTuple, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

from stowage.executor import kernels
from stowage.executor.determinism.row_invariance import RowInvariance
from stowage.executor.fused.recurrent_kernels import StateRows
from stowage.executor.replay.recordable import ALLOWED, IN_PLACE, MAKERS, MAKERS_LIKE, READS, flat, has_tensor, is_mask
from stowage.executor.replay.recorder import CaptureError

__all__ = [
    "PART",
    "WHOLE",
    "RecordedCalls",
    "WrittenCall",
    "WrittenStep",
    "linears_of",
    "listed",
    "one_call",
    "recorded",
]

_recording: ContextVar[_Recording | None] = ContextVar("stowage_recording", default=None)
_Function = TypeVar("_Function", bound=Callable[..., Any])


def one_call(function: _Function, *, in_place: bool = False) -> _Function:
    """``function`` is one call of a list, whatever it does inside: it may depend on the step, and on nothing else that
    changes. ``in_place``: it takes states wherever they lie (``StateRows``).
    """

    @wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        recording = _recording.get()
        if recording is None:
            return function(*args, **kwargs)
        return recording.call(function, args, kwargs, in_place)

    return call  # type: ignore[return-value]


@dataclass(frozen=True, slots=True)
class _Call:
    """``values[result] = function(*pick(values))``; afterwards the values ``over`` are not needed any more."""

    function: Callable[..., Any]
    pick: Callable[[list[Any]], tuple[Any, ...]]
    result: int
    over: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class RecordedCalls:
    """The calls of a step. ``values`` holds what never changes, and has room for the rest; ``given``: the indices of
    a step's own tensors in it; ``result``: that of its logits; ``in_place``: the calls where states are given as
    ``StateRows``; ``None``: some call needs them as tensors.
    """

    calls: tuple[_Call, ...]
    values: tuple[Any, ...]
    given: tuple[int, ...]
    result: int
    in_place: tuple[_Call, ...] | None

    def replay(self, given: Sequence[Tensor | StateRows], *, in_place: bool = False) -> Tensor:
        """Make the calls (``in_place``: those), and return the logits."""
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


PART, WHOLE = "part of a tuple", "tuple of parts"


class WrittenCall(NamedTuple):
    """``values[result] = function(*(values[index] for index in arguments))``. ``name``: that of torch's function, if it
    is one that leaves its arguments as they are, or ``"linear"`` of several layers; ``PART``, ``WHOLE``: it takes a
    value out of a tuple, or makes a tuple of values.
    """

    function: Callable[..., Any]
    arguments: tuple[int, ...]
    result: int
    name: str = ""


@dataclass(frozen=True, slots=True)
class WrittenStep:
    """The calls of one step. ``values``, ``given`` and ``result`` as in ``RecordedCalls``; ``objects``: by their index,
    the tensors of this very step; ``states``: indices of those that were given to be changed; ``idle``: results of
    calls that do nothing where states are changed as they lie; ``None``: they cannot be.
    """

    calls: tuple[WrittenCall, ...]
    values: tuple[Any, ...]
    objects: dict[int, Any]
    given: tuple[int, ...]
    states: frozenset[int]
    result: int
    idle: frozenset[int] | None


def listed(step: WrittenStep) -> RecordedCalls:
    """``step`` as calls that can be made again."""
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


class _Recording(TorchFunctionMode):
    """Writes down what is called. ``given``: the step's own tensors; ``states``: those that it changes; ``kept``: by
    ``id``, what stays as it is; ``mode``: what is computed otherwise than torch does.
    """

    def __init__(
        self, given: Sequence[Tensor], states: Sequence[Tensor], kept: dict[int, Tensor], mode: RowInvariance | None
    ) -> None:
        super().__init__()
        self._kept = kept
        self._mode = mode
        self._why: str | None = None
        self._x: Tensor | None = None
        self._ready: dict[int, Tensor] = {}
        """By weight: what fused linear layers gave for ``_x`` already."""
        self._values: list[Any] = []
        self._index_of: dict[int, int] = {}
        self._objects: dict[int, Any] = {}
        """By index: everything that has an ``id`` of its own, so that no other one gets it."""
        self._calls: list[WrittenCall] = []
        self._in_place: set[int] = set()
        """Of the calls, those that take states wherever they lie."""
        self._idle: set[int] = set()
        """Those that do nothing: a copy of a tensor to itself, a conversion to the type that it has."""
        self._given = tuple(self._put(tensor, None) for tensor in (*given, *states))
        self._states = frozenset(self._given[len(given) :])
        self._lasting = {tensor.untyped_storage().data_ptr() for tensor in (*given, *kept.values())}

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(func, "__name__", "")
        kwargs = kwargs or {}
        if name in READS:
            found = func(*args, **kwargs)
            if not isinstance(found, Tensor):
                return found
        changes = name in IN_PLACE or bool(kwargs.get("inplace"))
        if why := self._against(func, name, args, kwargs, changes):
            raise self._refuse(why)
        if func is F.linear and not kwargs and all(arg is None for arg in args[2:]):
            together = self._together(*args[:2])
            if together is not None:
                return together
        function = func if self._mode is None else self._mode.instead_of(func)
        return self._did(function, args, kwargs, function(*args, **kwargs), name="" if changes else name)

    def _against(self, func: Any, name: str, args: tuple[Any, ...], kwargs: dict[str, Any], changes: bool) -> str:
        """Why this call, which ``changes`` its first argument, cannot be in a list, if it cannot."""
        counts = [*args[name in MAKERS_LIKE :], *kwargs.values()]
        elsewhere = kwargs.get("out") is not None
        if name not in (IN_PLACE if changes else ALLOWED) or elsewhere or (name == "where" and not args[2:]):
            return f"it calls {name or func}"
        if changes and args[0].untyped_storage().data_ptr() in self._lasting:
            return "it changes what is not the step's own"
        if name in ("__getitem__", "__setitem__") and any(is_mask(part) for part in flat(args[1:2])):
            return "it picks by a mask"
        makes = name in MAKERS or name in MAKERS_LIKE
        if makes and (has_tensor(counts) or (name == "one_hot" and not counts)):
            return "it makes as much as a tensor says"
        return ""

    def call(
        self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], in_place: bool = False
    ) -> Any:
        """Call ``function``, and write it down as one call; ``in_place``: as in ``one_call``."""
        token = _recording.set(None)
        try:
            with torch._C.DisableTorchFunction():
                found = function(*args, **kwargs)
        finally:
            _recording.reset(token)
        return self._did(function, args, kwargs, found, in_place)

    def _together(self, x: Tensor, weight: Tensor) -> Tensor | None:
        """What a linear layer gives, if it is known which ones are computed with it: all of them are, now."""
        found = self._ready.pop(id(weight), None) if x is self._x else None
        if found is not None:
            return found
        fused = () if self._mode is None else self._mode.fused(x, weight)
        if not fused:
            return None
        together = partial(_linears, fused)
        outs: list[Tensor] = self._did(together, (x,), {}, together(x), name="linear")
        self._x, self._ready = x, {id(other): out for other, out in zip(fused[1:], outs[1:], strict=True)}
        return outs[0]

    def _did(
        self,
        function: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        found: Any,
        in_place: bool = False,
        name: str = "",
    ) -> Any:
        """Write down that ``function`` was called and gave ``found``; ``name``: as in ``WrittenCall``."""
        idle = (
            bool(args)
            and found is args[0]
            and (function is Tensor.to or (function is Tensor.copy_ and args[1] is found))
        )
        named = {name: value for name, value in kwargs.items() if has_tensor(value)}
        rest = {name: value for name, value in kwargs.items() if name not in named}
        if rest:
            function = partial(function, **rest)
        if named:
            function = partial(_with_names, function, tuple(named))
        indices = tuple(self._bind(value) for value in (*named.values(), *args))
        if in_place:
            self._in_place.add(len(self._calls))
        if idle:
            self._idle.add(len(self._calls))
        if isinstance(found, Tensor):
            self._calls.append(WrittenCall(function, indices, self._put(found, None), name))
        elif isinstance(found, (tuple, list)):
            together = self._put(found, None)
            self._calls.append(WrittenCall(function, indices, together, name))
            for at, part in enumerate(found):
                if isinstance(part, Tensor) and id(part) not in self._index_of:
                    self._calls.append(WrittenCall(itemgetter(at), (together,), self._put(part, None), PART))
        elif found is None:
            self._values.append(None)
            self._calls.append(WrittenCall(function, indices, len(self._values) - 1))
        else:
            raise self._refuse(f"it asks for {getattr(function, '__name__', function)}")
        return found

    def end(self, logits: Tensor) -> WrittenStep:
        """What was written down; ``logits`` are what it was for."""
        if self._why is not None:  # the model has caught what was raised, and gone another way
            raise CaptureError(self._why)
        result = self._index_of.get(id(logits))
        if result is None:
            raise self._refuse("its logits do not come from a recorded call")
        calls, values = tuple(self._calls), tuple(self._values)
        return WrittenStep(calls, values, self._objects, self._given, self._states, result, self._idle_where_they_lie())

    def _idle_where_they_lie(self) -> frozenset[int] | None:
        """Results of calls that do nothing, and are not made, if states are not gathered. ``None``: other calls ask for
        states, or for what such a one gave.
        """
        taken = set(self._states)
        idle: set[int] = set()
        for at, call in enumerate(self._calls):
            if at in self._idle and call.arguments[0] in taken:
                taken.add(call.result)
                idle.add(call.result)
            elif taken.intersection(call.arguments) and (
                at not in self._in_place or not self._states >= taken & {*call.arguments}
            ):
                return None
        return frozenset(idle)

    def _refuse(self, why: str) -> CaptureError:
        self._why = why
        return CaptureError(why)

    def _bind(self, value: Any) -> int:
        """The index of an argument."""
        if isinstance(value, Tensor):
            index = self._index_of.get(id(value))
            if index is None:
                if id(value) not in self._kept:
                    raise self._refuse("it uses a tensor of its own that may change")
                index = self._put(value, value)
            return index
        if isinstance(value, (tuple, list)) and has_tensor(value):
            gathered = _gather_list if isinstance(value, list) else _gather_tuple
            indices = tuple(self._bind(part) for part in value)
            index = self._put(value, None)
            self._calls.append(WrittenCall(gathered, indices, index, WHOLE))
            return index
        if has_tensor(value):
            raise self._refuse(f"it hands tensors over in a {type(value).__name__}")
        self._values.append(value)
        return len(self._values) - 1

    def _put(self, value: Any, now: Any) -> int:
        """An index for ``value``; ``now``: what is there from the beginning."""
        self._values.append(now)
        self._objects[len(self._values) - 1] = value
        self._index_of[id(value)] = len(self._values) - 1
        return len(self._values) - 1


def recorded(
    forward: Callable[[], Tensor],
    given: Sequence[Tensor],
    states: Sequence[Tensor],
    kept: Sequence[Tensor],
    mode: RowInvariance | None,
) -> tuple[Tensor, WrittenStep]:
    """What ``forward`` gives, and the calls that it makes for that. ``given``: tensors that every step has of its own;
    ``states``: more of them, which it may change; ``kept``: what stays as it is; ``mode``: what is computed otherwise
    than torch does. Raises ``CaptureError``, perhaps after some of the calls were made.
    """
    recording = _Recording(given, states, {id(tensor): tensor for tensor in kept}, mode)
    token = _recording.set(recording)
    try:
        with recording:
            found = forward()
    finally:
        _recording.reset(token)
    return found, recording.end(found)


def _linears(weights: tuple[Tensor, ...], x: Tensor) -> list[Tensor]:
    return kernels.linears(x, weights) if len(weights) > 1 else [kernels.linear(x, weights[0])]


def linears_of(function: Any) -> tuple[Tensor, ...]:
    """The weights of the layers that ``function`` computes together, if it is one of this module that does so."""
    together = isinstance(function, partial) and function.func is _linears
    return function.args[0] if together else ()


def arguments_of(function: Any, given: Sequence[Any]) -> tuple[Any, list[Any], dict[str, Any]]:
    """The function that was called, and with what, if ``function`` was written down and is given these."""
    args, named = list(given), {}
    if isinstance(function, partial) and function.func is _with_names:
        function, names = function.args
        named, args = dict(zip(names, args, strict=False)), args[len(names) :]
    if isinstance(function, partial) and not function.args:
        function, named = function.func, {**function.keywords, **named}
    return function, args, named


def _picker(indices: tuple[int, ...]) -> Callable[[list[Any]], tuple[Any, ...]]:
    if not indices:
        return lambda values: ()
    if len(indices) == 1:
        return partial(_pick_one, indices[0])
    return itemgetter(*indices)


def _pick_one(index: int, values: list[Any]) -> tuple[Any, ...]:
    return (values[index],)


def _gather_list(*values: Any) -> list[Any]:
    return list(values)


def _gather_tuple(*values: Any) -> tuple[Any, ...]:
    return values


def _with_names(function: Callable[..., Any], names: tuple[str, ...], *values: Any) -> Any:
    return function(*values[len(names) :], **dict(zip(names, values, strict=False)))
