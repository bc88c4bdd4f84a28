"""Ledger: which chunk is where. Masks, pins, replacement, eviction."""

import numpy as np
import pytest
from numpy.typing import NDArray

from stowage.core.ledger import Ledger, State

FULL = 0b1111


def keys(*names: int) -> list[bytes]:
    return [name.to_bytes(32, "little") for name in names]


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
    assert ledger.find_on_the_way(keys(1, 2, 3)).tolist() == [*slots.tolist(), -1]
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
    slots = ledger.reserve(0, keys(1, 2, 3, 4, 5), masks(*[FULL] * 5))
    assert (slots >= 0).tolist() == [True, True, True, False, False]
    assert (ledger.fill(0, keys(8, 9)) < 0).all()
    assert (ledger.take_private(0, keys(8)) < 0).all()
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


def test_slab_classes_do_not_share_slots() -> None:
    ledger = Ledger([2, 0, 3])
    first, last = store(ledger, 1, 2, 3), store(ledger, 4, 5, 6, slab=2)
    assert set(first[first >= 0].tolist()) == {0, 1} and set(last.tolist()) == {2, 3, 4}
    assert store(ledger, 9, slab=1).tolist() == [-1]
    both = np.array([0, 3])
    ledger.pin(both)
    ledger.unpin(both)
    ledger.check()
    assert ledger.drop() == 5 and ledger.used(0) == ledger.used(2) == 0
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
