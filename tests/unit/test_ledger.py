"""Ledger: which chunk is where. Masks, pins, replacement, eviction."""

from collections.abc import Callable

import numpy as np
import pytest
from numpy.typing import NDArray

from stowage.cache.ledger import Ledger
from stowage.cache.policy.lru import LRU
from stowage.cache.slot_states import State
from tests.flow_setup import keys

FULL = 0b1111


def masks(*values: int) -> NDArray[np.uint64]:
    return np.array(values, np.uint64)


def store(ledger: Ledger, *names: int, mask: int = FULL, slab: int = 0) -> NDArray[np.int64]:
    slots = ledger.reserve(slab, keys(*names), masks(*[mask] * len(names)))
    ledger.commit(slots[slots >= 0])
    return slots


def present(ledger: Ledger, *names: int) -> list[bool]:
    return (ledger.lookup(keys(*names)) != 0).tolist()


def test_a_chunk_is_found_from_commit_on() -> None:
    ledger = Ledger([4])
    slots = ledger.reserve(0, keys(1, 2), masks(FULL, 0b0110))
    assert present(ledger, 1, 2) == [False, False]
    assert ledger.find_in_flight(keys(1, 2, 3)).tolist() == [*slots.tolist(), -1]
    ledger.commit(slots)
    assert ledger.lookup(keys(1, 2, 3)).tolist() == [FULL, 0b0110, 0]
    assert ledger.find(keys(2, 3)).tolist() == [slots[1], -1]
    ledger.check()


def test_what_needs_no_slot_gets_none() -> None:
    ledger = Ledger([8])
    store(ledger, 1, mask=0b0111)
    under_way = ledger.reserve(0, keys(2), masks(FULL))
    slots = ledger.reserve(0, keys(1, 1, 2, 3, 4, 4), masks(0b0011, 0b1000, FULL, 0, FULL, FULL))
    assert (slots >= 0).sum() == 1 and (slots[4] >= 0) != (slots[5] >= 0)
    assert ledger.used(0) == 3
    ledger.check()
    ledger.commit(slots[slots >= 0])
    ledger.commit(under_way)
    ledger.check()


def test_a_chunk_that_takes_the_slot_of_the_one_before_it_does_not_follow_itself() -> None:
    seen: list[int] = []

    class Seeing(LRU):
        def admit(self, slots: NDArray[np.int64], keys: list[bytes], parents: NDArray[np.int64]) -> None:
            seen.extend(parents.tolist())
            super().admit(slots, keys, parents)

    ledger = Ledger([1], Seeing)
    store(ledger, 1)
    slots = ledger.reserve(0, keys(2), masks(FULL), after=keys(1)[0])
    ledger.commit(slots)
    assert slots.tolist() == [0]
    assert seen == [-1, -1]


def test_a_superset_replaces_and_a_pinned_older_chunk_stays_until_unpinned() -> None:
    ledger = Ledger([4])
    old = store(ledger, 1, mask=0b1100)
    ledger.pin(old)
    new = ledger.reserve(0, keys(1), masks(0b1110))
    assert new[0] >= 0 and ledger.lookup(keys(1)).tolist() == [0b1100]
    assert ledger.reserve(0, keys(1), masks(FULL)).tolist() == [-1], "one replacement at a time"
    ledger.check()
    ledger.commit(new)
    assert ledger.lookup(keys(1)).tolist() == [0b1110] and ledger.find(keys(1)).tolist() == new.tolist()
    assert ledger.states(old).tolist() == [State.STALE]
    ledger.check()
    ledger.unpin(old)
    assert ledger.states(old).tolist() == [State.FREE] and ledger.used(0) == 1
    ledger.check()


def test_an_aborted_replacement_leaves_the_older_chunk() -> None:
    ledger = Ledger([4])
    store(ledger, 1, mask=0b1100)
    new = ledger.reserve(0, keys(1, 2), masks(FULL, FULL))
    ledger.abort(new)
    assert ledger.lookup(keys(1, 2)).tolist() == [0b1100, 0] and ledger.used(0) == 1
    ledger.check()


def test_a_replacement_survives_the_eviction_of_what_it_replaces() -> None:
    ledger = Ledger([2])
    store(ledger, 1, mask=0b1100)
    new = ledger.reserve(0, keys(1), masks(FULL))
    store(ledger, 2)
    assert present(ledger, 1, 2) == [False, True]
    assert ledger.reserve(0, keys(1), masks(FULL)).tolist() == [-1], "still on its way"
    ledger.commit(new)
    assert present(ledger, 1, 2) == [True, True]
    ledger.check()


