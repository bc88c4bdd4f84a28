"""Trails: a shortcut that may never lead to another key's slot."""

import os
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from stowage.cache.ledger import Ledger
from stowage.cache.trails import KEYS_MIN, Trails
from stowage.core.geometry import IntArray
from stowage.core.table import make_slots

N = KEYS_MIN * 4


def some_keys(count: int) -> list[bytes]:
    return [os.urandom(32) for _ in range(count)]


def fill(ledger: Ledger, keys: list[bytes]) -> NDArray[np.int64]:
    slots = ledger.reserve(0, keys, np.full(len(keys), 1, np.uint64))
    ledger.commit(slots[slots >= 0])
    return slots


def test_a_trail_is_followed_from_any_of_its_keys_as_far_as_the_keys_are_equal() -> None:
    trails = Trails(N)
    keys, slots = some_keys(N), np.random.default_rng(0).permutation(N)
    trails.add(keys, slots)
    trails.check(lambda asked: np.array([slots[keys.index(key)] for key in asked]))
    assert trails.follow(int(slots[0]), keys).tolist() == slots.tolist()
    assert trails.follow(int(slots[5]), keys[5:]).tolist() == slots[5:].tolist()
    asked = keys[5 : 5 + KEYS_MIN + 3] + some_keys(9)
    assert trails.follow(int(slots[5]), asked).tolist() == slots[5 : 5 + KEYS_MIN + 3].tolist()
    nearly = [*keys[:50], keys[50][:-1] + bytes([keys[50][-1] ^ 1]), *keys[51:]]
    assert trails.follow(int(slots[0]), nearly).tolist() == slots[:50].tolist()


def test_a_trail_ends_where_it_was_cut() -> None:
    trails = Trails(N)
    keys, slots = some_keys(N), np.arange(N)
    trails.add(keys, slots)
    trails.cut(slots[N - 7 : N - 3])
    assert trails.follow(0, keys).tolist() == slots[: N - 7].tolist()
    assert trails.follow(N - 2, keys[N - 2 :]).tolist() == []
    trails.cut(slots[:1])
    assert trails.follow(0, keys).tolist() == [] and trails.follow(40, keys[40:]).tolist() == []


def test_one_cut_through_several_trails() -> None:
    trails = Trails(2 * N)
    first, second = some_keys(N), some_keys(N)
    trails.add(first, np.arange(N))
    trails.add(second, np.arange(N, 2 * N))
    trails.cut(np.array([60, N + 90, 70, N + 80]))
    assert len(trails.follow(0, first)) == 60 and len(trails.follow(N, second)) == 80


def test_prompts_that_share_a_beginning_are_found_in_full() -> None:
    ledger = Ledger([10 * N])
    shared, tails = some_keys(N), [some_keys(N) for _ in range(3)]
    for tail in tails:
        fill(ledger, shared + tail)
    for _ in range(2):
        for tail in tails:
            assert (ledger.lookup(shared + tail + some_keys(5)) != 0).tolist() == [True] * 2 * N + [False] * 5
            assert ledger.find(tail).tolist() == [ledger.find([key])[0] for key in tail]
            ledger.check()


def test_chunks_that_were_stored_one_by_one_are_learned_by_a_look_up() -> None:
    ledger = Ledger([2 * N])
    keys = some_keys(N)
    for key in keys:
        fill(ledger, [key])
    expected = ledger.find(keys).tolist()
    assert ledger.find(keys).tolist() == expected == [ledger.find([key])[0] for key in keys]
    ledger.check()


def test_eviction_and_replacement_are_seen_through_trails() -> None:
    ledger = Ledger([N])
    keys, others = some_keys(N), some_keys(10)
    fill(ledger, keys)
    fill(ledger, others)
    assert (ledger.lookup(keys) != 0).tolist() == [True] * (N - 10) + [False] * 10
    slots = ledger.reserve(0, keys[3:4], np.array([3], np.uint64))
    ledger.commit(slots)
    ledger.check()
    assert ledger.lookup(keys)[:5].tolist() == [1, 1, 1, 3, 1] and ledger.find(keys)[3] == slots[0]
    assert ledger.drop() == N - 1 and not ledger.lookup(keys + others).any()
    ledger.check()


def test_what_is_found_may_be_changed_by_the_caller() -> None:
    ledger = Ledger([N])
    keys = some_keys(N)
    expected = fill(ledger, keys).tolist()
    ledger.find(keys)[:] = -1
    ledger.find_on_the_way(keys)[:] = 7
    assert ledger.find(keys).tolist() == expected


def test_the_shortest_trail_that_is_kept() -> None:
    trails = Trails(N)
    keys = some_keys(KEYS_MIN)
    trails.add(keys[:-1], np.arange(KEYS_MIN - 1))
    assert trails.follow(0, keys[:-1]).tolist() == []
    trails.add(keys, np.arange(KEYS_MIN))
    assert trails.follow(0, keys).tolist() == list(range(KEYS_MIN))
    longer = some_keys(KEYS_MIN + 3)
    trails.add(longer, np.arange(KEYS_MIN, 2 * KEYS_MIN + 3))
    trails.cut(np.array([2 * KEYS_MIN]))
    assert trails.follow(KEYS_MIN, longer).tolist() == list(range(KEYS_MIN, 2 * KEYS_MIN))
    trails.cut(np.array([2 * KEYS_MIN - 1]))
    assert trails.follow(KEYS_MIN, longer).tolist() == []


