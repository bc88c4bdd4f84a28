"""What is learned of traffic: which windows and states of prompts are worth their room."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stowage.core import retention
from stowage.core.geometry import Group, Kind
from stowage.core.groups import strategy
from stowage.core.resume_points import Points, tail_of
from stowage.core.retention import EVIDENCE, MEMORY, Learner, Retention

FULL, WINDOW = Group(0, Kind.FULL, 4, 2, 8), Group(1, Kind.SLIDING, 4, 2, 16, 9)
STATE = Group(1, Kind.RECURRENT, 8, 1, 64)
POINTS = Points(8, 2)
SIZE = 8
KEEPS = range(3)
ENDS, ANSWERS, ALL = KEEPS


def learner(*groups: Group, step: int = 16) -> Learner:
    return Learner(POINTS, [strategy(group) for group in groups or (FULL, WINDOW)], step)


def keys(prompt: Sequence[int]) -> list[bytes]:
    """Of whole chunks: each names all before it."""
    return [repr(prompt[: end * SIZE]).encode() for end in range(1, len(prompt) // SIZE + 1)]


class Traffic:
    """Prompts that find all that full attention ever saw: memory is never full."""

    def __init__(self, learns: Learner) -> None:
        self.learns = learns
        self.seen: set[bytes] = set()

    def ask(self, prompt: list[int], answer: Sequence[int] = ()) -> int:
        """The level that the prompt got."""
        names = keys(prompt)
        known = SIZE * next((at for at, name in enumerate(names) if name not in self.seen), len(names))
        known = min(known, (len(prompt) - 1) // SIZE * SIZE)
        kept = self.learns.arrived(names, len(prompt), known, 0, known)
        whole = [*prompt, *answer]
        self.seen |= {*keys(whole)}
        if answer:
            self.learns.answered(keys(whole), len(prompt), len(whole), kept)
        return self.learns.levels.index(kept)


def prompt(seed: int, tokens: int = 203) -> list[int]:
    return [seed * 1000 + at for at in range(tokens)]


def test_repeated_prompts_keep_their_ends_alone() -> None:
    traffic = Traffic(learner())
    asked = [prompt(seed) for seed in range(20)]
    first = [traffic.ask(one, prompt(-1, 40)) for one in asked]
    assert first == [ALL] * 20, "nothing is known of any of them"
    assert {traffic.ask(one, prompt(-1, 40)) for one in [*asked, *asked][EVIDENCE:]} <= {ALL, ENDS}
    assert traffic.ask(asked[0]) == ENDS


@pytest.mark.parametrize(("kind", "nbytes"), [(Kind.SLIDING, 2), (Kind.RECURRENT, 4)])
@pytest.mark.parametrize("dear", [False, True])
def test_conversations_keep_answers_where_those_are_worth_it(kind: Kind, nbytes: int, dear: bool) -> None:
    """Windows of a long answer take much, and bring no more than that the answer is not computed."""
    window = 9 if kind is Kind.SLIDING else 0
    blocks, size = (2, 4) if window else (1, SIZE)
    traffic = Traffic(learner(FULL, Group(1, kind, size, blocks, nbytes * (100 if dear else 1), window)))
    talks = [prompt(seed, 40) for seed in range(6)]
    for turn in range(4):
        for at, talk in enumerate(talks):
            answer = [-turn - 1] * 120
            level = traffic.ask(talk, answer)
            talks[at] = [*talk, *answer, *range(turn, turn + 9)]
    assert level == (ENDS if dear else ANSWERS)


@pytest.mark.parametrize("groups", [(FULL, WINDOW), (FULL, STATE)])
def test_prompts_that_part_anywhere_keep_points(groups: tuple[Group, ...]) -> None:
    traffic = Traffic(learner(*groups))
    level = ENDS
    for seed in range(30):
        asked = prompt(seed)
        traffic.ask(asked)
        level = traffic.ask([*asked[: 100 + seed * 3], *prompt(seed + 500, 80)])
    assert level == ALL


def test_prompts_that_begin_alike_are_counted_on_their_own() -> None:
    """One application's prompts part from each other, the other's are repeated."""
    traffic = Traffic(learner())
    for round_ in range(40):
        base = [*prompt(7, 8), *prompt(round_ // 4, 200)]
        parts = traffic.ask([*base[: 60 + 40 * (round_ % 4)], *prompt(900 + round_, 40)])
        repeats = traffic.ask([*prompt(8, 8), *prompt(round_ % 5, 200)])
    assert (parts, repeats) == (ALL, ENDS)


def test_a_shared_beginning_where_prompts_were_seen_to_part_needs_no_points() -> None:
    traffic = Traffic(learner())
    levels = []
    for seed in range(60):
        levels.append(traffic.ask([*prompt(1, 96), *prompt(seed + 2, 107)]))
        traffic.ask(prompt(100 + seed // 2))
    assert ALL not in levels[30:]


def test_what_traffic_was_long_ago_does_not_decide() -> None:
    traffic = Traffic(learner())
    for seed in range(20):
        asked = prompt(seed)
        traffic.ask(asked)
        traffic.ask([*asked[: 100 + seed * 3], *prompt(seed + 500, 80)])
    assert traffic.ask(prompt(800)) == ALL
    for _ in range(4):
        for seed in range(MEMORY):
            level = traffic.ask(prompt(1000 + seed))
    assert level == ENDS


def test_what_another_engine_stored_tells_nothing() -> None:
    learns = learner()
    for seed in range(20):
        asked = prompt(seed)
        kept = learns.arrived(keys(asked), len(asked), 96, 0, 40)
    assert learns.levels.index(kept) == ENDS


def test_what_is_learned_has_a_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(retention, "ENDS_MAX", 5)
    monkeypatch.setattr(retention, "CLASSES_MAX", 3)
    traffic = Traffic(learns := learner())
    for seed in range(12):
        traffic.ask(prompt(seed))
        traffic.ask(prompt(seed), prompt(-1, 40))
    assert len(learns._ends) == 5
    assert len(learns._classes) == 3
    assert [*learns._classes] == [keys(prompt(seed))[0] for seed in (9, 10, 11)]


@settings(max_examples=40)
@given(
    st.lists(st.tuples(st.integers(0, 3), st.integers(0, 60), st.integers(1, 60), st.integers(0, 30)), max_size=40),
    st.sampled_from([(FULL, WINDOW), (FULL, STATE)]),
)
def test_the_same_prompts_give_the_same_levels_and_each_finds_and_stores_more(
    asked: list[tuple[int, int, int, int]], groups: tuple[Group, ...]
) -> None:
    def levels(traffic: Traffic) -> list[int]:
        return [
            traffic.ask([*prompt(base, shared), *prompt(10 + base, own)], prompt(99, answer))
            for base, shared, own, answer in asked
        ]

    one, other = Traffic(learner(*groups)), Traffic(learner(*groups))
    assert levels(one) == levels(other)
    for counts in (one.learns._all.found[:3], one.learns._all.stored[:3]):
        assert all(less <= more for less, more in pairwise(counts))


@given(st.integers(1, 300), st.integers(0, 30), st.integers(0, 100))
def test_bytes_are_those_of_the_chunks_that_are_kept(tokens: int, first: int, answer: int) -> None:
    """Two groups of a kind are counted together."""
    second = Group(2, Kind.SLIDING, 4, 2, 24, 9)
    learns = learner(FULL, WINDOW, second)
    begin, end = first * SIZE, tokens + answer
    tail, chunks = tail_of(tokens, SIZE), range(first, max(begin, end) // SIZE)
    for retained, found in zip(learns.levels, learns._stored(begin, end, tokens), strict=True):
        kept = retained.kept(strategy(WINDOW), chunks, tokens, tail, 0)
        assert found == FULL.bytes_per_chunk * len(chunks) + (32 + 48) * int(kept.sum())
        numbers = first + np.flatnonzero(kept)
        assert retained.answers or not len(numbers) or (numbers + 1).max() * SIZE < tokens


@given(st.integers(1, 300), st.integers(0, 30), st.integers(0, 100))
def test_states_are_those_where_steps_end(tokens: int, first: int, answer: int) -> None:
    begin, end, step = first * SIZE, tokens + answer, 16
    learns = learner(FULL, STATE, step=step + 3)
    last, tail = (tokens - 1) // SIZE * SIZE, tail_of(tokens, SIZE)
    for retained, found in zip(learns.levels, learns._stored(begin, end, tokens), strict=True):
        ends = sorted({*range(step, last, step), last})
        states, before = set(), 0
        for here in ends:
            if here >= tail or retained.points.crossed(before, here):
                states.add(here)
            before = here
        if retained.answers:
            states |= set(range(last + SIZE, end + 1, SIZE))
        expected = len([here for here in states if begin < here <= end])
        assert found == 8 * 2 * (max(begin, end) // SIZE - first) + 64 * expected


def test_what_lies_inside_of_a_block_is_not_counted() -> None:
    inside = Group(2, Kind.RECURRENT, 4, 1, 8, spared_tokens=8)
    assert learner(FULL, WINDOW, inside)._stored(0, 64, 64) == learner()._stored(0, 64, 64)


def test_what_the_device_has_is_found_at_every_level() -> None:
    learns = learner()
    asked = prompt(1)
    learns.arrived(keys(asked), len(asked), 0, 0, 0)
    assert learns._found(keys(asked), 196, 64, 64) == [184, 184, 192]
    assert learns._found(keys(asked), 202, 64, 64) == [200, 200, 200]
    assert learns._found(keys(asked[:150]), 144, 64, 64) == [64, 64, 128]
    assert learns._found(keys(prompt(2)), 100, 64, 80) == [80] * 3, "nobody saw it"


def test_prompts_shorter_than_a_chunk() -> None:
    learns = learner()
    assert learns.arrived([], 5, 0, 0, 0) == learns.levels[ALL]
    learns.answered([], 5, 7, Retention(Points(0)))
    assert not learns._ends and not learns._classes
    assert learns._stored(0, 5, 5) == [0] * 3


def test_what_is_told_of_every_prompt_and_of_one_that_is_not_known() -> None:
    learns, always = learner(), Retention(POINTS)
    assert (learns.least, learns.most, learns.learner) == (learns.levels[ENDS], learns.levels[ALL], learns)
    assert (always.least, always.most, always.learner) == (always, always, None)
