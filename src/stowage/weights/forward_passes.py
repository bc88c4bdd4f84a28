"""Runs the forwards of a model with offloaded weights, one at a time, and recovers after one that failed.

Owns the lock on the weights, and whether recovery is needed. A forward that ends with an error or an interrupt may
leave anything behind: parameters that point at delivered weights, slots in use, reads in flight, tables half written.
It repairs nothing itself. The next forward calls ``recover`` before it begins, which resets everything. An interrupt of
``recover`` is harmless: it is called again.
"""

from __future__ import annotations

import contextlib
import functools
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextvars import ContextVar
from types import FrameType
from typing import Any, Final, Protocol

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from stowage.errors import ModelError
from stowage.weights.forward_lock import Claim, ForwardLock
from stowage.weights.gradients import asked_of, asking, storage_of, without

Deliver = Callable[..., Tensor | None]
"""Delivers a module's weights, given its tensor arguments. Returns a replacement for the first argument, or None."""

_COMPILED: Final = (
    "offloaded weights are not where a compiled graph would look for them, so the model computes as it is written. "
    "For a compiled or exported graph load the model without a budget, or with weights='*=resident'."
)
_INTERRUPTED: Final = (
    "the weights of this forward were taken away while it computed, so it has no answer: call it again."
)


class PassCallbacks(Protocol):
    """What the owner of the weights does around forwards."""

    def recover(self, *, forked: bool) -> None:
        """Reset what a failed forward left behind. ``forked``: this process was forked, so it has no readers."""

    def hide(self) -> None:
        """Offload every parameter that points at delivered weights."""

    def begin_pass(self) -> None:
        """A forward of the whole model begins."""

    def end_pass(self, whole: bool) -> None:
        """It has ended: ``whole``, or with an error."""


class ForwardRecorder(Protocol):
    """Records what a forward does, so that it can be replayed without the model's own code."""

    def arrive(self, bring: Deliver, given: Sequence[Tensor], weights: Sequence[nn.Parameter]) -> Tensor | None:
        """Call ``bring``, which delivers ``weights``. They are valid until ``leave``."""

    def leave(self, take_back: Callable[[], None], weights: Sequence[nn.Parameter]) -> None:
        """Call ``take_back``, which releases them."""


_writer: ContextVar[ForwardRecorder | None] = ContextVar("stowage_writer", default=None)


@contextlib.contextmanager
def recorded_by(writer: ForwardRecorder) -> Iterator[None]:
    """Inside the context, ``writer`` records the forwards of this thread."""
    token = _writer.set(writer)
    try:
        yield
    finally:
        _writer.reset(token)


