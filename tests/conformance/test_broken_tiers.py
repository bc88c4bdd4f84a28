"""Every way in which a tier can break the protocol is found, and told in words that its author understands."""

from __future__ import annotations

import ctypes
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
from hypothesis import Phase, settings

from docs.examples.dict_tier import DictTier
from stowage.storage.protocol import Outcome, Tier, Transfer
from stowage.testing.conformance import TierConformance
from stowage.testing.watch import NonConformance

KEEPS = 1 << 20


@pytest.fixture(autouse=True)
def _no_shrinking() -> Iterator[None]:
    """What is found counts here, not how short it can be told."""
    before = settings.default
    settings.register_profile("found", parent=before, phases=[Phase.generate], derandomize=True)
    settings.load_profile("found")
    yield
    settings.load_profile("stowage")


class Good(DictTier):
    """Nothing is wrong with it."""

    def __init__(self) -> None:
        super().__init__(KEEPS)


class OtherKeysBytes(Good):
    def load(self, transfer: Transfer) -> None:
        super().load(transfer)
        known = [payload for _, payload in self._chunks.values()]
        for buffer in transfer.buffers:
            fitting = [payload for payload in known if len(payload) == buffer.nbytes]
            if len(fitting) > 1 and bytes(buffer) in fitting:
                buffer[:] = fitting[fitting.index(bytes(buffer)) - 1]


class WritesLater(Good):
    loaded: memoryview | None = None
    reported: memoryview | None = None

    def load(self, transfer: Transfer) -> None:
        super().load(transfer)
        self.loaded = next(iter(transfer.buffers), None)

    def poll(self) -> list[Outcome]:
        self.reported = self.loaded
        return super().poll()

    def lookup(self, keys: list[bytes]) -> np.ndarray:
        if self.reported is not None:
            self.reported[-1] = 7
        return super().lookup(keys)


class ReadsLater(Good):
    def store(self, transfer: Transfer) -> None:
        super().store(transfer)
        for key, buffer in zip(transfer.keys, transfer.buffers, strict=True):
            self._chunks[key] = (self._chunks[key][0], buffer)  # type: ignore[assignment]


class ReportsTwice(Good):
    def poll(self) -> list[Outcome]:
        outcomes = super().poll()
        return outcomes + outcomes[:1]


class ReportsAStranger(Good):
    def poll(self) -> list[Outcome]:
        return [*super().poll(), Outcome(1 << 40, np.zeros(0, np.bool_), np.zeros(0, np.uint64))]


class Forgets(Good):
    def poll(self) -> list[Outcome]:
        return [outcome for outcome in super().poll() if outcome.id % 5]


class FindsWhatIsAbsent(Good):
    def load(self, transfer: Transfer) -> None:
        self._outcomes.append(
            Outcome(transfer.id, np.ones(len(transfer.keys), np.bool_), np.ones(len(transfer.keys), np.uint64))
        )


class AllBlocksValid(Good):
    def load(self, transfer: Transfer) -> None:
        super().load(transfer)
        self._outcomes[-1].masks[self._outcomes[-1].ok] = (1 << 64) - 1


class KeepsTheOldMask(Good):
    def store(self, transfer: Transfer) -> None:
        old = {key: self._chunks[key][0] for key in transfer.keys if key in self._chunks}
        super().store(transfer)
        for key, mask in old.items():
            self._chunks[key] = (mask, self._chunks[key][1])


class KeepsTheOldBytes(Good):
    def store(self, transfer: Transfer) -> None:
        old = {key: self._chunks[key] for key in transfer.keys if key in self._chunks}
        super().store(transfer)
        self._chunks |= old


class MixesTwoStores(Good):
    def store(self, transfer: Transfer) -> None:
        old = {key: self._chunks[key][1] for key in transfer.keys if key in self._chunks}
        super().store(transfer)
        for key, payload in old.items():
            mask, new = self._chunks[key]
            self._chunks[key] = (mask, new[:40] + payload[40:])


class Truncates(Good):
    def load(self, transfer: Transfer) -> None:
        super().load(transfer)
        for buffer in transfer.buffers:
            if buffer.nbytes == 20_480:
                buffer[4096:] = bytes([0xB1]) * (20_480 - 4096)


