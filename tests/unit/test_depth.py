"""Which cases of a test are tried often, and that one that is not there cannot be named."""

import pytest

from tests.depth import TURNS, in_turn, mostly_rare


def test_cases_are_named_by_value_by_their_first_value_or_by_id() -> None:
    cases = ["a", ("b", 1), ("b", 2), ("c", 3), pytest.param("d", id="last"), pytest.param("e", marks=pytest.mark.slow)]
    found = mostly_rare(cases, ["a", ("b", 2), "c", "last"])
    assert [case.values for case in found] == [("a",), ("b", 1), ("b", 2), ("c", 3), ("d",), ("e",)]
    marks = [[mark.name for mark in case.marks] for case in found]
    assert marks == [[], ["rare"], [], [], [], ["slow", "rare"]]


def test_a_case_that_is_not_there_is_not_forgotten() -> None:
    with pytest.raises(ValueError, match=r"no case of this test is \['qwen'\]"):
        mostly_rare(["llama", "gemma"], ["llama", "qwen"])


NAMES = ["a.py::one", *(f"a.py::many[{case}]" for case in range(60)), "b.py::many[0]", "b.py::many[x[1]]", "b.py::slow"]


def test_what_is_not_slow_runs_once_always_and_the_other_cases_in_one_turn_each() -> None:
    turns = [in_turn([(name, name.endswith("slow")) for name in NAMES], turn) for turn in range(TURNS + 1)]
    often = [sum(runs) for runs in zip(*turns[:TURNS], strict=True)]
    always = [name for name, count in zip(NAMES, often, strict=True) if count == TURNS]
    assert always == ["a.py::one", "a.py::many[0]", "b.py::many[0]"]
    assert set(often) == {1, TURNS} and turns[TURNS] == turns[0]
    assert all(10 < sum(turn) < 35 for turn in turns)
