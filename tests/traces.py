"""Traces of conversations, made from a seed: prompts that grow, share a beginning, and come back after others."""

import json
import random
from pathlib import Path
from typing import Final

from stowage.simulator.trace import Trace, read_trace

BLOCK_TOKENS: Final = 16


def conversations(
    prompts: int, seed: int = 0, *, people: int = 12, gap_ms: int = 1000, longest: int = 30
) -> list[dict[str, object]]:
    """Lines of a trace. All share the first block; a conversation goes on from its last prompt, or is a new one."""
    chance = random.Random(seed)
    ids = iter(range(1, 1 << 40))
    histories: list[list[int]] = [[0] for _ in range(people)]
    lines: list[dict[str, object]] = []
    for number in range(prompts):
        person = int(people * chance.random() ** 2)
        if len(histories[person]) > longest - 6 or chance.random() < 0.1:
            histories[person] = [0]
        histories[person] += [next(ids) for _ in range(chance.randint(1, 6))]
        rest = chance.randint(0, BLOCK_TOKENS - 1)
        blocks = [*histories[person], *([next(ids)] if rest else [])]
        length = len(histories[person]) * BLOCK_TOKENS + rest
        lines.append({"timestamp": number * gap_ms, "input_length": length, "output_length": 1, "hash_ids": blocks})
    return lines


def write(path: Path, lines: list[dict[str, object]]) -> Path:
    path.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    return path


def trace(path: Path, lines: list[dict[str, object]]) -> Trace:
    return read_trace(write(path, lines), BLOCK_TOKENS)
