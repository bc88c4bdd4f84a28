"""What a step of vLLM's leaves to be stored, and what became of it.

Owns the stores that workers were told of and have not all ended. A chunk is reserved when the step that completes it is
built, written by every rank when the step is computed, and found from when the last rank has said so.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from stowage.core.geometry import NULL_BLOCK, Group, IntArray, Kind
from stowage.core.groups import GroupStrategy
from stowage.core.plan import store_plan
from stowage.integrations.vllm import adapter
from stowage.integrations.vllm.events import Announcements
from stowage.integrations.vllm.messages import Report, Store
from stowage.integrations.vllm.requests import Tracked
from stowage.store import TieredStore

__all__ = ["Storing"]

States = Sequence[tuple[int, int, int]]
"""Group, block and boundary of recurrent states that a step leaves behind."""


@dataclass(slots=True)
class _Writing:
    slots: IntArray
    ranks_left: int


class Storing:
    """Into ``store``, by ``ranks`` workers. ``dense``: by group, whether a recurrent one keeps the state after every
    block, of which one per ``snapshot_tokens`` is stored.
    """

    def __init__(
        self,
        store: TieredStore,
        strategies: Sequence[GroupStrategy],
        dense: Sequence[bool],
        snapshot_tokens: int,
        ranks: int,
        announcements: Announcements | None,
    ) -> None:
        self._store = store
        self._strategies = strategies
        self._dense = dense
        self._snapshot_tokens = snapshot_tokens
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
        progress = min(end, tracked.request.num_tokens)
        groups = [strategy.group for strategy in self._strategies]
        due = [progress // group.chunk_tokens > tracked.stored[group.index] for group in groups]
        tables = adapter.step_table(scheduled, tracked.request.request_id) if any(due) else None
        if tables is None:
            return None
        tracked.extend_keys(progress)
        plans, slots = [], []
        for group in [group for group in groups if due[group.index]]:
            table = tables[group.index]
            if group.kind is Kind.RECURRENT:
                table = self._states(group, table, begin, end, progress, states)
            chunks, masks = self._strategies[group.index].storable(progress, tracked.stored[group.index], table)
            tracked.stored[group.index] = progress // group.chunk_tokens
            if not len(chunks):
                continue
            names, first = tracked.keys.of(group.index), int(chunks[0])
            after = names[first - 1] if first else None
            reserved = self._store.reserve(group.index, [names[chunk] for chunk in chunks.tolist()], masks, after)
            plan = store_plan(group, chunks, masks, reserved, table)
            if plan.copies:
                plans.append(plan)
                slots.append(reserved[reserved >= 0])
                if self._announcements is not None and self._announcements.group is group:
                    self._announcements.planned(self._numbers + 1, tracked.request, chunks[reserved >= 0], names)
        if not plans:
            return None
        self._numbers += 1
        self._writing[self._numbers] = _Writing(np.concatenate(slots), self._ranks)
        return Store(self._numbers, plans)

    def _states(self, group: Group, table: IntArray, begin: int, end: int, progress: int, states: States) -> IntArray:
        """The blocks that hold, after this step, the state of exactly the tokens before their end.

        In vLLM's align mode these are the ones that it names, and the one that the step ends on (a step that runs ahead
        of the known tokens ends on a state that has no name yet). In the others each block that was completed.
        """
        size = group.block_tokens
        known = np.full(progress // size, NULL_BLOCK, dtype=np.int64)
        if self._dense[group.index]:
            known[: len(table)] = table[: len(known)]
            ends = (np.arange(len(known)) + 1) * size
            sparse = (ends % self._snapshot_tokens != 0) & (ends != len(known) * size)
            known[(ends <= begin) | sparse] = NULL_BLOCK
            return known
        if progress == end and end % size == 0 and end // size <= len(table):
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