def test_the_least_recently_used_goes_and_heads_outlive_tails() -> None:
    ledger = Ledger([4])
    store(ledger, 1, 2, 3, 4)
    assert store(ledger, 5)[0] >= 0
    assert present(ledger, 1, 2, 3, 4) == [True, True, True, False]
    slots = ledger.find(keys(3))
    ledger.pin(slots)
    ledger.unpin(slots)
    store(ledger, 6)
    assert present(ledger, 1, 2, 3, 5, 6) == [True, False, True, True, True]
    assert ledger.evictions == 2
    ledger.check()


def test_pinned_chunks_are_never_evicted() -> None:
    ledger = Ledger([2])
    slots = store(ledger, 1, 2)
    ledger.pin(slots)
    ledger.pin(slots[:1])
    assert store(ledger, 3, 4).tolist() == [-1, -1]
    ledger.unpin(slots)
    assert (store(ledger, 3, 4) >= 0).tolist() == [True, False]
    assert present(ledger, 1, 2, 3) == [True, False, True]
    ledger.unpin(slots[:1])
    ledger.check()


def test_when_room_is_short_the_first_keys_get_it() -> None:
    ledger = Ledger([3])
    slots = ledger.reserve(0, keys(1, 2, 3, 4, 5), masks(0b0001, 0b0010, 0b0100, 0b1000, FULL))
    assert (slots >= 0).tolist() == [True, True, True, False, False]
    assert (ledger.fill(0, keys(8, 9)) < 0).all()
    assert (ledger.take_private(0, keys(8)) < 0).all()
    ledger.commit(slots[:3])
    assert ledger.lookup(keys(1, 2, 3, 4, 5)).tolist() == [0b0001, 0b0010, 0b0100, 0, 0]
    ledger.check()


def test_a_batch_does_not_evict_its_own_chunks_while_others_can_go() -> None:
    ledger = Ledger([4])
    store(ledger, 1, 2)
    store(ledger, 7, 8)
    store(ledger, 1, 2, 3, 4)
    assert present(ledger, 1, 2, 3, 4) == [True] * 4
    ledger.check()


def test_promotion_brings_its_masks() -> None:
    ledger = Ledger([4])
    slots = ledger.fill(0, keys(1, 2))
    assert ledger.filling().tolist() == sorted(slots.tolist()) and present(ledger, 1) == [False]
    assert ledger.reserve(0, keys(1), masks(FULL)).tolist() == [-1]
    ledger.commit_filled(slots[:1], masks(0b0001))
    ledger.abort(slots[1:])
    assert ledger.lookup(keys(1, 2)).tolist() == [0b0001, 0]
    ledger.check()


def test_private_chunks_are_in_no_look_up_and_never_evicted() -> None:
    ledger = Ledger([2])
    slots = ledger.take_private(0, keys(1))
    assert present(ledger, 1) == [False] and ledger.pinned() == 1
    assert (store(ledger, 2, 3) >= 0).tolist() == [True, False]
    store(ledger, 4)
    assert ledger.states(slots).tolist() == [State.PRIVATE]
    ledger.check()
    ledger.drop_private(slots)
    assert ledger.used(0) == 1
    ledger.check()


@pytest.mark.parametrize("between", [(), (0,), (0, 0)])
def test_slab_classes_do_not_share_slots(between: tuple[int, ...]) -> None:
    ledger = Ledger([2, *between, 3])
    slab, begin = 1 + len(between), 2
    first, last = store(ledger, 1, 2, 3), store(ledger, 4, 5, 6, slab=slab)
    assert set(first[first >= 0].tolist()) == {0, 1} and set(last.tolist()) == {begin, begin + 1, begin + 2}
    for empty in range(1, slab):
        assert store(ledger, 9, slab=empty).tolist() == [-1]
    both = np.array([0, begin + 1])
    ledger.pin(both)
    ledger.check()
    ledger.unpin(both)
    ledger.check()
    assert store(ledger, 7, slab=slab)[0] == begin + 2, "the least recently used of its own class"
    assert ledger.drop() == 5 and ledger.used(0) == ledger.used(slab) == 0
    ledger.check()


@pytest.mark.parametrize("misuse", ["commit", "abort", "pin", "unpin", "drop_private"])
def test_misuse_is_an_assertion(misuse: str) -> None:
    ledger = Ledger([4])
    with pytest.raises(AssertionError):
        getattr(ledger, misuse)(np.array([1]))


