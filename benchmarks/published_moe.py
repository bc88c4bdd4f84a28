"""Mixtures of experts as they are published, larger than the memory there is: tokens per second from a cold start,
beside llama.cpp and AirLLM.

    python -m benchmarks.published_moe [--families gpt_oss,deepseek_v3] [--rounds 3] [--memory-rounds 7]
        [--bound-mib 2048] [--process-mib 512] [--steps 200] [--small DIRECTORY] [--files DIRECTORY] [--new-tokens 64]

Needs the peers' environment (`make bench-env`) and a user who may drop the page cache and make a control group. The
models are those of `benchmarks.moe_files`: gpt-oss with its experts in MXFP4, 3.7 GB, and DeepSeek-V3 in FP8, 3.4 GB,
of 8 layers of 64 experts of which 4 are chosen, by routers that were trained for `--steps` steps. The kernel bounds
each process to `--bound-mib`, its page cache included. Ours is told to take what that leaves beside `--process-mib` for
Python and its libraries; llama.cpp maps its file. Each has its own process, and the page cache is empty when its prompt
comes: 128 tokens of held-out text. The engine draws an answer, which must be the one that it gives with all weights in
memory, to the bit; llama.cpp reads that answer token by token, so that the same experts are chosen. Before the rounds
both run unbounded, with the weights in memory and in turn, and so does the engine with activations in 8 bits, which
draws an answer of its own. AirLLM is asked once, in the same bound.

`--small` has trained models (`benchmarks.moe_model`) by family; `--files` keeps what is written, and `--rounds 0` only
writes it.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack, nullcontext
from pathlib import Path
from typing import Any

from benchmarks import limits, moe_files, moe_model, weights
from benchmarks._bounded import bounded
from benchmarks._report import median_spread, read_result, write_result

PROMPT_TOKENS = 128
FORMS = {"gpt_oss": "MXFP4", "deepseek_v3": "FP8"}
SIZES = {"gpt_oss": (16, 64), "deepseek_v3": (16, 32)}
"""How many times as wide as the small model hidden states and experts are."""
NARROW = (2, 4)
"""The same of a model that AirLLM is asked with first: whether it reads the form."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--families", default=",".join(FORMS))
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--memory-rounds", type=int, default=7)
    parser.add_argument("--bound-mib", type=int, default=2048)
    parser.add_argument("--process-mib", type=int, default=512)
    parser.add_argument("--steps", type=int, default=200, help="of training")
    parser.add_argument("--small", type=Path, default=None, help="models that were trained before")
    parser.add_argument("--files", type=Path, default=None)
    parser.add_argument("--new-tokens", type=int, default=64)
    parser.add_argument("--directory", type=Path, default=Path.home() / ".cache")
    asked = parser.parse_args()
    from stowage.demo import corpus

    text = moe_model.tokens_of(corpus.heldout_text())[:PROMPT_TOKENS].tolist()
    kept = read_result("published_moe").get("results", {})
    with nullcontext(asked.files) if asked.files else tempfile.TemporaryDirectory(dir=asked.directory) as name:
        for family in asked.families.split(","):
            path = Path(name) / family
            if not path.exists():
                small = _small(asked, family)
                moe_files.write(small, family, *SIZES[family], path)
                moe_files.write(small, family, *NARROW, _narrow(path))
            if asked.rounds:
                kept[family] = measure(family, path, text, asked)
                settings = {"layers": moe_model.LAYERS, "experts": moe_model.EXPERTS, "chosen": moe_model.CHOSEN}
                write_result("published_moe", {**settings, "results": kept})


def _small(asked: argparse.Namespace, family: str) -> Any:
    from transformers import AutoModelForCausalLM

    if asked.small is None:
        return moe_model.train(family, asked.steps)
    return AutoModelForCausalLM.from_pretrained(asked.small / family).eval()


