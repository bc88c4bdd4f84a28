"""Llama 3's way to scale rotary embeddings, found again from what a GGUF file keeps of it: what each frequency is
divided by.

The longest waves are divided by the factor, the shortest by 1, and those between by something between. Four numbers say
which are which; only their ratios matter, so the lower bound is 1 here, as in all models that are published.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

_TOKENS, _LOW, HIGH = 8192, 1.0, 4.0
"""Of Meta's own models, and nearly all others."""
_POWERS: Final = range(8, 21)
_NEAR: Final = 1e-5


def scaling_of(factors: NDArray[np.float32], theta: float, high: float) -> dict[str, Any] | None:
    """``rope_parameters`` without the base, which is ``theta``; ``None``: the factors are not made in this way. With
    ``high`` = 1 (Llama 4) there is nothing between short and long waves.
    """
    factor = float(str(factors.max()))
    waves = 2 * np.pi * theta ** (np.arange(len(factors)) / len(factors))
    for tokens, upper in _candidates(factors, factor, waves, high):
        if np.allclose(_factors(waves, factor, tokens, upper), factors, rtol=_NEAR, atol=0):
            return {
                "rope_type": "llama3",
                "factor": factor,
                "low_freq_factor": _LOW,
                "high_freq_factor": upper,
                "original_max_position_embeddings": tokens,
            }
    return None


def _factors(waves: NDArray[np.float64], factor: float, tokens: int, high: float) -> NDArray[np.float64]:
    smooth = (tokens / waves - _LOW) / max(high - _LOW, 1e-9)
    between = 1 / ((1 - smooth) / factor + smooth)
    short, long = waves < tokens / high, waves > tokens / _LOW
    return np.where(long, factor, np.where(short, 1.0, between))


def _candidates(
    factors: NDArray[np.float32], factor: float, waves: NDArray[np.float64], high: float
) -> Iterator[tuple[int, float]]:
    """Lengths that a model was first trained with, and bounds of short waves: the usual ones first."""
    yield _TOKENS, high
    inner = (factors > 1 + _NEAR) & (factors < factor * (1 - _NEAR))
    smooth = (1 / factors[inner].astype(np.float64) - 1 / factor) / (1 - 1 / factor) if inner.any() else np.empty(0)
    for wave, part in zip(waves[inner], smooth, strict=True):
        yield round(wave * (part * (high - _LOW) + _LOW)), high
    if len(smooth) > 1:  # smooth = (tokens / wave - 1) / (high - 1): a line over 1 / wave
        slope, begin = np.polyfit(1 / waves[inner], smooth, 1)
        if begin < 0:
            yield round(-slope / begin), round(1 - 1 / float(begin), 4)
    if not len(smooth):
        yield from ((1 << power, high) for power in _POWERS)
