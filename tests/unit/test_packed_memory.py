"""The packed part of host memory: what is found comes back to the bit, within its bytes, whatever goes on at once."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Iterator

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from stowage.core import lossless
from stowage.core.geometry import ALIGNMENT_BYTES
from stowage.errors import ConfigError
from stowage.storage.circular_log import CircularLog, Piece
from stowage.storage.packed_memory import PackedMemoryTier
from stowage.storage.protocol import Outcome, Transfer
from tests.disk_client import aligned, numbers
from tests.tier_client import NEVER_S, TierClient, key, keys_of

KIB = 1 << 10
LENGTH = 64 * KIB


class Client(TierClient):
    """Names its chunks, and fills them with what packs."""

    def __init__(self, limit_bytes: int) -> None:
        super().__init__(PackedMemoryTier(limit_bytes))

    def store(self, names: list[object], lengths: list[int] | None = None, deadline_s: float = NEVER_S) -> Outcome:
        keys, buffers = keys_of(*names), aligned(lengths or [LENGTH] * len(names))
        for chunk, buffer in zip(keys, buffers, strict=True):
            buffer[:] = numbers(chunk, buffer.nbytes)
        return self.outcome(self.begin("store", self.transfer(keys, buffers, deadline_s=deadline_s)))

    def load(self, names: list[object], lengths: list[int] | None = None) -> list[bool]:
        keys, buffers = keys_of(*names), aligned(lengths or [LENGTH] * len(names))
        found: list[bool] = self.outcome(self.begin("load", self.transfer(keys, buffers))).ok.tolist()
        for chunk, buffer, ok in zip(keys, buffers, found, strict=True):
            assert not ok or bytes(buffer) == numbers(chunk, buffer.nbytes)
        return found

    def has(self, names: list[object]) -> list[bool]:
        return [bool(mask) for mask in self.tier.lookup(keys_of(*names))]


@pytest.fixture
def client() -> Iterator[Client]:
    made = Client(16 * LENGTH)
    yield made
    made.tier.check()
    made.tier.close(time.monotonic() + 10)
    assert not any(made.has(list(range(60))))


def test_it_holds_a_third_more(client: Client) -> None:
    names: list[object] = list(range(22))
    assert client.store(names).ok.all() and all(client.has(names)), "22 chunks where 16 fit as they are"
    assert all(client.load(names))
    stats = client.tier.stats()
    assert stats["chunks"] == stats["packed"] == 22 and stats["evicted"] == 0
    assert 0.66 * 22 * LENGTH < int(stats["bytes_used"]) < 0.72 * 22 * LENGTH < int(stats["bytes_limit"])


def test_what_does_not_pack_lies_as_it_is(client: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    noise = random.Random(0).randbytes
    monkeypatch.setattr("tests.unit.test_packed_memory.numbers", lambda chunk, length: chunk * (length // 32))
    monkeypatch.setattr(lossless, "pack", lambda payload, room: 0)
    assert noise(1) and client.store([1, 2], [LENGTH, 32]).ok.all() and all(client.load([1, 2], [LENGTH, 32]))
    assert client.tier.stats()["packed"] == 0


def test_the_oldest_goes_unless_it_was_used(client: Client) -> None:
    for number in range(60):
        assert client.store([number]).ok.all()
        assert client.load([0]) == [True], "it is in use, so it is moved when its turn comes"
    assert client.has([1, 59]) == [False, True]
    stats = client.tier.stats()
    assert int(stats["moved"]) >= 1 and int(stats["evicted"]) > 30


def test_what_is_stored_anew_replaces_what_is_being_moved(client: Client) -> None:
    for number in range(60):
        client.store([number % 20, "hot"])
        assert client.load(["hot", number % 20]) == [True, True]
    client.tier.discard([key("hot")])
    for number in range(60):
        client.store([("later", number)])
        assert client.has(["hot"]) == [False], "what was discarded stays away"


def test_another_length_is_a_miss_and_nothing_fits_that_is_longer_than_all(client: Client) -> None:
    client.store([1])
    assert client.load([1], [LENGTH + 2]) == [False] and client.load([1, 2]) == [True, False]
    assert client.store(["huge", 3], [17 * LENGTH, LENGTH]).ok.tolist() == [False, True]
    late = client.store([4], deadline_s=0.0)
    assert not late.ok.any() and "timed out" in late.error and not late.refused


def test_a_closed_one_refuses(client: Client) -> None:
    client.store([1])
    client.tier.close(time.monotonic() + 1)
    assert client.store([2]).refused and client.load([1]) == [False]


def test_a_failure_costs_its_transfer_alone(client: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(payload: memoryview, room: memoryview) -> int:
        raise MemoryError

    monkeypatch.setattr(lossless, "pack", fail)
    assert not client.store([1, 2]).ok.any() and client.tier.stats()["faults"] == 1
    monkeypatch.undo()
    assert client.store([1, 2]).ok.all() and all(client.load([1, 2]))


def test_many_at_once() -> None:
    """Loads of chunks that are just going: each brings its bytes or nothing."""
    tier = PackedMemoryTier(8 * LENGTH)
    drawn = random.Random(0)
    loaded = wrong = 0
    kept: dict[int, tuple[list[bytes], list[memoryview]]] = {}
    for number in range(400):
        keys = [key(drawn.randrange(24)) for _ in range(3)]
        keys = list(dict.fromkeys(keys))
        buffers = aligned([LENGTH] * len(keys))
        transfer = Transfer(number, keys, buffers, np.ones(len(keys), np.uint64), NEVER_S)
        if number % 2:
            kept[number] = keys, buffers
            tier.load(transfer)
        else:
            for chunk, buffer in zip(keys, buffers, strict=True):
                buffer[:] = numbers(chunk, LENGTH)
            tier.store(transfer)
        if drawn.random() < 0.1:
            tier.discard([key(drawn.randrange(24))])
        for outcome in tier.poll():
            if outcome.id in kept:
                for chunk, buffer, ok in zip(*kept.pop(outcome.id), outcome.ok, strict=True):
                    loaded += bool(ok)
                    wrong += bool(ok) and bytes(buffer) != numbers(chunk, LENGTH)
    tier.close(time.monotonic() + 10)
    assert not wrong and loaded > 20
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("stowage-packed")]


def test_more_memory_than_there_is() -> None:
    with pytest.raises(ConfigError, match=r"host_packed of .* smaller size"):
        PackedMemoryTier(1 << 60)


@given(st.lists(st.tuples(st.integers(1, 900), st.integers(0, 900)), max_size=200))
def test_a_log_never_gives_the_same_byte_twice(asked: list[tuple[int, int]]) -> None:
    log, held = CircularLog[Piece](1000), list[Piece]()
    for wanted, used in asked:
        while (start := log.space(wanted)) is None:
            assert log.oldest is held.pop(0)
            log.drop_oldest()
        assert start % ALIGNMENT_BYTES == 0 and start + wanted <= 1000
        assert all(other.end <= start or start + wanted <= other.start for other in held)
        if nbytes := min(used, wanted):  # else what was to lie there came to nothing
            held.append(Piece(start, start + nbytes))
            log.append(held[-1])
        log.check()
    assert list(log) == held
    for _ in held:
        log.drop_oldest()
    assert log.space(1000) == 0