def measure(family: str, path: Path, text: list[int], asked: argparse.Namespace) -> dict[str, Any]:
    """Every way of one family, and the numbers to keep."""
    bound_bytes = asked.bound_mib << 20
    own_bytes = bound_bytes - (asked.process_mib << 20)
    command = {"batch": 1, "prompt_tokens": PROMPT_TOKENS, "new_tokens": asked.new_tokens}
    found, answer = _in_memory(family, path, text, command, asked.memory_rounds)
    whole, alone = found["engine, in memory"][0], found["llamacpp, in memory"][0]
    rates = []
    for number in range(asked.rounds):
        rates.append(limits.direct_reread_bytes_per_s(max(path.glob("*.safetensors"), key=lambda f: f.stat().st_size)))
        print(f"{family}, round {number + 1} of {asked.rounds}: direct reads {rates[-1] / 1e9:.2f} GB/s", flush=True)
        with bounded(bound_bytes) as before:
            way = f"engine-within:{own_bytes}"
            with weights.running(way, path, "bfloat16", before) as peer:
                ours = peer.ask(**command, text=text, cold=True)
            print(f"  ours {1 / _step_s(ours):.2f} tokens/s", flush=True)
            assert (ours["tokens"], ours["logprobs"]) == (whole["tokens"], whole["logprobs"]), "an answer changed"
            found.setdefault("engine", []).append(ours)
            with weights.running(weights.LLAMACPP, path, "bfloat16", before) as peer:
                theirs = peer.ask(**command, text=answer, cold=True)
            found.setdefault("llamacpp", []).append(theirs)
            print(f"  llama.cpp {1 / _step_s(theirs):.2f} tokens/s", flush=True)
    with bounded(bound_bytes) as before:
        airllm = _airllm(path, text, before)
    kept: dict[str, Any] = {
        "form": FORMS[family],
        "llamacpp_form": moe_files.GGUF_TYPE[family],
        "bytes": sum(file.stat().st_size for file in path.glob("*.safetensors")),
        "llamacpp_bytes": path.with_suffix(".gguf").stat().st_size,
        "bound_bytes": bound_bytes,
        "device_memory_bytes": own_bytes,
        "disk_bytes_per_s": median_spread(rates),
        "airllm": airllm,
        "ways": {way: _summary(way, rounds) for way, rounds in found.items()},
    }
    kept["times_llamacpp"] = _times(found["engine"], found["llamacpp"])
    kept["times_llamacpp_in_memory"] = {
        way: _times(done, found["llamacpp, in memory"])
        for way, done in found.items()
        if way.startswith("engine, in memory")
    }
    apart = [abs(a - b) for a, b in zip(whole["logprobs"], alone["logprobs"], strict=True)]
    kept["logprobs_apart"] = sum(apart) / len(apart)
    print(f"{family}: {kept['times_llamacpp'].median:.2f} times llama.cpp, AirLLM {airllm}; log-probabilities of the")
    print(f"answer are {kept['logprobs_apart']:.3f} apart", flush=True)
    return kept


IN_MEMORY = {
    "engine, in memory": "engine-memory",
    "engine, in memory, activations in 8 bits": "engine-int8-memory",
    "llamacpp, in memory": f"{weights.LLAMACPP}-memory",
}


def _in_memory(
    family: str, path: Path, text: list[int], command: dict[str, Any], rounds: int
) -> tuple[dict[str, list[dict[str, Any]]], list[int]]:
    """Every way with all weights in memory, in turn, after one round that nobody counts; the text with the answer."""
    found: dict[str, list[dict[str, Any]]] = {way: [] for way in IN_MEMORY}
    with ExitStack() as peers:
        running = {way: peers.enter_context(weights.running(name, path, "bfloat16")) for way, name in IN_MEMORY.items()}
        drawn = running["engine, in memory"].ask(**command, text=text, cold=False)
        answer = [*text, *(step[0] for step in drawn["tokens"])]
        for number in range(1 + rounds):
            for way, peer in running.items():
                done = peer.ask(**command, text=answer if weights.LLAMACPP in IN_MEMORY[way] else text, cold=False)
                if number:
                    found[way].append(done)
    exact = {(str(one["tokens"]), str(one["logprobs"])) for one in found["engine, in memory"]}
    assert len(exact) == 1, "an answer changed"
    for way, done in found.items():
        print(f"{family}, {way}: {median_spread([1 / _step_s(one) for one in done]).median:.2f} tokens/s", flush=True)
    return found, answer


def _narrow(path: Path) -> Path:
    return path.with_name(f"{path.name}-narrow")


def _airllm(path: Path, text: list[int], before: Sequence[str]) -> str:
    """Its tokens per second, or that there are none: it writes its error above."""
    command = {"batch": 1, "prompt_tokens": PROMPT_TOKENS, "new_tokens": 2, "text": [*text, 5, 5], "cold": True}
    try:
        for one in (_narrow(path), path):
            with weights.running("airllm", one, "bfloat16", before) as peer:
                step_s = _step_s(peer.ask(**command))
    except SystemExit:
        return "ends with an error"
    return f"{1 / step_s:.2f} tokens/s"


def _times(ours: list[dict[str, Any]], theirs: list[dict[str, Any]]) -> Any:
    """How many times as many tokens per second, round by round."""
    return median_spread([_step_s(b) / _step_s(a) for a, b in zip(ours, theirs, strict=True)])


def _step_s(found: dict[str, Any]) -> float:
    return float(sum(found["steps_s"]) / len(found["steps_s"]))


def _summary(way: str, rounds: list[dict[str, Any]]) -> dict[str, Any]:
    entry: dict[str, Any] = {
        "tokens_per_s": median_spread([1 / _step_s(r) for r in rounds]),
        "prefill_s": median_spread([r["prefill_s"] for r in rounds]),
        "step_bytes": median_spread([r["decoded"].get("read_bytes", 0) / (len(r["tokens"]) - 1) for r in rounds]),
    }
    rate = entry["tokens_per_s"]
    line = f"{way:<20} {rate.median:7.2f} tokens/s ({rate.least:.2f} to {rate.largest:.2f}), prompt "
    line += f"{entry['prefill_s'].median:.2f} s, {entry['step_bytes'].median / 1e6:.0f} MB a step"
    if "expert_hits" in rounds[0]["decoded"]:
        done = [r["decoded"] for r in rounds]
        entry["hit_rate"] = median_spread([d["expert_hits"] / (d["expert_hits"] + d["expert_misses"]) for d in done])
        line += f", {entry['hit_rate'].median:.1%} of chosen experts were there"
    print(line, flush=True)
    return entry


if __name__ == "__main__":
    main()
