"""Runs the disk tier's jobs as simulated tasks, which begin in any order and end in any other."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Generator, Iterable
from dataclasses import dataclass
from typing import Generic, TypeVar

from stowage.storage.disk.write_jobs import Job, Kind, SerialJobs
from stowage.testing.sim.loop import Process, Task

R = TypeVar("R")


@dataclass(slots=True)
class _Doing(Generic[R]):
    """A job that was asked for. `result` is empty until it has been done."""

    result: list[R]
    failure: Exception | None = None
    begun: bool = False
    dropped: bool = False

    @property
    def ended(self) -> bool:
        """Whether nobody works on it, and nobody will."""
        return bool(self.result) or self.failure is not None or (self.dropped and not self.begun)


class SimJobRunner:
    """Implements JobRunner. Every job is a task of the process, begun when chance will."""

    def __init__(self, process: Process) -> None:
        self._process = process
        self._loop = process.loop
        self._waiting: set[Task] = set()

    def __call__(self, jobs: Iterable[Job[R] | None], /) -> Generator[R, None, None]:
        owner = self._loop.current
        if owner is None:  # outside of tasks time stands still
            yield from SerialJobs()(jobs)
            return
        lanes: dict[Kind, deque[_Doing[R]]] = {}
        try:
            for job in jobs:
                if job is not None:
                    lanes.setdefault(job.kind, deque()).append(self._begin(job, owner))
                elif not any(lanes.values()):
                    break
                waits = job is None
                while True:
                    for lane in lanes.values():
                        while lane and lane[0].ended:
                            yield _result(lane.popleft())
                            waits = False
                    if not waits and not any(len(lane) >= kind.in_flight for kind, lane in lanes.items()):
                        break
                    self._wait()
            while any(lanes.values()):
                for lane in lanes.values():
                    while lane and lane[0].ended:
                        yield _result(lane.popleft())
                if any(lanes.values()):
                    self._wait()
        finally:
            left = [doing for lane in lanes.values() for doing in lane]
            for doing in left:
                doing.dropped = True
            while not all(doing.ended for doing in left):
                self._wait()

    def close(self) -> None:
        """Tasks end with their jobs."""

    def _begin(self, job: Job[R], owner: Task) -> _Doing[R]:
        doing: _Doing[R] = _Doing([])

        def work() -> None:
            if doing.dropped:
                return
            doing.begun = True
            try:
                doing.result.append(job.work())
            except Exception as failure:  # noqa: BLE001 - raised where the result is asked for
                doing.failure = failure
            if owner in self._waiting:  # and not in an operation of its own
                self._waiting.remove(owner)
                self._loop.schedule(owner, self._loop.chance.random() * 1e-5)

        self._process.spawn(job.kind.name, work, self._loop.chance.random() * 1e-4)
        return doing

    def _wait(self) -> None:
        """Until some job has ended."""
        owner = self._loop.current
        assert owner is not None
        self._waiting.add(owner)
        self._loop.schedule(owner, math.inf)
        self._loop.give_way()


def _result(doing: _Doing[R]) -> R:
    if doing.failure is not None:
        raise doing.failure
    return doing.result[0]
