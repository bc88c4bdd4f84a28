"""Time to first token with a shared prefix of 4,096 tokens: computed, and reused from device, host and disk.

``python -m benchmarks.prefix_reuse [--rounds N] [--prefix-tokens N] [--dtype D]``. Every round asks in turn: plain
Transformers, our engine cold, device hit, host hit, disk hit (page cache dropped). A hit's load time is the time until
its bytes are in device blocks (host) or in the arena, verified (disk); it is held against the bandwidth of memory and
disk, measured in the same round.

The default data type is bfloat16 where the processor multiplies it natively, and float32 elsewhere: without such
instructions bfloat16 prefill is several times slower than float32, which would flatter every hit.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks import _prefix, limits, models
from benchmarks._report import median_spread
from stowage.config.memory import Memory
from stowage.engine.engine import Engine
from stowage.engine.sampling_params import SamplingParams

QUESTION_TOKENS = 32
WAYS = ("transformers", "cold", "device", "host", "disk")
ONE_TOKEN = SamplingParams(max_new_tokens=1, ignore_eos=True)


class Stopwatch:
    """Seconds that an engine spends on promoting chunks and on copying them into device blocks."""

    def __init__(self, engine: Engine) -> None:
        self.promote_s = self.copy_s = 0.0
        store, transfer = engine.store, engine.parts.transfer
        assert store is not None and transfer is not None
        self._fetch, self._load = store.fetch, transfer.load
        self._began_s = 0.0
        store.fetch = self.fetch  # type: ignore[method-assign]
        transfer.load = self.load  # type: ignore[method-assign]

    def fetch(self, *args: Any) -> Any:
        self._began_s = time.perf_counter()
        return self._fetch(*args)

    def load(self, *args: Any) -> None:
        began_s = time.perf_counter()
        self.promote_s = began_s - self._began_s
        self._load(*args)
        self.copy_s = time.perf_counter() - began_s


def plain_ttft_s(model: Any, prompt: list[int]) -> float:
    """Transformers' own ``generate`` of one token, with its own attention."""
    import torch

    before = model.config._attn_implementation
    model.set_attn_implementation("sdpa")
    ids = torch.tensor([prompt])
    began_s = time.perf_counter()
    with torch.inference_mode():
        model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=1, do_sample=False, pad_token_id=0)
    elapsed_s = time.perf_counter() - began_s
    model.set_attn_implementation(before)
    return elapsed_s


def measure(model: Any, prefix_tokens: int, rounds: int, directory: Path) -> dict[str, Any]:
    """Seconds per way and round, load seconds of hits, and the limits."""
    memory = Memory(kv_cache_memory="768MiB", host_memory="1GiB", disk=f"{directory / 'cache'}:4GiB")
    seconds: dict[str, list[float]] = {way: [] for way in WAYS}
    loads: dict[str, list[float]] = {"host": [], "disk": []}
    rates: dict[str, list[float]] = {"memcpy": [], "disk": []}
    with Engine(model, memory) as engine:
        watch = Stopwatch(engine)
        group = engine.parts.layout.groups[0]
        engine.generate([models.random_tokens(64, seed=10**6)], ONE_TOKEN)

        def ask(prompt: list[int], tier: str) -> float:
            (completion,) = engine.generate([prompt], ONE_TOKEN)
            reused = completion.reused_tokens.get(tier, 0)
            assert tier == "cold" or reused >= prefix_tokens - group.chunk_tokens, (tier, completion.reused_tokens)
            return completion.ttft_s

        for number in range(rounds):
            prefix = models.random_tokens(prefix_tokens, seed=number)
            questions = iter(range(number * 10, number * 10 + 10))

            def prompt(prefix: list[int] = prefix, questions: Any = questions) -> list[int]:
                return prefix + models.random_tokens(QUESTION_TOKENS, seed=10**7 + next(questions))

            seconds["transformers"].append(plain_ttft_s(model, prompt()))
            seconds["cold"].append(ask(prompt(), "cold"))
            seconds["device"].append(ask(prompt(), "device"))
            engine.drop_device_cache()
            seconds["host"].append(ask(prompt(), "host"))
            loads["host"].append(watch.copy_s)
            rates["memcpy"].append(limits.memcpy_bytes_per_s())
            assert engine.flush(120)
            engine.drop_device_cache()
            engine.drop_host()
            limits.drop_page_cache()
            before = limits.direct_read_bytes_per_s(directory)
            seconds["disk"].append(ask(prompt(), "disk"))
            loads["disk"].append(watch.promote_s)
            rates["disk"].append((before + limits.direct_read_bytes_per_s(directory)) / 2)
        nbytes = prefix_tokens // group.chunk_tokens * group.bytes_per_chunk
    return {"seconds": seconds, "load_s": loads, "limit_bytes_per_s": rates, "prefix_bytes": nbytes}


def report(found: dict[str, Any], show: Callable[[str], None] = print) -> dict[str, Any]:
    """Print medians, spreads, ratios and limits; the numbers to keep."""
    cold_s = median_spread(found["seconds"]["cold"]).median
    kept: dict[str, Any] = {"prefix_bytes": found["prefix_bytes"], "ttft_s": {}, "of_cold": {}, "loads": {}}
    for way, values in found["seconds"].items():
        spread = median_spread(values)
        kept["ttft_s"][way], kept["of_cold"][way] = spread, spread.median / cold_s
        least, largest = spread.least * 1000, spread.largest * 1000
        show(
            f"{way:<13} TTFT {spread.median * 1000:9.1f} ms  ({least:.1f} to {largest:.1f})  "
            f"{spread.median / cold_s:6.2%} of cold"
        )
    for tier, limit in (("host", "memcpy"), ("disk", "disk")):
        rates = [found["prefix_bytes"] / load_s for load_s in found["load_s"][tier]]
        most = found["limit_bytes_per_s"][limit]
        share = median_spread([rate / limit_rate for rate, limit_rate in zip(rates, most, strict=True)])
        kept["loads"][tier] = {"bytes_per_s": median_spread(rates), "limit_bytes_per_s": median_spread(most)}
        kept["loads"][tier]["share_of_limit"] = share
        show(
            f"{tier} load: {statistics.median(rates) / 1e9:.2f} GB/s of {statistics.median(most) / 1e9:.2f} GB/s "
            f"({limit}); share, median of rounds {share.median:.0%} ({share.least:.0%} to {share.largest:.0%})"
        )
    return kept


def main() -> None:
    _prefix.run("prefix_reuse", __doc__, measure, report)


if __name__ == "__main__":
    main()
