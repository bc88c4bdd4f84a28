"""Decoding with experts on disk: tokens per second from a cold start, against whole layers, Accelerate and limits.

    python -m benchmarks.weights_moe [--rounds 3] [--share 0.4] [--steps 400] [--new-tokens 24]

Needs the peers' environment (`make bench-env`) and a user who may drop the page cache. The model is that of
`benchmarks.moe_model`: 1.7 GB in float32, 8 layers of 64 experts of which 4 are chosen, by a router that was trained on
the demo's corpus for `--steps` steps. It reads held-out text, 128 tokens as a prompt and the next ones one by one, so
that routing is that of text and not of an answer that repeats itself. Each round runs every way in a process of its
own: `experts` (ours, the cache in `--share` of the weights' bytes), `stream` (ours, whole layers), `accelerate`
(`disk_offload`). The greedy answers of all must be the same.

The limit of a step is what it reads over the rate of direct reads of the checkpoint, measured in the same round.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path
from typing import Any

from benchmarks import limits, weights
from benchmarks._report import median_spread, write_result

WAYS = ("experts", "stream", "accelerate")
PROMPT_TOKENS = 128


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--share", type=float, default=0.4)
    parser.add_argument("--steps", type=int, default=400, help="of training")
    parser.add_argument(
        "--small", type=Path, default=None, help="a model that was trained before (benchmarks.moe_model)"
    )
    parser.add_argument("--new-tokens", type=int, default=24)
    parser.add_argument("--directory", type=Path, default=Path.home() / ".cache")
    asked = parser.parse_args()
    from transformers import AutoModelForCausalLM

    from benchmarks import moe_model
    from stowage.demo import corpus

    with tempfile.TemporaryDirectory(dir=asked.directory) as name:
        path = Path(name) / "model"
        small = AutoModelForCausalLM.from_pretrained(asked.small).eval() if asked.small else None
        moe_model.widen(small or moe_model.train("qwen3_moe", asked.steps)).save_pretrained(path, max_shard_size="1GB")
        text = moe_model.tokens_of(corpus.heldout_text())[: PROMPT_TOKENS + asked.new_tokens].tolist()
        whole_bytes = sum(file.stat().st_size for file in path.glob("*.safetensors"))
        command = {
            "batch": 1,
            "prompt_tokens": PROMPT_TOKENS,
            "new_tokens": asked.new_tokens,
            "text": text,
            "cold": True,
        }
        rounds: list[dict[str, Any]] = []
        for number in range(asked.rounds):
            shard = max(path.glob("*.safetensors"), key=lambda file: file.stat().st_size)
            found: dict[str, Any] = {"disk": limits.direct_reread_bytes_per_s(shard)}
            print(f"round {number + 1} of {asked.rounds}: direct reads {found['disk'] / 1e9:.2f} GB/s")
            for way in WAYS:
                option = f"{way}:{int(asked.share * whole_bytes)}" if way == "experts" else way
                with weights.running(option, path, "float32") as peer:
                    found[way] = peer.ask(**command)
                print(f"  {way:<12}", *(f"{s:.2f}" for s in found[way]["steps_s"]))
            assert len({str(found[way]["tokens"]) for way in WAYS}) == 1, "an answer changed"
            rounds.append(found)
    kept = {way: _summary(way, rounds) for way in WAYS}
    for way in WAYS[1:]:
        ratios = [_step_s(r[way]) / _step_s(r["experts"]) for r in rounds]
        kept["experts"][f"times_{way}"] = median_spread(ratios)
        print(f"experts: {kept['experts'][f'times_{way}'].median:.1f} times as fast as {way}")
    settings = {
        "bytes": whole_bytes,
        "share": asked.share,
        "training_steps": asked.steps,
        "layers": moe_model.LAYERS,
        "experts": moe_model.EXPERTS,
    }
    write_result("weights_moe", {**settings, "chosen": moe_model.CHOSEN, "results": kept})


def _step_s(found: dict[str, Any]) -> float:
    return sum(found["steps_s"]) / len(found["steps_s"])


def _summary(way: str, rounds: list[dict[str, Any]]) -> dict[str, Any]:
    entry: dict[str, Any] = {
        "tokens_per_s": median_spread([1 / _step_s(r[way]) for r in rounds]),
        "prefill_s": median_spread([r[way]["prefill_s"] for r in rounds]),
    }
    text = f"{way:<12} {entry['tokens_per_s'].median:7.2f} tokens/s"
    steps = len(rounds[0][way]["steps_s"])
    if way != "accelerate":
        read = [r[way]["decoded"]["read_bytes"] / steps for r in rounds]
        entry["step_bytes"] = median_spread(read)
        entry["of_limit"] = median_spread([b / r["disk"] / _step_s(r[way]) for b, r in zip(read, rounds, strict=True)])
        text += f", {entry['step_bytes'].median / 1e6:.0f} MB a step, {entry['of_limit'].median:.0%} of the limit"
    if way == "experts":
        done = [r[way]["decoded"] for r in rounds]
        entry["hit_rate"] = median_spread([d["expert_hits"] / (d["expert_hits"] + d["expert_misses"]) for d in done])
        text += f", {entry['hit_rate'].median:.1%} of chosen experts were there"
    print(text)
    return entry


if __name__ == "__main__":
    main()
