"""Admission: fetch a sequence's cached prefix from the tiers and copy it into device blocks.

Owns admissions in flight. ``begin`` allocates all blocks of the prefix at once (so that two half-admitted sequences
never wait for each other) and starts one fetch; ``poll`` copies fetched chunks into the blocks. Which prefix is worth
loading, and for how long, is decided by ``cache.prefix_planner``. Never waits for a tier.

A sequence larger than the device reads its prefix in host memory instead (``long_context``).
"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Items
from dataclasses import dataclass, field
from functools import partial

import numpy as np
from numpy.typing import NDArray

from stowage.cache.cost_model import CostModel
from stowage.cache.overlapped_load import GroupChunks
from stowage.cache.prefix_planner import PrefixPlan, PrefixPlanner
from stowage.cache.remote_lookup import RemoteLookup
from stowage.core.geometry import NULL_BLOCK, Kind
from stowage.engine.kv_manager import KVManager
from stowage.engine.overlapped_loads import OverlappedLoads
from stowage.engine.sequence import Phase, Sequence
from stowage.engine.swap.long_context import LongContextSwap
from stowage.executor.block_pool import BlockPool, blocks_needed


@dataclass(slots=True)
class GroupBlocks:
    """The device blocks of one group for a prefix. ``held``: for each needed block, the device block that has it
    already, or ``NULL_BLOCK``. ``on_host``: what is fetched is read in host memory and gets no blocks.
    """

    pool: BlockPool
    part: GroupChunks
    held: NDArray[np.int64]
    on_host: bool

    @property
    def missing(self) -> int:
        """Blocks to allocate. A recurrent group always needs one for the live state, besides the snapshot."""
        if self.on_host:
            return 0
        return 1 if self.pool.group.kind is Kind.RECURRENT else int((self.held == NULL_BLOCK).sum())

    @property
    def retained(self) -> list[int]:
        found: list[int] = self.held[self.held != NULL_BLOCK].tolist()
        return found


@dataclass(slots=True)
class Admission:
    """One admission in flight. Without a plan it waits for the lookup in remote tiers, and holds no blocks."""

    sequence: Sequence
    began_s: float
    began_forward: int
    plan: PrefixPlan | None = None
    blocks: list[GroupBlocks] = field(default_factory=list)


class Admissions:
    """Admissions in flight."""

    def __init__(
        self,
        kv_manager: KVManager,
        long_context: LongContextSwap,
        overlapped_loads: OverlappedLoads,
        planner: PrefixPlanner,
        max_num_batched_tokens: int,
        cost_model: CostModel,
        remote_lookup: RemoteLookup,
        clock: Callable[[], float],
    ) -> None:
        self._kv_manager = kv_manager
        self._long_context = long_context
        self._overlapped_loads = overlapped_loads
        self._planner = planner
        self._max_num_batched_tokens = max_num_batched_tokens
        self._cost_model = cost_model
        self._remote_lookup = remote_lookup
        self._clock = clock
        self._pending: dict[int, Admission] = {}
        self.forwards = 0
        """Forwards so far, counted by the scheduler: arrivals during a forward are seen only after it."""
        self._tier_names = ["host"]
        if kv_manager.store is not None:
            self._tier_names += [tier.name for tier in kv_manager.store.tiers]

    def __len__(self) -> int:
        return len(self._pending)

    @property
    def sequences(self) -> list[Sequence]:
        return [admission.sequence for admission in self._pending.values()]

    def announce(self, sequence: Sequence) -> None:
        """``sequence`` was queued: start its lookup in remote tiers."""
        if not self._remote_lookup.asks:
            return
        sequence.keys.extend(sequence.tokens, len(sequence.tokens))
        self._remote_lookup.ask(sequence.prefix, [sequence.keys], sequence.reusable_tokens - 1, self._clock())

    def begin(self, sequence: Sequence, running: Items[Sequence], *, others_wait: bool) -> bool:
        """Admit ``sequence``: RUNNING or LOADING afterwards. False, with nothing allocated, while blocks are missing;
        long sequences of ``running`` offload blocks to make room.

        Loading and computing overlap only on an otherwise idle engine. Headroom for the whole prompt is demanded only
        while other sequences hold blocks; otherwise waiting would not help.
        """
        long = self._long_context.is_long(sequence)
        if long and not self._long_context.admits(sequence, [*running, *self.sequences]):
            return False
        sequence.restart()
        sequence.keys.extend(sequence.tokens, len(sequence.tokens))
        began_s = self._clock()
        if self._remote_lookup.pending(sequence.prefix, began_s):
            sequence.times.admitted_s = sequence.times.admitted_s or began_s
            sequence.phase = Phase.LOADING
            self._pending[sequence.id] = Admission(sequence, began_s, self.forwards)
            return True
        idle = not (running or self._pending or others_wait)
        plan, blocks = self._plan(sequence, long, overlaps=idle and not long)
        for one in blocks:
            one.pool.retain(one.retained)
        if not self._has_room(sequence, blocks, running):
            for one in blocks:
                one.pool.release(one.retained)
            return False
        self._kv_manager.counters.loads_refused += plan.load_refused
        sequence.times.admitted_s = sequence.times.admitted_s or began_s
        self._take_blocks(sequence, plan.boundary, blocks)
        admission = Admission(sequence, self._clock(), self.forwards, plan, blocks)
        if plan.loads and not self._planner.fetch(sequence.prefix, plan, admission.began_s).done:
            sequence.phase = Phase.LOADING
            self._pending[sequence.id] = admission
            return True
        self._complete(admission, plan)
        return True

    def poll(self) -> list[Sequence]:
        """Finish admissions whose fetch or lookup is done. Returns their sequences: RUNNING, or WAITING again when a
        chunk failed or when the remote lookup has just been answered.
        """
        finished = [a for a in self._pending.values() if not self._is_awaited(a)]
        for admission in finished:
            del self._pending[admission.sequence.id]
            if admission.plan is not None:
                self._complete(admission, admission.plan)
            else:
                self._requeue(admission)
        return [admission.sequence for admission in finished]

    def _is_awaited(self, admission: Admission) -> bool:
        if admission.plan is None:
            return self._remote_lookup.pending(admission.sequence.prefix, self._clock())
        return admission.plan.fetch is not None and not admission.plan.fetch.done

    def cancel(self, sequence: Sequence) -> None:
        """Stop loading ``sequence`` and free its blocks."""
        admission = self._pending.pop(sequence.id)
        self._roll_back(admission)

    # taking blocks

    def _plan(self, sequence: Sequence, long: bool, overlaps: bool) -> tuple[PrefixPlan, list[GroupBlocks]]:
        """The plan, and the device blocks that hold parts of it already. Long sequences never overlap."""
        pools, strategies = self._kv_manager.pools, self._kv_manager.strategies
        keys = [sequence.keys.of(pool.group.index) for pool in pools]
        device = [pool.lookup(names) for pool, names in zip(pools, keys, strict=True)]
        usable = sequence.reusable_tokens - 1
        plan = self._planner.plan(sequence.prefix, [sequence.keys], usable, device, overlaps=overlaps)
        blocks = []
        for pool, strategy, names, part in zip(pools, strategies, keys, plan.groups, strict=True):
            chunks = strategy.needed(plan.boundary)
            found = np.array([pool.find(names[chunk]) for chunk in chunks], dtype=np.int64).reshape(-1)
            first = part.first_block - chunks.start * pool.group.blocks_per_chunk
            held = found[first : first + len(part.on_device)]
            blocks.append(GroupBlocks(pool, part, held, long and pool.group.kind is Kind.FULL))
        return plan, blocks

    def _has_room(self, sequence: Sequence, blocks: list[GroupBlocks], running: Items[Sequence]) -> bool:
        """Whether there are enough blocks, after long sequences of ``running`` have offloaded some of theirs."""
        asked = []
        for one in blocks:
            pool, count = one.pool, one.missing
            if running or self._pending:
                tokens = len(sequence.tokens)
                whole = blocks_needed(pool.group, tokens, self._max_num_batched_tokens) - len(one.retained)
                first, left = self._long_context.headroom(pool, sequence, running)
                count = max(count, min(whole, first) if one.on_host else whole) + left
            asked.append(count)
        return self._long_context.make_room(asked, running)

    def _take_blocks(self, sequence: Sequence, boundary: int, blocks: list[GroupBlocks]) -> None:
        """Fill the block tables up to ``boundary``: holes, then cached blocks with new ones in between."""
        for one in blocks:
            group, table = one.pool.group, sequence.tables[one.pool.group.index]
            fresh = one.pool.allocate(one.missing)
            assert fresh is not None, "room was checked"
            if group.kind is Kind.RECURRENT:
                table.append(fresh)
                continue
            filled = one.held.copy()
            if not one.on_host:
                filled[filled == NULL_BLOCK] = fresh
            table.append([NULL_BLOCK] * one.part.first_block + filled.tolist())
            sequence.freed[group.index] = one.part.first_block
            sequence.stored[group.index] = boundary // group.chunk_tokens

    # arriving

    def _complete(self, admission: Admission, plan: PrefixPlan) -> None:
        """Copy fetched chunks into their blocks: RUNNING afterwards, or WAITING again with failed chunks refused."""
        sequence = admission.sequence
        loaded = self._load(admission, plan)
        if plan.fetch is not None:
            self._planner.learn(plan, self._clock(), at_once=admission.began_forward == self.forwards)
        if not loaded:
            self._roll_back(admission)
            self._requeue(admission)
            return
        sequence.prefix.restart()
        fresh = not sequence.reused
        self._account(admission, plan)
        sequence.times.started_s = sequence.times.started_s or self._clock()
        self._release_sources(admission)
        sequence.computed = plan.boundary
        sequence.phase = Phase.RUNNING
        if plan.overlap_end > plan.boundary:
            self._overlapped_loads.begin(sequence, plan.overlap_end, reports=fresh)

    def _requeue(self, admission: Admission) -> None:
        waited_s = self._clock() - admission.began_s
        admission.sequence.prefix.waited_s += waited_s
        self._kv_manager.counters.tiers_waited_s += waited_s
        admission.sequence.phase = Phase.WAITING

    def _roll_back(self, admission: Admission) -> None:
        self._release_sources(admission)
        self._kv_manager.drop(admission.sequence)

    def _release_sources(self, admission: Admission) -> None:
        """Release what was held only as the source of copies: the fetch's slots, and snapshots on the device."""
        if admission.plan is not None and admission.plan.fetch is not None:
            self._kv_manager.release(admission.plan.fetch)
        for one in admission.blocks:
            if one.pool.group.kind is Kind.RECURRENT:
                one.pool.release(one.retained)

    def _load(self, admission: Admission, plan: PrefixPlan) -> bool:
        """Copy fetched chunks, and snapshots that the device has, into the blocks of the sequence."""
        sequence = admission.sequence
        if plan.fetch is not None:
            on_host = [one.pool.group.index for one in admission.blocks if one.on_host]
            table = partial(self._kv_manager.loaded_table, sequence, on_host)
            copies = self._planner.copies(sequence.prefix, plan.boundary, plan.fetched(), table)
            if copies is None:
                return False
            for part, copy in copies:
                if part.group in on_host:
                    self._long_context.read_in_place(sequence, self._kv_manager.pools[part.group], copy, part.keys)
                elif not self._kv_manager.load(sequence, part, copy):
                    return False
        for one in admission.blocks:
            if one.pool.group.kind is Kind.RECURRENT and one.retained:
                live = int(sequence.table(one.pool.group.index)[0])
                one.pool.storage[live].copy_(one.pool.storage[one.retained[0]])
        return True

    def _account(self, admission: Admission, plan: PrefixPlan) -> None:
        """Count the reused tokens by tier, going by the chunks of the group with the most tokens."""
        sequence, boundary = admission.sequence, plan.boundary
        reused = dict.fromkeys(["device", *self._tier_names], 0)
        elapsed_s = self._clock() - admission.began_s
        if boundary:
            sources = self._sources(admission, plan)
            edges = [min(boundary, edge) for edge in sources]
            for begin, end, name in zip([0, *edges[1:]], [*edges[1:], boundary], sources.values(), strict=True):
                reused[name] += end - begin
            self._kv_manager.counters.tokens_reused += boundary
            self._kv_manager.counters.recompute_saved_s += self._cost_model.recompute_s(boundary) or 0.0
        if plan.fetch is not None:
            self._kv_manager.counters.tiers_waited_s += elapsed_s
        if not sequence.reused:  # a recomputed sequence reuses its own prompt, which does not count
            sequence.reused = reused

    def _sources(self, admission: Admission, plan: PrefixPlan) -> dict[int, str]:
        """First token of each needed chunk, and its tier, for the group with the most needed tokens."""
        primary = max(admission.blocks, key=lambda one: len(one.held) * one.pool.group.block_tokens)
        group = primary.pool.group
        came: dict[int, str] = {}
        if primary.part.chunks and plan.fetch is not None:
            tiers = plan.fetch.sources[plan.loads.index(primary.part)].tolist()
            came = {c: self._tier_names[t] for c, t in zip(primary.part.chunks, tiers, strict=True)}
        chunks = self._kv_manager.strategies[group.index].needed(plan.boundary)
        return {chunk * group.chunk_tokens: came.get(chunk, "device") for chunk in chunks} or {0: "device"}
