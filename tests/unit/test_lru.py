"""LRU: exact order, batched."""

import numpy as np
from numpy.typing import NDArray

from stowage.core.policy import LRU


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
