"""The tiered store: host arena and lower tiers as one store of chunks. Drives `cache.flow` with real tiers and a clock.

Owns the arena, the flow and the tiers. All methods are called from the engine's thread, except `wake`, which any thread
may call; tier workers only queue outcomes and call it. Only `wait`, `flush` and `close` block.

Every chunk passes through the host arena in both directions; without host memory there is no store.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from types import MappingProxyType
from typing import Protocol

import numpy as np

from stowage.cache.flow import Flow
from stowage.cache.flow_types import Discard, Fetch, SourceArray, StartLoad
from stowage.cache.guard import Guarded
from stowage.cache.keymap import After
from stowage.cache.ledger import Ledger
from stowage.cache.policy import POLICIES, POLICY_DEFAULT
from stowage.cache.published_ledger import PublishedLedger
from stowage.cache.spill_queue import HOST_SHARE, SPILL_BYTES_MAX
from stowage.core.geometry import Geometry, IntArray, Kind, MaskArray, split_arena
from stowage.core.prefix_search import Anchors
from stowage.errors import ConfigError
from stowage.log import Trouble
from stowage.storage.host import HostArena
from stowage.storage.host_table import HostTable
from stowage.storage.protocol import Inquiry, Probe, Probing, ReadOnly, Tier, Transfer, Waitable

_POLL_S = 0.002
"""Polling interval for tiers that cannot call `wake`."""


class Signal(Protocol):
    """The part of threading.Event that is used here."""

    def set(self) -> None: ...

    def clear(self) -> None: ...

    def wait(self, timeout: float | None) -> bool: ...


class TieredStore:
    """Chunks by key, in host and in `tiers`, fastest first.

    `host_bytes` is a hard limit. `spill_bytes_max` limits the bytes in flight to lower tiers, all tiers together; one
    chunk per tier is always allowed. `clock` must be the clock that deadlines are given in. `wake` is the event that
    `wait` sleeps on (a simulator passes its own). `shared`: other processes may map the arena. `published`: they can
    also look up its chunks (`table`). `common_slots`: see `split_arena`. `policy`: the eviction policy, one of
    `cache.policy.POLICIES`.
    Raises ConfigError (BudgetError) for sizes that cannot work.
    """

    def __init__(
        self,
        geometry: Geometry,
        host_bytes: int,
        tiers: Sequence[Tier] = (),
        *,
        snapshot_tokens: int = 512,
        common_slots: bool = False,
        clock: Callable[[], float] = time.monotonic,
        spill_bytes_max: int | None = None,
        wake: Signal | None = None,
        shared: bool = False,
        published: bool = False,
        policy: str = POLICY_DEFAULT,
    ) -> None:
        if host_bytes == 0:
            raise ConfigError(
                "the store needs host memory, because chunks of every tier pass through it; set host_memory to a "
                "size such as '1GiB', or leave out the lower tiers"
            )
        if policy not in POLICIES:
            raise ConfigError(f"the policy {policy!r} is unknown; choose one of {', '.join(POLICIES)}")
        if spill_bytes_max is not None and spill_bytes_max < 0:
            raise ConfigError(f"spill_bytes_max is {spill_bytes_max}; it cannot be negative")
        self.geometry = geometry
        self.slabs = split_arena(geometry, host_bytes, snapshot_tokens, common=common_slots)
        self.arena = HostArena(self.slabs, shared=shared)
        self.tiers = tuple(tiers)
        if spill_bytes_max is None:
            spill_bytes_max = min(SPILL_BYTES_MAX, self.arena.bytes // HOST_SHARE)
        self._trouble = Trouble("stowage.store", clock)
        self._guarded = [
            Guarded(tier, self._trouble, partial(self._failed, number)) for number, tier in enumerate(self.tiers)
        ]
        indexes = [tier.lookup for tier in self._guarded]
        self.table = HostTable(self.slabs) if published else None
        ledger = Ledger if self.table is None else PublishedLedger.over(self.table)
        self._flow = Flow(geometry, self.slabs, indexes, spill_bytes_max, POLICIES[policy], ledger)
        for queue, tier in zip(self._flow.spills, self.tiers, strict=True):
            queue.closed = isinstance(tier, ReadOnly) and tier.read_only
        self._snapshot_tokens = snapshot_tokens
        self._clock = clock
        self._wake = wake or threading.Event()
        self._all_announce = True
        self._closed = False
        self._opened = [0 for _ in self.tiers]
        self._left_alone = [False for _ in self.tiers]
        self._timeouts = self._without_room = 0
        for tier in self.tiers:
            if isinstance(tier, Waitable):
                tier.wake = self._wake.set
            else:
                self._all_announce = False

    # Look-up and fetch

    def sources(self, keys: list[bytes]) -> SourceArray:
        """Where a fetch would take each key from: -1 absent, 0 host, i + 1 `tiers[i]`."""
        return self._flow.sources(keys, self._clock())

    def locate(self, keys: list[bytes]) -> tuple[MaskArray, SourceArray]:
        """The mask of valid blocks of each key, in host or in the first tier that has it, 0: absent; and `sources`."""
        return self._flow.locate(keys, self._clock())

    def fetch(self, wanted: Sequence[tuple[int, list[bytes]]], deadline_s: float) -> Fetch:
        """Pin chunks that are in host and start to promote the rest: (group, keys) pairs, keys in prompt order.

        Never blocks. The fetch is final when `done`, at `deadline_s` at the latest (by `poll`). Call `release` after
        use.
        """
        fetch = self._flow.fetch(wanted, deadline_s, self._clock())
        self._run_actions()
        return fetch

    @property
    def probes(self) -> bool:
        """Whether there are shared tiers, whose look-ups are asynchronous."""
        return any(isinstance(tier, Probing) for tier in self.tiers)

    def probe(
        self, wanted: Sequence[tuple[int, list[bytes]]], certain: Mapping[int, Anchors] = MappingProxyType({})
    ) -> list[Probe]:
        """Ask shared tiers how much of a prompt they have: (group, keys) pairs, keys from the prompt's first on.

        Never blocks; `wait` ends when one has answered. Keys that are known to be present are left out. `certain`: for
        groups of which not every chunk is stored, those that are.
        """
        now_s = self._clock()
        inquiries = [
            inquiry
            for group, keys in wanted
            if (inquiry := self._inquiry(group, keys, now_s, certain.get(group))) is not None
        ]
        breakers = self._flow.breakers
        asked = [tier for number, tier in enumerate(self._guarded) if inquiries and breakers[number].allows(now_s)]
        return [probe for tier in asked if (probe := tier.probe(inquiries)) is not None]

    def _inquiry(self, group: int, keys: list[bytes], now_s: float, certain: Anchors | None) -> Inquiry | None:
        absent = np.flatnonzero(self._flow.sources(keys, now_s) < 0)
        if not len(absent):
            return None
        geometry = self.geometry.groups[group]
        if certain is not None:
            return Inquiry(keys, geometry.full_mask, certain=certain)
        if geometry.kind is Kind.RECURRENT:  # snapshots are sparse: what is found says little about those before it
            stride = max(1, self._snapshot_tokens // geometry.chunk_tokens)
            return Inquiry(keys, geometry.full_mask, 0, stride)
        first = int(absent[0])
        return Inquiry(keys[first:], geometry.full_mask, first)

    def release(self, fetch: Fetch) -> None:
        """Unpin a fetch's chunks. One that is not done is cancelled; its loads in flight go on for other fetches."""
        self._flow.release(fetch)

    # Store

    def reserve(self, group: int | IntArray, keys: list[bytes], masks: MaskArray, after: After = None) -> IntArray:
        """A slot to write each chunk into, for `commit` or `abort`; keys in prompt order.

        -1: an empty mask; stored already, and the new valid blocks are no strict superset; in flight already; no room.
        Unpinned chunks are evicted in the order of the policy. `after`: the key before the first one's. For chunks of
        several prompts: a list with the key before each, empty where there is none; `group` may then be an array with
        a group for each key, of one slab class.
        """
        return self._flow.reserve(group, keys, masks, after)

    def commit(self, slots: IntArray) -> None:
        """The bytes are written (-1 is ignored): the chunks can be looked up, and are spilled in the background."""
        self._flow.commit(slots, self._clock())
        self._run_actions()

    def abort(self, slots: IntArray) -> None:
        """The bytes will not be written (-1 is ignored)."""
        self._flow.abort(slots)

    def reserve_private(self, group: int, keys: list[bytes]) -> IntArray:
        """A private slot per chunk: outside look-ups, pinned, never spilled.

        All or none: -1 for each, and nothing is evicted, if there is no room for all of them.
        """
        return self._flow.reserve_private(group, keys)

    def commit_private(self, slots: IntArray) -> None:
        """The bytes of private slots are written. They stay until `drop_private`."""
        self._flow.commit_private(slots)

    def name_private(self, groups: IntArray, slots: IntArray, keys: list[bytes], after: list[bytes]) -> IntArray:
        """Turn private slots with complete chunks into reserved ones, now that their keys are known; as `reserve`, and
        freed where that gives -1. `after`: the key before each one's. All of one slab class.
        """
        masks = np.array([group.full_mask for group in self.geometry.groups], dtype=np.uint64)[groups]
        ledger = self._flow.ledger
        new = (ledger.lookup(keys) == 0) & (ledger.find_in_flight(keys) < 0)
        named = np.full(len(keys), -1, np.int64)
        for some in [np.flatnonzero(new), *np.flatnonzero(~new)[:, np.newaxis]]:
            if len(some):  # free slots are a stack: `reserve` takes the slot freed last
                self._flow.drop_private(slots[some][::-1])
                names, before = [keys[one] for one in some.tolist()], [after[one] for one in some.tolist()]
                named[some] = self._flow.reserve(groups[some], names, masks[some], before)
        assert ((named == slots) | (named < 0)).all(), "a chunk was given another slot than the one it is in"
        return named

    def drop_private(self, slots: IntArray) -> None:
        """Free private slots (-1 is ignored), committed or not."""
        self._flow.drop_private(slots)

    def payload(self, slot: int, group: int) -> memoryview:
        """The bytes of a chunk in its slot, writable."""
        return self.arena.slot_view(slot, self.geometry.groups[group].bytes_per_chunk)

    def drop_host(self) -> int:
        """Evict every unpinned chunk from host. Returns how many there were."""
        return self._flow.drop_host()

    # Driving

    def poll(self) -> None:
        """Process the tiers' outcomes and passed deadlines. Cheap when nothing is in flight."""
        # Cleared before polling: an outcome that is queued meanwhile sets it again.
        self._wake.clear()
        if self._flow.flights():
            for tier in self._guarded:
                for outcome in tier.poll():
                    self._flow.outcome(outcome.id, outcome.ok, outcome.masks, self._clock(), outcome.refused)
        self._flow.tick(self._clock())
        self._run_actions()
        self._log_changes()

    def _log_changes(self) -> None:
        """Log breakers that opened or closed, timeouts and a full host since the last call."""
        flow, report = self._flow, self._trouble.report
        for number, breaker in enumerate(flow.breakers):
            name = self.tiers[number].name
            if breaker.opened != self._opened[number]:
                self._opened[number] = breaker.opened
                self._left_alone[number] = True
                report(
                    logging.WARNING, "breaker_opened", "a tier keeps failing and is left alone for a while", tier=name
                )
            elif self._left_alone[number] and breaker.state(self._clock()) == "closed":
                self._left_alone[number] = False
                report(logging.WARNING, "breaker_closed", "a tier that was left alone is in use again", tier=name)
        if flow.counters.timeouts != self._timeouts:
            count, self._timeouts = flow.counters.timeouts - self._timeouts, flow.counters.timeouts
            report(logging.WARNING, "gave_up", "loads or stores of a lower tier passed their deadline", count=count)
        if flow.ledger.without_room != self._without_room:
            count, self._without_room = flow.ledger.without_room - self._without_room, flow.ledger.without_room
            report(logging.INFO, "no_room", "host memory is full of chunks in use: not stored", count=count)

    @property
    def idle(self) -> bool:
        """Whether nothing is in flight or queued for a spill: no need to poll."""
        return not self._flow.flights() and self._flow.spills_idle()

    def wait(self, timeout_s: float) -> None:
        """Sleep until an outcome is queued or a deadline is due, at most `timeout_s`. May return early. Then `poll`."""
        limit_s = min(timeout_s, self._flow.next_deadline_s - self._clock())
        if self._flow.flights() and not self._all_announce:
            limit_s = min(limit_s, _POLL_S)
        if limit_s > 0:
            self._wake.wait(limit_s)

    def wake(self) -> None:
        """End the `wait` of another thread, or its next one if it has not begun since the last `poll`."""
        self._wake.set()

    def flush(self, timeout_s: float) -> bool:
        """Wait until everything is spilled. False when that takes longer than `timeout_s`."""
        end_s = self._clock() + timeout_s
        self.poll()
        while not self._flow.spills_idle():
            left_s = end_s - self._clock()
            if left_s <= 0:
                return False
            self.wait(left_s)
            self.poll()
        return True

    def _failed(self, tier: int) -> None:
        self._flow.breakers[tier].failed(self._clock())

    def _run_actions(self) -> None:
        """Run the flow's actions. If a tier cannot start a transfer, that transfer has failed."""
        actions = self._flow.take_actions()
        while actions:
            for action in actions:
                tier = self._guarded[action.tier]
                if isinstance(action, Discard):
                    tier.discard(action.keys)
                    continue
                buffers = self.arena.slot_views(action.slots, action.sizes)
                transfer = Transfer(action.id, list(action.keys), buffers, action.masks, action.deadline_s)
                if not tier.begin(transfer, load=isinstance(action, StartLoad)):
                    self._flow.start_failed(action.id, self._clock())
            actions = self._flow.take_actions()

    def stats(self) -> dict[str, int | float | str]:
        """Counters since the start and gauges of now, by name; those of a tier under `tier name.`."""
        now_s = self._clock()
        stats: dict[str, int | float | str] = dict(self._flow.stats())
        stats["host_bytes"] = self.arena.bytes
        stats["hits.host"] = int(self._flow.hits[0])
        for number, slab in enumerate(self.slabs):
            stats[f"slab{number}.bytes_used"] = self._flow.ledger.used(number) * slab.slot_bytes
            stats[f"slab{number}.bytes"] = slab.slots * slab.slot_bytes
        for number, tier in enumerate(self.tiers):
            stats[f"hits.{tier.name}"] = int(self._flow.hits[number + 1])
            stats[f"{tier.name}.breaker"] = self._flow.breakers[number].state(now_s)
            stats[f"{tier.name}.breaker_opened"] = self._flow.breakers[number].opened
            stats |= {f"{tier.name}.{name}": value for name, value in self._guarded[number].stats().items()}
        return stats

    def check(self) -> None:
        """Assert all invariants of the store. Linear in the slots."""
        self._flow.check()
        assert self.arena.bytes == sum(slab.slots * slab.slot_bytes for slab in self.slabs)
        assert self.arena.slots == sum(slab.slots for slab in self.slabs)
        for before, after in zip(self.slabs, self.slabs[1:], strict=False):
            assert before.end_bytes <= after.offset_bytes, "slab classes overlap"

    def close(self, timeout_s: float = 5.0) -> None:
        """Finish the spills, close the tiers, unmap the arena, within `timeout_s`. Idempotent, also where it was
        interrupted.

        If a transfer is still unreported, its tier may touch the buffers later: the arena then stays mapped.
        """
        if self._closed:
            return
        if self.table is not None:
            self.table.close()
        end_s = self._clock() + timeout_s
        self.flush(timeout_s)
        for tier in self._guarded:
            tier.close(end_s)
        self.poll()
        self._closed = True
        if not self._flow.flights():
            self.arena.close()
            return
        text = "a tier did not give all memory back in time: it stays in use until the process ends"
        self._trouble.report(logging.WARNING, "memory_kept", text, count=self._flow.flights())
