"""Nanoseconds per key of the store's control plane at 100,000 keys, beside vLLM's managers of offloaded KV.

    python -m benchmarks.control_plane [--json] [--rounds 5]

Four things that happen to a request's keys, in batches of 256: look-up; store (reserve, commit); load (fetch, release);
and a store that has to evict as many chunks as it brings. Through `TieredStore`, with chunks of one page each, whose
bytes are not touched. CPU time of the thread that works, so that neighbours on the machine count little.
The peers are `CPUOffloadingManager` and `TieringOffloadingManager`. Ours and theirs run in turn, each in a fresh
interpreter. Without the peers' environment (`make bench-env`) only ours is measured.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks._report import median_spread, write_result
from stowage.cache.store import TieredStore
from stowage.core.geometry import Geometry, Group, Kind

KEYS = 100_000
BATCH = 256
OPERATIONS = ("lookup", "store", "load", "evicting_store")
PEER_PYTHON = Path(".venv-bench/bin/python")
PEER_SCRIPT = Path(__file__).parent / "peers" / "vllm_control_plane.py"
PAGE_BYTES = 4096
POLICIES = ("lru", "cost")
"""The cheapest, and the default."""
PEERS = {"vllm": "cpu", "vllm_tiering": "tiering"}
"""The names in the result, and those of the peers' script."""
TIMED_TOGETHER = 8
"""Batches between two looks at the clock, which costs as much as a few keys. The peer's script does the same."""


def new_batches(count: int) -> list[list[bytes]]:
    keys = [os.urandom(32) for _ in range(count)]
    return [keys[i : i + BATCH] for i in range(0, count - BATCH + 1, BATCH)]


def measure(work: Callable[[list[bytes]], object], batches: list[list[bytes]], anew: bool = False) -> float:
    """`anew`: as a request that makes its keys itself, equal bytes but other objects; making them is not counted."""
    spent_ns = 0
    for start in range(0, len(batches), TIMED_TOGETHER):
        some = batches[start : start + TIMED_TOGETHER]
        if anew:
            some = [[bytes(bytearray(key)) for key in keys] for keys in some]
        began_ns = time.thread_time_ns()
        for keys in some:
            work(keys)
        spent_ns += time.thread_time_ns() - began_ns
    return spent_ns / sum(len(keys) for keys in batches)


def run_ours(policy: str) -> dict[str, float]:
    """One round."""
    store = TieredStore(Geometry((Group(0, Kind.FULL, 16, 4, PAGE_BYTES // 4),)), KEYS * PAGE_BYTES, policy=policy)
    masks = np.full(BATCH, 0b1111, np.uint64)
    first, second = new_batches(KEYS), new_batches(KEYS)
    results = {"store": measure(lambda keys: store.commit(store.reserve(0, keys, masks)), first)}
    random.Random(0).shuffle(first)
    results["lookup"] = measure(lambda keys: store.locate(keys)[0], first, anew=True)
    results["load"] = measure(lambda keys: store.release(store.fetch([(0, keys)], 0.0)), first)
    results["evicting_store"] = measure(lambda keys: store.commit(store.reserve(0, keys, masks)), second)
    stats = store.stats()
    assert stats["hits.host"] == stats["fetches"] * BATCH and stats["stores_without_room"] == 0
    store.check()
    store.close()
    return results


def in_fresh_interpreter(command: list[str]) -> dict[str, Any]:
    output = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout
    result: dict[str, Any] = json.loads(output.splitlines()[-1])
    return result


def collect(rounds: int, progress: Callable[[str], None]) -> dict[str, Any]:
    """Ours and the peer's in turn."""
    ours: dict[str, list[dict[str, float]]] = {policy: [] for policy in POLICIES}
    peers: dict[str, list[dict[str, float]]] = {peer: [] for peer in PEERS}
    peer_version = ""
    for number in range(rounds):
        progress(f"round {number + 1} of {rounds}")
        for policy in POLICIES:
            command = [sys.executable, "-m", "benchmarks.control_plane", "--once", policy]
            ours[policy].append(in_fresh_interpreter(command))
        for peer, manager in PEERS.items() if PEER_PYTHON.exists() else ():
            command = [str(PEER_PYTHON), str(PEER_SCRIPT), "--keys", str(KEYS), "--batch", str(BATCH)]
            answer = in_fresh_interpreter([*command, "--manager", manager])
            peer_version = answer["version"]
            peers[peer].append(answer["ns_per_key"])
    result: dict[str, Any] = {"keys": KEYS, "batch": BATCH, "unit": "CPU nanoseconds per key"}
    for policy, rounds_of in ours.items():
        result[policy] = {name: median_spread([one[name] for one in rounds_of]) for name in OPERATIONS}
    if not peer_version:
        return result
    result["vllm_version"] = peer_version
    for peer, rounds_of in peers.items():
        result[peer] = {name: median_spread([one[name] for one in rounds_of]) for name in rounds_of[0]}
        for suffix in ("", "_finished"):
            result[f"times_faster_than_{peer}{suffix}"] = {
                policy: {
                    name: round(result[peer][name + suffix].median / result[policy][name].median, 1)
                    for name in OPERATIONS
                }
                for policy in POLICIES
            }
    return result


def show(result: dict[str, Any]) -> None:
    print(f"{result['keys']:,} keys, {result['batch']} per request; {result['unit']}: median (least to largest)")
    for name in OPERATIONS:
        print(f"  {name}")
        for policy in POLICIES:
            line = f"    stowage, {policy:6} {result[policy][name]!s:36}"
            for peer in PEERS if "vllm" in result else ():
                line += f" x{result[f'times_faster_than_{peer}'][policy][name]:<6}"
            print(line)
        for peer in PEERS if "vllm" in result else ():
            finished = result[peer][f"{name}_finished"]
            print(f"    {peer:15} {result[peer][name]!s:36} with request finished {finished}")
    if "vllm" not in result:
        print("  vLLM is not measured: `make bench-env` creates its environment")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="print the result file instead of a table")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--once", choices=POLICIES, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.once:
        print(json.dumps(run_ours(options.once)))
        return
    result = collect(options.rounds, lambda text: print(text, file=sys.stderr))
    path = write_result("control_plane", result)
    if options.json:
        print(path.read_text(encoding="utf-8"), end="")
    else:
        show(result)


if __name__ == "__main__":
    main()
