"""How a sequence gets its prefix: the longest boundary that device, host and lower tiers can serve together.

Owns admissions that are under way. ``begin`` asks the device first and the tiers for the rest, takes all blocks that
the prefix needs at once (so that two half-admitted sequences never wait for each other), and starts one fetch;
``arrive`` copies what came into the blocks. A chunk that failed is refused for the rest of the request's life and the
admission is tried again without it, so every retry is shorter than the one before. All tries of one admission together
wait no longer for loads than the recompute that the first one would have saved. Never waits for a tier.

What a sequence larger than the device gets from below stays in host memory, and is read there (``long_context``).
"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Items
from dataclasses import dataclass, field

import numpy as np

from stowage.cache.cost_model import CostModel, bytes_of_tiers
from stowage.cache.store import Fetch
from stowage.core.copy_plan import Incomplete, load_plan
from stowage.core.geometry import NULL_BLOCK, Kind
from stowage.engine.boundary import Boundaries, Need
from stowage.engine.kv_manager import KVManager, state_plan
from stowage.engine.overlapped_load import OverlappedLoads
from stowage.engine.remote_lookup import RemoteLookup
from stowage.engine.sequence import Phase, Sequence
from stowage.engine.swap.long_context import LongContextSwap
from stowage.executor.block_pool import blocks_needed


@dataclass(slots=True)
class Admission:
    """One admission on its way: the fetch brings ``needs[i].chunks`` for each group that lacks some. Without a fetch it
    waits for answers about what to fetch, and holds nothing.
    """

    sequence: Sequence
    boundary: int
    needs: list[Need]
    fetch: Fetch | None
    began_s: float
    began_forward: int
    below: dict[int, int] = field(default_factory=dict)
    """Bytes that the fetch was to bring from each lower tier."""
    far: int = 0
    """The boundary that the sequence reaches by a meeting, if that is further."""


class Admissions:
    """Admissions under way."""

    def __init__(
        self,
        kv_manager: KVManager,
        long_context: LongContextSwap,
        overlapped_loads: OverlappedLoads,
        boundaries: Boundaries,
        max_num_batched_tokens: int,
        cost_model: CostModel,
        remote_lookup: RemoteLookup,
        clock: Callable[[], float],
    ) -> None:
        self._kv_manager = kv_manager
        self._long_context = long_context
        self._overlapped_loads = overlapped_loads
        self._boundaries = boundaries
        self._max_num_batched_tokens = max_num_batched_tokens
        self._cost_model = cost_model
        self._remote_lookup = remote_lookup
        self._clock = clock
        self._pending: dict[int, Admission] = {}
        self.forwards = 0
        """Forwards so far, counted by the scheduler: while one runs, nobody sees what arrives."""
        self._tier_names = ["host"]
        if kv_manager.store is not None:
            self._tier_names += [tier.name for tier in kv_manager.store.tiers]

    def __len__(self) -> int:
        return len(self._pending)

    @property
    def sequences(self) -> list[Sequence]:
        return [admission.sequence for admission in self._pending.values()]

    def announce(self, sequence: Sequence) -> None:
        """``sequence`` was queued: ask shared tiers about it meanwhile."""
        self._remote_lookup.ask(sequence)

    def begin(self, sequence: Sequence, running: Items[Sequence]) -> bool:
        """Admit ``sequence``: afterwards it is RUNNING or LOADING. False, and nothing taken, while room is lacking;
        those of ``running`` that are larger than the device make some.

        When no other sequence holds blocks, waiting would not help and only what the prefix needs is asked for.
        """
        long = self._long_context.is_long(sequence)
        if long and not self._long_context.admits(sequence, [*running, *self.sequences]):
            return False
        sequence.restart()
        sequence.keys.extend(sequence.tokens, len(sequence.tokens))
        began_s = self._clock()
        if self._remote_lookup.open(sequence):
            sequence.times.admitted_s = sequence.times.admitted_s or began_s
            sequence.phase = Phase.LOADING
            self._pending[sequence.id] = Admission(sequence, 0, [], None, began_s, self.forwards)
            return True
        choice = self._boundaries.choose(sequence, whole=long)
        boundary, needs = choice.boundary, choice.needs
        for need in needs:
            need.pool.retain(need.retained)
            need.stays = long and need.pool.group.kind is Kind.FULL
        if not self._room(sequence, needs, running):
            for need in needs:
                need.pool.release(need.retained)
            return False
        sequence.times.admitted_s = sequence.times.admitted_s or began_s
        self._take_blocks(sequence, boundary, needs)
        lacking = [need for need in needs if need.chunks]
        for place, need in enumerate(lacking):
            need.place = place
        wanted = [(need.pool.group.index, self._boundaries.keys(sequence, need)) for need in lacking]
        admission = Admission(sequence, boundary, needs, None, self._clock(), self.forwards, choice.below, choice.far)
        if wanted:
            assert self._kv_manager.store is not None
            limit_s = self._cost_model.load_limit_s(boundary - choice.near) - sequence.waited_s
            admission.fetch = self._kv_manager.store.fetch(wanted, admission.began_s + limit_s)
            if not admission.fetch.done:
                sequence.phase = Phase.LOADING
                self._pending[sequence.id] = admission
                return True
        self._arrive(admission)
        return True

    def poll(self) -> list[Sequence]:
        """Finish what has come; return the sequences that are no longer loading: RUNNING, or WAITING again when a chunk
        failed, or when it is known now what to load.
        """
        finished = [a for a in self._pending.values() if not self._is_awaited(a)]
        for admission in finished:
            del self._pending[admission.sequence.id]
            if admission.fetch is not None:
                self._arrive(admission)
            else:
                self._again(admission)
        return [admission.sequence for admission in finished]

    def _is_awaited(self, admission: Admission) -> bool:
        return not admission.fetch.done if admission.fetch is not None else self._remote_lookup.open(admission.sequence)

    def cancel(self, sequence: Sequence) -> None:
        """Stop loading ``sequence`` and take its blocks."""
        admission = self._pending.pop(sequence.id)
        self._undo(admission)

    # taking blocks

    def _room(self, sequence: Sequence, needs: list[Need], running: Items[Sequence]) -> bool:
        """Whether there is room, or the long ones among ``running`` could make it."""
        asked = []
        for need in needs:
            pool, count = need.pool, need.lacking
            if running or self._pending:
                layout = self._kv_manager.layout.blocks[pool.group.index]
                whole = blocks_needed(layout, len(sequence.tokens), self._max_num_batched_tokens) - len(need.retained)
                first, left = self._long_context.headroom(pool, sequence, running)
                count = max(count, min(whole, first) if need.stays else whole) + left
            asked.append(count)
        return self._long_context.make_room(asked, running)

    def _take_blocks(self, sequence: Sequence, boundary: int, needs: list[Need]) -> None:
        """Fill the block tables up to ``boundary``: holes, then what the device had, with new blocks in between."""
        for need in needs:
            group, table = need.pool.group, sequence.tables[need.pool.group.index]
            fresh = need.pool.allocate(need.lacking)
            assert fresh is not None, "room was checked"
            if group.kind is Kind.RECURRENT:
                table.append(fresh)
                continue
            blocks = need.held.copy()
            if not need.stays:
                blocks[blocks == NULL_BLOCK] = fresh
            table.append([NULL_BLOCK] * need.first + blocks.tolist())
            sequence.freed[group.index] = need.first
            sequence.stored[group.index] = boundary // group.chunk_tokens

    # arriving

    def _arrive(self, admission: Admission) -> None:
        """Copy what came into its blocks; the sequence is RUNNING afterwards, or WAITING again with the failed chunks
        refused.
        """
        sequence = admission.sequence
        if not self._load(admission):
            self._measure_missed(admission)
            self._undo(admission)
            self._again(admission)
            return
        sequence.waited_s = 0.0
        fresh = not sequence.reused
        self._account(admission)
        sequence.times.started_s = sequence.times.started_s or self._clock()
        self._let_go(admission)
        sequence.computed = admission.boundary
        sequence.phase = Phase.RUNNING
        if admission.far > admission.boundary:
            self._overlapped_loads.begin(sequence, admission.far, self._boundaries, tells=fresh)

    def _again(self, admission: Admission) -> None:
        waited_s = self._clock() - admission.began_s
        admission.sequence.waited_s += waited_s
        self._kv_manager.counters.tiers_waited_s += waited_s
        admission.sequence.phase = Phase.WAITING

    def _undo(self, admission: Admission) -> None:
        self._let_go(admission)
        self._kv_manager.drop(admission.sequence)

    def _let_go(self, admission: Admission) -> None:
        """Release what was held only to be copied from: the fetch's slots, and snapshots on the device."""
        if admission.fetch is not None and self._kv_manager.store is not None:
            self._kv_manager.release(admission.fetch)
        for need in admission.needs:
            if need.pool.group.kind is Kind.RECURRENT:
                need.pool.release(need.retained)

    def _load(self, admission: Admission) -> bool:
        if not admission.boundary:
            return True
        complete = True
        for need in admission.needs:
            if need.pool.group.kind is Kind.RECURRENT:
                complete &= self._load_state(admission, need)
            elif need.chunks:
                complete &= self._load_chunks(admission, need)
        return complete

    def _load_chunks(self, admission: Admission, need: Need) -> bool:
        sequence, group = admission.sequence, need.pool.group
        assert admission.fetch is not None
        strategy = self._kv_manager.strategies[group.index]
        table = np.arange(len(sequence.tables[group.index])) if need.stays else sequence.table(group.index)
        slots = dict(zip(need.chunks, admission.fetch.slots[need.place].tolist(), strict=True))
        masks = np.zeros(max(need.chunks) + 1, dtype=np.uint64)
        masks[need.chunks] = admission.fetch.masks[need.place]
        already = np.zeros(need.first + len(need.held), dtype=np.bool_)
        already[need.first :] = need.held != NULL_BLOCK
        plan = load_plan(strategy, admission.boundary, slots, masks, table, already)
        if isinstance(plan, Incomplete):
            self._refuse(sequence, group.index, plan.chunks.tolist())
            return False
        if need.stays:
            self._long_context.adopt(sequence, need.pool, plan.copies, self._boundaries.keys(sequence, need))
            return True
        if not self._kv_manager.copy_in(need.pool, plan.copies):
            self._refuse(sequence, group.index, need.chunks)
            return False
        keys = self._boundaries.keys(sequence, need)
        self._kv_manager.name_loaded(need.pool, sequence.table(group.index), need.chunks, keys)
        return True

    def _load_state(self, admission: Admission, need: Need) -> bool:
        """Put the boundary's snapshot into the live block, from the device's own snapshot or from a slot."""
        sequence, pool = admission.sequence, need.pool
        live = int(sequence.table(pool.group.index)[0])
        if not need.chunks:
            pool.storage[live].copy_(pool.storage[need.retained[0]])
            return True
        assert admission.fetch is not None
        chunk = need.chunks[0]
        plan = state_plan(pool, live, admission.fetch.slots[need.place])
        if not plan.copies or not self._kv_manager.copy_in(pool, plan):
            self._refuse(sequence, pool.group.index, [chunk])
            return False
        self._kv_manager.cache_state(pool, sequence.keys.of(pool.group.index)[chunk], live)
        return True

    def _refuse(self, sequence: Sequence, group: int, chunks: list[int]) -> None:
        keys = sequence.keys.of(group)
        sequence.refused.update(keys[chunk] for chunk in chunks)

    def _account(self, admission: Admission) -> None:
        """Say where the reused tokens came from: by the chunks of the group that keeps the most tokens."""
        sequence = admission.sequence
        reused = dict.fromkeys(["device", *self._tier_names], 0)
        elapsed_s = self._clock() - admission.began_s
        if admission.boundary:
            sources = self._sources(admission)
            edges = [min(admission.boundary, edge) for edge in sources]
            names = list(sources.values())
            for begin, end, name in zip([0, *edges[1:]], [*edges[1:], admission.boundary], names, strict=True):
                reused[name] += end - begin
            self._kv_manager.counters.tokens_reused += admission.boundary
            self._kv_manager.counters.recompute_saved_s += self._cost_model.recompute_s(admission.boundary) or 0.0
        if admission.fetch is not None:
            self._kv_manager.counters.tiers_waited_s += elapsed_s
            if admission.began_forward == self.forwards:
                self._measure(admission, elapsed_s)
        if not sequence.reused:  # a preempted sequence that is computed again reuses its own prompt, which is no news
            sequence.reused = reused

    def _sources(self, admission: Admission) -> dict[int, str]:
        """First token of each needed chunk, and where it came from, for the group with the most needed tokens."""
        primary = max(admission.needs, key=lambda n: len(n.held) * n.pool.group.block_tokens)
        group = primary.pool.group
        came: dict[int, str] = {}
        if primary.chunks and admission.fetch is not None:
            tiers = admission.fetch.sources[primary.place].tolist()
            came = {c: self._tier_names[t] for c, t in zip(primary.chunks, tiers, strict=True)}
        chunks = self._kv_manager.strategies[group.index].needed(admission.boundary)
        return {chunk * group.chunk_tokens: came.get(chunk, "device") for chunk in chunks} or {0: "device"}

    def _measure(self, admission: Admission, elapsed_s: float) -> None:
        """Teach the pace what the slowest tier of this fetch delivered."""
        self._cost_model.delivered(self._came(admission), elapsed_s)

    def _measure_missed(self, admission: Admission) -> None:
        """Teach the pace what a fetch brought before its deadline: else each prompt would wait for its tier anew."""
        now_s, fetch = self._clock(), admission.fetch
        if (
            fetch is not None
            and admission.began_s < fetch.deadline_s <= now_s
            and admission.began_forward == self.forwards
        ):
            self._cost_model.missed(admission.below, self._came(admission), now_s - admission.began_s)

    def _came(self, admission: Admission) -> dict[int, int]:
        """Bytes that the fetch brought from each lower tier."""
        assert admission.fetch is not None
        came = [need for need in admission.needs if need.chunks]
        return bytes_of_tiers((admission.fetch.sources[need.place], need.pool.group.bytes_per_chunk) for need in came)
