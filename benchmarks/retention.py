"""Prompt tokens of hybrid models that a replayed traffic need not compute, by what is kept of windows and states.

    python -m benchmarks.retention [--models NAME ...] [--requests 400] [--length 4096]

Each traffic is replayed against host memory for less than half of it, with the plugin's own layout, keys, look-up and
rules of what is kept (`stowage.core`), and with the layout and the rules of vLLM's `OffloadingConnector`: blocks of 16
tokens, the window or state at a prompt's end and where prompts were seen to part, and nothing of answers. The least
recently used goes first in both. No bytes move and no model runs.

- *repeated*: prompts are asked again, word for word;
- *continued*: conversations of up to eight turns; the next turn repeats the answer;
- *parted*: each prompt shares with an earlier one what lies before a place anywhere in it;
- *shared*: all begin with one system prompt, half of their length, and end in something new;
- *mixed*: one of each in turn;
- *hot*: four prompts that are repeated and prompts that part, in turn.
"""

from __future__ import annotations

import argparse
import math
import random
from collections import OrderedDict
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from benchmarks._report import write_result
from benchmarks.capacity import GIB, MODELS, STEP_TOKENS, Model, cache_groups, vllms
from stowage.core.geometry import Geometry, Group, IntArray, Kind, round_up, split_arena
from stowage.core.groups import strategy
from stowage.core.key import SequenceKeys
from stowage.core.resume_points import tail_of
from stowage.core.retention import Learner, Retention
from stowage.core.reuse import longest_boundary
from stowage.plugins.vllm.settings import read, resume_points, retention, state_spacing

ANSWER_TOKENS, TURN_TOKENS, TURNS = 256, 160, 8
WORKING_SET = 48
FITS = 0.4
"""This part of the working set of repeated prompts, in vLLM's default layout."""
SORTS = ("repeated", "continued", "parted", "shared")
TRAFFIC = (*SORTS, "mixed", "hot")
VLLM = "vLLM, default"

Prompt = tuple[list[int], list[int]]
"""And its answer."""


