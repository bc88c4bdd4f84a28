"""What goes wrong in a world of the engine, and how often."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import ClassVar, Final

from stowage.testing.sim.fault_profile import FaultProfile

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
RARE: Final = frozenset({"broken", "hiccup", "undelivered", "load_hung"})


@dataclass(slots=True)
class EngineFaults(FaultProfile):
    """`violations`: what was found wrong where the engine would take a raised error for a model's or a tier's."""

    violations: list[str] = field(default_factory=list)
    faults: ClassVar[Sequence[str]] = FAULTS
    rare: ClassVar[frozenset[str]] = RARE
    share_calm: ClassVar[float] = 0.2
    share_active: ClassVar[float] = 0.25
    exponents: ClassVar[tuple[float, float, float]] = (-3.0, -0.3, -1.7)
