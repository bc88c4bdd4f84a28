"""Which unit of weights lives where, and how it is delivered: budgets in, a plan out. Arithmetic only.

Residency is proof against a cyclic scan: what fits stays, the rest is read for every forward (a cache that keeps what
was used last would never hit). What is read is spread evenly between what stays, so that reading has time.
"""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum

from stowage.errors import BudgetError, ConfigError

__all__ = ["Cargo", "Delivery", "Placement", "Rule", "parse_rules", "place"]

PAGE_BYTES = 4096
RING_SLOTS, RING_SLOTS_LEAST = 3, 2
_DELIVERED = "resident, mapped, prefetch, stream"


class Delivery(StrEnum):
    """How a module gets its parameters.

    resident: they lie in device memory. mapped: a view over the checkpoint's file, mapped into memory; it counts as
    host memory. prefetch: copied from host memory into a ring of device buffers, ahead of time. stream: read from
    disk into that ring. rows: an embedding, of which the rows of a forward's tokens are read from disk.
    """

    RESIDENT = "resident"
    MAPPED = "mapped"
    PREFETCH = "prefetch"
    STREAM = "stream"
    ROWS = "rows"

    @property
    def rings(self) -> bool:
        return self in (Delivery.PREFETCH, Delivery.STREAM)

    @property
    def on_host(self) -> bool:
        return self in (Delivery.PREFETCH, Delivery.MAPPED)


@dataclass(frozen=True, slots=True)
class Cargo:
    """One unit. ``nbytes`` of its parameters, ``pieces``: how many. ``rows``: an embedding. ``layer``: its number among
    the model's repeated layers, -1 for another module.
    """

    name: str
    nbytes: int
    pieces: int
    rows: bool = False
    layer: int = -1

    @property
    def ring_bytes(self) -> int:
        """Of a slot that takes it, at most: each parameter may begin and end inside of a page."""
        return self.nbytes + 2 * PAGE_BYTES * self.pieces


@dataclass(frozen=True, slots=True)
class Rule:
    """``delivery`` for the units whose name ``pattern`` matches (as file names: ``*`` and ``?``), or, with ``every``
    above 0, for the ``last`` layers of every so many.
    """

    text: str
    delivery: Delivery
    pattern: str = "*"
    last: int = 0
    every: int = 0

    def matches(self, cargo: Cargo) -> bool:
        if self.every:
            return cargo.layer >= 0 and cargo.layer % self.every >= self.every - self.last
        return fnmatch.fnmatchcase(cargo.name, self.pattern)


_LAST = re.compile(r"last\s+(\d+)\s+of\s+(?:every\s+)?(\d+)")


def parse_rules(text: str) -> tuple[Rule, ...]:
    """Rules as users write them: ``auto`` (none), or ``PATTERN=DELIVERY`` and ``last K of N=DELIVERY``, with commas
    between.

    The first that matches decides. Raises ConfigError.
    """
    if text.strip() in ("", "auto"):
        return ()
    rules = []
    for part in text.split(","):
        pattern, equals, delivery = (word.strip() for word in part.rpartition("="))
        valid = [d.value for d in Delivery if d is not Delivery.ROWS]
        if not equals or not pattern or delivery not in valid:
            raise ConfigError(
                f"The rule {part.strip()!r} for weights is not understood. Write PATTERN=DELIVERY or last K of "
                f"N=DELIVERY, where DELIVERY is one of {_DELIVERED}; for example model.layers.*=stream"
            )
        match = _LAST.fullmatch(pattern)
        if match is None:
            rules.append(Rule(part.strip(), Delivery(delivery), pattern))
            continue
        last, every = int(match[1]), int(match[2])
        if not 1 <= last <= every:
            raise ConfigError(f"The rule {part.strip()!r} for weights takes {last} of {every} layers.")
        rules.append(Rule(part.strip(), Delivery(delivery), last=last, every=every))
    return tuple(rules)


