"""What waits to be written to a tier: bounds in chunks, bytes and transfers, and what is dropped."""

from __future__ import annotations

import numpy as np
import pytest
from numpy.typing import NDArray

from stowage.cache.spill_queue import TRANSFER_BYTES_MIN, TRANSFERS_MAX, SpillQueue

MIB = 1 << 20


def batch(*names: int) -> tuple[NDArray[np.int64], list[bytes]]:
    return np.array(names), [bytes([name]) * 32 for name in names]


def waiting(*batches: tuple[int, ...], bytes_max: int = 100, chunks_max: int = 100) -> SpillQueue:
    queue = SpillQueue(bytes_max, chunks_max)
    for names in batches:
        queue.add(*batch(*names))
        queue.check()
    return queue


def test_the_oldest_batch_comes_first_and_what_did_not_fit_goes_back_to_its_place() -> None:
    queue = waiting((1, 2, 3), (4,))
    slots, keys = queue.pop(9)
    assert slots.tolist() == [1, 2, 3] and queue.chunks == 1
    queue.push_back(slots[1:], keys[1:])
    queue.check()
    assert queue.chunks == 3
    assert queue.pop(2)[0].tolist() == [2, 3] and queue.pop(1)[0].tolist() == [4] and queue.chunks == 0
    queue.push_back(slots[3:], keys[3:])
    assert queue.idle() and queue.dropped == 0


def test_of_a_long_batch_some_can_be_had_and_the_others_stay() -> None:
    queue = waiting((1, 2, 3), (4,))
    slots, keys = queue.pop(2)
    assert slots.tolist() == [1, 2] and keys == batch(1, 2)[1] and queue.chunks == 2
    queue.check()
    queue.push_back(slots[1:], keys[1:])
    queue.check()
    assert [queue.pop(2)[0].tolist() for _ in range(3)] == [[2], [3], [4]]


def test_when_too_many_wait_the_oldest_are_dropped_and_counted() -> None:
    queue = waiting((1, 2), (3,), (4, 5), chunks_max=5)
    assert (queue.chunks, queue.dropped) == (5, 0)
    queue.add(*batch(6))
    assert (queue.chunks, queue.dropped) == (4, 2)
    queue.add(*batch(7, 8, 9))
    assert (queue.chunks, queue.dropped) == (4, 5) and queue.pop(9)[0].tolist() == [6]
    queue.add(*batch(*range(10, 16)))
    assert (queue.chunks, queue.dropped) == (0, 14), "a batch that is too long is dropped whole"
    queue.check()


def test_everything_can_be_dropped() -> None:
    queue = waiting((1, 2), (3,))
    queue.drop()
    queue.add(*batch(4))
    queue.drop()
    assert queue.idle() and queue.dropped == 4
    queue.add(*batch())
    assert queue.idle() and not queue.room(), "no chunks are no batch"


def test_room_for_another_transfer() -> None:
    queue = waiting((1,), bytes_max=10)
    assert queue.room()
    queue.begin(9)
    assert queue.room()
    queue.begin(1)
    assert not queue.room(), "as many bytes are under way as may be"
    queue.end(1)
    for _ in range(TRANSFERS_MAX - 1):
        assert queue.room()
        queue.begin(0)
    assert not queue.room(), "as many transfers as may be"
    queue.pop(1)
    queue.end(0)
    assert not queue.room(), "nothing waits"


def test_one_transfer_may_always_be_under_way() -> None:
    queue = waiting((1,), bytes_max=0)
    assert queue.room()
    queue.begin(5)
    queue.check()
    assert not queue.room()
    queue.end(5)
    assert queue.room()


@pytest.mark.parametrize(
    ("under_way", "gathered", "transfer_max", "fitting"),
    [
        (0, 0, 99, 3),  # MiB: 4 + 3 + 3 of 10, a quarter of what may be under way
        (0, 0, 9, 2),
        (0, 0, 7, 2),
        (0, 3, 99, 2),
        (0, 3, 6, 0),  # something was gathered: nothing must go with it
        (0, 0, 3, 1),  # the first chunk of a transfer goes, however long it is
        (0, 0, 0, 1),
        (30, 0, 99, 3),
        (33, 0, 99, 2),
        (33, 3, 99, 1),
        (33, 4, 99, 0),
        (36, 0, 3, 1),
        (37, 0, 99, 0),  # but not beyond what may be under way
        (37, 0, 3, 0),
        (33, 0, 4, 1),
    ],
)
def test_how_many_chunks_may_join_a_transfer(under_way: int, gathered: int, transfer_max: int, fitting: int) -> None:
    queue = waiting((1, 2, 3, 4), bytes_max=40 * MIB)
    if under_way:
        queue.begin(under_way * MIB)
    assert queue.fitting(np.array([4, 3, 3, 2]) * MIB, gathered * MIB, transfer_max * MIB) == fitting
    assert queue.fitting(np.array([], np.int64), gathered, transfer_max) == 0


def test_of_little_a_transfer_may_have_all() -> None:
    queue = waiting((1, 2, 3), bytes_max=3 * TRANSFER_BYTES_MIN)
    sizes = np.array([1, 2, 3]) * TRANSFER_BYTES_MIN // 3
    assert queue.fitting(sizes, 0, 1 << 30) == 2
    queue = waiting((1, 2, 3), bytes_max=TRANSFER_BYTES_MIN // 2)
    assert queue.fitting(sizes // 4, 0, 1 << 30) == 3


def test_idle_is_nothing_waiting_and_nothing_under_way() -> None:
    queue = waiting((1,))
    assert not queue.idle()
    queue.pop(1)
    assert queue.idle()
    queue.begin(3)
    assert not queue.idle()
    queue.end(3)
    assert queue.idle()


def test_the_check_finds_counts_that_do_not_add_up() -> None:
    queue = waiting((1, 2), bytes_max=10)
    queue.begin(6)
    queue.begin(4)
    queue.check()
    for name, value in (("chunks", 3), ("chunks", 1), ("transfers", -1), ("transfers", 5), ("bytes_in_flight", -1)):
        right = getattr(queue, name)
        setattr(queue, name, value)
        with pytest.raises(AssertionError):
            queue.check()
        setattr(queue, name, right)
    queue.begin(1)
    with pytest.raises(AssertionError, match=r"^too much is in flight$"):
        queue.check()


@pytest.mark.parametrize(("transfers", "payload_bytes"), [(0, 4), (2, 0)])
def test_the_check_finds_bytes_without_a_transfer_and_transfers_without_bytes(
    transfers: int, payload_bytes: int
) -> None:
    queue = waiting((1,))
    queue.transfers, queue.bytes_in_flight = transfers, payload_bytes
    with pytest.raises(AssertionError):
        queue.check()
