"""``stowage simulate`` on a million prompts, and against the real engine on a scaled-down replay.

    python -m benchmarks.simulate TRACE [--requests 1000000] [--prompts 300] [--skip-million] [--skip-engine]

The million are the trace again and again, each time with other conversations behind the same first block, as `stowage
simulate` reads them from a file; the time is that of the whole command. The replay gives each block of the trace 16
tokens instead of 512 and has a tiny model answer, one prompt after the other, with nothing kept on the device: tokens
reused must be the same, prompt by prompt and tier by tier. How long the tiny model takes for a prompt is measured with
prompts that are not of the trace, and told to the simulation; the medians of the time to first token are compared.
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
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks._report import RESULTS, write_result

BLOCK_TOKENS = 16
SHRINK = 512 // BLOCK_TOKENS
WAYS: dict[str, tuple[str, ...]] = {
    "host, lru": ("--host", "256GiB", "--policy", "lru"),
    "host and disk, lru": ("--host", "256GiB", "--disk", "2TiB", "--policy", "lru"),
    "host, cost": ("--host", "256GiB", "--policy", "cost"),
}
NODES = 4
LENGTHS = (16, 64, 128, 192, 256, 320, 384, 512)
"""Of prompts that show how fast the engine computes: asked in between, so that a busy neighbour hits both."""


def repeated(source: Path, target: Path, requests: int) -> None:
    """So many prompts: the trace again and again, with other ids but for those that every prompt has."""
    lines = [json.loads(line) for line in source.read_text(encoding="utf-8").splitlines() if line.strip()]
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
                "hit_rate": result["hit_rate"],
                "ttft_s": result["ttft_s"],
            }
            print(
                f"{requests:,} prompts, {NODES} nodes, {name}: {seconds:.0f} s, {cpu_s:.0f} s of CPU",
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
    lines = [json.loads(line) for line in source.read_text(encoding="utf-8").splitlines() if line.strip()]
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
    from stowage.config import Memory
    from stowage.engine.engine import Engine
    from stowage.engine.sampler import SamplingParams
    from stowage.testing import tiny_models

    model = directory / "model"
    if not model.exists():
        tiny_models.write("llama", model, tiny_models.TinySize(hidden=256, layers=4, context_tokens=4096))
    one = SamplingParams(max_new_tokens=1, ignore_eos=True)
    disk = f"{directory / f'cache-{disk_bytes}'}:{disk_bytes}" if disk_bytes else ""
    memory = Memory(
        device_kv="64MiB", host=host_bytes, disk=disk, block_tokens=BLOCK_TOKENS, chunk_blocks=1, policy="lru"
    )
    result: dict[str, Any] = {"host": [], "disk": [], "ttft_s": [], "speed": []}
    chance = random.Random(1)
    beside = Memory(device_kv="64MiB", host=host_bytes, block_tokens=BLOCK_TOKENS, chunk_blocks=1)
    with Engine(model, memory) as engine, Engine(model, beside) as other:
        result["chunk_bytes"] = engine.parts.layout.groups[0].bytes_per_chunk
        for length in (*LENGTHS, *LENGTHS):
            other.generate([chance.choices(range(5, 500), k=length)], one)
        for number, line in enumerate(lines):
            engine.forget_pace()
            (completion,) = engine.generate([tokens_of(line)], one)
            for name in ("host", "disk"):
                result[name].append(completion.reused_tokens.get(name, 0))
            result["ttft_s"].append(completion.ttft_s)
            assert engine.flush()
            engine.drop_device_cache()
            length = LENGTHS[number % len(LENGTHS)]
            (completion,) = other.generate([chance.choices(range(5, 500), k=length)], one)
            result["speed"].append((length, completion.ttft_s))
            other.drop_device_cache()
    return result


def speed_of(measured: list[tuple[int, float]]) -> tuple[float, float]:
    """Seconds of a prompt besides its tokens, and tokens per second: a line through the medians of each length."""
    lengths = sorted({length for length, _ in measured})
    medians = [statistics.median(seconds for length, seconds in measured if length == at) for at in lengths]
    slope, fixed = np.polyfit(lengths, medians, 1)
    return max(float(fixed), 0.0), 1 / float(slope)


def compare(source: Path, prompts: int, disk_bytes: int) -> dict[str, Any]:
    """The same prompts through the engine and through the simulation."""
    from stowage.planner.replay import parts_of, replay
    from stowage.planner.scenario import Scenario
    from stowage.planner.trace import read_trace

    lines = scaled(source, prompts)
    with tempfile.TemporaryDirectory() as text:
        directory = Path(text)
        host_bytes = (4 if disk_bytes else 16) << 20
        real = engine_replay(lines, host_bytes, disk_bytes, directory)
        path = directory / "trace.jsonl"
        path.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
        trace = read_trace(path, BLOCK_TOKENS)
    fixed_s, tokens_per_s = speed_of(real["speed"])
    of = Scenario(
        host_bytes=host_bytes,
        kv_bytes_per_token=real["chunk_bytes"] // BLOCK_TOKENS,
        block_tokens=BLOCK_TOKENS,
        disk_bytes=disk_bytes,
        policy="lru",
        prefill_tokens_per_s=tokens_per_s,
        prefill_s_fixed=fixed_s,
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
        "prefill_s_fixed": fixed_s,
        "prefill_tokens_per_s": tokens_per_s,
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
