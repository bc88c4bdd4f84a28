"""Forwards of a model whose weights come and go: each has its turn from its begin to its end, however it ends.

Owns the turn and what is known of the state behind it. A forward that ends by an error or an interrupt may leave
anything behind: weights that are shown, slots that are lent, reads under way, tables half written. Nobody repairs that
in passing. The next forward finds it ``unsettled``, and before it begins everything is put back (``settle``), which
can be interrupted too, and is then done again.
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

from stowage.errors import ModelError
from stowage.weights.gradients import asked_of, without
from stowage.weights.turn import Claim, Turn

__all__ = ["Bring", "ForwardWriter", "PassHooks", "Passes", "written_by"]

Bring = Callable[..., Tensor | None]
"""Brings the weights of a module, of the tensors that it is given; what it is to be given in the place of the first."""

_COMPILED: Final = (
    "weights that come and go are not where a compiled graph would look for them, so the model computes as it is "
    "written. For a compiled or exported graph load the model without a budget, or with weights='*=resident'."
)
_INTERRUPTED: Final = (
    "the weights of this forward were taken away while it computed, so it has no answer: call it again."
)


class PassHooks(Protocol):
    """What happens around passes."""

    def settle(self, *, forked: bool) -> None:
        """Put everything back, whatever a forward left behind. ``forked``: this is a new process, without threads."""
        ...

    def hide(self) -> None:
        """Nothing is shown any more that comes and goes."""
        ...

    def begin_pass(self) -> None:
        """A forward of the whole model begins."""
        ...

    def end_pass(self, whole: bool) -> None:
        """It has ended, ``whole`` or with an error."""
        ...


class ForwardWriter(Protocol):
    """Writes down what a forward does, so that it can be done again without the model's own code."""

    def arrive(self, bring: Bring, given: Sequence[Tensor], weights: Sequence[nn.Parameter]) -> Tensor | None:
        """Call ``bring``, which shows ``weights`` until they ``leave``."""
        ...

    def leave(self, take_back: Callable[[], None], weights: Sequence[nn.Parameter]) -> None:
        """Call ``take_back``."""
        ...


_writer: ContextVar[ForwardWriter | None] = ContextVar("stowage_writer", default=None)


@contextlib.contextmanager
def written_by(writer: ForwardWriter) -> Iterator[None]:
    """Forwards of this thread are written down by ``writer``."""
    token = _writer.set(writer)
    try:
        yield
    finally:
        _writer.reset(token)


