"""``stowage simulate`` on a million prompts, and against the real engine on a scaled-down replay.

    python -m benchmarks.simulate TRACE [--requests 1000000] [--ways ...] [--prompts 300] [--skip-engine]

The million are the trace again and again, each time with other conversations behind the same first block, as `stowage
simulate` reads them from a file; the time is that of the whole command. The replay gives each block of the trace 16
tokens instead of 512 and has a tiny model answer, one prompt after the other, with nothing kept on the device: tokens
reused must be the same, prompt by prompt and tier by tier. How fast this machine computes a prompt, and what a hit in
host memory and one on disk take besides, is measured with prompts that are not of the trace, between those that are, so
that busy neighbours hit both, and told to the simulation; the medians of the time to first token are compared.
"""

from __future__ import annotations

import argparse
import json
import random
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from dataclasses import asdict, dataclass, replace
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks._replay import read_lines
from benchmarks._report import RESULTS, write_result
from stowage.config.memory import Memory
from stowage.engine.engine import Engine
from stowage.engine.sampling_params import SamplingParams
from stowage.simulator.replay import parts_of, replay
from stowage.simulator.scenario import Link, Scenario
from stowage.simulator.trace import read_trace
from stowage.testing import tiny_models

BLOCK_TOKENS = 16
SHRINK = 512 // BLOCK_TOKENS
WAYS: dict[str, tuple[str, ...]] = {
    "host, lru": ("--host-memory", "256GiB", "--eviction-policy", "lru"),
    "host and disk, lru": ("--host-memory", "256GiB", "--disk", "2TiB", "--eviction-policy", "lru"),
    "host, cost": ("--host-memory", "256GiB", "--eviction-policy", "cost"),
    "host and objects, cost": ("--host-memory", "256GiB", "--object", "--eviction-policy", "cost"),
}
NODES = 4
ONE_TOKEN = SamplingParams(max_new_tokens=1, ignore_eos=True)
LENGTHS = (16, 64, 128, 192, 256, 320, 384, 512)
"""Of prompts that show how fast the engine computes. Each is asked again with another ending, for what hits take."""


def repeated(source: Path, target: Path, requests: int) -> None:
    """So many prompts: the trace again and again, with other ids but for those that every prompt has."""
    lines = read_lines(source)
    common = set.intersection(*(set(line["hash_ids"]) for line in lines))
    span_ms = lines[-1]["timestamp"] - lines[0]["timestamp"] + 1000
    shift = max(max(line["hash_ids"], default=0) for line in lines) + 1
    with target.open("w", encoding="utf-8") as out:
        for number in range(requests):
            again, place = divmod(number, len(lines))
            line = lines[place]
            ids = [block if block in common else block + again * shift for block in line["hash_ids"]]
            out.write(json.dumps(line | {"timestamp": line["timestamp"] + again * span_ms, "hash_ids": ids}) + "\n")


def many(source: Path, requests: int, names: list[str]) -> dict[str, Any]:
    """Seconds of the command for each way, and what it found."""
    found: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "long.jsonl"
        repeated(source, path, requests)
        for name in names:
            command = [sys.executable, "-m", "stowage", "simulate", str(path), "--nodes", str(NODES), "--json"]
            began_s, began_cpu_s = time.perf_counter(), _children_cpu_s()
            out = subprocess.run([*command, *WAYS[name]], check=True, capture_output=True, text=True).stdout
            seconds, cpu_s = time.perf_counter() - began_s, _children_cpu_s() - began_cpu_s
            (result,) = json.loads(out)["results"]
            found[name] = {
                "seconds": seconds,
                "cpu_s": cpu_s,
                "requests_per_s": requests / seconds,
                "cpu_us_per_request": cpu_s / requests * 1e6,
                "hit_rate": result["hit_rate"],
                "ttft_s": result["ttft_s"],
            }
            print(
                f"{requests:,} prompts, {NODES} nodes, {name}: {seconds:.0f} s, {requests / seconds:,.0f} prompts/s, "
                f"{cpu_s:.0f} s of CPU",
                file=sys.stderr,
                flush=True,
            )
    return found


