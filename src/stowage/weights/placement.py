"""Decides for each unit of weights where it lives and how it is delivered, within budgets. Arithmetic only.

What fits is resident, the rest is read in every forward. There is no LRU cache of layers: they are used in a circle, so
it would never hit. Layers that are read are spread evenly between resident ones, so that reading overlaps computing.
Experts, of which a token needs a few, are units of their own where their layer does not fit.
"""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from stowage.errors import BudgetError, ConfigError
from stowage.weights.weight_unit import Delivery, WeightUnit, cache_least_bytes, cache_most_bytes

RING_SLOTS, RING_SLOTS_LEAST = 3, 2
EXPERT_STAGES = 4
"""Experts for which there are staging buffers in host memory, between disk and device."""
_DELIVERED = "resident, mapped, prefetch, stream, experts"
_CACHED_SHARE = 4
"""Without a device budget the cache holds one in so many experts."""
_SHOWN_CHARACTERS = 200


@dataclass(frozen=True, slots=True)
class Rule:
    """``delivery`` for the units whose name matches ``pattern`` (with ``*`` and ``?``, as file names do), or, if
    ``every`` is above 0, for the ``last`` layers of each group of ``every``.
    """

    text: str
    delivery: Delivery
    pattern: str = "*"
    last: int = 0
    every: int = 0

    def matches(self, unit: WeightUnit) -> bool:
        """Whether the rule is about ``unit``: of ``experts``, only about units that are experts."""
        if self.delivery is Delivery.EXPERTS and not unit.experts:
            return False
        if self.every:
            return unit.layer >= 0 and unit.layer % self.every >= self.every - self.last
        return fnmatch.fnmatchcase(unit.name, self.pattern)


_LAST = re.compile(r"last\s+(\d+)\s+of\s+(?:every\s+)?(\d+)")


def parse_rules(text: str) -> tuple[Rule, ...]:
    """Parse rules: ``auto`` (none), or ``PATTERN=DELIVERY`` and ``last K of N=DELIVERY``, separated by commas. The
    first rule that matches a unit decides. Raises ConfigError.
    """
    if text.strip() in ("", "auto"):
        return ()
    rules = []
    for part in text.split(","):
        pattern, equals, delivery = (word.strip() for word in part.rpartition("="))
        valid = [d.value for d in Delivery if d is not Delivery.ROWS]
        if not equals or not pattern or delivery not in valid:
            raise ConfigError(
                f"The rule {part.strip()[:_SHOWN_CHARACTERS]!r} for weights is not understood. Write PATTERN=DELIVERY "
                f"or last K of N=DELIVERY, where DELIVERY is one of {_DELIVERED}; for example model.layers.*=stream"
            )
        if (match := _LAST.fullmatch(pattern)) is None:
            rules.append(Rule(part.strip(), Delivery(delivery), pattern))
            continue
        last, every = int(match[1]), int(match[2])
        if not 1 <= last <= every:
            raise ConfigError(f"The rule {part.strip()!r} for weights takes {last} of {every} layers.")
        rules.append(Rule(part.strip(), Delivery(delivery), last=last, every=every))
    return tuple(rules)


