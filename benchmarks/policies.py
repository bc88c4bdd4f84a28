"""Hit rates of the eviction policies on a trace of prompts, beside the clairvoyant optimum.

    python -m benchmarks.policies TRACE [--json] [--capacity 1000 10000 50000 infinite] [--save]

Every policy is replayed through the store's own state machine (`core.flow` with its ledger), and `--check` replays it a
second time without that: both must give the same hits. The rate is that of blocks: those that were there, with all
blocks before them, over all blocks that were asked for (`benchmarks/_replay.py` says what a trace is). `--save` writes
the result file and the picture.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from benchmarks._replay import Prompt, belady, prefix_lru, read_trace, through_flow, through_policy
from stowage import svg
from stowage.cache.policy import POLICIES, POLICY_DEFAULT

CAPACITIES = ("1000", "10000", "50000", "infinite")
RESULTS = Path(__file__).parent / "results"
COLOURS = {"belady": "#777777", "cost": "#c0392b", "lru": "#2c6fbb", "s3fifo": "#2e8b57", "arc": "#b8860b"}


def rates(prompts: list[Prompt], capacity: int, check: bool) -> dict[str, float]:
    """The hit rate of every policy and of the optimum, with so many blocks."""
    asked = sum(len(prompt) for prompt in prompts)
    hits = {name: through_flow(prompts, capacity, make) for name, make in POLICIES.items()}
    if check:
        bare = {name: through_policy(prompts, capacity, make) for name, make in POLICIES.items()}
        assert bare == hits, f"the store and a bare policy disagree: {hits}, {bare}"
        assert hits["lru"] == prefix_lru(prompts, capacity), "LRU is not LRU"
    hits["belady"] = belady(prompts, capacity)
    return {name: count / asked for name, count in hits.items()}


def picture(result: dict[str, Any]) -> str:
    """The rates as bars, one group per capacity, as SVG."""
    groups = result["hit_rate"]
    colours = {name: colour for name, colour in COLOURS.items() if name in next(iter(groups.values()))}
    top = max(max(rates.values()) for rates in groups.values()) or 1.0
    wide = 30
    step = len(colours) * wide + 30
    parts = []
    for number, (capacity, rates_of) in enumerate(groups.items()):
        left = 30 + number * step
        for place, (name, colour) in enumerate(colours.items()):
            height = 200 * rates_of[name] / top
            x, y = left + place * wide, 275 - height
            parts.append(svg.bar(x, y, wide - 4, height, colour))
            parts.append(svg.label(x + wide / 2 - 2, y - 4, f"{100 * rates_of[name]:.1f}", middle=True))
        parts.append(svg.label(left + len(colours) * wide / 2, 291, capacity, middle=True))
    title = "Blocks found, % of those asked for, by capacity in blocks"
    body = "".join(parts) + svg.legend(30, 316, colours, 80)
    return svg.page(30 + len(groups) * step, 330, title, title, body)


def _capacity(text: str) -> str:
    if text != "infinite" and (not text.isdecimal() or int(text) < 1):
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of blocks, nor `infinite`")
    return text


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.policies", description=__doc__)
    parser.add_argument("trace", type=Path, metavar="TRACE", help="file of JSON lines with hash_ids")
    parser.add_argument("--capacity", nargs="+", type=_capacity, default=CAPACITIES, help="blocks, or `infinite`")
    parser.add_argument("--json", action="store_true", help="print the result as JSON")
    parser.add_argument("--check", action="store_true", help="replay without the store as well, and compare")
    parser.add_argument("--save", action="store_true", help="write results/policies.json and results/policies.svg")
    options = parser.parse_args()
    try:
        prompts = read_trace(options.trace)
    except (OSError, ValueError, KeyError, TypeError) as error:
        parser.error(f"the trace {options.trace} cannot be read: {error!r}")
    if not any(prompts):
        parser.error(f"the trace {options.trace} asks for no blocks")
    distinct = len({block for prompt in prompts for block in prompt})
    result: dict[str, Any] = {"default_policy": POLICY_DEFAULT, "hit_rate": {}}
    for text in options.capacity:
        capacity = distinct if text == "infinite" else int(text)
        print(f"{text} blocks", file=sys.stderr, flush=True)
        result["hit_rate"][text] = rates(prompts, capacity, options.check)
    if options.save:
        from benchmarks._report import write_result

        about = {"prompts": len(prompts), "blocks": sum(map(len, prompts)), "distinct": distinct}
        write_result("policies", {"trace": about, **result})
        (RESULTS / "policies.svg").write_text(picture(result), encoding="utf-8")
    if options.json:
        print(json.dumps(result))
        return 0
    for capacity_text, of_policy in result["hit_rate"].items():
        line = "  ".join(f"{name} {100 * rate:5.2f}" for name, rate in of_policy.items())
        print(f"{capacity_text:>9} blocks  {line}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
