"""Is what `stowage plan` predicts what happens? Tokens per second and time to first token, by placement.

    python -m benchmarks.placement [--rounds 3] [--cases resident,stream,...] [--new-tokens 16] [--add]

A Llama-like checkpoint (hidden 2048, 14 layers, vocabulary 32,000: 1.9 GB in bfloat16). In each round the machine is
measured anew, as `stowage probe --refresh` does; then, for each case, what is predicted from config.json, the headers
of the weights and those speeds alone is held against what an engine does in a process of its own: a prompt of 128
tokens, and eight of them at once, and their answers. No number of a run is known to a prediction. `--add`: to the
rounds in the result's file, so that one round at a time can be run on a machine that others use. Another model is given
by `--checkpoint`, for the case `resident` alone: `--cases resident --checkpoint FILE.gguf --name placement_gguf`.

Cases: `resident` (all in memory), `mapped` (a view over the file, page cache warm), `stream` (layers and output layer
read from disk for every step), `half` and `quarter` (every second or fourth layer read), `mixed` (of four layers one is
in memory, one mapped, two are read).
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks import models
from benchmarks._peer import Peer
from benchmarks._report import RESULTS, median_spread, write_result
from stowage import openmp
from stowage.planner import probe
from stowage.planner.machine import Machine
from stowage.planner.model import read_model
from stowage.planner.predict import Offloaded, Workload, predict
from stowage.planner.shapes import Model

SCRIPT = Path(__file__).parent / "peers" / "placed_engine.py"
PROMPT_TOKENS, CONTEXT_TOKENS = 128, 2048
BATCHES = (1, 8)
LAYERS = 14
TTFT, STEP = "ttft_s", "step_s"


@dataclass(frozen=True, slots=True)
class Case:
    """``rules`` as `--weights` takes them; which layers are read from disk and which are mapped, and whether the output
    layer goes with them.
    """

    rules: str
    streamed: frozenset[int] = frozenset()
    mapped: frozenset[int] = frozenset()
    head: bool = False

    def offloaded(self, model: Model) -> Offloaded:
        layers = sum(model.layers[at].total_bytes for at in self.streamed)
        mapped = sum(model.layers[at].total_bytes for at in self.mapped)
        head = model.head_bytes * self.head
        if self.streamed:
            return Offloaded(0, layers + head, mapped_bytes=mapped)
        return Offloaded(mapped_bytes=mapped + head * bool(self.mapped))

    def host_bytes(self, model: Model) -> int:
        """With a little for the engine's arena, which wants some."""
        layers = sum(model.layers[at].total_bytes for at in self.mapped)
        return layers + model.head_bytes * self.head + (64 << 20) if self.mapped else 0


ALL = frozenset(range(LAYERS))
CASES = {
    "resident": Case("auto"),
    "mapped": Case("model.layers.*=mapped,lm_head=mapped", mapped=ALL, head=True),
    "quarter": Case("last 1 of 4=stream", streamed=frozenset(range(3, LAYERS, 4))),
    "half": Case("last 1 of 2=stream", streamed=frozenset(range(1, LAYERS, 2))),
    "mixed": Case(
        "last 2 of 4=stream,last 3 of 4=mapped",
        streamed=frozenset(at for at in ALL if at % 4 >= 2),
        mapped=frozenset(range(1, LAYERS, 4)),
    ),
    "stream": Case("model.layers.*=stream,lm_head=stream", streamed=ALL, head=True),
}


