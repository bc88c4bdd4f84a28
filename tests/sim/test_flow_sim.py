"""The tiered store against a model of what it may say, under seeded time, failures and hung transfers.

The clock stands still unless the simulation moves it. `FaultyTier` keeps real bytes, and loses, delays, damages,
refuses and never finishes transfers, as a seed says. After every step: what a fetch holds is exactly the bytes that
were stored under the key, limits hold, every fetch is done by its deadline, and the store's own invariants are true.
At the end everything is released and nothing may be left pinned.
"""

from __future__ import annotations

import functools
import random
from collections import Counter
from dataclasses import dataclass, field

import numpy as np
import pytest
from numpy.typing import NDArray

from stowage.cache.store import Fetch, TieredStore
from stowage.core.geometry import Geometry, Group, Kind
from stowage.storage.protocol import Outcome, Transfer
from tests.depth import mostly_rare

BLOCK_BYTES = 24
BLOCKS = 4
SEEDS = 300
STEPS = 50


class Clock:
    def __init__(self) -> None:
        self.now_s = 1000.0

    def __call__(self) -> float:
        return self.now_s


@dataclass
class Moods:
    """How a tier misbehaves: chances per transfer or per chunk."""

    hang: float = 0.0
    fail: float = 0.0
    chunk_fails: float = 0.0
    latency_s_max: float = 1.0
    refuse: float = 0.0


@dataclass
class Work:
    transfer: Transfer
    is_load: bool
    due_s: float


class FaultyTier:
    """Keeps chunks in a dict. A hung transfer is never reported, until `recover`."""

    def __init__(self, name: str, clock: Clock, chance: random.Random, moods: Moods) -> None:
        self.name = name
        self.held: dict[bytes, tuple[bytes, int]] = {}
        self.loads_under_way: Counter[bytes] = Counter()
        self.bytes_storing = 0
        self._clock, self._chance, self._moods = clock, chance, moods
        self._work: list[Work] = []

    def lookup(self, keys: list[bytes]) -> NDArray[np.uint64]:
        return np.array([self.held.get(key, (b"", 0))[1] for key in keys], np.uint64)

    def load(self, transfer: Transfer) -> None:
        self._begin(transfer, True)
        self.loads_under_way.update(transfer.keys)
        assert max(self.loads_under_way.values()) == 1, "a second flight of a chunk"

    def store(self, transfer: Transfer) -> None:
        self._begin(transfer, False)
        self.bytes_storing += sum(len(buffer) for buffer in transfer.buffers)

    def _begin(self, transfer: Transfer, is_load: bool) -> None:
        if self._chance.random() < self._moods.refuse:
            raise OSError("no")
        hangs = self._chance.random() < self._moods.hang
        due_s = float("inf") if hangs else self._clock() + self._chance.random() * self._moods.latency_s_max
        self._work.append(Work(transfer, is_load, due_s))

    def poll(self) -> list[Outcome]:
        due = [work for work in self._work if work.due_s <= self._clock()]
        self._work = [work for work in self._work if work.due_s > self._clock()]
        self._chance.shuffle(due)
        return [self._finish(work) for work in due]

    def _finish(self, work: Work) -> Outcome:
        transfer = work.transfer
        ok = np.zeros(len(transfer.keys), bool)
        masks = np.zeros(len(transfer.keys), np.uint64)
        fails = self._chance.random() < self._moods.fail
        for place, (key, buffer) in enumerate(zip(transfer.keys, transfer.buffers, strict=True)):
            bad = fails or self._chance.random() < self._moods.chunk_fails
            if work.is_load:
                ok[place], masks[place] = self._read(key, buffer, bad)
            elif not bad:
                self.held[key] = (bytes(buffer), int(transfer.masks[place]))
                ok[place], masks[place] = True, transfer.masks[place]
        if work.is_load:
            self.loads_under_way.subtract(transfer.keys)
        else:
            self.bytes_storing -= sum(len(buffer) for buffer in transfer.buffers)
        return Outcome(transfer.id, ok, masks, "" if ok.all() else "failed")

    def _read(self, key: bytes, buffer: memoryview, bad: bool) -> tuple[bool, int]:
        content, mask = self.held.get(key, (b"", 0))
        if bad or not mask:
            buffer[:] = self._chance.randbytes(len(buffer))
            return False, 0
        buffer[:] = content
        return True, mask

    def discard(self, keys: list[bytes]) -> None:
        for key in keys:
            self.held.pop(key, None)

    def close(self, deadline_s: float) -> None:
        self.recover()

    def recover(self) -> None:
        """What hung is reported at the next poll."""
        for work in self._work:
            work.due_s = self._clock()
        self._moods.hang = 0.0


