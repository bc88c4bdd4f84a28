"""vLLM with StowageConnector and without it, in turn: time to first token on a hit, and throughput when nothing hits.

    python -m benchmarks.vllm_plugin [--rounds 5] [--prompt-tokens 2048]

Needs the peers' environment (`make bench-env`). Two engines of the CPU build, each in a process of its own, with one
Llama-like model of 0.48 B parameters: A has the plugin, B has not. Each round: a prompt that nobody knows on both
(cold), the same from A's device, from its host arena (the device's cache emptied), and from its disk (the arena emptied
too); then batches of 8 prompts that nobody knows on A and on B, in turn. The answers of all must be the same.

The limit of a batch is 0 %: both compute the same. Wall time moves by more than that on a shared machine, so what the
plugin took of the engine's thread is measured as well, and the processor time of its other threads (hashing, copying,
writing), which is the most that a machine without an idle core can lose.
"""

from __future__ import annotations

import argparse
import random
import tempfile
from pathlib import Path
from typing import Any

from benchmarks import models
from benchmarks._peer import PYTHON, Peer
from benchmarks._report import median_spread, write_result

SCRIPT = Path(__file__).parent / "peers" / "vllm_engine.py"
BATCH, BATCH_PROMPT, BATCH_NEW, PAIRS = 8, 256, 32, 2


def start(model: Path, dtype: str, directory: Path | None) -> Peer:
    return Peer([PYTHON, SCRIPT, model, dtype, *([directory] if directory else [])])


def first_tokens(ours: Peer, plain: Peer, prompt: list[int]) -> dict[str, float]:
    """Seconds to the first token, by where the prefix came from."""
    found: dict[str, float] = {}
    answers = []

    def take(name: str, engine: Peer, hit: bool) -> None:
        answer = engine.ask(do="first_token", prompt=prompt)
        assert (answer["cached"][0] > 0.7 * len(prompt)) == hit, f"{name}: {answer['cached']} tokens were cached"
        found[name] = answer["seconds"]
        answers.append(answer["tokens"])

    take("cold", ours, hit=False)
    take("cold, without the plugin", plain, hit=False)
    take("device", ours, hit=True)
    ours.ask(do="forget", host=False)
    take("host", ours, hit=True)
    ours.ask(do="forget", host=True)
    take("disk", ours, hit=True)
    assert all(answer == answers[0] for answer in answers), "an answer changed"
    return found


def measure(model: Path, dtype: str, directory: Path, prompt_tokens: int, rounds: int) -> dict[str, list[float]]:
    ours, plain = start(model, dtype, directory), start(model, dtype, None)
    chance = random.Random(0)

    def prompt(count: int) -> list[int]:
        return [chance.randrange(5, models.VOCAB) for _ in range(count)]

    for engine in (ours, plain):
        engine.ask(do="batch", prompts=[prompt(64)], tokens=2)  # warm
    found: dict[str, list[float]] = {}
    for number in range(rounds):
        taken = first_tokens(ours, plain, prompt(prompt_tokens))
        for name, seconds in taken.items():
            found.setdefault(name, []).append(seconds)
            print(f"{name:>28} {seconds:8.3f} s")
        for pair in range(PAIRS):
            for name, engine in [("batch", ours), ("batch, without the plugin", plain)][
                :: 1 if (number + pair) % 2 else -1
            ]:
                prompts = [prompt(BATCH_PROMPT) for _ in range(BATCH)]
                answer = engine.ask(do="batch", prompts=prompts, tokens=BATCH_NEW)
                found.setdefault(name, []).append(answer["seconds"])
                for part in ("inside", "threads"):
                    found.setdefault(f"{name}: {part}", []).append(answer[f"{part}_s"])
                print(f"{name:>28} {answer['seconds']:8.3f} s, {answer['inside_s']:.3f} s, {answer['threads_s']:.2f} s")
    ours.end()
    plain.end()
    return found


def report(found: dict[str, list[float]]) -> dict[str, Any]:
    seconds = {name: median_spread(values) for name, values in found.items()}
    cold = found["cold, without the plugin"]
    of_cold = {
        name: median_spread([mine / theirs for mine, theirs in zip(found[name], cold, strict=True)])
        for name in ("cold", "device", "host", "disk")
    }
    throughput = median_spread(
        [theirs / mine for mine, theirs in zip(found["batch"], found["batch, without the plugin"], strict=True)]
    )
    shares = {
        part: median_spread([mine / whole for mine, whole in zip(found[f"batch: {part}"], found["batch"], strict=True)])
        for part in ("inside", "threads")
    }
    for name, spread in of_cold.items():
        print(f"time to first token, {name}: {100 * spread.median:.1f} % of vLLM's cold one")
    print(f"throughput when nothing hits: {100 * throughput.median:.1f} % of vLLM's without the plugin")
    print(f"of that time the engine's thread was in the plugin for {100 * shares['inside'].median:.2f} %")
    print(f"and its other threads had processor time of {100 * shares['threads'].median:.2f} % of it")
    return {
        "unit": "seconds",
        "seconds": seconds,
        "share_of_cold": of_cold,
        "throughput_of_plain": throughput,
        "share_of_batch": shares,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--prompt-tokens", type=int, default=2048)
    parser.add_argument("--dtype", default=models.native_dtype(), choices=["bfloat16", "float32"])
    options = parser.parse_args()
    if not PYTHON.exists():
        raise SystemExit("vLLM is not here. Make the peers' environment first: make bench-env")
    with tempfile.TemporaryDirectory(prefix="stowage-bench-") as directory:
        model = Path(directory) / "model"
        models.half_billion(options.dtype).save_pretrained(model)
        found = measure(model, options.dtype, Path(directory) / "cache", options.prompt_tokens, options.rounds)
    write_result("vllm_plugin", report(found) | vars(options))


if __name__ == "__main__":
    main()