@dataclass(frozen=True, slots=True)
class Placement:
    """A delivery for every unit, in the model's order; the size of the ring and of the cache of experts.
    ``small_bytes``: parameters and buffers that belong to no unit.
    """

    weight_units: tuple[WeightUnit, ...]
    deliveries: tuple[Delivery, ...]
    ring_slots: int
    small_bytes: int
    cache_bytes: int = 0
    to_device: bool = False
    """Whether the device has memory of its own, so that reads from disk are staged in host memory."""
    held: frozenset[str] = frozenset()
    """Names of the units of experts that are kept in host memory, and copied from there into the device's cache."""

    def units(self, *deliveries: Delivery) -> list[WeightUnit]:
        """The units that are delivered in one of these ways."""
        return [unit for unit, delivery in self._pairs() if delivery in deliveries]

    def nbytes(self, *deliveries: Delivery) -> int:
        """Bytes of the units that are delivered in one of these ways."""
        return sum(unit.nbytes for unit in self.units(*deliveries))

    def _pairs(self) -> Iterator[tuple[WeightUnit, Delivery]]:
        return zip(self.weight_units, self.deliveries, strict=True)

    @property
    def slot_bytes(self) -> int:
        """Bytes of a slot of the ring, which holds any unit that comes through it."""
        return max((unit.ring_bytes for unit, delivery in self._pairs() if delivery.rings), default=0)

    @property
    def device_bytes(self) -> int:
        """Device memory: resident weights, the ring, and the cache of experts."""
        resident_bytes = self.small_bytes + self.nbytes(Delivery.RESIDENT)
        return resident_bytes + self.ring_slots * self.slot_bytes + self.cache_bytes

    @property
    def host_bytes(self) -> int:
        """Host memory: units that lie there, the experts in ``held``, and what is staged for the device."""
        kept = [unit for unit, delivery in self._pairs() if delivery.on_host or unit.name in self.held]
        return sum(unit.host_buffer_bytes if self.to_device else unit.nbytes for unit in kept) + self.staging_bytes

    @property
    def held_bytes(self) -> int:
        """Host memory for the experts in ``held``."""
        return sum(unit.nbytes for unit in self.cached if unit.name in self.held)

    @property
    def staging_bytes(self) -> int:
        """Host memory in which reads from disk are staged for the device."""
        if not self.to_device:
            return 0
        fetched = [unit.stage_bytes for unit in self.cached if unit.name not in self.held]
        slots = self.ring_slots * max((unit.ring_bytes for unit in self.units(Delivery.STREAM)), default=0)
        return slots + EXPERT_STAGES * max(fetched, default=0)

    @property
    def pass_bytes(self) -> int:
        """Bytes read from disk in every forward, without rows of embeddings (few) and chosen experts."""
        return self.nbytes(Delivery.STREAM)

    @property
    def cached(self) -> list[WeightUnit]:
        """The units of experts that share the cache."""
        return self.units(Delivery.EXPERTS)

    @property
    def missed_bytes(self) -> int:
        """Bytes of experts for which the cache has no room."""
        return cache_most_bytes(self.cached) - self.cache_bytes

    def of(self, name: str) -> Delivery:
        """The delivery of the unit of that name."""
        return self.deliveries[[unit.name for unit in self.weight_units].index(name)]

    def check(self) -> None:
        """Assert the invariants."""
        assert len(self.weight_units) == len(self.deliveries)
        ringed = sum(d.rings for d in self.deliveries)
        assert (self.ring_slots >= RING_SLOTS_LEAST) == (ringed > 0)
        assert all(unit.rows for unit in self.units(Delivery.ROWS))
        assert all(unit.experts for unit in self.cached)
        assert self.held <= {unit.name for unit in self.cached}
        assert cache_least_bytes(self.cached) <= self.cache_bytes <= cache_most_bytes(self.cached)


def more_for(least_bytes: int) -> str:
    """The advice in a BudgetError where weights need ``least_bytes`` of device memory, and only weights use it."""
    return f"Give device_memory at least {least_bytes} bytes."


def place(
    weight_units: Sequence[WeightUnit],
    small_bytes: int,
    device_bytes: int | None,
    host_bytes: int = 0,
    rules: Iterable[Rule] = (),
    *,
    to_device: bool = False,
    held_bytes: int | None = None,
    more: Callable[[int], str] = more_for,
) -> Placement:
    """Choose deliveries for ``weight_units`` within the budgets. ``device_bytes`` of ``None``: no limit. ``to_device``:
    the device has memory of its own, so computing from host memory happens by a rule only. ``held_bytes``: the part of
    ``host_bytes`` up to which experts may be kept there without a device budget; ``None``: all of it.

    Rules decide first. Of the rest, what fits is resident; then host memory is filled; then units are streamed. Experts
    get the remaining device memory as a cache. Raises BudgetError when nothing fits, with the least budget that does
    and the advice ``more(least_bytes)``; ConfigError for a rule that matches no unit.
    """
    together, apart, fixed = _ruled(weight_units, tuple(rules))
    given = _Given(fixed, small_bytes, host_bytes, to_device)
    whole = given.placement(together, [fixed.get(unit.name, Delivery.RESIDENT) for unit in together], RING_SLOTS)
    if device_bytes is None:
        cache_bytes = cache_most_bytes(whole.cached) // _CACHED_SHARE
        cached = _cached(whole, max(0, cache_bytes - whole.cache_bytes))
        return _within_host(_held(cached, host_bytes if held_bytes is None else held_bytes), host_bytes)
    if whole.device_bytes <= device_bytes:
        return _within_host(_held(_cached(whole, device_bytes - whole.device_bytes), host_bytes), host_bytes)
    needs: list[int] = []
    for units in (apart, together) if len(apart) > len(together) else (together,):
        found = _smallest_reads(units, given, device_bytes, needs)
        if found is not None:
            return found
    least, largest = min(needs, default=small_bytes), max((unit.nbytes for unit in apart), default=0)
    raise BudgetError(
        f"the weights need at least {least} bytes of device memory, and {device_bytes} are left for them: "
        f"{small_bytes} bytes are norms and the like, which stay, and the largest module of {largest} must fit, "
        f"with room to read the next one meanwhile. {more(least)}"
    )


