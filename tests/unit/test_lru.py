"""LRU: exact order, batched."""

import numpy as np
import pytest
from numpy.typing import NDArray

from stowage.cache.policy import LRU


def slots(*numbers: int) -> NDArray[np.int64]:
    return np.array(numbers, np.int64)


def test_victims_leave_in_the_order_of_their_last_use() -> None:
    lru = LRU(8)
    lru.insert(slots(3, 1, 4))
    lru.insert(slots(5))
    lru.insert(slots(3))
    lru.check()
    assert list(lru) == [1, 4, 5, 3]
    assert lru.victims(2).tolist() == [1, 4]
    assert lru.victims(9).tolist() == [5, 3]
    assert lru.victims(1).tolist() == [] and len(lru) == 0


def test_removed_slots_are_no_victims() -> None:
    lru = LRU(8)
    lru.insert(slots(0, 1, 2, 3))
    lru.remove(slots(0, 2, 7))
    assert lru.victims(4).tolist() == [1, 3]


def test_of_a_repeated_slot_the_last_use_counts() -> None:
    lru = LRU(4)
    lru.insert(slots(2, 0, 2, 1))
    lru.check()
    assert lru.victims(4).tolist() == [0, 2, 1]


def test_no_victims_asked_for_takes_nothing() -> None:
    lru = LRU(4)
    lru.insert(slots(0, 1))
    assert lru.victims(0).tolist() == [] and list(lru) == [0, 1]


def test_order_survives_many_uses_of_a_full_ring() -> None:
    lru = LRU(50)
    lru.insert(np.arange(50))
    chance = np.random.default_rng(0)
    order = list(range(50))
    for _ in range(500):
        batch = chance.permutation(50)[: chance.integers(1, 50)]
        lru.insert(batch)
        used = set(batch.tolist())
        order = [slot for slot in order if slot not in used] + batch.tolist()
    lru.check()
    assert list(lru) == order
    assert lru.victims(50).tolist() == order


def test_batch_larger_than_the_ring() -> None:
    lru = LRU(2)
    lru.insert(np.tile(np.array([0, 1]), 500))
    lru.check()
    assert lru.victims(2).tolist() == [0, 1]


def test_a_ring_that_was_moved_to_the_front_loses_nothing() -> None:
    """Every slot is used until the ring is full to the last place, and one more time."""
    lru = LRU(3)
    order = [0, 1, 2]
    lru.insert(slots(*order))
    for step in range(500):
        slot = order.pop(step * 7 % 3)
        order.append(slot)
        lru.insert(slots(slot))
        lru.check()
        assert list(lru) == order, f"after {step} uses"
    assert lru.victims(3).tolist() == order


@pytest.mark.parametrize("uses", [1, 40, 100, 190])
def test_exactly_as_many_leave_as_are_asked_for(uses: int) -> None:
    """Slots 0 to 9 are used again and again, so what leaves first lies behind stretches of the ring that are dead."""
    lru = LRU(200)
    lru.insert(np.arange(200))
    for _ in range(uses):
        lru.insert(slots(5, 3, 199))
        lru.remove(slots(100))
    order = [slot for slot in range(200) if slot not in (3, 5, 100, 199)] + [5, 3, 199]
    for count in (1, 2, 63, 1, 64, 1, 65, 3):
        assert lru.victims(count).tolist() == order[:count]
        lru.check()
        del order[:count]
    assert order == [] and lru.victims(1).tolist() == [] and len(lru) == 0


def test_one_more_behind_a_dead_stretch() -> None:
    lru = LRU(100)
    lru.insert(np.arange(100))
    lru.remove(np.arange(1, 99))
    assert lru.victims(2).tolist() == [0, 99]
    lru.insert(np.arange(100))
    lru.remove(np.arange(2, 98))
    assert lru.victims(3).tolist() == [0, 1, 98] and list(lru) == [99]


def test_an_order_over_no_slots() -> None:
    lru = LRU(0)
    lru.insert(slots())
    assert lru.victims(3).tolist() == [] and len(lru) == 0
    lru.check()
