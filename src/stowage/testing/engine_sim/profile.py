"""What goes wrong in a world of the engine, and how often."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import dataclass, field
from typing import Final

__all__ = ["FAULTS", "EngineFaults"]

FAULTS: Final = (
    "undelivered",
    "hiccup",
    "broken",
    "copy_out_fails",
    "copy_in_fails",
    "lookup_raises",
    "lookup_lies",
    "load_raises",
    "load_fails",
    "load_slow",
    "load_hung",
    "store_raises",
    "store_fails",
    "store_slow",
    "store_refused",
    "poll_raises",
    "poll_lies",
    "discard_raises",
    "probe_raises",
    "probe_slow",
    "callback_raises",
)
"""What model, copies, tiers and clients may do."""
SHARE_CALM: Final = 0.2
SHARE_ACTIVE: Final = 0.25
RARE: Final = frozenset({"broken", "hiccup", "undelivered", "load_hung"})


@dataclass(slots=True)
class EngineFaults:
    """`rates[fault]` is the chance that it strikes an operation of its kind."""

    chance: random.Random
    rates: dict[str, float]
    struck: Counter[str] = field(default_factory=Counter)
    violations: list[str] = field(default_factory=list)
    """What was found wrong where the engine would take what is raised for a fault of the model or of a tier."""

    @classmethod
    def draw(cls, chance: random.Random) -> EngineFaults:
        """Calm in one world of five; else one fault in four is there, now and then or often."""
        rates = {}
        if chance.random() >= SHARE_CALM:
            for fault in FAULTS:
                if chance.random() < SHARE_ACTIVE:
                    rates[fault] = 10 ** chance.uniform(-3.0, -1.7 if fault in RARE else -0.3)
        return cls(chance, rates)

    def strikes(self, fault: str) -> bool:
        """Whether the fault strikes this operation."""
        rate = self.rates.get(fault)
        if rate is None or self.chance.random() >= rate:
            return False
        self.struck[fault] += 1
        return True