def _children_cpu_s() -> float:
    """Of all processes that have ended: on a shared machine the time on the wall says more about the neighbours."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def scaled(source: Path, prompts: int) -> list[dict[str, Any]]:
    """Prompts of conversations that come back often, with blocks of 16 tokens; far apart in time."""
    lines = read_lines(source)
    often = Counter(line["hash_ids"][1] for line in lines if len(line["hash_ids"]) > 1)
    chosen: list[dict[str, Any]] = []
    for line in lines:
        tokens, ids = line["input_length"] // SHRINK, line["hash_ids"]
        if len(ids) > 1 and often[ids[1]] > 5 and 0 < tokens <= 1000 and len(chosen) < prompts:
            ids = ids[: -(-tokens // BLOCK_TOKENS)]
            chosen.append(
                {"timestamp": len(chosen) * 10**7, "input_length": tokens, "output_length": 1, "hash_ids": ids}
            )
    return chosen


def tokens_of(line: dict[str, Any]) -> list[int]:
    """Tokens for the blocks of a line: an id has the same ones wherever it stands."""
    tokens = [
        token for block in line["hash_ids"] for token in random.Random(block).choices(range(5, 500), k=BLOCK_TOKENS)
    ]
    return tokens[: line["input_length"]]


def engine_replay(lines: list[dict[str, Any]], host_bytes: int, disk_bytes: int, directory: Path) -> dict[str, Any]:
    """What the real engine reused, by tier and prompt; its times to first token; its speed on prompts of its own."""
    model = directory / "model"
    if not model.exists():
        tiny_models.write("llama", model, tiny_models.TinySize(hidden=256, layers=4, context_tokens=4096))
    disk = f"{directory / f'cache-{disk_bytes}'}:{disk_bytes}" if disk_bytes else ""
    memory = Memory(
        kv_cache_memory="64MiB",
        host_memory=host_bytes,
        disk=disk,
        block_size=BLOCK_TOKENS,
        chunk_blocks=1,
        eviction_policy="lru",
    )
    result: dict[str, Any] = {"host": [], "disk": [], "ttft_s": []}
    beside = replace(memory, host_memory=64 << 20, disk=f"{directory / f'beside-{disk_bytes}'}:{256 << 20}")
    with Engine(model, memory) as engine, Engine(model, beside) as other:
        result["chunk_bytes"] = engine.parts.layout.groups[0].bytes_per_chunk
        probe = Probe(other)
        for length in LENGTHS:  # the first of each are slower
            probe.ask(length)
        probe.seconds.clear()
        for number, line in enumerate(lines):
            engine.forget_costs()
            (completion,) = engine.generate([tokens_of(line)], ONE_TOKEN)
            for name in ("host", "disk"):
                result[name].append(completion.reused_tokens.get(name, 0))
            result["ttft_s"].append(completion.ttft_s)
            assert engine.flush()
            engine.drop_device_cache()
            probe.ask(LENGTHS[number % len(LENGTHS)])
        result["costs"] = probe.costs(result["chunk_bytes"])
    return result


class Probe:
    """How fast an engine computes and what its hits take, by prompts of its own."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._chance = random.Random(1)
        self.seconds: dict[str, dict[int, list[float]]] = {}
        """To the first token, by where a prompt's beginning lay, and by tokens: all of them if it lay nowhere."""

    def ask(self, length: int) -> None:
        """A new prompt, and the same again with another last block, from host memory and from disk."""
        prompt = self._tokens(length)
        self._time("nowhere", length, prompt, 0)
        self._time("host", length, prompt + self._tokens(BLOCK_TOKENS), length)
        self._engine.drop_host()
        self._time("disk", length, prompt + self._tokens(BLOCK_TOKENS), length)

    def _tokens(self, count: int) -> list[int]:
        return self._chance.choices(range(5, 500), k=count)

    def _time(self, place: str, length: int, prompt: list[int], reused: int) -> None:
        engine = self._engine
        engine.forget_costs()  # loads, however quick computing would be
        (completion,) = engine.generate([prompt], ONE_TOKEN)
        assert completion.reused_tokens.get(place, 0) == reused, completion.reused_tokens
        self.seconds.setdefault(place, {}).setdefault(length, []).append(completion.ttft_s)
        assert engine.flush()
        engine.drop_device_cache()

    def costs(self, chunk_bytes: int) -> Costs:
        """Lines through the medians of each length; of hits, without what the last block takes to compute. What a disk
        takes besides is the difference between two prompts that were asked one after the other.
        """
        nowhere = {length: statistics.median(all_s) for length, all_s in self.seconds["nowhere"].items()}
        host = {length: statistics.median(all_s) for length, all_s in self.seconds["host"].items()}
        below = {
            length: statistics.median(np.subtract(all_s, self.seconds["host"][length]).tolist())
            for length, all_s in self.seconds["disk"].items()
        }
        prefill_fixed_s, token_s = _line(nowhere)
        load_fixed_s, copied_s = _line({length: took_s - nowhere[BLOCK_TOKENS] for length, took_s in host.items()})
        latency_s, read_s = _line(below)
        bytes_per_token = chunk_bytes / BLOCK_TOKENS
        # The simulation adds to what is computed that its keys and values are copied; the first line has that in it.
        return Costs(
            prefill_fixed_s,
            1 / max(token_s - copied_s, 1e-9),
            load_fixed_s,
            bytes_per_token / copied_s,
            latency_s,
            bytes_per_token / read_s,
        )


