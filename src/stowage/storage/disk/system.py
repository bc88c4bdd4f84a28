"""What the disk tier asks of the machine: files, time, randomness and workers. All of it is passed in.

The tier itself makes no system call, reads no clock and starts no thread, so that the very same code runs on a real
disk, on one that fails on demand (`stowage.testing.faults`), and in a simulator where disk, clock and threads are
played by one seeded loop (`stowage.testing.sim`).
"""

from __future__ import annotations

import os
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Final, Protocol, TypeVar

from stowage.storage.disk.files import Descriptors, FileSystem, RealDescriptors, RealFileSystem
from stowage.storage.disk.write_jobs import JobRunner, ParallelJobs

T = TypeVar("T")
R = TypeVar("R")

Turn = Callable[[], "float | None"]
"""Does one piece of work. Returns how many seconds the worker may sleep before the next turn unless it is woken: 0 when
there may be more to do, infinity when only a wake-up brings work. None: the worker has ended."""


AHEAD_THREADS: Final = 4
AHEAD_MIN: Final = 16
"""Fewer items are not worth threads."""


class ParallelMap(Protocol):
    """Does something for each of many items; yields what came out, in order."""

    def __call__(self, work: Callable[[T], R], items: Sequence[T], /) -> Iterator[R]: ...


def one_by_one(work: Callable[[T], R], items: Sequence[T], /) -> Iterator[R]:
    """Nothing at once."""
    return map(work, items)


def some_at_once(work: Callable[[T], R], items: Sequence[T], /) -> Iterator[R]:
    """In a few threads, a few items ahead of what was asked for: while one waits for the disk, others compute."""
    if len(items) < AHEAD_MIN:
        yield from map(work, items)
        return
    in_flight: deque[Future[R]] = deque()
    with ThreadPoolExecutor(AHEAD_THREADS, "stowage-disk-open") as pool:
        for item in items:
            in_flight.append(pool.submit(work, item))
            if len(in_flight) > AHEAD_THREADS:
                yield in_flight.popleft().result()
        while in_flight:
            yield in_flight.popleft().result()


class WorkerPool(Protocol):
    """Workers that take turns, each its own."""

    def wake(self, count: int = 1) -> None:
        """There is work for that many of them. Any thread; never lost: one that is busy asks again before it sleeps."""

    def join(self, timeout_s: float) -> bool:
        """Wait until all have ended, at most that long. Whether they have."""


class ThreadWorkerPool:
    """One thread per worker; a daemon, because one that hangs in the kernel must not keep the process.

    Invariant: `_signals` are wake-ups that nobody has slept through or woken from yet, never more than workers.
    """

    def __init__(self, name: str, turns: Sequence[Turn]) -> None:
        self._change = threading.Condition()
        self._signals = 0
        self._threads = [
            threading.Thread(target=self._run, args=(turn,), name=f"{name}-{number}", daemon=True)
            for number, turn in enumerate(turns)
        ]
        for thread in self._threads:
            thread.start()

    def _run(self, turn: Turn) -> None:
        while (pause_s := turn()) is not None:
            if pause_s > 0:
                self._sleep(pause_s)

    def _sleep(self, pause_s: float) -> None:
        with self._change:
            if not self._signals:
                self._change.wait(min(pause_s, threading.TIMEOUT_MAX))
            self._signals = max(0, self._signals - 1)

    def wake(self, count: int = 1) -> None:
        with self._change:
            self._signals = min(self._signals + count, len(self._threads))
            self._change.notify(count)

    def join(self, timeout_s: float) -> bool:
        until_s = time.monotonic() + timeout_s
        for thread in self._threads:
            thread.join(max(0.0, until_s - time.monotonic()))
        return not any(thread.is_alive() for thread in self._threads)


@dataclass(frozen=True, slots=True)
class System:
    """The machine as the tier sees it; by default the real one.

    `clock` is that of the deadlines. `timer` measures how long something took, and moves while `sleep` sleeps; a test
    may hold `clock` still, and real waits still end.
    """

    files: FileSystem = field(default_factory=RealFileSystem)
    descriptors: Descriptors = field(default_factory=RealDescriptors)
    clock: Callable[[], float] = time.monotonic
    timer: Callable[[], float] = time.monotonic
    sleep: Callable[[float], None] = time.sleep
    random_bytes: Callable[[int], bytes] = os.urandom
    worker_pool: Callable[[str, Sequence[Turn]], WorkerPool] = ThreadWorkerPool
    ahead: ParallelMap = some_at_once
    job_runner: Callable[[], JobRunner] = ParallelJobs
    worth_a_thread_bytes: int = 1 << 20
    """Packing less takes no longer than giving it to another thread."""
