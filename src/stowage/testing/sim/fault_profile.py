"""Which faults a world has, and how often: drawn from its seed, most of them absent (so that few hide each other).

Rates are per operation. `FaultProfile.strikes` is the only place that decides, and counts what it decided.
"""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import dataclass, field
from typing import Final

__all__ = ["FAULTS", "FaultProfile"]

FAULTS: Final = (
    "read_eio",
    "read_short",
    "read_rot",
    "read_stale",
    "read_misdirected",
    "read_slow",
    "read_hung",
    "read_never",
    "write_eio",
    "write_enospc",
    "write_short",
    "write_torn",
    "write_misdirected",
    "write_lost",
    "write_slow",
    "write_hung",
    "write_never",
    "stored_rot",
    "allocate_enospc",
    "open_eio",
    "open_emfile",
    "truncate_eio",
    "unlink_eio",
    "listing_eio",
    "copy_out_fails",
    "copy_in_fails",
)
"""What the disk and the device may do, by operation. Crashes, power cuts and changed limits are the world's."""

SHARE_ACTIVE: Final = 0.2
SHARE_CALM: Final = 0.15
RARE: Final = frozenset({"read_hung", "write_hung", "read_never", "write_never"})


@dataclass(slots=True)
class FaultProfile:
    """`rates[fault]` is the chance that it strikes an operation of its kind."""

    chance: random.Random
    rates: dict[str, float]
    struck: Counter[str] = field(default_factory=Counter)

    @classmethod
    def draw(cls, chance: random.Random) -> FaultProfile:
        """Calm in one world of seven; else one fault in five is there, now and then or often."""
        if chance.random() < SHARE_CALM:
            return cls(chance, {})
        rates = {}
        for fault in FAULTS:
            if chance.random() < SHARE_ACTIVE:
                rates[fault] = 10 ** chance.uniform(-2.5, -1.7 if fault in RARE else -0.5)
        return cls(chance, rates)

    def strikes(self, fault: str) -> bool:
        """Whether the fault strikes this operation."""
        rate = self.rates.get(fault)
        if rate is None or self.chance.random() >= rate:
            return False
        self.struck[fault] += 1
        return True
