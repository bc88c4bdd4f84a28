"""Counters of a tier, raised by several threads and read by `stats`; those that mean trouble are logged too.

Owns the counting. Which counters there are, and which are logged in which words, is each tier's own table.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Mapping

from stowage.log import Trouble

Words = Mapping[str, tuple[int, str]]
"""At which level a counter that rises is logged, and in which words."""


class TierCounters:
    """Named counters, `faults` (bugs) among them. Raises KeyError for others. Nothing is logged without `trouble`."""

    def __init__(self, names: Iterable[str], logged: Words, trouble: Trouble | None = None) -> None:
        self._lock = threading.Lock()
        self._counts = dict.fromkeys(names, 0)
        self._logged = logged
        self._trouble = trouble

    def add(self, name: str, amount: int = 1, **details: str) -> None:
        """`details`: names of segments, what a store or the operating system said. For the log only."""
        with self._lock:
            self._counts[name] += amount
        if self._trouble is not None and name in self._logged and amount:
            level, text = self._logged[name]
            self._trouble.report(level, name, text, count=amount, **details)

    def fault(self, text: str) -> None:
        """A bug: the exception that is being handled should never have been raised."""
        with self._lock:
            self._counts["faults"] += 1
        if self._trouble is not None:
            self._trouble.fault(text)

    def snapshot(self) -> dict[str, int]:
        with self._lock:
            return dict(self._counts)
