"""Flow in trouble: failures, deadlines, reports that do not fit, and tiers that are left alone for a while."""

from __future__ import annotations

import numpy as np
import pytest

from stowage.cache.circuit_breaker import FAILURES_MAX, OPEN_S
from stowage.cache.flow import STORE_LIMIT_S, TRANSFER_BYTES_MAX
from stowage.cache.flow_types import Discard, StartLoad, StartStore
from tests.flow_setup import FULL, Setup, keys, masks


def test_f2_a_failed_chunk_fails_alone_and_is_discarded() -> None:
    at = Setup()
    fetch, load = at.loading(1, 2, 3)
    at.answer(load, [True, False, True], now_s=1.0)
    assert fetch.done and (fetch.slots[0] >= 0).tolist() == [True, False, True]
    assert fetch.sources[0].tolist() == [1, -1, 1] and fetch.masks[0].tolist() == [FULL, 0, FULL]
    assert at.actions() == [Discard(0, keys(2))]
    assert at.flow.locate(keys(1), 1.0)[0].tolist() == [FULL]


def test_f1_the_next_store_repairs_what_was_discarded() -> None:
    at = Setup()
    _, load = at.loading(1)
    at.answer(load, [False])
    discard = at.only(Discard)
    del at.held[0][discard.keys[0]]
    at.store(1)
    store = at.only(StartStore)
    assert store.keys == keys(1) and store.masks.tolist() == [FULL]


def test_f6_a_hung_read_costs_its_deadline_and_keeps_its_slot() -> None:
    at = Setup(slots=2)
    fetch, load = at.loading(1)
    at.flow.tick(9.9)
    assert not fetch.done and at.flow.next_deadline_s == 10.0
    at.flow.tick(10.0)
    assert fetch.done and fetch.slots[0].tolist() == [-1]
    at.flow.release(fetch)
    assert (at.store(2, 3, now_s=10.0) >= 0).tolist() == [True, False], "the slot of the hung read is not reused"
    assert load.slots[0] not in at.flow.ledger.find(keys(2, 3)).tolist()
    at.flow.check()
    # Overdue: nobody waits for it again.
    assert at.flow.locate(keys(1), 11.0)[0].tolist() == [0]
    again = at.flow.fetch([(0, keys(1))], 30.0, 11.0)
    assert again.done and again.slots[0].tolist() == [-1]
    # It comes in the end: good for others, and failing late is no reason to discard.
    at.flow.take_actions()
    at.answer(load, [True], now_s=12.0)
    assert at.flow.locate(keys(1), 12.0)[0].tolist() == [FULL] and at.flow.stats()["timeouts"] == 1


@pytest.mark.parametrize("ended_s", [10.0, 10.5])
def test_a_failure_at_the_deadline_or_later_is_no_reason_to_discard(ended_s: float) -> None:
    at = Setup()
    _, load = at.loading(1)
    at.answer(load, [False], now_s=ended_s)
    assert at.actions() == [] and at.flow.locate(keys(1), 11.0)[0].tolist() == [FULL]


def test_a_refused_load_is_no_reason_to_discard() -> None:
    at = Setup()
    fetch, load = at.loading(1)
    at.flow.outcome(load.id, np.array([False]), masks([0]), 1.0, refused=True)
    assert fetch.done and fetch.slots[0].tolist() == [-1] and at.actions() == []


def test_a_tier_that_breaks_has_failed_and_its_chunks_have_not() -> None:
    at = Setup(slots=64)
    at.held[0] = dict.fromkeys(keys(*range(FAILURES_MAX)), FULL)
    for name in range(FAILURES_MAX):
        fetch = at.flow.fetch([(0, keys(name))], 10.0, 0.0)
        load = at.only(StartLoad)
        at.flow.start_failed(load.id, 1.0)
        assert fetch.done and fetch.slots[0].tolist() == [-1] and at.actions() == [], "nothing is discarded"
    assert at.flow.breakers[0].state(1.0) == "open"
    at.flow.check()


