"""Prompts from recorded lists against the model's own Python, in turn.

``python -m benchmarks.recorded_prompts [--checkpoint DIR_OR_FILE] [--int8-activations] [--rounds N] [--name NAME]``.
Two engines run one model object in one process, one of them without lists. Every round asks both for new random
prompts of each length, one at a time and for one token; the order alternates. What recording takes is the first
recorded prompt's time less what prompts of its length take then.
"""

from __future__ import annotations

import argparse
import time
from typing import Any

from benchmarks import models
from benchmarks._report import median_spread, write_result
from stowage.config.memory import Memory
from stowage.engine.engine import Engine
from stowage.engine.sampling_params import SamplingParams

LENGTHS = (16, 40, 128, 512, 2048)
WARM_TOKENS = 64
WARM_PROMPTS = 20


def prompt_s(engine: Engine, tokens: int, seed: int) -> float:
    """Seconds until the first token of a prompt that nobody has seen."""
    prompt = models.random_tokens(tokens, seed=seed)
    began_s = time.perf_counter()
    engine.generate([prompt], SamplingParams(max_new_tokens=1, ignore_eos=True))
    return time.perf_counter() - began_s


def measure(of: Any, rounds: int, int8: bool) -> tuple[dict[int, dict[str, list[float]]], float]:
    """Seconds by length and engine, and what recording took."""
    memory = Memory(kv_cache_memory="512MiB")
    seconds: dict[int, dict[str, list[float]]] = {length: {"recorded": [], "plain": []} for length in LENGTHS}
    with (
        Engine(of, memory, int8_activations=int8) as recorded,
        Engine(recorded.model, memory, int8_activations=int8) as plain,
    ):
        engines = {"recorded": recorded, "plain": plain}
        prompts: Any = {name: engine.parts.runner for name, engine in engines.items()}
        prompts["plain"].prompts.close()
        warm = {
            name: [prompt_s(engine, WARM_TOKENS, 10**6 + WARM_PROMPTS * at + i) for i in range(WARM_PROMPTS)]
            for at, (name, engine) in enumerate(engines.items())
        }
        assert prompts["recorded"].prompts.recorded, prompts["recorded"].prompts.why
        for number in range(rounds):
            for at, length in enumerate(LENGTHS):
                for name in ("recorded", "plain") if number % 2 else ("plain", "recorded"):
                    seed = (number * len(LENGTHS) + at) * 2 + (name == "plain")
                    seconds[length][name].append(prompt_s(engines[name], length, seed))
    return seconds, max(warm["recorded"][1:]) - median_spread(warm["recorded"][-5:]).median


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--checkpoint", help="a directory or GGUF file; without it a random model of 0.5 B")
    parser.add_argument("--int8-activations", action="store_true")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--name", default="recorded_prompts", help="of the result file")
    options = parser.parse_args()
    of = options.checkpoint or models.half_billion("bfloat16")
    seconds, recording_s = measure(of, options.rounds, options.int8_activations)
    kept: dict[str, Any] = {}
    for length, by_name in seconds.items():
        stats = {name: median_spread([1000 * one for one in found]) for name, found in by_name.items()}
        ratio = median_spread([a / b for a, b in zip(by_name["recorded"], by_name["plain"], strict=True)])
        kept[f"{length} tokens"] = {"milliseconds": stats, "ratio": ratio}
        print(
            f"{length:>5} tokens: recorded {stats['recorded']} ms, plain {stats['plain']} ms, {ratio.median:.2f} times"
        )
    print(f"recording took {1000 * recording_s:.0f} ms once")
    write_result(options.name, {**kept, "recording_ms": 1000 * recording_s, "rounds": options.rounds})


if __name__ == "__main__":
    main()
