"""Trails: a shortcut that may never lead to another key's slot."""

import os

import numpy as np
from numpy.typing import NDArray

from stowage.core.ledger import Ledger
from stowage.core.trails import KEYS_MIN, Trails

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
