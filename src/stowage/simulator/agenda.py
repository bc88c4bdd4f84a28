"""What happens when: events at their times, one after the other."""

from __future__ import annotations

import heapq
from collections.abc import Callable
from itertools import count

__all__ = ["Agenda"]


class Agenda:
    """Things of one time happen in the order in which they were put down."""

    __slots__ = ("_heap", "_numbers")

    def __init__(self) -> None:
        self._heap: list[tuple[float, int, Callable[[float], None]]] = []
        self._numbers = count()

    def at(self, time_s: float, call: Callable[[float], None]) -> None:
        """`call` at that time, with the time as its argument."""
        heapq.heappush(self._heap, (time_s, next(self._numbers), call))

    def run(self, until_s: float) -> float:
        """All that is due by then. When the last of it happened, 0 if nothing did."""
        last_s = 0.0
        while self._heap and self._heap[0][0] <= until_s:
            last_s, _, call = heapq.heappop(self._heap)
            call(last_s)
        return last_s