def test_empty_batches() -> None:
    ledger = Ledger([4])
    none = np.empty(0, np.int64)
    assert ledger.lookup([]).tolist() == [] and ledger.reserve(0, [], masks()).tolist() == []
    ledger.commit(none)
    ledger.pin(none)
    ledger.unpin(none)
    ledger.abort(none)
    assert ledger.drop() == 0
    ledger.check()


def test_a_replacement_on_its_way_is_found_before_the_chunk_that_it_will_replace() -> None:
    ledger = Ledger([8])
    store(ledger, 1, 2, mask=0b1100)
    new = ledger.reserve(0, keys(2, 3), masks(FULL, FULL))
    on_the_way = ledger.find_in_flight(keys(1, 2, 3, 4))
    assert on_the_way.tolist() == [-1, new[0], new[1], -1] and on_the_way.dtype == np.int64
    ledger.abort(new[:1])
    assert ledger.find_in_flight(keys(1, 2, 3)).tolist() == [-1, -1, new[1]]
    assert present(ledger, 1, 2, 3) == [True, True, False]
    ledger.check()


def test_a_replacement_in_the_very_first_slot_is_seen() -> None:
    ledger = Ledger([2])
    assert [store(ledger, 9)[0], store(ledger, 1, mask=0b1100)[0]] == [0, 1]
    assert ledger.reserve(0, keys(1), masks(FULL)).tolist() == [0]
    assert ledger.find_in_flight(keys(1)).tolist() == [0]
    assert ledger.reserve(0, keys(1), masks(FULL)).tolist() == [-1], "one replacement at a time"
    ledger.check()


def test_a_replacement_on_its_way_changes_nothing_for_other_chunks() -> None:
    ledger = Ledger([8])
    store(ledger, 1, 2, mask=0b1100)
    coming = ledger.reserve(0, keys(1, 3), masks(FULL, FULL))
    slots = ledger.reserve(0, keys(2, 2, 3, 4, 5, 5, 6), masks(0b0100, 0b1100, FULL, 0, FULL, FULL, FULL))
    assert (slots[[4, 5]] >= 0).sum() == 1 and slots[6] >= 0 and (slots[[0, 1, 2, 3]] == -1).all()
    ledger.commit(np.concatenate((coming, slots[slots >= 0])))
    ledger.check()
    assert ledger.used(0) == 5 and ledger.lookup(keys(1, 2, 3, 5, 6)).tolist() == [FULL, 0b1100, FULL, FULL, FULL]


def test_a_repeated_replacement_gets_one_slot() -> None:
    ledger = Ledger([8])
    store(ledger, 1, mask=0b1100)
    new = ledger.reserve(0, keys(1, 2, 1), masks(FULL, FULL, FULL))
    assert (new >= 0).sum() == 2 and new[1] >= 0 and ledger.used(0) == 3
    ledger.check()
    ledger.commit(new[new >= 0])
    assert ledger.lookup(keys(1, 2)).tolist() == [FULL, FULL] and ledger.used(0) == 2
    ledger.check()


def test_several_stale_chunks_are_freed_one_by_one() -> None:
    ledger = Ledger([8])
    old = store(ledger, 1, 2, 3, mask=0b1100)
    ledger.pin(old)
    for name in (1, 2, 3):
        ledger.commit(ledger.reserve(0, keys(name), masks(FULL)))
        ledger.check()
    for place in range(3):
        ledger.unpin(old[place : place + 1])
        ledger.check()
    assert ledger.used(0) == 3


def test_slots_where_there_is_room_for_some_only() -> None:
    ledger = Ledger([3])
    filled = ledger.fill(0, keys(1, 2))
    more = ledger.fill(0, keys(3, 4, 5))
    assert filled.tolist() == [0, 1] and more.tolist() == [2, -1, -1] and more.dtype == np.int64
    ledger.check()
    ledger.abort(np.array([0, 1, 2]))
    ledger.check()


