"""Flow: the tiered store's decisions, one at a time. No bytes, no clock: time is a number, a tier is a dictionary."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from stowage.core.breaker import FAILURES_MAX, OPEN_S
from stowage.core.events import Action, Discard, StartLoad, StartStore
from stowage.core.flow import TRANSFER_BYTES_MAX, Flow
from stowage.core.geometry import Geometry, Group, Kind, SlabClass

FULL = 0b1111
PAYLOAD = 4096


class Setup:
    """A flow over `slots` slots and tiers that hold what `held` says."""

    def __init__(self, slots: int = 8, tiers: int = 1, spill_chunks: int = 64, payload: int = PAYLOAD) -> None:
        geometry = Geometry((Group(0, Kind.FULL, 16, 4, payload // 4),))
        self.held: list[dict[bytes, int]] = [{} for _ in range(tiers)]
        indexes = [self._index(tier) for tier in range(tiers)]
        self.flow = Flow(geometry, [SlabClass(payload, (0,), slots, 0, 0)], indexes, spill_chunks * payload * tiers)

    def _index(self, tier: int) -> Callable[[list[bytes]], NDArray[np.uint64]]:
        return lambda keys: np.array([self.held[tier].get(key, 0) for key in keys], np.uint64)

    def store(self, *names: int, now_s: float = 0.0, mask: int = FULL) -> NDArray[np.int64]:
        slots = self.flow.reserve(0, keys(*names), masks([mask] * len(names)))
        self.flow.commit(slots, now_s)
        return slots

    def actions(self) -> list[Action]:
        self.flow.check()
        return self.flow.take_actions()

    def answer(self, action: Action, ok: Sequence[bool], now_s: float = 0.0, mask: int = FULL) -> None:
        assert not isinstance(action, Discard)
        if isinstance(action, StartStore):
            self.held[action.tier] |= {
                key: int(mask) for key, mask, good in zip(action.keys, action.masks, ok, strict=True) if good
            }
        self.flow.outcome(action.id, np.array(ok), masks([mask if good else 0 for good in ok]), now_s)
        self.flow.check()


def keys(*names: int) -> list[bytes]:
    return [name.to_bytes(32, "little") for name in names]


def masks(values: Sequence[int]) -> NDArray[np.uint64]:
    return np.array(values, np.uint64)


def test_what_is_in_host_comes_at_once_and_stays_until_released() -> None:
    at = Setup(slots=2, tiers=0)
    slots = at.store(1, 2)
    fetch = at.flow.fetch([(0, keys(1, 2, 3))], 10.0, 0.0)
    assert fetch.done and fetch.slots[0].tolist() == [*slots.tolist(), -1]
    assert fetch.masks[0].tolist() == [FULL, FULL, 0] and fetch.sources[0].tolist() == [0, 0, -1]
    assert at.store(4).tolist() == [-1]
    at.flow.release(fetch)
    assert at.store(4)[0] >= 0
    assert at.actions() == []


def test_what_a_tier_has_is_promoted_in_prompt_order() -> None:
    at = Setup()
    at.held[0] = dict.fromkeys(keys(2, 3, 5), 0b0111)
    at.store(1)
    at.flow.take_actions()
    assert at.flow.lookup(0, keys(1, 2, 3, 4, 5), 0.0).tolist() == [FULL, 7, 7, 0, 7]
    assert at.flow.sources(0, keys(1, 2, 3, 4, 5), 0.0).tolist() == [0, 1, 1, -1, 1]
    fetch = at.flow.fetch([(0, keys(1, 2, 3, 4, 5))], 10.0, 0.0)
    assert not fetch.done
    (load,) = at.actions()
    assert isinstance(load, StartLoad) and load.keys == keys(2, 3, 5) and load.deadline_s == 10.0
    assert load.sizes.tolist() == [PAYLOAD] * 3
    at.answer(load, [True, True, True], mask=0b0111)
    assert fetch.done and fetch.sources[0].tolist() == [0, 1, 1, -1, 1]
    assert fetch.masks[0].tolist() == [FULL, 7, 7, 0, 7] and fetch.slots[0][[1, 2, 4]].tolist() == load.slots.tolist()
    assert all(not isinstance(action, StartStore) or action.keys == keys(1) for action in at.actions())


def test_f7_a_second_fetch_waits_for_the_flight_of_the_first() -> None:
    at = Setup()
    at.held[0] = dict.fromkeys(keys(1, 2, 3), FULL)
    first = at.flow.fetch([(0, keys(1, 2))], 10.0, 0.0)
    second = at.flow.fetch([(0, keys(2, 3, 2))], 10.0, 0.0)
    loads = at.actions()
    assert [load.keys for load in loads if isinstance(load, StartLoad)] == [keys(1, 2), keys(3)]
    at.answer(loads[0], [True, True])
    assert first.done and not second.done
    at.answer(loads[1], [True])
    assert second.done and second.slots[0][0] == second.slots[0][2] == first.slots[0][1]
    at.flow.release(first)
    at.flow.release(second)
    at.flow.check()
    assert at.flow.ledger.pinned() == 0 and at.flow.counters.joined == 2


def test_f7_a_fetch_waits_for_a_chunk_that_is_being_stored() -> None:
    at = Setup(tiers=0)
    coming = at.flow.reserve(0, keys(1, 2), masks([FULL, FULL]))
    fetch = at.flow.fetch([(0, keys(1, 2))], 10.0, 0.0)
    assert not fetch.done
    at.flow.commit(coming[:1], 0.0)
    at.flow.abort(coming[1:])
    assert fetch.done and fetch.slots[0].tolist() == [coming[0], -1] and fetch.sources[0].tolist() == [0, -1]
    at.flow.check()


def test_f2_a_failed_chunk_fails_alone_and_is_discarded() -> None:
    at = Setup()
    at.held[0] = dict.fromkeys(keys(1, 2, 3), FULL)
    fetch = at.flow.fetch([(0, keys(1, 2, 3))], 10.0, 0.0)
    (load,) = at.actions()
    at.answer(load, [True, False, True], now_s=1.0)
    assert fetch.done and (fetch.slots[0] >= 0).tolist() == [True, False, True]
    assert fetch.sources[0].tolist() == [1, -1, 1] and fetch.masks[0].tolist() == [FULL, 0, FULL]
    assert at.actions() == [Discard(0, keys(2))]
    assert at.flow.lookup(0, keys(1), 1.0).tolist() == [FULL]


def test_f1_the_next_store_repairs_what_was_discarded() -> None:
    at = Setup()
    at.held[0] = dict.fromkeys(keys(1), FULL)
    at.flow.fetch([(0, keys(1))], 10.0, 0.0)
    (load,) = at.actions()
    at.answer(load, [False])
    (discard,) = at.actions()
    assert isinstance(discard, Discard)
    del at.held[0][discard.keys[0]]
    at.store(1)
    (store,) = at.actions()
    assert isinstance(store, StartStore) and store.keys == keys(1) and store.masks.tolist() == [FULL]


def test_f6_a_hung_read_costs_its_deadline_and_keeps_its_slot() -> None:
    at = Setup(slots=2)
    at.held[0] = dict.fromkeys(keys(1), FULL)
    fetch = at.flow.fetch([(0, keys(1))], 10.0, 0.0)
    (load,) = at.actions()
    assert isinstance(load, StartLoad)
    at.flow.tick(9.9)
    assert not fetch.done and at.flow.next_deadline_s == 10.0
    at.flow.tick(10.0)
    assert fetch.done and fetch.slots[0].tolist() == [-1]
    at.flow.release(fetch)
    assert (at.store(2, 3, now_s=10.0) >= 0).tolist() == [True, False], "the slot of the hung read is not reused"
    assert load.slots[0] not in at.flow.ledger.find(keys(2, 3)).tolist()
    at.flow.check()
    # Overdue: nobody waits for it again.
    assert at.flow.lookup(0, keys(1), 11.0).tolist() == [0]
    again = at.flow.fetch([(0, keys(1))], 30.0, 11.0)
    assert again.done and again.slots[0].tolist() == [-1]
    # It comes in the end: good for others, and failing late is no reason to discard.
    at.flow.take_actions()
    at.answer(load, [True], now_s=12.0)
    assert at.flow.lookup(0, keys(1), 12.0).tolist() == [FULL] and at.flow.stats()["timeouts"] == 1


def test_a_late_failure_is_no_reason_to_discard() -> None:
    at = Setup()
    at.held[0] = dict.fromkeys(keys(1), FULL)
    at.flow.fetch([(0, keys(1))], 10.0, 0.0)
    (load,) = at.actions()
    at.answer(load, [False], now_s=10.5)
    assert at.actions() == [] and at.flow.lookup(0, keys(1), 11.0).tolist() == [FULL]


def test_a_refused_load_is_no_reason_to_discard() -> None:
    at = Setup()
    at.held[0] = dict.fromkeys(keys(1), FULL)
    fetch = at.flow.fetch([(0, keys(1))], 10.0, 0.0)
    (load,) = at.actions()
    assert isinstance(load, StartLoad)
    at.flow.outcome(load.id, np.array([False]), masks([0]), 1.0, refused=True)
    assert fetch.done and fetch.slots[0].tolist() == [-1] and at.actions() == []


def test_a_fetch_whose_deadline_has_passed_gets_what_is_in_host() -> None:
    at = Setup()
    at.held[0] = dict.fromkeys(keys(2), FULL)
    at.store(1)
    at.flow.take_actions()
    fetch = at.flow.fetch([(0, keys(1, 2))], 5.0, 5.0)
    assert fetch.done and (fetch.slots[0] >= 0).tolist() == [True, False] and at.actions() == []


def test_a_cancelled_fetch_leaves_its_chunks_to_others() -> None:
    at = Setup()
    at.held[0] = dict.fromkeys(keys(1), FULL)
    fetch = at.flow.fetch([(0, keys(1))], 10.0, 0.0)
    (load,) = at.actions()
    at.flow.release(fetch)
    at.answer(load, [True])
    assert at.flow.ledger.pinned() == 0 and at.flow.sources(0, keys(1), 0.0).tolist() == [0]


def test_without_room_the_last_chunks_fail_and_nothing_wanted_is_evicted() -> None:
    at = Setup(slots=3)
    at.held[0] = dict.fromkeys(keys(2, 3, 4), FULL)
    at.store(1, 9)
    for action in at.actions():
        at.answer(action, [True, True])
    fetch = at.flow.fetch([(0, keys(1, 2, 3, 4))], 10.0, 0.0)
    (load,) = at.actions()
    assert isinstance(load, StartLoad) and load.keys == keys(2, 3)
    at.answer(load, [True, True])
    assert fetch.done and (fetch.slots[0] >= 0).tolist() == [True, True, True, False]


def test_committed_chunks_are_written_to_every_tier_that_lacks_them() -> None:
    at = Setup(tiers=2)
    at.held[0] = dict.fromkeys(keys(1), FULL)
    at.held[1] = dict.fromkeys(keys(2), 0b0011)
    at.store(1, 2)
    first, second = at.actions()
    assert isinstance(first, StartStore) and (first.tier, first.keys) == (0, keys(2))
    assert isinstance(second, StartStore) and (second.tier, second.keys) == (1, keys(1, 2))
    assert at.flow.ledger.pinned() == 2
    at.answer(first, [True])
    at.answer(second, [True, False])
    assert at.flow.ledger.pinned() == 0 and at.flow.spills_idle()
    assert (at.flow.counters.spills, at.flow.counters.spill_failures) == (2, 1)


def test_a_promoted_chunk_goes_to_the_other_tiers_only() -> None:
    at = Setup(tiers=2)
    at.held[1] = dict.fromkeys(keys(1), FULL)
    at.flow.fetch([(0, keys(1))], 10.0, 0.0)
    (load,) = at.actions()
    assert isinstance(load, StartLoad) and load.tier == 1
    at.held[1].clear()
    at.answer(load, [True])
    (store,) = at.actions()
    assert isinstance(store, StartStore) and store.tier == 0


def test_spills_are_bounded_and_dropped_when_evicted_first() -> None:
    at = Setup(slots=4, spill_chunks=2)
    at.store(1, 2, 3, 4)
    (store,) = at.actions()
    assert isinstance(store, StartStore) and store.keys == keys(1, 2) and at.flow.spills[0].chunks == 2
    at.store(5, 6)
    assert at.actions() == [] and at.flow.lookup(0, keys(3, 4), 0.0).tolist() == [0, 0]
    at.answer(store, [True, True])
    (store,) = at.actions()
    assert isinstance(store, StartStore) and store.keys == keys(5, 6)
    assert at.flow.stats()["spills_dropped"] == 2


def test_many_small_commits_gather_into_few_transfers() -> None:
    at = Setup(slots=64)
    for name in range(1, 31):
        at.store(name)
    stores = at.actions()
    assert len(stores) == 4
    at.answer(stores[0], [True])
    (gathered,) = at.actions()
    assert isinstance(gathered, StartStore) and gathered.keys == keys(*range(5, 31))


def test_long_loads_are_split() -> None:
    at = Setup(slots=3, payload=TRANSFER_BYTES_MAX)
    at.held[0] = dict.fromkeys(keys(1, 2, 3), FULL)
    fetch = at.flow.fetch([(0, keys(1, 2, 3))], 10.0, 0.0)
    loads = at.actions()
    assert [load.keys for load in loads if isinstance(load, StartLoad)] == [keys(1), keys(2), keys(3)]
    at.answer(loads[0], [True])
    at.flow.tick(10.0)
    assert fetch.done and (fetch.slots[0] >= 0).tolist() == [True, False, False], "what arrived in time counts"


def test_a_tier_that_keeps_failing_is_left_alone_then_probed_once() -> None:
    at = Setup(slots=64)
    at.held[0] = dict.fromkeys(keys(*range(100)), FULL)
    for name in range(FAILURES_MAX):
        assert at.flow.lookup(0, keys(50), 0.0).tolist() == [FULL]
        at.flow.fetch([(0, keys(name))], 10.0, 0.0)
        at.answer(at.flow.take_actions()[-1], [False])
    assert at.flow.lookup(0, keys(50), 0.0).tolist() == [0] and at.flow.breakers[0].state(0.0) == "open"
    assert at.flow.fetch([(0, keys(50))], 10.0, 0.0).done
    at.flow.take_actions()
    at.store(200, 201)
    assert at.actions() == [] and at.flow.stats()["spills_dropped"] == 2
    # The probe: one flight, and nothing else until it is reported.
    assert at.flow.lookup(0, keys(50), OPEN_S).tolist() == [FULL]
    at.flow.fetch([(0, keys(50))], OPEN_S + 10, OPEN_S)
    (probe,) = at.actions()
    assert at.flow.lookup(0, keys(51), OPEN_S).tolist() == [0]
    at.answer(probe, [False], now_s=OPEN_S)
    assert at.flow.breakers[0].state(OPEN_S) == "open"
    at.flow.take_actions()
    at.flow.fetch([(0, keys(51))], 2 * OPEN_S + 10, 2 * OPEN_S)
    (probe,) = at.actions()
    at.answer(probe, [True], now_s=2 * OPEN_S)
    assert at.flow.breakers[0].state(2 * OPEN_S) == "closed"
    assert at.flow.lookup(0, keys(52), 2 * OPEN_S).tolist() == [FULL]


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
    assert at.flow.lookup(0, keys(9), 1.0).tolist() == [0] and at.flow.counters.timeouts == FAILURES_MAX
    at.flow.check()


def test_an_outcome_that_does_not_fit_is_a_failure_and_an_unknown_one_is_ignored() -> None:
    at = Setup()
    at.held[0] = dict.fromkeys(keys(1, 2), FULL)
    fetch = at.flow.fetch([(0, keys(1, 2))], 10.0, 0.0)
    (load,) = at.actions()
    assert isinstance(load, StartLoad)
    at.flow.outcome(load.id + 99, np.array([True]), masks([FULL]), 0.0)
    at.flow.outcome(load.id, np.array([True]), masks([FULL]), 0.0)
    assert fetch.done and fetch.slots[0].tolist() == [-1, -1]
    at.flow.outcome(load.id, np.array([True, True]), masks([FULL, FULL]), 0.0)
    at.flow.check()


def test_a_loaded_chunk_without_a_valid_block_has_failed() -> None:
    at = Setup()
    at.held[0] = dict.fromkeys(keys(1, 2), FULL)
    fetch = at.flow.fetch([(0, keys(1, 2))], 10.0, 0.0)
    (load,) = at.actions()
    assert isinstance(load, StartLoad)
    at.flow.outcome(load.id, np.array([True, True]), masks([0, 0xFF]), 0.0)
    assert fetch.masks[0].tolist() == [0, FULL], "and blocks that the group does not have are not valid"


def test_private_chunks_are_never_spilled() -> None:
    at = Setup(slots=2)
    slots = at.flow.reserve_private(0, keys(1, 2, 3))
    assert (slots >= 0).tolist() == [True, True, False]
    at.flow.commit_private(slots)
    assert at.actions() == [] and at.flow.lookup(0, keys(1), 0.0).tolist() == [0] and at.store(5).tolist() == [-1]
    at.flow.drop_private(slots)
    at.flow.check()
    assert at.store(5)[0] >= 0
