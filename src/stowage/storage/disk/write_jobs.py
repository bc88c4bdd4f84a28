"""Runs the jobs of a stream of stores in parallel, on a thread pool for each kind of job.

    jobs, one by one --> requests: as many in flight as the disk can take --> results
                    |--> packing: chunks that are written next -------------> results
                    |--> computing: hashes ---------------------------------> results
                    `--> pages: short writes with a long latency -----------> results

Separate pools, because a header page queued behind megabytes waits as long as they do, and a thread that computes has
no request in flight: both would leave the disk idle.
"""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator
from concurrent.futures import Future, wait
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from itertools import chain
from queue import SimpleQueue
from typing import Final, Generic, Protocol, TypeVar

R = TypeVar("R")
R_co = TypeVar("R_co", covariant=True)


@dataclass(frozen=True, slots=True)
class Kind:
    """A kind of job: how many run at a time, in as many threads, and how many are `in_flight` at most, waiting ones
    included. `core`: its jobs use a whole core, and run at a lower priority.
    """

    name: str
    at_a_time: int
    in_flight: int
    core: bool = False


REQUEST: Final = Kind("request", 6, 12)
"""6 requests of 2 MiB saturate all disks that were measured."""
COMPUTING: Final = Kind("computing", 4, 8)
PACKERS: Final = min(4, os.cpu_count() or 1)
PACKING: Final = Kind("packing", PACKERS, PACKERS + 2, core=True)
PAGE: Final = Kind("page", 16, 32)
"""Each takes as long as all requests in flight."""

FEW: Final = 2
"""Jobs that are too short for a thread: the caller runs them."""


@dataclass(frozen=True, slots=True)
class Job(Generic[R_co]):
    """Work for any thread."""

    kind: Kind
    work: Callable[[], R_co]


class JobRunner(Protocol):
    """Runs jobs in parallel and yields their results, in order within each kind. The next job is pulled from `jobs` by
    the caller's thread when its kind has room. A None in `jobs` means: nothing now; pull again after the next result,
    or end if no job is running.

    However it ends (a job's failure is raised in its turn, or the caller closes the generator), no job is running
    afterwards, so the caller may reuse the memory of its jobs.
    """

    def __call__(self, jobs: Iterable[Job[R] | None], /) -> Generator[R, None, None]: ...

    def close(self) -> None:
        """Frees what is kept between calls. No job may be running."""


class SerialJobs:
    """One job after the other, by the caller."""

    def __call__(self, jobs: Iterable[Job[R] | None], /) -> Generator[R, None, None]:
        for job in jobs:
            if job is not None:
                yield job.work()

    def close(self) -> None:
        """Nothing is kept."""


class ParallelJobs:
    """In threads, while the caller waits; it runs one or two jobs by itself if there are no more.

    Threads are started on demand and kept, because starting one takes longer than most jobs on a busy machine. They are
    daemons: one that hangs in the kernel must not keep the process alive (but it blocks the caller here).
    """

    def __init__(self) -> None:
        self._threads: dict[Kind, _Threads] = {}

    def __call__(self, jobs: Iterable[Job[R] | None], /) -> Generator[R, None, None]:
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
        lanes: dict[Kind, _Lane[R]] = {}
        try:
            for job in chain(few, left):
                if job is not None:
                    if job.kind not in lanes:
                        lanes[job.kind] = _Lane(self._threads.setdefault(job.kind, _Threads(job.kind)), ended)
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

    def close(self) -> None:
        """Ends the threads; new ones are started on demand."""
        for threads in self._threads.values():
            threads.end()
        self._threads.clear()


class _Threads:
    """The thread pool of one kind, with a FIFO queue."""

    def __init__(self, kind: Kind) -> None:
        self.kind = kind
        self._waiting: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._threads: list[threading.Thread] = []

    def begin(self, job: Callable[[], None], at_a_time: int) -> None:
        """Queues a job, which must not raise. Starts threads up to `at_a_time`, if the kind allows that many."""
        self._waiting.put(job)
        if len(self._threads) < min(self.kind.at_a_time, at_a_time):
            name = f"stowage-disk-{self.kind.name}-{len(self._threads)}"
            thread = threading.Thread(target=self._run, name=name, daemon=True)
            thread.start()
            self._threads.append(thread)

    def _run(self) -> None:
        if self.kind.core:
            _leave_cores_to_others()
        while (job := self._waiting.get()) is not None:
            job()
            del job  # what it lends is not kept until there is another

    def end(self) -> None:
        """Waits until they have ended."""
        for _ in self._threads:
            self._waiting.put(None)
        for thread in self._threads:
            thread.join()


def _leave_cores_to_others() -> None:
    """Lower this thread's priority: otherwise waking it may delay the thread that issues requests by milliseconds."""
    with suppress(AttributeError, OSError):  # where there is no such thing, or it is forbidden
        if os.sched_getscheduler(0) == os.SCHED_OTHER:
            os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))


class _Lane(Generic[R]):
    """Jobs of one kind and one stream. `ended` is released whenever one ends."""

    def __init__(self, threads: _Threads, ended: threading.Semaphore) -> None:
        self._threads = threads
        self._ended = ended
        self.in_flight: deque[Future[R]] = deque()

    @property
    def is_full(self) -> bool:
        """Whether no more jobs are accepted now."""
        return len(self.in_flight) >= self._threads.kind.in_flight

    def begin(self, work: Callable[[], R]) -> None:
        """Queues a job."""
        future: Future[R] = Future()
        self.in_flight.append(future)
        self._threads.begin(partial(self._work, work, future), len(self.in_flight))

    def _work(self, work: Callable[[], R], future: Future[R]) -> None:
        """In any thread."""
        if not future.set_running_or_notify_cancel():
            return
        try:
            future.set_result(work())
        except BaseException as failure:  # noqa: BLE001 - raised where the result is asked for
            future.set_exception(failure)
        self._ended.release()

    def ready(self) -> Iterator[R]:
        """The results of finished jobs, up to the first unfinished one."""
        while self.in_flight and self.in_flight[0].done():
            yield self.in_flight.popleft().result()

    def drop(self) -> None:
        """Cancels jobs that no thread has started."""
        self.in_flight = deque(future for future in self.in_flight if not future.cancel())

    def join(self) -> None:
        """Waits for running jobs."""
        wait(self.in_flight)
