"""Contexts longer than the device: a prompt of 2,048 tokens on a device that holds all, a half, a quarter and a tenth
of what it and its answer need.

    python -m benchmarks.long_context [--rounds N] [--prompt-tokens N] [--ways kernels,torch] [--dtype D]

A Llama-like model of 0.04 B parameters, so that attention over the context is a good part of the work, and host memory
with room for all of it. Time to first token, cold and with the prompt in host memory already (the device's cache
dropped), and tokens per second of decoding 48 tokens, alone. ``torch``: without the engine's kernels, where offloaded
keys are copied in pieces. Sizes rotate over the rounds. All answers of a round must agree in their first token's
log-probability.
"""

from __future__ import annotations

import argparse
import os
from typing import Any

from benchmarks import models
from benchmarks._report import median_spread, write_result
from stowage.config.memory import Memory
from stowage.engine.engine import Engine
from stowage.engine.request import Completion
from stowage.engine.sampling_params import SamplingParams
from stowage.executor.block_pool import bytes_needed

PERCENTS = (100, 50, 25, 10)
NEW_TOKENS = 48
STEP_TOKENS = 512
LOGPROB_BOUND = 2e-2
"""Of the first token: sums in another order, of weights in bfloat16 at worst."""


def ask(engine: Engine, prompt: list[int]) -> Completion:
    (completion,) = engine.generate([prompt], SamplingParams(max_new_tokens=NEW_TOKENS, ignore_eos=True, logprobs=1))
    return completion


def measure(model: Any, way: str, device_bytes: int, host_bytes: int, prompt: list[int]) -> dict[str, float]:
    """Seconds and tokens per second; the first token's log-probability."""
    os.environ["STOWAGE_PURE_PYTHON"] = "1" if way == "torch" else ""
    memory = Memory(kv_cache_memory=device_bytes, host_memory=host_bytes, max_num_batched_tokens=STEP_TOKENS)
    with Engine(model, memory) as engine:
        engine.generate([prompt[:64][::-1]], SamplingParams(max_new_tokens=2, ignore_eos=True))  # warm
        cold = ask(engine, prompt)
        engine.drop_device_cache()
        engine.forget_costs()
        warm = ask(engine, prompt)
        if not warm.reused_tokens["host"] or not cold.logprobs:
            raise SystemExit("the prompt did not come from host memory")
        moved = engine.stats()["engine"]["blocks_moved_out"]
    return {
        "ttft_s": cold.ttft_s,
        "ttft_again_s": warm.ttft_s,
        "decode_tokens_per_s": cold.decode_tokens_per_s,
        "blocks_moved_out": moved,
        "logprob": cold.logprobs[0].logprob,
    }


def report(runs: dict[int, list[dict[str, float]]]) -> dict[str, Any]:
    result: dict[str, Any] = {}
    for percent, found in runs.items():
        spreads = {name: median_spread([run[name] for run in found]) for name in found[0] if name != "logprob"}
        result[f"{percent} %"] = spreads
        ttft, again, decode, moved = spreads.values()
        print(
            f"  {percent:>3} %   ttft {ttft.median:6.2f} s ({ttft.least:.2f} to {ttft.largest:.2f})   from host "
            f"{again.median:5.2f} s   decoding {decode} tokens/s   {moved.median:.0f} blocks moved",
            flush=True,
        )
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--prompt-tokens", type=int, default=2048)
    parser.add_argument("--ways", default="kernels,torch")
    parser.add_argument("--dtype", default="float32", choices=["bfloat16", "float32"])
    options = parser.parse_args()
    length = options.prompt_tokens + NEW_TOKENS
    model = models.small(options.dtype, 2 * length)
    with Engine(model, Memory(kv_cache_memory="64MiB")) as engine:
        need = bytes_needed(engine.parts.layout.blocks, length, STEP_TOKENS)
    results: dict[str, Any] = {"dtype": options.dtype, "prompt_tokens": options.prompt_tokens, "need_bytes": need}
    for way in options.ways.split(","):
        runs: dict[int, list[dict[str, float]]] = {percent: [] for percent in PERCENTS}
        for number in range(options.rounds):
            for at in range(len(PERCENTS)):
                percent = PERCENTS[(at + number) % len(PERCENTS)]
                prompt = models.random_tokens(options.prompt_tokens, number)
                runs[percent].append(measure(model, way, need * percent // 100, 2 * need, prompt))
            firsts = [found[number]["logprob"] for found in runs.values()]
            if max(firsts) - min(firsts) > LOGPROB_BOUND:
                raise SystemExit(f"{way}: the answers differ: {firsts}")
        print(f"{way}, {options.dtype}, {options.prompt_tokens} tokens, {need / 1e6:.0f} MB of KV", flush=True)
        results[way] = report(runs)
    write_result("long_context", results)


if __name__ == "__main__":
    main()
