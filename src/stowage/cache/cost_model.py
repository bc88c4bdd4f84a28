"""The cost model: measured speeds of computing and loading, to decide whether loading a prefix is worth it.

Owns moving averages: seconds per forward, by power of two of its tokens, and bytes per second of each tier; and how
long a tier was last waited for in vain. A forward has a fixed cost (every weight is read), so sizes are measured
separately: short pieces after long hits say little about a long prefill. What has not been measured yet counts as worth
loading, with a deadline of the best possible compute time.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping

import numpy as np
from numpy.typing import NDArray

_NEWEST_SHARE, _NEWEST_SHARE_IF_FASTER = 0.25, 0.5
"""Disturbances only make a measurement longer, so a faster one weighs more."""
_DISTURBED_RATIO = 4.0
"""A forward that takes so many times as long as its like was disturbed: it counts as no longer than that."""
_SILENT_RATIO, _SILENT_RATIO_MAX = 2.0, 256.0
"""A tier that has brought nothing in time twice in a row is taken to need so many times as long, then the square of it,
up to a limit."""
_DEADLINE_LEAST_S = 0.05
_FORGIVENESS = 1.25
_PREFILL_TOKENS_LEAST = 16
_LOOKUP_SHARE = 0.05
"""Share of a prompt's compute time that it may wait for look-ups in shared tiers."""
LOOKUP_LEAST_S = 0.02
"""For short prompts: about two round trips to a near object store."""
_OVERLAP_RATIO, _OVERLAP_STEPS = 8.0, 2.0
"""Limits of `worth_overlapping`: ratio of the two times, and time won in steps (overlapping costs some extra steps)."""

_Point = tuple[float, float]
"""Tokens and seconds of a forward."""


def bytes_of_tiers(parts: Iterable[tuple[NDArray[np.int8], int]]) -> dict[int, int]:
    """Bytes that come from each tier below the host, which is number 0. ``parts``: for chunks of one size, the tier of
    each (negative: nowhere), and that size in bytes.
    """
    total: dict[int, int] = {}
    for sources, chunk_bytes in parts:
        for tier, count in enumerate(np.bincount(sources[sources > 0]).tolist()):
            if count:
                total[tier] = total.get(tier, 0) + count * chunk_bytes
    return total


