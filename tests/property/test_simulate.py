"""The simulation of a trace: its counts against a naive model, and what holds whatever the machine is."""

from __future__ import annotations

import random
from collections import OrderedDict
from dataclasses import dataclass, field, replace
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stowage.cache.policy import POLICIES
from stowage.core.geometry import PAGE_BYTES, round_up
from stowage.simulator.disk_segments import Segments
from stowage.simulator.pricing import Prices
from stowage.simulator.replay import Report, parts_of, replay, route
from stowage.simulator.results import figures_of, simulate
from stowage.simulator.scenario import ROUTINGS, Link, Scenario
from stowage.simulator.tiers import Objects
from stowage.simulator.trace import Trace
from stowage.storage.disk.allocator import metadata_bytes, segment_bytes_for
from stowage.storage.disk.compaction import REWRITE_SHARE
from stowage.storage.disk.read_plan import RUN_BYTES_MAX
from stowage.storage.disk.tier import least_limit_bytes
from stowage.storage.disk.writer import BATCH_BYTES_MAX
from stowage.storage.format.segment import BATCH_CHUNKS_MAX, ENTRIES_MAX, footer_room
from tests import traces
from tests.depth import mostly_rare
from tests.disk_client import Client, aligned, used_bytes
from tests.traces import BLOCK_TOKENS

CHUNK_BYTES = 4096
TOKEN_BYTES = CHUNK_BYTES // BLOCK_TOKENS
SLOW = 100.0
FAST = Link(1e12, 1e12, 0.0)


def made(prompts: int, seed: int, gap_ms: int = 100_000, people: int = 6) -> Trace:
    with TemporaryDirectory() as directory:
        return traces.trace(Path(directory) / "t", traces.conversations(prompts, seed, gap_ms=gap_ms, people=people))


def scenario(host_chunks: int, **changes: object) -> Scenario:
    base = Scenario(
        host_bytes=host_chunks * CHUNK_BYTES,
        kv_bytes_per_token=TOKEN_BYTES,
        block_tokens=BLOCK_TOKENS,
        policy="lru",
        prefill_tokens_per_s=SLOW,
    )
    return replace(base, **changes)  # type: ignore[arg-type]


def reports(trace: Trace, of: Scenario) -> list[Report]:
    return [report for part in parts_of(trace, of) for report in replay(trace, of, part)]


