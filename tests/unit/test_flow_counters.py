"""What the flow counts: every number that `stats` shows, twice over, so that a sum is told from a last value."""

from __future__ import annotations

import numpy as np

from stowage.cache.flow_types import StartLoad, StartStore
from tests.flow_setup import FULL, PAYLOAD, Setup, keys, masks


def test_what_is_taken_counts_where_it_came_from() -> None:
    """Not what is only looked up: the device may have it."""
    at = Setup(tiers=2, slots=16)
    at.held[0] = dict.fromkeys(keys(2, 3), FULL)
    at.held[1] = dict.fromkeys(keys(3, 4, 5, 6), FULL)
    at.store(1)
    for _ in range(2):
        at.flow.locate(keys(1, 2, 3, 4, 5, 9), 0.0)
        at.flow.locate(keys(1), 0.0)
    at.flow.sources(keys(1, 2), 0.0)
    assert at.flow.hits.tolist() == [0, 0, 0] and at.flow.hits.dtype == np.int64
    for _ in range(2):
        at.flow.fetch([(0, keys(1, 2, 3)), (0, keys(4, 5, 9))], 10.0, 0.0)
    assert at.flow.hits.tolist() == [2, 4, 4], "whoever joins a transfer takes from the same tier"
    at.flow.fetch([(0, keys(1, 6))], 10.0, 10.0)
    assert at.flow.hits.tolist() == [3, 4, 4] and at.flow.counters.lookups == 14, "too late for what is below"


def test_hits_without_lower_tiers() -> None:
    at = Setup(tiers=0)
    at.store(1)
    assert at.flow.locate(keys(1, 2), 0.0)[0].tolist() == [FULL, 0]
    at.flow.fetch([(0, keys(1, 2))], 10.0, 0.0)
    assert at.flow.hits.tolist() == [1] and at.flow.stats()["lookups"] == 2


def test_loads() -> None:
    at = Setup(slots=16)
    at.held[0] = dict.fromkeys(keys(*range(12)), FULL)
    for begin in (0, 6):
        wanted = keys(*range(begin, begin + 4))
        first = at.flow.fetch([(0, wanted)], 10.0, 0.0)
        at.flow.fetch([(0, wanted[:1])], 10.0, 0.0)
        (load,) = at.actions()
        at.answer(load, [True, True, True, False])
        at.flow.release(first)
        at.actions()
    stats = at.flow.stats()
    assert (stats["fetches"], stats["joined"]) == (4, 2)
    assert (stats["promoted"], stats["promoted_bytes"], stats["load_failures"]) == (6, 6 * PAYLOAD, 2)
    assert stats["chunks_pinned"] == 2, "what the fetches hold that are not released"


def test_stores_and_spills() -> None:
    at = Setup(slots=16)
    for begin in (0, 6):
        at.store(*range(begin, begin + 5))
        (store,) = at.actions()
        assert at.flow.stats()["transfers_under_way"] == 1
        at.answer(store, [True, True, True, False, False])
    stats = at.flow.stats()
    assert stats["stores"] == 10
    assert (stats["spills"], stats["spilled_bytes"], stats["spill_failures"]) == (6, 6 * PAYLOAD, 4)
    assert (stats["transfers_under_way"], stats["spills_waiting"], stats["chunks_pinned"]) == (0, 0, 0)


def test_deadlines() -> None:
    at = Setup()
    at.held[0] = dict.fromkeys(keys(1, 2), FULL)
    for now_s, name in ((0.0, 1), (100.0, 2)):
        at.flow.fetch([(0, keys(name))], now_s + 10.0, now_s)
        at.flow.fetch([(0, keys(name))], now_s + 10.0, now_s)
        at.flow.tick(now_s + 10.0)
    stats = at.flow.stats()
    assert (stats["fetch_timeouts"], stats["timeouts"], stats["transfers_under_way"]) == (4, 2, 2)


def test_what_found_no_room_and_what_made_room() -> None:
    at = Setup(slots=2, spill_chunks=1)
    at.store(1, 2, 3)
    at.store(4)
    stats = at.flow.stats()
    assert (stats["stores_without_room"], stats["evictions"], stats["chunks_pinned"]) == (1, 1, 1)
    store = at.only(StartStore)
    assert store.keys == keys(1)
    assert stats["spills_waiting"] == 2, "chunk 2 was evicted meanwhile, which shows when its turn comes"
    at.answer(store, [True])
    assert at.flow.stats()["spills_dropped"] == 1 and at.flow.stats()["spills_waiting"] == 0


def test_numbers_are_whole_and_the_counters_are_all_there() -> None:
    stats = Setup().flow.stats()
    assert set(stats.values()) == {0} and all(type(value) is int for value in stats.values())
    assert set(stats) == set(
        "lookups fetches joined promoted promoted_bytes stores spills spilled_bytes spill_failures load_failures "
        "timeouts fetch_timeouts stores_without_room evictions spills_dropped spills_waiting transfers_under_way "
        "chunks_pinned".split()
    )


def test_a_mask_of_64_blocks_goes_through_whole() -> None:
    """A mask that passes through a float anywhere loses its low bits."""
    at = Setup(blocks=64)
    odd = (1 << 63) | (1 << 31) | 1
    at.held[0] = dict.fromkeys(keys(1), odd)
    fetch = at.flow.fetch([(0, keys(1))], 10.0, 0.0)
    load = at.only(StartLoad)
    assert load.masks.tolist() == [odd] and load.masks.dtype == np.uint64
    at.flow.outcome(load.id, np.array([True]), load.masks, 1.0)
    assert fetch.masks[0].tolist() == [odd] and at.flow.locate(keys(1), 1.0)[0].tolist() == [odd]
    at.flow.reserve(0, keys(2), masks([odd]))
    at.flow.commit(at.flow.ledger.find_in_flight(keys(2)), 1.0)
    store = at.only(StartStore)
    assert store.masks.tolist() == [odd]
