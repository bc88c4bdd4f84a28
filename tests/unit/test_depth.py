"""Which cases of a test are tried often, and that one that is not there cannot be named."""

import pytest

from tests.depth import mostly_rare


def test_cases_are_named_by_value_by_their_first_value_or_by_id() -> None:
    cases = ["a", ("b", 1), ("b", 2), ("c", 3), pytest.param("d", id="last"), pytest.param("e", marks=pytest.mark.slow)]
    found = mostly_rare(cases, ["a", ("b", 2), "c", "last"])
    assert [case.values for case in found] == [("a",), ("b", 1), ("b", 2), ("c", 3), ("d",), ("e",)]
    marks = [[mark.name for mark in case.marks] for case in found]
    assert marks == [[], ["rare"], [], [], [], ["slow", "rare"]]


def test_a_case_that_is_not_there_is_not_forgotten() -> None:
    with pytest.raises(ValueError, match=r"no case of this test is \['qwen'\]"):
        mostly_rare(["llama", "gemma"], ["llama", "qwen"])