class CostModel:
    """Seconds per forward, by size, and delivery rate of each tier (bytes per second).

    ``max_num_batched_tokens``: the longest forward, a longer prefill takes several. ``tokens_per_s_most``: a rate that
    no prefill exceeds, for a first deadline (a load that hangs right after a start costs no more than the recompute
    either); 0 when it is not known, then ``load_timeout_s`` alone bounds the first loads.
    """

    def __init__(
        self, load_timeout_s: float, max_num_batched_tokens: int = 1024, tokens_per_s_most: float = 0.0
    ) -> None:
        self.load_timeout_s = load_timeout_s
        self._max_num_batched_tokens = max_num_batched_tokens
        self._tokens_per_s_most = tokens_per_s_most
        self._forwards: dict[int, _Point] = {}
        self.bytes_per_s: dict[int, float] = {}
        self._least_s: dict[int, float] = {}
        """What a load from a tier that brought nothing in time is taken to need, be it ever so short."""
        self._silences: dict[int, tuple[int, float]] = {}
        """How often in a row, and when last."""
        self._learns = True

    def computed(self, tokens: int, seconds: float) -> None:
        """A forward of so many tokens took ``seconds``."""
        if not self._learns:
            return
        order = tokens.bit_length()
        old_tokens, old_s = self._forwards.get(order, (tokens, seconds))
        seconds = min(seconds, _DISTURBED_RATIO * old_s * tokens / old_tokens)
        share = _NEWEST_SHARE_IF_FASTER if seconds * old_tokens < old_s * tokens else _NEWEST_SHARE
        self._forwards[order] = (_blend(old_tokens, tokens, share), _blend(old_s, max(seconds, 1e-9), share))

    def loaded(self, tier: int, nbytes: int, seconds: float) -> None:
        """``nbytes`` came from ``tier`` in ``seconds``."""
        if not self._learns:
            return
        self._heard(tier)
        rate = nbytes / max(seconds, 1e-9)
        self.bytes_per_s[tier] = _blend(self.bytes_per_s.get(tier, rate), rate, _NEWEST_SHARE)

    def delivered(self, bytes_of_tier: Mapping[int, int], seconds: float) -> None:
        """A fetch of these bytes took ``seconds``, which counts for each of its tiers."""
        for tier, nbytes in bytes_of_tier.items():
            self.loaded(tier, nbytes, seconds)

    def missed(self, bytes_of_tier: Mapping[int, int], came: Mapping[int, int], seconds: float) -> None:
        """A fetch of these bytes ended after ``seconds`` with only ``came`` of them. Counts for tiers that delivered a
        part: see ``silent`` for those that delivered nothing, and one that delivered all may have been faster.
        """
        for tier, nbytes in bytes_of_tier.items():
            if 0 < came.get(tier, 0) < nbytes:
                self.loaded(tier, came[tier], seconds)

    def silent(self, tier: int, began_s: float, ended_s: float) -> None:
        """``tier`` brought nothing in that time. Its circuit breaker may stay closed, since it may still take stores.
        Fetches at the same time count once.
        """
        if not self._learns:
            return
        count, last_s = self._silences.get(tier, (0, -math.inf))
        if began_s < last_s:
            return
        self._silences[tier] = count + 1, ended_s
        if count:
            ratio = min(_SILENT_RATIO**count, _SILENT_RATIO_MAX)
            self._least_s[tier] = max(self._least_s.get(tier, 0.0), ratio * (ended_s - began_s))

    def _heard(self, tier: int) -> None:
        self._least_s.pop(tier, None)
        self._silences.pop(tier, None)

    def forget(self, for_good: bool = False) -> None:
        """Forget all measurements: the next loads are tried, whatever they cost. ``for_good``: so are all later ones,
        since nothing is measured any more.
        """
        self._learns = not for_good
        self._forwards.clear()
        self._tokens_per_s_most = 0.0
        self.bytes_per_s.clear()
        self._least_s.clear()
        self._silences.clear()

    @property
    def prefill_tokens_per_s(self) -> float:
        """Measured by the longest forwards so far; 0 if there were only decode steps."""
        tokens, seconds = self._forwards[max(self._forwards)] if self._forwards else (0.0, 1.0)
        return tokens / seconds if tokens >= _PREFILL_TOKENS_LEAST else 0.0

    def recompute_s(self, tokens: int) -> float | None:
        """Predicted time that is saved by not computing ``tokens``; ``None`` when nothing is known.

        At least one token is computed in any case, so a forward's fixed cost is not saved.
        """
        if self._forwards:
            return max(0.0, self.prefill_s(tokens + 1) - self.prefill_s(1))
        return tokens / self._tokens_per_s_most if self._tokens_per_s_most else None

    def prefill_s(self, tokens: int) -> float:
        """Predicted time of the forwards that compute ``tokens``; only when there were some."""
        whole, rest = divmod(tokens, self._max_num_batched_tokens)
        return whole * self._forward_s(self._max_num_batched_tokens) + (self._forward_s(rest) if rest else 0.0)

    def _forward_s(self, tokens: int) -> float:
        """Linear interpolation between the nearest measured sizes; beyond the longest, the overall slope."""
        points = [self._forwards[order] for order in sorted(self._forwards)]
        after = next((at for at, (size, _) in enumerate(points) if size >= tokens), len(points))
        (first, first_s), (last, last_s) = points[0], points[-1]
        if after == 0:
            return first_s * tokens / first
        if after < len(points):
            (low, low_s), (high, high_s) = points[after - 1], points[after]
            return low_s + (high_s - low_s) * (tokens - low) / (high - low)
        least_slope = 1 / self._tokens_per_s_most if self._tokens_per_s_most else 0.0
        if len(points) > 1:
            slope = min(max((last_s - first_s) / (last - first), least_slope), last_s / last)
        else:
            slope = least_slope or last_s / last
        return last_s + slope * (tokens - last)

    def worth_loading(self, tokens: int, bytes_of_tier: Mapping[int, int]) -> bool:
        """Whether loading these bytes is predicted to take no longer than computing ``tokens``."""
        recompute_s = self.recompute_s(tokens) if self._forwards else None
        if recompute_s is None:
            return True
        if self.load_s(bytes_of_tier) <= recompute_s:
            return True
        # A refused tier is not measured again: it is taken to be faster each time, until it gets another try.
        tier = self.slowest(bytes_of_tier)
        if tier in self.bytes_per_s:
            self.bytes_per_s[tier] *= _FORGIVENESS
        if tier in self._least_s:
            self._least_s[tier] /= _FORGIVENESS
        return False

    def slowest(self, bytes_of_tier: Mapping[int, int]) -> int:
        """The tier whose part of these bytes takes longest."""
        return max(bytes_of_tier, key=lambda tier: self.load_s({tier: bytes_of_tier[tier]}))

    def worth_overlapping(self, tokens: int, bytes_of_tier: Mapping[int, int]) -> bool:
        """Whether loading these bytes and computing ``tokens`` take so similar times that doing both, from either end,
        is much faster than the faster one: a ninth is won at ``_OVERLAP_RATIO``. False while nothing is known.
        """
        compute_s = self.recompute_s(tokens) if self._forwards else None
        if compute_s is None or any(tier not in self.bytes_per_s for tier in bytes_of_tier):
            return False
        load_s = self.load_s(bytes_of_tier)
        shorter_s = min(load_s, compute_s)
        won_s = shorter_s**2 / (load_s + compute_s) if shorter_s else 0.0
        return _OVERLAP_RATIO * shorter_s >= max(load_s, compute_s) and won_s > _OVERLAP_STEPS * self.prefill_s(1)

    def load_s(self, bytes_of_tier: Mapping[int, int]) -> float:
        """Predicted time to load these bytes; tiers without a measurement count 0."""
        return sum(
            max(nbytes / self.bytes_per_s.get(tier, math.inf), self._least_s.get(tier, 0.0))
            for tier, nbytes in bytes_of_tier.items()
        )

    def bounded(self, tier: int, least: float, most: float) -> None:
        """``tier`` was observed to deliver between ``least`` and ``most`` bytes per second."""
        if least:
            self._heard(tier)
        known = self.bytes_per_s.get(tier)
        if known is not None and least <= most and not least <= known <= most:
            self.bytes_per_s[tier] = _blend(known, least if known < least else most, _NEWEST_SHARE)

    def load_limit_s(self, tokens: int) -> float:
        """How long a load that saves ``tokens`` may take (case F6)."""
        recompute_s = self.recompute_s(tokens)
        if recompute_s is None:
            return self.load_timeout_s
        return min(self.load_timeout_s, max(recompute_s, _DEADLINE_LEAST_S))

    def lookup_limit_s(self, tokens: int, timeout_s: float) -> float:
        """How long a prompt with ``tokens`` reusable tokens may wait for look-ups in shared tiers."""
        recompute_s = self.recompute_s(tokens)
        return timeout_s if recompute_s is None else min(timeout_s, max(_LOOKUP_SHARE * recompute_s, LOOKUP_LEAST_S))


def _blend(old: float, new: float, share: float) -> float:
    return old + share * (new - old)
