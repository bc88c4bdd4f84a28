"""What a step of vLLM's leaves to be stored, and what became of it.

Owns the stores that workers were told of and have not all ended. A chunk is reserved when the step that completes it is
built, written by every rank when the step is computed, and found from when the last rank has said so.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from stowage.cache.store import TieredStore
from stowage.core.copy_plan import CopyPlan, store_plan
from stowage.core.geometry import NULL_BLOCK, BoolArray, Group, IntArray, Kind, MaskArray
from stowage.core.groups import GroupStrategy
from stowage.core.resume_points import Points, tail_of
from stowage.plugins.vllm import adapter
from stowage.plugins.vllm.events import Announcements
from stowage.plugins.vllm.messages import Report, Store
from stowage.plugins.vllm.requests import Tracked

__all__ = ["Storing"]

States = Sequence[tuple[int, int, int]]
"""Group, block and boundary of recurrent states that a step leaves behind."""


@dataclass(slots=True)
class _Writing:
    slots: IntArray
    ranks_left: int


class Storing:
    """Into ``store``, by ``ranks`` workers. ``points``: where prompts that part can resume. ``spacings``: by group, of
    recurrent ones that keep the state after every block, how far apart those are of which some are stored; or 0.
    """

    def __init__(
        self,
        store: TieredStore,
        strategies: Sequence[GroupStrategy],
        points: Points,
        spacings: Sequence[int],
        ranks: int,
        announcements: Announcements | None,
    ) -> None:
        self._store = store
        self._strategies = strategies
        self._points = points
        self._chunk_tokens = max(strategy.group.chunk_tokens for strategy in strategies)
        self._spacings = spacings
        self._ranks = ranks
        self._announcements = announcements
        self._writing: dict[int, _Writing] = {}
        self._numbers = 0

    @property
    def idle(self) -> bool:
        """Whether no worker has anything to write."""
        return not self._writing

    def plan(self, scheduled: Any, tracked: Tracked, begin: int, end: int, states: States) -> Store | None:
        """What the step from ``begin`` to ``end`` completes of one request: chunks of known tokens."""
        progress = min(end, tracked.settled_tokens)
        if progress < tracked.due:
            return None
        groups = [strategy.group for strategy in self._strategies]
        due = [progress // group.chunk_tokens > tracked.stored[group.index] for group in groups]
        tables = adapter.step_table(scheduled, tracked.request.request_id)
        if tables is None:
            return None
        tracked.extend_keys(progress)
        prompt_tokens = len(tracked.request.prompt_token_ids)
        tail = tail_of(prompt_tokens, self._chunk_tokens, self._store.geometry.boundary_tokens)
        found: list[tuple[CopyPlan, IntArray]] = []
        for group in [group for group in groups if due[group.index]]:
            table, known = tables[group.index], range(tracked.stored[group.index], progress // group.chunk_tokens)
            if group.kind is Kind.RECURRENT:
                drafting = tracked.drafts is not None and end > prompt_tokens
                table = self._states(group, None if drafting else table, begin, end, progress, states)
                kept = self._kept_states(group, tracked.junction, table, begin, tail)[known.start :]
            else:
                strategy = self._strategies[group.index]
                kept = self._points.kept(strategy, known, tail, tracked.junction)
            chunks, masks = self._strategies[group.index].storable(progress, known.start, table)
            tracked.stored[group.index] = known.stop
            wanted = kept[chunks - known.start]
            found += self._reserve(tracked, group, chunks[wanted], masks[wanted], table)
        tracked.note_stored()
        if not found:
            return None
        self._numbers += 1
        self._writing[self._numbers] = _Writing(np.concatenate([slots for _, slots in found]), self._ranks)
        return Store(self._numbers, [plan for plan, _ in found])

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

    def _kept_states(self, group: Group, junction: int, table: IntArray, before: int, tail: int) -> BoolArray:
        """Of the states that are there: the first at or behind each point, and those where later prompts resume."""
        kept = np.zeros(len(table), dtype=np.bool_)
        for state in np.flatnonzero(table != NULL_BLOCK).tolist():
            here = (state + 1) * group.block_tokens
            kept[state] = here >= tail or here == junction or self._points.crossed(before, here)
            before = here
        return kept

    def _states(
        self, group: Group, table: IntArray | None, begin: int, end: int, progress: int, states: States
    ) -> IntArray:
        """The blocks that hold, after this step, the state of exactly the tokens before their end.

        In vLLM's align mode these are the ones that it names, and the one that the step ends on (a step that runs ahead
        of the known tokens ends on a state that has no name yet). In the others each block that was completed. Of a
        step that verifies drafts (no ``table``) those that it names alone: a table does not tell how many were right.
        """
        size = group.block_tokens
        known = np.full(progress // size, NULL_BLOCK, dtype=np.int64)
        spacing = self._spacings[group.index]
        if spacing and table is not None:
            known[: len(table)] = table[: len(known)]
            ends = (np.arange(len(known)) + 1) * size
            sparse = (ends % spacing != 0) & (ends != len(known) * size)
            known[(ends <= begin) | sparse] = NULL_BLOCK
            return known
        if table is not None and progress == end and end % size == 0 and end // size <= len(table):
            known[-1] = table[end // size - 1]
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
        for number, ranks in report.ended.items():
            writing = self._writing.get(number)
            if writing is not None:
                writing.ranks_left -= ranks
                if not writing.ranks_left:
                    self._store.commit(self._writing.pop(number).slots)
                    self._announce(number, stored=True)
        return len(failed)

    def _announce(self, number: int, *, stored: bool) -> None:
        if self._announcements is not None:
            self._announcements.ended(number, stored)