class Blocks(Good):
    def discard(self, keys: list[bytes]) -> None:
        if len(keys) > 3:
            threading.Event().wait()
        super().discard(keys)


class NeverCloses(Good):
    def close(self, deadline_s: float) -> None:
        threading.Event().wait()


class Raises(Good):
    def load(self, transfer: Transfer) -> None:
        if any(key not in self._chunks for key in transfer.keys):
            raise FileNotFoundError("no such chunk")
        super().load(transfer)


class WritesPastTheBuffer(Good):
    def load(self, transfer: Transfer) -> None:
        super().load(transfer)
        for buffer in transfer.buffers:
            if buffer.nbytes % 4096:
                ctypes.memset(np.frombuffer(buffer, np.uint8).ctypes.data + buffer.nbytes, 0, 8)


class CompressesInPlace(Good):
    def store(self, transfer: Transfer) -> None:
        super().store(transfer)
        for buffer in transfer.buffers:
            buffer[0] ^= 1


class FindsWhatWasDiscarded(Good):
    def __init__(self) -> None:
        super().__init__()
        self.seen: dict[bytes, int] = {}

    def store(self, transfer: Transfer) -> None:
        super().store(transfer)
        self.seen |= dict(zip(transfer.keys, transfer.masks.tolist(), strict=True))

    def lookup(self, keys: list[bytes]) -> np.ndarray:
        return np.array([self.seen.get(key, 0) for key in keys], np.uint64)


class SignedMasks(Good):
    def lookup(self, keys: list[bytes]) -> np.ndarray:
        return super().lookup(keys).astype(np.int64)


class LosesWakeUps(Good):
    wake: Callable[[], None] = staticmethod(lambda: None)


class KeepsNothing(Good):
    def lookup(self, keys: list[bytes]) -> np.ndarray:
        return np.zeros(len(keys), np.uint64)

    def load(self, transfer: Transfer) -> None:
        zeros = np.zeros(len(transfer.keys), np.uint64)
        self._outcomes.append(Outcome(transfer.id, zeros.astype(np.bool_), zeros))


class LosesSome(Good):
    def store(self, transfer: Transfer) -> None:
        super().store(transfer)
        if len(self._chunks) > 5:
            self._chunks.pop(next(iter(self._chunks)))


class TakesTheKeys(Good):
    def store(self, transfer: Transfer) -> None:
        super().store(transfer)
        transfer.keys.clear()


class NeverReportsWhatIsQueuedAtClose(Good):
    closed = False

    def close(self, deadline_s: float) -> None:
        self.closed = True

    def poll(self) -> list[Outcome]:
        return [] if self.closed else super().poll()


class ShortOutcomes(Good):
    def load(self, transfer: Transfer) -> None:
        self._outcomes.append(Outcome(transfer.id, np.zeros(1, np.bool_), np.zeros(1, np.uint64)))


class TextInStats(Good):
    def stats(self) -> dict[str, int | float | str]:
        return {"chunks": [1]}  # type: ignore[dict-item]


def suite_of(tier: Callable[[], Tier], keeps: int = KEEPS) -> TierConformance:
    class Suite(TierConformance):
        keeps_bytes = keeps
        patience_s = 1.0
        examples = 100

        def make_tier(self, directory: Path) -> Tier:
            return tier()

    return Suite()


