"""Many worlds on several cores, and what happened in all of them together."""

from __future__ import annotations

import contextlib
import logging
import multiprocessing
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass, field
from types import ModuleType
from typing import Final

from stowage.testing.sim.fault_profile import FAULTS
from stowage.testing.sim.world import Failure, Result, simulate

SEEDS_AT_ONCE: Final = 20
BRANCHES: Final = """
    hits.host hits.disk joined promoted load_failures spills spill_failures spills_dropped evictions stores_without_room
    timeouts fetch_timeouts disk.breaker_opened disk.corrupt disk.vanished disk.read_errors disk.dropped disk.timed_out
    disk.backed_off disk.no_room disk.enospc disk.write_errors disk.direct_fallbacks disk.sealed_segments
    disk.repaired_segments disk.reclaimed_segments disk.removed_leftovers disk.damaged_segments disk.rewritten
    disk.packed kill power_cut limit
""".split()
"""Counters of store, disk tier and world that some world must have raised: what is never reached proves nothing."""


@dataclass(slots=True)
class Report:
    """The sum over many worlds. ``expected``: names of what some of them must have had."""

    first: int
    expected: Sequence[str] = ()
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
        return [name for name in self.expected if not self.happened[name]]


def report_of(engine: bool, first: int) -> Report:
    """An empty one, of worlds of the engine or of the disk."""
    faults: Sequence[str] = FAULTS
    happenings: Sequence[str] = BRANCHES
    if engine:
        engine_sim = _worlds_of_the_engine()
        faults, happenings = engine_sim.FAULTS, engine_sim.HAPPENINGS
    return Report(first, [*(f"fault {fault}" for fault in faults), *happenings])


def run_some(first: int, seeds: int, engine: bool = False) -> Report:
    """Run the worlds `first` to `first + seeds - 1`."""
    report = Report(first)
    play: Callable[[int], Result] = simulate
    around: Callable[[], contextlib.AbstractContextManager[None]] = contextlib.nullcontext
    if engine:
        engine_sim = _worlds_of_the_engine()
        play, around = engine_sim.simulate, engine_sim.one_thread
    with quiet(), around():
        for seed in range(first, first + seeds):
            _run_one(seed, report, play)
    return report


def _worlds_of_the_engine() -> ModuleType:
    """With torch, which worlds of the disk do without, and Transformers as commands import it: in half the time."""
    from stowage.models.quick_import import import_transformers

    import_transformers()
    from stowage.testing import engine_sim

    return engine_sim


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Trouble is what these worlds are made of: it is not logged."""
    logger = logging.getLogger("stowage")
    level = logger.level
    logger.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        logger.setLevel(level)


def _run_one(seed: int, report: Report, simulate: Callable[[int], Result]) -> None:
    try:
        result = simulate(seed)
    except Failure as failure:
        report.failures.append((seed, str(failure)))
    else:
        report.steps += result.steps
        report.simulated_s += result.simulated_s
        report.happened.update(result.happened)
    report.seeds += 1


def run(first: int, seeds: int, jobs: int, *, engine: bool = False) -> Iterator[Report]:
    """Reports of parts, in any order, as they come. `engine`: of worlds of the engine, not of the disk."""
    parts = [(at, min(SEEDS_AT_ONCE, first + seeds - at), engine) for at in range(first, first + seeds, SEEDS_AT_ONCE)]
    if jobs == 1 or len(parts) == 1:
        yield from (run_some(*part) for part in parts)
        return
    with ProcessPoolExecutor(jobs, multiprocessing.get_context("spawn")) as pool:
        for done in as_completed([pool.submit(run_some, *part) for part in parts]):
            yield done.result()