def measure(case: Case, path: Path, model: Model, machine: Machine, new_tokens: int, seed: int) -> dict[str, Any]:
    """Predicted and measured seconds, by batch."""
    found: dict[str, Any] = {}
    peer = Peer([sys.executable, SCRIPT, path, model.dtype, case.rules, "0", str(case.host_bytes(model))])
    try:
        peer.ask(prompts=[models.random_tokens(PROMPT_TOKENS, seed)], tokens=4)  # once: page cache, memory
        for batch in BATCHES:
            work = Workload(CONTEXT_TOKENS, batch, PROMPT_TOKENS, new_tokens)
            predicted = predict(model, machine, work, case.offloaded(model))
            prompts = [models.random_tokens(PROMPT_TOKENS, seed + 10 * batch + at) for at in range(batch)]
            done = peer.ask(prompts=prompts, tokens=new_tokens)
            found[str(batch)] = {
                STEP: {"predicted": predicted.decode.total_s, "measured": done["decode_s"] / (new_tokens - 1)},
                TTFT: {"predicted": predicted.ttft_batch_s, "measured": max(done["ttft_s"])},
                "limit": predicted.decode.limit,
                "stall_s": done["weights"].get("stall_s", 0.0) / (new_tokens - 1),
            }
    finally:
        peer.end()
    return found


def report(rounds: list[dict[str, Any]]) -> dict[str, Any]:
    """Medians of what was predicted and of what was measured, and how far apart they are."""
    kept: dict[str, Any] = {}
    for name in CASES:
        for batch in map(str, BATCHES):
            taken = [r[name][batch] for r in rounds if name in r]
            if not taken:
                continue
            entry: dict[str, Any] = {}
            for what in (STEP, TTFT):
                predicted, measured = (median_spread([t[what][of] for t in taken]) for of in ("predicted", "measured"))
                error = predicted.median / measured.median - 1
                entry[what] = {"predicted": predicted, "measured": measured, "error": error}
                entry[f"{what}_error_by_round"] = [t[what]["predicted"] / t[what]["measured"] - 1 for t in taken]
            kept[f"{name}, batch {batch}"] = entry
            step, ttft = entry[STEP], entry[TTFT]
            print(
                f"{name:<10} batch {batch}: decoding {_rate(batch, step['predicted']):6.2f} tokens/s predicted, "
                f"{_rate(batch, step['measured']):6.2f} measured ({step['error']:+.1%} of a step); first token "
                f"{ttft['predicted'].median:5.2f} s predicted, {ttft['measured'].median:5.2f} measured "
                f"({ttft['error']:+.1%}); {len(taken)} rounds",
                flush=True,
            )
    return kept


def _rate(batch: str, step_s: Any) -> float:
    return int(batch) / float(step_s.median)


def main() -> None:
    openmp.wait_briefly()  # as `stowage run` and `stowage probe`
    from benchmarks import weights  # torch comes with it

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--cases", default=",".join(CASES))
    parser.add_argument("--new-tokens", type=int, default=16)
    parser.add_argument("--dtype", default=models.native_dtype())
    parser.add_argument("--directory", type=Path, default=Path.home() / ".cache")
    parser.add_argument("--checkpoint", type=Path, default=None, help="of an earlier run; it is made where it is not")
    parser.add_argument("--name", default="placement", help="of the result's file")
    parser.add_argument("--add", action="store_true", help="to the rounds that the result's file has")
    asked = parser.parse_args()
    file = RESULTS / f"{asked.name}.json"
    rounds: list[dict[str, Any]] = json.loads(file.read_text())["rounds"] if asked.add and file.exists() else []
    with tempfile.TemporaryDirectory(dir=asked.directory) as name:
        path = asked.checkpoint or Path(name) / "model"
        if not path.exists():
            weights.checkpoint(path, asked.dtype, LAYERS)
        model = read_model(path)
        for _ in range(asked.rounds):
            machine = probe.measure(path.parent)
            found: dict[str, Any] = {"machine": dict(probe.rows(machine))}
            for case in asked.cases.split(","):
                seed = 10_000 * (len(rounds) + 1)
                found[case] = measure(CASES[case], path, model, machine, asked.new_tokens, seed)
            rounds.append(found)
            report([found])
    print(f"medians of {len(rounds)} rounds")
    settings = {
        "dtype": asked.dtype,
        "layers": len(model.layers),
        "bytes": model.total_bytes,
        "prompt_tokens": PROMPT_TOKENS,
    }
    write_result(asked.name, {**settings, "results": report(rounds), "rounds": rounds})


if __name__ == "__main__":
    main()
