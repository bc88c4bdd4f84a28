"""Prefixes that are computed from the front while tiers bring them from the back, until the two meet.

    tokens   0 . . . . . . . computed ->            <- arrived . . . . . . . . far
             | at hand or computed |    the gap    | pieces in host memory, pinned |

Where loading takes about as long as computing, each alone leaves the other's time unused, and both at once take less
than either: the time of both as of two workers on one job. The tier is asked for the tokens before ``far`` first, piece
after piece towards the front, so neither side has to know how fast the other is, and what fails or comes too late only
means that more is computed. (The idea: Jin, Liu, Zhang, Mao, "Compute Or Load KV Cache? Why Not Both?", 2024,
arXiv:2410.03065.)

Owns meetings under way. The sequence runs all the while; ``tokens`` says how many of its tokens the next step takes, so
that no step ends long after what it computes has arrived. Nothing is copied to the device before the gap is closed.
Never waits for a tier.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from stowage.cache.cost_model import CostModel, bytes_of_tiers
from stowage.cache.store import Fetch
from stowage.core.copy_plan import CopyPlan, Incomplete, load_plan
from stowage.core.geometry import NULL_BLOCK, Kind
from stowage.engine.boundary import Boundaries
from stowage.engine.kv_manager import KVManager, state_plan
from stowage.engine.sequence import Phase, Sequence
from stowage.executor.block_pool import BlockPool

PIECES_MAX = 8
"""Into so many a prefix is cut: what has come of a piece is of no use before all of it has."""
_PATIENCE = 1.5
"""A step may take so many times as long as what is still to come: else it is waited for."""


@dataclass(slots=True)
class Piece:
    """Tokens from ``begin`` on, up to the piece after it. ``chunks[g]``: those of group g that are needed."""

    begin: int
    chunks: list[list[int]]
    fetch: Fetch | None = None

    @property
    def here(self) -> bool:
        """Whether all of it has come."""
        fetch = self.fetch
        return fetch is not None and fetch.done and all((slots >= 0).all() for slots in fetch.slots)

    @property
    def failed(self) -> bool:
        return self.fetch is not None and self.fetch.done and not self.here


@dataclass(slots=True)
class OverlappedLoad:
    """``pieces``: the last tokens' first. ``tells``: whether what is reused is told to who asked."""

    sequence: Sequence
    far: int
    pieces: list[Piece]
    nbytes: list[dict[int, int]]
    """Of each piece, from each tier below the host, when the meeting began."""
    began_s: float
    tells: bool
    arrived: int = 0
    arrived_s: float = 0.0
    """When the last piece was seen to be there; at first, when the meeting began."""

    @property
    def front(self) -> int:
        """The first token of what has arrived."""
        return self.pieces[self.arrived - 1].begin if self.arrived else self.far

    @property
    def gap(self) -> int:
        """Tokens that neither side has yet."""
        return self.front - self.sequence.computed


