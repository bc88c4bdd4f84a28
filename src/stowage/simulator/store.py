"""A tiered store without bytes: the real `Flow` over simulated tiers, with the interface that the planner needs.

Owns the flow and one node's tiers; transfers end as events in the event queue. The caller sets `now_s`.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import count
from types import MappingProxyType
from typing import Final

import numpy as np

from stowage.cache.flow import Flow
from stowage.cache.flow_types import Discard, Fetch, SourceArray, StartLoad, StartStore
from stowage.cache.policy import POLICIES
from stowage.cache.spill_queue import HOST_SHARE, SPILL_BYTES_MAX
from stowage.core.geometry import MaskArray
from stowage.core.prefix_search import Anchors
from stowage.simulator.scenario import Scenario
from stowage.simulator.tiers import Content, Tier, TransferEnd
from stowage.storage.protocol import Probe

_CHUNK_BYTES_MAX: Final = 1 << 20
"""The flow sees chunks as no longer than this, so that a transfer takes up to 32 of them: a trace's blocks are longer
than an engine's chunks, and one transfer each would cost the simulation more than all the rest."""


class EventQueue:
    """Events by time; events of the same time run in the order in which they were added."""

    __slots__ = ("_heap", "_numbers")

    def __init__(self) -> None:
        self._heap: list[tuple[float, int, Callable[[float], None]]] = []
        self._numbers = count()

    def at(self, time_s: float, call: Callable[[float], None]) -> None:
        """Run `call` at that time, with the time as its argument."""
        heapq.heappush(self._heap, (time_s, next(self._numbers), call))

    def run(self, until_s: float) -> float:
        """Run all events up to `until_s`. Returns the time of the last one, 0 if there was none."""
        last_s = 0.0
        while self._heap and self._heap[0][0] <= until_s:
            last_s, _, call = heapq.heappop(self._heap)
            call(last_s)
        return last_s


class SimulatedStore:
    """A `TieredStore` without bytes. `contents`: of its tiers, fastest first. `chunks_max`: the most in host memory.
    `progress` is called when a transfer has ended, or a deadline has passed. `unanswered`: the object store has not
    answered the look-up yet.
    """

    def __init__(
        self,
        scenario: Scenario,
        events: EventQueue,
        contents: list[Content],
        chunks_max: int,
        progress: Callable[[float], None],
    ) -> None:
        self.geometry = scenario.geometry(scenario.kv_bytes_per_token)
        self.now_s = 0.0
        self.unanswered = False
        self._scenario = scenario
        self._events = events
        self._progress = progress
        links = {"disk": scenario.disk, "object": scenario.object}
        names = scenario.tier_names[1:]
        self.tiers = [
            Tier(links[name], content, scenario.stored_bytes) for name, content in zip(names, contents, strict=True)
        ]
        (slab,) = scenario.slabs
        scale = -(-scenario.chunk_bytes // _CHUNK_BYTES_MAX)
        told = scenario.geometry(max(1, scenario.kv_bytes_per_token // scale))
        spill_bytes = min(
            max(SPILL_BYTES_MAX, 64 * scenario.chunk_bytes if scale > 1 else 0),
            slab.slots * slab.slot_bytes // HOST_SHARE,
        )
        indexes = [content.masks for content in contents]
        slab = replace(slab, slots=min(slab.slots, chunks_max + 1))  # slots that stay empty would cost memory
        self.flow = Flow(told, [slab], indexes, spill_bytes // scale, POLICIES[scenario.policy])
        self._ones: MaskArray = np.ones(64, np.uint64)

    # What the planner asks

    def locate(self, keys: list[bytes]) -> tuple[MaskArray, SourceArray]:
        masks, sources = self.flow.locate(keys, self.now_s)
        if self.unanswered:
            hidden = sources == len(self.tiers)
            masks, sources = np.where(hidden, np.uint64(0), masks), np.where(hidden, np.int8(-1), sources)
        return masks, sources

    def sources(self, keys: list[bytes]) -> SourceArray:
        return self.flow.sources(keys, self.now_s)

    def fetch(self, wanted: Sequence[tuple[int, list[bytes]]], deadline_s: float) -> Fetch:
        fetch = self.flow.fetch(wanted, deadline_s, self.now_s)
        self.act(self.now_s)
        if not fetch.done:
            self._events.at(deadline_s, self._tick)
        return fetch

    @property
    def probes(self) -> bool:
        return self._scenario.objects

    def probe(
        self, wanted: Sequence[tuple[int, list[bytes]]], certain: Mapping[int, Anchors] = MappingProxyType({})
    ) -> list[Probe]:
        """See `TieredStore`; an answer takes the link's latency."""
        probe = Probe(expected_s=self._scenario.object.latency_s)
        self._events.at(self.now_s + probe.expected_s, partial(self._answered, probe))
        return [probe]

    def _answered(self, probe: Probe, now_s: float) -> None:
        probe.done = True
        self._progress(now_s)

    # Storing

    def store(self, keys: list[bytes], after: bytes | None, now_s: float) -> None:
        """Store computed chunks in host memory."""
        self.flow.commit(self.flow.reserve(0, keys, self._whole(len(keys)), after), now_s)

    def _whole(self, count: int) -> MaskArray:
        """Read-only masks of ``count`` chunks, each with its one block."""
        if count > len(self._ones):
            self._ones = np.ones(2 * count, np.uint64)
        return self._ones[:count]

    # Tiers

    def act(self, now_s: float) -> None:
        """Carry out the flow's actions."""
        for action in self.flow.take_actions() if self.tiers else ():
            tier = self.tiers[action.tier]
            if isinstance(action, Discard):
                tier.content.drop(action.keys)
                continue
            assert isinstance(action, StartLoad | StartStore)
            landing = tier.begin(action, now_s)
            self._events.at(landing.at_s, partial(self._landed, action, landing))
            if landing.at_s > action.deadline_s and isinstance(action, StartStore):
                self._events.at(action.deadline_s, self._tick)

    def _landed(self, action: StartLoad | StartStore, landing: TransferEnd, now_s: float) -> None:
        self.tiers[action.tier].land(action, landing)
        masks = self._whole(len(landing.ok)) if isinstance(action, StartStore) else landing.ok.astype(np.uint64)
        self.flow.outcome(action.id, landing.ok, masks, now_s, landing.refused)
        self.act(now_s)
        self._progress(now_s)

    def _tick(self, now_s: float) -> None:
        self.flow.tick(now_s)
        self.act(now_s)
        self._progress(now_s)

    def check(self) -> None:
        """Assert the invariants of the flow. Contents, which nodes may share, are checked by their owner."""
        self.flow.check()
