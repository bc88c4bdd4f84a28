"""Weights in host memory, computed on a GPU: tokens per second, and the share of the link that copies reach meanwhile.

    python -m benchmarks.cuda_weights [--rounds 3] [--layers 12] [--moe-layers 6] [--new-tokens 16] [--ways ...]

Needs a CUDA device with a memory of its own, and no network. Two checkpoints with random weights in bfloat16: a
Llama-like one (hidden 2048, vocabulary 32,000, about 1.7 GB) and a mixture (hidden 2048, 64 experts of which 4 are
chosen, about 0.6 GB a layer; its router has no favourites, so no expert is likelier than others). Each round runs every
way in a process of its own, in turn, and measures the link before: plain copies of 256 MiB from pinned memory. Ways:
`resident` (plain Transformers, all on the device: what nothing that crosses can pass), `prefetch`, `mapped`, `experts`
(ours; `experts` under a budget of 40 % of the mixture's bytes, the others with layers and output layer in host memory),
`accelerate` (`cpu_offload`, where it can be imported: the peers' environment, `make bench-env`). Greedy tokens of all
must be the same.

The share of the link is the bytes that crossed over for a step, over its time, over the rate of the plain copies of the
same round. `prefetch` is to reach 90 % with steps that are shorter than their copies.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from benchmarks import models, weights
from benchmarks._peer import PYTHON, Peer
from benchmarks._report import median_spread, write_result

SCRIPT = Path(__file__).parent / "peers" / "cuda_weights_engine.py"
WAYS = ("resident", "prefetch", "mapped", "experts", "accelerate")
BATCHES = (1, 8)
PROMPT_TOKENS = 128
GOAL = 0.9
CACHE_SHARE = 0.4
"""Of the mixture's bytes that the device may take for the way `experts`."""
DTYPE = "bfloat16"
EXPERTS, CHOSEN, MOE_INNER = 64, 4, 768


def mixture(directory: Path, layers: int) -> int:
    """Write a mixture of experts; bytes of its weights."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.for_model(
        "qwen3_moe",
        hidden_size=weights.HIDDEN,
        moe_intermediate_size=MOE_INNER,
        intermediate_size=MOE_INNER,
        num_hidden_layers=layers,
        num_attention_heads=weights.HEADS,
        num_key_value_heads=weights.KV_HEADS,
        head_dim=weights.HIDDEN // weights.HEADS,
        num_experts=EXPERTS,
        num_experts_per_tok=CHOSEN,
        norm_topk_prob=True,
        vocab_size=models.VOCAB,
        tie_word_embeddings=False,
    )
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, dtype=getattr(torch, DTYPE))
    model.save_pretrained(directory, max_shard_size="1GB")
    return sum(p.numel() * p.element_size() for p in model.parameters())


def has_device(python: Path) -> bool:
    """Whether that Python's torch finds a GPU."""
    asked = [str(python), "-c", "import torch; raise SystemExit(not torch.cuda.is_available())"]
    return subprocess.run(asked, check=False, stderr=subprocess.DEVNULL).returncode == 0


def has_accelerate(python: Path) -> bool:
    """Whether that Python can import Accelerate."""
    asked = [str(python), "-c", "import accelerate"]
    return subprocess.run(asked, check=False, stderr=subprocess.DEVNULL).returncode == 0


def measure(python: Path, way: str, path: Path, device_bytes: int, new_tokens: int) -> dict[str, Any]:
    """One process: each batch once to warm up, and once for the numbers."""
    peer = Peer([python, SCRIPT, way, path, DTYPE, str(device_bytes)])
    try:
        found: dict[str, Any] = {"loaded_s": peer.ready["loaded_s"]}
        for batch in BATCHES:
            command = {"batch": batch, "prompt_tokens": PROMPT_TOKENS, "new_tokens": new_tokens}
            peer.ask(**command | {"new_tokens": 2})
            found[f"batch {batch}"] = peer.ask(**command)
    finally:
        peer.end()
    return found


def link_bytes_per_s(python: Path) -> float:
    """The rate of plain copies from pinned memory."""
    peer = Peer([python, SCRIPT, "link", "-", DTYPE, "0"])
    try:
        found = peer.ask()
    finally:
        peer.end()
    if not found["pinned"]:
        raise SystemExit("Host memory could not be pinned here, so there is no link to measure: see docs/internals.md.")
    return float(found["bytes_per_s"])


