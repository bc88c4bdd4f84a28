"""The simulation of a trace in several processes: the same figures, and no more work than its prompts are."""

from __future__ import annotations

from dataclasses import replace
from multiprocessing.context import ForkProcess

import pytest

from stowage.cache.flow import Flow
from stowage.core.geometry import SlabClass
from stowage.simulator.results import simulate
from stowage.simulator.tiers import Objects
from tests.property.test_simulate import FAST, made, scenario


def test_sums_do_not_depend_on_the_processes() -> None:
    trace = made(200, 3, gap_ms=50)
    several = [scenario(40, nodes=3), scenario(80, nodes=2, disk_bytes=4 << 20, disk=FAST)]
    told: list[tuple[int, int]] = []
    found = simulate(trace, several, jobs=2, progress=lambda done, total: told.append((done, total)))
    assert found == simulate(trace, several, jobs=1)
    assert told[-1] == (400, 400)


def test_nodes_cost_what_their_own_prompts_cost(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of 64 nodes, most with a prompt or two, none is forked for, none has room for all prompts of the trace, and what
    they share is checked once.
    """
    trace = made(120, 5)
    many = scenario(10_000, nodes=64, routing="round-robin")
    forks, slots, checked = list[object](), list[int](), list[object]()
    fork, check = ForkProcess.start, Objects.check
    monkeypatch.setattr(ForkProcess, "start", lambda self: (forks.append(self), fork(self)))
    monkeypatch.setattr(Objects, "check", lambda self: (checked.append(self), check(self)))
    (found,) = simulate(trace, [many], jobs=2)
    assert found.requests == 120 and 2 <= len(forks) <= 8

    class Noted(Flow):
        def __init__(self, geometry: object, slabs: list[SlabClass], *others: object) -> None:
            slots.append(slabs[0].slots)
            super().__init__(geometry, slabs, *others)  # type: ignore[arg-type]

    monkeypatch.setattr("stowage.simulator.store.Flow", Noted)
    simulate(trace, [replace(many, objects=True)], jobs=1)
    assert len(slots) == 64 and sum(slots) <= 2 * len(trace.blocks) + 64 and len(checked) == 1
