"""Time to first token of Transformers' ``generate`` with a restored prefix of 4,096 tokens, against plain ``generate``.

``python -m benchmarks.library_prefix [--rounds N] [--prefix-tokens N] [--dtype D]``. Every round has a prefix of its
own and asks in turn: plain, nothing stored (``restore`` finds nothing, ``keep`` follows), plain, from host memory,
plain, from disk (page cache dropped). So each way has a plain one right before it, and is compared with that one. The
time is that of ``restore`` and ``generate(max_new_tokens=1)`` together; a question of 32 new tokens follows each
prefix.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from benchmarks import _prefix, limits, models
from benchmarks._report import median_spread
from stowage import PrefixCache

QUESTION_TOKENS = 32
WAYS = ("cold", "host", "disk")


def first_token_s(model: Any, prompt: list[int], prefixes: PrefixCache | None) -> tuple[float, float, Any, Any]:
    """Seconds to the first token, of which ``restore`` took so many; the cache and all tokens."""
    import torch

    ids = torch.tensor([prompt])
    began_s = time.perf_counter()
    cache = prefixes.restore(ids) if prefixes is not None else None
    restore_s = time.perf_counter() - began_s
    with torch.inference_mode():
        out = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            past_key_values=cache,
            max_new_tokens=1,
            do_sample=False,
            eos_token_id=None,
            pad_token_id=0,
        )
    return time.perf_counter() - began_s, restore_s, cache, out


def prompts(prefix_tokens: int, number: int) -> Iterator[list[int]]:
    """Prompts of one round: the same prefix, and another question each time."""
    prefix = models.random_tokens(prefix_tokens, seed=number)
    for question in itertools.count(100 * number):
        yield prefix + models.random_tokens(QUESTION_TOKENS, seed=10**7 + question)


def measure(model: Any, prefix_tokens: int, rounds: int, directory: Path) -> dict[str, Any]:
    """Seconds of every way and of the plain one before it, of ``restore`` and of ``keep``; bytes of a prefix."""
    ways: dict[str, list[float]] = {way: [] for way in WAYS}
    plain: dict[str, list[float]] = {way: [] for way in WAYS}
    restore: dict[str, list[float]] = {way: [] for way in WAYS}
    keep_s: list[float] = []
    with PrefixCache(model, "1GiB", f"{directory / 'cache'}:4GiB") as prefixes:
        first_token_s(model, models.random_tokens(64, seed=10**6), None)
        for number in range(rounds):
            asked = prompts(prefix_tokens, number)
            for way in WAYS:
                if way == "disk":
                    assert prefixes.flush(300)
                    prefixes.drop_host()
                    limits.drop_page_cache()
                plain[way].append(first_token_s(model, next(asked), None)[0])
                before = prefixes.stats()["prefixes"]["tokens_restored"]
                elapsed_s, restore_s, cache, out = first_token_s(model, next(asked), prefixes)
                found = prefixes.stats()["prefixes"]["tokens_restored"] - before
                assert found == (0 if way == "cold" else prefix_tokens // 64 * 64), (way, found)
                ways[way].append(elapsed_s)
                restore[way].append(restore_s)
                if way == "cold":
                    began_s = time.perf_counter()
                    prefixes.keep(cache, out)
                    keep_s.append(time.perf_counter() - began_s)
        nbytes = prefixes.stats()["prefixes"]["bytes_kept"] // rounds
    return {"ways": ways, "plain": plain, "restore": restore, "keep_s": keep_s, "prefix_bytes": nbytes}


def report(found: dict[str, Any], show: Callable[[str], None] = print) -> dict[str, Any]:
    """Print medians, spreads and ratios; the numbers to keep."""
    everything = [value for values in found["plain"].values() for value in values]
    plain = median_spread(everything)
    kept: dict[str, Any] = {"prefix_bytes": found["prefix_bytes"], "ttft_s": {"plain": plain}, "of_plain": {}}
    kept |= {"restore_s": {}, "keep_s": median_spread(found["keep_s"])}
    show(f"plain  TTFT {plain.median * 1000:9.1f} ms  ({plain.least * 1000:.1f} to {plain.largest * 1000:.1f})")
    for way in WAYS:
        spread = median_spread(found["ways"][way])
        ratios = [a / b for a, b in zip(found["ways"][way], found["plain"][way], strict=True)]
        kept["ttft_s"][way], kept["of_plain"][way] = spread, median_spread(ratios)
        kept["restore_s"][way] = median_spread(found["restore"][way])
        show(
            f"{way:<6} TTFT {spread.median * 1000:9.1f} ms  ({spread.least * 1000:.1f} to {spread.largest * 1000:.1f}) "
            f" {kept['of_plain'][way].median:7.2%} of the plain one before it "
            f"({min(ratios):.2%} to {max(ratios):.2%}); restore {kept['restore_s'][way].median * 1000:.1f} ms"
        )
    show(f"keep   {kept['keep_s'].median * 1000:.1f} ms for {found['prefix_bytes'] / 1e6:.0f} MB")
    return kept


def main() -> None:
    _prefix.run("library_prefix", __doc__, measure, report)


if __name__ == "__main__":
    main()
