"""The engine beside llama.cpp and OpenVINO GenAI with the same GGUF files, by format: prefill, and decoding.

    python -m benchmarks.gguf_formats [--formats bf16,q8_0,q4_0,q4_k] [--rounds 3] [--prompts 512,2048]
        [--ways stowage,int8-activations,llamacpp,openvino] [--checkpoint DIRECTORY] [--files DIRECTORY] [--name NAME]
        [--json]

Needs the peers' environment (`make bench-env`). A Llama-like model of 0.48 B random parameters, or a Llama of
`--checkpoint`, in bfloat16, which llama.cpp quantises, every matrix to the one type. All have the file in memory and as
many threads as there are processors; a round asks one after the other what `benchmarks.engine` asks. Tokens per second,
and ours over theirs. Formats of the result's file that this run does not measure stay in it, so that they can be
measured one by one; `--files` keeps the GGUF files for that.

Ours also with activations in 8 bits, as the others always have them.

A peer that does not read a file is left out of its row: OpenVINO GenAI has no Q5_0, which llama.cpp writes for Q4_K
where rows are no multiple of 256.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any, Final

from benchmarks import engine, gguf_llama, models
from benchmarks._peer import PYTHON, Peer
from benchmarks._report import RESULTS, describe_machine, median_spread, read_result, write_result
from stowage.demo import corpus

OURS: Final = ("stowage", "int8-activations")
QUANTIZE: Final = Path("benchmarks/peers/llamacpp_quantize.py")
TYPES: Final = {"q8_0": 7, "q4_0": 2, "q4_1": 3, "q5_0": 8, "q5_1": 9, "q4_k": 14, "q5_k": 16, "q6_k": 18}
"""Of llama.cpp's `llama_ftype`."""
WAYS: Final = {
    "stowage": "Stowage",
    "int8-activations": "Stowage with --int8-activations",
    "llamacpp": "llama.cpp",
    "openvino": "OpenVINO",
}


def write_file(path: Path, name: str, checkpoint: Path | None) -> Path:
    """The model in the format ``name``, in the directory ``path``, unless it is there."""
    plain, found = path / "bf16.gguf", path / f"{name}.gguf"
    if not plain.exists():
        built = models.from_checkpoint(checkpoint, "bfloat16") if checkpoint else models.half_billion("bfloat16")
        gguf_llama.write(built, plain, (checkpoint or Path(corpus.model_path())) / "tokenizer.json")
    if not found.exists():
        subprocess.run([PYTHON, QUANTIZE, plain, found, str(TYPES[name])], check=True, capture_output=True)
    return found


def measure(path: Path, ways: Sequence[str], rounds: int, lengths: Sequence[int]) -> dict[str, dict[str, Any]]:
    """Of one file, by who computed."""
    peers: dict[str, Peer] = {}
    for way in ways:
        try:
            peers[way] = engine.start(way, path, "bfloat16")
        except SystemExit:
            if way in OURS:
                raise
            print(f"{WAYS[way]} does not read {path}, by its words above, and is left out.", file=sys.stderr)
    told: dict[str, list[dict[str, float]]] = {way: [] for way in peers}
    for turn in range(rounds + 1):
        for way, peer in peers.items():
            found = engine.speeds(peer, turn, lengths if turn else ())
            if turn:  # what is done once is over
                told[way].append(found)
    for peer in peers.values():
        peer.end()
    return {way: {key: median_spread([one[key] for one in each]) for key in each[0]} for way, each in told.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--formats", default="bf16,q8_0,q4_0,q4_k,q6_k")
    parser.add_argument("--rounds", type=int, default=3, help="0: the files are made, and nothing is measured")
    parser.add_argument("--prompts", default="512,2048", help="tokens of the prompts whose prefill is measured")
    parser.add_argument("--ways", default=",".join(WAYS))
    parser.add_argument("--checkpoint", type=Path, help="the directory of a Llama, instead of random parameters")
    parser.add_argument("--files", type=Path, help="the directory that GGUF files are kept in")
    parser.add_argument("--name", default="gguf_formats", help="of the result's file")
    parser.add_argument("--json", action="store_true")
    asked = parser.parse_args()
    formats = asked.formats.split(",")
    if unknown := set(formats) - TYPES.keys() - {"bf16"}:
        parser.error(f"unknown formats {sorted(unknown)}; there are bf16, {', '.join(TYPES)}")
    lengths = [int(length) for length in asked.prompts.split(",")]
    table: dict[str, Any] = read_result(asked.name).get("formats", {})
    scratch = nullcontext(asked.files) if asked.files else tempfile.TemporaryDirectory(dir="/var/tmp")
    with scratch as directory:
        Path(directory).mkdir(exist_ok=True)
        for name in formats:
            path = write_file(Path(directory), name, asked.checkpoint)
            if asked.rounds:
                ways = [way for way in asked.ways.split(",") if name != "bf16" or way != "int8-activations"]
                table[name] = {"bytes": path.stat().st_size, **measure(path, ways, asked.rounds, lengths)}
                write_result(asked.name, {"formats": table})
    if not asked.rounds:
        return
    written = json.loads((RESULTS / f"{asked.name}.json").read_text(encoding="utf-8"))
    if asked.json:
        print(json.dumps(written, indent=2))
        return
    print(f"{describe_machine()['cpu']}; tokens per second: {', '.join(WAYS.values())}\n")
    keys = [f"prefill {length}" for length in lengths] + ["decode 1", "decode 8"]
    print(f"| | MB | {' | '.join(keys)} |\n|---|---|{'---|' * len(keys)}")
    for name, each in written["formats"].items():
        cells = [", ".join(f"{each[way][key]['median']:.1f}" for way in WAYS if way in each) for key in keys]
        print(f"| {name} | {each['bytes'] / 1e6:.0f} | {' | '.join(cells)} |")


if __name__ == "__main__":
    main()
