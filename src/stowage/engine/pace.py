"""How fast this engine computes and its tiers deliver, as measured while it runs: loading must not be slower than
computing.

Owns two kinds of moving averages. Never blocks a first try: what has not been measured yet is taken to be worth it.
"""

from __future__ import annotations

from collections.abc import Mapping

_NEWEST_SHARE = 0.25
_DEADLINE_LEAST_S = 0.05
_FORGIVENESS = 1.25


class Pace:
    """Prefill rate (tokens per second) and delivery rate of each tier (bytes per second)."""

    def __init__(self, load_timeout_s: float) -> None:
        self._load_timeout_s = load_timeout_s
        self.prefill_tokens_per_s = 0.0
        self.bytes_per_s: dict[int, float] = {}

    def computed(self, tokens: int, seconds: float) -> None:
        """A forward that was mostly prefill took ``seconds``."""
        self.prefill_tokens_per_s = _blend(self.prefill_tokens_per_s, tokens / max(seconds, 1e-9))

    def loaded(self, tier: int, nbytes: int, seconds: float) -> None:
        """``nbytes`` came from ``tier`` in ``seconds``."""
        self.bytes_per_s[tier] = _blend(self.bytes_per_s.get(tier, 0.0), nbytes / max(seconds, 1e-9))

    def forget(self) -> None:
        """As if nothing had been measured: the next loads are tried, whatever they cost."""
        self.prefill_tokens_per_s = 0.0
        self.bytes_per_s.clear()

    def recompute_s(self, tokens: int) -> float | None:
        """Predicted time to compute ``tokens``; ``None`` before anything was measured."""
        return tokens / self.prefill_tokens_per_s if self.prefill_tokens_per_s else None

    def worth_loading(self, tokens: int, bytes_of_tier: Mapping[int, int]) -> bool:
        """Whether loading these bytes is predicted to take no longer than computing ``tokens``."""
        recompute_s = self.recompute_s(tokens)
        if recompute_s is None:
            return True
        measured = {tier: nbytes for tier, nbytes in bytes_of_tier.items() if tier in self.bytes_per_s}
        if sum(nbytes / self.bytes_per_s[tier] for tier, nbytes in measured.items()) <= recompute_s:
            return True
        for tier in measured:  # nothing measures a tier that is refused: trust the measurement a little less each time
            self.bytes_per_s[tier] *= _FORGIVENESS
        return False

    def load_limit_s(self, tokens: int) -> float:
        """How long a load that saves ``tokens`` may take (case F6)."""
        recompute_s = self.recompute_s(tokens)
        if recompute_s is None:
            return self._load_timeout_s
        return min(self._load_timeout_s, max(recompute_s, _DEADLINE_LEAST_S))


def _blend(old: float, new: float) -> float:
    return new if not old else old + _NEWEST_SHARE * (new - old)
