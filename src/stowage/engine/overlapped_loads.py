"""Overlapped loads: compute the front of a prefix while tiers load its end.

Owns the loads in flight; ``cache.overlapped_load`` decides what each fetches and how far a step computes. Fetched
chunks are copied to the device only when computing has reached them. The sequence runs meanwhile. Never waits for a
tier.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from stowage.cache.cost_model import CostModel
from stowage.cache.overlapped_load import LoadState, OverlappedLoad
from stowage.cache.prefix_planner import PrefixPlanner
from stowage.core.geometry import NULL_BLOCK, Kind
from stowage.engine.kv_manager import KVManager
from stowage.engine.sequence import Phase, Sequence


@dataclass(slots=True)
class Overlapped:
    """One sequence's overlapped load. ``reports``: whether the request's ``reused_tokens`` count what is loaded."""

    sequence: Sequence
    load: OverlappedLoad
    reports: bool


class OverlappedLoads:
    """Loads in flight. ``step``: forwards end at multiples of it."""

    def __init__(
        self,
        kv_manager: KVManager,
        planner: PrefixPlanner,
        cost_model: CostModel,
        step: int,
        clock: Callable[[], float],
    ) -> None:
        self._kv_manager = kv_manager
        self._planner = planner
        self._cost_model = cost_model
        self._step = step
        self._clock = clock
        self._open: dict[int, Overlapped] = {}

    def __len__(self) -> int:
        return len(self._open)

    def begin(self, sequence: Sequence, end: int, *, reports: bool) -> None:
        """Load chunks backwards from ``end``, while ``sequence``, which runs, is computed."""
        self._kv_manager.counters.overlapped_loads += 1
        load = self._planner.overlap(sequence.keys, sequence.computed, end, self._step, self._clock())
        self._open[sequence.id] = Overlapped(sequence, load, reports)

    def poll(self) -> list[Sequence]:
        """Join loads that computing has reached. Returns sequences whose copies failed: they have lost all blocks."""
        lost = []
        for one in list(self._open.values()):
            state = one.load.poll(one.sequence.computed, self._clock())
            if state is LoadState.OVER:
                self.drop(one.sequence)
            elif state is LoadState.MET and not self._join(one):
                lost.append(one.sequence)
        return lost

    def tokens(self, sequence: Sequence, count: int) -> int:
        """How many of the next ``count`` tokens of ``sequence`` a step should compute; 0: loading them is faster."""
        one = self._open.get(sequence.id)
        return count if one is None else one.load.tokens(sequence.computed, count, self._clock())

    def drop(self, sequence: Sequence) -> None:
        """End the overlapped load of ``sequence``, if it has one; the rest is computed."""
        one = self._open.pop(sequence.id, None)
        if one is None:
            return
        one.load.learn(self._clock())
        for fetch in one.load.fetches:
            self._kv_manager.release(fetch)

    def _join(self, one: Overlapped) -> bool:
        """Copy what was loaded and continue behind it; compute it if the device has no room. False: a copy failed."""
        sequence, kv_manager, end = one.sequence, self._kv_manager, one.load.end
        fresh = []
        for pool, strategy in zip(kv_manager.pools, kv_manager.strategies, strict=True):
            first = max(strategy.needed_blocks(end).start, len(sequence.tables[pool.group.index]))
            missing = 0 if pool.group.kind is Kind.RECURRENT else max(0, end // pool.group.block_tokens - first)
            fresh.append(missing)
        if any(count > pool.available for pool, count in zip(kv_manager.pools, fresh, strict=True)):
            self.drop(sequence)
            return True
        self._grow(sequence, fresh, end)
        if not self._load(one):
            self.drop(sequence)
            kv_manager.drop(sequence)
            sequence.phase = Phase.WAITING
            return False
        computed, sequence.computed = sequence.computed, end
        self._account(one, end - computed)
        self.drop(sequence)
        kv_manager.cache_blocks(sequence)
        return True

    def _grow(self, sequence: Sequence, fresh: list[int], end: int) -> None:
        """Grow the block tables to ``end``, with holes where no block is needed."""
        for pool, count in zip(self._kv_manager.pools, fresh, strict=True):
            table = sequence.tables[pool.group.index]
            if pool.group.kind is Kind.RECURRENT:
                continue
            holes = end // pool.group.block_tokens - len(table) - count
            table.append([NULL_BLOCK] * max(0, holes) + (pool.allocate(count) or []))

    def _load(self, one: Overlapped) -> bool:
        """Copy fetched chunks behind the computed ones."""
        sequence, load = one.sequence, one.load
        table = partial(self._kv_manager.loaded_table, sequence, ())
        copies = self._planner.copies(sequence.prefix, load.end, load.fetched(sequence.computed), table)
        if copies is None or not all(self._kv_manager.load(sequence, part, copy) for part, copy in copies):
            return False
        for pool in self._kv_manager.pools:
            if pool.group.kind is not Kind.RECURRENT:
                sequence.stored[pool.group.index] = load.end // pool.group.chunk_tokens
        return True

    def _account(self, one: Overlapped, tokens: int) -> None:
        counters, sequence, store = self._kv_manager.counters, one.sequence, self._kv_manager.store
        counters.tokens_reused += tokens
        counters.recompute_saved_s += self._cost_model.recompute_s(tokens) or 0.0
        if one.reports:
            assert store is not None
            name = ["host", *(tier.name for tier in store.tiers)][one.load.main_source()]
            sequence.reused = sequence.reused | {name: sequence.reused.get(name, 0) + tokens}
