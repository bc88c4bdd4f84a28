"""Decides which windows and states of a prompt are kept, learned from what earlier prompts found.

Each level keeps more than the one before:

    0  what a resume at the prompt's end needs     serves a prompt that is repeated, or continued from there
    1  and at the end of everything generated      serves one that continues after the answer
    2  and at the resume points                    serves one that diverges anywhere

Where prompts were seen to diverge is kept at every level (`Points.kept`). For each arriving prompt the learner computes
how many tokens each level would have found, from the ends that it remembers and from the points, and how many bytes
each level stores. It takes the level with the most `found - price * stored`, where `price` is the tokens found per
stored byte so far: more is kept where that finds more than the bytes that it evicts would have. For the price an end
that is found repeatedly counts only once, because eviction takes what is used least. Prompts with the same first chunk
are counted as a class of their own once there are enough of them, the others all together.

At first everything is kept: memory has room, and what no prompt uses is evicted first.

The learner decides what is stored, never what may be loaded: a wrong guess costs a recompute. No clock, no randomness:
the same prompts in the same order give the same levels. `ENDS_MAX` and `CLASSES_MAX` bound its memory.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from stowage.core.geometry import BoolArray, Kind
from stowage.core.groups.base import GroupStrategy
from stowage.core.resume_points import NOWHERE, Points, tail_of

ENDS_MAX: Final = 1 << 16
CLASSES_MAX: Final = 256
EVIDENCE: Final = 4
"""Prompts with a known prefix that it takes to decide; with fewer, everything is kept."""
MEMORY: Final = 256
"""After this many such prompts all counts are halved, so that old traffic loses weight."""
_ENDS, _ANSWERS, _POINTS = range(3)
_USED: Final = 4
"""Flag of an end: a prompt has found it already."""


@dataclass(frozen=True, slots=True)
class Retention:
    """Which windows and states of one prompt are kept. `points`: what is kept within a prompt. `answers`: windows and
    states of generated tokens are kept.
    """

    points: Points
    answers: bool = True

    @property
    def least(self) -> Retention:
        """What is kept of every prompt."""
        return self

    @property
    def most(self) -> Retention:
        """What is kept of a prompt of which nothing else is known."""
        return self

    @property
    def learner(self) -> Learner | None:
        """The learner that decides per prompt, if there is one."""
        return None

    def kept(self, strategy: GroupStrategy, chunks: range, prompt_tokens: int, tail: int, junction: int) -> BoolArray:
        """See `Points.kept`."""
        return self.points.kept(strategy, chunks, tail, junction, self.end(prompt_tokens))

    def end(self, prompt_tokens: int) -> int:
        """The position after which nothing is kept. The last token of a prompt is always computed."""
        return NOWHERE if self.answers else prompt_tokens - 1


class _Tally:
    """Sums over some prompts: tokens found and bytes stored, one element per level. The last element is for the price:
    tokens that were found for the first time, and bytes that were stored.
    """

    def __init__(self) -> None:
        self.found = np.zeros(4)
        self.stored = np.zeros(4)
        self.known = 0

    def add(self, found: Sequence[int], stored: Sequence[int], *, known: bool = False) -> None:
        """Count one prompt; `known`: part of it was known."""
        self.found += found
        self.stored += stored
        self.known += known
        if self.known == MEMORY:
            self.known //= 2
            self.found /= 2
            self.stored /= 2


class Learner:
    """Chooses the level of each arriving prompt. Args: `points` of the last level; `strategies` of all groups, at least
    one of full attention; `step_tokens`, the distance at which recurrent states can be taken. `group`: the group whose
    keys identify prompts.
    """

    def __init__(self, points: Points, strategies: Sequence[GroupStrategy], step_tokens: int) -> None:
        self.levels = (Retention(Points(0), answers=False), Retention(Points(0)), Retention(points))
        groups = [strategy.group for strategy in strategies]
        self.group = next(group for group in groups if group.kind is Kind.FULL)
        self._unit = math.lcm(*(group.chunk_tokens for group in groups))
        recurrent = any(group.kind is Kind.RECURRENT for group in groups)
        self._step = max(self._unit, step_tokens // self._unit * self._unit) if recurrent else self._unit
        self._alike = _alike(strategies)
        self._ends: OrderedDict[bytes, int] = OrderedDict()
        self._all = _Tally()
        self._classes: OrderedDict[bytes, _Tally] = OrderedDict()

    @property
    def least(self) -> Retention:
        """As `Retention.least`."""
        return self.levels[0]

    @property
    def most(self) -> Retention:
        """As `Retention.most`."""
        return self.levels[-1]

    @property
    def learner(self) -> Learner | None:
        """As `Retention.learner`."""
        return self

    def arrived(self, keys: Sequence[bytes], tokens: int, known: int, held: int, resumed: int) -> Retention:
        """What to keep of a new prompt of `tokens` tokens, whose first chunks have these keys of `group`.

        In tokens: `known`: what full attention has stored; `held`: what the device holds; `resumed`: where it resumes.
        """
        found, stored = self._found(keys, known, held, resumed), self._stored(known, tokens, tokens)
        alike = self._class(keys[0]) if keys and known >= self.group.chunk_tokens else None
        level = self._level(alike)
        found.append(self._first(keys, found[level]))
        stored.append(stored[level])
        self._all.add(found, stored, known=known > 0)
        if alike is not None:
            alike.add(found, stored, known=True)
        self._remember(keys, self._unit, _POINTS, known)  # marks the prompt as seen, for `_found`
        for end in (tail_of(tokens, self._unit), tokens - 1, known):
            self._remember(keys, end, _ENDS, known)
        return self.levels[level]

    def answered(self, keys: Sequence[bytes], prompt_tokens: int, tokens: int, retention: Retention) -> None:
        """A request with this `retention` has ended. `keys` and `tokens` are those of prompt and answer together."""
        stored = self._stored(prompt_tokens, tokens, prompt_tokens)
        stored.append(stored[self.levels.index(retention)])
        for tally in (self._all, self._classes.get(keys[0]) if keys else None):
            if tally is not None:
                tally.add([0] * 4, stored)
        self._remember(keys, tokens, _ANSWERS)

    def _level(self, alike: _Tally | None) -> int:
        """The best level for the class of the prompt, or for all prompts where the class has too few."""
        tally = alike if alike is not None and alike.known >= EVIDENCE else self._all
        if tally.known < EVIDENCE:
            return _POINTS
        price = self._all.found[-1] / max(1.0, self._all.stored[-1])
        return int(np.argmax((tally.found - price * tally.stored)[:-1]))  # of equals the first, which keeps least

    def _class(self, key: bytes) -> _Tally:
        """The tally of the prompts whose first chunk has this key."""
        tally = self._classes.setdefault(key, _Tally())
        self._classes.move_to_end(key)
        if len(self._classes) > CLASSES_MAX:
            self._classes.popitem(last=False)
        return tally

    def _key(self, keys: Sequence[bytes], end: int) -> bytes:
        """The key of the last whole chunk up to `end`; empty where there is none."""
        index = end // self._unit * self._unit // self.group.chunk_tokens
        return keys[index - 1] if 0 < index <= len(keys) else b""

    def _remember(self, keys: Sequence[bytes], end: int, level: int, known: int = 0) -> None:
        """Levels from `level` on can resume at the last boundary of whole chunks up to `end`. An end after `known` is
        new, so no prompt has used it.
        """
        if key := self._key(keys, end):
            before = self._ends.pop(key, level)
            used = before & _USED if end // self._unit * self._unit <= known else 0
            self._ends[key] = min(level, before % _USED) | used
            if len(self._ends) > ENDS_MAX:
                self._ends.popitem(last=False)

    def _first(self, keys: Sequence[bytes], found: int) -> int:
        """`found`, or 0 where it is an end that a prompt has used before."""
        key = self._key(keys, found)
        level = self._ends.get(key, 0)
        if key in self._ends:
            self._ends[key] = level | _USED
        return 0 if level & _USED else found

    def _found(self, keys: Sequence[bytes], known: int, held: int, resumed: int) -> list[int]:
        """For each level, the position where this prompt could have resumed."""
        unit, found, above = self._unit, [held] * 3, 3
        if known >= unit and self._key(keys, unit) not in self._ends:
            return [max(held, resumed)] * 3  # stored by another engine, or long ago by this one: nothing to learn
        for end in range(known // unit * unit, held, -unit):
            level = self._ends.get(self._key(keys, end), above) % _USED
            if level < above:
                found[level:above] = [end] * (above - level)
                above = level
            if not above:
                break
        ends = np.arange(0, known + 1, self._step)
        points = ends[self.levels[_POINTS].points.following(np.maximum(ends - self._step + 1, 0)) <= ends]
        found[_POINTS] = max(found[_POINTS], int(points[-1]))
        return found

    def _stored(self, begin: int, end: int, prompt_tokens: int) -> list[int]:
        """For each level, the bytes stored of the chunks that are completed between two positions."""
        tail = tail_of(prompt_tokens, self._unit)
        stored = [0] * 3
        for strategy, nbytes in self._alike:
            size = strategy.group.chunk_tokens
            chunks = range(begin // size, max(begin, end) // size)
            for level, retention in enumerate(self.levels):
                if strategy.group.kind is Kind.RECURRENT:
                    count = self._states(retention, begin, end, prompt_tokens, tail)
                else:
                    count = int(retention.kept(strategy, chunks, prompt_tokens, tail, 0).sum())
                stored[level] += count * nbytes
        return stored

    def _states(self, retention: Retention, begin: int, end: int, prompt_tokens: int, tail: int) -> int:
        """How many states of a recurrent group are stored. Steps end at multiples of their length, where the prompt
        ends, and at each block of the answer.
        """
        last = (prompt_tokens - 1) // self._unit * self._unit
        steps = np.arange(self._step, last, self._step)
        before = np.append(steps - self._step, steps[-1:] if len(steps) else 0)
        ends = np.append(steps, last)
        kept = (retention.points.following(before + 1) <= ends) | (ends >= tail)
        answer = end // self._unit - max(begin, last) // self._unit if retention.answers else 0
        return int(kept[(begin < ends) & (ends <= end)].sum()) + max(0, answer)


def _alike(strategies: Sequence[GroupStrategy]) -> list[tuple[GroupStrategy, int]]:
    """Groups that keep the same chunks, merged: one strategy for them, and the bytes of one chunk of them all. Groups
    with `spared_tokens` are left out: they are kept for every prompt.
    """
    found: dict[tuple[Kind, int, int, int], tuple[GroupStrategy, int]] = {}
    for strategy in strategies:
        group = strategy.group
        sort = (group.kind, group.block_tokens, group.blocks_per_chunk, group.window)
        if not group.spared_tokens:
            first, nbytes = found.get(sort, (strategy, 0))
            found[sort] = (first, nbytes + group.bytes_per_chunk)
    return [*found.values()]