def test_a_store_that_a_tier_breaks_on_gives_its_slots_back() -> None:
    at = Setup(slots=1)
    at.store(1)
    store = at.only(StartStore)
    assert at.store(2)[0] < 0, "the slot is being written from"
    at.flow.start_failed(store.id, 1.0)
    assert at.store(3)[0] >= 0 and at.flow.stats()["spill_failures"] == 1
    at.flow.check()


def test_a_fetch_whose_deadline_has_passed_gets_what_is_in_host() -> None:
    at = Setup()
    at.held[0] = dict.fromkeys(keys(2), FULL)
    at.store(1)
    at.flow.take_actions()
    fetch = at.flow.fetch([(0, keys(1, 2))], 5.0, 5.0)
    assert fetch.done and (fetch.slots[0] >= 0).tolist() == [True, False] and at.actions() == []


def test_a_tier_that_keeps_failing_is_left_alone_then_probed_once() -> None:
    at = Setup(slots=64)
    at.held[0] = dict.fromkeys(keys(*range(100)), FULL)
    for name in range(FAILURES_MAX):
        assert at.flow.locate(keys(50), 0.0)[0].tolist() == [FULL]
        at.flow.fetch([(0, keys(name))], 10.0, 0.0)
        at.answer(at.flow.take_actions()[-1], [False])
    assert at.flow.locate(keys(50), 0.0)[0].tolist() == [0] and at.flow.breakers[0].state(0.0) == "open"
    assert at.flow.fetch([(0, keys(50))], 10.0, 0.0).done
    at.flow.take_actions()
    at.store(200, 201)
    assert at.actions() == [] and at.flow.stats()["spills_dropped"] == 2
    # The probe: one flight, and nothing else until it is reported.
    assert at.flow.locate(keys(50), OPEN_S)[0].tolist() == [FULL]
    at.flow.fetch([(0, keys(50))], OPEN_S + 10, OPEN_S)
    (probe,) = at.actions()
    assert at.flow.locate(keys(51), OPEN_S)[0].tolist() == [0]
    at.answer(probe, [False], now_s=OPEN_S)
    assert at.flow.breakers[0].state(OPEN_S) == "open"
    at.flow.take_actions()
    at.flow.fetch([(0, keys(51))], 2 * OPEN_S + 10, 2 * OPEN_S)
    (probe,) = at.actions()
    at.answer(probe, [True], now_s=2 * OPEN_S)
    assert at.flow.breakers[0].state(2 * OPEN_S) == "closed"
    assert at.flow.locate(keys(52), 2 * OPEN_S)[0].tolist() == [FULL]


def test_a_probe_is_one_transfer_even_of_a_long_fetch() -> None:
    at = Setup(slots=8, payload=TRANSFER_BYTES_MAX)
    at.held[0] = dict.fromkeys(keys(*range(8)), FULL)
    for name in range(FAILURES_MAX):
        at.flow.fetch([(0, keys(name))], 10.0, 0.0)
        at.answer(at.flow.take_actions()[-1], [False])
    at.flow.take_actions()
    fetch = at.flow.fetch([(0, keys(5, 6, 7))], 20.0, OPEN_S)
    (probe,) = at.actions()
    at.answer(probe, [True], now_s=OPEN_S)
    assert fetch.done and (fetch.slots[0] >= 0).tolist() == [True, False, False]


def test_hung_transfers_open_the_breaker_too() -> None:
    at = Setup(slots=64)
    at.held[0] = dict.fromkeys(keys(*range(10)), FULL)
    for name in range(FAILURES_MAX):
        at.flow.fetch([(0, keys(name))], 1.0, 0.0)
    at.flow.tick(1.0)
    assert at.flow.locate(keys(9), 1.0)[0].tolist() == [0] and at.flow.counters.timeouts == FAILURES_MAX
    at.flow.check()


