"""`Search`: how far a chain reaches, with few questions. Against brute force, and by count."""

from __future__ import annotations

from itertools import takewhile
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stowage.core.prefix_search import Anchors, Search


def run(search: Search, there: set[int]) -> tuple[list[int], int]:
    """Every place that was asked about, and in how many rounds."""
    asked: list[int] = []
    rounds = 0
    while places := search.ask():
        assert places == sorted(set(places)) and not set(places) & set(asked), "nothing is asked twice"
        asked += places
        rounds += 1
        search.answer(places, [place in there for place in places])
    return asked, rounds


@given(count=st.integers(0, 300), reach=st.integers(0, 300), widths=st.tuples(st.integers(1, 9), st.integers(1, 60)))
def test_a_chain_is_found_whole(count: int, reach: int, widths: tuple[int, int]) -> None:
    reach = min(reach, count)
    search = Search([None] * count, widths=widths)
    asked, _ = run(search, set(range(reach)))
    found = {place for place in asked if place < reach} | set(search.assumed_present())
    assert found == set(range(reach))
    assert {place for place in asked if place >= reach} | set(search.assumed_absent()) == set(range(reach, count))
    assert search.ask() == []


@given(
    count=st.integers(0, 200),
    reach=st.integers(0, 200),
    first=st.integers(0, 20),
    stride=st.integers(1, 9),
    odd=st.integers(0, 8),
)
def test_of_snapshots_the_last_is_found(count: int, reach: int, first: int, stride: int, odd: int) -> None:
    """Every stride-th key of the prompt up to `reach` is there, and one more before the next one: a prompt's end."""
    anchors = [place for place in range(min(reach, count)) if (first + place + 1) % stride == 0]
    behind = range(anchors[-1] + 1 if anchors else 0, count)
    end = list(takewhile(lambda place: (first + place + 1) % stride, behind))
    there = set(anchors) | set(end[odd : odd + 1])
    search = Search([None] * count, first=first, stride=stride)
    asked, _ = run(search, there)
    assert {place for place in asked if place in there} | set(search.assumed_present()) == there


def test_a_cold_prompt_costs_eight_questions_and_one_round() -> None:
    asked, rounds = run(Search([None] * 100_000), set())
    assert (len(asked), rounds) == (8, 1)


@pytest.mark.parametrize(("count", "questions", "rounds"), [(8, 8, 1), (330, 60, 2), (1562, 60, 3), (15_000, 110, 4)])
@pytest.mark.parametrize("share", [0.0, 0.01, 0.4, 0.77, 1.0])
def test_a_long_prompt_needs_few(count: int, questions: int, rounds: int, share: float) -> None:
    """100,000 tokens in chunks of 64 are 1,562 keys."""
    asked, took = run(Search([None] * count), set(range(round(count * share))))
    assert len(asked) <= questions and took <= rounds


def test_what_is_known_is_not_asked() -> None:
    search = Search([True, None, None, False, None])
    assert search.ask() == [1, 2]
    search.answer([1, 2], [True, False])
    assert search.ask() == [] and search.assumed_present() == []
    assert Search([False, None, None]).ask() == []
    assert Search([True, None, True]).assumed_present() == [1]
    assert Search([True, None, None]).assumed_present() == [], "nothing is assumed present after the last that is"


def test_a_hole_ends_the_chain() -> None:
    """Only what lies before the first that is known to be absent counts."""
    search = Search([None, True, False, None, True, None])
    assert search.assumed_present() == [0]
    assert search.ask() == [] and search.assumed_present() == [0]
    assert search.assumed_absent() == [3, 5]


def test_the_last_places_of_a_gap_come_first() -> None:
    search = Search([None] * 11, stride=12, widths=(4, 3))
    assert search.ask() == [7, 8, 9, 10]
    search.answer([7, 8, 9, 10], [False] * 4)
    assert search.ask() == [4, 5, 6]
    search.answer([4, 5, 6], [False, True, False])
    assert search.ask() == [1, 2, 3]
    search.answer([1, 2, 3], [False, False, False])
    assert search.ask() == [0]


def test_snapshots_are_asked_about_behind_the_last_one_only() -> None:
    """Of 480 places 59 are the last of eight, of which 40 are there; then the seven behind the 40th."""
    asked, _ = run(Search([None] * 479, stride=8), set(range(7, 320, 8)))
    assert [place for place in asked if (place + 1) % 8] == list(range(320, 327))


@given(
    data=st.data(),
    count=st.integers(1, 120),
    window=st.integers(1, 9),
    places=st.sets(st.integers(1, 120), max_size=6),
    widths=st.tuples(st.integers(1, 9), st.integers(1, 60)),
)
def test_of_windows_the_last_is_found_whole(
    data: st.DataObject, count: int, window: int, places: set[int], widths: tuple[int, int]
) -> None:
    """Windows before certain places, as far as the prompt is alike, and one before the place where it ended or parted:
    of these the last must be known in full, wherever it lies.
    """
    parted = data.draw(st.integers(1, count))
    certain = {at for place in places for at in range(max(0, place - window), min(place, count))}
    last = set(range(max(0, parted - window), parted))
    there = {at for at in certain if at < parted} | last
    search = Search([None] * count, certain=Anchors(tuple(sorted(certain)), window), widths=widths)
    asked, _ = run(search, there)
    found = {place for place in asked if place in there} | set(search.assumed_present())
    assert found <= there, "nothing is taken to be there that is not"
    assert last <= found


def test_without_certain_places_all_are_asked_about_the_last_first() -> None:
    search = Search([None] * 20, certain=Anchors(), widths=(8, 48))
    assert search.ask() == list(range(12, 20))
    search.answer(range(12, 20), [False] * 8)
    assert search.ask() == list(range(12))


@pytest.mark.parametrize(
    "wrong", [{"first": -1}, {"stride": 0}, {"widths": (0, 1)}, {"widths": (1, 0)}], ids=lambda wrong: str(wrong)
)
def test_what_makes_no_search_is_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(AssertionError):
        Search([None], **wrong)


def test_places_are_spread_from_the_first_to_the_last() -> None:
    assert Search([None] * 50, widths=(3, 3)).ask() == [0, 24, 49]
    assert Search([None] * 3, widths=(3, 3)).ask() == [0, 1, 2]