class ForwardPasses:
    """The forwards of one model."""

    def __init__(self, delivery: PassCallbacks, unfrozen: Callable[[], bool] = lambda: False) -> None:
        """``unfrozen``: whether any parameter of the model requires gradients."""
        self._unfrozen = unfrozen
        self.lock = ForwardLock()
        self.closed = False
        self.passes, self.forward_s = 0, 0.0
        self._callbacks = delivery
        self._pid = os.getpid()
        self._needs_recovery = False
        self._changing = False
        self._shown = 0
        self.differentiates = False
        """Whether the running forward computes gradients, or a backward pass is running."""
        self.backward: Claim | None = None
        """The claim of the running backward pass."""

    # Whole forwards, and whatever else needs the weights exclusively

    @contextlib.contextmanager
    def exclusive(self) -> Any:
        """Context: no forward runs meanwhile. Raises ModelError, as `ForwardLock.acquire` does."""
        frame = sys._getframe(2)  # of the function with the ``with`` statement: it runs until the lock is released
        claim = self._enter(frame)
        whole = False
        try:
            yield
            whole = True
        finally:
            self._leave(claim, whole)

    def wrap(self, forward: Callable[..., Any], learns: Callable[[Any], Any]) -> Callable[..., Any]:
        """``forward`` of the whole model, with the lock held. With gradients switched on, ``learns(arguments)`` returns
        what to wrap a forward in that computes gradients, or ``None`` for one that does not: then ``backward()`` from
        its output raises ModelError, or the forward does where a hook adds what requires gradients to a frozen model.
        ``learns`` may raise, too.
        """

        @functools.partial(torch.compiler.disable, reason=_COMPILED)
        def locked(*args: Any, **kwargs: Any) -> Any:
            gradients, casts = torch.is_grad_enabled(), torch.is_autocast_cache_enabled()
            within = learns((args, kwargs)) if gradients else None
            refused = gradients and within is None and self._unfrozen()
            try:
                torch._C._set_grad_enabled(gradients and not refused)
                torch.set_autocast_cache_enabled(False)  # the cache would keep a copy of every weight
                output = self.run(sys._getframe(), forward if within is None else within(forward), args, kwargs)
            finally:  # first, and in one step: an interrupt comes before or after it
                torch._C._set_grad_enabled(gradients)
                torch.set_autocast_cache_enabled(casts)
            return without(output, list(asking((args, kwargs)))) if refused else output

        @functools.wraps(forward)
        def called(*args: Any, **kwargs: Any) -> Any:  # a compiler looks in here, and finds the reason not to compile
            return locked(*args, **kwargs)

        return called

    def run(self, frame: FrameType, forward: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Run ``forward`` of the whole model, with the lock held until ``frame`` has ended. Returns its output."""
        claim = self._enter(frame)
        whole, began_s = False, time.perf_counter()
        try:
            self._callbacks.begin_pass()
            output = forward(*args, **kwargs)
            if self._changing or self.lock.held() is not claim:
                raise ModelError(_INTERRUPTED)
            whole = True
            return output
        finally:
            self.passes += 1
            self.forward_s += time.perf_counter() - began_s
            self._callbacks.end_pass(whole)
            self._leave(claim, whole)

    def _enter(self, frame: FrameType) -> Claim:
        if self.closed:
            raise ModelError("the weights of this model were closed: load it again.")
        claim = self.lock.acquire(frame)
        try:
            if self.closed:
                raise ModelError("the weights of this model were closed: load it again.")
            forked = self._pid != os.getpid()
            if self._needs_recovery or forked:
                self._needs_recovery = True
                self._callbacks.recover(forked=forked)
                self._shown, self._changing, self._pid = 0, False, os.getpid()
            self._needs_recovery, self.differentiates, self.backward = True, False, None
        except BaseException:
            self.lock.release(claim)
            raise
        return claim

    def _leave(self, claim: Claim, whole: bool) -> None:
        if self.lock.held() is claim:
            if whole and not self._changing and not self._shown:
                self._needs_recovery = False
            else:
                self._callbacks.hide()
        self.lock.release(claim)

    def begin_backward(self, end: Callable[[], None]) -> None:
        """Hold the lock for this thread's backward pass until autograd's call returns. ``end`` is called when that
        succeeded. Does nothing if the pass has the lock already. Raises ModelError inside a forward.
        """
        held = self.lock.held()
        if held is not None and held is self.backward:
            return
        claim = self._enter(_differentiates())
        self.differentiates, self.backward = True, claim

        def ended() -> None:
            if self.lock.held() is claim and self.backward is claim:
                end()
                self.backward = None
                self._leave(claim, True)

        torch.autograd.Variable._execution_engine.queue_callback(ended)

    def stop(self, frame: FrameType) -> Claim:
        """Wait for the running forward, and let none begin any more. The caller may keep the lock."""
        claim = self.lock.acquire(frame, waits=True)
        self.closed = True
        return claim

    # Modules that get weights

    def hooks(
        self,
        bring: Callable[[Any, Any], Any],
        take_back: Callable[[], None],
        weights: Sequence[nn.Parameter] = (),
        *,
        asks: bool = False,
    ) -> tuple[Callable[..., Any], Callable[..., Any]]:
        """Hooks before and after a module's forward: ``bring`` delivers its ``weights``, and ``take_back`` releases
        them. ``asks``: ``bring`` reads the module's arguments. A module that is called by itself takes the lock itself.
        """
        claim: Claim | None = None
        own = False

        def come(module: Any, args: Any, kwargs: Any) -> Any:
            nonlocal claim, own
            held = self.lock.held()
            if torch.is_grad_enabled() and (held is None or not self.differentiates):
                _refuse_gradients(module, (args, kwargs))
            here = held or self._enter(_caller())
            if self._changing:
                raise ModelError(_INTERRUPTED)
            claim, own = here, held is None
            self._changing = True
            found = bring(args, kwargs)
            self._shown += 1
            self._changing = False
            return found

        def go(output: Any) -> Any:
            nonlocal claim
            mine, held = claim, self.lock.held()
            if mine is None or held is not mine or self._changing:  # after a failure everything is reset together
                if held is not None and held is mine and own:
                    claim = None
                    self._leave(mine, False)
                elif output is not None:
                    raise ModelError(_INTERRUPTED)
                return None
            claim = None
            self._changing = True
            kept = _apart(output, weights)
            take_back()
            self._shown -= 1
            self._changing = False
            if own:
                self._leave(mine, output is not None)
            return kept

        def before(module: Any, args: Any, kwargs: Any) -> Any:
            writer = _writer.get()
            if writer is None:
                return come(module, args, kwargs)

            def again(*given: Tensor) -> Tensor | None:
                found = come(module, given, {})
                return None if found is None else found[0][0]

            given = [value for value in (*args, *kwargs.values()) if asks and isinstance(value, Tensor)]
            found = writer.arrive(again, given, weights)
            return None if found is None else ((found, *args[1:]), kwargs)

        def after(_module: Any, _args: Any, _kwargs: Any, output: Any) -> Any:
            writer = _writer.get()
            if writer is None or output is None:
                return go(output)
            writer.leave(functools.partial(go, True), weights)
            return None

        return before, after


def _apart(output: Any, weights: Sequence[nn.Parameter]) -> Any:
    """``output`` of a module, with copies of the tensors in it that lie in its ``weights``, as Perceiver's latents do:
    other weights are delivered into that memory next. ``None``: there are none.
    """
    with torch._C.DisableTorchFunction():
        parts = {storage_of(part) for part in pytree.tree_leaves(output) if isinstance(part, Tensor)} - {0}
        memory = parts.intersection(map(storage_of, weights)) if parts else parts
        if not memory:
            return None
        return pytree.tree_map_only(Tensor, lambda part: _copy(part) if storage_of(part) in memory else part, output)


def _copy(view: Tensor) -> Tensor:
    """With the strides of ``view``, by which kernels are chosen, of no more of its memory than it shows."""
    span = 1 + sum((size - 1) * stride for size, stride in zip(view.size(), view.stride(), strict=True))
    shown = view.detach().as_strided((span if view.numel() else 0,), (1,))
    return shown.clone().as_strided(view.size(), view.stride(), 0)


def _refuse_gradients(module: Any, given: Any) -> None:
    """Raise ModelError if gradients are expected of ``module``, called by itself or in a forward without gradients: in
    a backward pass its weights would be somewhere else. Frozen modules with plain inputs pass.
    """
    if asked_of(given) or (module is not None and any(p.requires_grad for p in module.parameters())):
        raise ModelError(
            "offloaded weights have no gradients: call the whole model, or this part of it under torch.no_grad()."
        )


def _differentiates() -> FrameType:
    """The frame of autograd's outermost call: it runs until all gradients are computed."""
    found, frame = None, sys._getframe(1).f_back
    while frame is not None:
        found = frame if frame.f_code.co_name == "_engine_run_backward" else found
        frame = frame.f_back
    if found is None:
        raise ModelError(
            "offloaded weights are needed by a backward pass that this thread did not begin: compute gradients with "
            " loss.backward() or torch.autograd.grad()."
        )
    return found


def _caller() -> FrameType:
    """The frame of torch's call of the hooked module, around its forward and all of its hooks."""
    frame = sys._getframe(3)  # the caller of ``before`` in ``ForwardPasses.hooks``, which called ``come``
    while frame.f_code.co_name == "inner" and frame.f_back is not None:
        frame = frame.f_back
    return frame
