"""Transfers in flight between host memory and the lower tiers, from start to report.

    begin --> in flight --> reported
                  └──(deadline)──> late --> reported

A flight stays until its tier reports it, however late: until then its slots belong to the transfer. A late flight
counts once as a failure of its tier; the keys of a late load are neither requested again nor waited for. Each tier's
circuit breaker is told how its flights ended.

The flow decides what is transferred, and what becomes of the slots.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from stowage.cache.circuit_breaker import Breaker
from stowage.core.geometry import BoolArray, IntArray, MaskArray


@dataclass(slots=True, eq=False)
class Flight:
    """A transfer that has not been reported. `full_masks`: the blocks that each chunk can have."""

    tier: int
    is_load: bool
    keys: list[bytes]
    slots: IntArray
    full_masks: MaskArray
    payload_bytes: int
    deadline_s: float
    late: bool = False


class Flights:
    """Flights by id. `late_keys`: the keys of late loads; read-only for others."""

    __slots__ = ("_breakers", "_flights", "late_keys")

    def __init__(self, breakers: Sequence[Breaker]) -> None:
        self._breakers = breakers
        self._flights: dict[int, Flight] = {}
        self.late_keys: set[bytes] = set()

    def __len__(self) -> int:
        return len(self._flights)

    def begin(self, flight_id: int, flight: Flight) -> None:
        """A transfer starts; its tier's breaker allows it."""
        self._flights[flight_id] = flight
        self._breakers[flight.tier].begin()

    def end(
        self, flight_id: int, ok: BoolArray, masks: MaskArray, now_s: float, refused: bool = False
    ) -> tuple[Flight, BoolArray, MaskArray] | None:
        """A tier reports a transfer. Returns the flight, and which of its chunks arrived, with their valid blocks.

        A `refused` transfer is no failure of the tier: a full disk must not stop loads. A report of the wrong shape
        counts as failure, as does a loaded chunk without valid blocks. None: the id is unknown.
        """
        flight = self._flights.pop(flight_id, None)
        if flight is None:
            return None
        if len(ok) != len(flight.keys) or len(masks) != len(flight.keys):
            ok, masks = np.zeros(len(flight.keys), bool), np.zeros(len(flight.keys), np.uint64)
        if flight.is_load:
            self.late_keys.difference_update(flight.keys)
            masks = masks & flight.full_masks
            ok = ok & (masks != 0)
        breaker = self._breakers[flight.tier]
        if ok.any():
            breaker.succeeded()
        elif refused and not flight.late:
            breaker.untried()
        elif not flight.late:
            breaker.failed(now_s)
        return flight, ok, masks

    def mark_late(self, now_s: float) -> int:
        """Mark flights past their deadline as late. Returns how many there were."""
        overdue = [flight for flight in self._flights.values() if not flight.late and flight.deadline_s <= now_s]
        for flight in overdue:
            flight.late = True
            self._breakers[flight.tier].failed(now_s)
            if flight.is_load:
                self.late_keys.update(flight.keys)
        return len(overdue)

    def deadlines_s(self) -> list[float]:
        """Deadlines of flights that are not late."""
        return [flight.deadline_s for flight in self._flights.values() if not flight.late]

    def loads(self) -> list[Flight]:
        """Flights that fill their slots."""
        return [flight for flight in self._flights.values() if flight.is_load]

    def stores(self) -> list[Flight]:
        """Flights that read their slots."""
        return [flight for flight in self._flights.values() if not flight.is_load]

    def check(self) -> None:
        """Assert the invariants."""
        late = {key for flight in self.loads() if flight.late for key in flight.keys}
        assert self.late_keys == late, "the overdue keys are not those of the overdue flights"
