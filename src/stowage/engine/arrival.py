"""How a sequence gets its prefix: the longest boundary that device, host and lower tiers can serve together.

Owns admissions that are under way. ``begin`` asks the device first and the tiers for the rest, takes all blocks that
the prefix needs at once (so that two half-admitted sequences never wait for each other), and starts one fetch;
``arrive`` copies what came into the blocks. A chunk that failed is refused for the rest of the request's life and the
admission is tried again without it, so every retry is shorter than the one before. All tries of one admission together
wait no longer for loads than the recompute that the first one would have saved. Never waits for a tier.

What a sequence that is larger than the device gets from below stays in host memory, and is read there (``overflow``).
"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Items
from dataclasses import dataclass, field

import numpy as np

from stowage.core.geometry import NULL_BLOCK, Kind
from stowage.core.plan import Incomplete, load_plan
from stowage.engine.boundary import Boundaries, Need
from stowage.engine.meeting import Meetings
from stowage.engine.overflow import Overflow
from stowage.engine.pace import Pace, bytes_of_tiers
from stowage.engine.pool import blocks_needed
from stowage.engine.questions import Questions
from stowage.engine.residency import Residency, state_plan
from stowage.engine.sequence import Phase, Sequence
from stowage.store import Fetch


@dataclass(slots=True)
class Arrival:
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


class Arrivals:
    """Admissions under way."""

    def __init__(
        self,
        residency: Residency,
        overflow: Overflow,
        meetings: Meetings,
        boundaries: Boundaries,
        step_tokens_max: int,
        pace: Pace,
        questions: Questions,
        clock: Callable[[], float],
    ) -> None:
        self._residency = residency
        self._overflow = overflow
        self._meetings = meetings
        self._boundaries = boundaries
        self._step_tokens_max = step_tokens_max
        self._pace = pace
        self._questions = questions
        self._clock = clock
        self._pending: dict[int, Arrival] = {}
        self.forwards = 0
        """Forwards so far, counted by the scheduler: while one runs, nobody sees what arrives."""
        self._tier_names = ["host"]
        if residency.store is not None:
            self._tier_names += [tier.name for tier in residency.store.tiers]

    def __len__(self) -> int:
        return len(self._pending)

    @property
    def sequences(self) -> list[Sequence]:
        return [arrival.sequence for arrival in self._pending.values()]

    def announce(self, sequence: Sequence) -> None:
        """``sequence`` was queued: ask shared tiers about it meanwhile."""
        self._questions.ask(sequence)

    def begin(self, sequence: Sequence, running: Items[Sequence]) -> bool:
        """Admit ``sequence``: afterwards it is RUNNING or LOADING. False, and nothing taken, while room is lacking;
        those of ``running`` that are larger than the device make some.

        When no other sequence holds blocks, waiting would not help and only what the prefix needs is asked for.
        """
        long = self._overflow.is_long(sequence)
        if long and not self._overflow.admits(sequence, [*running, *self.sequences]):
            return False
        sequence.restart()
        sequence.keys.extend(sequence.tokens, len(sequence.tokens))
        began_s = self._clock()
        if self._questions.open(sequence):
            sequence.times.admitted_s = sequence.times.admitted_s or began_s
            sequence.phase = Phase.LOADING
            self._pending[sequence.id] = Arrival(sequence, 0, [], None, began_s, self.forwards)
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
        arrival = Arrival(sequence, boundary, needs, None, self._clock(), self.forwards, choice.below, choice.far)
        if wanted:
            assert self._residency.store is not None
            limit_s = self._pace.load_limit_s(boundary - choice.near) - sequence.waited_s
            arrival.fetch = self._residency.store.fetch(wanted, arrival.began_s + limit_s)
            if not arrival.fetch.done:
                sequence.phase = Phase.LOADING
                self._pending[sequence.id] = arrival
                return True
        self._arrive(arrival)
        return True

    def poll(self) -> list[Sequence]:
        """Finish what has come; return the sequences that are no longer loading: RUNNING, or WAITING again when a chunk
        failed, or when it is known now what to load.
        """
        finished = [a for a in self._pending.values() if not self._is_awaited(a)]
        for arrival in finished:
            del self._pending[arrival.sequence.id]
            if arrival.fetch is not None:
                self._arrive(arrival)
            else:
                self._again(arrival)
        return [arrival.sequence for arrival in finished]

    def _is_awaited(self, arrival: Arrival) -> bool:
        return not arrival.fetch.done if arrival.fetch is not None else self._questions.open(arrival.sequence)

    def cancel(self, sequence: Sequence) -> None:
        """Stop loading ``sequence`` and take its blocks."""
        arrival = self._pending.pop(sequence.id)
        self._undo(arrival)

    # taking blocks

    def _room(self, sequence: Sequence, needs: list[Need], running: Items[Sequence]) -> bool:
        """Whether there is room, or the long ones among ``running`` could make it."""
        asked = []
        for need in needs:
            pool, count = need.pool, need.lacking
            if running or self._pending:
                layout = self._residency.layout.blocks[pool.group.index]
                whole = blocks_needed(layout, len(sequence.tokens), self._step_tokens_max) - len(need.retained)
                first, left = self._overflow.headroom(pool, sequence, running)
                count = max(count, min(whole, first) if need.stays else whole) + left
            asked.append(count)
        return self._overflow.make_room(asked, running)

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

    def _arrive(self, arrival: Arrival) -> None:
        """Copy what came into its blocks; the sequence is RUNNING afterwards, or WAITING again with the failed chunks
        refused.
        """
        sequence = arrival.sequence
        if not self._load(arrival):
            self._measure_missed(arrival)
            self._undo(arrival)
            self._again(arrival)
            return
        sequence.waited_s = 0.0
        fresh = not sequence.reused
        self._account(arrival)
        sequence.times.started_s = sequence.times.started_s or self._clock()
        self._let_go(arrival)
        sequence.computed = arrival.boundary
        sequence.phase = Phase.RUNNING
        if arrival.far > arrival.boundary:
            self._meetings.begin(sequence, arrival.far, self._boundaries, tells=fresh)

    def _again(self, arrival: Arrival) -> None:
        waited_s = self._clock() - arrival.began_s
        arrival.sequence.waited_s += waited_s
        self._residency.counters.tiers_waited_s += waited_s
        arrival.sequence.phase = Phase.WAITING

    def _undo(self, arrival: Arrival) -> None:
        self._let_go(arrival)
        self._residency.drop(arrival.sequence)

    def _let_go(self, arrival: Arrival) -> None:
        """Release what was held only to be copied from: the fetch's slots, and snapshots on the device."""
        if arrival.fetch is not None and self._residency.store is not None:
            self._residency.release(arrival.fetch)
        for need in arrival.needs:
            if need.pool.group.kind is Kind.RECURRENT:
                need.pool.release(need.retained)

    def _load(self, arrival: Arrival) -> bool:
        if not arrival.boundary:
            return True
        complete = True
        for need in arrival.needs:
            if need.pool.group.kind is Kind.RECURRENT:
                complete &= self._load_state(arrival, need)
            elif need.chunks:
                complete &= self._load_chunks(arrival, need)
        return complete

    def _load_chunks(self, arrival: Arrival, need: Need) -> bool:
        sequence, group = arrival.sequence, need.pool.group
        assert arrival.fetch is not None
        strategy = self._residency.strategies[group.index]
        table = np.arange(len(sequence.tables[group.index])) if need.stays else sequence.table(group.index)
        slots = dict(zip(need.chunks, arrival.fetch.slots[need.place].tolist(), strict=True))
        masks = np.zeros(max(need.chunks) + 1, dtype=np.uint64)
        masks[need.chunks] = arrival.fetch.masks[need.place]
        already = np.zeros(need.first + len(need.held), dtype=np.bool_)
        already[need.first :] = need.held != NULL_BLOCK
        plan = load_plan(strategy, arrival.boundary, slots, masks, table, already)
        if isinstance(plan, Incomplete):
            self._refuse(sequence, group.index, plan.chunks.tolist())
            return False
        if need.stays:
            self._overflow.adopt(sequence, need.pool, plan.copies, self._boundaries.keys(sequence, need))
            return True
        if not self._residency.copy_in(need.pool, plan.copies):
            self._refuse(sequence, group.index, need.chunks)
            return False
        keys = self._boundaries.keys(sequence, need)
        self._residency.name_loaded(need.pool, sequence.table(group.index), need.chunks, keys)
        return True

    def _load_state(self, arrival: Arrival, need: Need) -> bool:
        """Put the boundary's snapshot into the live block, from the device's own snapshot or from a slot."""
        sequence, pool = arrival.sequence, need.pool
        live = int(sequence.table(pool.group.index)[0])
        if not need.chunks:
            pool.storage[live].copy_(pool.storage[need.retained[0]])
            return True
        assert arrival.fetch is not None
        chunk = need.chunks[0]
        plan = state_plan(pool, live, arrival.fetch.slots[need.place])
        if not plan.copies or not self._residency.copy_in(pool, plan):
            self._refuse(sequence, pool.group.index, [chunk])
            return False
        self._residency.cache_state(pool, sequence.keys.of(pool.group.index)[chunk], live)
        return True

    def _refuse(self, sequence: Sequence, group: int, chunks: list[int]) -> None:
        keys = sequence.keys.of(group)
        sequence.refused.update(keys[chunk] for chunk in chunks)

    def _account(self, arrival: Arrival) -> None:
        """Say where the reused tokens came from: by the chunks of the group that keeps the most tokens."""
        sequence = arrival.sequence
        reused = dict.fromkeys(["device", *self._tier_names], 0)
        elapsed_s = self._clock() - arrival.began_s
        if arrival.boundary:
            sources = self._sources(arrival)
            edges = [min(arrival.boundary, edge) for edge in sources]
            names = list(sources.values())
            for begin, end, name in zip([0, *edges[1:]], [*edges[1:], arrival.boundary], names, strict=True):
                reused[name] += end - begin
            self._residency.counters.tokens_reused += arrival.boundary
            self._residency.counters.recompute_saved_s += self._pace.recompute_s(arrival.boundary) or 0.0
        if arrival.fetch is not None:
            self._residency.counters.tiers_waited_s += elapsed_s
            if arrival.began_forward == self.forwards:
                self._measure(arrival, elapsed_s)
        if not sequence.reused:  # a preempted sequence that is computed again reuses its own prompt, which is no news
            sequence.reused = reused

    def _sources(self, arrival: Arrival) -> dict[int, str]:
        """First token of each needed chunk, and where it came from, for the group with the most needed tokens."""
        primary = max(arrival.needs, key=lambda n: len(n.held) * n.pool.group.block_tokens)
        group = primary.pool.group
        came: dict[int, str] = {}
        if primary.chunks and arrival.fetch is not None:
            tiers = arrival.fetch.sources[primary.place].tolist()
            came = {c: self._tier_names[t] for c, t in zip(primary.chunks, tiers, strict=True)}
        chunks = self._residency.strategies[group.index].needed(arrival.boundary)
        return {chunk * group.chunk_tokens: came.get(chunk, "device") for chunk in chunks} or {0: "device"}

    def _measure(self, arrival: Arrival, elapsed_s: float) -> None:
        """Teach the pace what the slowest tier of this fetch delivered."""
        self._pace.delivered(self._came(arrival), elapsed_s)

    def _measure_missed(self, arrival: Arrival) -> None:
        """Teach the pace what a fetch brought before its deadline: else each prompt would wait for its tier anew."""
        now_s, fetch = self._clock(), arrival.fetch
        if fetch is not None and arrival.began_s < fetch.deadline_s <= now_s and arrival.began_forward == self.forwards:
            self._pace.missed(arrival.below, self._came(arrival), now_s - arrival.began_s)

    def _came(self, arrival: Arrival) -> dict[int, int]:
        """Bytes that the fetch brought from each lower tier."""
        assert arrival.fetch is not None
        came = [need for need in arrival.needs if need.chunks]
        return bytes_of_tiers((arrival.fetch.sources[need.place], need.pool.group.bytes_per_chunk) for need in came)
