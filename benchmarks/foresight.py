"""How much of a trace's reuse can be foreseen: by a predictor that no policy could afford.

    PYTHONPATH=src .venv-bench/bin/python -m benchmarks.foresight TRACE [--json] [--capacity 1000 10000] [--save]

Needs the environment that `make bench-env` makes. For every prompt, gradient-boosted trees are given all that is known
when it has been answered (how long it and its answer are, how much of it was there, how often and how quickly its
conversation came back, the time) and say, for each age, how likely it is to be gone on with then. They are trained on
four fifths of the conversations of the whole trace, those to come included, and asked about the other fifth; no policy
that learns while it runs can know as much. What is kept is then chosen as the policy `cost` does: of the prompt with
the least uses expected per time held the deepest block leaves (Gittins' index).

What a policy finds beside that says how much a better one could gain, about: these trees do not follow a workload as it
changes, and others may see a little more. The clairvoyant optimum does not say it: it knows what nothing tells.
"""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import astuple, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

try:
    from sklearn.ensemble import HistGradientBoostingClassifier
    from sklearn.model_selection import GroupKFold
except ModuleNotFoundError:
    command = "PYTHONPATH=src .venv-bench/bin/python -m benchmarks.foresight TRACE"
    raise SystemExit(
        f"scikit-learn is not here, but where `make bench-env` installs it. Run that, and: {command}"
    ) from None

from benchmarks._replay import Line, belady, leading, prefix_lru, read_lines, through_policy
from benchmarks._report import write_result
from stowage.cache.policy import POLICIES, POLICY_DEFAULT
from stowage.cache.policy.hazard import best_rate

AGES = np.array([0, 16, 32, 64, 96, 128, 192, 256, 384, 512, 768, 1024, 1536, 2048, 3072, 4096, 8192, 1 << 30])
"""Bounds of ages, in prompts."""
WIDTHS = np.append(np.diff(AGES)[:-1], AGES[-2]).astype(float)
COMMON_USES = 100
"""A block that so many prompts begin with is not a conversation's."""
FOLDS = 5
UNKNOWN = np.nan


@dataclass(frozen=True, slots=True)
class Known:
    """What is known of a prompt when it has been answered. Ages in prompts, times in milliseconds."""

    blocks: int
    found: int
    tokens: int
    answer_tokens: int
    timestamp: float
    common: int
    beginning: int
    uses: float = UNKNOWN
    age: float = UNKNOWN
    age_ms: float = UNKNOWN
    shortest_age: float = UNKNOWN
    tokens_before: float = UNKNOWN
    answer_before: float = UNKNOWN


@dataclass(slots=True)
class Seen:
    """A block that was used before: how often, by which prompts, and which conversation was the first."""

    uses: int
    prompt: int
    shortest_age: float
    conversation: int


def what_is_known(lines: list[Line]) -> tuple[list[Known], NDArray[np.int64]]:
    """Of each prompt, and its conversation."""
    seen: dict[int, Seen] = {}
    often: set[int] = set()
    every, conversations = [], []
    for number, line in enumerate(lines):
        blocks = line["hash_ids"]
        found, common = leading(blocks, seen), leading(blocks, often)
        known = Known(
            len(blocks), found, line["input_length"], line["output_length"], line["timestamp"], common, blocks[0]
        )
        conversation = number
        if found > common:
            last = seen[blocks[found - 1]]
            before = lines[last.prompt]
            known = replace(
                known,
                uses=last.uses,
                age=number - last.prompt,
                age_ms=line["timestamp"] - before["timestamp"],
                shortest_age=last.shortest_age,
                tokens_before=before["input_length"],
                answer_before=before["output_length"],
            )
            conversation = last.conversation
        for block in blocks:
            past = seen.get(block)
            if past is None:
                seen[block] = Seen(1, number, UNKNOWN, conversation)
            else:
                past.shortest_age = np.fmin(past.shortest_age, number - past.prompt)
                past.uses, past.prompt = past.uses + 1, number
                if past.uses > COMMON_USES:
                    often.add(block)
        every.append(known)
        conversations.append(conversation)
    return every, np.array(conversations)


def next_uses(lines: list[Line], known: list[Known]) -> NDArray[np.int64]:
    """After how many prompts blocks of each prompt that are not common are used again; 0: never. The last block is
    rarely whole, and does not count.
    """
    again: dict[int, int] = {}
    ages = np.zeros(len(lines), np.int64)
    for number in range(len(lines) - 1, -1, -1):
        blocks = lines[number]["hash_ids"]
        nexts = [again[block] for block in blocks[known[number].common : -1] if block in again]
        ages[number] = min(nexts) - number if nexts else 0
        again.update(dict.fromkeys(blocks, number))
    return ages


