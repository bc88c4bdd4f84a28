"""Finds the requests that may complete a chunk in a step, without a look at every running request.

A step gives most requests one token, or with drafts a few; a chunk has 128. So each request is looked at again when it
can have come so far at the earliest. Those that get more tokens at a time, and those that begin or resume, are looked
at in each step that computes them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from stowage.plugins.vllm import adapter
from stowage.plugins.vllm.requests import Tracked


class Due:
    """When to look at each request next. ``step_tokens``: the most of a generating one in a step. ``looks``: so far."""

    def __init__(self, step_tokens: int) -> None:
        self._step_tokens = step_tokens
        self._passed = 0  # tokens: no request that generates has computed more since the start
        self._watched: dict[int, list[Tracked]] = {}  # by what has `_passed` when they are looked at
        self.looks = 0

    def of(self, scheduled: Any, tracked_by_name: Mapping[str, Tracked]) -> list[tuple[Tracked, int, int]]:
        """Of the requests that this step brings to the end of a chunk: from which token to which it computes them."""
        self._passed += self._step_tokens
        candidates = self._candidates(scheduled, tracked_by_name)
        if not candidates:
            return []
        counts = scheduled.num_scheduled_tokens
        begins = {new.req_id: new.num_computed_tokens for new in scheduled.scheduled_new_reqs}
        self.looks += len(candidates)
        found = []
        for name, tracked in candidates.items():
            if tracked is None or tracked.tainted:
                continue
            begin = begins[name] if name in begins else adapter.computed_before(tracked.request)
            end = begin + counts[name]
            if end >= tracked.due:
                found.append((tracked, begin, end))
            else:
                self.watch(tracked, end)
        return found

    def _candidates(self, scheduled: Any, tracked_by_name: Mapping[str, Tracked]) -> dict[str, Tracked | None]:
        counts, known = scheduled.num_scheduled_tokens, tracked_by_name.get
        found = {new.req_id: known(new.req_id) for new in scheduled.scheduled_new_reqs}
        found |= {name: known(name) for name in adapter.resumed(scheduled) if name in counts}
        if scheduled.total_num_scheduled_tokens - len(counts) >= self._step_tokens:  # else none can have more
            found |= {name: known(name) for name, count in counts.items() if count > self._step_tokens}
        for tracked in self._watched.pop(self._passed, ()):
            name = tracked.name
            if tracked.watched_at != self._passed or known(name) is not tracked:
                continue  # looked at since then, or ended
            if name in counts:
                found[name] = tracked
            elif tracked.request.num_preemptions == tracked.preemptions:  # it runs, and this step has no room for it
                self._push(tracked, self._passed + self._step_tokens)
        return found

    def watch(self, tracked: Tracked, end: int) -> None:
        """Look again when the request, which has computed ``end`` tokens after this step, can be due."""
        steps = max(1, -(-(tracked.due - end) // self._step_tokens))
        self._push(tracked, self._passed + steps * self._step_tokens)

    def _push(self, tracked: Tracked, at: int) -> None:
        tracked.watched_at = at
        self._watched.setdefault(at, []).append(tracked)