class OverlappedLoads:
    """Meetings under way. ``step``: what they are cut at, a multiple of every group's blocks and of the pieces that
    prompts are computed in.
    """

    def __init__(self, kv_manager: KVManager, cost_model: CostModel, step: int, clock: Callable[[], float]) -> None:
        self._kv_manager = kv_manager
        self._cost_model = cost_model
        self._step = step
        self._clock = clock
        self._open: dict[int, OverlappedLoad] = {}

    def __len__(self) -> int:
        return len(self._open)

    def begin(self, sequence: Sequence, far: int, boundaries: Boundaries, *, tells: bool) -> None:
        """Load what lies before ``far``, while ``sequence``, which runs, is computed."""
        pieces = self._cut(sequence, far)
        nbytes = [boundaries.bytes_below(self._wanted(sequence, piece)) for piece in pieces]
        now_s = self._clock()
        overlapped_load = OverlappedLoad(sequence, far, pieces, nbytes, now_s, tells, arrived_s=now_s)
        self._open[sequence.id] = overlapped_load
        self._kv_manager.counters.prefixes_met += 1
        self._ask(overlapped_load)

    def poll(self) -> list[Sequence]:
        """Join what has met; return the sequences that cannot go on from where they are, because a copy failed: they
        have lost all they had, and begin anew.
        """
        lost = []
        for overlapped_load in list(self._open.values()):
            sequence = overlapped_load.sequence
            while (
                overlapped_load.arrived < len(overlapped_load.pieces)
                and overlapped_load.pieces[overlapped_load.arrived].here
            ):
                overlapped_load.arrived += 1
                overlapped_load.arrived_s = self._clock()
            if sequence.computed >= overlapped_load.far or any(piece.failed for piece in overlapped_load.pieces):
                self.drop(sequence)
            elif overlapped_load.gap > 0:
                self._ask(overlapped_load)
            elif not self._join(overlapped_load):
                lost.append(sequence)
        return lost

    def tokens(self, sequence: Sequence, count: int) -> int:
        """How many of the next ``count`` tokens of ``sequence`` a step is to compute; 0: what comes next is worth
        waiting for.
        """
        overlapped_load = self._open.get(sequence.id)
        if overlapped_load is None:
            return count
        if self._cost_model.recompute_s(overlapped_load.gap) is None:  # it was told to forget
            return min(count, overlapped_load.gap)
        end = min(-(-self._point(overlapped_load) // self._step) * self._step, overlapped_load.front)
        if self._cost_model.prefill_s(end - sequence.computed) > _PATIENCE * self._left_s(overlapped_load):
            return 0
        return min(count, end - sequence.computed)

    def drop(self, sequence: Sequence) -> None:
        """End the meeting of ``sequence``, if it has one; it is computed from where it is."""
        overlapped_load = self._open.pop(sequence.id, None)
        if overlapped_load is None:
            return
        self._learn(overlapped_load)
        for piece in overlapped_load.pieces:
            if piece.fetch is not None:
                self._kv_manager.release(piece.fetch)

    # pieces

    def _cut(self, sequence: Sequence, far: int) -> list[Piece]:
        """Cut at chunks of all groups, so that none is fetched twice."""
        groups = [pool.group for pool in self._kv_manager.pools]
        grain = math.lcm(self._step, *(group.chunk_tokens for group in groups if group.kind is not Kind.RECURRENT))
        begin, end = sequence.computed, far
        size = -(-(far - begin) // (PIECES_MAX * grain)) * grain
        pieces = []
        for first in [*range(-(-far // grain) * grain - size, begin, -size), begin]:
            pieces.append(Piece(first, [self._chunks(at, first, end, far) for at in range(len(groups))]))
            end = first
        return pieces

    def _chunks(self, at: int, begin: int, end: int, far: int) -> list[int]:
        """Those of a group that a resume at ``far`` needs for tokens from ``begin`` to ``end``; the state is with the
        last ones.
        """
        group, needed = self._kv_manager.pools[at].group, self._kv_manager.strategies[at].needed(far)
        if group.kind is Kind.RECURRENT:
            return [*needed] if end == far else []
        return [c for c in needed if (c + 1) * group.chunk_tokens > begin and c * group.chunk_tokens < end]

    def _wanted(self, sequence: Sequence, piece: Piece) -> list[tuple[BlockPool, list[bytes]]]:
        return [
            (pool, [sequence.keys.of(pool.group.index)[chunk] for chunk in chunks])
            for pool, chunks in zip(self._kv_manager.pools, piece.chunks, strict=True)
        ]

    def _ask(self, overlapped_load: OverlappedLoad) -> None:
        """Ask for what comes until the two meet, and for a piece more: while a forward runs nobody can."""
        store, now_s, point = self._kv_manager.store, self._clock(), self._point(overlapped_load)
        assert store is not None
        for place in range(overlapped_load.arrived, len(overlapped_load.pieces)):
            piece = overlapped_load.pieces[place]
            if piece.fetch is None:
                wanted = [(pool.group.index, keys) for pool, keys in self._wanted(overlapped_load.sequence, piece)]
                piece.fetch = store.fetch(wanted, now_s + self._cost_model.load_timeout_s)
            if piece.begin < point:
                break

    def _point(self, overlapped_load: OverlappedLoad) -> int:
        """The token where the two are predicted to meet."""
        gap, load_s = overlapped_load.gap, self._left_s(overlapped_load)
        compute_s = self._cost_model.recompute_s(gap) or 0.0
        share = load_s / (load_s + compute_s) if load_s + compute_s else 1.0
        return overlapped_load.sequence.computed + max(1, math.ceil(gap * share))

    def _left_s(self, overlapped_load: OverlappedLoad) -> float:
        """How long the gap would take to load from now on: as the pace predicts; what is overdue is taken to need as
        long again as it is late.
        """
        left: dict[int, int] = {}
        for nbytes in overlapped_load.nbytes[overlapped_load.arrived :]:
            for tier, count in nbytes.items():
                left[tier] = left.get(tier, 0) + count
        due_s = overlapped_load.arrived_s + self._cost_model.load_s(left) - self._clock()
        return abs(due_s)

    # joining

    def _join(self, overlapped_load: OverlappedLoad) -> bool:
        """Go on behind what has arrived. False when a copy failed. Where the device has no room, it is computed."""
        sequence, kv_manager, far = overlapped_load.sequence, self._kv_manager, overlapped_load.far
        fresh = []
        for pool, strategy in zip(kv_manager.pools, kv_manager.strategies, strict=True):
            first = max(strategy.needed_blocks(far).start, len(sequence.tables[pool.group.index]))
            lacking = 0 if pool.group.kind is Kind.RECURRENT else max(0, far // pool.group.block_tokens - first)
            fresh.append(lacking)
        if any(count > pool.available for pool, count in zip(kv_manager.pools, fresh, strict=True)):
            self.drop(sequence)
            return True
        computed = sequence.computed
        self._grow(sequence, fresh, far)
        ordered = sorted(range(len(fresh)), key=lambda g: kv_manager.pools[g].group.kind is Kind.RECURRENT)
        if not all(self._load(overlapped_load, group) for group in ordered):
            self.drop(sequence)
            kv_manager.drop(sequence)
            sequence.phase = Phase.WAITING
            return False
        sequence.computed = far
        self._account(overlapped_load, far - computed)
        self.drop(sequence)
        kv_manager.settle(sequence)
        return True

    def _grow(self, sequence: Sequence, fresh: list[int], far: int) -> None:
        """Blocks up to ``far``, with holes where nothing is needed."""
        for pool, count in zip(self._kv_manager.pools, fresh, strict=True):
            table = sequence.tables[pool.group.index]
            if pool.group.kind is Kind.RECURRENT:
                continue
            holes = far // pool.group.block_tokens - len(table) - count
            table.append([NULL_BLOCK] * max(0, holes) + (pool.allocate(count) or []))

    def _load(self, overlapped_load: OverlappedLoad, group: int) -> bool:
        """Copy what ``group`` needs of what has arrived; what was computed stays as it is."""
        sequence, pool = overlapped_load.sequence, self._kv_manager.pools[group]
        slots, masks = self._brought(overlapped_load, group)
        keys = sequence.keys.of(group)
        if pool.group.kind is Kind.RECURRENT:
            live, (chunk,) = int(sequence.table(group)[0]), slots
            if not self._kv_manager.copy_in(pool, state_plan(pool, live, np.array([slots[chunk]]))):
                sequence.refused.add(keys[chunk])
                return False
            self._kv_manager.cache_state(pool, keys[chunk], live)
            return True
        table = sequence.table(group)
        already = np.arange(len(table)) < sequence.computed // pool.group.block_tokens
        plan = load_plan(self._kv_manager.strategies[group], overlapped_load.far, slots, masks, table, already)
        if isinstance(plan, Incomplete):
            sequence.refused.update(keys[chunk] for chunk in plan.chunks.tolist())
            return False
        if not self._copy(pool, plan.copies):
            sequence.refused.update(keys[chunk] for chunk in slots)
            return False
        loaded = np.unique(np.flatnonzero(~already) // pool.group.blocks_per_chunk).tolist()
        chunks = [chunk for chunk in loaded if chunk in slots]
        self._kv_manager.name_loaded(pool, table, chunks, [keys[chunk] for chunk in chunks])
        sequence.stored[group] = overlapped_load.far // pool.group.chunk_tokens
        return True

    def _copy(self, pool: BlockPool, plan: CopyPlan) -> bool:
        return not plan.copies or self._kv_manager.copy_in(pool, plan)

    def _brought(self, overlapped_load: OverlappedLoad, group: int) -> tuple[dict[int, int], NDArray[np.uint64]]:
        """Slots and masks of the chunks of ``group`` that have arrived."""
        slots: dict[int, int] = {}
        found: dict[int, int] = {}
        for piece in overlapped_load.pieces[: overlapped_load.arrived]:
            assert piece.fetch is not None
            slots.update(zip(piece.chunks[group], piece.fetch.slots[group].tolist(), strict=True))
            found.update(zip(piece.chunks[group], piece.fetch.masks[group].tolist(), strict=True))
        masks = np.zeros(max(slots, default=-1) + 1, dtype=np.uint64)
        for chunk, mask in found.items():
            masks[chunk] = mask
        return slots, masks

    def _account(self, overlapped_load: OverlappedLoad, tokens: int) -> None:
        counters, sequence = self._kv_manager.counters, overlapped_load.sequence
        counters.tokens_reused += tokens
        counters.recompute_saved_s += self._cost_model.recompute_s(tokens) or 0.0
        if not overlapped_load.tells:
            return
        below: dict[int, int] = {}
        for piece in overlapped_load.pieces[: overlapped_load.arrived]:
            assert piece.fetch is not None
            for tier, count in self._came(piece.fetch).items():
                below[tier] = below.get(tier, 0) + count
        store = self._kv_manager.store
        assert store is not None
        most = max(below, key=lambda tier: below[tier], default=0)
        name = store.tiers[most - 1].name if most else "host"
        sequence.reused = sequence.reused | {name: sequence.reused.get(name, 0) + tokens}

    def _came(self, fetch: Fetch) -> dict[int, int]:
        """Bytes that a fetch brought from each tier below the host."""
        sizes = [pool.group.bytes_per_chunk for pool in self._kv_manager.pools]
        return bytes_of_tiers(zip(fetch.sources, sizes, strict=True))

    def _learn(self, overlapped_load: OverlappedLoad) -> None:
        """Teach the pace what a tier delivers. Nobody looked while forwards ran, so there are bounds only: what has
        come took no longer than until now, and while something was still on its way not all that was asked for had
        come.
        """
        seconds = max(self._clock() - overlapped_load.began_s, 1e-9)
        came: dict[int, int] = {}
        asked: dict[int, int] = {}
        async_copies = False
        for piece, nbytes in zip(overlapped_load.pieces, overlapped_load.nbytes, strict=True):
            if piece.fetch is None:
                continue
            async_copies |= not piece.fetch.done
            for total, part in ((came, self._came(piece.fetch)), (asked, nbytes)):
                for tier, count in part.items():
                    total[tier] = total.get(tier, 0) + count
        for tier, count in asked.items():
            self._cost_model.bounded(tier, came.get(tier, 0) / seconds, count / seconds if async_copies else math.inf)