@dataclass(frozen=True, slots=True)
class Placement:
    """A delivery for every unit, in the model's order, and the ring. ``small_bytes`` are parameters and buffers that
    are no unit's.
    """

    cargo: tuple[Cargo, ...]
    deliveries: tuple[Delivery, ...]
    ring_slots: int
    small_bytes: int

    def nbytes(self, *deliveries: Delivery) -> int:
        return sum(c.nbytes for c, d in zip(self.cargo, self.deliveries, strict=True) if d in deliveries)

    @property
    def slot_bytes(self) -> int:
        return max((c.ring_bytes for c, d in zip(self.cargo, self.deliveries, strict=True) if d.rings), default=0)

    @property
    def device_bytes(self) -> int:
        """Device memory: what is resident, and the ring."""
        return self.small_bytes + self.nbytes(Delivery.RESIDENT) + self.ring_slots * self.slot_bytes

    @property
    def host_bytes(self) -> int:
        return self.nbytes(Delivery.MAPPED, Delivery.PREFETCH)

    @property
    def pass_bytes(self) -> int:
        """Read from disk for one forward (of an embedding: nothing that counts)."""
        return self.nbytes(Delivery.STREAM)

    def of(self, name: str) -> Delivery:
        return self.deliveries[[c.name for c in self.cargo].index(name)]

    def check(self) -> None:
        assert len(self.cargo) == len(self.deliveries)
        ringed = sum(d.rings for d in self.deliveries)
        assert (self.ring_slots >= RING_SLOTS_LEAST) == (ringed > 0)
        assert all(c.rows for c, d in zip(self.cargo, self.deliveries, strict=True) if d is Delivery.ROWS)


def place(
    cargo: Sequence[Cargo],
    small_bytes: int,
    device_bytes: int | None,
    host_bytes: int = 0,
    rules: Iterable[Rule] = (),
) -> Placement:
    """Deliveries for ``cargo`` within the budgets; ``device_bytes`` of ``None`` has no limit.

    Rules are obeyed; everything else stays in device memory while it fits, then goes to host memory while that fits,
    then is streamed. Raises BudgetError when nothing fits, with the least budget that does; ConfigError for a rule
    that matches nothing.
    """
    fixed = _ruled(cargo, tuple(rules))
    if device_bytes is None:
        chosen = [fixed.get(c.name, Delivery.RESIDENT) for c in cargo]
        return _within_host(_placement(cargo, chosen, small_bytes, RING_SLOTS), host_bytes)
    whole = _placement(cargo, [fixed.get(c.name, Delivery.RESIDENT) for c in cargo], small_bytes, RING_SLOTS)
    if whole.device_bytes <= device_bytes:
        return _within_host(whole, host_bytes)
    needs = []
    for slots in (RING_SLOTS, RING_SLOTS_LEAST):
        least = [_least(cargo, fixed, small_bytes, host_bytes, slots, limit) for limit in _slot_limits(cargo, fixed)]
        needs += [placement.device_bytes for placement in least]
        filled = [
            _fill(placement, fixed, device_bytes, host_bytes)
            for placement in least
            if placement.device_bytes <= device_bytes
        ]
        if filled:
            return min(filled, key=lambda placement: placement.pass_bytes)
    raise BudgetError(
        f"the weights need at least {min(needs)} bytes of device memory, and {device_bytes} are left for them: "
        f"{small_bytes} bytes are norms and the like, which stay, and the largest module of "
        f"{max(c.nbytes for c in cargo)} "
        "bytes must fit, with room to read the next one meanwhile. Give device_memory a larger size."
    )


def _slot_limits(cargo: Sequence[Cargo], fixed: Mapping[str, Delivery]) -> list[int]:
    """How large a slot of the ring may be: no ring (0), or as large as one of the units."""
    ringed = [c.ring_bytes for c in cargo if c.name in fixed and fixed[c.name].rings]
    free = {c.ring_bytes for c in cargo if c.name not in fixed and not c.rows}
    return sorted(size for size in {0, *free, *ringed} if size >= max(ringed, default=0))


