"""What a step of vLLM's leaves to be stored, and what became of it.

Owns the stores that workers were told of and have not all ended. A chunk is reserved when the step that completes it is
built, written by every rank when the step is computed, and found from when the last rank has said so.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import compress
from typing import Any, NamedTuple

import numpy as np

from stowage.cache.keymap import holds
from stowage.cache.store import TieredStore
from stowage.core.copy_plan import CopyPlan, store_plan
from stowage.core.geometry import NULL_BLOCK, BoolArray, Group, IntArray, Kind, MaskArray
from stowage.core.groups import GroupStrategy
from stowage.core.resume_points import NOWHERE, tail_of
from stowage.core.retention import Learner, Retention
from stowage.errors import StowageError
from stowage.plugins.vllm import adapter
from stowage.plugins.vllm.events import Announcements
from stowage.plugins.vllm.messages import Report, Store
from stowage.plugins.vllm.requests import Tracked

__all__ = ["Source", "Storing"]

States = Sequence[tuple[int, int, int]]
"""Group, block and boundary of recurrent states that a step leaves behind."""


_PAGED = (Kind.FULL, Kind.SLIDING, Kind.CHUNKED)


class Source(NamedTuple):
    """Where vLLM has the blocks of a group of ours: in its ``group``, ``parts`` of ours in each. ``spacing``: of a
    recurrent group that keeps the state after every block, how far apart those are of which some are stored; or 0.
    """

    group: int
    parts: int = 1
    spacing: int = 0


class _Single(NamedTuple):
    """A whole chunk, the only one that a step completes of a request in a group: its key, that of the chunk before it,
    and vLLM's blocks of it.
    """

    tracked: Tracked
    chunk: int
    key: bytes
    after: bytes
    row: list[int]


class _Layout(NamedTuple):
    """What of a group does not change. ``paged``: a window or full attention; ``full``: the latter."""

    strategy: GroupStrategy
    chunk_tokens: int
    per_chunk: int
    paged: bool
    full: bool


@dataclass(slots=True)
class _Writing:
    """``digests``: by what several ranks hold, of what each of them has."""

    slots: IntArray
    ranks_left: int
    digests: dict[tuple[int, int], set[bytes]] = field(default_factory=dict)


class Storing:
    """Into ``store``, by ``ranks`` workers. ``retention``: of requests that have none. ``sources``: by group."""

    def __init__(
        self,
        store: TieredStore,
        strategies: Sequence[GroupStrategy],
        retention: Retention | Learner,
        sources: Sequence[Source],
        ranks: int,
        announcements: Announcements | None,
    ) -> None:
        self._store = store
        self._strategies = strategies
        groups = [strategy.group for strategy in strategies]
        self._layouts = [
            _Layout(one, group.chunk_tokens, group.blocks_per_chunk, group.kind in _PAGED, group.kind is Kind.FULL)
            for one, group in zip(strategies, groups, strict=True)
        ]
        self._retention = retention.levels[-1] if isinstance(retention, Learner) else retention
        self._chunk_tokens = math.lcm(*(group.chunk_tokens for group in groups))
        self._full_masks: MaskArray = np.array([group.full_mask for group in groups], dtype=np.uint64)
        sizes = sorted({group.blocks_per_chunk for group in groups})
        alike = [
            [one for one in slab.groups if groups[one].blocks_per_chunk == n] for slab in store.slabs for n in sizes
        ]
        self._batches = [batch for batch in alike if batch]
        self.sources = sources
        self._ranks = ranks
        self._announcements = announcements
        self._writing: dict[int, _Writing] = {}
        self._numbers = 0
        self._offsets_by_size: dict[int, IntArray] = {}
        self._unlike = False

    @property
    def idle(self) -> bool:
        """Whether no worker has anything to write."""
        return not self._writing

    def plan(self, scheduled: Any, due: Sequence[tuple[Tracked, int, int]]) -> list[Store]:
        """What a step completes of these requests, which it computes from one token to another: chunks of known tokens.

        Where a request generates, that is one chunk per group: these are reserved together for all requests.
        """
        states = adapter.boundary_states(scheduled)
        step_blocks = adapter.StepBlocks(scheduled)
        singles: list[list[_Single]] = [[] for _ in self._layouts]
        stores = []
        for tracked, begin, end in due:
            progress, name = min(end, tracked.settled_tokens), tracked.request.request_id
            if progress < tracked.due or (blocks := step_blocks.of(name)) is None:
                continue
            found = self._plan_one(tracked, blocks, (begin, end, progress), states.get(name, ()), singles)
            if found:
                stores.append(self._begin(found))
        for batch in self._batches:
            some = [(group, singles[group]) for group in batch if singles[group]]
            if some and (found := self._reserve_singles(some)):
                stores.append(self._begin(found))
        return stores

    def _begin(self, found: Sequence[tuple[CopyPlan, IntArray]]) -> Store:
        self._numbers += 1
        self._writing[self._numbers] = _Writing(np.concatenate([slots for _, slots in found]), self._ranks)
        return Store(self._numbers, [plan for plan, _ in found])

    def _plan_one(
        self,
        tracked: Tracked,
        blocks: adapter.Blocks,
        step: tuple[int, int, int],
        states: States,
        singles: list[list[_Single]],
    ) -> list[tuple[CopyPlan, IntArray]]:
        """Of one request. ``step``: from where to where, and up to which token all is known. What can be reserved with
        others goes into ``singles``, by group.
        """
        begin, end, progress = step
        tracked.extend_keys(progress)
        prompt_tokens = len(tracked.request.prompt_token_ids)
        tail, retention = tail_of(prompt_tokens, self._chunk_tokens), tracked.retention or self._retention
        ends = retention.end(prompt_tokens)
        inside: set[int] = set()
        found: list[tuple[CopyPlan, IntArray]] = []
        tracked.due = NOWHERE
        for number, (strategy, chunk_tokens, per_chunk, paged, full) in enumerate(self._layouts):
            chunk, stop = tracked.stored[number], progress // chunk_tokens
            tracked.due = min(tracked.due, (max(chunk, stop) + 1) * chunk_tokens)
            if chunk >= stop:
                continue
            tracked.stored[number] = stop
            if not full and chunk * chunk_tokens >= max(ends, tracked.junction):
                continue
            if paged and chunk + 1 == stop and (full or tail <= chunk * chunk_tokens <= ends - chunk_tokens):
                row = blocks.numbers(number, chunk * per_chunk, stop * per_chunk)
                if len(row) == per_chunk and adapter.NULL not in row:
                    singles[number].append(_Single(tracked, chunk, *tracked.keys.one_and_before(number, chunk), row))
                    continue
            group, known = strategy.group, range(chunk, stop)
            table = adapter.table_of(blocks.numbers(self.sources[group.index].group))
            if group.spared_tokens:
                table = self._parts(group, table, begin, progress)
                kept = np.isin((np.arange(known.start, known.stop) + 1) * group.block_tokens, list(inside))
            elif group.kind is Kind.RECURRENT:
                drafting = tracked.drafts is not None and end > prompt_tokens
                table = self._states(group, None if drafting else table, begin, end, progress, states)
                kept = self._kept_states(tracked, group, table, begin, range(tail, ends + 1), inside)[known.start :]
            else:
                kept = retention.kept(strategy, known, prompt_tokens, tail, tracked.junction)
            chunks, masks = strategy.storable(progress, known.start, table)
            wanted = kept[chunks - known.start]
            found += self._reserve(tracked, group, chunks[wanted], masks[wanted], table)
        return found

    def _reserve_singles(self, some: Sequence[tuple[int, list[_Single]]]) -> list[tuple[CopyPlan, IntArray]]:
        """Of groups that share a slab class, and have as many blocks per chunk."""
        together = [one for _, of_group in some for one in of_group]
        groups = np.array([group for group, of_group in some for _ in of_group])
        keys, after = [one.key for one in together], [one.after for one in together]
        slots = self._store.reserve(groups, keys, self._full_masks[groups], after)
        blocks, first, found = np.array([one.row for one in together], dtype=np.int64), 0, []
        for group, of_group in some:
            mine, rows = slots[first : first + len(of_group)], blocks[first : first + len(of_group)]
            first += len(of_group)
            there = mine >= 0
            if not holds(there):
                mine, rows, of_group = mine[there], rows[there], [*compress(of_group, there.tolist())]
            if len(mine):
                size, count = rows.shape[1], rows.size
                plan = CopyPlan(group, rows.reshape(-1), mine.repeat(size), self._offsets(size, count))
                found.append((plan, mine))
                self._announce_singles(group, of_group)
        return found

    def _offsets(self, size: int, count: int) -> IntArray:
        """Of the blocks in whole chunks of ``size``: 0 to size - 1, again and again."""
        known = self._offsets_by_size.get(size)
        if known is None or len(known) < count:
            known = self._offsets_by_size[size] = np.arange(2 * count) % size
        return known[:count]

    def _announce_singles(self, group: int, singles: Sequence[_Single]) -> None:
        announcements = self._announcements
        if announcements is not None and group == announcements.group.index:
            for one in singles:
                names = one.tracked.keys.of(group)
                announcements.planned(self._numbers + 1, one.tracked.request, np.array([one.chunk]), names)

    def _reserve(
        self, tracked: Tracked, group: Group, chunks: IntArray, masks: MaskArray, table: IntArray
    ) -> Iterator[tuple[CopyPlan, IntArray]]:
        """Copies, and the slots that they fill. Chunks that do not follow one another do not depend on each other."""
        names = tracked.keys.of(group.index)
        gaps = np.flatnonzero(np.diff(chunks) > 1) + 1
        for some, valid in zip(np.split(chunks, gaps), np.split(masks, gaps), strict=True):
            if not len(some):
                continue
            first = int(some[0])
            after = names[first - 1] if first else None
            reserved = self._store.reserve(group.index, [names[chunk] for chunk in some.tolist()], valid, after)
            plan = store_plan(group, some, valid, reserved, table)
            if plan.copies:
                if self._announcements is not None and self._announcements.group is group:
                    self._announcements.planned(self._numbers + 1, tracked.request, some[reserved >= 0], names)
                yield plan, reserved[reserved >= 0]

    def _kept_states(
        self, tracked: Tracked, group: Group, table: IntArray, before: int, ends: range, inside: set[int]
    ) -> BoolArray:
        """Of the states that are there: the first at or behind each point, and those where later prompts resume, as at
        all ``ends``. Of those inside of a block, which go into ``inside``, the one that ends the prompt.
        """
        points = (tracked.retention or self._retention).points
        size, parts = group.block_tokens, self.sources[group.index].parts
        prompt_end = (len(tracked.request.prompt_token_ids) - 1) // size * size
        kept = np.zeros(len(table), dtype=np.bool_)
        for state in np.flatnonzero(table != NULL_BLOCK).tolist():
            here = (state + 1) * size
            if here % (size * parts) == 0:
                kept[state] = here in ends or here == tracked.junction or points.crossed(before, here)
                before = here
            elif prompt_end - size <= here <= prompt_end:  # drafts that read hidden states end it a unit before
                kept[state] = True
                inside.add(here)
        return kept

    def _parts(self, group: Group, table: IntArray, begin: int, progress: int) -> IntArray:
        """Of attention: the blocks that this step has filled up to each boundary inside of them."""
        ends = (np.arange(progress // group.block_tokens) + 1) * group.block_tokens
        blocks = table.repeat(self.sources[group.index].parts)[: len(ends)]
        known = np.full(len(ends), NULL_BLOCK, dtype=np.int64)
        known[: len(blocks)] = blocks
        known[(ends <= begin) | (ends % group.spared_tokens == 0)] = NULL_BLOCK
        return known

    def _states(
        self, group: Group, table: IntArray | None, begin: int, end: int, progress: int, states: States
    ) -> IntArray:
        """The blocks that hold, after this step, the state of exactly the tokens before their end.

        In vLLM's align mode these are the ones that it names, and the one that the step ends on (a step that runs ahead
        of the known tokens ends on a state that has no name yet). In the others each block that was completed. Of a
        step that verifies drafts (no ``table``) those that it names alone: a table does not tell how many were right.
        """
        size, (_, parts, spacing) = group.block_tokens, self.sources[group.index]
        known = np.full(progress // size, NULL_BLOCK, dtype=np.int64)
        if spacing and table is not None:
            known[: len(table)] = table[: len(known)]
            ends = (np.arange(len(known)) + 1) * size
            sparse = (ends % spacing != 0) & (ends != len(known) * size)
            known[(ends <= begin) | sparse] = NULL_BLOCK
            return known
        last = -(-end // (size * parts)) - 1
        if table is not None and progress == end and end % size == 0 and last < len(table):
            known[-1] = table[last]
        for number, block, boundary in states:
            if number == group.index and boundary % size == 0 and 0 < boundary <= progress:
                known[boundary // size - 1] = block
        return known

    def settle(self, report: Report) -> int:
        """What the workers have ended. How many stores failed: on one rank is on all."""
        failed = [number for number in report.failed if number in self._writing]
        for number in failed:
            self._store.abort(self._writing.pop(number).slots)
            self._announce(number, stored=False)
        for (number, *of), digests in report.digests.items():
            if number in self._writing:
                self._writing[number].digests.setdefault((of[0], of[1]), set()).update(digests)
        for number, ranks in report.ended.items():
            writing = self._writing.get(number)
            if writing is not None:
                writing.ranks_left -= ranks
                if not writing.ranks_left:
                    failed += self._end(number)
        return len(failed)

    def _end(self, number: int) -> list[int]:
        """The last rank has written: the store is found from now on, unless ranks differ in what they hold alike."""
        writing = self._writing.pop(number)
        alike = all(len(digests) == 1 for digests in writing.digests.values())
        if alike:
            self._store.commit(writing.slots)
        else:
            self._store.abort(writing.slots)
            self._unlike = True
        self._announce(number, stored=alike)
        return [] if alike else [number]

    def check_alike(self) -> None:
        """Raises ``StowageError``, once, when ranks were found to differ in what is stored once for them."""
        unlike, self._unlike = self._unlike, False
        if unlike:
            raise StowageError(
                "Tensor-parallel ranks differ in KV heads or latents that should be the same on each. Set "
                '"deduplicate_ranks": false, which stores what each rank has, and report the model.'
            )

    def _announce(self, number: int, *, stored: bool) -> None:
        if self._announcements is not None:
            self._announcements.ended(number, stored)
