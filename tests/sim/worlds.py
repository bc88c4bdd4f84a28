"""Worlds of either simulator: the first seed that fails, and the command that users run."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from stowage.testing.sim import Failure
from stowage.testing.sim.runner import report_of, run

SOURCE = Path(__file__).parents[2] / "src"


@dataclass(frozen=True)
class Planted:
    """A bug, a seed that has found it, and what the failure said there: a plant that does not fit the code any more
    fails in another way, and shows nothing.
    """

    plant: Callable[[pytest.MonkeyPatch], None]
    seed: int
    says: str

    def is_found(self, simulate: Callable[[int], object], seeds: int, patch: pytest.MonkeyPatch) -> Failure:
        """The failure of the first seed that finds it, from the known one on."""
        self.plant(patch)
        failure = first_failure(simulate, seeds, self.seed)
        assert failure is not None, f"{self.plant.__name__} survived {seeds} seeds"
        assert re.search(self.says, str(failure)), failure
        return failure

    def is_replayed(
        self, simulate: Callable[[int], object], seeds: int, patch: pytest.MonkeyPatch, *, command: str
    ) -> None:
        """The failure names the command that finds it again, and its seed alone fails in the same way."""
        failure = self.is_found(simulate, seeds, patch)
        assert f"{command} --first {failure.seed} --seeds 1" in str(failure)
        with pytest.raises(Failure) as again:
            simulate(failure.seed)
        assert str(again.value) == str(failure)


def first_failure(simulate: Callable[[int], object], seeds: int, first: int) -> Failure | None:
    for seed in range(first, first + seeds):
        try:
            simulate(seed)
        except Failure as failure:
            return failure
    return None


def assert_no_hash_seed_matters(*, engine: bool) -> dict[str, Any]:
    """Three worlds, here and in a process whose hashes have another seed. The report of that."""
    other = "1" if os.environ.get("PYTHONHASHSEED") == "0" else "0"
    flags = ["--engine"] if engine else []
    told = command(*flags, "--first", "7", "--seeds", "3", "--jobs", "1", PYTHONHASHSEED=other)
    here = report_of(engine, 7)
    for part in run(7, 3, 1, engine=engine):
        here.add(part)
    assert (told["steps"], told["simulated_s"]) == (here.steps, here.simulated_s)
    assert (told["happened"], told["failures"]) == (here.happened, here.failures)
    return told


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
