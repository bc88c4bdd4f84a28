"""How much a run does of tests with many cases: a part of them, or, in `make exhaustive`, all."""

from __future__ import annotations

import os
from collections.abc import Collection, Iterable
from typing import Any, Final, TypeVar

import pytest

EXHAUSTIVE: Final = os.environ.get("STOWAGE_TEST_EXHAUSTIVE") == "1"
T = TypeVar("T")


def few_or_all(few: T, all_of_them: T) -> T:
    """`few` in a run of all tests, `all_of_them` in one of the exhaustive ones."""
    return all_of_them if EXHAUSTIVE else few


def mostly_rare(cases: Iterable[Any], often: Collection[Any]) -> list[Any]:
    """Parameters of a test: those that ``often`` names as they are, the others for `make exhaustive` only.

    ``often`` names a case by its values, by the first of them, or by its id. ValueError: there is no such case.
    """
    given = [case if isinstance(case, type(pytest.param())) else _param(case) for case in cases]
    chosen = [[name for name in often if name in (case.id, case.values, case.values[0])] for case in given]
    if missing := [name for name in often if not any(name in names for names in chosen)]:
        raise ValueError(f"no case of this test is {missing}")
    return [
        case if names else pytest.param(*case.values, marks=[*case.marks, pytest.mark.rare], id=case.id)
        for case, names in zip(given, chosen, strict=True)
    ]


def _param(case: Any) -> Any:
    return pytest.param(*case) if isinstance(case, tuple) else pytest.param(case)