class Passes:
    """The forwards of one model."""

    def __init__(self, delivery: PassHooks, unfrozen: Callable[[], bool] = lambda: False) -> None:
        """``unfrozen``: whether the model has parameters of which somebody may expect gradients."""
        self._unfrozen = unfrozen
        self.turn = Turn()
        self.closed = False
        self.passes, self.forward_s = 0, 0.0
        self._delivery = delivery
        self._pid = os.getpid()
        self._unsettled = False
        self._changing = False
        self._shown = 0
        self.learns = False
        """Whether the forward that runs, or the backward pass, is one that something learns from."""
        self.backward: Claim | None = None
        """Of the backward pass that runs."""

    # Whole forwards, and whatever else needs the weights for itself

    @contextlib.contextmanager
    def own(self) -> Any:
        """This thread has the weights for itself, between forwards. Raises ModelError, as `Turn.take` does."""
        frame = sys._getframe(2)  # of the function that says ``with``: it runs until the weights are given back
        claim = self._enter(frame)
        whole = False
        try:
            yield
            whole = True
        finally:
            self._leave(claim, whole)

    def around(self, forward: Callable[..., Any], learns: Callable[[Any], Any]) -> Callable[..., Any]:
        """``forward`` of the whole model, in its turn. Where gradients are asked for, ``learns`` says, of the
        arguments, what wraps a forward that something learns from, or ``None`` where nothing does: then it has no
        gradients, and who goes back from its output is told. It may refuse.
        """

        @functools.partial(torch.compiler.disable, reason=_COMPILED)
        def in_turn(*args: Any, **kwargs: Any) -> Any:
            gradients, casts = torch.is_grad_enabled(), torch.is_autocast_cache_enabled()
            within = learns((args, kwargs)) if gradients else None
            try:
                torch._C._set_grad_enabled(within is not None)
                torch.set_autocast_cache_enabled(False)  # it would keep a copy of every weight
                output = self.run(sys._getframe(), forward if within is None else within(forward), args, kwargs)
            finally:  # first of all, and in one step: an interrupt comes before it or after
                torch._C._set_grad_enabled(gradients)
                torch.set_autocast_cache_enabled(casts)
            return without(output) if gradients and within is None and self._unfrozen() else output

        @functools.wraps(forward)
        def called(*args: Any, **kwargs: Any) -> Any:  # a compiler looks in here, and finds the reason
            return in_turn(*args, **kwargs)

        return called

    def run(self, frame: FrameType, forward: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """What ``forward`` gives, which is one of the whole model, in its turn. It is over when ``frame`` is."""
        claim = self._enter(frame)
        whole, began_s = False, time.perf_counter()
        try:
            self.learns = torch.is_grad_enabled()
            self._delivery.begin_pass()
            output = forward(*args, **kwargs)
            if self._changing or self.turn.held() is not claim:
                raise ModelError(_INTERRUPTED)
            whole = True
            return output
        finally:
            self.passes += 1
            self.forward_s += time.perf_counter() - began_s
            self._delivery.end_pass(whole)
            self._leave(claim, whole)

    def _enter(self, frame: FrameType) -> Claim:
        if self.closed:
            raise ModelError("the weights of this model were closed: load it again.")
        claim = self.turn.take(frame)
        try:
            if self.closed:
                raise ModelError("the weights of this model were closed: load it again.")
            forked = self._pid != os.getpid()
            if self._unsettled or forked:
                self._unsettled = True
                self._delivery.settle(forked=forked)
                self._shown, self._changing, self._pid = 0, False, os.getpid()
            self._unsettled, self.learns, self.backward = True, False, None
        except BaseException:
            self.turn.give_back(claim)
            raise
        return claim

    def _leave(self, claim: Claim, whole: bool) -> None:
        if self.turn.held() is claim:
            if whole and not self._changing and not self._shown:
                self._unsettled = False
            else:
                self._delivery.hide()
        self.turn.give_back(claim)

    def go_back(self, end: Callable[[], None]) -> None:
        """This thread is in a backward pass, which has its turn from now until autograd's call returns; ``end`` is
        called when it has gone well. Nothing, when it has its turn already. Raises ModelError inside of a forward.
        """
        held = self.turn.held()
        if held is not None and held is self.backward:
            return
        claim = self._enter(_differentiates())
        self.learns, self.backward = True, claim

        def ended() -> None:
            if self.turn.held() is claim and self.backward is claim:
                end()
                self.backward = None
                self._leave(claim, True)

        torch.autograd.Variable._execution_engine.queue_callback(ended)

    def end(self, frame: FrameType) -> Claim:
        """No forward begins any more, and none runs. The turn that this takes may be kept."""
        claim = self.turn.take(frame, waits=True)
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
        """Before and after the forward of a module: ``bring`` its ``weights``, of its arguments if it ``asks`` for
        them, and take them back. A module that is called by itself has a turn of its own.
        """
        claim: Claim | None = None
        own = False

        def come(module: Any, args: Any, kwargs: Any) -> Any:
            nonlocal claim, own
            held = self.turn.held()
            if torch.is_grad_enabled() and (held is None or not self.learns):
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

        def go(output: Any) -> None:
            nonlocal claim
            mine, held = claim, self.turn.held()
            if mine is None or held is not mine or self._changing:  # what failed is put back as a whole
                if held is not None and held is mine and own:
                    claim = None
                    self._leave(mine, False)
                elif output is not None:
                    raise ModelError(_INTERRUPTED)
                return
            claim = None
            self._changing = True
            take_back()
            self._shown -= 1
            self._changing = False
            if own:
                self._leave(mine, output is not None)

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

        def after(_module: Any, _args: Any, _kwargs: Any, output: Any) -> None:
            writer = _writer.get()
            if writer is None or output is None:
                go(output)
            else:
                writer.leave(functools.partial(go, True), weights)

        return before, after


def _refuse_gradients(module: Any, given: Any) -> None:
    """Backwards, the weights would be somewhere else. Of a ``module`` that is called by itself, or whose gradients
    somebody asks for inside of a forward that has none; what is frozen has none to be asked for.
    """
    if asked_of(given) or (module is not None and any(p.requires_grad for p in module.parameters())):
        raise ModelError(
            "weights that come and go have no gradients: call the whole model, or this part of it under "
            "torch.no_grad()."
        )


def _differentiates() -> FrameType:
    """The call that computes gradients, the outermost one: it runs until all of them are there."""
    found, frame = None, sys._getframe(1).f_back
    while frame is not None:
        found = frame if frame.f_code.co_name == "_engine_run_backward" else found
        frame = frame.f_back
    if found is None:
        raise ModelError(
            "weights that come and go are asked for by a backward pass that this thread did not begin: compute "
            "gradients with loss.backward() or torch.autograd.grad()."
        )
    return found


def _caller() -> FrameType:
    """The call of the module whose hook asks: torch's, around its forward and all of its hooks."""
    frame = sys._getframe(3)  # what ``before`` of ``Passes.hooks`` was called by: it has called ``come``
    while frame.f_code.co_name == "inner" and frame.f_back is not None:
        frame = frame.f_back
    return frame
