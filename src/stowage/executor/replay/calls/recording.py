"""Traces a step: the calls of torch, the kernels and the pool that a model makes, without the model's own Python.

Owns what may be in a trace: functions that are known to depend on nothing but their arguments, and whose results have
the same shape for arguments of the same shape. A model is refused that does anything else: that reads a tensor's value,
changes a tensor that outlives the step, or uses one that is neither its parameter nor made in the step. A call of the
kernels, the pool or attention is one entry, whatever it does inside (``one_call``); these read ``batch.current``.
Offloaded weights are delivered and released by calls of the trace, between which they are the result of a call.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextvars import ContextVar
from functools import partial, wraps
from operator import itemgetter
from typing import Any, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from stowage.executor.determinism.row_invariance import RowInvariance
from stowage.executor.replay.backend import CaptureError
from stowage.executor.replay.calls.call_list import (
    ARRIVAL,
    PART,
    WHOLE,
    TracedCall,
    TracedStep,
    gather_list,
    gather_tuple,
    linears,
    with_names,
)
from stowage.executor.replay.calls.recordable import (
    ALLOWED,
    IN_PLACE,
    MAKERS,
    MAKERS_LIKE,
    READS,
    flat,
    has_tensor,
    is_mask,
)
from stowage.weights.forward_passes import Deliver, recorded_by

_recording: ContextVar[_Recording | None] = ContextVar("stowage_recording", default=None)
_Function = TypeVar("_Function", bound=Callable[..., Any])


def one_call(function: _Function, *, in_place: bool = False) -> _Function:
    """Decorator: ``function`` is one call of a trace, whatever it does inside. It may depend on ``batch.current``, and
    on nothing else that changes. ``in_place``: it also takes states as rows of their pools (``StateRows``).
    """

    @wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        recording = _recording.get()
        if recording is None:
            return function(*args, **kwargs)
        return recording.call(function, args, kwargs, in_place)

    return call  # type: ignore[return-value]


class _Recording(TorchFunctionMode):
    """A ``ForwardRecorder``, which traces calls. ``given``: the step's input tensors; ``states``: inputs that it
    changes; ``kept``: constants, by ``id``; ``mode``: computes some functions in another way than torch does.
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
        """By ``id`` of weights: results of fused linear layers that were computed for ``_x`` already."""
        self._values: list[Any] = []
        self._index_of: dict[int, int] = {}
        self._shown: dict[int, Tensor] = {}
        """By ``id`` of delivered weights: the tensors that stand for them in the trace."""
        self._objects: dict[int, Any] = {}
        """By slot: the traced objects, kept alive so that no other object gets their ``id``."""
        self._calls: list[TracedCall] = []
        self._in_place: set[int] = set()
        """The calls that take states as rows of their pools."""
        self._idle: set[int] = set()
        """The calls without effect: a copy of a tensor to itself, a conversion to the type that it has."""
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
        """Why this call cannot be in a trace; empty where it can. ``changes``: it changes its first argument."""
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

    def call(self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], in_place: bool) -> Any:
        """Call ``function``, and trace it as one call; ``in_place``: as in ``one_call``."""
        token = _recording.set(None)
        try:
            with torch._C.DisableTorchFunction():
                found = function(*args, **kwargs)
        finally:
            _recording.reset(token)
        return self._did(function, args, kwargs, found, in_place)

    def arrive(self, bring: Deliver, given: Sequence[Any], weights: Sequence[nn.Parameter]) -> Any:
        """See ``ForwardRecorder``. Delivered tensors stand for the weights in the trace until ``leave``: their memory
        belongs to other weights later in the step.
        """
        given = [value for value in given if isinstance(value, Tensor)]
        with torch._C.DisableTorchFunction():
            found = bring(*given)
            shown = [nn.Parameter(weight.data, requires_grad=False) for weight in weights]
        self._shown |= {id(weight): one for weight, one in zip(weights, shown, strict=True)}
        indices = tuple(self._bind(value) for value in given)
        together = self._put((found, *shown), None)
        self._calls.append(TracedCall(partial(_arrive, bring, weights), indices, together, ARRIVAL))
        for at, (part, stands_for_it) in enumerate(zip((found, *weights), (found, *shown), strict=True)):
            if part is not None:
                index = self._index_of[id(part)] = self._put(stands_for_it, None)
                self._calls.append(TracedCall(itemgetter(at), (together,), index, PART))
        return found

    def leave(self, take_back: Callable[[], None], weights: Sequence[nn.Parameter]) -> None:
        with torch._C.DisableTorchFunction():
            take_back()
        self._did(take_back, (), {}, None)
        for weight in weights:
            self._index_of.pop(id(weight), None)
            self._shown.pop(id(weight), None)

    def _together(self, x: Tensor, weight: Tensor) -> Tensor | None:
        """The result of a linear layer that belongs to a known group, all of which is computed at once; else None."""
        found = self._ready.pop(id(weight), None) if x is self._x else None
        if found is not None:
            return found
        fused = () if self._mode is None else self._mode.fused(x, weight)
        if not fused:
            return None
        outs: list[Tensor] = self._did(linears, (x, *fused), {}, linears(x, *fused), name="linear")
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
        """Trace that ``function`` was called and returned ``found``; ``name``: as in ``TracedCall``."""
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
            function = partial(with_names, function, tuple(named))
        indices = tuple(self._bind(value) for value in (*named.values(), *args))
        if in_place:
            self._in_place.add(len(self._calls))
        if idle:
            self._idle.add(len(self._calls))
        if isinstance(found, Tensor):
            self._calls.append(TracedCall(function, indices, self._put(found, None), name))
        elif isinstance(found, (tuple, list)):
            together = self._put(found, None)
            self._calls.append(TracedCall(function, indices, together, name))
            for at, part in enumerate(found):
                if isinstance(part, Tensor) and id(part) not in self._index_of:
                    self._calls.append(TracedCall(itemgetter(at), (together,), self._put(part, None), PART))
        elif found is None:
            self._values.append(None)
            self._calls.append(TracedCall(function, indices, len(self._values) - 1))
        else:
            raise self._refuse(f"it asks for {getattr(function, '__name__', function)}")
        return found

    def end(self, logits: Tensor) -> TracedStep:
        """The trace; ``logits``: its result."""
        if self._why is not None:  # the model has caught the CaptureError and gone on
            raise CaptureError(self._why)
        result = self._index_of.get(id(logits))
        if result is None:
            raise self._refuse("its logits do not come from a recorded call")
        calls, values = tuple(self._calls), tuple(self._values)
        return TracedStep(calls, values, self._objects, self._given, self._states, result, self._idle_where_they_lie())

    def _idle_where_they_lie(self) -> frozenset[int] | None:
        """Results of calls that are left out if states are not gathered. ``None``: other calls need states as tensors,
        or the results of such calls.
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
        self._why = self._why or why
        return CaptureError(why)

    def _bind(self, value: Any) -> int:
        """The slot of an argument."""
        if isinstance(value, Tensor):
            index = self._index_of.get(id(value))
            if index is None:
                if id(value) not in self._kept:
                    raise self._refuse("it uses a tensor of its own that may change")
                index = self._put(value, value)
            return index
        if isinstance(value, (tuple, list)) and has_tensor(value):
            gathered = gather_list if isinstance(value, list) else gather_tuple
            indices = tuple(self._bind(part) for part in value)
            index = self._put(value, None)
            self._calls.append(TracedCall(gathered, indices, index, WHOLE))
            return index
        if has_tensor(value):
            raise self._refuse(f"it hands tensors over in a {type(value).__name__}")
        self._values.append(value)
        return len(self._values) - 1

    def _put(self, value: Any, now: Any) -> int:
        """A slot for ``value``; ``now``: the slot's initial content."""
        self._values.append(now)
        self._objects[len(self._values) - 1] = self._shown.get(id(value), value)
        self._index_of[id(value)] = len(self._values) - 1
        return len(self._values) - 1


def recorded(
    forward: Callable[[], Tensor],
    given: Sequence[Tensor],
    states: Sequence[Tensor],
    kept: Sequence[Tensor],
    mode: RowInvariance | None,
) -> tuple[Tensor, TracedStep]:
    """The result of ``forward``, and its trace. ``given``: the step's input tensors; ``states``: inputs that it may
    change; ``kept``: constants; ``mode``: computes some functions in another way than torch does. Raises
    ``CaptureError``, possibly after part of ``forward`` has run.
    """
    recording = _Recording(given, states, {id(tensor): tensor for tensor in kept}, mode)
    token = _recording.set(recording)
    try:
        with recording, recorded_by(recording):
            found = forward()
    finally:
        _recording.reset(token)
    return found, recording.end(found)


def _arrive(bring: Deliver, weights: Sequence[nn.Parameter], *given: Tensor) -> tuple[Tensor | None, ...]:
    return bring(*given), *weights
