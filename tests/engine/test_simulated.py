"""The simulation of a trace against the real engine: tier by tier, prompt by prompt, the same tokens are reused."""

from __future__ import annotations

import heapq
import random
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from docs.examples.dict_tier import DictTier
from stowage.cache.flow_types import StartLoad, StartStore
from stowage.config.memory import Memory
from stowage.engine import engine as engine_module
from stowage.engine.engine import Engine
from stowage.engine.sampling_params import SamplingParams
from stowage.simulator.replay import parts_of, replay
from stowage.simulator.scenario import Link, Scenario
from stowage.simulator.tiers import Objects, Tier
from stowage.storage.disk.tier import OWN_BYTES
from stowage.storage.protocol import Outcome, Transfer
from tests import traces
from tests.depth import mostly_rare
from tests.traces import BLOCK_TOKENS

CHUNK_BYTES = 16 << 10  # of the tiny Llama
ONE_TOKEN = SamplingParams(max_new_tokens=1, ignore_eos=True)
FAST = Link(1e12, 1e12, 0.0)


def tokens_of(line: dict[str, object]) -> list[int]:
    """Tokens for the blocks of a line: an id has the same ones wherever it stands."""
    ids, length = line["hash_ids"], line["input_length"]
    assert isinstance(ids, list) and isinstance(length, int)
    tokens = [token for block in ids for token in random.Random(block).choices(range(5, 500), k=BLOCK_TOKENS)]
    return tokens[:length]


@pytest.mark.parametrize(
    ("policy", "host_chunks", "disk_bytes", "step_tokens"),
    mostly_rare([("lru", 60, 3 << 20, 0), ("cost", 60, 3 << 20, 0), ("lru", 90, 0, 64)], ["cost", ("lru", 90, 0, 64)]),
)
def test_the_engine_reuses_what_was_simulated(policy, host_chunks, disk_bytes, step_tokens, checkpoints, tmp_path):
    lines = traces.conversations(120, seed=11, people=8, gap_ms=10_000_000)
    memory = Memory(
        kv_cache_memory="8MiB",
        host_memory=host_chunks * CHUNK_BYTES,
        disk=f"{tmp_path / 'cache'}:{disk_bytes}" if disk_bytes else "",
        block_size=BLOCK_TOKENS,
        chunk_blocks=1,
        eviction_policy=policy,
        max_num_batched_tokens=step_tokens or 1024,
    )
    reused, held = answered(checkpoints("llama"), memory, lines)
    of = Scenario(
        host_bytes=host_chunks * CHUNK_BYTES,
        kv_bytes_per_token=CHUNK_BYTES // BLOCK_TOKENS,
        block_tokens=BLOCK_TOKENS,
        disk_bytes=disk_bytes,
        policy=policy,
        step_tokens=step_tokens,
        prefill_tokens_per_s=10.0,
        disk=FAST,
    )
    trace = traces.trace(tmp_path / "trace", lines)
    (report,) = [report for part in parts_of(trace, of) for report in replay(trace, of, part)]
    simulated = {name: report.reused[tier].tolist() for tier, name in enumerate(of.tier_names)}
    assert simulated == {name: reused[name] for name in of.tier_names}
    assert sum(simulated["host"]) > 1000 and (not disk_bytes or sum(simulated["disk"]) > 1000)
    assert held["evictions"] == report.evictions
    assert abs(held["disk.bytes_used"] - sum(report.held_bytes)) <= OWN_BYTES  # what a directory takes differs
    (other,) = [one for part in parts_of(trace, half(of)) for one in replay(trace, half(of), part)]
    assert other.reused[0].tolist() != simulated["host"], "any capacity would have done"


