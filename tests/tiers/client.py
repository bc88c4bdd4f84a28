"""A client of remote tiers, whose chunks are numbered."""

from __future__ import annotations

import time
from collections.abc import Sequence

from stowage.storage.protocol import Inquiry, Outcome, Transfer
from stowage.storage.remote.tier import RemoteTier
from tests.tier_client import PATIENCE_S, TierClient, keys_of, payload


class Client(TierClient):
    """Stores and loads chunks of one length by their numbers, of which the keys are made."""

    tier: RemoteTier

    def start(self, verb: str, numbers: Sequence[int], length: int, mask: int, deadline_s: float) -> Transfer:
        keys = keys_of(*numbers)
        contents = [payload(chunk, length) if verb == "store" else bytes(length) for chunk in keys]
        buffers = [memoryview(bytearray(content)) for content in contents]
        transfer = self.transfer(keys, buffers, [mask] * len(keys), deadline_s)
        self.begin(verb, transfer)
        return transfer

    def store(self, numbers: Sequence[int], *, length: int = 4096, mask: int = 1, seconds: float = 30.0) -> Outcome:
        return self.outcome(self.start("store", numbers, length, mask, time.monotonic() + seconds).id)

    def load(self, numbers: Sequence[int], *, length: int = 4096, seconds: float = 30.0) -> Outcome:
        """What is reported as loaded must be exact."""
        transfer = self.start("load", numbers, length, 0, time.monotonic() + seconds)
        outcome = self.outcome(transfer.id)
        for chunk, buffer, ok in zip(transfer.keys, transfer.buffers, outcome.ok.tolist(), strict=True):
            assert not ok or bytes(buffer) == payload(chunk, length), "other bytes than were stored"
        return outcome

    def probe(self, numbers: Sequence[int], *, mask: int = 1, first: int = 0, stride: int = 1) -> list[int]:
        """Asks about a chain, and then looks up."""
        self.ask(keys_of(*numbers), mask, first, stride)
        return self.lookup(numbers)

    def ask(self, keys: list[bytes], mask: int = 1, first: int = 0, stride: int = 1) -> None:
        probe = self.tier.probe([Inquiry(keys, mask, first, stride)])
        until_s = time.monotonic() + PATIENCE_S
        while not probe.done:
            assert self.woken.wait(until_s - time.monotonic()), "the probe never ended"
            self.woken.clear()

    def lookup(self, numbers: Sequence[int]) -> list[int]:
        masks: list[int] = self.tier.lookup(keys_of(*numbers)).tolist()
        return masks

    def count(self, name: str) -> int:
        value = self.tier.stats()[name]
        assert isinstance(value, int)
        return value
