"""LoRA training with weights on disk: tokens per second and memory, beside plain PEFT in memory and Accelerate.

    python -m benchmarks.lora_training [--rounds 2] [--layers 6] [--steps 3] [--ways memory,stream,...]

Needs the peers' environment (`make bench-env`) and a user who may drop the page cache. The checkpoint is that of
`benchmarks.weights` with fewer layers; rank 16 on every linear layer, batches of 4 times 128 tokens, AdamW. Each round
runs every way in a process of its own, in turn, with gradient checkpointing and without. Ways: `memory` (plain);
`stream`, `half` (ours: all layers from disk, every second one), `accelerate` (`disk_offload`), `accelerate-half`. Cold:
the page cache was emptied before each step. The losses of all must be the same. A way of Accelerate whose backward pass
fails is told and left out: it brings weights for forwards only.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path
from typing import Any

from benchmarks import models
from benchmarks._peer import PYTHON, Peer
from benchmarks._report import median_spread, write_result
from benchmarks.weights import checkpoint

SCRIPT = Path(__file__).parent / "peers" / "lora_trainer.py"
WAYS = ("memory", "stream", "half", "accelerate", "accelerate-half")
KINDS = ("plain", "checkpointing")


def measure(way: str, path: Path, kind: str, asked: argparse.Namespace) -> dict[str, Any]:
    """One process: warm steps, then cold ones. Nothing for a peer that cannot train so: its words are printed."""
    try:
        return _steps(way, path, kind, asked)
    except SystemExit:
        if not way.startswith("accelerate"):
            raise
        print(f"{kind:<14} {way}: its backward pass fails")
        return {}


def _steps(way: str, path: Path, kind: str, asked: argparse.Namespace) -> dict[str, Any]:
    with tempfile.TemporaryDirectory(dir=path.parent) as scratch:
        peer = Peer([PYTHON, SCRIPT, way, path, asked.dtype, scratch, kind])
        command = {"batch": asked.batch, "tokens": asked.tokens}
        peer.ask(**command, steps=1, cold=False)
        found = {"warm": peer.ask(**command, steps=asked.steps, cold=False)}
        if way != "memory":
            found["cold"] = peer.ask(**command, steps=asked.steps, cold=True)
        peer.end()
        return found


def report(rounds: list[dict[str, Any]], ways: list[str], kinds: list[str], tokens: int) -> dict[str, Any]:
    """Print and return tokens per second, the share of memory's of the same round, and the most memory."""
    kept: dict[str, Any] = {}
    for kind in kinds:
        for warmth in ("warm", "cold"):
            for way in ways:
                taken = [(r, r[kind, way][warmth]) for r in rounds if warmth in r[kind, way]]
                if not taken:
                    continue
                rates = [tokens * len(t["steps_s"]) / sum(t["steps_s"]) for _, t in taken]
                entry: dict[str, Any] = {"tokens_per_s": median_spread(rates)}
                entry["peak_bytes"] = max(t["peak"] for _, t in taken)
                entry["anonymous_bytes"] = max(t["anonymous"] for _, t in taken)
                if "memory" in ways:
                    plain = [r[kind, "memory"]["warm"]["steps_s"] for r, _ in taken]
                    shares = [sum(p) / sum(t["steps_s"]) for p, (_, t) in zip(plain, taken, strict=True)]
                    entry["of_memory"] = median_spread(shares)
                print(f"{kind:<14} {warmth} {way:<16} {entry['tokens_per_s'].median:7.1f} tokens/s", end="  ")
                print(f"peak {entry['peak_bytes'] / 2**20:6.0f} MiB, own {entry['anonymous_bytes'] / 2**20:6.0f} MiB")
                kept.setdefault(f"{kind}, {warmth}", {})[way] = entry
    return kept


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--kinds", default=",".join(KINDS))
    parser.add_argument("--dtype", default=models.native_dtype())
    parser.add_argument("--ways", default=",".join(WAYS))
    parser.add_argument("--directory", type=Path, default=Path.home() / ".cache")
    parser.add_argument("--name", default="lora_training", help="of the result's file")
    asked = parser.parse_args()
    ways, kinds = asked.ways.split(","), asked.kinds.split(",")
    with tempfile.TemporaryDirectory(dir=asked.directory) as name:
        path = Path(name) / "model"
        sizes = checkpoint(path, asked.dtype, asked.layers)
        rounds: list[dict[str, Any]] = []
        for _ in range(asked.rounds):
            found = {(k, w): measure(w, path, k, asked) for k in kinds for w in ways}
            for kind in kinds:
                for warmth in ("warm", "cold"):
                    said = {str(found[kind, w][warmth]["losses"]) for w in ways if warmth in found[kind, w]}
                    assert len(said) <= 1, f"a loss changed: {said}"
            rounds.append(found)
    kept = report(rounds, ways, kinds, asked.batch * asked.tokens)
    settings = {
        "dtype": asked.dtype,
        "layers": asked.layers,
        "bytes": sizes,
        "batch": asked.batch,
        "tokens": asked.tokens,
    }
    write_result(asked.name, {**settings, "results": kept})


if __name__ == "__main__":
    main()
