"""Flow: the tiered store's decisions, one at a time. No bytes, no clock: time is a number, a tier is a dictionary."""

from __future__ import annotations

import numpy as np
import pytest

from stowage.cache.flow import TRANSFER_BYTES_MAX, Flow
from stowage.cache.flow_types import StartLoad, StartStore
from stowage.core.geometry import Geometry, Group, Kind, SlabClass
from tests.flow_setup import FULL, PAYLOAD, Setup, keys, masks


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


def test_each_group_spills_what_its_chunks_hold() -> None:
    """Two groups share a slab class: a chunk's size goes with the group that stored it."""
    groups = (Group(0, Kind.FULL, 16, 4, PAYLOAD // 4), Group(1, Kind.SLIDING, 16, 4, PAYLOAD // 8, window=32))
    slab = SlabClass(PAYLOAD, (0, 1), 4, 0, 0)
    flow = Flow(Geometry(groups), [slab], [lambda keys: np.zeros(len(keys), np.uint64)], 64 * PAYLOAD)
    for group, name in ((0, 1), (1, 2)):
        flow.commit(flow.reserve(group, keys(name), masks([FULL])), 0.0)
    started = [action for action in flow.take_actions() if isinstance(action, StartStore)]
    assert {key: size for action in started for key, size in zip(action.keys, action.sizes.tolist(), strict=True)} == {
        keys(1)[0]: PAYLOAD,
        keys(2)[0]: PAYLOAD // 2,
    }
    flow.check()


def test_what_a_tier_has_is_promoted_in_prompt_order() -> None:
    at = Setup()
    at.held[0] = dict.fromkeys(keys(2, 3, 5), 0b0111)
    at.store(1)
    at.flow.take_actions()
    assert at.flow.locate(keys(1, 2, 3, 4, 5), 0.0)[0].tolist() == [FULL, 7, 7, 0, 7]
    assert at.flow.sources(keys(1, 2, 3, 4, 5), 0.0).tolist() == [0, 1, 1, -1, 1]
    fetch = at.flow.fetch([(0, keys(1, 2, 3, 4, 5))], 10.0, 0.0)
    assert not fetch.done
    load = at.only(StartLoad)
    assert load.keys == keys(2, 3, 5) and load.deadline_s == 10.0
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


def test_a_cancelled_fetch_leaves_its_chunks_to_others() -> None:
    at = Setup()
    fetch, load = at.loading(1)
    at.flow.release(fetch)
    at.answer(load, [True])
    assert at.flow.ledger.pinned() == 0 and at.flow.sources(keys(1), 0.0).tolist() == [0]


def test_without_room_the_last_chunks_fail_and_nothing_wanted_is_evicted() -> None:
    at = Setup(slots=3)
    at.held[0] = dict.fromkeys(keys(2, 3, 4), FULL)
    at.store(1, 9)
    for action in at.actions():
        at.answer(action, [True, True])
    fetch = at.flow.fetch([(0, keys(1, 2, 3, 4))], 10.0, 0.0)
    load = at.only(StartLoad)
    assert load.keys == keys(2, 3)
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
    load = at.only(StartLoad)
    assert load.tier == 1
    at.held[1].clear()
    at.answer(load, [True])
    store = at.only(StartStore)
    assert store.tier == 0


def test_spills_are_bounded_and_dropped_when_evicted_first() -> None:
    at = Setup(slots=4, spill_chunks=2)
    at.store(1, 2, 3, 4)
    store = at.only(StartStore)
    assert store.keys == keys(1, 2) and at.flow.spills[0].chunks == 2
    at.store(5, 6)
    assert at.actions() == [] and at.flow.locate(keys(3, 4), 0.0)[0].tolist() == [0, 0]
    at.answer(store, [True, True])
    store = at.only(StartStore)
    assert store.keys == keys(5, 6)
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


def test_an_outcome_that_does_not_fit_is_a_failure_and_an_unknown_one_is_ignored() -> None:
    at = Setup()
    fetch, load = at.loading(1, 2)
    at.flow.outcome(load.id + 99, np.array([True]), masks([FULL]), 0.0)
    at.flow.outcome(load.id, np.array([True]), masks([FULL]), 0.0)
    assert fetch.done and fetch.slots[0].tolist() == [-1, -1]
    at.flow.outcome(load.id, np.array([True, True]), masks([FULL, FULL]), 0.0)
    at.flow.check()


def test_private_chunks_are_never_spilled() -> None:
    at = Setup(slots=2)
    assert at.flow.reserve_private(0, keys(1, 2, 3)).tolist() == [-1, -1, -1]
    slots = at.flow.reserve_private(0, keys(1, 2))
    assert (slots >= 0).all()
    at.flow.commit_private(slots)
    assert at.actions() == [] and at.flow.locate(keys(1), 0.0)[0].tolist() == [0] and at.store(5).tolist() == [-1]
    at.flow.drop_private(slots)
    at.flow.check()
    assert at.store(5)[0] >= 0


def test_f7_a_chunk_on_its_way_to_the_very_first_slot_is_not_asked_for_again() -> None:
    at = Setup()
    at.held[0] = dict.fromkeys(keys(1), FULL)
    first = at.flow.fetch([(0, keys(1))], 10.0, 0.0)
    second = at.flow.fetch([(0, keys(1))], 10.0, 0.0)
    load = at.only(StartLoad)
    assert load.slots.tolist() == [0] and at.flow.counters.joined == 1
    at.flow.release(first)
    at.flow.check()
    at.answer(load, [True])
    assert second.done and second.slots[0].tolist() == [0], "one who gave up does not take it from the other"


def test_only_who_waits_for_a_slot_is_served_by_it() -> None:
    at = Setup(tiers=0)
    coming = at.flow.reserve(0, keys(1, 2, 3, 4), masks([FULL] * 4))
    fetch = at.flow.fetch([(0, keys(2, 3))], 10.0, 0.0)
    at.flow.commit(coming[:2], 0.0)
    assert not fetch.done and fetch.slots[0].tolist() == [coming[1], -1]
    at.flow.abort(coming[2:])
    assert fetch.done and at.flow.ledger.pinned() == 1
    at.flow.release(fetch)
    at.flow.release(fetch)
    at.flow.check()
    assert at.flow.ledger.pinned() == 0


def test_a_load_says_which_blocks_the_tier_has() -> None:
    at = Setup()
    at.held[0] = dict(zip(keys(1, 2), (0b0001, 0b1110), strict=True))
    at.flow.fetch([(0, keys(1, 2, 1))], 10.0, 0.0)
    load = at.only(StartLoad)
    assert load.keys == keys(1, 2) and load.masks.tolist() == [0b0001, 0b1110]


def test_a_chunk_that_does_not_fit_under_way_waits_for_its_turn() -> None:
    at = Setup(spill_chunks=1.5)
    at.store(1, 2)
    store = at.only(StartStore)
    assert store.keys == keys(1) and at.flow.spills[0].chunks == 1
    at.answer(store, [True])
    store = at.only(StartStore)
    assert store.keys == keys(2)


def test_long_spills_are_split_into_several_transfers_at_once() -> None:
    at = Setup(payload=TRANSFER_BYTES_MAX)
    at.store(1, 2, 3)
    assert [action.keys for action in at.actions() if isinstance(action, StartStore)] == [keys(1), keys(2), keys(3)]


def test_only_private_slots_are_committed_as_private() -> None:
    at = Setup(tiers=0)
    slots = at.store(1)
    with pytest.raises(AssertionError, match=r"^commit of a slot that is not private$"):
        at.flow.commit_private(slots)
    at.flow.commit_private(np.array([-1]))


def test_a_fetch_of_what_is_all_in_host_asks_no_tier() -> None:
    at = Setup()
    at.store(1, 2)
    at.flow.take_actions()
    fetch = at.flow.fetch([(0, keys(1, 2)), (0, []), (0, keys(3))], 10.0, 0.0)
    assert fetch.done and [slots.tolist() for slots in fetch.slots] == [[0, 1], [], [-1]] and at.actions() == []


def test_dropping_the_host_leaves_what_somebody_holds() -> None:
    at = Setup()
    at.store(1, 2)
    (store,) = at.actions()
    at.answer(store, [True, True])
    assert at.flow.flights() == 0 and at.flow.spills_idle()
    fetch = at.flow.fetch([(0, keys(1))], 10.0, 0.0)
    assert at.flow.drop_host() == 1
    assert at.flow.sources(keys(1, 2), 0.0).tolist() == [0, 1], "the other one comes from the tier again"
    at.flow.release(fetch)
    at.flow.fetch([(0, keys(2))], 10.0, 0.0)
    assert at.flow.flights() == 1
    assert at.flow.drop_host() == 1
    at.flow.check()


def test_a_store_that_fails_frees_its_slots_whether_somebody_waited_or_not() -> None:
    at = Setup(slots=2)
    at.flow.abort(at.flow.reserve(0, keys(1, 2), masks([FULL] * 2)))
    assert (at.store(3, 4) >= 0).all() and at.flow.locate(keys(1, 2), 0.0)[0].tolist() == [0, 0]
    at.flow.check()


def test_very_many_chunks_go_in_one_transfer() -> None:
    """More than those whose sizes are known beforehand."""
    count = 1100
    at = Setup(slots=count, spill_chunks=4 * count)
    names = list(range(1, count + 1))
    at.store(*names)
    store = at.only(StartStore)
    assert store.keys == keys(*names) and store.sizes.tolist() == [PAYLOAD] * count
    at.answer(store, [True] * (count - 1) + [False])
    stats = at.flow.stats()
    assert (stats["spilled_bytes"], stats["spill_failures"]) == ((count - 1) * PAYLOAD, 1)
    at.flow.drop_host()
    at.flow.fetch([(0, keys(*names))], 10.0, 0.0)
    load = at.only(StartLoad)
    assert load.sizes.tolist() == [PAYLOAD] * (count - 1)
    at.answer(load, [False] + [True] * (count - 2))
    assert at.flow.stats()["promoted_bytes"] == (count - 2) * PAYLOAD
    discard = at.actions()
    assert [action.keys for action in discard] == [keys(1)]


def test_what_waits_to_be_written_is_looked_at_again() -> None:
    """While it waits a chunk may leave, its slot may get another, or it may be replaced by one with more blocks."""
    at = Setup(slots=6, spill_chunks=1)
    at.store(1, 2)
    at.store(3, 4, mask=0b0011)
    store = at.only(StartStore)
    assert store.keys == keys(1)
    pinned = at.flow.fetch([(0, keys(3))], 10.0, 0.0)
    at.store(3, mask=0b0111)  # beside the one that is pinned, which is stale now
    at.flow.release(pinned)
    at.store(5, 6, 7)  # 2 leaves, and 4 maybe
    at.held[0] |= dict.fromkeys(keys(6), FULL)
    written: dict[bytes, int] = {}
    while isinstance(store, StartStore):
        written |= dict(zip(store.keys, store.masks.tolist(), strict=True))
        for key, slot in zip(store.keys, store.slots.tolist(), strict=True):
            assert at.flow.ledger.find([key]).tolist() == [slot], "written from another chunk's slot"
        at.answer(store, [True] * len(store.keys))
        store = next(iter(at.actions()), None)  # type: ignore[assignment]
    assert written[keys(3)[0]] == 0b0111 and written[keys(5)[0]] == written[keys(7)[0]] == FULL
    assert keys(6)[0] not in written, "the tier had it"


def test_masks_and_sources_are_told_at_once() -> None:
    at = Setup(slots=2, tiers=1)
    at.store(1)
    at.held[0].update(dict.fromkeys(keys(2), FULL))
    for asked in (keys(1), keys(1, 2, 3)):
        found, sources = at.flow.locate(asked, 0.0)
        assert found.tolist() == [FULL, FULL, 0][: len(asked)]
        assert sources.tolist() == at.flow.sources(asked, 0.0).tolist() == [0, 1, -1][: len(asked)]