class Host:
    """Slots by slab class, the least recently used first. What a cache with ``groups`` keeps of prompts, and finds."""

    def __init__(self, model: Model, nbytes: int, setting: str) -> None:
        self.theirs = setting == VLLM
        options = read({"host_memory": nbytes, **({} if self.theirs else {"resume_points": setting})})
        per_chunk = 1 if self.theirs else options.blocks_per_chunk(model.block_tokens)
        groups = cache_groups(model, per_chunk)
        if self.theirs:
            widest = max(layers for _, layers in model.groups()) * model.block_tokens * model.token_bytes
            groups = [Group(one.index, one.kind, one.block_tokens, 1, round_up(widest), one.window) for one in groups]
        spacing = round_up(state_spacing(options, STEP_TOKENS), model.block_tokens) if model.recurrent else 1
        common = self.theirs or model.recurrent > 0 or not resume_points(options, groups).everywhere
        self.slabs = split_arena(Geometry(tuple(groups)), nbytes, spacing, common=common)
        self.slab_of = {group: number for number, slab in enumerate(self.slabs) for group in slab.groups}
        self.chunks: list[OrderedDict[bytes, None]] = [OrderedDict() for _ in self.slabs]
        self.groups, self.strategies = groups, [strategy(group) for group in groups]
        self.step = math.lcm(*(group.block_tokens for group in groups))
        self.kept = retention(options, self.strategies, STEP_TOKENS)

    def ask(self, prompt: Prompt) -> int:
        """A request: how many of its tokens are found. Then all that is kept of it is stored."""
        tokens, answer = prompt
        keys = SequenceKeys(bytes(32), self.groups)
        keys.extend([*tokens, *answer], len(tokens))
        masks = []
        for group in self.groups:
            there = self.chunks[self.slab_of[group.index]]
            found = [name in there for name in keys.of(group.index)]
            masks.append(np.where(found, np.uint64(group.full_mask), np.uint64(0)))
        full = [number for number, group in enumerate(self.groups) if group.kind is Kind.FULL]
        known = longest_boundary([self.strategies[n] for n in full], [masks[n] for n in full], len(tokens), self.step)
        resumed = longest_boundary(self.strategies, masks, len(tokens), self.step)
        self.use(keys, resumed)
        kept = self.kept
        if isinstance(kept, Learner):
            names = keys.of(kept.group.index)
            kept = kept.arrived(names, len(tokens), known, 0, resumed)
        keys.extend([*tokens, *answer], len(tokens) + len(answer))
        for group in self.groups:
            self.store(group, keys, self.wanted(group, kept, prompt, known, resumed))
        if isinstance(self.kept, Learner):
            names = keys.of(self.kept.group.index)
            self.kept.answered(names, len(tokens), len(names) * self.kept.group.chunk_tokens, kept)
        return resumed

    def wanted(self, group: Group, kept: Retention, prompt: Prompt, known: int, resumed: int) -> IntArray:
        """Chunks of a group that the request completes and that are kept."""
        size, length = group.chunk_tokens, len(prompt[0])
        chunks = range(resumed // size, (length + len(prompt[1])) // size)
        numbers = np.arange(chunks.start, chunks.stop)
        way, junction = self.strategies[group.index], known // self.step * self.step
        if group.kind is Kind.FULL:
            return numbers
        if self.theirs:
            ends = [way.needed(end) for end in ((length - 1) // self.step * self.step, junction)]
            return np.array([number for number in numbers.tolist() if any(number in some for some in ends)], np.int64)
        tail = tail_of(length, math.lcm(*(one.chunk_tokens for one in self.groups)))
        if group.kind is not Kind.RECURRENT:
            return numbers[kept.kept(way, chunks, length, tail, junction)]
        step = STEP_TOKENS // size * size
        ends = {*range(resumed + step, length, step), (length - 1) // size * size, junction}
        before, states = resumed, []
        for end in sorted(end for end in ends if end > resumed):
            if end >= tail or end == junction or kept.points.crossed(before, end):
                states.append(end // size - 1)
            before = end
        answer = range(length // size, chunks.stop) if kept.answers else ()
        return np.array([*states, *(number for number in answer if number not in states)], np.int64)

    def use(self, keys: SequenceKeys, boundary: int) -> None:
        for way in self.strategies:
            names, needed = keys.of(way.group.index), way.needed(boundary)
            for name in reversed(names[needed.start : needed.stop]):
                self.chunks[self.slab_of[way.group.index]].move_to_end(name)

    def store(self, group: Group, keys: SequenceKeys, wanted: IntArray) -> None:
        number = self.slab_of[group.index]
        there, names = self.chunks[number], keys.of(group.index)
        for chunk in wanted.tolist()[::-1]:  # the end of a prompt goes before its beginning
            there[names[chunk]] = None
            there.move_to_end(names[chunk])
            if len(there) > self.slabs[number].slots:
                there.popitem(last=False)


def traffic(kind: str, count: int, length: int, seed: int = 0, working_set: int = WORKING_SET) -> Iterator[Prompt]:
    """Prompts of about that length. Each kind begins by itself: the cache is cold."""
    chance = random.Random(f"{kind} {seed}")

    def fresh(tokens: int) -> list[int]:
        return [chance.randrange(1 << 17) for _ in range(tokens)]

    def new() -> Prompt:
        return fresh(length + chance.randrange(256) - 128), fresh(ANSWER_TOKENS)

    if kind in ("mixed", "hot"):
        each = [traffic(one, -(-count // 4), length, seed + 1) for one in SORTS]
        if kind == "hot":
            each = [traffic("parted", count // 2, length), traffic("repeated", count // 2, length, seed, 4)]
        for together in zip(*each, strict=True):
            yield from together
        return
    known = [new() for _ in range(working_set)]
    turns = [0] * working_set
    system = fresh(length // 2)
    for _ in range(count):
        at = chance.randrange(working_set)
        tokens, answer = known[at]
        if kind == "parted":
            shared = tokens[: chance.randrange(len(tokens))]
            known[at] = [*shared, *fresh(len(tokens) - len(shared))], fresh(ANSWER_TOKENS)
        elif kind == "shared":
            known[at] = [*system, *fresh(len(tokens) - len(system))], fresh(ANSWER_TOKENS)
        yield known[at]
        if kind == "continued":
            turns[at] = (turns[at] + 1) % TURNS
            tokens, answer = known[at]
            turn = [*tokens, *answer, *fresh(TURN_TOKENS)], fresh(ANSWER_TOKENS)
            known[at] = turn if turns[at] else new()


def replay(model: Model, kind: str, count: int, length: int) -> Mapping[str, float]:
    """Tokens found per request, by setting; of the second half of the traffic, and of all of it."""
    nbytes = int(FITS * WORKING_SET * length / vllms(model, length, 0).again * GIB)
    found: dict[str, float] = {}
    for setting in ("auto", "growing", "ends", VLLM):
        host = Host(model, nbytes, setting)
        tokens = [host.ask(prompt) for prompt in traffic(kind, count, length)]
        found[setting] = sum(tokens[count // 2 :]) / (count - count // 2)
        if kind == "hot":
            found[f"{setting}, those that part"] = sum(tokens[count // 2 :: 2]) / (count // 4)
        found[f"{setting}, from the start"] = sum(tokens) / count
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", default=[*MODELS], choices=[*MODELS])
    parser.add_argument("--requests", type=int, default=400)
    parser.add_argument("--length", type=int, default=4096)
    options = parser.parse_args()
    results: dict[str, Any] = {}
    for name in options.models:
        for kind in TRAFFIC:
            found = replay(MODELS[name], kind, options.requests, options.length)
            results.setdefault(name, {})[kind] = {key: round(value, 1) for key, value in found.items()}
            print(
                f"{name:>16} {kind:<10}", "  ".join(f"{key} {value:7.1f}" for key, value in found.items()), flush=True
            )
    told = {"unit": "tokens found per request", "length": options.length, "requests": options.requests}
    write_result("retention", {**told, "replayed": results})


if __name__ == "__main__":
    main()