def _least(
    cargo: Sequence[Cargo], fixed: Mapping[str, Delivery], small_bytes: int, host_bytes: int, slots: int, limit: int
) -> Placement:
    """As little device memory as can be with slots of at most ``limit`` bytes: what is larger goes to host memory if it
    fits there, else it must be resident.
    """
    chosen = [fixed.get(c.name, Delivery.ROWS if c.rows else Delivery.STREAM) for c in cargo]
    left_bytes = host_bytes - sum(c.nbytes for c, d in zip(cargo, chosen, strict=True) if d.on_host)
    for at in sorted(range(len(cargo)), key=lambda at: -cargo[at].nbytes):
        if cargo[at].name not in fixed and not cargo[at].rows and cargo[at].ring_bytes > limit:
            chosen[at] = Delivery.MAPPED if cargo[at].nbytes <= left_bytes else Delivery.RESIDENT
            left_bytes -= cargo[at].nbytes if chosen[at] is Delivery.MAPPED else 0
    return _within_host(_placement(cargo, chosen, small_bytes, slots), host_bytes)


def _fill(placement: Placement, fixed: Mapping[str, Delivery], device_bytes: int, host_bytes: int) -> Placement:
    """What is streamed or read by rows comes up while there is room: to device memory, else to host memory. The ring
    stays as it is, so that room is counted once.
    """
    cargo, chosen = placement.cargo, list(placement.deliveries)
    device_left, host_left = device_bytes - placement.device_bytes, host_bytes - placement.host_bytes
    for at in sorted(range(len(cargo)), key=lambda at: (cargo[at].rows, -cargo[at].nbytes)):
        if cargo[at].name in fixed or chosen[at] not in (Delivery.STREAM, Delivery.ROWS):
            continue
        if cargo[at].nbytes <= device_left:
            chosen[at] = Delivery.RESIDENT
            device_left -= cargo[at].nbytes
        elif cargo[at].nbytes <= host_left and not cargo[at].rows:
            chosen[at] = Delivery.MAPPED
            host_left -= cargo[at].nbytes
    return _placement(cargo, _spread(cargo, chosen, fixed), placement.small_bytes, placement.ring_slots)


def _ruled(cargo: Sequence[Cargo], rules: tuple[Rule, ...]) -> dict[str, Delivery]:
    fixed: dict[str, Delivery] = {}
    for rule in rules:
        names = [c.name for c in cargo if rule.matches(c)]
        if not names:
            raise ConfigError(
                f"The rule {rule.text!r} for weights matches no module of this model. It has: "
                f"{', '.join(_abridged([c.name for c in cargo]))}."
            )
        for name in names:
            fixed.setdefault(name, rule.delivery)
    return fixed


def _abridged(names: list[str]) -> list[str]:
    return names if len(names) <= 6 else [*names[:3], "...", *names[-2:]]


def _spread(cargo: Sequence[Cargo], chosen: list[Delivery], fixed: Mapping[str, Delivery]) -> list[Delivery]:
    """The same deliveries among equal layers, evenly mixed."""
    spread = list(chosen)
    by_size: dict[tuple[int, int], list[int]] = {}
    for at, c in enumerate(cargo):
        if c.layer >= 0 and c.name not in fixed:
            by_size.setdefault((c.nbytes, c.pieces), []).append(at)
    for places in by_size.values():
        streamed = sum(chosen[at] is Delivery.STREAM for at in places)
        others = [chosen[at] for at in places if chosen[at] is not Delivery.STREAM]
        for rank, at in enumerate(places):
            here = (rank + 1) * streamed // len(places) > rank * streamed // len(places)
            spread[at] = Delivery.STREAM if here else others.pop()
    return spread


def _placement(cargo: Sequence[Cargo], chosen: Sequence[Delivery], small_bytes: int, slots: int) -> Placement:
    ringed = any(delivery.rings for delivery in chosen)
    return Placement(tuple(cargo), tuple(chosen), slots if ringed else 0, small_bytes)


def _within_host(placement: Placement, host_bytes: int) -> Placement:
    if placement.host_bytes > host_bytes:
        raise BudgetError(
            f"the weights that are to lie in host memory take {placement.host_bytes} bytes, and {host_bytes} are left "
            "for them there: give host a larger size, or stream more of them."
        )
    placement.check()
    return placement
