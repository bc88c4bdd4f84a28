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
from concurrent.futures import Future, wait
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from itertools import chain
from queue import SimpleQueue
from typing import Final, Generic, Protocol, TypeVar

__all__ = ["COMPUTING", "PACKING", "PAGE", "REQUEST", "Job", "JobRunner", "Kind", "ParallelJobs", "SerialJobs"]

R = TypeVar("R")
R_co = TypeVar("R_co", covariant=True)


@dataclass(frozen=True, slots=True)
class Kind:
    """So many jobs of a kind are done at a time, by as many threads; with those that wait for one they are `in_flight`
    at most. Those that take a `core` to themselves let others have it who want it for a moment.
    """

    name: str
    at_a_time: int
    in_flight: int
    core: bool = False


REQUEST: Final = Kind("request", 6, 12)
"""6 of 2 MiB take all that the disks which were measured can take."""
COMPUTING: Final = Kind("computing", 4, 8)
PACKERS: Final = min(4, os.cpu_count() or 1)
PACKING: Final = Kind("packing", PACKERS, PACKERS + 2, core=True)
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

    def close(self) -> None:
        """Gives back what is kept from one time to the next. Nothing is being worked on."""
        ...


class SerialJobs:
    """One job after the other, by the caller."""

    def __call__(self, jobs: Iterable[Job[R] | None], /) -> Generator[R, None, None]:
        for job in jobs:
            if job is not None:
                yield job.work()

    def close(self) -> None:
        """Nothing is kept."""


class ParallelJobs:
    """In threads; the caller only waits. But what comes one or two at a time it does itself.

    Threads begin when there is work for them, and are kept: beginning one takes longer than most jobs where others
    have the cores. They are daemons: one that hangs in the kernel must not keep the process. It keeps whoever waits for
    it here.
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
        """Ends the threads; others begin where there is work again."""
        for threads in self._threads.values():
            threads.end()
        self._threads.clear()


class _Threads:
    """Of one kind. They do what is put into their queue, in its order; each has another job at once when it has done
    one.
    """

    def __init__(self, kind: Kind) -> None:
        self.kind = kind
        self._waiting: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._threads: list[threading.Thread] = []

    def begin(self, job: Callable[[], None], at_a_time: int) -> None:
        """The job, which does not raise, is done soon: by one of so many threads at least, if that many may be."""
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
    """Whoever wakes this thread goes on, as whoever issues requests must: otherwise up to some milliseconds later."""
    with suppress(AttributeError, OSError):  # where there is no such thing, or it is forbidden
        if os.sched_getscheduler(0) == os.SCHED_OTHER:
            os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))


class _Lane(Generic[R]):
    """Jobs of one kind and one stream. `ended` is released whenever one has been done."""

    def __init__(self, threads: _Threads, ended: threading.Semaphore) -> None:
        self._threads = threads
        self._ended = ended
        self.in_flight: deque[Future[R]] = deque()

    @property
    def is_full(self) -> bool:
        """Whether no more are taken now."""
        return len(self.in_flight) >= self._threads.kind.in_flight

    def begin(self, work: Callable[[], R]) -> None:
        """The job is done soon."""
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
        """The results of jobs that have been done, up to the first one that has not."""
        while self.in_flight and self.in_flight[0].done():
            yield self.in_flight.popleft().result()

    def drop(self) -> None:
        """What no thread has begun is not done."""
        self.in_flight = deque(future for future in self.in_flight if not future.cancel())

    def join(self) -> None:
        """Waits for what threads are doing."""
        wait(self.in_flight)
