"""The engine and llama.cpp with the same GGUF files, by format: decoding alone and eight, and a prompt of 512.

    python -m benchmarks.gguf_formats [--formats bf16,q8_0,q4_0,q4_k] [--rounds 3] [--new-tokens 32] [--json]

Needs the peers' environment (`make bench-env`). A Llama-like model of 0.48 B random parameters in bfloat16, which
llama.cpp quantises, every matrix to the one type. Both have the file in memory and as many threads as there are
processors; each round asks one and then the other. Tokens per second, and ours over theirs.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

from benchmarks import gguf_llama, models
from benchmarks._peer import PYTHON, Peer
from benchmarks._report import describe_machine, median_spread, write_result

PEERS: Final = Path("benchmarks/peers")
TYPES: Final = {"q8_0": 7, "q4_0": 2, "q4_1": 3, "q5_0": 8, "q5_1": 9, "q4_k": 14, "q5_k": 16, "q6_k": 18}
"""Of llama.cpp's `llama_ftype`."""
PROMPT_TOKENS: Final = 512
BATCHES: Final = (1, 8)


def write_files(directory: Path, formats: Sequence[str]) -> dict[str, Path]:
    """The model in each format."""
    plain = directory / "bf16.gguf"
    gguf_llama.write(models.half_billion("bfloat16"), plain)
    found = {"bf16": plain}
    for name in formats:
        if name != "bf16":
            found[name] = directory / f"{name}.gguf"
            script = PEERS / "llamacpp_quantize.py"
            subprocess.run([PYTHON, script, plain, found[name], str(TYPES[name])], check=True, capture_output=True)
    return found


def speeds(peer: Peer, new_tokens: int) -> dict[str, float]:
    """Tokens per second of a prompt alone, and of decoding by batch."""
    found = {}
    for batch in BATCHES:
        tokens = PROMPT_TOKENS if batch == 1 else 16
        answer = peer.ask(batch=batch, prompt_tokens=tokens, new_tokens=new_tokens, cold=False)
        if batch == 1:
            found["prompt"] = tokens / answer["prefill_s"]
        found[f"decode, {batch}"] = batch * len(answer["steps_s"]) / sum(answer["steps_s"])
    return found


def measure(path: Path, rounds: int, new_tokens: int) -> dict[str, dict[str, Any]]:
    """Of one file, by who computed."""
    both = {
        "stowage": Peer([sys.executable, PEERS / "engine_weights.py", "engine-memory", path, "bfloat16", path.parent]),
        "llama.cpp": Peer([PYTHON, PEERS / "llamacpp_engine.py", "llamacpp", path, "bfloat16", path.parent]),
    }
    told: dict[str, list[dict[str, float]]] = {name: [] for name in both}
    for turn in range(rounds + 1):
        for name, peer in both.items():
            found = speeds(peer, new_tokens if turn else 2)
            if turn:  # what is done once is over
                told[name].append(found)
    for peer in both.values():
        peer.end()
    return {name: {key: median_spread([one[key] for one in each]) for key in each[0]} for name, each in told.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--formats", default="bf16,q8_0,q4_0,q4_k,q6_k")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--new-tokens", type=int, default=32)
    parser.add_argument("--json", action="store_true")
    asked = parser.parse_args()
    formats = asked.formats.split(",")
    if unknown := set(formats) - TYPES.keys() - {"bf16"}:
        parser.error(f"unknown formats {sorted(unknown)}; there are bf16, {', '.join(TYPES)}")
    with tempfile.TemporaryDirectory(dir="/var/tmp") as scratch:
        files = write_files(Path(scratch), formats)
        table = {name: measure(files[name], asked.rounds, asked.new_tokens) for name in formats}
        sizes = {name: files[name].stat().st_size for name in formats}
    written = json.loads(write_result("gguf_formats", {"bytes": sizes, "formats": table}).read_text(encoding="utf-8"))
    if asked.json:
        print(json.dumps(written, indent=2))
        return
    print(f"{describe_machine()['cpu']}; tokens per second, Stowage / llama.cpp\n")
    print("| | MB | decode alone | eight | prompt of 512 |\n|---|---|---|---|---|")
    for name, both in written["formats"].items():
        cells = []
        for key in ("decode, 1", "decode, 8", "prompt"):
            ours, theirs = (both[who][key]["median"] for who in ("stowage", "llama.cpp"))
            cells.append(f"{ours:.1f} / {theirs:.1f} ({ours / theirs:.2f})")
        print(f"| {name} | {sizes[name] / 1e6:.0f} | {' | '.join(cells)} |")


if __name__ == "__main__":
    main()