def half(of: Scenario) -> Scenario:
    return replace(of, host_bytes=of.host_bytes // 2)


def answered(
    model: Path, memory: Memory, lines: list[dict[str, object]]
) -> tuple[dict[str, list[int]], dict[str, int]]:
    """Tokens reused of every prompt by tier, and what the store held at the end. The device keeps nothing."""
    reused: dict[str, list[int]] = {"host": [], "disk": []}
    with Engine(model, memory) as engine:
        assert engine.parts.layout.groups[0].bytes_per_chunk == CHUNK_BYTES
        for line in lines:
            (completion,) = engine.generate([tokens_of(line)], ONE_TOKEN)
            for name, column in reused.items():
                column.append(completion.reused_tokens.get(name, 0))
            assert engine.flush(120.0)
            engine.drop_device_cache()
        stats = engine.stats()["store"]
        engine.check()
    return reused, {"evictions": stats["evictions"], "disk.bytes_used": stats.get("disk.bytes_used", 0)}


class Clock:
    def __init__(self) -> None:
        self.now_s = 1000.0

    def __call__(self) -> float:
        return self.now_s


class TimedTier(DictTier):
    """As fast as a simulated one, by ``clock``."""

    name = "disk"

    def __init__(self, link: Link, clock: Clock) -> None:
        super().__init__(1 << 30)
        self._way = Tier(link, Objects(CHUNK_BYTES), CHUNK_BYTES)
        self._clock = clock
        self._under_way: list[tuple[float, int, Any]] = []

    @property
    def next_s(self) -> float:
        """When the next transfer ends."""
        return self._under_way[0][0] if self._under_way else float("inf")

    def _begin(self, kind: type[StartLoad | StartStore], transfer: Transfer) -> None:
        nothing = np.zeros(0, np.int64)
        action = kind(0, transfer.id, transfer.keys, nothing, nothing, transfer.masks, transfer.deadline_s)
        landing = self._way.begin(action, self._clock())
        heapq.heappush(self._under_way, (landing.at_s, transfer.id, (action, landing, transfer)))

    def load(self, transfer: Transfer) -> None:
        self._begin(StartLoad, transfer)

    def store(self, transfer: Transfer) -> None:
        self._begin(StartStore, transfer)

    def poll(self) -> list[Outcome]:
        while self.next_s <= self._clock():
            action, landing, transfer = heapq.heappop(self._under_way)[2]
            self._way.land(action, landing)
            assert landing.ok.all() and not landing.refused, "nothing is lost here"
            (super().load if isinstance(action, StartLoad) else super().store)(transfer)
        return super().poll()


@contextmanager
def timed(model: Path, memory: Memory, of: Scenario, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Engine, Clock]]:
    """An engine on a simulated clock: computing and transfers take what the scenario says, all else no time."""
    clock = Clock()
    tier = TimedTier(of.disk, clock)
    monkeypatch.setattr(engine_module, "time", SimpleNamespace(monotonic=clock, sleep=lambda _: None))
    with Engine(model, memory, tiers=[tier]) as engine:
        store, run = engine.store, engine.parts.runner.run

        def wait(timeout_s: float) -> None:
            clock.now_s = max(clock.now_s, min(clock.now_s + timeout_s, tier.next_s, store._flow.next_deadline_s))

        def forward(work: Any) -> Any:
            outputs = run(work)
            clock.now_s += of.forward_s(sum(item.count for item in work))
            return outputs

        monkeypatch.setattr(store, "wait", wait)
        monkeypatch.setattr(engine.parts.runner, "run", forward)
        engine._cost_model.forget()
        for tokens in (1, of.step_tokens):
            engine._cost_model.computed(tokens, of.forward_s(tokens))
        yield engine, clock


@pytest.mark.hurried
@pytest.mark.parametrize("rate", mostly_rare([1e6, 3e6, 40e6], [40e6]), ids=["alike", "quicker", "much quicker"])
def test_what_is_computed_while_it_is_loaded(rate, checkpoints, tmp_path, monkeypatch):
    """A tier about as fast as computing, or quicker: the same tokens come from it, the first at the same time."""
    lines = traces.conversations(150, seed=5, people=40, gap_ms=10_000_000, longest=50)
    of = Scenario(
        host_bytes=120 * CHUNK_BYTES,
        kv_bytes_per_token=CHUNK_BYTES // BLOCK_TOKENS,
        block_tokens=BLOCK_TOKENS,
        disk_bytes=1 << 30,
        policy="lru",
        step_tokens=64,
        prefill_tokens_per_s=1000.0,
        prefill_s_fixed=0.001,
        copy_bytes_per_s=1e15,
        disk=Link(rate, 1e9, 1e-4),
    )
    memory = Memory(
        kv_cache_memory="8MiB",
        host_memory=120 * CHUNK_BYTES,
        block_size=BLOCK_TOKENS,
        chunk_blocks=1,
        eviction_policy="lru",
        max_num_batched_tokens=of.step_tokens,
        load_timeout_s=of.load_timeout_s,
    )
    reused: dict[str, list[int]] = {"host": [], "disk": []}
    ttft_s = []
    with timed(checkpoints("llama"), memory, of, monkeypatch) as (engine, clock):
        for line in lines:
            began_s = clock.now_s
            (completion,) = engine.generate([tokens_of(line)], ONE_TOKEN)
            ttft_s.append(clock.now_s - began_s)
            for name, column in reused.items():
                column.append(completion.reused_tokens.get(name, 0))
            assert engine.flush(1e9)
            engine.drop_device_cache()
        overlapped = engine.stats()["engine"]["overlapped_loads"]
        engine.check()
    trace = traces.trace(tmp_path / "trace", lines)
    (report,) = [report for part in parts_of(trace, of) for report in replay(trace, of, part)]
    assert {name: report.reused[tier].tolist() for tier, name in enumerate(of.tier_names)} == reused
    assert report.ttft_s.tolist() == pytest.approx(ttft_s, abs=1e-6)
    assert (overlapped > 20 if rate < 10e6 else overlapped == 0) and sum(reused["disk"]) > 1000
