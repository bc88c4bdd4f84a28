"""The simulation of a trace against the real engine: tier by tier, prompt by prompt, the same tokens are reused."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path

import pytest

from stowage.config.memory import Memory
from stowage.engine.engine import Engine
from stowage.engine.sampling import SamplingParams
from stowage.simulator.replay import parts_of, replay
from stowage.simulator.scenario import Link, Scenario
from stowage.storage.disk.tier import OWN_BYTES
from tests import traces

BLOCK_TOKENS = 16
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
    [("lru", 60, 3 << 20, 0), ("cost", 60, 3 << 20, 0), ("lru", 90, 0, 64)],
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
    trace = traces.trace(tmp_path / "trace", lines, BLOCK_TOKENS)
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
