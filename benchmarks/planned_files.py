"""Is what `stowage plan` predicts of models in memory what happens? GGUF files of several sizes and formats.

    python -m benchmarks.planned_files FILE.gguf ... [--rounds 3] [--add] [--name NAME]

In each round the machine is measured as `stowage probe --refresh` does, then each file with an engine in a process of
its own, exact and with activations in 8 bits: a prompt of 512 tokens, and 64 tokens after 128, as `benchmarks.engine`
asks; then the machine again, because memory of a virtual machine is faster in one minute than in the next. Measurements
during which others had the cores are repeated. No number of a run is known to a prediction. `--add`: to the rounds of
the result's file; with `--rounds 0` they are predicted anew. Tokens per second, medians of rounds, and by how much a
predicted time is off.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks import engine
from benchmarks._report import median_spread, read_result, write_result
from stowage import openmp
from stowage.planner import format_speed, probe
from stowage.planner.machine import Machine, from_json
from stowage.planner.model import read_model
from stowage.planner.predict import Offloaded, Workload, predict
from stowage.planner.shapes import Model

WAYS = {"stowage": "exact", "int8-activations": "--int8-activations"}
PREFILL_TOKENS = 512
_TIMES, _ATTEMPTS = 3, 4
_WAITED = 0.05
"""On quiet cores an engine's threads wait 1 to 3 % of their time."""


def ways_of(model: Model) -> list[str]:
    """With activations in 8 bits only what has matrices of whole numbers."""
    return list(WAYS) if model.formats else ["stowage"]


def predicted(model: Model, machine: Machine, way: str) -> dict[str, float]:
    """Tokens per second, by what `benchmarks.engine` calls it."""
    if way != "stowage":
        model = format_speed.with_int8(model, machine)
    tokens, context = engine.NEW_TOKENS, 2048
    found = predict(model, machine, Workload(context, 1, PREFILL_TOKENS, 1), Offloaded())
    decoding = predict(model, machine, Workload(context, 1, engine.PROMPT_TOKENS, tokens), Offloaded())
    return {f"prefill {PREFILL_TOKENS}": found.prefill_tokens_per_s, "decode 1": decoding.tokens_per_s}


def measured(path: Path, way: str, turn: int) -> dict[str, float]:
    """The same of an engine: medians of some times. Raises SystemExit where others always have the cores meanwhile."""
    for attempt in range(_ATTEMPTS):
        peer = engine.start(way, path, "bfloat16")
        seed = (turn * _ATTEMPTS + attempt) * (_TIMES + 1)
        engine.speeds(peer, seed, (), (1,))  # what is done once is over
        found = [engine.speeds(peer, seed + at, (PREFILL_TOKENS,), (1,)) for at in range(1, _TIMES + 1)]
        waited = peer.waited_share
        peer.end()
        if waited < _WAITED:
            return {key: statistics.median(one[key] for one in found) for key in found[0]}
    raise SystemExit(f"Others take the cores: {path} could not be measured.")


def measure(models: Mapping[Path, Model], turn: int) -> dict[str, Any]:
    """One round."""
    before = machine_of(next(iter(models)).parent)
    files = {
        name_of(path): {way: measured(path, way, turn) for way in ways_of(model)} for path, model in models.items()
    }
    return {"machines": [before, machine_of(next(iter(models)).parent)], "files": files}


def machine_of(directory: Path) -> dict[str, Any]:
    """The machine, undisturbed."""
    for _ in range(_ATTEMPTS):
        machine = probe.measure(directory)
        if machine.waited_share < _WAITED:
            return machine.to_json()
    raise SystemExit("Others take the cores: the machine could not be measured.")


def name_of(path: Path) -> str:
    return f"{path.parent.name} {path.stem}"


def compare(models: Mapping[Path, Model], rounds: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """By file, way and what is predicted: predicted and measured, and how far the predicted time is off."""
    found: dict[str, Any] = {}
    for path, model in models.items():
        for way in ways_of(model):
            told = [[predicted(model, from_json(json.dumps(one)), way) for one in r["machines"]] for r in rounds]
            did = [r["files"][name_of(path)][way] for r in rounds]
            found[f"{name_of(path)}, {WAYS[way]}"] = entry = {}
            for key in did[0]:
                foretold = median_spread([statistics.mean(one[key] for one in each) for each in told])
                happened = median_spread([each[key] for each in did])
                error = happened.median / foretold.median - 1
                entry[key] = {"predicted": foretold, "measured": happened, "error": error}
    return found


def show(results: Mapping[str, Any]) -> None:
    keys = list(next(iter(results.values())))
    print(f"\n| predicted; measured tokens/s | {' | '.join(keys)} |\n|---|{'---|' * len(keys)}")
    for name, entry in results.items():
        cells = [f"{e['predicted'].median:.4g}; {e['measured'].median:.4g} ({e['error']:+.0%})" for e in entry.values()]
        print(f"| {name} | {' | '.join(cells)} |")


def main() -> None:
    openmp.wait_briefly()  # as `stowage run` and `stowage probe`
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", nargs="+", type=Path)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--add", action="store_true", help="to the rounds that the result's file has")
    parser.add_argument("--name", default="planned_files", help="of the result's file")
    asked = parser.parse_args()
    rounds = read_result(asked.name).get("rounds", []) if asked.add else []
    models = {path: read_model(path) for path in asked.files}
    for _ in range(asked.rounds):
        rounds.append(measure(models, len(rounds)))
        write_result(asked.name, {"rounds": rounds})
    results = compare(models, rounds)
    write_result(asked.name, {"results": results, "rounds": rounds})
    show(results)


if __name__ == "__main__":
    main()
