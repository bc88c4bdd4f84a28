"""A queue of workers' reports, which are processed beside the steps, not in them.

Owns the queue. A step's report only says which copies have ended, and nobody waits for that but who looks a prefix up:
so the store's thread settles it while the workers compute, or that look-up does, or an idle step. What a step costs
the scheduler is then the queueing.
"""

from __future__ import annotations

from collections import deque

from stowage.cache.cost_model import CostModel
from stowage.plugins.vllm.messages import Report
from stowage.plugins.vllm.storing import Storing

_TOGETHER = 4
"""Reports of answers alone that are settled in one go, which takes about as long as one of them."""
_WAITING_MAX = 64
"""Reports. A thread that had no turn for so many steps is not waited for."""


class Reports:
    """The reports of one engine's workers. ``settle`` is for who has the store's turn, the rest for anybody.
    ``counts``: what is added up.
    """

    def __init__(self, storing: Storing, cost_model: CostModel, counts: dict[str, int]) -> None:
        self._storing = storing
        self._cost_model = cost_model
        self._counts = counts
        self._waiting: deque[tuple[Report, int, float]] = deque()

    def add(self, report: Report, tokens: int, took_s: float) -> None:
        """Of a step that has computed so many tokens in so many seconds; none: it is not known. One that says nothing
        is dropped: an engine that has nothing to do goes on while reports wait.
        """
        if tokens or report.says_something:
            self._waiting.append((report, tokens, took_s))

    def due(self, *, last: bool) -> bool:
        """Whether those that wait should be settled now, by the store's thread. (Who looks a prefix up settles them
        before.) ``last``: no request is left, so no step may follow.
        """
        return len(self._waiting) >= (1 if last else _TOGETHER) or self._storing.urgent

    @property
    def behind(self) -> bool:
        """Whether some wait."""
        return bool(self._waiting)

    @property
    def full(self) -> bool:
        """Whether so many wait that they are to be settled now."""
        return len(self._waiting) >= _WAITING_MAX

    def settle(self) -> None:
        """All that wait. Raises ``StowageError`` when ranks differ in what they should hold alike."""
        reports = []
        while self._waiting:
            report, tokens, took_s = self._waiting.popleft()
            if tokens:
                self._cost_model.computed(tokens, took_s)
            self._counts["loaded_bytes"] += report.loaded_bytes
            self._counts["stored_bytes"] += report.stored_bytes
            if report.ended or report.failed:
                reports.append(report)
        if reports:
            self._counts["stores_failed"] += self._storing.settle(reports)
        self._storing.make_ready()
        self._storing.check_alike()
