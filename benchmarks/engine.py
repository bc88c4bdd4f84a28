"""How fast the embedded engine computes: prefill, and decoding alone and eight at a time.

    python -m benchmarks.engine [--models llama,windowed,recurrent,space] [--ways stowage,...] [--rounds 3]
        [--dtype float32] [--prompts 512,2048,4096] [--checkpoint DIRECTORY]
    python -m benchmarks.engine --device cuda

Ours, exact and batch-dependent, and without its kernels; plain Transformers (`generate()`, eight prompts as one
batch), its continuous batching, vLLM's CPU build, llama.cpp with the same weights in a GGUF file that it does not map,
and, of a `--checkpoint` with a tokenizer, OpenVINO GenAI with them in float16, which it computes in bfloat16 (these
three need `make bench-env`). 0.5 B random parameters, or a Llama of `--checkpoint`; greedy.
Prefill: 1,024 tokens, or those of `--prompts` (vLLM takes 1,536 at most), to the first one drawn. Decoding: 128 tokens
in, 64 out, without the first one. Nothing is ever asked twice, so nothing is reused. Each way runs in a process of its
own, one at a time, in turn over the rounds.

The limit of decoding is printed with it: all weights are read once for each step, at the speed of a sum over them.

On a CUDA device: ours, also batch-dependent and with torch's attention, and Transformers; not vLLM's CPU build.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks import gguf_llama, models
from benchmarks._peer import PYTHON, Peer
from benchmarks._report import median_spread, write_result
from stowage.errors import ConfigError
from stowage.executor.device import resolve

SCRIPT = Path(__file__).parent / "peers" / "turns.py"
WAYS = ("stowage", "batch-dependent", "torch", "generate", "continuous", "vllm", "llamacpp", "openvino")
BUILD = {
    "llama": models.half_billion,
    "windowed": models.half_billion_windowed,
    "recurrent": models.half_billion_recurrent,
    "space": models.half_billion_state_space,
}
PEERS_OWN = ("vllm", "llamacpp", "openvino")
"""Of the ways, those of the peers' environment, on a CPU."""
CANNOT = {(model, way) for model in ("recurrent", "space") for way in ("continuous", *PEERS_OWN)}
CANNOT |= {("windowed", "llamacpp"), *((model, "openvino") for model in BUILD)}
"""Transformers' continuous batching has attention only; vLLM's CPU build takes neither; `gguf_llama` writes Llamas, and
those made here have no tokenizer."""
PROMPT_TOKENS, NEW_TOKENS = 128, 64
WARM_PROMPTS = 8
"""Before anything is measured: ours are recorded at the seventh."""
DEVICE_BYTES = 1 << 30
GGUF = {"llamacpp": "model.gguf", "openvino": "float16.gguf"}


def measure(way: str, model: Path, dtype: str, seed: int, device: str, lengths: Sequence[int]) -> dict[str, float]:
    """Tokens per second; ``lengths`` of the prompts whose prefill is measured."""
    peer = start(way, model / GGUF[way] if way in GGUF else model, dtype, device)
    found = speeds(peer, seed, lengths)
    peer.end()
    return found


def start(way: str, model: Path, dtype: str, device: str = "cpu") -> Peer:
    """One of ``WAYS`` with ``model``, ready to answer."""
    python = PYTHON if way in PEERS_OWN else sys.executable
    way_there = "vllm-no-reuse" if way == "vllm" else way
    return Peer([python, SCRIPT, way_there, model, dtype, str(DEVICE_BYTES), "0", device])


def speeds(peer: Peer, seed: int, lengths: Sequence[int], batches: Sequence[int] = (1, 8)) -> dict[str, float]:
    """Tokens per second of prompts of ``lengths``, and of decoding alone and eight at a time, or in other ``batches``.
    No prompt is that of another ``seed``.
    """
    asked = seed * 1000

    def seconds(count: int, length: int, tokens: int) -> float:
        nonlocal asked
        prompts = [models.random_tokens(length, asked + at) for at in range(count)]
        asked += count
        began_s = time.perf_counter()
        answer = peer.ask(prompts=prompts, tokens=tokens)
        elapsed_s = time.perf_counter() - began_s
        if [len(drawn) for drawn in answer["tokens"]] != [tokens] * count:
            raise SystemExit(f"A peer did not give {count} answers of {tokens} tokens; its words are above.")
        return elapsed_s

    for _ in range(WARM_PROMPTS):
        seconds(1, 64, 4)
    found = {f"prefill {length}": length / seconds(1, length, 1) for length in lengths}
    for batch in batches:
        first_s = seconds(batch, PROMPT_TOKENS, 1)
        found[f"decode {batch}"] = batch * (NEW_TOKENS - 1) / (seconds(batch, PROMPT_TOKENS, NEW_TOKENS) - first_s)
    return found


