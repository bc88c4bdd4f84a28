"""Conversations of several turns, and questions about long documents: time to first token and hit rate, per round.

    python -m benchmarks.multi_turn [--rounds 10] [--clients 20] [--repeat 2] [--ways stowage,vllm,...]

Needs the peers' environment (`make bench-env`). As the field runs it: `--clients` conversations; in each round every
client sends its whole history and a new message, all at once, and the next round begins when all have their answers.
Then `documents`: each of them is asked about in every round, in an order of its own. The histories of all take about
three times the device's KV, so an engine that has nothing below the device loses most of them between two rounds.

The model is Llama-like with 0.04 B parameters, small enough for two cores. Each way runs in a process of its own, one
after the other, `--repeat` times in turn. The limit of the hit rate is what was computed before: all of a prompt but
its newest part and what does not fill a block.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import random
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

from benchmarks import models
from benchmarks._peer import PYTHON, Peer
from benchmarks._report import median_spread, write_result

SCRIPT = Path(__file__).parent / "peers" / "turns.py"
WAYS = ("stowage", "stowage-device", "transformers", "vllm", "vllm-no-reuse", "vllm-stowage")
MESSAGE_TOKENS, ANSWER_TOKENS = 64, 16
DOCUMENT_TOKENS, QUESTION_TOKENS, DOCUMENTS, DOCUMENT_ROUNDS = 1024, 32, 15, 3
HOST_BYTES = 1 << 30


def start(way: str, model: Path, dtype: str, device_bytes: int) -> Peer:
    python = PYTHON if way.startswith("vllm") else sys.executable
    host = 0 if way in ("vllm", "vllm-no-reuse", "stowage-device") else HOST_BYTES
    return Peer([python, SCRIPT, way, model, dtype, str(device_bytes), str(host)])


def ask(peer: Peer, prompts: list[list[int]]) -> dict[str, Any]:
    return peer.ask(prompts=prompts, tokens=ANSWER_TOKENS)


def conversations(peer: Peer, clients: int, rounds: int, chance: random.Random) -> list[dict[str, Any]]:
    histories: list[list[int]] = [[] for _ in range(clients)]
    found = []
    for _ in range(rounds):
        for history in histories:
            history += tokens(chance, MESSAGE_TOKENS)
        answer = ask(peer, histories)
        found.append(row(histories, answer))
        for history, drawn in zip(histories, answer["tokens"], strict=True):
            history += drawn
    return found


def documents(peer: Peer, chance: random.Random) -> list[dict[str, Any]]:
    texts = [tokens(chance, DOCUMENT_TOKENS) for _ in range(DOCUMENTS)]
    found = []
    for _ in range(DOCUMENT_ROUNDS):
        prompts = [text + tokens(chance, QUESTION_TOKENS) for text in chance.sample(texts, len(texts))]
        found.append(row(prompts, ask(peer, prompts)))
    return found


def tokens(chance: random.Random, count: int) -> list[int]:
    return [chance.randrange(5, models.VOCAB) for _ in range(count)]


def row(prompts: list[list[int]], answer: dict[str, Any]) -> dict[str, Any]:
    times = sorted(answer["ttft_s"])
    return {
        "ttft_median_s": statistics.median(times),
        "ttft_p90_s": times[int(0.9 * (len(times) - 1))],
        "hit_rate": sum(answer["reused"]) / sum(map(len, prompts)),
        "answers": hashlib.sha256(json.dumps(answer["tokens"]).encode()).hexdigest(),
    }


def measure(way: str, model: Path, dtype: str, clients: int, rounds: int) -> dict[str, list[dict[str, Any]]]:
    history_tokens = rounds * (MESSAGE_TOKENS + ANSWER_TOKENS)
    stored_tokens = max(clients * history_tokens, DOCUMENTS * DOCUMENT_TOKENS)
    device_bytes = max(stored_tokens // 3, models.SMALL_CONTEXT_TOKENS) * models.small_bytes_per_token(dtype)
    peer = start(way, model, dtype, device_bytes)
    ask(peer, [tokens(random.Random(99), 64)])  # warm
    chance = random.Random(0)
    found = {"conversations": conversations(peer, clients, rounds, chance), "documents": documents(peer, chance)}
    peer.end()
    return found


def summary(runs: list[list[dict[str, Any]]]) -> dict[str, Any]:
    """Over the rounds that had something to reuse: all but the first."""
    later = [one for run in runs for one in run[1:]]
    return {
        "ttft_median_s": median_spread([one["ttft_median_s"] for one in later]),
        "ttft_p90_s": median_spread([one["ttft_p90_s"] for one in later]),
        "last_round_ttft_median_s": median_spread([run[-1]["ttft_median_s"] for run in runs]),
        "hit_rate": median_spread([one["hit_rate"] for one in later]),
        "rounds": [[{k: v for k, v in one.items() if k != "answers"} for one in run] for run in runs],
    }


def report(found: dict[str, list[dict[str, Any]]], ways: list[str]) -> dict[str, Any]:
    result: dict[str, Any] = {}
    for task in ("conversations", "documents"):
        result[task] = {way: summary([run[task] for run in found[way]]) for way in ways}
        print(f"{task}: seconds to the first token, median and 90th of a round's requests; hit rate")
        for way in ways:
            one = result[task][way]
            print(
                f"  {way:<15} {one['ttft_median_s'].median:7.2f} s {one['ttft_p90_s'].median:7.2f} s"
                f"   last round {one['last_round_ttft_median_s'].median:7.2f} s   {100 * one['hit_rate'].median:5.1f} %"
            )
    same = {way: [run["documents"][0]["answers"] for run in found[way]] for way in ways}
    result["answers_equal_to_transformers"] = {
        way: [one == same["transformers"][0] for one in hashes]
        for way, hashes in same.items()
        if "transformers" in same
    }
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--clients", type=int, default=20)
    parser.add_argument("--repeat", type=int, default=2)
    parser.add_argument("--ways", default=",".join(WAYS))
    parser.add_argument("--dtype", default=models.native_dtype(), choices=["bfloat16", "float32"])
    options = parser.parse_args()
    ways = options.ways.split(",")
    if unknown := set(ways) - set(WAYS):
        parser.error(f"no such way: {', '.join(sorted(unknown))}; choose from: {', '.join(WAYS)}")
    if not PYTHON.exists():
        raise SystemExit("vLLM is not here. Make the peers' environment first: make bench-env")
    found: dict[str, list[dict[str, Any]]] = {way: [] for way in ways}
    with tempfile.TemporaryDirectory(prefix="stowage-bench-") as directory:
        model = Path(directory) / "model"
        models.small(options.dtype).save_pretrained(model)
        for number in range(options.repeat):
            for way in ways[:: 1 if number % 2 == 0 else -1]:
                print(f"{number + 1} of {options.repeat}: {way}", flush=True)
                found[way].append(measure(way, model, options.dtype, options.clients, options.rounds))
    write_result("multi_turn", report(found, ways) | vars(options))


if __name__ == "__main__":
    main()
