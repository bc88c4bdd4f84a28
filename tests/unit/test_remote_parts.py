"""The parts of a shared tier, one at a time: what it knows, how it backs off, what it lets through, what it holds."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from stowage.storage.remote.backoff import PAUSE_S_MAX, PAUSE_S_MIN, Backoff
from stowage.storage.remote.limiter import Limiter
from stowage.storage.remote.presence import Presence
from stowage.storage.remote.quota import Quota

A, B, C = b"a" * 32, b"b" * 32, b"c" * 32


class Clock:
    now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


# What is known


def test_a_key_is_unknown_then_present_or_absent_for_a_while() -> None:
    clock = Clock()
    presence = Presence(2.0, clock)
    number = presence.begin()
    assert presence.known([A, B]) == [None, None]
    presence.answer(number, A, 7)
    presence.answer(number, B, 0)
    presence.end(number)
    assert presence.known([A, B, C]) == [True, False, None]
    assert presence.lookup([B, A]).tolist() == [0, 7] and presence.lookup([]).dtype == np.uint64
    clock.now_s += 2.0
    assert presence.known([A, B]) == [True, None], "others may have stored it since"
    presence.check()


def test_an_answer_that_is_older_than_a_store_or_a_discard_is_ignored() -> None:
    presence = Presence(2.0, Clock())
    number = presence.begin()
    presence.stored(A, 3)
    presence.stored(B, 3)
    presence.discard([B])
    presence.answer(number, A, 0)
    presence.answer(number, B, 3)
    presence.take(number, [B, C], 15)
    presence.correct(number, A, 1)
    assert presence.lookup([A, B, C]).tolist() == [3, 0, 15]
    presence.end(number)
    number = presence.begin()
    presence.answer(number, B, 3)
    assert presence.lookup([B]).tolist() == [3], "asked after the discard, it is there"
    presence.check()


def test_what_was_discarded_must_be_written_whatever_is_found() -> None:
    presence = Presence(2.0, Clock())
    presence.discard([A])
    assert presence.must_write(A) and not presence.must_write(B) and presence.known([A]) == [False]
    number = presence.begin()
    presence.answer(number, A, 1)
    assert presence.must_write(A)
    presence.stored(A, 1)
    assert not presence.must_write(A)


def test_what_could_not_be_had_need_not_be_written_again() -> None:
    clock = Clock()
    presence = Presence(2.0, clock)
    presence.stored(A, 1)
    presence.unanswered(A)
    presence.discard([A])
    assert presence.known([A]) == [False] and not presence.must_write(A)
    clock.now_s += 2
    assert presence.known([A]) == [None], "asked about again"
    presence.discard([A])
    assert presence.must_write(A), "the next time it was something else"
    presence.check()


def test_what_is_taken_to_be_there_never_replaces_what_is_known() -> None:
    presence = Presence(2.0, Clock())
    presence.stored(A, 3)
    number = presence.begin()
    presence.take(number, [A, B], 15)
    assert presence.lookup([A, B]).tolist() == [3, 15]
    presence.correct(number, B, 7)
    presence.correct(number, C, 7)
    assert presence.lookup([B, C]).tolist() == [7, 0]


def test_the_oldest_are_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("stowage.storage.remote.presence.KEYS_MAX", 2)
    presence = Presence(2.0, Clock())
    for key in (A, B, A, C):
        presence.stored(key, 1)
    assert presence.lookup([A, B, C]).tolist() == [1, 0, 1] and len(presence) == 2
    presence.discard([A, B, C])
    assert [presence.must_write(key) for key in (A, B, C)] == [False, True, True]
    presence.check()


# Backing off


def test_a_failure_is_followed_by_pauses_that_grow() -> None:
    clock = Clock()
    backoff = Backoff(clock, chance=lambda: 1.0)
    assert backoff.allows() and backoff.allows()
    pauses = []
    for _ in range(9):
        backoff.failed()
        assert not backoff.allows()
        began_s = clock.now_s
        while not backoff.allows():
            clock.now_s += 0.01
        assert not backoff.allows(), "one tries, the others wait for what becomes of it"
        pauses.append(clock.now_s - began_s)
    assert pauses[0] == pytest.approx(PAUSE_S_MIN, abs=0.02) and pauses[-1] == pytest.approx(PAUSE_S_MAX, abs=0.02)
    assert pauses == sorted(pauses)
    backoff.succeeded()
    assert backoff.allows() and backoff.allows() and backoff.failures == 0


def test_two_that_failed_together_do_not_come_back_together() -> None:
    clock = Clock()
    early, late = Backoff(clock, chance=lambda: 0.0), Backoff(clock, chance=lambda: 1.0)
    early.failed()
    late.failed()
    clock.now_s += 0.75 * PAUSE_S_MIN
    assert early.allows() and not late.allows()


# Letting through


@given(
    sizes=st.lists(st.integers(0, 12), max_size=12),
    cancelled=st.sets(st.integers(0, 11)),
    count_max=st.integers(1, 4),
    bytes_max=st.integers(1, 12),
)
def test_never_more_than_allowed_and_all_come_through(
    sizes: list[int], cancelled: set[int], count_max: int, bytes_max: int
) -> None:
    limiter = Limiter(count_max, bytes_max)
    passed: list[int] = []

    async def one(number: int, size: int) -> None:
        async with limiter.passing(size):
            limiter.check()
            await asyncio.sleep(0)
            await asyncio.sleep(0)
            limiter.check()
            passed.append(number)

    async def all_of_them() -> None:
        tasks = [asyncio.create_task(one(number, size)) for number, size in enumerate(sizes)]
        await asyncio.sleep(0)
        for number in cancelled:
            if number < len(tasks):
                tasks[number].cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    asyncio.run(all_of_them())
    assert set(passed) >= set(range(len(sizes))) - cancelled
    assert (limiter.count, limiter.bytes) == (0, 0)
    limiter.check()


def test_the_first_to_come_is_the_first_through() -> None:
    limiter = Limiter(2, 10)
    order: list[int] = []

    async def one(number: int, size: int) -> None:
        async with limiter.passing(size):
            order.append(number)
            await asyncio.sleep(0)

    async def all_of_them() -> None:
        await asyncio.gather(*(one(number, size) for number, size in enumerate([8, 8, 1, 1, 20, 1])))

    asyncio.run(all_of_them())
    assert order == [0, 1, 2, 3, 4, 5], "a small one does not overtake a large one, which would wait for ever"


# Holding to a limit


@given(
    st.lists(st.tuples(st.sampled_from("abcdefgh"), st.integers(1, 40)), max_size=60),
    st.integers(40, 100),
    st.integers(1, 5),
)
def test_the_oldest_go_until_the_next_fits(values: list[tuple[str, int]], limit: int, names_max: int) -> None:
    quota = Quota(limit, names_max)
    there: dict[str, int] = {}
    for name, length in values:
        assert quota.fits(length) == (length <= limit)
        while not quota.has_room(name, length):
            oldest = quota.oldest()
            assert oldest == next(iter(there))
            del there[oldest]
            quota.removed(oldest)
        there.pop(name, None)
        there[name] = length
        quota.add(name, length)
        quota.check()
        assert sum(there.values()) <= limit and len(there) <= names_max
        assert quota.stats()["bytes_used"] == sum(there.values())


def test_without_a_limit_nothing_goes() -> None:
    quota = Quota(0)
    quota.add("a", 1 << 60)
    assert quota.fits(1 << 60) and quota.has_room("b", 1 << 60) and quota.stats() == {}
    assert quota.oldest() is None
    quota.check()


def test_what_is_being_written_does_not_go() -> None:
    quota = Quota(10)
    for name in "abc":
        quota.add(name, 3)
    assert not quota.has_room("d", 2)
    assert (quota.oldest({"a": 1}), quota.oldest({"a", "b", "c"})) == ("b", None)
