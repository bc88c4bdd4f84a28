"""What a store does with a tier, step by step, for tests: chunks whose bytes follow from their keys."""

from __future__ import annotations

import hashlib
import itertools
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from stowage.storage.protocol import Outcome, Transfer

NEVER_S = 1e18
PATIENCE_S = 60.0


def key(name: object) -> bytes:
    return hashlib.sha256(repr(name).encode()).digest()


def keys_of(*names: object) -> list[bytes]:
    return [key(name) for name in names]


def payload(chunk: bytes, length: int) -> bytes:
    """The only bytes that may ever be read under that key."""
    return hashlib.shake_128(chunk).digest(length)


class TierClient:
    """Drives one tier. Every wait ends when the tier has answered; one of a minute is a failure."""

    def __init__(self, tier: Any) -> None:
        self.tier = tier
        self.woken = threading.Event()
        tier.wake = self.woken.set
        self._ids = itertools.count()
        self._waiting: dict[int, Outcome] = {}

    def transfer(
        self,
        keys: list[bytes],
        buffers: list[memoryview],
        masks: Sequence[int] | None = None,
        deadline_s: float = NEVER_S,
    ) -> Transfer:
        valid = np.array(masks if masks is not None else [1] * len(keys), np.uint64)
        return Transfer(next(self._ids), keys, buffers, valid, deadline_s)

    def begin(self, verb: str, transfer: Transfer) -> int:
        (self.tier.store if verb == "store" else self.tier.load)(transfer)
        return transfer.id

    def outcome(self, number: int, seconds: float = PATIENCE_S) -> Outcome:
        """Of that transfer."""
        self._wait_until(lambda: number in self._waiting, seconds)
        return self._waiting.pop(number)

    def outcomes(self, count: int) -> list[Outcome]:
        """All that were not asked for yet, which are so many."""
        self._wait_until(lambda: len(self._waiting) >= count, PATIENCE_S)
        found = list(self._waiting.values())
        self._waiting.clear()
        assert len(found) == count
        return found

    def _wait_until(self, true: Callable[[], bool], seconds: float) -> None:
        until_s = time.monotonic() + seconds
        while not true():
            self.woken.wait(max(0.0, min(0.1, until_s - time.monotonic())))
            self.woken.clear()
            for outcome in self.tier.poll():
                self._waiting[outcome.id] = outcome
            assert time.monotonic() < until_s, "no outcome"
