"""The prefix planner: which cached prefix to load. The one admission rule of engine, plugins and simulator.

    plan ──> fetch ──> (the caller waits) ──> copies ──> (the caller copies, and computes the rest)
     ^                                          │
     └──── again without the chunks that failed ┘

A plan resumes at the longest boundary that device, host memory and lower tiers can serve together. Loading from lower
tiers must be worth it: its predicted time may not exceed that of computing the tokens it adds to those in device and
host memory. Where it does, the plan goes without the slowest tier, then without the next slowest. The first try of a
request sets the time limit for the loads of all its tries. A chunk that is late or damaged is refused, and the next
plan goes without it.

If loading takes about as long as computing, the plan says how far the front is computed while the end is loaded
(``overlapped_load``).

Has no clock, threads or I/O: time is an argument, and the store is behind ``ChunkStore``.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import compress
from typing import Final, Protocol

import numpy as np

from stowage.cache.cost_model import CostModel, bytes_of_tiers
from stowage.cache.flow_types import Fetch, SourceArray
from stowage.cache.overlapped_load import ChunkFetcher, Fetched, GroupChunks, OverlappedLoad, RowKeys
from stowage.core.copy_plan import CopyPlan, Incomplete, load_plan
from stowage.core.geometry import IntArray, Kind, MaskArray
from stowage.core.groups import GroupStrategy
from stowage.core.groups.base import expand_masks, pack_masks
from stowage.core.reuse import longest_boundary
from stowage.storage.protocol import Probe

_HOST: Final = 0
_NOTHING: Final = np.zeros(0, np.uint64)
_NOWHERE: Final = np.zeros(0, np.int8)


class ChunkStore(ChunkFetcher, Protocol):
    """The part of ``TieredStore`` that is used here; a simulator has its own."""

    def locate(self, keys: list[bytes]) -> tuple[MaskArray, SourceArray]:
        """The valid blocks of each chunk, and where a fetch would take it from: -1 nowhere, 0 host, i + 1 tier i."""


@dataclass(slots=True)
class PrefixRequest:
    """One request for a prefix, over all its tries. ``refused``: chunks that failed. ``limit_s``: time for the loads of
    all tries, of which ``waited_s`` are used; ``None`` before the first load. ``probes``: look-ups in shared tiers,
    which are awaited until ``answers_until_s`` (``remote_lookup``).
    """

    refused: set[bytes] = field(default_factory=set)
    limit_s: float | None = None
    waited_s: float = 0.0
    probes: list[Probe] = field(default_factory=list)
    answers_until_s: float = 0.0

    def restart(self) -> None:
        """Reset the time limit after a run. Failed chunks stay refused."""
        self.limit_s, self.waited_s = None, 0.0


@dataclass(slots=True)
class PrefixPlan:
    """Where to resume, and which chunks each group of each row must load for it.

    ``overlap_end``: end of an overlapped load, which runs while tokens from ``boundary`` on are computed; equal to
    ``boundary`` if there is none. ``known``: how far the prompt is cached by full-attention groups, even if missing
    windows or states prevent resuming there. ``bytes_below``: bytes to load from each tier below the host;
    ``saved_tokens``: tokens that they save. ``load_refused``: the tiers have more, but loading it is not worth the
    time.
    """

    boundary: int
    overlap_end: int
    known: int
    groups: list[GroupChunks]
    bytes_below: dict[int, int] = field(default_factory=dict)
    saved_tokens: int = 0
    load_refused: bool = False
    fetch: Fetch | None = None
    began_s: float = 0.0

    @property
    def loads(self) -> list[GroupChunks]:
        """The groups with chunks to load, in the order of the pairs of ``fetch``."""
        return [part for part in self.groups if part.chunks]

    def fetched(self) -> Iterator[Fetched]:
        """``loads``, each with its fetched slots and masks."""
        assert self.fetch is not None
        return zip(self.loads, self.fetch.slots, self.fetch.masks, strict=True)


class PrefixPlanner:
    """Plans over ``store``; ``None``: only the device has chunks. A row is one prompt, given by its keys; all rows of a
    request resume at one boundary.
    """

    def __init__(self, store: ChunkStore | None, strategies: Sequence[GroupStrategy], cost_model: CostModel) -> None:
        self._store = store
        self._strategies = strategies
        self._cost_model = cost_model
        self._step = math.lcm(*(strategy.group.boundary_tokens for strategy in strategies))
        kinds = [strategy.group.kind for strategy in strategies]
        paged = [kind is not Kind.RECURRENT for kind in kinds]
        self._whole = [kind is Kind.FULL for kind in kinds] if Kind.FULL in kinds else paged

    # Planning

    def plan(
        self,
        request: PrefixRequest,
        rows: Sequence[RowKeys],
        usable: int,
        device: Sequence[MaskArray] = (),
        *,
        overlaps: bool = False,
    ) -> PrefixPlan:
        """Plan the longest prefix of at most ``usable`` tokens. ``device``: masks of valid blocks on the device, by row
        and group; empty: it has none. ``overlaps``: overlapped loading is allowed. That spends compute on tokens that
        could be loaded, so callers allow it only if no other prompt waits.
        """
        device = device or [_NOTHING] * (len(rows) * len(self._strategies))
        located = [self._locate(request, group, row) for row in rows for group in range(len(self._strategies))]
        stored, sources = [masks for masks, _ in located], [where for _, where in located]
        every = _union(device, stored)
        far = self._longest(every, usable)
        known = self._known(every, usable, far)
        plan = PrefixPlan(far, far, known, self._missing(rows, far, device))
        plan.bytes_below = self._bytes_below(plan.groups, sources)
        if not plan.bytes_below:
            return plan
        host = [np.where(where == _HOST, masks, np.uint64(0)) for masks, where in located]
        at_hand = self._longest(_union(device, host), usable)
        while plan.bytes_below:
            plan.saved_tokens = saved = len(rows) * (far - at_hand)
            if overlaps and self._cost_model.worth_overlapping(saved, plan.bytes_below):
                end = self._overlap_end(device, stored, at_hand, usable)
                if end > at_hand:
                    missing = self._missing(rows, at_hand, device)
                    return PrefixPlan(at_hand, end, known, missing, load_refused=plan.load_refused)
            if self._worth_loading(request, saved, plan.bytes_below):
                break
            without = self._cost_model.slowest(plan.bytes_below) if request.limit_s is None else None
            stored = [
                np.where(where > _HOST if without is None else where == without, np.uint64(0), masks)
                for masks, where in zip(stored, sources, strict=True)
            ]
            far = self._longest(_union(device, stored), usable)
            plan = PrefixPlan(far, far, known, self._missing(rows, far, device), load_refused=True)
            plan.bytes_below = self._bytes_below(plan.groups, sources)
        return plan

    def _locate(self, request: PrefixRequest, group: int, row: RowKeys) -> tuple[MaskArray, SourceArray]:
        if self._store is None:
            return _NOTHING, _NOWHERE
        keys = row.of(group)
        masks, sources = self._store.locate(keys)
        if request.refused:
            refused = np.fromiter((key in request.refused for key in keys), np.bool_, len(keys))
            masks, sources = np.where(refused, np.uint64(0), masks), np.where(refused, np.int8(-1), sources)
        return masks, sources

    def _longest(self, masks: Sequence[MaskArray], usable: int) -> int:
        rows = len(masks) // len(self._strategies)
        return longest_boundary([*self._strategies] * rows, masks, usable + 1, self._step)

    def _known(self, masks: Sequence[MaskArray], usable: int, far: int) -> int:
        """The longest boundary for the groups whose chunks are all stored: full attention, else all but recurrent."""
        if all(self._whole) or not any(self._whole):
            return far
        rows = len(masks) // len(self._strategies)
        strategies = [*compress(self._strategies, self._whole)] * rows
        return longest_boundary(strategies, [*compress(masks, self._whole * rows)], usable + 1, self._step)

    def _overlap_end(self, device: Sequence[MaskArray], stored: Sequence[MaskArray], at_hand: int, usable: int) -> int:
        """The longest boundary for which everything beyond ``at_hand`` is loaded from the store."""
        sizes = [strategy.group.chunk_tokens for strategy in self._strategies] * (len(device) // len(self._strategies))
        front = [held[: at_hand // size] for held, size in zip(device, sizes, strict=True)]
        return self._longest(_union(front, stored), usable)

    def _worth_loading(self, request: PrefixRequest, saved: int, bytes_below: dict[int, int]) -> bool:
        """Whether a load that saves ``saved`` tokens is worth it. Retries: while the request's time limit lasts."""
        if request.limit_s is not None:
            return request.waited_s < request.limit_s
        return self._cost_model.worth_loading(saved, bytes_below)

    def _missing(self, rows: Sequence[RowKeys], boundary: int, device: Sequence[MaskArray]) -> list[GroupChunks]:
        """The chunks that resuming at ``boundary`` needs and the device has not."""
        parts: list[GroupChunks] = []
        for row, keys in enumerate(rows):
            for group, strategy in enumerate(self._strategies):
                blocks, needed = strategy.needed_blocks(boundary), strategy.needed(boundary)
                held, names = device[len(parts)], keys.of(group)
                on_device = np.zeros(len(blocks), np.bool_)
                chunks, wanted = needed, names[needed.start : needed.stop]
                if len(held):
                    per_chunk = strategy.group.blocks_per_chunk
                    valid = expand_masks(held[needed.start : needed.stop], per_chunk)
                    valid = valid[blocks.start - needed.start * per_chunk :][: len(blocks)]
                    on_device[: len(valid)] = valid
                    lacking = np.flatnonzero(~on_device) + blocks.start
                    chunks = np.unique(lacking // per_chunk).tolist()
                    wanted = [names[chunk] for chunk in chunks]
                parts.append(GroupChunks(row, group, blocks.start, on_device, chunks, wanted))
        return parts

    def _bytes_below(self, parts: Sequence[GroupChunks], sources: Sequence[SourceArray]) -> dict[int, int]:
        return bytes_of_tiers(
            (
                where[part.chunks.start : part.chunks.stop] if isinstance(part.chunks, range) else where[part.chunks],
                self._strategies[part.group].group.bytes_per_chunk,
            )
            for part, where in zip(parts, sources, strict=True)
            if part.chunks
        )

    # Loading

    def fetch(self, request: PrefixRequest, plan: PrefixPlan, now_s: float) -> Fetch:
        """Start to load the plan's chunks into host memory. The caller releases the fetch."""
        assert self._store is not None
        if request.limit_s is None and plan.saved_tokens:
            request.limit_s = self._cost_model.load_limit_s(plan.saved_tokens)
        limit_s = self._cost_model.load_timeout_s if request.limit_s is None else request.limit_s - request.waited_s
        plan.began_s = now_s
        plan.fetch = self._store.fetch([(part.group, part.keys) for part in plan.loads], now_s + limit_s)
        return plan.fetch

    def copies(
        self,
        request: PrefixRequest,
        boundary: int,
        fetched: Iterable[Fetched],
        table: Callable[[GroupChunks], IntArray] | None = None,
    ) -> list[tuple[GroupChunks, CopyPlan]] | None:
        """The copies to the device of what was fetched; ``None``, with the chunks refused, if some are missing.
        ``table``: the block table, by default the identity.
        """
        copies: list[tuple[GroupChunks, CopyPlan]] = []
        refused: set[bytes] = set()
        for part, slots, masks in fetched:
            strategy = self._strategies[part.group]
            valid = np.zeros(part.chunks[-1] + 1, np.uint64)
            valid[part.chunks] = masks
            already = np.zeros(part.first_block + len(part.on_device), np.bool_)
            already[part.first_block :] = part.on_device
            blocks = np.arange(len(already), dtype=np.int64) if table is None else table(part)
            of_chunk = dict(zip(part.chunks, slots.tolist(), strict=True))
            found = load_plan(strategy, boundary, of_chunk, valid, blocks, already)
            if isinstance(found, Incomplete):
                incomplete = set(found.chunks.tolist())
                refused.update(key for chunk, key in zip(part.chunks, part.keys, strict=True) if chunk in incomplete)
            else:
                copies.append((part, found))
        request.refused |= refused
        return None if refused else copies

    def refuse_missing(self, request: PrefixRequest, plan: PrefixPlan) -> bool:
        """Refuse chunks that were not fetched; whether there were any. For callers without ``copies``."""
        missing = [
            key
            for part, slots, _ in plan.fetched()
            if slots.min() < 0
            for key in compress(part.keys, (slots < 0).tolist())
        ]
        request.refused.update(missing)
        return bool(missing)

    def loaded_bytes(self, plan: PrefixPlan) -> dict[int, int]:
        """Bytes that the fetch has loaded from each tier below the host."""
        assert plan.fetch is not None
        sizes = (self._strategies[part.group].group.bytes_per_chunk for part in plan.loads)
        return bytes_of_tiers(zip(plan.fetch.sources, sizes, strict=True))

    def learn(self, plan: PrefixPlan, now_s: float, *, at_once: bool = True) -> None:
        """Update the cost model with the fetch's speed, if its end was noticed ``at_once``, and with which tiers
        brought nothing until its deadline.
        """
        assert plan.fetch is not None
        if all((slots >= 0).all() for slots in plan.fetch.slots):
            if at_once:
                self._cost_model.delivered(self.loaded_bytes(plan), now_s - plan.began_s)
        elif plan.began_s < plan.fetch.deadline_s <= now_s:  # else every prompt would wait for that tier again
            came = self.loaded_bytes(plan)
            if at_once:
                self._cost_model.missed(plan.bytes_below, came, now_s - plan.began_s)
            for tier in plan.bytes_below.keys() - came.keys():
                self._cost_model.silent(tier, plan.began_s, plan.fetch.deadline_s)

    def overlap(self, row: RowKeys, begin: int, end: int, step: int, now_s: float) -> OverlappedLoad:
        """Start an overlapped load of ``[begin, end)``. ``step``: forwards end at multiples of it."""
        assert self._store is not None
        return OverlappedLoad(self._store, self._strategies, self._cost_model, row, range(begin, end), step, now_s)


def device_masks(strategies: Sequence[GroupStrategy], tokens: int) -> list[MaskArray]:
    """Masks of a device that can resume at ``tokens``, a multiple of all block sizes: blocks, or the state there."""
    found = []
    for strategy in strategies:
        group, blocks = strategy.group, tokens // strategy.group.block_tokens
        valid = np.zeros(-(-tokens // group.chunk_tokens) * group.blocks_per_chunk, np.bool_)
        if group.kind is not Kind.RECURRENT:
            valid[:blocks] = True
        elif blocks and tokens % group.block_tokens == 0:
            valid[blocks - 1] = True
        found.append(pack_masks(valid, group.blocks_per_chunk))
    return found


def _union(a: Sequence[MaskArray], b: Sequence[MaskArray]) -> list[MaskArray]:
    """The union of masks; arrays may differ in length."""
    return [
        _joined(one, other) if len(one) and len(other) else one if len(one) else other
        for one, other in zip(a, b, strict=True)
    ]


def _joined(one: MaskArray, other: MaskArray) -> MaskArray:
    short, long = sorted((one, other), key=len)
    joined = long.copy()
    joined[: len(short)] |= short
    return joined