def lives(ages: NDArray[np.int64], prompts: NDArray[np.int64]) -> tuple[NDArray[np.int64], ...]:
    """A life table's rows: prompt, bucket of age, and whether it was used again in that bucket. Of a prompt that was
    not used again the last bucket that the trace does not see the end of is left out.
    """
    columns: tuple[list[int], list[int], list[int]] = [], [], []
    for prompt in prompts.tolist():
        used, left = int(ages[prompt]), len(ages) - prompt
        for bucket in range(len(WIDTHS)):
            if AGES[bucket] >= (used or left) or (not used and AGES[bucket + 1] > left and bucket < len(WIDTHS) - 1):
                break
            for column, value in zip(columns, (prompt, bucket, 0 < used <= AGES[bucket + 1]), strict=True):
                column.append(int(value))
    return tuple(np.array(column, np.int64) for column in columns)


def hazards(
    known: NDArray[np.float64], conversations: NDArray[np.int64], ages: NDArray[np.int64]
) -> NDArray[np.float64]:
    """For each prompt and bucket of age: how likely it is used again there, if not before. A share
    of the conversations at a time is foretold from the others.
    """
    told = np.zeros((len(known), len(WIDTHS)))
    for others, mine in GroupKFold(FOLDS).split(known, groups=conversations):
        prompts, buckets, used = lives(ages, others)
        trees = HistGradientBoostingClassifier(
            learning_rate=0.05, max_iter=200, max_leaf_nodes=15, min_samples_leaf=60, early_stopping=False
        )
        trees.fit(np.column_stack((known[prompts], buckets)), used)
        for bucket in range(len(WIDTHS)):
            told[mine, bucket] = trees.predict_proba(np.column_stack((known[mine], np.full(len(mine), bucket))))[:, 1]
    return told


def hits(lines: list[Line], rates: NDArray[np.float64], capacity: int) -> int:
    """Blocks found, where the prompt with the least rate loses its deepest block first. A block is that of the last
    prompt that used it.
    """
    owner: dict[int, int] = {}
    held: dict[int, dict[int, None]] = {}
    total = 0
    for number, line in enumerate(lines):
        blocks = line["hash_ids"]
        total += leading(blocks, owner)
        for block in blocks:
            if block in owner:
                before = held[owner[block]]
                del before[block]
                if not before:
                    del held[owner[block]]
            owner[block] = number
            held.setdefault(number, {})[block] = None
        if len(owner) > capacity:
            prompts = np.fromiter(held, np.int64, len(held))
            rate = rates[prompts, np.searchsorted(AGES, number - prompts, side="right") - 1]
            for prompt in prompts[np.argsort(rate, kind="stable")].tolist():
                while held[prompt] and len(owner) > capacity:
                    del owner[held[prompt].popitem()[0]]
                if held[prompt]:
                    break
                del held[prompt]
    return total


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "trace", type=Path, metavar="TRACE", help="file of JSON lines, as `stowage simulate` takes them"
    )
    parser.add_argument("--capacity", nargs="+", type=int, default=(1000, 10000), help="blocks")
    parser.add_argument("--json", action="store_true", help="print the result as JSON")
    parser.add_argument("--save", action="store_true", help="write results/foresight.json")
    options = parser.parse_args()
    try:
        lines = [line for line in read_lines(options.trace) if line["hash_ids"]]
        known, conversations = what_is_known(lines)
    except (OSError, ValueError, KeyError, TypeError) as error:
        parser.error(f"the trace {options.trace} cannot be read: {error!r}")
    if len(set(conversations.tolist())) < FOLDS:
        parser.error(f"the trace {options.trace} has fewer than {FOLDS} conversations")
    prompts = [line["hash_ids"] for line in lines]
    asked = sum(map(len, prompts))
    print("learning", file=sys.stderr, flush=True)
    columns = np.array([astuple(one) for one in known], float)
    rates = best_rate(hazards(columns, conversations, next_uses(lines, known)), WIDTHS)
    result: dict[str, Any] = {"prompts": len(lines), "hit_rate": {}}
    for capacity in options.capacity:
        print(f"{capacity} blocks", file=sys.stderr, flush=True)
        found = {
            "lru": prefix_lru(prompts, capacity),
            POLICY_DEFAULT: through_policy(prompts, capacity, POLICIES[POLICY_DEFAULT]),
            "foresight": hits(lines, rates, capacity),
            "belady": belady(prompts, capacity),
        }
        result["hit_rate"][str(capacity)] = {name: round(count / asked, 5) for name, count in found.items()}
    if options.save:
        write_result("foresight", result)
    if options.json:
        print(json.dumps(result))
        return 0
    for capacity_text, of in result["hit_rate"].items():
        print(f"{capacity_text:>9} blocks  " + "  ".join(f"{name} {100 * rate:5.2f}" for name, rate in of.items()))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