def test_private_slots_are_for_all_or_none_and_none_evicts_nothing() -> None:
    ledger = Ledger([5, 2])
    store(ledger, 1, 2, 3)
    pinned = ledger.find(keys(3))
    ledger.pin(pinned)
    none = ledger.take_private(0, keys(6, 7, 8, 9, 10))
    assert none.tolist() == [-1] * 5 and none.dtype == np.int64
    assert present(ledger, 1, 2, 3) == [True] * 3 and ledger.evictions == 0 and ledger.used(0) == 3
    ledger.check()
    private = ledger.take_private(0, keys(6, 7, 8))
    assert (private >= 0).all() and ledger.keys(private) == keys(6, 7, 8) and private.dtype == np.int64
    assert present(ledger, 1, 2, 3) == [True, False, True] and ledger.evictions == 1
    ledger.unpin(pinned)
    assert (ledger.take_private(0, keys(9, 10)) >= 0).all() and ledger.evictions == 3
    assert ledger.take_private(0, keys(11)).tolist() == [-1] and ledger.take_private(0, []).tolist() == []
    assert (ledger.take_private(1, keys(11, 12)) >= 0).all()
    ledger.check()


@pytest.mark.parametrize(
    ("misuse", "says"),
    [
        (lambda ledger, slots: ledger.commit(slots), "commit of a slot that is not on its way"),
        (lambda ledger, slots: ledger.abort(slots), "abort of a slot that is not on its way"),
        (lambda ledger, slots: ledger.pin(slots + 1), "pin of a slot that is not ready"),
        (lambda ledger, slots: ledger.unpin(slots), "unpin of a slot that is not pinned"),
        (lambda ledger, slots: ledger.drop_private(slots), "drop of a slot that is not private"),
        (lambda ledger, slots: ledger.fill(0, keys(2, 3, 2)), "a key is filled twice"),
    ],
)
def test_misuse_says_what_is_wrong(misuse: Callable[[Ledger, NDArray[np.int64]], object], says: str) -> None:
    ledger = Ledger([4])
    with pytest.raises(AssertionError, match=f"^{says}$"):
        misuse(ledger, store(ledger, 1))


def test_slots_are_still_those_of_their_keys_until_they_are_not_ready_with_them() -> None:
    ledger = Ledger([2])
    slots = store(ledger, 1, 2)
    assert ledger.are_still(slots, keys(1, 2)) and ledger.are_still(slots[1:], keys(2))
    assert not ledger.are_still(slots, keys(1, 3))
    ledger.drop()
    assert not ledger.are_still(slots, keys(1, 2)), "evicted"
    again = ledger.reserve(0, keys(1, 2), masks(FULL, FULL))
    assert again.tolist() == slots.tolist() and not ledger.are_still(slots, keys(1, 2)), "its bytes are on their way"
    ledger.abort(again)
    old = store(ledger, 1, mask=0b0011)
    ledger.pin(old)
    store(ledger, 1, mask=0b0111)
    assert not ledger.are_still(old, keys(1)), "another slot is the key's"
    ledger.unpin(old)
    assert ledger.are_still(ledger.find(keys(1)), keys(1))
    ledger.check()


def test_prompts_that_share_a_beginning_are_found_in_full() -> None:
    ledger = Ledger([1000])
    shared, tails = range(130), [range(first, first + 130) for first in (200, 400, 600)]
    for tail in tails:
        store(ledger, *shared, *tail)
    for tail in tails:
        assert present(ledger, *shared, *tail, *range(900, 905)) == [True] * 260 + [False] * 5
        assert ledger.find(keys(*tail)).tolist() == [ledger.find(keys(name))[0] for name in tail]


def test_a_prompt_is_found_whose_end_was_evicted_and_whose_middle_was_replaced() -> None:
    ledger = Ledger([128])
    store(ledger, *range(128), mask=1)
    store(ledger, *range(200, 210), mask=1)
    assert present(ledger, *range(128)) == [True] * 118 + [False] * 10
    slots = store(ledger, 3, mask=3)
    assert ledger.lookup(keys(*range(5))).tolist() == [1, 1, 1, 3, 1] and ledger.find(keys(3)) == slots
    assert ledger.drop() == 127 and not any(present(ledger, *range(128), *range(200, 210)))
    ledger.check()


def test_a_long_prompt_that_was_stored_a_step_at_a_time_is_found() -> None:
    ledger = Ledger([48_000])
    for begin in range(0, 48_000, 32):
        store(ledger, *range(begin, begin + 32))
    slots = ledger.find(keys(*range(48_003)))
    assert slots[-3:].tolist() == [-1, -1, -1] and ledger.keys(slots[:-3]) == keys(*range(48_000))


def test_what_is_found_may_be_changed_by_the_caller() -> None:
    ledger = Ledger([128])
    expected = store(ledger, *range(128)).tolist()
    ledger.find(keys(*range(128)))[:] = -1
    ledger.find_in_flight(keys(*range(128)))[:] = 7
    assert ledger.find(keys(*range(128))).tolist() == expected