GEOMETRY = Geometry(
    (
        Group(0, Kind.FULL, 16, BLOCKS, BLOCK_BYTES),
        Group(1, Kind.SLIDING, 16, BLOCKS, 200 * BLOCK_BYTES, window=64),
    )
)


@functools.cache
def content(key: bytes, group: int) -> bytes:
    """Bytes of a chunk: a function of its key, so that every right copy is equal."""
    return random.Random(key).randbytes(GEOMETRY.groups[group].bytes_per_chunk)


@dataclass
class World:
    seed: int
    tiers: int = 1
    chance: random.Random = field(init=False)

    def __post_init__(self) -> None:
        self.chance = chance = random.Random(self.seed)
        self.clock = Clock()
        moods = [
            Moods(
                hang=chance.choice([0, 0, 0.1, 0.3]),
                fail=chance.choice([0, 0, 0.1, 0.6]),
                chunk_fails=chance.choice([0, 0, 0.2]),
                latency_s_max=chance.choice([0.0, 0.5, 4.0]),
                refuse=chance.choice([0, 0, 0.1]),
            )
            for _ in range(self.tiers)
        ]
        self.below = [FaultyTier(f"tier{i}", self.clock, chance, mood) for i, mood in enumerate(moods)]
        self.host_bytes = chance.choice([2, 6, 24]) * 8 * 4096
        self.spill_bytes_max = chance.choice([0, 3 * 4096, 40 * 4096])
        self.store = TieredStore(
            GEOMETRY, self.host_bytes, self.below, clock=self.clock, spill_bytes_max=self.spill_bytes_max
        )
        self.prompts = [
            [[chance.randbytes(30) + bytes([group, 0]) for _ in range(chance.randint(3, 12))] for group in (0, 1)]
            for _ in range(3)
        ]
        self.stored: dict[bytes, set[int]] = {}
        self.fetches: list[tuple[Fetch, list[tuple[int, list[bytes]]]]] = []
        self.writing: list[tuple[int, list[bytes], list[int], NDArray[np.int64]]] = []
        self.private: list[tuple[int, bytes, int]] = []
        self.fill_the_tiers()

    def fill_the_tiers(self) -> None:
        """A history begins with most chunks in lower tiers, as after a restart."""
        for tier in self.below:
            for group, keys in enumerate(map(list, zip(*self.prompts, strict=True))):
                for key in (key for prompt in keys for key in prompt if self.chance.random() < 0.7):
                    mask = self.chance.choice([0b1111, 0b1110])
                    self.stored.setdefault(key, set()).add(mask)
                    tier.held[key] = (content(key, group), mask)

    def step(self) -> None:
        action = self.chance.choice(
            [
                *[self.write, self.end_write, self.end_write, self.fetch, self.fetch, self.fetch, self.release],
                *[self.advance, self.advance, self.advance, self.look, self.keep_private, self.drop],
            ]
        )
        action()
        self.verify()

    def write(self) -> None:
        group = self.chance.randrange(2)
        keys = self.some_keys(group)
        masks = np.array([self.chance.choice([0b1111, 0b1111, 0b1100, 0b1000, 0]) for _ in keys], np.uint64)
        slots = self.store.reserve(group, keys, masks)
        self.writing.append((group, keys, masks.tolist(), slots))

    def end_write(self) -> None:
        if not self.writing:
            return
        group, keys, masks, slots = self.writing.pop(self.chance.randrange(len(self.writing)))
        aborts = self.chance.random() < 0.1
        for key, mask, slot in zip(keys, masks, slots.tolist(), strict=True):
            if slot >= 0:
                self.store.payload(slot, group)[:] = content(b"none" + key if aborts else key, group)
                if not aborts:
                    self.stored.setdefault(key, set()).add(mask)
        if aborts:
            self.store.abort(slots)
        else:
            self.store.commit(slots)

    def some_keys(self, group: int) -> list[bytes]:
        keys = self.chance.choice(self.prompts)[group]
        begin = max(0, self.chance.randint(-4, len(keys)))
        return keys[begin : self.chance.randint(begin, len(keys))]

    def fetch(self) -> None:
        groups = self.chance.choice([(0,), (1,), (0, 1), (1, 0)])
        wanted = [(group, self.some_keys(group)) for group in groups]
        seen = [(self.store.lookup(group, keys), self.store.sources(group, keys)) for group, keys in wanted]
        deadline_s = self.clock.now_s + self.chance.choice([-1.0, 0.0, 0.3, 2.0, 10.0])
        fetch = self.store.fetch(wanted, deadline_s)
        for pair, (masks, sources) in enumerate(seen):
            assert np.array_equal(masks != 0, sources >= 0)
            in_host = sources == 0
            assert (fetch.slots[pair][in_host] >= 0).all(), "what is in host comes at once"
            assert np.array_equal(fetch.masks[pair][in_host], masks[in_host])
        if deadline_s <= self.clock.now_s:
            assert fetch.done
        self.fetches.append((fetch, wanted))

    def release(self) -> None:
        if self.fetches:
            fetch, _ = self.fetches.pop(self.chance.randrange(len(self.fetches)))
            self.store.release(fetch)

    def advance(self) -> None:
        self.clock.now_s += self.chance.choice([0.0, 0.1, 0.5, 3.0, 6.0])
        self.store.poll()

    def look(self) -> None:
        group = self.chance.randrange(2)
        keys = self.some_keys(group)
        for key, mask in zip(keys, self.store.lookup(group, keys).tolist(), strict=True):
            assert mask == 0 or mask in self.stored[key], "a look-up says what was never stored"

    def keep_private(self) -> None:
        if self.private and self.chance.random() < 0.6:
            _, _, slot = self.private.pop()
            self.store.drop_private(np.array([slot]))
            return
        group, keys = self.chance.randrange(2), [self.chance.randbytes(32) for _ in range(self.chance.randrange(1, 5))]
        before = self.store.stats()["evictions"]
        slots = self.store.reserve_private(group, keys)
        if (slots < 0).any():
            assert (slots < 0).all() and self.store.stats()["evictions"] == before, "evicted for nothing"
            return
        for key, slot in zip(keys, slots.tolist(), strict=True):
            self.store.payload(slot, group)[:] = content(key, group)
            self.private.append((group, key, slot))
        self.store.commit_private(slots)
        assert not self.store.lookup(group, keys).any()

    def drop(self) -> None:
        self.store.drop_host()

    def verify(self) -> None:
        self.store.check()
        for fetch, wanted in self.fetches:
            assert fetch.done or fetch.deadline_s > self.clock.now_s, "a fetch outlives its deadline"
            for pair, (group, keys) in enumerate(wanted):
                self.verify_pair(fetch, pair, group, keys)
        for group, key, slot in self.private:
            assert self.store.payload(slot, group) == content(key, group), "a private chunk changed"
        spilling = sum(tier.bytes_storing for tier in self.below)
        one_each = self.tiers * max(group.bytes_per_chunk for group in GEOMETRY.groups)
        assert spilling <= max(self.spill_bytes_max, one_each)
        assert self.store.arena.bytes <= self.host_bytes

    def verify_pair(self, fetch: Fetch, pair: int, group: int, keys: list[bytes]) -> None:
        for place, key in enumerate(keys):
            slot, mask = int(fetch.slots[pair][place]), int(fetch.masks[pair][place])
            assert (slot >= 0) == (mask != 0) == (fetch.sources[pair][place] >= 0)
            if slot >= 0:
                assert mask in self.stored[key], "a mask that was never stored"
                assert self.store.payload(slot, group) == content(key, group), "other bytes than were stored"

    def finish(self) -> None:
        while self.writing:
            self.end_write()
        self.clock.now_s += 20.0
        self.store.poll()
        assert all(fetch.done for fetch, _ in self.fetches), "a fetch outlives its deadline"
        self.verify()
        for fetch, _ in self.fetches:
            self.store.release(fetch)
            self.store.release(fetch)
        self.fetches.clear()
        for _, _, slot in self.private:
            self.store.drop_private(np.array([slot]))
        for _ in range(200):
            for tier in self.below:
                tier.recover()
            self.clock.now_s += 10.0
            self.store.poll()
        self.verify()
        stats = self.store.stats()
        assert stats["transfers_under_way"] == 0 and stats["chunks_pinned"] == 0 and stats["spills_waiting"] == 0
        self.store.drop_host()
        stats = self.store.stats()
        assert stats["slab0.bytes_used"] == stats["slab1.bytes_used"] == 0
        assert self.store.flush(0.0)
        self.store.close()


@pytest.mark.parametrize("tiers", mostly_rare([0, 1, 2], [1]))
def test_simulated_histories(tiers: int) -> None:
    happened: Counter[str] = Counter()
    for seed in range(SEEDS // 3):
        world = World(seed * 3 + tiers, tiers)
        try:
            for _ in range(STEPS):
                world.step()
            world.finish()
        except AssertionError as error:
            raise AssertionError(f"seed {world.seed}, {tiers} tiers: {error}") from error
        happened.update({name: value for name, value in world.store.stats().items() if isinstance(value, int)})
    rare = ["evictions", "stores_without_room", "hits.host"]
    if tiers:
        rare += ["promoted", "joined", "load_failures", "timeouts", "fetch_timeouts", "spills", "spills_dropped"]
    assert all(happened[name] > 5 for name in rare), f"the histories are too tame: {happened}"
