"""TieredStore: real arena, real threads below, real clock where one is waited for."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

import numpy as np
import pytest
from numpy.typing import NDArray

from stowage.cache.flow_types import Fetch
from stowage.cache.store import TieredStore
from stowage.core.geometry import Geometry, Group, Kind
from stowage.errors import BudgetError, ConfigError, StorageError
from stowage.storage.protocol import Outcome, Transfer
from tests.flow_setup import keys

GEOMETRY = Geometry((Group(0, Kind.FULL, 16, 4, 1000), Group(1, Kind.SLIDING, 16, 4, 5000, window=64)))
FULL = 0b1111
HOST_BYTES = 64 * 4096


class MemoryTier:
    """Does each transfer in a thread of its own, after `delay_s`, and announces it when `wake` is set."""

    def __init__(self, delay_s: float = 0.01, announces: bool = True) -> None:
        self.name = "memory"
        self.held: dict[bytes, tuple[bytes, int]] = {}
        self.refuses = False
        self.gate = threading.Event()
        self.gate.set()
        self._delay_s = delay_s
        self._outcomes: list[Outcome] = []
        self._lock = threading.Lock()
        self._threads: list[threading.Thread] = []
        if announces:
            self.wake: Callable[[], None] = lambda: None

    def lookup(self, keys: list[bytes]) -> NDArray[np.uint64]:
        with self._lock:
            return np.array([self.held.get(key, (b"", 0))[1] for key in keys], np.uint64)

    def load(self, transfer: Transfer) -> None:
        self._begin(self._load, transfer)

    def store(self, transfer: Transfer) -> None:
        self._begin(self._store, transfer)

    def _begin(self, work: Callable[[Transfer], Outcome], transfer: Transfer) -> None:
        if self.refuses:
            raise StorageError("not now")

        def run() -> None:
            self.gate.wait()
            time.sleep(self._delay_s)
            outcome = work(transfer)
            transfer.buffers.clear()
            with self._lock:
                self._outcomes.append(outcome)
            if hasattr(self, "wake"):
                self.wake()

        self._threads.append(threading.Thread(target=run))
        self._threads[-1].start()

    def _load(self, transfer: Transfer) -> Outcome:
        found = [self.held.get(key, (b"", 0)) for key in transfer.keys]
        for buffer, (content, mask) in zip(transfer.buffers, found, strict=True):
            if mask:
                buffer[:] = content
        masks = np.array([mask for _, mask in found], np.uint64)
        return Outcome(transfer.id, masks != 0, masks)

    def _store(self, transfer: Transfer) -> Outcome:
        with self._lock:
            for key, buffer, mask in zip(transfer.keys, transfer.buffers, transfer.masks.tolist(), strict=True):
                self.held[key] = (bytes(buffer), mask)
        return Outcome(transfer.id, np.ones(len(transfer.keys), bool), transfer.masks)

    def poll(self) -> list[Outcome]:
        with self._lock:
            outcomes, self._outcomes = self._outcomes, []
        return outcomes

    def discard(self, keys: list[bytes]) -> None:
        for key in keys:
            self.held.pop(key, None)

    def stats(self) -> dict[str, int | float | str]:
        return {"chunks": len(self.held)}

    def close(self, deadline_s: float) -> None:
        for thread in self._threads:
            thread.join(max(0.0, deadline_s - time.monotonic()))


def content(name: int, group: int) -> bytes:
    return bytes([name]) * GEOMETRY.groups[group].bytes_per_chunk


def write(store: TieredStore, group: int, *names: int) -> NDArray[np.int64]:
    slots = store.reserve(group, keys(*names), np.full(len(names), FULL, np.uint64))
    for name, slot in zip(names, slots.tolist(), strict=True):
        if slot >= 0:
            store.payload(slot, group)[:] = content(name, group)
    store.commit(slots)
    return slots


def finish(store: TieredStore, fetch: Fetch, timeout_s: float = 10.0) -> None:
    end_s = time.monotonic() + timeout_s
    while not fetch.done and time.monotonic() < end_s:
        store.wait(end_s - time.monotonic())
        store.poll()
    assert fetch.done


@pytest.mark.parametrize("announces", [True, False])
def test_chunks_of_every_group_come_back_from_a_lower_tier(announces: bool) -> None:
    tier = MemoryTier(announces=announces)
    store = TieredStore(GEOMETRY, HOST_BYTES, [tier])
    write(store, 0, 1, 2, 3)
    write(store, 1, 11, 12)
    assert store.flush(10.0) and len(tier.held) == 5
    assert store.drop_host() == 5
    assert store.sources(keys(1, 2, 3, 4)).tolist() == [1, 1, 1, -1]
    fetch = store.fetch([(0, keys(1, 2, 3, 4)), (1, keys(11, 12))], time.monotonic() + 10.0)
    assert not fetch.done
    finish(store, fetch)
    assert [sources.tolist() for sources in fetch.sources] == [[1, 1, 1, -1], [1, 1]]
    for group, names in ((0, (1, 2, 3)), (1, (11, 12))):
        for name, slot in zip(names, fetch.slots[group].tolist(), strict=False):
            assert store.payload(slot, group) == content(name, group)
    store.release(fetch)
    store.check()
    stats = store.stats()
    assert stats["promoted"] == 5 and stats["memory.chunks"] == 5 and stats["memory.breaker"] == "closed"
    assert stats["chunks_pinned"] == 0 and stats["spills_dropped"] == 0
    store.close()
    assert store.arena.close(), "nothing holds the arena"


def test_wait_ends_when_an_outcome_is_queued() -> None:
    tier = MemoryTier(delay_s=0.05)
    store = TieredStore(GEOMETRY, HOST_BYTES, [tier])
    tier.held[keys(1)[0]] = (content(1, 0), FULL)
    fetch = store.fetch([(0, keys(1))], time.monotonic() + 60.0)
    began_s = time.monotonic()
    while not fetch.done:
        store.wait(60.0)
        store.poll()
    assert time.monotonic() - began_s < 30.0
    store.close()


def test_an_outcome_queued_before_the_wait_is_not_slept_over() -> None:
    tier = MemoryTier(delay_s=0.0)
    store = TieredStore(GEOMETRY, HOST_BYTES, [tier])
    tier.held[keys(1)[0]] = (content(1, 0), FULL)
    store.fetch([(0, keys(1))], time.monotonic() + 60.0)
    time.sleep(0.2)
    began_s = time.monotonic()
    store.wait(60.0)
    assert time.monotonic() - began_s < 30.0
    store.close()


def test_an_outcome_queued_while_the_store_polls_is_not_slept_over() -> None:
    class Busy(MemoryTier):
        def poll(self) -> list[Outcome]:
            outcomes = super().poll()
            self.wake()  # as a worker does that queues the next outcome right after this poll has looked
            return outcomes

    tier = Busy()
    store = TieredStore(GEOMETRY, HOST_BYTES, [tier])
    tier.gate.clear()
    tier.held[keys(1)[0]] = (content(1, 0), FULL)
    store.fetch([(0, keys(1))], time.monotonic() + 60.0)
    store.poll()
    began_s = time.monotonic()
    store.wait(60.0)
    assert time.monotonic() - began_s < 30.0
    tier.gate.set()
    store.close()


def test_f6_a_hung_tier_costs_a_fetch_its_deadline() -> None:
    tier = MemoryTier()
    store = TieredStore(GEOMETRY, HOST_BYTES, [tier])
    tier.held[keys(1)[0]] = (content(1, 0), FULL)
    write(store, 0, 2)
    assert store.flush(10.0)
    tier.gate.clear()
    fetch = store.fetch([(0, keys(1, 2))], time.monotonic() + 0.2)
    finish(store, fetch, 5.0)
    assert (fetch.slots[0] >= 0).tolist() == [False, True]
    store.release(fetch)
    store.close(0.1)
    tier.gate.set()
    tier.close(time.monotonic() + 10.0)
    assert store.arena.bytes > 0, "the arena stayed mapped for the read that was still running"


def test_a_tier_that_refuses_costs_hits_only() -> None:
    tier = MemoryTier()
    store = TieredStore(GEOMETRY, HOST_BYTES, [tier])
    tier.held[keys(1)[0]] = (content(1, 0), FULL)
    tier.refuses = True
    write(store, 0, 2)
    fetch = store.fetch([(0, keys(1, 2))], time.monotonic() + 10.0)
    assert fetch.done and (fetch.slots[0] >= 0).tolist() == [False, True]
    assert store.stats()["spill_failures"] == 1 and store.stats()["load_failures"] == 1
    store.check()
    store.close()


def test_budget_is_hard_and_private_chunks_count() -> None:
    store = TieredStore(GEOMETRY, HOST_BYTES)
    assert store.arena.bytes <= HOST_BYTES
    room = store.slabs[0].slots
    assert (store.reserve_private(0, keys(*range(room + 1))) < 0).all() and store.stats()["slab0.bytes_used"] == 0
    slots = store.reserve_private(0, keys(*range(room)))
    assert (slots >= 0).all() and store.stats()["slab0.bytes_used"] == room * 4096
    store.commit_private(slots)
    assert (write(store, 0, 7) < 0).all()
    store.drop_private(slots)
    assert (write(store, 0, 7) >= 0).all()
    store.check()
    store.close()


@pytest.mark.parametrize("there", [(), (1,), (1, 2, 3)])
@pytest.mark.parametrize("names", [(1, 2, 3), (1, 2, 1)])
def test_a_private_slot_that_is_named_is_the_chunks(there: tuple[int, ...], names: tuple[int, ...]) -> None:
    """Each of those that were not there, once, in the slot that it was written to. The other slots are free again."""
    store = TieredStore(GEOMETRY, HOST_BYTES)
    write(store, 0, *there)
    slots = store.reserve_private(0, [b""] * 3)
    for slot, name in zip(slots.tolist(), names, strict=True):
        store.payload(slot, 0)[:] = bytes([name + 100]) * 4000
    store.commit_private(slots)
    groups = np.zeros(3, np.int64)
    named = store.name_private(groups, slots, keys(*names), [b"", *keys(1, 2)])
    store.commit(named)
    kept = {name: slot for name, slot in zip(names, named.tolist(), strict=True) if slot >= 0}
    assert set(kept) == {*names} - {*there} and len(kept) == np.count_nonzero(named >= 0)
    for name, slot in kept.items():
        assert slot in [old for old, of in zip(slots.tolist(), names, strict=True) if of == name]
        assert set(store.payload(slot, 0)) == {name + 100}
    assert (store.locate(keys(*names, *there))[0] == FULL).all()
    assert store.stats()["chunks_pinned"] == 0
    store.check()
    store.close()


def test_an_aborted_store_is_not_found() -> None:
    store = TieredStore(GEOMETRY, HOST_BYTES)
    slots = store.reserve(0, keys(1), np.array([FULL], np.uint64))
    store.abort(slots)
    assert store.locate(keys(1))[0].tolist() == [0] and store.stats()["slab0.bytes_used"] == 0
    store.close()


def test_close_writes_what_waits() -> None:
    tier = MemoryTier(delay_s=0.05)
    store = TieredStore(GEOMETRY, HOST_BYTES, [tier])
    write(store, 0, 1, 2, 3)
    store.close(10.0)
    store.close()
    assert len(tier.held) == 3


def test_flush_gives_up() -> None:
    tier = MemoryTier()
    store = TieredStore(GEOMETRY, HOST_BYTES, [tier])
    tier.gate.clear()
    write(store, 0, 1)
    assert not store.flush(0.05)
    tier.gate.set()
    assert store.flush(10.0)
    store.close()


@pytest.mark.parametrize("host_bytes", [0, -1])
def test_a_store_without_host_memory_is_refused(host_bytes: int) -> None:
    with pytest.raises(ConfigError, match="host"):
        TieredStore(GEOMETRY, host_bytes)


def test_a_host_budget_that_is_too_small_says_the_least_that_works() -> None:
    with pytest.raises(BudgetError, match="least"):
        TieredStore(GEOMETRY, 4096)


def test_a_negative_spill_bound_is_refused() -> None:
    with pytest.raises(ConfigError, match="spill_bytes_max"):
        TieredStore(GEOMETRY, HOST_BYTES, spill_bytes_max=-1)


def test_a_tier_that_always_raises_is_left_alone_and_keeps_its_chunks() -> None:
    tier = MemoryTier(announces=False)
    keys = [bytes([n]) * 32 for n in range(12)]
    tier.held = {key: (bytes(4000), FULL) for key in keys}
    store = TieredStore(GEOMETRY, HOST_BYTES, [tier])
    tier.refuses = True
    for key in keys:
        fetch = store.fetch([(0, [key])], time.monotonic() + 10)
        assert fetch.done and fetch.slots[0][0] == -1
        store.release(fetch)
    assert store.stats()["memory.breaker"] == "open"
    assert len(tier.held) == 12, "nothing is discarded: nobody looked at the chunks"
    store.check()
    store.close()


def test_chunks_of_several_prompts_and_groups_are_reserved_together() -> None:
    groups = (Group(0, Kind.FULL, 16, 2, 4096), Group(1, Kind.SLIDING, 16, 2, 4000, 40))
    store = TieredStore(Geometry(groups), 1 << 20, common_slots=True)
    try:
        assert len(store.slabs) == 1
        names = [bytes([number]) * 32 for number in range(6)]
        first = store.reserve(0, names[:1], np.array([3], np.uint64))
        store.commit(first)
        owners, masks = np.array([0, 0, 1]), np.array([3, 3, 3], np.uint64)
        slots = store.reserve(owners, names[1:4], masks, [names[0], b"", names[0]])
        assert len(set(slots.tolist())) == 3 and (slots >= 0).all()
        assert store._flow._sizes.of(slots)[0].tolist() == [8192, 8192, 8000]
        again = store.reserve(owners, [names[1], names[4], names[4]], masks, [names[0], b"", b""])
        assert again[0] == -1 and sorted(again[1:] >= 0) == [False, True], "on its way; twice in one call"
        store.commit(slots)
        store.commit(again)
        assert store.locate(names)[0].tolist() == [3, 3, 3, 3, 3, 0]
        assert store._flow.stats()["chunks_pinned"] == 0
        store.check()
    finally:
        store.close()