def test_a_loaded_chunk_without_a_valid_block_has_failed() -> None:
    at = Setup()
    fetch, load = at.loading(1, 2)
    at.flow.outcome(load.id, np.array([True, True]), masks([0, 0xFF]), 0.0)
    assert fetch.masks[0].tolist() == [0, FULL], "and blocks that the group does not have are not valid"


def test_a_fetch_that_waits_for_a_store_only_ends_by_its_deadline_too() -> None:
    at = Setup(tiers=0)
    coming = at.flow.reserve(0, keys(1), masks([FULL]))
    fetch = at.flow.fetch([(0, keys(1))], 10.0, 0.0)
    assert at.flow.next_deadline_s == 10.0
    at.flow.tick(10.0)
    assert fetch.done and fetch.slots[0].tolist() == [-1]
    at.flow.commit(coming, 11.0)
    at.flow.check()
    assert fetch.slots[0].tolist() == [-1], "what a fetch that is done holds changes no more"


def test_what_is_overdue_hides_nothing_else() -> None:
    at = Setup()
    at.held[0] = dict.fromkeys(keys(1, 2), FULL)
    at.flow.fetch([(0, keys(1))], 1.0, 0.0)
    at.flow.take_actions()
    at.flow.tick(1.0)
    assert at.flow.locate(keys(1, 2, 3), 1.0)[0].tolist() == [0, FULL, 0]
    fetch = at.flow.fetch([(0, keys(1, 2, 3))], 10.0, 1.0)
    load = at.only(StartLoad)
    assert load.keys == keys(2)
    assert [slots.tolist() for _, slots in fetch.awaited.values()] == [load.slots.tolist()], "nobody brings the others"
    at.answer(load, [True], now_s=2.0)
    assert fetch.done and fetch.sources[0].tolist() == [-1, 1, -1]


def test_a_tier_that_is_left_alone_does_not_hide_the_next_one() -> None:
    at = Setup(tiers=2)
    at.held[0], at.held[1] = dict.fromkeys(keys(1, 2), FULL), dict.fromkeys(keys(2, 3), 0b0011)
    for _ in range(FAILURES_MAX):
        at.flow.breakers[0].failed(0.0)
    assert at.flow.locate(keys(1, 2, 3), 0.0)[0].tolist() == [0, 0b0011, 0b0011]
    assert at.flow.sources(keys(1, 2, 3), 0.0).tolist() == [-1, 2, 2]
    assert at.flow.sources(keys(1, 2, 3), OPEN_S).tolist() == [1, 1, 2]


def test_a_hung_spill_is_a_failure_of_its_tier_after_its_limit() -> None:
    at = Setup(spill_chunks=2)
    at.store(1, 2, 3, 4, now_s=100.0)
    store = at.only(StartStore)
    assert store.deadline_s == at.flow.next_deadline_s == 100.0 + STORE_LIMIT_S
    for _ in range(FAILURES_MAX - 1):
        at.flow.breakers[0].failed(100.0)
    at.flow.tick(100.0 + STORE_LIMIT_S)
    assert at.flow.breakers[0].state(100.0 + STORE_LIMIT_S) == "open"
    assert (at.flow.stats()["timeouts"], at.flow.stats()["spills_dropped"]) == (1, 2), "what waited is given up"
    at.flow.check()


def test_the_probe_of_a_tier_may_be_a_spill() -> None:
    at = Setup()
    for _ in range(FAILURES_MAX):
        at.flow.breakers[0].failed(0.0)
    at.store(1, now_s=OPEN_S)
    at.store(2, now_s=OPEN_S)
    probe = at.only(StartStore)
    assert probe.keys == keys(1) and at.flow.spills[0].chunks == 1
    at.answer(probe, [True], now_s=OPEN_S)
    store = at.only(StartStore)
    assert store.keys == keys(2)
