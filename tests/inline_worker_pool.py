"""Workers of the disk tier without threads: whoever wakes them does their work at once. For tests that open a tier, or
ask it for a chunk, a hundred thousand times; the code that runs is the same.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Final

from stowage.storage.disk.system import Turn

MOMENT_S: Final = 0.01
"""A worker that wants to go on so soon has work: whoever woke it waits for it."""


class InlineWorkerPool:
    """Implements WorkerPool (stowage.storage.disk.system)."""

    def __init__(self, name: str, turns: Sequence[Turn]) -> None:
        self._turns = list(turns)
        self._working = False
        self._woken = False

    def wake(self, count: int = 1) -> None:
        """Work until nobody has anything left to do. A worker that wakes others has them served by the caller."""
        self._woken = True
        if self._working:
            return
        self._working = True
        try:
            while self._woken:
                self._woken = False
                self._turns = [turn for turn in self._turns if self._serve(turn)]
        finally:
            self._working = False

    @staticmethod
    def _serve(turn: Turn) -> bool:
        """Whether the worker is still there afterwards."""
        while (pause_s := turn()) is not None:
            if pause_s > MOMENT_S:
                return True
            time.sleep(pause_s)
        return False

    def join(self, timeout_s: float) -> bool:
        self.wake()
        return not self._turns