@dataclass(frozen=True, slots=True)
class Costs:
    """What a scenario has to be told of a machine."""

    prefill_s_fixed: float
    prefill_tokens_per_s: float
    load_s_fixed: float
    copy_bytes_per_s: float
    disk_latency_s: float
    disk_bytes_per_s: float


def _line(seconds: dict[int, float]) -> tuple[float, float]:
    """What is not for tokens, and what a token takes, neither below 0: the median of the slopes between any two points
    (Theil 1950, Sen 1968), so that some lengths that a neighbour slowed down do not tilt it.
    """
    slopes = [
        (late_s - soon_s) / (long - short) for (short, soon_s), (long, late_s) in combinations(seconds.items(), 2)
    ]
    slope = max(statistics.median(slopes), 1e-9)
    return max(statistics.median(took_s - slope * length for length, took_s in seconds.items()), 0.0), slope


def compare(source: Path, prompts: int, disk_bytes: int) -> dict[str, Any]:
    """The same prompts through the engine and through the simulation."""
    lines = scaled(source, prompts)
    with tempfile.TemporaryDirectory() as text:
        directory = Path(text)
        host_bytes = (4 if disk_bytes else 16) << 20
        real = engine_replay(lines, host_bytes, disk_bytes, directory)
        path = directory / "trace.jsonl"
        path.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
        trace = read_trace(path, BLOCK_TOKENS)
    costs: Costs = real["costs"]
    of = Scenario(
        host_bytes=host_bytes,
        kv_bytes_per_token=real["chunk_bytes"] // BLOCK_TOKENS,
        block_tokens=BLOCK_TOKENS,
        disk_bytes=disk_bytes,
        policy="lru",
        prefill_s_fixed=costs.prefill_s_fixed,
        prefill_tokens_per_s=costs.prefill_tokens_per_s,
        load_s_fixed=costs.load_s_fixed,
        copy_bytes_per_s=costs.copy_bytes_per_s,
        disk=Link(costs.disk_bytes_per_s, costs.disk_bytes_per_s, costs.disk_latency_s),
    )
    (report,) = [report for part in parts_of(trace, of) for report in replay(trace, of, part)]
    simulated = {name: report.reused[tier].tolist() for tier, name in enumerate(of.tier_names)}
    differ = sum(any(simulated[name][at] != real[name][at] for name in simulated) for at in range(len(lines)))
    ours, theirs = statistics.median(report.ttft_s.tolist()), statistics.median(real["ttft_s"])
    return {
        "prompts": len(lines),
        "input_tokens": int(trace.tokens.sum()),
        "reused_tokens_engine": {name: sum(real[name]) for name in simulated},
        "reused_tokens_simulated": {name: sum(simulated[name]) for name in simulated},
        "prompts_that_differ": differ,
        **asdict(costs),
        "ttft_p50_s_engine": theirs,
        "ttft_p50_s_simulated": ours,
        "ttft_p50_error": ours / theirs - 1,
    }


def _before() -> dict[str, Any]:
    """What the last run found: parts that are not asked for again stay."""
    path = RESULTS / "simulate.json"
    found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    return {name: part for name, part in found.items() if name not in ("benchmark", "machine")}


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.simulate", description=__doc__)
    parser.add_argument("trace", type=Path, metavar="TRACE")
    parser.add_argument("--requests", type=int, default=1_000_000)
    parser.add_argument("--prompts", type=int, default=300, help="for the engine")
    parser.add_argument("--ways", nargs="*", choices=list(WAYS), default=list(WAYS), help="of the million; none: skip")
    parser.add_argument("--skip-engine", action="store_true")
    options = parser.parse_args()
    result = _before() | {"nodes": NODES}
    if not options.skip_engine:
        for name, disk_bytes in (("host", 0), ("host and disk", 32 << 20)):
            result[f"engine, {name}"] = found = compare(options.trace, options.prompts, disk_bytes)
            print(f"engine, {name}: {json.dumps(found)}", file=sys.stderr, flush=True)
    if options.ways:
        name = f"{options.requests} prompts"
        result[name] = result.get(name, {}) | many(options.trace, options.requests, options.ways)
    print(write_result("simulate", result))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
