"""The open requests and the last ones that ended, for the dashboard.

Holds numbers and times only: no prompt, answer, token, key or salt. A client sees its own requests only. Bounded: the
request that ended first is dropped first. Used on the event loop's thread alone.

    head ── submitted ── admitted ── started ── first token ── ended        moments of a request's times
         body is read   queue      prefix      prompt is     answer
                                   is loaded   computed      grows
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import Any, Final

from stowage.engine.request import Progress
from stowage.server.async_engine import Exchange
from stowage.server.auth import Tenant
from stowage.server.metrics import CLIENT_LEFT, COMPLETIONS
from stowage.server.middleware import RequestContext

KEPT_MAX: Final = 2000
"""Ended requests that are kept, of all clients together."""
SHOWN_MAX: Final = 200
"""Ended requests that one client sees, the newest; and as many open ones."""
_ROUNDED: Final = 6
_PHASES: Final = ("answering", "computing", "loading", "preempted", "waiting")
"""In order of precedence: a request with several choices is in the first phase that any of them is in."""


@dataclass(frozen=True, slots=True)
class Times:
    """Seconds since the head arrived; None: not yet. `admitted_s` and `started_s`: of the first choice."""

    submitted_s: float
    admitted_s: float | None
    started_s: float | None
    first_token_s: float | None
    ended_s: float | None


class RequestHistory:
    """The open requests and the last ended ones. `began_s`: the moment that all times are counted from."""

    def __init__(self, began_s: float) -> None:
        self._began_s = began_s
        self._open: dict[str, tuple[RequestContext, Exchange, float]] = {}
        self._ended: deque[tuple[Tenant, float, dict[str, Any]]] = deque(maxlen=KEPT_MAX)

    def begin(self, context: RequestContext, exchange: Exchange) -> None:
        """A request was submitted to the engine. It is open until `context.on_end` is called."""
        submitted_s = context.seconds - exchange.requests[0].progress().now_s if exchange.requests else context.seconds
        self._open[context.id] = context, exchange, max(0.0, submitted_s)
        context.on_end = lambda: self._end(context)

    def described(self, tenant: Tenant, after_s: float) -> dict[str, list[dict[str, Any]]]:
        """The requests of `tenant`, newest first: `open` ones, and those that `ended` at `after_s` or later."""
        mine = [entry for entry in self._open.values() if entry[0].tenant == tenant]
        ended: list[dict[str, Any]] = []
        for whose, ended_s, told in reversed(self._ended):
            if ended_s < after_s or len(ended) == SHOWN_MAX:
                break
            if whose == tenant:
                ended.append(told)
        return {"open": [self._told(*entry) for entry in reversed(mine[-SHOWN_MAX:])], "ended": ended}

    def _end(self, context: RequestContext) -> None:
        context, exchange, submitted_s = self._open.pop(context.id)
        told = self._told(context, exchange, submitted_s, ended=True)
        self._ended.append((context.tenant, told["arrived_s"] + told["times"]["ended_s"], told))

    def _told(
        self, context: RequestContext, exchange: Exchange, submitted_s: float, *, ended: bool = False
    ) -> dict[str, Any]:
        request, requests = exchange.request, exchange.requests
        progress = [request.progress() for request in requests]
        ahead = progress[: len(request.prompts)]
        reasons = {request.completion.finish_reason for request in requests if request.completion is not None}
        times = _times(context, submitted_s, ahead[0] if ahead else None, ended=ended)
        return {
            "id": context.id,
            "kind": "completion" if context.route == COMPLETIONS else "chat",
            "stream": request.stream,
            "choices": request.choices,
            "state": _end_of(context) if ended else _foremost(progress),
            "status": context.status or None,
            "reason": ", ".join(sorted(reasons - {"cancelled"})) if ended else "",
            "prompt_tokens": request.prompt_tokens,
            "reused_tokens": _added(one.reused_tokens for one in ahead),
            "computed_tokens": sum(one.computed_tokens for one in ahead),
            "answer_tokens": 0 if request.silent else sum(one.new_tokens for one in progress),
            "preemptions": sum(one.preemptions for one in progress),
            "arrived_s": round(context.began_s - self._began_s, _ROUNDED),
            "times": {name: None if s is None else round(s, _ROUNDED) for name, s in asdict(times).items()},
        }


def _times(context: RequestContext, submitted_s: float, first: Progress | None, *, ended: bool) -> Times:
    admitted_s = first.admitted_s if first else None
    started_s = first.started_s if first else None
    return Times(
        submitted_s=submitted_s,
        admitted_s=None if admitted_s is None else submitted_s + admitted_s,
        started_s=None if started_s is None else submitted_s + started_s,
        first_token_s=context.first_token_s,
        ended_s=context.seconds if ended else None,
    )


def _end_of(context: RequestContext) -> str:
    if context.error == CLIENT_LEFT or not context.status:
        return "left"
    return "failed" if context.error else "done"


def _foremost(progress: list[Progress]) -> str:
    phases = {one.phase for one in progress}
    return next((phase for phase in _PHASES if phase in phases), "answering" if progress else "waiting")


def _added(counts: Iterable[Mapping[str, int]]) -> dict[str, int]:
    total = Counter[str]()
    for one in counts:
        total.update(one)
    return total
