"""What a KV connector takes of a step of vLLM's scheduler: ours, vLLM's `OffloadingConnector`, LMCache's, in turn.

    python -m benchmarks.vllm_scheduler [--running 1 100 1000] [--groups 1 4] [--rounds 5] [--steps 40]
        [--connectors stowage offloading offloading_128 lmcache]

Needs the peers' environment (`make bench-env`). vLLM's own scheduler with that many requests that all generate, and no
model; each connector in a process of its own, a round of steps each, in turn. Counted is the processor time of the
scheduler's thread inside of the connector's methods, so that neighbours on the machine count little; beside it what
other threads of the process took. Chunks have 128
tokens, but those of `offloading`, which have vLLM's default, a block of 16. With 1,000 requests about 8 complete one
in each step. LMCache's connector has no support for several groups,
and its look-up, which asks a worker, is answered at once.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks._peer import PYTHON, Peer
from benchmarks._report import median_spread, write_result

SCRIPT = Path(__file__).parent / "peers" / "vllm_scheduler.py"
CONNECTORS = ("stowage", "offloading", "offloading_128", "lmcache")


def measure(connectors: Sequence[str], running: int, groups: int, rounds: int, steps: int) -> dict[str, Any]:
    """Microseconds per step, by connector: the medians of rounds, and the largest step but one in twenty; ``others``:
    those of other threads.
    """
    names = [name for name in connectors if groups == 1 or name != "lmcache"]
    peers = {name: Peer([PYTHON, SCRIPT, name, "--running", str(running), "--groups", str(groups)]) for name in names}
    medians: dict[str, list[float]] = {name: [] for name in names}
    all_of: dict[str, list[float]] = {name: [] for name in names}
    others: dict[str, list[float]] = {name: [] for name in names}
    whole: list[float] = []
    for number in range(rounds):
        for name in names[:: 1 if number % 2 else -1]:
            answer = peers[name].ask(steps=steps)
            medians[name].append(statistics.median(answer["connector_us"]))
            all_of[name] += answer["connector_us"]
            others[name] += answer["others_us"]
            whole += answer["step_us"]
    for peer in peers.values():
        peer.end()
    return {
        name: {
            "median": median_spread(medians[name]),
            "mean": statistics.fmean(all_of[name]),
            "95th": sorted(all_of[name])[int(0.95 * len(all_of[name]))],
            "others": statistics.fmean(others[name]),
        }
        for name in names
    } | {"step": {"median": statistics.median(whole)}}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--running", type=int, nargs="+", default=[1, 100, 1000])
    parser.add_argument("--groups", type=int, nargs="+", default=[1, 4])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--connectors", nargs="+", default=CONNECTORS, choices=CONNECTORS)
    options = parser.parse_args()
    if not PYTHON.exists():
        raise SystemExit("vLLM is not here. Make the peers' environment first: make bench-env")
    found: dict[str, Any] = {}
    for groups in options.groups:
        for running in options.running:
            found[f"{running} running, {groups} groups"] = of = measure(
                options.connectors, running, groups, options.rounds, options.steps
            )
            for name, values in of.items():
                more = "".join(f", {what} {values[what]:8.0f}" for what in ("mean", "95th", "others") if what in values)
                shown = values["median"] if isinstance(values["median"], float) else values["median"].median
                print(f"{running:>5} running, {groups} groups, {name:>15}: median {shown:8.0f} us{more}", flush=True)
    write_result("vllm_scheduler", {"unit": "microseconds per step", "per_step": found} | vars(options))


if __name__ == "__main__":
    main()
