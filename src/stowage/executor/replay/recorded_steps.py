"""Steps of single tokens, made again from a list of calls without the model's Python around them.

A token of a small model takes a third of its time in what lies around the computation: modules that call modules,
checks of their arguments, questions for shapes. For steps of single tokens all of that comes out the same every time,
so one step is recorded, and later steps of as many tokens make the same calls with their own numbers:

    the first    through the model     what it finds out once it finds out now
    the second   through the model     recorded (``calls``)
    the third    both ways             different in a single bit: never again
    from then on the list

Owns which steps are alike, and when a list is trusted. A model that cannot be recorded runs through its own Python as
before.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Hashable, Sequence
from contextlib import nullcontext

import torch
from torch import Tensor, nn

from stowage.executor.determinism.row_invariance import OwnRows
from stowage.executor.fused.scans import Rows
from stowage.executor.replay.recorded_calls import CallList, Refused, recorded

__all__ = ["Steps"]

_LISTS_MAX = 64
"""Numbers of tokens of which there are lists at a time."""

_log = logging.getLogger(__name__)


class Steps:
    """The lists of one model, whose forwards are computed in ``rows``. One thread uses it."""

    def __init__(self, model: nn.Module, rows: OwnRows | None) -> None:
        self._model = model
        self._rows = rows
        self._lists: dict[Hashable, CallList | None] = {}
        self._trusted: set[Hashable] = set()
        self.why = ""
        """Why the model runs through its own code, if it does for good."""
        self.repeated = 0
        """Steps that were computed from a list."""

    def run(
        self, key: Hashable, given: Sequence[Tensor], states: Sequence[Tensor], forward: Callable[[], Tensor]
    ) -> Tensor:
        """The logits of a step: what ``forward`` gives. ``given``: the tensors that every step has of its own;
        ``states``: more of these, which the step changes; ``key``: what is the same in steps that make the same calls,
        besides the shapes of ``given``, on which those of ``states`` depend.
        """
        key = _sort(key, given)
        if self.why or (key not in self._lists and len(self._lists) >= _LISTS_MAX):
            return self._forward(forward)
        if key not in self._lists:  # the first of its kind: what the model finds out once it finds out now
            self._lists[key] = None
            return self._forward(forward)
        found = self._lists[key]
        if found is None:
            return self._record(key, given, states, forward)
        if key not in self._trusted:
            return self._try(key, found, given, states, forward)
        self.repeated += 1
        return found.make((*given, *states))

    def in_place(self, key: Hashable, given: Sequence[Tensor]) -> CallList | None:
        """The list for such a step, if it is trusted, and takes states wherever they lie."""
        key = _sort(key, given)
        found = self._lists[key] if key in self._trusted else None
        return found if found is not None and found.in_place is not None else None

    def run_in_place(self, found: CallList, given: Sequence[Tensor], states: Sequence[Rows]) -> Tensor:
        """As ``run``, by a list of ``in_place``."""
        self.repeated += 1
        return found.make((*given, *states), in_place=True)

    def _forward(self, forward: Callable[[], Tensor]) -> Tensor:
        with self._rows or nullcontext():
            return forward()

    def _record(
        self, key: Hashable, given: Sequence[Tensor], states: Sequence[Tensor], forward: Callable[[], Tensor]
    ) -> Tensor:
        """As computed by ``forward``, and written down."""
        before = [state.clone() for state in states]
        try:
            if any(module._forward_hooks or module._forward_pre_hooks for module in self._model.modules()):
                raise Refused("its modules have hooks")
            kept = [*self._model.parameters(), *self._model.buffers()]
            logits, self._lists[key] = recorded(forward, given, states, kept, self._rows)
        except Refused as why:
            self._end(str(why))
            _put_back(before, states)
            return self._forward(forward)
        return logits

    def _try(
        self,
        key: Hashable,
        found: CallList,
        given: Sequence[Tensor],
        states: Sequence[Tensor],
        forward: Callable[[], Tensor],
    ) -> Tensor:
        """As computed by ``forward``, and by what was written down. Keys and values are put in place twice."""
        before = [state.clone() for state in states]
        logits = self._forward(forward)
        after = [state.clone() for state in states]
        _put_back(before, states)
        again = found.make((*given, *states))
        if all(_same(*both) for both in zip((logits, *after), (again, *states), strict=True)):
            self._trusted.add(key)
        else:
            self._end("the same calls gave something else")
            _put_back(after, states)
        return logits

    def _end(self, why: str) -> None:
        self.why = why
        self._lists.clear()
        self._trusted.clear()
        _log.debug("decoding runs through the model's own code: %s", why)


def _sort(key: Hashable, given: Sequence[Tensor]) -> Hashable:
    return (key, *(tensor.shape for tensor in given))


def _put_back(saved: Sequence[Tensor], states: Sequence[Tensor]) -> None:
    for before, state in zip(saved, states, strict=True):
        state.copy_(before)


def _same(a: Tensor, b: Tensor) -> bool:
    """To the bit."""
    return a.shape == b.shape and torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8))
