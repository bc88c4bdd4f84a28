"""Stores what a step of vLLM's computed: reserves the chunks, tells the workers, and follows each store to its end.

Owns the stores that workers were told of and have not all ended. A chunk is reserved when the step that completes it is
built, written by every rank when the step is computed, and found from when the last rank has said so.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from stowage.cache.store import TieredStore
from stowage.core.copy_plan import CopyPlan, store_plan
from stowage.core.geometry import NULL_BLOCK, BoolArray, Group, IntArray, Kind, MaskArray
from stowage.core.groups import GroupStrategy
from stowage.core.resume_points import NOWHERE, tail_of
from stowage.core.retention import Learner, Retention
from stowage.errors import StowageError
from stowage.plugins.vllm import adapter
from stowage.plugins.vllm.answers import Answer, Answers
from stowage.plugins.vllm.events import Announcements
from stowage.plugins.vllm.messages import Report, Store, WholeChunks
from stowage.plugins.vllm.requests import Tracked

States = Sequence[tuple[int, int, int]]
"""Group, block and boundary of recurrent states that a step leaves behind."""


_KINDS = tuple(Kind), (Kind.FULL,), (Kind.FULL, Kind.SLIDING, Kind.CHUNKED)
"""Of what `_Groups` tells apart."""


class Source(NamedTuple):
    """Where vLLM has the blocks of a group of ours: in its ``group``, ``parts`` of ours in each. ``spacing``: of a
    recurrent group that keeps the state after every block, how far apart those are of which some are stored; or 0.
    """

    group: int
    parts: int = 1
    spacing: int = 0

    @classmethod
    def of(cls, number: int, shape: adapter.GroupShape, spacing: int) -> Source:
        """Of our group of this number."""
        return cls(number if shape.of is None else shape.of, shape.parts, spacing if shape.dense else 0)


class _Groups(NamedTuple):
    """The groups with chunks of one size, by number: all, those of full attention, those and windows."""

    all: list[int]
    full: list[int]
    paged: list[int]


@dataclass(slots=True)
class _Writing:
    """A store that workers have not ended yet. ``answers``: the chunks in ``slots``, where these have no keys yet.
    ``digests``: by what several ranks hold, of what each of them has.
    """

    slots: IntArray | list[int]
    ranks_left: int
    answers: list[Answer] | None = None
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
        self._retention = retention.most
        self._chunk_tokens = math.lcm(*(group.chunk_tokens for group in groups))
        self._answers = Answers(store, groups)
        self._of_size = {
            size: _Groups(
                *([g.index for g in groups if g.chunk_tokens == size and g.kind in kinds] for kinds in _KINDS)
            )
            for size in {group.chunk_tokens: None for group in groups}
        }
        self.sources = sources
        self._ranks = ranks
        self._announcements = announcements
        self._writing: dict[int, _Writing] = {}
        self._numbers = 0
        self._prompts = 0  # stores under way that are not of answers alone
        self._unlike = self._told_unlike = False

    @property
    def idle(self) -> bool:
        """Whether no worker has anything to write."""
        return not self._writing

    @property
    def urgent(self) -> bool:
        """Whether workers write more than answers, which can wait for those of the next steps, or slots run short."""
        return self._prompts > 0 or self._answers.short

    @property
    def unnamed(self) -> int:
        """Slots that are at hand for answers, or get some."""
        writing = sum(len(one.slots) for one in self._writing.values() if one.answers is not None)
        return writing + self._answers.at_hand

    def plan(self, scheduled: Any, due: Sequence[tuple[Tracked, int, int]]) -> list[Store]:
        """What a step completes of these requests, which it computes from one token to another: chunks of known tokens.

        Where a request generates, that is one chunk per group: those of all requests are one store.
        """
        blocks, states = adapter.StepBlocks(scheduled), adapter.boundary_states(scheduled)
        answers: list[list[Answer]] = [[] for _ in self._strategies]
        stores = []
        for tracked, begin, end in due:
            step = begin, end, min(end, tracked.settled_tokens)
            if step[-1] >= tracked.due and blocks.tell(tracked.name):
                others = self._completed(tracked, step[-1], answers)
                found = self._plan_one(tracked, blocks, step, states.get(tracked.name, ()), others) if others else ()
                if found:
                    stores.append(self._begin(found))
        return stores + self._plan_answers([some for some in answers if some], blocks)

    def _completed(self, tracked: Tracked, progress: int, answers: Sequence[list[Answer]]) -> list[tuple[int, int]]:
        """Of one request: groups, and their first chunks that are new. Chunks of an answer, which nobody can have
        stored before, go into ``answers``, by group.
        """
        prompt_tokens, retention = len(tracked.request.prompt_token_ids), tracked.retention or self._retention
        others: list[tuple[int, int]] = []
        tracked.due = NOWHERE
        for size, groups in self._of_size.items():
            chunk, stop = tracked.stored[size], progress // size
            tracked.due = min(tracked.due, (max(chunk, stop) + 1) * size)
            if chunk >= stop:
                continue
            tracked.stored[size] = stop
            answered: Sequence[int] = ()
            if chunk + 1 == stop and stop * size > prompt_tokens:
                answered = groups.paged if retention.answers else groups.full
                for number in answered:
                    answers[number].append((tracked, number, chunk))
            if len(answered) < len(groups.all):
                others += [(number, chunk) for number in groups.all if number not in answered]
        return others

    def _plan_answers(self, answers: Sequence[list[Answer]], blocks: adapter.StepBlocks) -> list[Store]:
        """By group. Those for which there is no slot at hand, or not all blocks, are planned as chunks of prompts."""
        stores: list[Store] = []
        filled: list[WholeChunks] = []
        slots: list[int] = []
        written: list[Answer] = []
        for some in answers:
            chunks, placed, left = self._answers.place(some, blocks)
            if placed:
                filled.append(chunks)
                slots += chunks.slots
                written += placed
            for tracked, number, chunk in left:
                progress = (chunk + 1) * self._strategies[number].group.chunk_tokens
                found = self._plan_one(tracked, blocks, (progress, progress, progress), (), [(number, chunk)])
                if found:
                    stores.append(self._begin(found))
        if filled:
            self._numbers += 1
            self._writing[self._numbers] = _Writing(slots, self._ranks, written)
            stores.append(Store(self._numbers, [], filled))
        return stores

    def _begin(self, found: Sequence[tuple[CopyPlan, IntArray]]) -> Store:
        self._numbers += 1
        slots = np.concatenate([slots for _, slots in found])
        self._writing[self._numbers] = _Writing(slots, self._ranks)
        self._prompts += 1
        return Store(self._numbers, [plan for plan, _ in found])

    def _plan_one(
        self,
        tracked: Tracked,
        blocks: adapter.StepBlocks,
        step: tuple[int, int, int],
        states: States,
        groups: Sequence[tuple[int, int]],
    ) -> list[tuple[CopyPlan, IntArray]]:
        """Of one request. ``step``: from where to where, and up to which token all is known. ``groups``: which, and
        the first chunk of each.
        """
        begin, end, progress = step
        prompt_tokens = len(tracked.request.prompt_token_ids)
        tail, retention = tail_of(prompt_tokens, self._chunk_tokens), tracked.retention or self._retention
        ends = retention.end(prompt_tokens)
        inside: set[int] = set()
        found: list[tuple[CopyPlan, IntArray]] = []
        for number, chunk in groups:
            strategy = self._strategies[number]
            group = strategy.group
            if group.kind is not Kind.FULL and chunk * group.chunk_tokens >= max(ends, tracked.junction):
                continue
            tracked.extend_keys(progress)
            known = range(chunk, progress // group.chunk_tokens)
            table = adapter.table_of(blocks.numbers(tracked.name, self.sources[number].group))
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

    def make_ready(self) -> None:
        """See ``Answers``."""
        self._answers.make_ready()

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

    def settle(self, reports: Sequence[Report]) -> int:
        """What the workers have ended. How many stores failed: on one rank is on all."""
        failed = 0
        answered: list[tuple[int, _Writing]] = []
        for report in reports:
            for number in report.failed:
                if number in self._writing:
                    failed += 1
                    self._drop(self._writing.pop(number))
                    self._announce(number, stored=False)
            for (number, *of), digests in report.digests.items():
                if number in self._writing:
                    self._writing[number].digests.setdefault((of[0], of[1]), set()).update(digests)
            for number, ranks in report.ended.items():
                writing = self._writing.get(number)
                if writing is not None:
                    writing.ranks_left -= ranks
                    if not writing.ranks_left:
                        failed += self._end(number, answered)
        if answered:
            self._end_answers(answered)
        return failed

    def _end(self, number: int, answered: list[tuple[int, _Writing]]) -> bool:
        """The last rank has written. True: ranks differ, and nothing is stored. Answers go into ``answered``."""
        writing = self._writing.pop(number)
        if any(len(digests) > 1 for digests in writing.digests.values()):
            self._drop(writing)
            self._announce(number, stored=False)
            self._unlike = True
            return True
        if writing.answers is None:
            self._prompts -= 1
            self._store.commit(np.asarray(writing.slots))
            self._announce(number, stored=True)
        else:
            answered.append((number, writing))
        return False

    def _end_answers(self, answered: Sequence[tuple[int, _Writing]]) -> None:
        """They are found from now on: all together, which takes about as long as one."""
        slots = [slot for _, writing in answered for slot in writing.slots]
        self._answers.name(np.array(slots), [answer for _, writing in answered for answer in writing.answers or ()])
        for number, writing in answered:
            self._announce_answers(number, writing.answers or ())
            self._announce(number, stored=True)

    def _drop(self, writing: _Writing) -> None:
        slots = np.array(writing.slots)
        if writing.answers is None:
            self._prompts -= 1
            self._store.abort(slots)
        else:
            self._answers.drop(slots)

    def check_alike(self) -> None:
        """Raises ``StowageError``, once, when ranks were found to differ in what is stored once for them."""
        if self._unlike and not self._told_unlike:
            self._told_unlike = True
            raise StowageError(
                "Tensor-parallel ranks differ in KV heads or latents that should be the same on each. Set "
                '"deduplicate_ranks": false, which stores what each rank has, and report the model.'
            )

    def _announce_answers(self, number: int, answers: Sequence[Answer]) -> None:
        announcements = self._announcements
        for tracked, group, chunk in answers if announcements is not None else ():
            assert announcements is not None
            if group == announcements.group.index:
                names = tracked.keys.of(group)
                announcements.planned(number, tracked.request, np.array([chunk]), names)

    def _announce(self, number: int, *, stored: bool) -> None:
        if self._announcements is not None:
            self._announcements.ended(number, stored)
