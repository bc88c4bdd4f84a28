"""Leaves a store alone for a while after it failed: longer each time, and not at the same moment as the others.

    failure --0.1 s..--> one try --failure--> twice as long .. 5 s
                              └──success──> at once

Time and chance are passed in.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Final

PAUSE_S_MIN: Final = 0.1
PAUSE_S_MAX: Final = 5.0


class Backoff:
    """Says when a store may be asked again. `failures`: since the last success. Used by one thread; others may read."""

    def __init__(self, clock: Callable[[], float], chance: Callable[[], float] = random.random) -> None:
        self._clock = clock
        self._chance = chance
        self._until_s = float("-inf")
        self.failures = 0

    def allows(self) -> bool:
        """Whether to try now. After a failure the first to ask after the pause is the one that tries."""
        now_s = self._clock()
        if now_s < self._until_s:
            return False
        if self.failures:
            self._until_s = now_s + self._pause_s()
        return True

    def succeeded(self) -> None:
        self.failures = 0
        self._until_s = float("-inf")

    def failed(self) -> None:
        self.failures += 1
        self._until_s = self._clock() + self._pause_s()

    def _pause_s(self) -> float:
        longest_s = min(PAUSE_S_MIN * 2.0 ** min(self.failures - 1, 16), PAUSE_S_MAX)
        return longest_s * (0.5 + 0.5 * self._chance())