def read_bytes_per_s(device: str) -> float:
    """How fast ``device`` (of a CPU all cores) reads memory: the best of some sums over a quarter of a GiB."""
    import torch

    numbers = torch.ones(1 << 26, device=device)
    best_s = float("inf")
    for _ in range(10):
        began_s = time.perf_counter()
        numbers.sum().item()
        best_s = min(best_s, time.perf_counter() - began_s)
    return numbers.nbytes / best_s


def device_name(device: str) -> str:
    """Of a CUDA device, as its driver calls it."""
    import torch

    return str(torch.cuda.get_device_name(device))


def report(runs: dict[str, list[dict[str, float]]], limit: float) -> dict[str, Any]:
    """Tokens per second of each way; ``limit``: steps per second."""
    result: dict[str, Any] = {
        way: {name: median_spread([run[name] for run in found]) for name in found[0]} for way, found in runs.items()
    }
    print(f"  tokens/s; reading the weights allows {limit:.1f} steps/s")
    for way, found in result.items():
        shown = "   ".join(f"{name} {spread}" for name, spread in found.items())
        print(f"  {way:<14} {shown}", flush=True)
    return result | {"weights_allow_steps_per_s": limit}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", default=",".join(BUILD))
    parser.add_argument("--ways", default="", help=f"of {','.join(WAYS)} (all that the device can run)")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--checkpoint", type=Path, help="the directory of a Llama, instead of --models")
    parser.add_argument("--prompts", default="1024", help="tokens of the prompts whose prefill is measured")
    parser.add_argument("--device", default="cpu", help="cpu, cuda, cuda:1")
    parser.add_argument("--dtype", default="", choices=["", "bfloat16", "float32"])
    parser.add_argument(
        "--name",
        default="",
        help="of the result's file (engine, engine_cuda and the like; none if not all is measured)",
    )
    options = parser.parse_args()
    build = dict(BUILD)
    if options.checkpoint:
        options.models = options.checkpoint.name
        build = {options.models: lambda dtype: models.from_checkpoint(options.checkpoint, dtype)}
    on_cpu = options.device == "cpu"
    on_device = "engine" if on_cpu else f"engine_{options.device.partition(':')[0]}"
    dtype = options.dtype or (models.native_dtype() if on_cpu else "bfloat16")
    ways = options.ways.split(",") if options.ways else [way for way in WAYS if on_cpu or way not in PEERS_OWN]
    for asked, known in ((ways, WAYS), (options.models.split(","), tuple(build))):
        if unknown := set(asked) - set(known):
            parser.error(f"{', '.join(sorted(unknown))}: unknown; choose from {', '.join(known)}")
    if not on_cpu and (there := set(ways) & set(PEERS_OWN)):
        parser.error(f"{', '.join(sorted(there))}: on a CPU only")
    try:
        resolve(options.device)
    except ConfigError as error:
        raise SystemExit(str(error)) from error
    if set(ways) & set(PEERS_OWN) and not PYTHON.exists():
        raise SystemExit("The peers are not here. Make the peers' environment first: make bench-env")
    if options.checkpoint and "openvino" in ways and not (options.checkpoint / "tokenizer.json").is_file():
        ways.remove("openvino")
    lengths = [int(length) for length in options.prompts.split(",")]
    part = bool(options.ways) or options.models != parser.get_default("models")
    file = options.name or ("" if part else on_device)  # a part does not replace the whole
    on = options.device if on_cpu else device_name(options.device)
    results: dict[str, Any] = {"device": on, "dtype": dtype, "rounds": options.rounds}
    for name in options.models.split(","):
        can = [way for way in ways if (name, way) not in CANNOT]
        with tempfile.TemporaryDirectory(prefix="stowage-bench-") as directory:
            built = build[name](dtype)
            read = sum(p.nbytes for p in built.parameters())
            if not built.config.tie_word_embeddings:
                read -= built.get_input_embeddings().weight.nbytes
            built.save_pretrained(directory)
            if "llamacpp" in can:
                gguf_llama.write(built, Path(directory) / GGUF["llamacpp"])
            if "openvino" in can:
                tokenizer = options.checkpoint / "tokenizer.json"
                gguf_llama.write(built.half(), Path(directory) / GGUF["openvino"], tokenizer)
            del built
            runs: dict[str, list[dict[str, float]]] = {way: [] for way in can}
            for number in range(options.rounds):
                for way in can[:: 1 if number % 2 == 0 else -1]:
                    runs[way].append(measure(way, Path(directory), dtype, number + 1, options.device, lengths))
            print(f"{name}, {dtype}", flush=True)
            results[name] = report(runs, read_bytes_per_s(options.device) / read)
        if file:
            write_result(file, results)  # after each model: what follows may fail


if __name__ == "__main__":
    main()