@dataclass(frozen=True, slots=True)
class _Given:
    """What holds of all placements that are tried: the deliveries that rules fix, by name; see ``place``."""

    fixed: Mapping[str, Delivery]
    small_bytes: int
    host_bytes: int
    to_device: bool

    def placement(self, weight_units: Sequence[WeightUnit], chosen: Sequence[Delivery], slots: int) -> Placement:
        """With the smallest possible cache of experts."""
        slots = slots if any(delivery.rings for delivery in chosen) else 0
        found = Placement(tuple(weight_units), tuple(chosen), slots, self.small_bytes, to_device=self.to_device)
        return replace(found, cache_bytes=cache_least_bytes(found.cached))


def _smallest_reads(
    units: Sequence[WeightUnit], given: _Given, device_bytes: int, needs: list[int]
) -> Placement | None:
    """The placement that reads least per forward; ``None`` if none fits. ``needs`` gets the device bytes of each."""
    refused: BudgetError | None = None
    found = False
    for slots in (RING_SLOTS, RING_SLOTS_LEAST):
        least = []
        for limit in _slot_limits(units, given.fixed):
            try:
                least.append(_least(units, given, slots, limit))
            except BudgetError as error:  # a smaller ring may need less
                refused = error
        found = found or bool(least)
        needs += [placement.device_bytes for placement in least]
        filled = [_fill(each, given, device_bytes) for each in least if each.device_bytes <= device_bytes]
        if filled:
            return min(filled, key=lambda placement: (placement.pass_bytes, placement.missed_bytes))
    if refused is not None and not found:
        raise refused
    return None


def _slot_limits(units: Sequence[WeightUnit], fixed: Mapping[str, Delivery]) -> list[int]:
    """Candidates for the largest slot of the ring: none (0), or the size of one of the units."""
    ringed = [unit.ring_bytes for unit in units if unit.name in fixed and fixed[unit.name].rings]
    free = {unit.ring_bytes for unit in units if unit.name not in fixed and not unit.rows and not unit.experts}
    return sorted(size for size in {0, *free, *ringed} if size >= max(ringed, default=0))


def _least(units: Sequence[WeightUnit], given: _Given, slots: int, limit: int) -> Placement:
    """The placement with the least device memory whose slots have at most ``limit`` bytes: larger units are mapped if
    host memory has room, else resident.
    """
    chosen = [given.fixed.get(unit.name, _offloaded(unit)) for unit in units]
    left_bytes = given.host_bytes - sum(u.nbytes for u, d in zip(units, chosen, strict=True) if d.on_host)
    for at in _largest_first(units):
        unit = units[at]
        if unit.name not in given.fixed and chosen[at] is Delivery.STREAM and unit.ring_bytes > limit:
            fits = unit.nbytes <= left_bytes and not given.to_device
            chosen[at] = Delivery.MAPPED if fits else Delivery.RESIDENT
            left_bytes -= unit.nbytes if fits else 0
    return _within_host(given.placement(units, chosen, slots), given.host_bytes)


def _largest_first(units: Sequence[WeightUnit]) -> list[int]:
    """The indices of the units; equal ones in the model's order."""
    return sorted(range(len(units)), key=lambda at: -units[at].nbytes)


def _offloaded(unit: WeightUnit) -> Delivery:
    """The delivery that takes the least memory."""
    return Delivery.ROWS if unit.rows else Delivery.EXPERTS if unit.experts else Delivery.STREAM


def _fill(placement: Placement, given: _Given, device_bytes: int) -> Placement:
    """Make streamed units resident while there is room, else keep them in host memory. The ring keeps its size, so that
    its memory is counted once. Experts come last, and get what is left as their cache, since a token uses all else of
    a layer. Embeddings read by rows come after them: reading rows costs next to nothing.
    """
    units, chosen = placement.weight_units, list(placement.deliveries)
    device_left, host_left = device_bytes - placement.device_bytes, given.host_bytes - placement.host_bytes
    for at in sorted(_largest_first(units), key=lambda at: units[at].experts > 0):
        unit = units[at]
        if unit.name in given.fixed or chosen[at] not in (Delivery.STREAM, Delivery.EXPERTS):
            continue
        if unit.nbytes <= device_left and not unit.experts:
            chosen[at] = Delivery.RESIDENT
            device_left -= unit.nbytes
        elif given.to_device and not unit.experts and unit.host_buffer_bytes <= host_left:
            chosen[at] = Delivery.PREFETCH
            host_left -= unit.host_buffer_bytes
        elif not given.to_device and unit.nbytes <= host_left:
            chosen[at] = Delivery.MAPPED
            host_left -= unit.nbytes
    spread = _spread(units, chosen, given.fixed)
    filled = given.placement(units, spread, placement.ring_slots)
    filled = _cached(filled, device_bytes - filled.device_bytes)
    device_left = device_bytes - filled.device_bytes
    for at in _largest_first(units):
        unit = units[at]
        if spread[at] is Delivery.ROWS and unit.name not in given.fixed and unit.nbytes <= device_left:
            spread[at] = Delivery.RESIDENT
            device_left -= unit.nbytes
    return _held(replace(filled, deliveries=tuple(spread)), given.host_bytes)


