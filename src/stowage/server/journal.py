"""Requests that are open, and the last that have ended: what the dashboard says about them.

Owns numbers and times, and nothing else of a request: no prompt, no answer, no token, no key, no salt. A client is told
of its own requests only; whose each is, is kept beside it. Bounded: what ended first is forgotten first. Used on the
event loop's thread alone.

    head ── submitted ── admitted ── started ── first token ── ended        moments of a request's times
         body is read   queue      prefix      prompt is     answer
                                   is loaded   computed      grows
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import Any, Final

from stowage.engine.engine import Progress
from stowage.server.auth import Tenant
from stowage.server.bridge import Exchange
from stowage.server.counts import CLIENT_LEFT, COMPLETIONS
from stowage.server.front import Visit

__all__ = ["KEPT_MAX", "SHOWN_MAX", "Journal", "Times"]

KEPT_MAX: Final = 2000
"""Requests that have ended, of all clients together."""
SHOWN_MAX: Final = 200
"""Of those of one client, the newest; and as many that are open."""
_ROUNDED: Final = 6
_PHASES: Final = ("answering", "computing", "loading", "preempted", "waiting")
"""Of a request with several choices the foremost counts."""


@dataclass(frozen=True, slots=True)
class Times:
    """Seconds after the request's head had come; None: it has not happened. Those between `submitted_s` and the first
    token are of the first choice.
    """

    submitted_s: float
    admitted_s: float | None
    started_s: float | None
    first_token_s: float | None
    ended_s: float | None


class Journal:
    """`began_s`: the moment, of the clock of visits, that all times are counted from."""

    def __init__(self, began_s: float) -> None:
        self._began_s = began_s
        self._open: dict[str, tuple[Visit, Exchange, float]] = {}
        self._ended: deque[tuple[Tenant, float, dict[str, Any]]] = deque(maxlen=KEPT_MAX)

    def begin(self, visit: Visit, exchange: Exchange) -> None:
        """A request has come to the engine. It is open until its visit ends."""
        submitted_s = visit.seconds - exchange.requests[0].progress().now_s if exchange.requests else visit.seconds
        self._open[visit.id] = visit, exchange, max(0.0, submitted_s)
        visit.at_end = lambda: self._end(visit)

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

    def _end(self, visit: Visit) -> None:
        visit, exchange, submitted_s = self._open.pop(visit.id)
        told = self._told(visit, exchange, submitted_s, ended=True)
        self._ended.append((visit.tenant, told["arrived_s"] + told["times"]["ended_s"], told))

    def _told(self, visit: Visit, exchange: Exchange, submitted_s: float, *, ended: bool = False) -> dict[str, Any]:
        ask, requests = exchange.ask, exchange.requests
        progress = [request.progress() for request in requests]
        ahead = progress[: len(ask.prompts)]
        reasons = {request.completion.finish_reason for request in requests if request.completion is not None}
        times = _times(visit, submitted_s, ahead[0] if ahead else None, ended=ended)
        return {
            "id": visit.id,
            "kind": "completion" if visit.route == COMPLETIONS else "chat",
            "stream": ask.stream,
            "choices": ask.choices,
            "state": _end_of(visit) if ended else _foremost(progress),
            "status": visit.status or None,
            "reason": ", ".join(sorted(reasons - {"cancelled"})) if ended else "",
            "prompt_tokens": sum(len(prompt.tokens) for prompt in ask.prompts),
            "reused_tokens": _added(one.reused_tokens for one in ahead),
            "computed_tokens": sum(one.computed_tokens for one in ahead),
            "answer_tokens": 0 if ask.silent else sum(one.new_tokens for one in progress),
            "preemptions": sum(one.preemptions for one in progress),
            "arrived_s": round(visit.began_s - self._began_s, _ROUNDED),
            "times": {name: None if s is None else round(s, _ROUNDED) for name, s in asdict(times).items()},
        }


def _times(visit: Visit, submitted_s: float, first: Progress | None, *, ended: bool) -> Times:
    admitted_s = first.admitted_s if first else None
    started_s = first.started_s if first else None
    return Times(
        submitted_s=submitted_s,
        admitted_s=None if admitted_s is None else submitted_s + admitted_s,
        started_s=None if started_s is None else submitted_s + started_s,
        first_token_s=visit.first_token_s,
        ended_s=visit.seconds if ended else None,
    )


def _end_of(visit: Visit) -> str:
    if visit.error == CLIENT_LEFT or not visit.status:
        return "left"
    return "failed" if visit.error else "done"


def _foremost(progress: list[Progress]) -> str:
    phases = {one.phase for one in progress}
    return next((phase for phase in _PHASES if phase in phases), "answering" if progress else "waiting")


def _added(counts: Iterable[Mapping[str, int]]) -> dict[str, int]:
    total: dict[str, int] = {}
    for one in counts:
        for tier, tokens in one.items():
            total[tier] = total.get(tier, 0) + tokens
    return total