def report(rounds: list[dict[str, Any]], model: str) -> dict[str, Any]:
    """Print tokens per second and shares of the link; the numbers to keep."""
    kept: dict[str, Any] = {}
    for case in [f"batch {batch}" for batch in BATCHES]:
        print(f"{model}, {case}")
        for way in WAYS:
            taken = [r for r in rounds if (model, way) in r]
            if not taken:
                continue
            batch = int(case.rpartition(" ")[2])
            steps = [(r[model, way][case], r) for r in taken]
            step_s = [sum(s["steps_s"]) / len(s["steps_s"]) for s, _ in steps]
            rate = median_spread([batch / s for s in step_s])
            entry: dict[str, Any] = {"tokens_per_s": rate}
            entry["prefill_s"] = median_spread([s["prefill_s"] for s, _ in steps])
            entry["peak_bytes"] = max(s["peak_bytes"] for s, _ in steps)
            text = f"  {way:<12} {rate.median:8.2f} tokens/s ({rate.least:.2f} to {rate.largest:.2f})"
            if any(s["step_bytes"] for s, _ in steps):
                shares = [s["step_bytes"] / t / r["link"] for (s, r), t in zip(steps, step_s, strict=True)]
                entry["of_link"] = median_spread(shares)
                text += f"  {entry['of_link'].median:6.1%} of the link"
                if way == "prefetch":
                    text += " (goal reached)" if entry["of_link"].median >= GOAL else f" (goal {GOAL:.0%})"
            beside = [
                (t, r[model, "accelerate"][case])
                for t, r in zip(step_s, taken, strict=True)
                if (model, "accelerate") in r
            ]
            if beside and way != "accelerate":
                ratios = [sum(a["steps_s"]) / len(a["steps_s"]) / t for t, a in beside]
                entry["of_accelerate"] = median_spread(ratios)
                text += f"  {entry['of_accelerate'].median:.2f} x Accelerate"
            print(text)
            kept.setdefault(case, {})[way] = entry
    return kept


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--moe-layers", type=int, default=6)
    parser.add_argument("--new-tokens", type=int, default=16)
    parser.add_argument("--ways", default=",".join(WAYS))
    parser.add_argument("--directory", type=Path, default=Path(tempfile.gettempdir()))
    asked = parser.parse_args()
    python = PYTHON if PYTHON.exists() else Path(sys.executable)
    if not has_device(python):
        raise SystemExit("This benchmark needs a CUDA device, and torch finds none here (see nvidia-smi).")
    ways = [way for way in asked.ways.split(",") if way != "accelerate" or has_accelerate(python)]
    if "accelerate" in asked.ways.split(",") and "accelerate" not in ways:
        print("Accelerate cannot be imported, and is left out: see make bench-env.")
    with tempfile.TemporaryDirectory(dir=asked.directory) as name:
        dense, moe = Path(name) / "dense", Path(name) / "moe"
        sizes = weights.checkpoint(dense, DTYPE, asked.layers)
        moe_bytes = mixture(moe, asked.moe_layers)
        rounds: list[dict[str, Any]] = []
        for number in range(asked.rounds):
            found: dict[Any, Any] = {"link": link_bytes_per_s(python)}
            print(f"round {number + 1} of {asked.rounds}: the link copies {found['link'] / 1e9:.1f} GB/s")
            for model, path in (("dense", dense), ("mixture", moe)):
                for way in ways:
                    if way == "experts" and model == "dense":
                        continue
                    limit = int(moe_bytes * CACHE_SHARE)
                    found[model, way] = measure(python, way, path, limit, asked.new_tokens)
                    said = [sum(v["steps_s"]) / len(v["steps_s"]) for k, v in found[model, way].items() if "batch" in k]
                    print(f"  {model:<8} {way:<12} steps of", *(f"{s * 1e3:.1f} ms" for s in said))
                for batch in BATCHES:
                    answers = {str(found[model, w][f"batch {batch}"]["tokens"]) for w in ways if (model, w) in found}
                    assert len(answers) <= 1, "an answer changed"
            rounds.append(found)
    kept = {model: report(rounds, model) for model in ("dense", "mixture")}
    link = median_spread([r["link"] for r in rounds])
    size = {"dense": sizes["all"], "mixture": moe_bytes}
    write_result("cuda_weights", {"dtype": DTYPE, "bytes": size, "link_bytes_per_s": link, "results": kept})


if __name__ == "__main__":
    main()
