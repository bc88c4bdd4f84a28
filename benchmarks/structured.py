"""What structured output costs: a batch whose answers are bound by grammars, beside the same batch without.

    python -m benchmarks.structured --model .real-model/SmolLM2-135M-Instruct

Both come from one engine and take turns. Each answer has as many tokens in either: nothing ends before. A grammar is
compiled once, in a round that is not counted. The goal is 5 % per token. Beside the clock's time stands the
processor's, which neighbours on shared cores disturb less, and the time in which tokens are drawn, all that a grammar
changes about a step: what it is more, of a whole step.
"""

from __future__ import annotations

import argparse
import time
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from benchmarks._report import describe_machine, median_spread, write_result
from stowage.config.memory import Memory
from stowage.engine.engine import Engine
from stowage.engine.sampling import Sampler
from stowage.engine.sampling_params import SamplingParams, StructuredOutputs

SCHEMA: dict[str, Any] = {"type": "array", "items": {"type": "string", "maxLength": 40}, "minItems": 400}
GRAMMARS = {"pattern": StructuredOutputs(regex="[A-Za-z ,.]{1000,4000}"), "schema": StructuredOutputs(json=SCHEMA)}
GOAL = 0.05
TIMES = ("clock", "processor", "drawing")


def seconds_per_token(engine: Engine, batch: int, params: SamplingParams) -> tuple[float, ...]:
    """Of a batch, from its submission to its end: what one step takes, of each of ``TIMES``."""
    prompts = [[{"role": "user", "content": f"Tell me about the number {number}."}] for number in range(batch)]
    began, spent, drawn = time.perf_counter(), time.process_time(), Drawing.seconds
    completions = engine.generate([*prompts], params)
    took, spent, drawn = time.perf_counter() - began, time.process_time() - spent, Drawing.seconds - drawn
    tokens = {len(completion.token_ids) for completion in completions}
    assert tokens == {params.max_new_tokens}, tokens
    return took / params.max_new_tokens, spent / params.max_new_tokens, drawn / params.max_new_tokens


class Drawing:
    """Adds up the time of ``Sampler.sample``, which it takes the place of."""

    seconds = 0.0
    real = Sampler.sample

    @staticmethod
    def draw(sampler: Sampler, logits: Any) -> Any:
        began = time.perf_counter()
        drawn = Drawing.real(sampler, logits)
        Drawing.seconds += time.perf_counter() - began
        return drawn


def compared(times: dict[str, list[tuple[float, ...]]], what: str) -> dict[str, Any]:
    """Milliseconds of a step in each way, and how much more than plainly the others take, round by round: of the same
    time, and of drawing, of the clock's.
    """
    index = TIMES.index(what)
    each = {name: [took[index] for took in rounds] for name, rounds in times.items()}
    steps = [took[0 if what == "drawing" else index] for took in times["plain"]]
    more = {
        name: [(a - b) / step for a, b, step in zip(each[name], each["plain"], steps, strict=True)] for name in GRAMMARS
    }
    return {
        "ms_per_step": {name: asdict(median_spread([1e3 * one for one in rounds])) for name, rounds in each.items()},
        "more": {name: asdict(median_spread(rounds)) for name, rounds in more.items()},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, default=Path(".real-model/SmolLM2-135M-Instruct"))
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--tokens", type=int, default=96)
    parser.add_argument("--rounds", type=int, default=7)
    given = parser.parse_args()
    plain = SamplingParams(max_new_tokens=given.tokens, ignore_eos=True)
    ways = {"plain": plain, **{name: replace(plain, structured_outputs=bound) for name, bound in GRAMMARS.items()}}
    found: dict[str, Any] = {}
    Sampler.sample = Drawing.draw  # type: ignore[method-assign]
    with Engine(given.model, Memory(kv_cache_memory="256MiB")) as engine:
        for batch in given.batches:
            times: dict[str, list[tuple[float, ...]]] = {name: [] for name in ways}
            for turn in range(given.rounds + 1):
                for name, params in ways.items():
                    took = seconds_per_token(engine, batch, params)
                    times[name] += [took] * bool(turn)
            found[str(batch)] = {what: compared(times, what) for what in TIMES}
            print(batch, found[str(batch)])
    data = {"machine": describe_machine(), "model": given.model.name, "goal": GOAL, "tokens": given.tokens}
    print(write_result("structured", data | {"rounds": given.rounds, "batches": found}))


if __name__ == "__main__":
    main()
