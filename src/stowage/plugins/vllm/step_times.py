"""How long vLLM's steps take, for the cost model: vLLM may build some ahead of the one that is computed."""

from __future__ import annotations

import time
from collections import deque

_STEPS_AHEAD_MAX = 64


class StepTimes:
    """Numbers steps from 1. A step begins when it is built, or when the one before it has ended."""

    def __init__(self) -> None:
        self.number = 0
        self._built: deque[tuple[int, float, int]] = deque(maxlen=_STEPS_AHEAD_MAX)
        self._ended_s = 0.0

    def built(self, tokens: int) -> int:
        """A step of so many tokens was built; its number."""
        self.number += 1
        self._built.append((self.number, time.monotonic(), tokens))
        return self.number

    def ended(self, number: int) -> tuple[int, float]:
        """Step ``number`` has ended: its tokens and seconds; no tokens where it computed none, or is not known."""
        now_s = time.monotonic()
        found = 0, 0.0
        while self._built and self._built[0][0] <= number:
            built, began_s, tokens = self._built.popleft()
            if built == number:
                found = tokens, now_s - max(began_s, self._ended_s)
        self._ended_s = now_s
        return found
