"""How much a run does of tests that are marked `exhaustive`: a part of their cases, or, in `make exhaustive`, all."""

from __future__ import annotations

import os
from typing import Final, TypeVar

__all__ = ["EXHAUSTIVE", "few_or_all"]

EXHAUSTIVE: Final = os.environ.get("STOWAGE_TEST_EXHAUSTIVE") == "1"
T = TypeVar("T")


def few_or_all(few: T, all_of_them: T) -> T:
    """`few` in a run of all tests, `all_of_them` in one of the exhaustive ones."""
    return all_of_them if EXHAUSTIVE else few
