"""What the scheduler's side remembers of one request of vLLM's, and how a prefix for it comes into host memory.

Owns a fetch at most: the chunks of the prefix that was chosen, pinned until the workers have copied them. Never blocks.
"""

from __future__ import annotations

import enum
import time
from collections.abc import Sequence
from typing import Any

import numpy as np

from stowage.cache.cost_model import CostModel
from stowage.cache.prefix_planner import Choice, Want
from stowage.cache.store import Fetch, TieredStore
from stowage.core.copy_plan import CopyPlan
from stowage.core.geometry import Group, IntArray, Kind
from stowage.core.groups import GroupStrategy
from stowage.core.key import SequenceKeys
from stowage.core.prefix_search import Certain
from stowage.core.resume_points import Points
from stowage.plugins.vllm import adapter
from stowage.storage.protocol import Probe

__all__ = ["Phase", "Prefixes", "Tracked"]


class Phase(enum.Enum):
    """NEW: nothing was looked up. ASKING: shared stores are asked. FETCHING: chunks come into host memory, or are
    there. LOADING: workers copy them. SETTLED: no load for this request (any more).
    """

    NEW = "new"
    ASKING = "asking"
    FETCHING = "fetching"
    LOADING = "loading"
    SETTLED = "settled"


class Tracked:
    """One request. ``stored``: by group, the first chunk that was not offered to the store yet. ``refused``: its loads
    failed on a worker once: it is computed, and never offered again. ``tainted``: its blocks were computed before the
    weights changed, and are not stored. ``junction``: where it parts from what is stored, as full attention sees it.
    """

    def __init__(self, request: Any, namespace: bytes, groups: Sequence[Group]) -> None:
        self.request = request
        self.keys = SequenceKeys(namespace, groups)
        self.phase = Phase.NEW
        self.stored = [0] * len(groups)
        self.refused = False
        self.tainted = False
        self.counted = False
        self.preemptions = 0
        self.boundary = 0
        self.junction = 0
        self.held = -1
        self.fetch: Fetch | None = None
        self.wants: list[Want] = []
        self.lost: set[bytes] = set()
        self.began_s = 0.0
        self.until_s: float | None = None
        self.probes: list[Probe] = []
        self._media = adapter.media_of(request)

    def extend_keys(self, tokens: int) -> None:
        """Take the request's tokens up to ``tokens`` into account."""
        media, self._media = self._media, []
        self.keys.extend(self.request.all_token_ids, tokens, media)

    def restart(self) -> None:
        """It lost its blocks, and begins anew. (A fetch is given back before.)"""
        assert self.fetch is None
        self.phase = Phase.NEW
        self.stored = [0] * len(self.stored)
        self.preemptions = self.request.num_preemptions
        self.lost.clear()
        self.until_s = None
        self.probes = []


