"""Many worlds on several cores, and what happened in all of them together."""

from __future__ import annotations

import logging
import multiprocessing
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass, field
from typing import Final

from stowage.testing.sim.fault_profile import FAULTS
from stowage.testing.sim.world import Failure, simulate

__all__ = ["Report", "run"]

SEEDS_AT_ONCE: Final = 20
BRANCHES: Final = """
    hits.host hits.disk joined promoted load_failures spills spill_failures spills_dropped evictions stores_without_room
    timeouts fetch_timeouts disk.breaker_opened disk.corrupt disk.vanished disk.read_errors disk.dropped disk.timed_out
    disk.backed_off disk.no_room disk.enospc disk.write_errors disk.direct_fallbacks disk.sealed_segments
    disk.repaired_segments disk.reclaimed_segments disk.removed_leftovers disk.damaged_segments disk.rewritten
    kill power_cut limit
""".split()
"""Counters of store, disk tier and world that some world must have raised: what is never reached proves nothing."""


@dataclass(slots=True)
class Report:
    """The sum over many worlds."""

    first: int
    seeds: int = 0
    steps: int = 0
    simulated_s: float = 0.0
    seconds: float = 0.0
    failures: list[tuple[int, str]] = field(default_factory=list)
    happened: Counter[str] = field(default_factory=Counter)

    def add(self, other: Report) -> None:
        """Add what another report counted."""
        self.seeds += other.seeds
        self.steps += other.steps
        self.simulated_s += other.simulated_s
        self.failures += other.failures
        self.happened.update(other.happened)

    def never(self) -> list[str]:
        """Faults that struck in no world, and branches that were taken in none."""
        expected = [f"fault {fault}" for fault in FAULTS] + BRANCHES
        return [name for name in expected if not self.happened[name]]


def run_some(first: int, seeds: int) -> Report:
    """Run the worlds `first` to `first + seeds - 1`."""
    report = Report(first)
    logger = logging.getLogger("stowage")
    level = logger.level
    logger.setLevel(logging.CRITICAL)  # trouble is what these worlds are made of
    try:
        for seed in range(first, first + seeds):
            _run_one(seed, report)
    finally:
        logger.setLevel(level)
    return report


def _run_one(seed: int, report: Report) -> None:
    try:
        result = simulate(seed)
    except Failure as failure:
        report.failures.append((seed, str(failure)))
    else:
        report.steps += result.steps
        report.simulated_s += result.simulated_s
        report.happened.update(result.happened)
    report.seeds += 1


def run(first: int, seeds: int, jobs: int) -> Iterator[Report]:
    """Reports of parts, in any order, as they come."""
    parts = [(at, min(SEEDS_AT_ONCE, first + seeds - at)) for at in range(first, first + seeds, SEEDS_AT_ONCE)]
    if jobs == 1 or len(parts) == 1:
        yield from (run_some(*part) for part in parts)
        return
    with ProcessPoolExecutor(jobs, multiprocessing.get_context("spawn")) as pool:
        for done in as_completed([pool.submit(run_some, *part) for part in parts]):
            yield done.result()
