"""What the tiers cost when nothing hits: random prompts, tiers on against off, in turn.

``python -m benchmarks.no_hit_overhead [--rounds N] [--dtype D]``. Both engines run the same model object in one
process. Every round asks both for a batch of new random prompts; the order alternates. The limit is 0 %: prefill and
decode are the same work. CPU seconds count all threads and the spills; wall seconds also count busy neighbours. Both
move by more than the overhead on a shared machine, so the engine thread's own time in tier code is measured as well.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks import models
from benchmarks._report import median_spread, write_result
from stowage.config.memory import Memory
from stowage.engine.engine import Engine
from stowage.engine.sampling_params import SamplingParams

PROMPTS, PROMPT_TOKENS, NEW_TOKENS = 2, 256, 16


def batch_s(engine: Engine, seed: int) -> tuple[float, float]:
    """Wall seconds and CPU seconds (all threads, spills included) of a batch of prompts that nobody has seen."""
    prompts = [models.random_tokens(PROMPT_TOKENS, seed=seed * PROMPTS + i) for i in range(PROMPTS)]
    params = SamplingParams(max_new_tokens=NEW_TOKENS, ignore_eos=True)
    began_s, began_cpu_s = time.perf_counter(), time.process_time()
    for completion in engine.generate(list(prompts), params):
        assert not sum(completion.reused_tokens.values())
    elapsed_s = time.perf_counter() - began_s
    engine.flush()
    return elapsed_s, time.process_time() - began_cpu_s


class TierClock:
    """Seconds that an engine's own thread spends in the store and on copies to the arena: the whole cost of a miss."""

    def __init__(self, engine: Engine) -> None:
        self.spent_s = 0.0
        store, transfer = engine.store, engine.parts.transfer
        assert store is not None and transfer is not None
        for owner, names in ((store, ("lookup", "fetch", "reserve", "commit", "poll")), (transfer, ("store",))):
            for name in names:
                setattr(owner, name, self._timed(getattr(owner, name)))

    def _timed(self, work: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*arguments: Any) -> Any:
            began_s = time.perf_counter()
            result = work(*arguments)
            self.spent_s += time.perf_counter() - began_s
            return result

        return timed


def measure(model: Any, rounds: int, directory: Path) -> tuple[dict[str, list[tuple[float, float]]], float]:
    seconds: dict[str, list[tuple[float, float]]] = {"off": [], "on": []}
    limits = {"host_memory": "512MiB", "disk": f"{directory / 'cache'}:2GiB"}
    with (
        Engine(model, Memory(kv_cache_memory="256MiB")) as off,
        Engine(model, Memory(kv_cache_memory="256MiB", **limits)) as on,
    ):
        engines = {"off": off, "on": on}
        for name, engine in engines.items():
            batch_s(engine, seed=10**6 + (name == "on"))
        clock = TierClock(on)
        for number in range(rounds):
            for name in ("off", "on") if number % 2 else ("on", "off"):
                seconds[name].append(batch_s(engines[name], seed=number * 2 + (name == "on")))
    return seconds, clock.spent_s / sum(wall for wall, _ in seconds["on"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--dtype", default=models.native_dtype(), choices=["bfloat16", "float32"])
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="stowage-bench-") as directory:
        seconds, tier_share = measure(models.half_billion(options.dtype), options.rounds, Path(directory))
    kept: dict[str, Any] = {"share_of_time_in_tier_code": tier_share}
    print(f"time in look-ups, reservations and copies to host: {tier_share:.3%} of the batches with tiers on")
    for place, kind in enumerate(("wall", "cpu")):
        stats = {name: median_spread([pair[place] for pair in pairs]) for name, pairs in seconds.items()}
        ratios = [on[place] / off[place] for on, off in zip(seconds["on"], seconds["off"], strict=True)]
        ratio = median_spread(ratios)
        kept[kind] = {"seconds": stats, "ratio_on_to_off": ratio}
        print(
            f"{kind:<4} off {stats['off'].median:.3f} s, on {stats['on'].median:.3f} s per batch of {PROMPTS} x "
            f"({PROMPT_TOKENS} + {NEW_TOKENS}) tokens; overhead, median of pairs {ratio.median - 1:+.2%} "
            f"({ratio.least - 1:+.2%} to {ratio.largest - 1:+.2%})"
        )
    write_result("no_hit_overhead", kept | vars(options))


if __name__ == "__main__":
    main()