@pytest.mark.parametrize(
    ("tier", "words"),
    [
        (OtherKeysBytes, r"is ok for key \d+, but its \d+ bytes are not .* they are those of store \d+ of key \d+"),
        (WritesLater, r"changed byte \d+ of buffer 0, after it was reported"),
        (ReadsLater, r"the tier read a store's buffer too late"),
        (ReportsTwice, r"reports transfer \d+ a second time"),
        (ReportsAStranger, r"although nobody started it"),
        pytest.param(Forgets, r"never reported: transfer \d+|and these were not reported", marks=pytest.mark.rare),
        (FindsWhatIsAbsent, r"is ok for key \d+.*nothing was written to the buffer"),
        (AllBlocksValid, r"with the valid blocks 0xffffffffffffffff; it was stored with 0x"),
        (KeepsTheOldMask, r"has the valid blocks 0x.*; it should be|with the valid blocks 0x"),
        (KeepsTheOldBytes, r"which a later store had replaced|lookup says that key"),
        (MixesTwoStores, r"only the first 4\d bytes are those of store"),  # the next ones may be equal by chance
        (Truncates, r"only the first 4096 bytes are those of store"),
        pytest.param(
            Blocks,
            r"discard did not return for 1 s: no method but close may block. The steps on this tier:\n",
            marks=pytest.mark.rare,
        ),
        pytest.param(
            NeverCloses, r"close did not return for 1 s: close must end by its deadline", marks=pytest.mark.rare
        ),
        (Raises, r"load raised FileNotFoundError\('no such chunk'\): no method raises for an operating error"),
        (WritesPastTheBuffer, r"wrote a byte 1 bytes after the end of buffer \d+, which was not lent"),
        (CompressesInPlace, r"\(store of keys .*\) wrote byte 0 of buffer \d+, which was not lent to be written"),
        (FindsWhatWasDiscarded, r"it should be absent"),
        (SignedMasks, r"of type uint64"),
        pytest.param(LosesWakeUps, r"wake was not called", marks=pytest.mark.rare),
        (LosesSome, r"although store \d+ of key \d+ was reported as kept"),
        (TakesTheKeys, r"were changed: they are the caller's"),
        (NeverReportsWhatIsQueuedAtClose, r"close returned before its deadline, and these were not reported"),
        (ShortOutcomes, r"ok of transfer \d+ .* must be \d+ booleans"),
        (TextInStats, r"stats must give numbers or texts by name"),
    ],
    ids=lambda value: value.__name__ if isinstance(value, type) else "",
)
def test_is_caught(tier: Callable[[], Tier], words: str) -> None:
    with pytest.raises(NonConformance, match=words):
        suite_of(tier).test_it_keeps_its_word_through_random_steps()


def test_one_that_keeps_nothing_is_caught_too() -> None:
    suite = suite_of(KeepsNothing, keeps=0)
    type(suite).examples = 10
    suite.test_it_keeps_its_word_through_random_steps()  # it breaks no promise
    with pytest.raises(NonConformance, match="it keeps nothing"):
        suite.test_it_keeps_something()


def test_one_that_is_not_persistent_after_all_is_caught() -> None:
    suite = suite_of(Good)
    type(suite).persistent = True
    with pytest.raises(NonConformance, match="was reported as kept"):
        suite.test_it_keeps_its_word_through_random_steps()


def test_a_failure_is_shrunk_to_its_shortest_story() -> None:
    settings.register_profile("shrunk", settings.default, phases=[Phase.generate, Phase.shrink])
    settings.load_profile("shrunk")
    with pytest.raises(NonConformance, match="was never stored") as caught:
        suite_of(FindsWhatIsAbsent).test_it_keeps_its_word_through_random_steps()
    story = "\n".join(caught.value.__notes__)
    assert story.count("state.") <= 5 and "state.load" in story, story


def test_a_slow_tier_is_not_a_broken_one() -> None:
    """Answers come from a thread that dawdles; nothing decides on time."""

    class Slow(Good):
        def __init__(self) -> None:
            super().__init__()
            self.wake: Callable[[], None] = lambda: None
            self.late: list[Outcome] = []

        def _later(self) -> None:
            outcome = self._outcomes.pop()

            def report() -> None:
                self._outcomes.append(outcome)
                self.wake()

            threading.Timer(0.02, report).start()

        def load(self, transfer: Transfer) -> None:
            super().load(transfer)
            self._later()

        def store(self, transfer: Transfer) -> None:
            super().store(transfer)
            self._later()

        def close(self, deadline_s: float) -> None:
            time.sleep(min(0.1, max(0.0, deadline_s - time.monotonic())))

    suite = suite_of(Slow)
    type(suite).examples = 5
    suite.test_it_keeps_its_word_through_random_steps()