def test_a_trail_is_compared_from_the_place_of_the_first_key() -> None:
    trails = Trails(2 * N)
    keys = some_keys(N)
    trails.add(keys, np.arange(N))
    other = some_keys(1) + keys[1:]
    assert trails.follow(3, other).tolist() == [], "the slot of another key than is asked for"
    assert trails.follow(3, keys[3:]).tolist() == list(range(3, N))
    assert trails.follow(3, keys, 3).tolist() == list(range(3, N))
    assert trails.follow(3, keys[3:] + some_keys(2), 0).tolist() == list(range(3, N))


def test_keys_of_another_length_are_on_no_trail() -> None:
    trails = Trails(2 * N)
    keys = some_keys(N)
    trails.add([*keys[:-1], b"short"], np.arange(N))
    assert trails.follow(0, keys).tolist() == []
    trails.add(keys, np.arange(N))
    assert trails.follow(0, [keys[0], b"short", *keys[2:]]).tolist() == []


def test_a_long_prompt_may_lie_on_thousands_of_trails() -> None:
    """Stored one prefill step at a time, as a long prompt is."""
    batches = 1500
    ledger = Ledger([batches * KEYS_MIN])
    keys = [number.to_bytes(32, "little") for number in range(batches * KEYS_MIN)]
    for begin in range(0, len(keys), KEYS_MIN):
        fill(ledger, keys[begin : begin + KEYS_MIN])
    slots = ledger.find([*keys, *some_keys(3)])
    assert slots[-3:].tolist() == [-1, -1, -1] and ledger.keys(slots[:-3]) == keys


def test_repeated_keys_are_found_and_are_no_trail() -> None:
    ledger = Ledger([N])
    keys = some_keys(N)
    for key in keys:
        fill(ledger, [key])
    twice = [*keys[:KEYS_MIN], *keys[:KEYS_MIN]]
    expected = [ledger.find([key])[0] for key in twice]
    for _ in range(2):
        assert ledger.find(twice).tolist() == expected
        ledger.check()


def test_a_look_up_that_finds_little_leaves_the_trails_alone() -> None:
    ledger = Ledger([2 * N])
    keys = some_keys(N)
    fill(ledger, keys)
    tail = keys[-(KEYS_MIN - 1) :]
    assert (ledger.find([*tail, *some_keys(KEYS_MIN)]) >= 0).sum() == len(tail)
    assert (ledger.find(keys) >= 0).all()
    ledger.check()


class Probes:
    """Slots that count how many keys they are asked for."""

    def __init__(self, slots: int) -> None:
        self.slots = make_slots(slots)
        self.count = 0

    def __len__(self) -> int:
        return len(self.slots)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.slots, name)

    def find(self, keys: list[bytes], slots: IntArray) -> None:
        self.count += len(keys)
        self.slots.find(keys, slots)

    def slot_of(self, key: bytes) -> int:
        self.count += 1
        return self.slots.slot_of(key)


def probed(ledger: Ledger, keys: list[bytes]) -> int:
    """How many probes a look-up takes. It must find what a probe per key finds."""
    table = ledger._map._slots
    assert isinstance(table, Probes)
    expected = [table.slots.slot_of(key) for key in keys]
    table.count = 0
    assert ledger.find(keys).tolist() == expected
    probes = table.count
    ledger.check()
    return probes


def counting(slots: int) -> Ledger:
    ledger = Ledger([slots])
    ledger._map._slots = Probes(slots)  # type: ignore[assignment]
    return ledger


def test_what_was_stored_together_is_found_with_one_probe() -> None:
    ledger = counting(4 * N)
    first, second = some_keys(N), some_keys(KEYS_MIN)
    fill(ledger, first)
    fill(ledger, second)
    assert probed(ledger, first) == 1
    assert probed(ledger, [*first, *some_keys(5)]) == 1 + 5
    assert probed(ledger, first[7:]) == 1
    assert probed(ledger, [*first, *second]) == 2, "one for each trail"
    assert probed(ledger, [*second, *first[: KEYS_MIN + 1]]) == 2, "less of a trail than there is"
    assert probed(ledger, first[: KEYS_MIN - 1]) == KEYS_MIN - 1, "too short for a trail"
    assert probed(ledger, first[:KEYS_MIN]) == 1


@pytest.mark.parametrize("count", [KEYS_MIN, N])
def test_what_was_found_together_is_found_with_one_probe_from_then_on(count: int) -> None:
    ledger = counting(4 * N)
    keys, unknown = some_keys(count), some_keys(3)
    for key in keys:
        fill(ledger, [key])
    assert probed(ledger, [*keys, *unknown]) == 1 + count + len(unknown)
    assert probed(ledger, keys) == 1 and probed(ledger, [*keys, *unknown]) == 1 + len(unknown)
    assert probed(ledger, some_keys(N)) == 1 + N, "what is not there takes a probe per key"
    assert probed(ledger, keys) == 1


def test_chunks_that_replace_others_are_found_together_too() -> None:
    ledger = counting(4 * N)
    keys = some_keys(N)
    fill(ledger, keys)
    slots = ledger.reserve(0, keys[40:50], np.full(10, 3, np.uint64))
    ledger.commit(slots)
    assert probed(ledger, keys) == 1 + 1 + (N - 40), "the trail ends before the first that was replaced"
    assert probed(ledger, keys) == 2