def prefix_lru(trace: Trace, capacity: int) -> list[int]:
    """Tokens found of each prompt, with an ordered dictionary for a store; the last one was used last."""
    order: OrderedDict[int, None] = OrderedDict()
    found = []
    for number in range(len(trace)):
        blocks = trace.blocks_of(number).tolist()
        hits = 0
        while hits < min(len(blocks), (int(trace.tokens[number]) - 1) // BLOCK_TOKENS) and blocks[hits] in order:
            hits += 1
        found.append(hits * BLOCK_TOKENS)
        for block in [*reversed(blocks[:hits]), *reversed([one for one in blocks[hits:] if one in order])]:
            order.move_to_end(block)
        new = [block for block in blocks[hits:] if block not in order][:capacity]
        while len(order) > capacity - len(new):
            order.popitem(last=False)
        order.update(dict.fromkeys(reversed(new)))
    return found


@given(seed=st.integers(0, 10_000), capacity=st.integers(1, 150), prompts=st.integers(1, 60))
@settings(deadline=None, max_examples=40)
def test_hits_of_host_memory_are_those_of_a_naive_lru(seed: int, capacity: int, prompts: int) -> None:
    trace = made(prompts, seed)
    (report,) = reports(trace, scenario(capacity))
    assert report.prompts.tolist() == list(range(prompts))
    assert report.reused[0].tolist() == prefix_lru(trace, capacity)


@given(
    seed=st.integers(0, 10_000),
    host=st.integers(1, 100),
    disk_chunks=st.sampled_from([0, 20, 200]),
    objects=st.booleans(),
    shared=st.booleans(),
    nodes=st.integers(1, 3),
    routing=st.sampled_from(ROUTINGS),
    policy=st.sampled_from(sorted(POLICIES)),
    gap_ms=st.sampled_from([0, 20, 2000]),
    rate=st.sampled_from([1e5, 1e6, 1e12]),
    prefill=st.sampled_from([100.0, 10_000.0]),
    step=st.sampled_from([0, 4 * BLOCK_TOKENS]),
)
@settings(deadline=None, max_examples=30)
def test_what_holds_for_every_machine(
    seed: int,
    host: int,
    disk_chunks: int,
    objects: bool,
    shared: bool,
    nodes: int,
    routing: str,
    policy: str,
    gap_ms: int,
    rate: float,
    prefill: float,
    step: int,
) -> None:
    """Every prompt ends, once; what it did not compute it reused; nothing is quicker than computing the rest."""
    trace = made(40, seed, gap_ms)
    of = scenario(
        host,
        disk_bytes=disk_chunks and least_limit_bytes(CHUNK_BYTES) + disk_chunks * CHUNK_BYTES,
        objects=objects,
        shared_objects=shared,
        nodes=nodes,
        routing=routing,
        policy=policy,
        prefill_tokens_per_s=prefill,
        step_tokens=step,
        disk=Link(rate, rate / 2, 1e-4, 2),
        object=Link(rate / 3, rate / 3, 0.03),
    )
    every = reports(trace, of)  # each replay checks the invariants of flow and tiers at its end
    assert sorted(number for report in every for number in report.prompts.tolist()) == list(range(40))
    node_of = route(trace, of)
    for report in every:
        assert (node_of[report.prompts] == report.node).all()
        reused = np.sum(report.reused, axis=0)
        computed = trace.tokens[report.prompts] - reused
        assert (computed >= 1).all() and (reused % BLOCK_TOKENS == 0).all() and (np.array(report.reused) >= 0).all()
        least_s = [of.forward_s(int(count)) for count in computed]
        assert (report.ttft_s >= np.array(least_s) - 1e-9).all()
        if disk_chunks:
            assert report.held_bytes[0] <= of.disk_bytes
    figures = figures_of(trace, of, every, Prices(), None)
    assert figures.computed_tokens + sum(figures.reused_tokens.values()) == figures.input_tokens == trace.tokens.sum()
    assert figures.hit_rate["all"] == pytest.approx(sum(figures.reused_tokens.values()) / figures.input_tokens)


@given(
    limit_chunks=st.integers(8, 60),
    chunk_bytes=st.sampled_from([1000, 4096, 70_000]),
    steps=st.lists(st.tuples(st.integers(0, 30), st.integers(1, 40), st.booleans()), max_size=60),
)
@settings(deadline=None, max_examples=60)
def test_a_simulated_disk_keeps_its_limit(
    limit_chunks: int, chunk_bytes: int, steps: list[tuple[int, int, bool]]
) -> None:
    """What was written last is there, whatever else went."""
    disk = Segments(least_limit_bytes(chunk_bytes) + limit_chunks * chunk_bytes, chunk_bytes)
    number = 0
    for first, count, hits in steps:
        known = [bytes([7]) * 24 + at.to_bytes(8, "little") for at in range(max(0, number - first), number)]
        if hits:
            disk.hit(known)
        keys = [bytes([7]) * 24 + at.to_bytes(8, "little") for at in range(number, number + count)]
        number += count
        assert disk.put(keys) >= count * chunk_bytes
        assert disk.masks(keys[-1:]).all()
        disk.check()


class NaiveDisk:
    """The same as `Segments`, chunk by chunk: files with their keys, a dict, and a set of what was read in each."""

    def __init__(self, model: Segments, limit_bytes: int, chunk_bytes: int) -> None:
        self.segment_bytes, self.limit_bytes = model.segment_bytes, limit_bytes
        self.chunk_bytes, self.least_bytes = round_up(chunk_bytes), segment_bytes_for(chunk_bytes)
        self.files: OrderedDict[int, NaiveFile] = OrderedDict()
        self.number_of: dict[bytes, int] = {}
        self.number = 0

    @property
    def held_bytes(self) -> int:
        return 4096 + sum(file.file_bytes for file in self.files.values())

    @property
    def active(self) -> NaiveFile:
        return self.files.get(self.number, NaiveFile(0))

    def fits(self, count: int) -> bool:
        room = self.active.file_bytes - self.active.end - PAGE_BYTES - count * self.chunk_bytes
        held = len(self.active.keys) + count
        return count == 0 or (held <= ENTRIES_MAX and room >= 0 and room >= footer_room(held))

    def append(self, keys: list[bytes]) -> int:
        self.active.keys += keys
        self.active.hits -= set(keys)
        self.active.end += PAGE_BYTES + len(keys) * self.chunk_bytes
        self.number_of |= dict.fromkeys(keys, self.number)
        return PAGE_BYTES + len(keys) * self.chunk_bytes

    def put(self, keys: list[bytes]) -> int:
        written = 0
        while keys:
            wanted = min(len(keys), BATCH_CHUNKS_MAX, max(1, BATCH_BYTES_MAX // self.chunk_bytes))
            count = max(count for count in range(wanted + 1) if self.fits(count))
            written += self.append(keys[:count]) if count else 0
            keys = keys[count:]
            written += self.next() if count < wanted else 0
        return written

    def next(self) -> int:
        before = self.active
        if 4096 + before.file_bytes + self.segment_bytes > self.limit_bytes:
            before.seal()
            if self.held_bytes + self.segment_bytes > self.limit_bytes:
                self.remove_oldest()
        while self.held_bytes + self.segment_bytes > self.limit_bytes:
            self.remove_oldest()
        self.number += 1
        self.files[self.number] = NaiveFile(self.segment_bytes - metadata_bytes(self.segment_bytes))
        full = self.held_bytes + self.segment_bytes > self.limit_bytes
        victims = len(self.files) - (1 if before.sealed or not before.file_bytes else 2)
        written = PAGE_BYTES + (self.rewrite() if full and victims > 0 else 0)
        before.seal()
        return written

    def remove_oldest(self) -> None:
        number, _ = self.files.popitem(last=False)
        self.number_of = {key: held for key, held in self.number_of.items() if held != number}

    def rewrite(self) -> int:
        number, victim = next(iter(self.files.items()))
        newest = list(dict.fromkeys(reversed(victim.keys)))[::-1]  # of a key that is in it twice
        keys = [key for key in newest if key in victim.hits and self.number_of.get(key) == number]
        budget = min(
            self.active.file_bytes // REWRITE_SHARE, self.active.file_bytes - self.active.end - self.least_bytes
        )
        step = max(1, min(BATCH_CHUNKS_MAX, RUN_BYTES_MAX // self.chunk_bytes))
        written = 0
        for some in (keys[at : at + step] for at in range(0, len(keys), step)):
            budget -= len(some) * self.chunk_bytes + 2 * PAGE_BYTES
            if budget < 0:
                break
            written += self.append(some) if self.fits(len(some)) else 0
        return written

    def hit(self, keys: list[bytes]) -> None:
        for key in keys:
            if key in self.number_of:
                self.files[self.number_of[key]].hits.add(key)


@dataclass
class NaiveFile:
    file_bytes: int
    end: int = PAGE_BYTES
    keys: list[bytes] = field(default_factory=list)
    hits: set[bytes] = field(default_factory=set)
    sealed: bool = False

    def seal(self) -> None:
        if self.keys:
            self.file_bytes = self.end + footer_room(len(self.keys))
        self.sealed = True


@pytest.mark.parametrize(("limit_chunks", "chunk_bytes"), [(900, 1000), (300, 70_000), (40, 5 << 20)])
def test_a_simulated_disk_is_a_naive_one(limit_chunks: int, chunk_bytes: int) -> None:
    """Chunks are put, once or again, read and dropped; what is there and what was written is the same after each."""
    chance = random.Random(limit_chunks)
    limit_bytes = least_limit_bytes(chunk_bytes) + limit_chunks * chunk_bytes
    disk = Segments(limit_bytes, chunk_bytes)
    naive = NaiveDisk(disk, limit_bytes, chunk_bytes)
    every: list[bytes] = []
    for step in range(150):
        back = chance.choice((0, 0, 0, chance.randrange(2 * limit_chunks)))
        first, count = max(0, len(every) - back), chance.randrange(1, 60)
        every += [bytes(24) + at.to_bytes(8, "little") for at in range(len(every), first + count)]
        keys = every[first : first + count]
        assert disk.put(keys) == naive.put(list(keys))
        known = every[-2 * limit_chunks :]
        hit, dropped = chance.sample(known, min(len(known), 8)), chance.sample(known, step % 3)
        disk.hit(iter(hit))
        naive.hit(hit)
        disk.drop(dropped)
        for key in dropped:
            naive.number_of.pop(key, None)
        disk.check()
        assert disk.masks(every).tolist() == [int(key in naive.number_of) for key in every]
        assert disk.held_bytes == naive.held_bytes
    assert disk.rewritten > 20 and not disk.masks(every[:100]).all()


@pytest.mark.parametrize(
    ("limit_chunks", "chunk_bytes"),
    mostly_rare([(260, 64 << 10), (300, 70_000), (24, 5 << 20), (3, 9 << 20)], [(260, 64 << 10), (24, 5 << 20)]),
)
def test_a_simulated_disk_is_the_real_one(tmp_path: Path, limit_chunks: int, chunk_bytes: int) -> None:
    """What is there after each transfer, some of it stored again and some read, and how much the directory takes."""
    chance = random.Random(limit_chunks)
    limit_bytes = least_limit_bytes(chunk_bytes) + limit_chunks * chunk_bytes
    disk = Segments(limit_bytes, chunk_bytes)
    memory = aligned([chunk_bytes] * 60)
    every: list[bytes] = []
    with Client(tmp_path / "c", limit_bytes, chunk_bytes_max=chunk_bytes, refresh_s=1e9, compression="off") as client:
        while len(every) < 4 * limit_chunks:
            back = chance.choice((0, 0, chance.randrange(1 + limit_chunks // 4)))
            first, count = max(0, len(every) - back), chance.randrange(1, min(60, 1 + limit_chunks))
            every += [bytes(24) + at.to_bytes(8, "little") for at in range(len(every), first + count)]
            keys = every[first : first + count]
            disk.put(keys)
            assert client.outcome(client.begin("store", client.transfer(keys, memory[: len(keys)]))).ok.all()
            hit = chance.sample(every[-2 * limit_chunks :], min(len(every), 3))
            disk.hit(iter(hit))
            there = [key for key, mask in zip(hit, disk.masks(hit), strict=True) if mask]
            assert client.outcome(client.begin("load", client.transfer(there, memory[: len(there)]))).ok.all()
            assert [int(found) for found in client.hits(every)] == disk.masks(every).tolist()
            assert client.stats()["rewritten"] == disk.rewritten
        client.check()
    disk.check()
    assert not disk.masks(every[:2]).any()
    # The last segment was sealed by closing the tier; all that is there takes no more than was simulated.
    assert used_bytes(tmp_path / "c") <= disk.held_bytes


def test_more_memory_finds_more_and_a_shared_store_what_others_computed() -> None:
    trace = made(300, 5, gap_ms=1000)
    sweep = simulate(trace, [scenario(chunks) for chunks in (20, 60, 120, 1000)])
    rates = [figures.hit_rate["all"] for figures in sweep]
    assert rates == sorted(rates) and rates[0] < rates[-1]
    assert [figures.ttft_s.mean for figures in sweep] == sorted((one.ttft_s.mean for one in sweep), reverse=True)
    spread = scenario(1000, nodes=3, routing="round-robin", object=FAST)
    alone, apart, together = simulate(
        trace, [spread, replace(spread, objects=True, shared_objects=False), replace(spread, objects=True)]
    )
    assert alone.hit_rate["all"] == apart.hit_rate["all"] < together.hit_rate["all"]
    assert together.hit_rate["object"] > 0 and together.held_bytes["object"] < apart.held_bytes["object"]
    (sticky,) = simulate(trace, [replace(spread, routing="sticky")])
    assert alone.hit_rate["all"] < sticky.hit_rate["all"]


def test_what_a_hit_takes_besides_its_bytes_is_waited_for_by_hits_alone() -> None:
    trace = made(100, 9, gap_ms=10_000_000)
    quick = scenario(200, prefill_tokens_per_s=10_000.0)
    (before,), (after,) = reports(trace, quick), reports(trace, replace(quick, load_s_fixed=0.5))
    assert [column.tolist() for column in after.reused] == [column.tolist() for column in before.reused]
    hits = before.reused[0] > 0
    assert 0 < np.count_nonzero(hits) < len(trace)
    longer_s = after.ttft_s - before.ttft_s
    assert longer_s[hits] == pytest.approx(0.5) and not longer_s[~hits].any()
    assert after.busy_s - before.busy_s == pytest.approx(0.5 * np.count_nonzero(hits))


def test_a_slow_tier_is_left_alone() -> None:
    """The deadline rule: with a disk that is slower than computing nothing gets slower, but for the first tries."""
    trace = made(200, 7, gap_ms=10_000)
    quick = scenario(30, prefill_tokens_per_s=10_000.0)
    slow = replace(quick, disk_bytes=8 << 20, disk=Link(1e5, 1e9, 0.0))
    without, with_disk = simulate(trace, [quick, slow])
    assert with_disk.ttft_s.mean < 2.5 * without.ttft_s.mean
    assert with_disk.hit_rate["disk"] < 0.1
    (useful,) = simulate(trace, [replace(slow, disk=FAST)])
    assert useful.hit_rate["disk"] > 0.3 and useful.ttft_s.mean < without.ttft_s.mean


def test_objects_are_written_once() -> None:
    store = Objects(100)
    keys = [bytes([at]) * 32 for at in range(5)]
    assert store.put(keys) == 500 and store.put(keys[2:]) == 0 and store.held_bytes == 500
    store.drop(keys[:2])
    assert store.masks(keys).tolist() == [0, 0, 1, 1, 1] and store.held_bytes == 300
