"""Replays a trace of prompts, one at a time, and counts the blocks that were there: through a policy alone, through the
store's own state machine, and as one who knows the future.

A trace is a file of lines {"timestamp", "input_length", "output_length", "hash_ids"}; a prompt is its `hash_ids`,
blocks of 512 tokens, the last one maybe only partly filled and counted as one. A hit is a block that is there with all
blocks before it. Afterwards all blocks of the prompt are there.
"""

from __future__ import annotations

import heapq
import json
from collections import OrderedDict
from collections.abc import Container
from pathlib import Path
from typing import Any

import numpy as np

from stowage.cache.flow import Flow
from stowage.cache.policy import MakePolicy
from stowage.core.geometry import Geometry, Group, Kind, SlabClass

Prompt = list[int]
Line = dict[str, Any]

_BLOCK_TOKENS = 512
_NEVER = 1 << 60
_FULL = np.uint64(1)


def read_trace(path: Path) -> list[Prompt]:
    """The blocks of every prompt, in order of arrival."""
    return [line["hash_ids"] for line in read_lines(path)]


def read_lines(path: Path) -> list[Line]:
    """All that a trace says of every prompt."""
    with path.open(encoding="utf-8") as lines:
        return [json.loads(line) for line in lines if line.strip()]


def leading(prompt: Prompt, there: Container[int]) -> int:
    """How many blocks are there with all blocks before them."""
    count = 0
    for block in prompt:
        if block not in there:
            break
        count += 1
    return count


def prefix_lru(prompts: list[Prompt], capacity: int) -> int:
    """Hits with a plain ordered dictionary: what any replay of LRU must give."""
    order: OrderedDict[int, None] = OrderedDict()
    hits = 0
    for prompt in prompts:
        hits += leading(prompt, order)
        for block in reversed(prompt):
            order[block] = None
            order.move_to_end(block)
        while len(order) > capacity:
            order.popitem(last=False)
    return hits


def belady(prompts: list[Prompt], capacity: int) -> int:
    """Hits of the clairvoyant optimum: whatever is used again last leaves first, of those the deepest in its prompt.

    A block is never used again before the blocks in front of it, so this never leaves a block without its prefix. As in
    the store, all blocks of a prompt are there together, so what leaves makes room for them first.
    """
    uses: dict[int, list[int]] = {}
    for number in range(len(prompts) - 1, -1, -1):
        for block in prompts[number]:
            uses.setdefault(block, []).append(number)
    next_use: dict[int, int] = {}
    furthest: list[tuple[int, int, int]] = []
    hits = 0
    for prompt in prompts:
        hits += leading(prompt, next_use)
        # Those of this prompt are used now, before all others: they leave only if nothing else is left.
        room = capacity - sum(block not in next_use for block in prompt)
        while len(next_use) > max(room, 0):
            use, _, block = heapq.heappop(furthest)
            if next_use.get(block) == -use:
                del next_use[block]
        for depth, block in enumerate(prompt[:capacity]):
            uses[block].pop()
            next_use[block] = uses[block][-1] if uses[block] else _NEVER
            heapq.heappush(furthest, (-next_use[block], -depth, block))
        for block in prompt[capacity:]:
            uses[block].pop()
            next_use.pop(block, None)
    return hits


def through_flow(prompts: list[Prompt], capacity: int, policy: MakePolicy) -> int:
    """Hits of the host tier: `core.flow` with its ledger, one prompt after the other fetched, stored and released."""
    geometry = Geometry((Group(0, Kind.FULL, _BLOCK_TOKENS, 1, _BLOCK_TOKENS),))
    flow = Flow(geometry, [SlabClass(_BLOCK_TOKENS, (0,), capacity, 0, 0)], policy=policy)
    names: dict[int, bytes] = {}
    hits = 0
    for prompt in prompts:
        keys = [names.setdefault(block, block.to_bytes(32, "little")) for block in prompt]
        absent = np.flatnonzero(flow.locate(keys, 0.0)[0] == 0)
        found = int(absent[0]) if len(absent) else len(keys)
        hits += found
        fetch = flow.fetch([(0, keys[:found])], 1.0, 0.0)
        rest = keys[found:]
        slots = flow.reserve(0, rest, np.full(len(rest), _FULL), keys[found - 1] if found else None)
        flow.commit(slots, 0.0)
        flow.release(fetch)
    flow.check()
    return hits


def through_policy(prompts: list[Prompt], capacity: int, policy: MakePolicy) -> int:
    """Hits of a policy with a dictionary around it, and nothing else."""
    order = policy(capacity, capacity)
    slot_of: dict[int, int] = {}
    block_in = [-1] * capacity
    free = list(range(capacity - 1, -1, -1))
    hits = 0
    for prompt in prompts:
        found = leading(prompt, slot_of)
        hits += found
        held = _slots(slot_of[block] for block in prompt[:found])
        order.remove(held)
        # What is there behind the first miss is stored already: that counts as a use.
        order.insert(_slots(slot_of[block] for block in reversed(prompt[found:]) if block in slot_of))
        new = [block for block in dict.fromkeys(prompt[found:]) if block not in slot_of]
        gone = order.victims(len(new) - len(free)).tolist() if len(new) > len(free) else []
        for slot in gone:
            del slot_of[block_in[slot]]
        given = [free.pop() for _ in range(min(len(new), len(free)))] + gone
        for block, slot in zip(new, given, strict=False):
            slot_of[block], block_in[slot] = slot, block
        line = [slot_of.get(block, -1) for block in prompt]
        before = dict(zip(line, [-1, *line], strict=False))
        last_first = given[::-1]
        keys = [block_in[slot].to_bytes(32, "little") for slot in last_first]
        order.admit(_slots(last_first), keys, _slots(before[slot] for slot in last_first))
        order.insert(held[::-1])
    order.check()
    return hits


def _slots(numbers: object) -> np.ndarray:
    return np.array(list(numbers), np.int64)  # type: ignore[call-overload]
