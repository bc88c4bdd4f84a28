"""Jobs that are done several at a time, while whoever gives them out goes on: what a stream of stores is written by.

    jobs, asked for one by one --> requests: as many in flight as the disk can take --> results
                              |--> packing: what is written next ---------------------> results
                              |--> computing: what the processor does meanwhile ------> results
                              `--> pages: little to write, and long to wait for ------> results

Each kind has threads of its own. A page that is written behind megabytes waits as long as they do, and a thread that
computes has no request in flight: both would take from the disk what it could do.
"""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass
from itertools import chain
from queue import Empty, SimpleQueue
from typing import Final, Generic, Protocol, TypeVar

__all__ = ["COMPUTING", "PACKING", "PAGE", "REQUEST", "Job", "JobRunner", "Kind", "run_parallel", "run_serial"]

R = TypeVar("R")
R_co = TypeVar("R_co", covariant=True)


@dataclass(frozen=True, slots=True)
class Kind:
    """So many jobs of a kind are done at a time, by as many threads; with those that wait for one they are `in_flight`
    at most.
    """

    name: str
    at_a_time: int
    in_flight: int


REQUEST: Final = Kind("request", 6, 12)
"""6 of 2 MiB take all that the disks which were measured can take."""
COMPUTING: Final = Kind("computing", 4, 8)
PACKERS: Final = min(4, os.cpu_count() or 1)
PACKING: Final = Kind("packing", PACKERS, PACKERS + 2)
PAGE: Final = Kind("page", 16, 32)
"""Each takes as long as all requests that are in flight."""

FEW: Final = 2
"""Jobs that are not worth a thread."""


@dataclass(frozen=True, slots=True)
class Job(Generic[R_co]):
    """Something to be done, in any thread."""

    kind: Kind
    work: Callable[[], R_co]


class JobRunner(Protocol):
    """Does jobs, several at a time. Yields what came out: in the order of the jobs of each kind. They are asked for
    when there is room for them, by the caller's thread. None among them: there is nothing now. Then the next one is
    asked for when some result has been taken; where nothing is being worked on, that is the end.

    However it ends (a failure is raised in its job's turn, or the caller closes it), nothing is being worked on then:
    the memory that jobs lend is the caller's again.
    """

    def __call__(self, jobs: Iterable[Job[R] | None], /) -> Generator[R, None, None]: ...


def run_serial(jobs: Iterable[Job[R] | None], /) -> Generator[R, None, None]:
    """One job after the other, by the caller."""
    for job in jobs:
        if job is not None:
            yield job.work()


def run_parallel(jobs: Iterable[Job[R] | None], /) -> Generator[R, None, None]:
    """In threads, which end with the jobs; the caller only waits. But what comes one or two at a time it does itself.

    They are daemons: one that hangs in the kernel must not keep the process. It keeps whoever waits for it here.
    """
    left = iter(jobs)
    few: list[Job[R]] = []
    while len(few) <= FEW:
        job = next(left, None)
        if job is not None:
            few.append(job)
        elif few:
            for job in few:
                yield job.work()
            few = []
        else:
            return
    ended = threading.Semaphore(0)
    lanes: dict[Kind, _JobThreads[R]] = {}
    try:
        for job in chain(few, left):
            if job is not None:
                if job.kind not in lanes:
                    lanes[job.kind] = _JobThreads(job.kind, ended)
                lanes[job.kind].begin(job.work)
            elif not any(lane.in_flight for lane in lanes.values()):
                break
            waits = job is None
            while True:
                for result in chain.from_iterable(lane.ready() for lane in lanes.values()):
                    yield result
                    waits = False
                if not waits and not any(lane.is_full for lane in lanes.values()):
                    break
                ended.acquire()
        while any(lane.in_flight for lane in lanes.values()):
            ended.acquire()
            for lane in lanes.values():
                yield from lane.ready()
    finally:
        for lane in lanes.values():
            lane.drop()
        for lane in lanes.values():
            lane.join()


class _JobThreads(Generic[R]):
    """Threads that do jobs in the order in which they began; each has another one at once when it has done one.

    `ended` is released whenever a job has been done.
    """

    def __init__(self, kind: Kind, ended: threading.Semaphore) -> None:
        self._name = kind.name
        self._count = kind.at_a_time
        self._in_flight_max = kind.in_flight
        self._ended = ended
        self._waiting: SimpleQueue[tuple[Callable[[], R], Future[R]] | None] = SimpleQueue()
        self._threads: list[threading.Thread] = []
        self.in_flight: deque[Future[R]] = deque()

    @property
    def is_full(self) -> bool:
        """Whether no more are taken now."""
        return len(self.in_flight) >= self._in_flight_max

    def begin(self, job: Callable[[], R]) -> None:
        """The job is done soon."""
        future: Future[R] = Future()
        self._waiting.put((job, future))
        self.in_flight.append(future)
        if len(self._threads) < min(self._count, len(self.in_flight)):
            name = f"stowage-disk-{self._name}-{len(self._threads)}"
            thread = threading.Thread(target=self._run, name=name, daemon=True)
            thread.start()
            self._threads.append(thread)

    def _run(self) -> None:
        while (some := self._waiting.get()) is not None:
            job, future = some
            try:
                future.set_result(job())
            except BaseException as failure:  # noqa: BLE001 - raised where the result is asked for
                future.set_exception(failure)
            self._ended.release()

    def ready(self) -> Iterator[R]:
        """The results of jobs that have been done, up to the first one that has not."""
        while self.in_flight and self.in_flight[0].done():
            yield self.in_flight.popleft().result()

    def drop(self) -> None:
        """What no thread has begun is not done."""
        with suppress(Empty):
            while True:
                self._waiting.get_nowait()
        for _ in self._threads:
            self._waiting.put(None)

    def join(self) -> None:
        """Waits for what they are doing."""
        for thread in self._threads:
            thread.join()
