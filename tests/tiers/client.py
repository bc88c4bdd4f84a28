"""What a store does with a tier, step by step, for tests."""

from __future__ import annotations

import hashlib
import itertools
import threading
import time
from collections.abc import Sequence

import numpy as np

from stowage.storage.protocol import Inquiry, Outcome, Transfer
from stowage.storage.remote.tier import RemoteTier

PATIENCE_S = 60.0
_ids = itertools.count(1)


def key_of(number: int) -> bytes:
    return hashlib.sha256(b"%d" % number).digest()


def payload_of(number: int, length: int = 4096) -> bytes:
    return hashlib.shake_128(b"payload %d" % number).digest(length)


class Client:
    """Drives one tier. Every wait ends when the tier has answered."""

    def __init__(self, tier: RemoteTier) -> None:
        self.tier = tier
        self._woken = threading.Event()
        tier.wake = self._woken.set

    def begin(self, is_load: bool, numbers: Sequence[int], length: int, mask: int, deadline_s: float) -> Transfer:
        contents = [bytes(length) if is_load else payload_of(number, length) for number in numbers]
        transfer = Transfer(
            next(_ids),
            [key_of(number) for number in numbers],
            [memoryview(bytearray(content)) for content in contents],
            np.full(len(numbers), mask, np.uint64),
            deadline_s,
        )
        (self.tier.load if is_load else self.tier.store)(transfer)
        return transfer

    def outcomes(self, count: int) -> list[Outcome]:
        """The next so many outcomes."""
        found: list[Outcome] = []
        until_s = time.monotonic() + PATIENCE_S
        while len(found) < count:
            self._woken.clear()
            found += self.tier.poll()
            if len(found) < count:
                assert self._woken.wait(until_s - time.monotonic()), "the tier never reported"
        assert len(found) == count
        return found

    def store(self, numbers: Sequence[int], *, length: int = 4096, mask: int = 1, seconds: float = 30.0) -> Outcome:
        self.begin(False, numbers, length, mask, time.monotonic() + seconds)
        return self.outcomes(1)[0]

    def load(self, numbers: Sequence[int], *, length: int = 4096, seconds: float = 30.0) -> Outcome:
        """What is reported as loaded must be exact."""
        transfer = self.begin(True, numbers, length, 0, time.monotonic() + seconds)
        outcome = self.outcomes(1)[0]
        for number, buffer, ok in zip(numbers, transfer.buffers, outcome.ok.tolist(), strict=True):
            assert not ok or bytes(buffer) == payload_of(number, length), "other bytes than were stored"
        return outcome

    def probe(self, numbers: Sequence[int], *, mask: int = 1, first: int = 0, stride: int = 1) -> list[int]:
        """Asks about a chain, and then looks up."""
        self.ask([key_of(number) for number in numbers], mask, first, stride)
        return self.lookup(numbers)

    def ask(self, keys: list[bytes], mask: int = 1, first: int = 0, stride: int = 1) -> None:
        probe = self.tier.probe([Inquiry(keys, mask, first, stride)])
        until_s = time.monotonic() + PATIENCE_S
        while not probe.done:
            assert self._woken.wait(until_s - time.monotonic()), "the probe never ended"
            self._woken.clear()

    def lookup(self, numbers: Sequence[int]) -> list[int]:
        masks: list[int] = self.tier.lookup([key_of(number) for number in numbers]).tolist()
        return masks

    def count(self, name: str) -> int:
        value = self.tier.stats()[name]
        assert isinstance(value, int)
        return value
