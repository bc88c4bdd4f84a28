"""How much a run does of tests with many cases: a part of them, or, in `make exhaustive`, all.

A test's first case runs always, if it is not slow. Slow ones and other cases take turns from commit to commit in
`make test` and `make vllm`, so that so many commits in a row have run all; `TURN=all` runs all at once.
"""

from __future__ import annotations

import os
import zlib
from collections.abc import Collection, Iterable
from typing import Any, Final, TypeVar

import pytest

EXHAUSTIVE: Final = os.environ.get("STOWAGE_TEST_EXHAUSTIVE") == "1"
TURNS: Final = 3
T = TypeVar("T")


def in_turn(tests: Iterable[tuple[str, bool]], turn: int) -> list[bool]:
    """Of tests, named as ``file::test[case]``, in order, and whether they are slow: whether each runs in this turn."""
    seen: set[str] = set()
    run = []
    for name, slow in tests:
        test = name.partition("[")[0]
        run.append((test not in seen and not slow) or zlib.crc32(name.encode()) % TURNS == turn % TURNS)
        seen.add(test)
    return run


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
