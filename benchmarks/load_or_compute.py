"""Time to first token of a prefix on disk: loaded, computed, and as the engine decides, from disks of many speeds.

    python -m benchmarks.load_or_compute [--rounds N] [--tokens 512,2048] [--ratios 0.1,0.5,1,2,4] [--dtype D]

A Llama-like model of 0.04 B parameters. The disk is slowed down until loading the prefix takes as many times as long as
computing it as ``--ratios`` say. In turn, on one engine: everything loaded, everything computed, and left to the engine
(which has measured both), the device's and the host's cache dropped before each. Beside it what two workers on one job
would take: ``load * compute / (load + compute)``. The goal: at most 1.1 times the quicker of the two.
"""

from __future__ import annotations

import argparse
import functools
import math
import tempfile
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks import models
from benchmarks._report import median_spread, write_result
from benchmarks.integrity import SlowFiles
from stowage.cache import opening
from stowage.config.memory import Memory
from stowage.engine.engine import Engine
from stowage.engine.sampling_params import SamplingParams
from stowage.storage.disk import DiskTier
from stowage.storage.disk.system import System

WAYS = ("load", "compute", "engine")
GOAL = 1.1
OVERRIDES: dict[str, dict[str, Any]] = {
    "load": {"worth_loading": True, "worth_overlapping": False, "load_limit_s": math.inf},
    "compute": {"worth_loading": False, "worth_overlapping": False},
    "engine": {},
}
UNBOUNDED = 1e12


def ask(engine: Engine, prompt: list[int], way: str) -> tuple[float, int]:
    """Seconds to the first token, and how many tokens were reused, when only the disk has the prompt."""
    if not engine.flush():
        raise SystemExit("the prompt is not on disk yet")
    engine.drop_device_cache()
    engine.drop_host()
    cost_model = engine._cost_model
    for name, value in OVERRIDES[way].items():
        setattr(cost_model, name, lambda *_, value=value: value)
    (completion,) = engine.generate([prompt], SamplingParams(max_new_tokens=1, ignore_eos=True))
    for name in OVERRIDES[way]:
        delattr(cost_model, name)
    return completion.ttft_s, sum(completion.reused_tokens.values())


def measure(engine: Engine, files: SlowFiles, tokens: int, ratios: list[float], rounds: int) -> list[dict[str, Any]]:
    prompt = models.random_tokens(tokens, tokens)
    engine.generate([prompt], SamplingParams(max_new_tokens=1, ignore_eos=True))
    compute_s = median(ask(engine, prompt, "compute")[0] for _ in range(3))
    before = engine.stats()["store"]["promoted_bytes"]
    ask(engine, prompt, "load")
    nbytes = engine.stats()["store"]["promoted_bytes"] - before
    rows = []
    for ratio in ratios:
        files.bytes_per_s = nbytes / (ratio * compute_s)
        engine._cost_model.bytes_per_s.clear()
        ask(engine, prompt, "load")  # the engine measures this disk
        found: dict[str, list[float]] = {way: [] for way in WAYS}
        reused = []
        for number in range(rounds):
            for at in range(len(WAYS)):
                way = WAYS[(at + number) % len(WAYS)]
                seconds, count = ask(engine, prompt, way)
                found[way].append(seconds)
                reused += [count] if way == "engine" else []
        files.bytes_per_s = UNBOUNDED
        spreads = {way: median_spread(seconds) for way, seconds in found.items()}
        load_s, own_s, ours_s = (spreads[way].median for way in WAYS)
        row = {
            "tokens": tokens,
            "disk_bytes_per_s": nbytes / (ratio * compute_s),
            **spreads,
            "both_s": load_s * own_s / (load_s + own_s),
            "reused_tokens": median(reused),
            "ratio_to_quicker": ours_s / min(load_s, own_s),
        }
        print(
            f"  {tokens:>6} {nbytes / (ratio * compute_s) / 1e6:>9.1f} {load_s:>8.2f} {own_s:>8.2f} {ours_s:>8.2f}"
            f" ({spreads['engine'].least:.2f} to {spreads['engine'].largest:.2f}) {row['both_s']:>8.2f}"
            f" {row['reused_tokens']:>7.0f} {row['ratio_to_quicker']:>8.2f}",
            flush=True,
        )
        rows.append(row)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--tokens", default="512,2048")
    parser.add_argument("--ratios", default="0.1,0.5,1,2,4")
    parser.add_argument("--dtype", default="float32", choices=["bfloat16", "float32"])
    options = parser.parse_args()
    lengths = [int(part) for part in options.tokens.split(",")]
    ratios = [float(part) for part in options.ratios.split(",")]
    files = SlowFiles(UNBOUNDED)
    opening.DiskTier = functools.partial(DiskTier, system=System(files=files))  # type: ignore[assignment,misc]
    model = models.small(options.dtype, max(lengths) + 64)
    print("  tokens disk MB/s   load s  compute   engine               both at once reused to quicker")
    with tempfile.TemporaryDirectory(prefix="stowage-bench-") as directory:
        memory = Memory(
            kv_cache_memory="256MiB", host_memory="256MiB", disk=f"{Path(directory) / 'cache'}:1GiB", load_timeout_s=600
        )
        with Engine(model, memory) as engine:
            rows = [row for tokens in lengths for row in measure(engine, files, tokens, ratios, options.rounds)]
    worst = max(row["ratio_to_quicker"] for row in rows)
    print(f"at worst {worst:.2f} times the quicker of loading and computing (goal {GOAL})")
    write_result("load_or_compute", {"dtype": options.dtype, "goal": GOAL, "worst": worst, "rows": rows})


if __name__ == "__main__":
    main()
