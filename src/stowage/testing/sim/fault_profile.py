"""Which faults a world has, and how often: drawn from its seed, most of them absent (so that few hide each other).
Of worlds of the disk here; those of the engine have a profile of their own, with other faults.

Rates are per operation. `FaultProfile.strikes` alone decides, and counts what it decided.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import ClassVar, Final, Self

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

RARE: Final = frozenset({"read_hung", "write_hung", "read_never", "write_never"})


@dataclass(slots=True)
class FaultProfile:
    """`rates[fault]` is the chance that it strikes an operation of its kind."""

    chance: random.Random
    rates: dict[str, float]
    struck: Counter[str] = field(default_factory=Counter)
    faults: ClassVar[Sequence[str]] = FAULTS
    rare: ClassVar[frozenset[str]] = RARE
    share_calm: ClassVar[float] = 0.15
    """Of worlds that have none."""
    share_active: ClassVar[float] = 0.2
    """Of faults that another world has."""
    exponents: ClassVar[tuple[float, float, float]] = (-2.5, -0.5, -1.7)
    """Of ten: the least rate, the highest, and that of what is rare."""

    @classmethod
    def draw(cls, chance: random.Random) -> Self:
        """Some worlds are calm; in the others some faults are there, now and then or often."""
        if chance.random() < cls.share_calm:
            return cls(chance, {})
        least, most, most_if_rare = cls.exponents
        rates = {}
        for fault in cls.faults:
            if chance.random() < cls.share_active:
                rates[fault] = 10 ** chance.uniform(least, most_if_rare if fault in cls.rare else most)
        return cls(chance, rates)

    def strikes(self, fault: str) -> bool:
        """Whether the fault strikes this operation."""
        rate = self.rates.get(fault)
        if rate is None or self.chance.random() >= rate:
            return False
        self.struck[fault] += 1
        return True
