"""Worlds of either simulator: the first seed that fails, and the command that users run."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from stowage.testing.sim import Failure

SOURCE = Path(__file__).parents[2] / "src"
Plant = Callable[[pytest.MonkeyPatch], None]


def first_failure(simulate: Callable[[int], object], seeds: int) -> Failure | None:
    for seed in range(seeds):
        try:
            simulate(seed)
        except Failure as failure:
            return failure
    return None


def command(*arguments: str, expected: int = 0, **variables: str) -> dict[str, Any]:
    """Run a simulator as a user does. Its report."""
    result = subprocess.run(
        [sys.executable, "-m", "stowage.testing.sim", "--json", *arguments],
        env={**os.environ, "PYTHONPATH": str(SOURCE), **variables},
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == expected, result.stderr
    report: dict[str, Any] = json.loads(result.stdout)
    return report
