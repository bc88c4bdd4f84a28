"""Loads that are read together: transfers under way, in bundles of nearly one deadline. No I/O, no threads."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

from stowage.storage.disk.read_plan import Plan
from stowage.storage.flight import Flight

NEAR_S: Final = 0.05
"""Deadlines that differ by no more count as one."""


@dataclass(slots=True, eq=False)
class LoadFlight(Flight):
    """One load under way. `chunks_left`: so many were planned and have not been read yet."""

    chunks_left: int = 0


Share = tuple[LoadFlight, list[int], list[int]]
"""A flight, which of some chunks are its, and where they stand in it."""


@dataclass(slots=True, eq=False)
class Bundle:
    """Flights of nearly one deadline, planned together. Chunks are numbered through: `starts[i]` is flight i's first.

    Flights are added while others are being read: only at the end, so that no number changes its meaning. `first_s` is
    the deadline of the first one, `deadline_s` the last of all. It may wait for others until `limit_s`.
    """

    first_s: float
    limit_s: float = -math.inf
    deadline_s: float = -math.inf
    flights: list[LoadFlight] = field(default_factory=list)
    starts: list[int] = field(default_factory=list)
    keys: list[bytes] = field(default_factory=list)
    buffers: list[memoryview] = field(default_factory=list)
    plan: Plan | None = None

    def suits(self, flight: LoadFlight) -> bool:
        """Whether the flight belongs here."""
        deadline_s = flight.transfer.deadline_s
        return deadline_s == self.first_s or abs(deadline_s - self.first_s) <= NEAR_S

    def add(self, flights: Sequence[LoadFlight]) -> None:
        for flight in flights:
            self.deadline_s = max(self.deadline_s, flight.transfer.deadline_s)
            self.flights.append(flight)
            self.starts.append(len(self.keys))
            self.keys += flight.transfer.keys
            self.buffers += flight.transfer.buffers

    def share(self, positions: list[int]) -> list[Share]:
        """The flights that have these chunks."""
        if len(self.flights) == 1:
            return [(self.flights[0], list(range(len(positions))), positions)]
        shares: dict[int, Share] = {}
        for at, position in enumerate(positions):
            number = bisect_right(self.starts, position) - 1
            _, mine, indices = shares.setdefault(number, (self.flights[number], [], []))
            mine.append(at)
            indices.append(position - self.starts[number])
        return list(shares.values())