def _held(placement: Placement, host_bytes: int) -> Placement:
    """``placement`` with as many experts in host memory as fit, on a device with memory of its own. (On a CPU they are
    mapped instead.) What is held needs no staging: all of them may fit where fewer do not, and one after another is.
    """
    whole = replace(placement, held=frozenset(unit.name for unit in placement.cached if placement.to_device))
    if not placement.to_device or whole.host_bytes <= host_bytes:
        return whole
    left = placement.cached
    while added := next((unit for unit in left if _with(placement, unit).host_bytes <= host_bytes), None):
        left.remove(added)
        placement = _with(placement, added)
    return placement


def _with(placement: Placement, experts: WeightUnit) -> Placement:
    return replace(placement, held=placement.held | {experts.name})


def _cached(placement: Placement, more_bytes: int) -> Placement:
    """``placement`` with its cache of experts larger by at most ``more_bytes``."""
    most_bytes = cache_most_bytes(placement.cached)
    return replace(placement, cache_bytes=min(most_bytes, placement.cache_bytes + more_bytes))


def _ruled(
    weight_units: Sequence[WeightUnit], rules: tuple[Rule, ...]
) -> tuple[list[WeightUnit], list[WeightUnit], dict[str, Delivery]]:
    """Two divisions into units, and the deliveries that rules fix, by name. In the first, experts are apart from their
    layer where another rule decides about them; in the second, also wherever no rule decides about the layer.
    """
    fixed: dict[str, Delivery] = {}
    known = [unit for whole in weight_units for unit in (whole, *whole.apart)]
    for rule in rules:
        names = [unit.name for unit in known if rule.matches(unit)]
        if not names:
            raise ConfigError(
                f"The rule {rule.text!r} for weights matches no module of this model. It has: "
                f"{', '.join(_abridged([unit.name for unit in known]))}."
            )
        for name in names:
            fixed.setdefault(name, rule.delivery)
    deciding = {unit.name: _deciding(unit, rules) for unit in known}
    together: list[WeightUnit] = []
    apart: list[WeightUnit] = []
    for whole in weight_units:
        parts = [part for part in whole.apart if deciding[part.name] is not deciding[whole.name]]
        together += [whole.without(parts), *parts] if parts else [whole]
        if deciding[whole.name] is None:
            parts = list(whole.apart)
        apart += [whole.without(parts), *parts] if parts else [whole]
    return together, apart, fixed


def _deciding(unit: WeightUnit, rules: tuple[Rule, ...]) -> Rule | None:
    """The first rule that matches."""
    return next((rule for rule in rules if rule.matches(unit)), None)


def _abridged(names: list[str]) -> list[str]:
    return names if len(names) <= 6 else [*names[:3], "...", *names[-2:]]


def _spread(
    weight_units: Sequence[WeightUnit], chosen: list[Delivery], fixed: Mapping[str, Delivery]
) -> list[Delivery]:
    """``chosen``, with the streamed ones among equal layers spread evenly."""
    spread = list(chosen)
    by_size: dict[tuple[int, int, int], list[int]] = {}
    for at, unit in enumerate(weight_units):
        if unit.layer >= 0 and unit.name not in fixed:
            by_size.setdefault((unit.nbytes, unit.pieces, unit.experts), []).append(at)
    for indices in by_size.values():
        streamed = sum(chosen[at] is Delivery.STREAM for at in indices)
        others = [chosen[at] for at in indices if chosen[at] is not Delivery.STREAM]
        for rank, at in enumerate(indices):
            here = (rank + 1) * streamed // len(indices) > rank * streamed // len(indices)
            spread[at] = Delivery.STREAM if here else others.pop()
    return spread


def _within_host(placement: Placement, host_bytes: int) -> Placement:
    if placement.host_bytes > host_bytes:
        raise BudgetError(
            f"the weights that are to lie in host memory take {placement.host_bytes} bytes, and {host_bytes} are left "
            "for them there: give host_memory a larger size, or stream more of them."
        )
    placement.check()
    return placement