class Prefixes:
    """Finds and fetches prefixes. ``timeout_s``: the longest wait for shared stores to say what they have."""

    def __init__(
        self,
        store: TieredStore,
        choice: Choice,
        cost_model: CostModel,
        strategies: Sequence[GroupStrategy],
        points: Points,
        timeout_s: float,
    ) -> None:
        self._store = store
        self._choice = choice
        self._cost_model = cost_model
        self._strategies = strategies
        self._points = points
        self._timeout_s = timeout_s
        self.given_up = 0
        self._under_way: list[Tracked] = []

    def ask(self, tracked: Tracked) -> None:
        """Start to ask shared stores about a request that is new."""
        if tracked.phase is not Phase.NEW or not self._store.probes:
            return
        usable = tracked.request.num_tokens - 1
        tracked.extend_keys(usable)
        groups = [strategy.group for strategy in self._strategies]
        wanted = [(g.index, tracked.keys.of(g.index)[: usable // g.chunk_tokens]) for g in groups]
        limit_s = self._cost_model.lookup_limit_s(usable, self._timeout_s)
        probes = self._store.probe(wanted, self._certain(usable))
        tracked.probes = [probe for probe in probes if probe.expected_s <= limit_s]
        tracked.until_s = time.monotonic() + limit_s
        tracked.phase = Phase.ASKING

    def _certain(self, usable: int) -> dict[int, Certain]:
        """By group, of those that are not stored whole: the chunks that are stored of every prompt. A state is stored
        where a step has ended, which is not known of another server.
        """
        found: dict[int, Certain] = {}
        for strategy in self._strategies:
            group = strategy.group
            if group.kind is Kind.RECURRENT:
                found[group.index] = Certain()
            elif group.kind is not Kind.FULL and not self._points.everywhere:
                chunks = range(usable // group.chunk_tokens)
                places = np.flatnonzero(self._points.kept(strategy, chunks)).tolist()
                found[group.index] = Certain(tuple(places), -(-group.window // group.chunk_tokens) + 1)
        return found

    def offer(self, tracked: Tracked, held: int) -> int | None:
        """The boundary up to which host memory now holds, pinned, what the device lacks beyond ``held`` tokens; 0 when
        there is nothing; ``None`` while it is on its way. Asking again changes nothing.
        """
        if tracked.phase is Phase.NEW:
            self.ask(tracked)
        if tracked.phase is Phase.ASKING:
            assert tracked.until_s is not None
            if time.monotonic() < tracked.until_s and not all(probe.done for probe in tracked.probes):
                return None
            tracked.until_s = None
        if tracked.phase is Phase.SETTLED and tracked.held == held:
            return 0
        if tracked.phase is Phase.FETCHING and tracked.held != held:  # the device holds more now, or less: choose anew
            self.give_back(tracked)
        if tracked.phase is not Phase.FETCHING and not self._choose(tracked, held):
            return 0
        while True:
            assert tracked.fetch is not None
            if not tracked.fetch.done:
                return None
            if self._came(tracked):
                return tracked.boundary
            self.give_back(tracked)
            if not self._choose(tracked, held):
                return 0

    def _choose(self, tracked: Tracked, held: int) -> bool:
        """Choose a boundary beyond ``held`` and begin to fetch it; False when there is none."""
        usable = tracked.request.num_tokens - 1
        tracked.extend_keys(usable + 1)  # a chunk that ends the prompt serves its other blocks
        rows = [tracked.keys]
        near, far, tracked.junction = self._choice.boundaries(rows, usable, tracked.lost, held)
        now_s = time.monotonic()
        late = tracked.until_s is not None and now_s >= tracked.until_s
        first = tracked.until_s is None
        if far > near and (late or (first and not self._choice.worth_loading(rows, near, far, held))):
            self.given_up += 1
            far = near
        tracked.held = held
        if far <= held:
            tracked.phase = Phase.SETTLED
            return False
        if first:
            tracked.until_s = now_s + self._cost_model.load_limit_s(far - max(near, held))
        tracked.phase, tracked.boundary = Phase.FETCHING, far
        tracked.wants = self._choice.wants(rows, far, held)
        tracked.began_s = now_s
        assert tracked.until_s is not None
        tracked.fetch = self._store.fetch([(want.group, want.keys) for want in tracked.wants], tracked.until_s)
        if not tracked.fetch.done:
            self._under_way.append(tracked)
        return True

    def note(self) -> None:
        """The store was polled: measure what has come by now. (vLLM asks again only when its step is over.)"""
        for tracked in [tracked for tracked in self._under_way if tracked.fetch is None or tracked.fetch.done]:
            self._under_way.remove(tracked)
            if tracked.fetch is not None:
                self._choice.measure(tracked.fetch, tracked.wants, time.monotonic() - tracked.began_s)

    def _came(self, tracked: Tracked) -> bool:
        """Whether a fetch that is done brought everything; what it did not bring is lost for this request."""
        assert tracked.fetch is not None
        plans = self._choice.plans(tracked.fetch, tracked.wants, tracked.boundary, tracked.lost, held=tracked.held)
        return plans is not None

    def plans(self, tracked: Tracked, tables: Sequence[IntArray]) -> list[CopyPlan] | None:
        """The copies into the blocks of ``tables``; ``None`` when a block that is needed is not there."""
        assert tracked.fetch is not None
        if not self._choice.has_places(tables, tracked.boundary, tracked.held):
            return None
        found = self._choice.plans(
            tracked.fetch, tracked.wants, tracked.boundary, tracked.lost, lambda group: tables[group], tracked.held
        )
        return None if found is None else [plan for _, plan in found]

    def give_back(self, tracked: Tracked) -> None:
        """Unpin what was fetched for it."""
        if tracked.fetch is not None:
            self._store.release(tracked.fetch)
            tracked.fetch = None
        tracked.wants = []
        tracked.phase, tracked.held = Phase.SETTLED, -1
