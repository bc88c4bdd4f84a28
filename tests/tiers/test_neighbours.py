"""Host memory of engines that read each other's: what comes is what was stored, whole, whatever happens meanwhile."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from stowage.cache import opening
from stowage.cache.published_ledger import PublishedLedger
from stowage.cache.store import TieredStore
from stowage.config.memory import Memory
from stowage.core.geometry import Geometry, Group, Kind, split_arena
from stowage.storage.host import HostArena
from stowage.storage.host_table import HostTable, Reader, Snapshot, read_header
from stowage.storage.lease import Lease, held_bytes
from stowage.storage.neighbours import NeighbourTier
from tests.depth import few_or_all, mostly_rare

PAYLOAD = 4096
GROUPS = (Group(0, Kind.FULL, 16, 1, PAYLOAD, 0, ()),)
LIMIT = 1 << 20
MASK = np.array([1], np.uint64)


def key_of(number: int) -> bytes:
    return number.to_bytes(8, "little") * 4


def content(number: int) -> bytes:
    """Another in each of its 8 bytes' places, so that a torn chunk shows."""
    return (np.arange(PAYLOAD // 8, dtype=np.uint64) * np.uint64(2654435761) + np.uint64(number)).tobytes()


class Engine:
    """A store of `chunks` chunks, and its neighbours' memory below it."""

    def __init__(self, directory: Path, chunks: int = 16) -> None:
        self.lease = Lease(directory, chunks * PAYLOAD, LIMIT)
        self.tier = NeighbourTier(self.lease)
        self.store = TieredStore(
            Geometry(GROUPS), chunks * PAYLOAD, [self.tier], shared=True, published=True, policy="lru"
        )
        assert self.store.table is not None
        self.lease.publish(self.store.table.path, self.store.arena.path, self.store.table.name)

    def put(self, number: int) -> None:
        slots = self.store.reserve(0, [key_of(number)], MASK)
        if slots[0] >= 0:
            self.store.payload(int(slots[0]), 0)[:] = content(number)
        self.store.commit(slots[slots >= 0])

    def look(self, numbers: list[int]) -> list[bool]:
        probes = self.store.probe([(0, [key_of(number) for number in numbers])])
        while not all(probe.done for probe in probes):
            self.store.wait(0.01)
            self.store.poll()
        return [bool(mask) for mask in self.store.locate([key_of(number) for number in numbers])[0]]

    def get(self, number: int) -> bytes | None:
        """Its bytes as they come; None when it is nowhere."""
        fetch = self.store.fetch([(0, [key_of(number)])], time.monotonic() + 30)
        while not fetch.done:
            self.store.wait(0.01)
            self.store.poll()
        slot = int(fetch.slots[0][0])
        found = bytes(self.store.payload(slot, 0)) if slot >= 0 else None
        self.store.release(fetch)
        return found

    def close(self) -> None:
        self.store.close()
        self.lease.release()


def test_what_one_has_computed_is_there_for_the_other(tmp_path: Path) -> None:
    first, second = Engine(tmp_path), Engine(tmp_path)
    for number in range(8):
        first.put(number)
    assert second.look(list(range(10))) == [True] * 8 + [False] * 2
    assert all(second.get(number) == content(number) for number in range(8))
    stats = second.store.stats()
    assert stats["hits.neighbours"] == stats["neighbours.reads"] == 8 and stats["neighbours.read_bytes"] == 8 * PAYLOAD
    assert second.get(9) is None
    first.close()
    assert second.look([20]) == [False]
    assert second.get(7) == content(7), "it has become the second one's"
    second.store.check()
    assert second.store.stats()["spills_waiting"] == 0, "nothing is written to a neighbour"
    second.close()


def test_what_a_neighbour_has_lost_meanwhile_is_a_miss(tmp_path: Path) -> None:
    first, second = Engine(tmp_path, 4), Engine(tmp_path)
    for number in range(4):
        first.put(number)
    assert all(second.look(list(range(4))))
    for number in range(100, 104):  # takes all four slots
        first.put(number)
    assert [second.get(number) for number in range(4)] == [None] * 4
    stats = second.store.stats()
    assert stats["neighbours.vanished"] == 4 and stats["neighbours.breaker"] == "closed"
    assert second.look([100]) == [True] and second.get(100) == content(100)
    first.close()
    second.close()


@pytest.mark.parametrize("ordered", [True, False])
def test_only_processors_that_order_stores_have_neighbours(tmp_path: Path, monkeypatch, ordered: bool) -> None:
    monkeypatch.setattr(opening, "_IS_ORDERED", ordered)
    lease = Lease(tmp_path, 16 * PAYLOAD, LIMIT)
    memory = Memory(kv_cache_memory=PAYLOAD, host_memory=16 * PAYLOAD)
    store = opening.open_store(Geometry(GROUPS), memory, bytes(32), 16, time.monotonic, lease=lease, shared=True)
    assert store is not None
    assert [tier.name for tier in store.tiers] == ["neighbours"] * ordered
    assert (store.table is not None) == ordered
    store.close()
    lease.release()


@pytest.mark.parametrize("seed", mostly_rare(range(40), range(12)))
def test_every_order_of_reading_and_writing(seed: int) -> None:
    """A reader's steps between any two of a ledger's: what it confirms is the chunk of its key."""
    chance = random.Random(seed)
    slabs = split_arena(Geometry(GROUPS), 4 * PAYLOAD, 512)
    table, arena = HostTable(slabs), HostArena(slabs, shared=True)
    ledger = PublishedLedger.over(table)([slab.slots for slab in slabs])
    views = [arena.slot_view(slot, PAYLOAD) for slot in range(4)]
    file, memory = os.open(table.path, os.O_RDONLY), os.open(arena.path, os.O_RDONLY)
    layout = read_header(file, table.name)
    assert layout is not None and read_header(file, bytes(16)) is None
    reader = Reader(file, layout)
    half = PAYLOAD // 2
    confirmed = refused = 0

    def write():  # type: ignore[no-untyped-def]
        """A chunk's life, a step at a time."""
        while True:
            number = chance.randrange(8)
            if chance.random() < 0.2:
                (slot,) = ledger.take_private(0, [os.urandom(32)]).tolist()
                if slot >= 0:
                    yield
                    views[slot][:half] = os.urandom(half)
                    yield
                    views[slot][half:] = os.urandom(half)
                    yield
                    ledger.drop_private(np.array([slot]))
                continue
            slots = ledger.reserve(0, [key_of(number)], MASK)
            yield
            if slots[0] < 0:
                continue
            views[int(slots[0])][:half] = content(number)[:half]
            yield
            views[int(slots[0])][half:] = content(number)[half:]
            yield
            if chance.random() < 0.2:
                ledger.abort(slots)
            else:
                ledger.commit(slots)
            yield
            if chance.random() < 0.1:
                ledger.drop()

    def read():  # type: ignore[no-untyped-def]
        nonlocal confirmed, refused
        while True:
            snapshot = Snapshot(file, layout)
            yield
            for key, slot in snapshot.slots.items():
                found = reader.begin(slot, key)
                yield
                if found is None:
                    continue
                before = os.pread(memory, half, found[2])
                yield
                after = os.pread(memory, half, found[2] + half)
                yield
                if reader.confirm(slot, found[0]):
                    confirmed += 1
                    assert before + after == content(int.from_bytes(key[:8], "little"))
                else:
                    refused += 1
            yield

    steps = [write(), write(), read(), read()]
    for _ in range(3000):
        next(chance.choice(steps))
    assert confirmed > 10 and refused > 10
    ledger.check()
    os.close(file)
    os.close(memory)
    for view in views:
        view.release()
    arena.close()


LIFE = """
import os, random, sys
from pathlib import Path
from tests.tiers.test_neighbours import Engine, content
directory, seed = Path(sys.argv[1]), int(sys.argv[2])
chance, engine = random.Random(seed), Engine(directory, 12)
say = lambda text: os.write(1, (text + "\\n").encode())  # whole lines, of all processes
say("up")
came = 0
while True:
    number = chance.randrange(40)
    if chance.random() < 0.3:
        engine.put(number)
    elif any(engine.look([number])) and (found := engine.get(number)) is not None:
        if found != content(number):
            say(f"WRONG {number}")
        came = int(engine.store.stats()["neighbours.reads"])
    if chance.random() < 0.02:
        engine.store.check()
        engine.store.drop_host()
        say(f"came {came}")
"""


@pytest.mark.slow
@pytest.mark.exhaustive
def test_engines_that_are_killed_at_any_moment(tmp_path: Path) -> None:
    """Three that read each other's memory; one after the other is killed. Nothing wrong, leaked, or above the limit."""
    root = Path(__file__).parents[2]
    chance = random.Random(0)
    before = set(os.listdir("/dev/shm"))
    said = tmp_path / "said"
    budget = tmp_path / "budget"

    def start(seed: int) -> subprocess.Popen[bytes]:
        environment = os.environ | {
            "PYTHONPATH": os.pathsep.join((str(root / "src"), str(root))),
            "OMP_NUM_THREADS": "1",
        }
        with said.open("ab") as out:
            return subprocess.Popen(
                [sys.executable, "-c", LIFE, str(budget), str(seed)], stdout=out, stderr=out, env=environment
            )

    living = [start(seed) for seed in range(3)]
    for seed in range(3, few_or_all(6, 11)):
        count = seed
        until_s = time.monotonic() + 120
        while said.read_text().count("up") < count and time.monotonic() < until_s:
            time.sleep(0.05)
        time.sleep(chance.random())
        assert held_bytes(budget) <= LIMIT
        victim = living.pop(chance.randrange(3))
        victim.send_signal(signal.SIGKILL)
        victim.wait()
        living.append(start(seed))
    time.sleep(2.0)
    for one in living:
        assert one.poll() is None, said.read_text()
        one.kill()
        one.wait()
    text = said.read_text()
    assert "WRONG" not in text and "Error" not in text
    assert max(int(line.split()[1]) for line in text.splitlines() if line.startswith("came")) > 20
    Lease(budget, LIMIT, LIMIT).release()
    assert len(list(budget.glob("*.part"))) == 1, "what killed engines left goes with the next start"
    assert set(os.listdir("/dev/shm")) <= before
