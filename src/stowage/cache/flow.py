"""The tiered store's state machine: events in, actions out. Time is an argument; no I/O, no threads, no clock.

    lookup, fetch, reserve, commit, ...  --+    ledger      +--> StartLoad   fill these slots from tier i
    outcome (a transfer was reported)    --+--> fetches   --+--> StartStore  write these slots to tier i
    tick (time passed)                   --+    flights     +--> Discard     forget these keys in tier i

Tiers are counted from 0 here; as the source of a chunk 0 is the host and i + 1 is tier i. `indexes`, given at
construction, answer from memory which keys a tier has. The flow decides; the state is in its parts: `ledger` (contents
of slots), `fetches` (waiting for slots), `flights` (transfers in flight), `spills` (queued for lower tiers).

Promises:

- A slot that a transfer reads or fills is not reused before the transfer is reported, however late that is.
- A chunk is in one flight at most: a second fetch of it waits for that flight.
- A fetch ends by its deadline with what has arrived. Each of its chunks succeeds or fails alone.
- A slot in `Fetch.slots` is pinned for that fetch until it is released.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import asdict
from itertools import compress
from typing import Final

import numpy as np
from numpy.typing import NDArray

from stowage.cache.circuit_breaker import Breaker
from stowage.cache.fetches import Fetches
from stowage.cache.flow_types import Action, Counters, Discard, Fetch, SourceArray, StartLoad, StartStore
from stowage.cache.in_flight import Flight, Flights
from stowage.cache.keymap import After, all_true, all_zero, present_slots
from stowage.cache.ledger import Ledger
from stowage.cache.policy import LRU, MakePolicy
from stowage.cache.slot_sizes import Sizes
from stowage.cache.slot_states import State, adds_blocks
from stowage.cache.spill_queue import SpillQueue
from stowage.core.geometry import BoolArray, Geometry, IntArray, MaskArray, SlabClass

TRANSFER_BYTES_MAX: Final = 32 << 20
"""Longer transfers are split, so that at the deadline most of a long prefix has arrived, not nothing."""
STORE_LIMIT_S: Final = 30.0
"""The deadline of a spill. No request waits for it; a tier that misses it counts as failing."""
NEVER_S: Final = float("inf")
Index = Callable[[list[bytes]], MaskArray]


class Flow:
    """The state machine of a tiered store of `geometry`'s groups. `slabs`: their slots; `indexes[i]` asks tier i."""

    def __init__(
        self,
        geometry: Geometry,
        slabs: Sequence[SlabClass],
        indexes: Sequence[Index] = (),
        spill_bytes_max: int = 0,
        policy: MakePolicy = LRU,
        ledger: Callable[[Sequence[int], MakePolicy], Ledger] = Ledger,
    ) -> None:
        total = sum(slab.slots for slab in slabs)
        self.ledger = ledger([slab.slots for slab in slabs], policy)
        self.counters = Counters()
        self.hits: NDArray[np.int64] = np.zeros(1 + len(indexes), np.int64)
        self._slab_of_group = {group: number for number, slab in enumerate(slabs) for group in slab.groups}
        self._sizes = Sizes(geometry.groups, total)
        self._indexes = list(indexes)
        self.breakers = [Breaker() for _ in indexes]
        self.spills = [SpillQueue(spill_bytes_max // len(indexes), max(total, 1)) for _ in indexes]
        self._fetches = Fetches(self.ledger, total)
        self._flights = Flights(self.breakers)
        self._actions: list[Action] = []
        self._ids = itertools.count(1)
        self.next_deadline_s = NEVER_S

    # What is there

    def locate(self, keys: list[bytes], now_s: float) -> tuple[MaskArray, SourceArray]:
        """The valid blocks that a fetch of each key would bring, 0 where absent, and `sources`."""
        masks = self.ledger.lookup(keys)
        self.counters.lookups += len(keys)
        if not self._indexes or np.count_nonzero(masks) == len(keys):
            return masks, np.negative((masks == 0).view(np.int8))
        return self._lookup_tiers(keys, masks, now_s)

    def sources(self, keys: list[bytes], now_s: float) -> SourceArray:
        """Where a fetch would take each key from: -1 absent, 0 host, i + 1 tier i."""
        return self._lookup_tiers(keys, self.ledger.lookup(keys), now_s)[1]

    def _lookup_tiers(self, keys: list[bytes], masks: MaskArray, now_s: float) -> tuple[MaskArray, SourceArray]:
        """Fill zero `masks` from the first tier that has the key; also returns each key's source.

        A tier with an open breaker counts as empty; a key with a late load counts as absent.
        """
        masks = masks.copy()
        missing = masks == 0
        sources = np.negative(missing.view(np.int8))
        absent = missing.nonzero()[0]
        for tier, index in enumerate(self._indexes):
            if not len(absent) or not self.breakers[tier].allows(now_s):
                continue
            below = index(keys if len(absent) == len(keys) else [keys[position] for position in absent.tolist()])
            late_keys = self._flights.late_keys
            if late_keys:
                below = np.where([keys[position] in late_keys for position in absent.tolist()], np.uint64(0), below)
            if not all_zero(below):
                masks[absent] = below
                sources[absent[below != 0]] = tier + 1
                absent = absent[below == 0]
        return masks, sources

    # Fetch

    def fetch(self, wanted: Sequence[tuple[int, list[bytes]]], deadline_s: float, now_s: float) -> Fetch:
        """Pin chunks that are in host, wait for those in flight, and start to promote those in lower tiers.

        All chunks in host are pinned before others are evicted, so a fetch never evicts its own chunks. If slots run
        out, the first keys get them. With a deadline in the past, only chunks in host are returned.
        """
        fetch = self._fetches.open(next(self._ids), wanted, deadline_s)
        self.counters.fetches += 1
        for pair, (group, keys) in enumerate(wanted):
            missing = fetch.sources[pair].nonzero()[0]
            self.hits[0] += len(keys) - len(missing)
            if len(missing) and now_s < deadline_s:
                self._promote(fetch, pair, group, [keys[position] for position in missing.tolist()], missing, now_s)
        if not fetch.done:
            self.next_deadline_s = min(self.next_deadline_s, deadline_s)
        return fetch

    def release(self, fetch: Fetch) -> None:
        """Unpin the fetch's slots. One that is not done is cancelled. Idempotent."""
        self._fetches.release(fetch)

    def _promote(
        self, fetch: Fetch, pair: int, group: int, keys: list[bytes], positions: IntArray, now_s: float
    ) -> None:
        """Start loads of the missing `keys`, at `positions` of the pair; wait for those already in flight."""
        masks, sources = self._lookup_tiers(keys, np.zeros(len(keys), np.uint64), now_s)
        self.hits[1:] += np.bincount(sources[sources > 0], minlength=len(self.hits))[1:]
        before = self.ledger.find_in_flight(keys)
        for tier in range(len(self._indexes)):
            mine = (sources == tier + 1) & (before < 0)
            if mine.any():
                self._load(tier, group, list(compress(keys, mine.tolist())), masks[mine], fetch.deadline_s, now_s)
        slots = self.ledger.find_in_flight(keys)
        coming = slots >= 0
        if self._flights.late_keys:
            coming &= np.fromiter((key not in self._flights.late_keys for key in keys), np.bool_, len(keys))
        self.counters.joined += int(np.count_nonzero(coming & (before >= 0)))
        self._fetches.wait(fetch, pair, positions[coming], slots[coming])

    def _load(
        self, tier: int, group: int, keys: list[bytes], masks: MaskArray, deadline_s: float, now_s: float
    ) -> None:
        """Start flights for keys that the tier has and that are neither in host nor in flight."""
        if len(set(keys)) < len(keys):
            distinct = dict(zip(keys, masks.tolist(), strict=True))
            keys, masks = list(distinct), np.fromiter(distinct.values(), np.uint64, len(distinct))
        slots = self.ledger.fill(self._slab_of_group[group], keys)
        room = int(np.count_nonzero(slots >= 0))
        self._sizes.assign(slots, group)
        step = max(1, TRANSFER_BYTES_MAX // max(1, self._sizes.of_group(group)))
        for begin in range(0, room, step):
            part = slice(begin, min(begin + step, room))
            if self.breakers[tier].allows(now_s):
                action = StartLoad(
                    tier, *self._fly(tier, True, keys[part], slots[part], masks[part], deadline_s), deadline_s
                )
                self._actions.append(action)
            else:
                self.ledger.abort(slots[part])

    def _fly(
        self, tier: int, is_load: bool, keys: list[bytes], slots: IntArray, masks: MaskArray, deadline_s: float
    ) -> tuple[int, list[bytes], IntArray, IntArray, MaskArray]:
        """Record a flight. Returns what its action needs: id, keys, slots, sizes, masks."""
        flight_id = next(self._ids)
        sizes, total_bytes = self._sizes.of(slots)
        flight = Flight(tier, is_load, keys, slots, self._sizes.full_masks(slots), total_bytes, deadline_s)
        self._flights.begin(flight_id, flight)
        self.next_deadline_s = min(self.next_deadline_s, deadline_s)
        return flight_id, keys, slots, sizes, masks

    # Store

    def reserve(self, group: int | IntArray, keys: list[bytes], masks: MaskArray, after: After = None) -> IntArray:
        """A slot for each chunk that is worth storing, -1 for the others (see `Ledger.reserve`)."""
        first = group if isinstance(group, int) else int(group[0])
        slots = self.ledger.reserve(self._slab_of_group[first], keys, masks, after)
        self._sizes.assign(slots, group)
        return slots

    def commit(self, slots: IntArray, now_s: float) -> None:
        """The bytes of reserved slots are written (-1 is ignored): serve them, and queue their spill."""
        slots = present_slots(slots)
        self.ledger.commit(slots)
        self.counters.stores += len(slots)
        self._fetches.arrived(slots, source=0)
        self._queue_spills(slots, source=0)
        self._pump(now_s)

    def abort(self, slots: IntArray) -> None:
        """The bytes of reserved slots will not come; -1 is ignored."""
        slots = present_slots(slots)
        self.ledger.abort(slots)
        self._fetches.failed(slots)

    def reserve_private(self, group: int, keys: list[bytes]) -> IntArray:
        """A private slot per key: outside look-ups, never evicted or spilled. All -1 if there is no room for all."""
        slots = self.ledger.take_private(self._slab_of_group[group], keys)
        self._sizes.assign(slots, group)
        return slots

    def commit_private(self, slots: IntArray) -> None:
        """The owner has written its private slots; -1 is ignored."""
        assert (self.ledger.states(present_slots(slots)) == State.PRIVATE).all(), "commit of a slot that is not private"

    def drop_private(self, slots: IntArray) -> None:
        """Free private slots; -1 is ignored."""
        self.ledger.drop_private(present_slots(slots))

    def drop_host(self) -> int:
        """Evict every unpinned chunk. Returns how many there were."""
        return self.ledger.drop()

    # Spill

    def _queue_spills(self, slots: IntArray, source: int) -> None:
        """Queue ready chunks for every tier but the one that they came from."""
        if not self._indexes or not len(slots):
            return
        keys = self.ledger.keys(slots)
        for tier, queue in enumerate(self.spills):
            if tier + 1 != source:
                queue.add(slots, keys)

    def _pump(self, now_s: float) -> None:
        """Start queued spills, as far as the limits allow."""
        for tier, queue in enumerate(self.spills):
            if queue.chunks and self.breakers[tier].state(now_s) == "open":
                queue.drop()
            while queue.room() and self.breakers[tier].allows(now_s) and self._spill(tier, queue, now_s):
                pass

    def _spill(self, tier: int, queue: SpillQueue, now_s: float) -> bool:
        """Start one transfer of the oldest chunks that are still in host and missing in the tier, if there are any."""
        parts: list[IntArray] = []
        keys: list[bytes] = []
        gathered = 0
        while queue.chunks:
            allowed = queue.allowed_bytes(gathered, TRANSFER_BYTES_MAX)
            if gathered and allowed < self._sizes.least:
                break
            most = max(1, allowed // self._sizes.least)  # those behind them are not looked up for nothing
            slots, names = self._still_wanted(tier, queue, *queue.pop(most))
            sizes, total_bytes = self._sizes.of(slots)
            count = len(slots)
            if total_bytes > allowed:
                count = queue.fitting(sizes, gathered, TRANSFER_BYTES_MAX)
            parts.append(slots[:count])
            keys += names[:count]
            gathered += int(sizes[:count].sum())
            if count < len(slots):
                queue.push_back(slots[count:], names[count:])
                break
        if not keys:
            return False
        slots = parts[0] if len(parts) == 1 else np.concatenate(parts)
        self.ledger.pin(slots)
        queue.begin(gathered)
        deadline_s = now_s + STORE_LIMIT_S
        self._actions.append(
            StartStore(tier, *self._fly(tier, False, keys, slots, self.ledger.masks(slots), deadline_s), deadline_s)
        )
        return True

    def _still_wanted(
        self, tier: int, queue: SpillQueue, slots: IntArray, keys: list[bytes]
    ) -> tuple[IntArray, list[bytes]]:
        """The queued slots that still hold these keys, and have blocks that the tier has not."""
        held = self._indexes[tier](keys)
        if self.ledger.are_still(slots, keys):
            if all_zero(held):
                return slots, keys
            wanted = adds_blocks(self.ledger.masks(slots), held)
        else:
            current = self.ledger.find(keys)
            queue.dropped += int(np.count_nonzero(current < 0))
            wanted = (current == slots) & adds_blocks(self.ledger.masks(slots), held)
        return slots[wanted], list(compress(keys, wanted.tolist()))

    # What happened

    def outcome(self, flight_id: int, ok: BoolArray, masks: MaskArray, now_s: float, refused: bool = False) -> None:
        """A tier reports a transfer. A report of the wrong shape counts as failure; an unknown id is ignored.

        Chunks whose load failed are discarded from the tier, unless it `refused` to try or the report is late.
        """
        report = self._flights.end(flight_id, ok, masks, now_s, refused)
        if report is None:
            return
        flight, ok, masks = report
        self._finish(flight, ok, masks)
        if flight.is_load and not (all_true(ok) or refused or flight.late or now_s >= flight.deadline_s):
            self._actions.append(Discard(flight.tier, list(compress(flight.keys, (~ok).tolist()))))
        self._pump(now_s)

    def start_failed(self, flight_id: int, now_s: float) -> None:
        """A tier raised instead of starting a transfer: its failure, but the chunks are not discarded."""
        report = self._flights.end(flight_id, np.zeros(0, np.bool_), np.zeros(0, np.uint64), now_s)
        assert report is not None, "a transfer that was never begun"
        self._finish(*report)
        self._pump(now_s)

    def _finish(self, flight: Flight, ok: BoolArray, masks: MaskArray) -> None:
        if flight.is_load:
            self._loaded(flight, ok, masks)
        else:
            self._spilled(flight, ok)

    def _loaded(self, flight: Flight, ok: BoolArray, masks: MaskArray) -> None:
        good = flight.slots if all_true(ok) else flight.slots[ok]
        self.ledger.commit_filled(good, masks[ok])
        self._fetches.arrived(good, source=flight.tier + 1)
        if len(good) < len(ok):
            bad = flight.slots[~ok]
            self.ledger.abort(bad)
            self._fetches.failed(bad)
            self.counters.load_failures += len(bad)
        self.counters.promoted += len(good)
        self.counters.promoted_bytes += self._sizes.of(good)[1]
        self._queue_spills(good, source=flight.tier + 1)

    def _spilled(self, flight: Flight, ok: BoolArray) -> None:
        self.ledger.unpin(flight.slots, used=False)
        self.spills[flight.tier].end(flight.payload_bytes)
        done = flight.slots if all_true(ok) else flight.slots[ok]
        self.counters.spills += len(done)
        self.counters.spilled_bytes += self._sizes.of(done)[1]
        self.counters.spill_failures += len(flight.slots) - len(done)

    def tick(self, now_s: float) -> None:
        """End fetches past their deadline; count flights past theirs as failures of their tier."""
        if now_s < self.next_deadline_s:
            return
        self.counters.fetch_timeouts += self._fetches.end_due(now_s)
        self.counters.timeouts += self._flights.mark_late(now_s)
        self.next_deadline_s = min([*self._fetches.deadlines_s(), *self._flights.deadlines_s()], default=NEVER_S)
        self._pump(now_s)

    def take_actions(self) -> list[Action]:
        """Take the actions to run now, in this order."""
        actions, self._actions = self._actions, []
        return actions

    def flights(self) -> int:
        """The number of transfers in flight."""
        return len(self._flights)

    def spills_idle(self) -> bool:
        """Whether no spill is queued or in flight."""
        return all(queue.idle() for queue in self.spills)

    def stats(self) -> dict[str, int]:
        """The counters by name."""
        return asdict(self.counters) | {
            "stores_without_room": self.ledger.without_room,
            "evictions": self.ledger.evictions,
            "spills_dropped": sum(queue.dropped for queue in self.spills),
            "spills_waiting": sum(queue.chunks for queue in self.spills),
            "transfers_under_way": len(self._flights),
            "chunks_pinned": self.ledger.pinned(),
        }

    def check(self) -> None:
        """Assert every invariant, those of the parts included. Linear in the slots."""
        self.ledger.check()
        self._fetches.check()
        self._flights.check()
        filled = [flight.slots for flight in self._flights.loads()]
        filling = np.sort(np.concatenate(filled)) if filled else np.empty(0, np.int64)
        assert np.array_equal(filling, self.ledger.filling()), "a slot is filled by no flight, or by two"
        stores = self._flights.stores()
        self.ledger.check_pins(self._fetches.pinned() + [flight.slots for flight in stores])
        for tier, queue in enumerate(self.spills):
            queue.check()
            self.breakers[tier].check()
            mine = [flight.payload_bytes for flight in stores if flight.tier == tier]
            assert (queue.transfers, queue.bytes_in_flight) == (len(mine), sum(mine)), "spills under way do not add up"
