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
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import chain
from queue import Empty, SimpleQueue
from typing import Final, Protocol, TypeVar

from stowage.tiers.disk.files import Descriptors, FileSystem, RealDescriptors, RealFileSystem

__all__ = [
    "Ahead",
    "Crew",
    "System",
    "ThreadCrew",
    "Together",
    "Turn",
    "alone",
    "one_by_one",
    "several",
    "some_at_once",
]

T = TypeVar("T")
R = TypeVar("R")

Turn = Callable[[], "float | None"]
"""Does one piece of work. Returns how many seconds the worker may sleep before the next turn unless it is woken: 0 when
there may be more to do, infinity when only a wake-up brings work. None: the worker has ended."""


AHEAD_THREADS: Final = 4
AHEAD_MIN: Final = 16
"""Fewer items are not worth threads."""


class Ahead(Protocol):
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
    under_way: deque[Future[R]] = deque()
    with ThreadPoolExecutor(AHEAD_THREADS, "stowage-disk-open") as pool:
        for item in items:
            under_way.append(pool.submit(work, item))
            if len(under_way) > AHEAD_THREADS:
                yield under_way.popleft().result()
        while under_way:
            yield under_way.popleft().result()


TOGETHER_THREADS: Final = 4
"""Requests in flight of what is written: 4 of 4 MiB take all that the disks which were measured can take."""
TOGETHER_MAX: Final = 2 * TOGETHER_THREADS
"""Items that were asked for and whose results were not: each thread has another one at once."""


class Together(Protocol):
    """Does something for each of some items, several at a time; yields what came out, in order. Items are asked for
    when there is room for them, by the caller's thread. None among them: there is nothing now. Then the next one is
    asked for when the oldest result has been taken; where nothing is being worked on, that is the end.

    However it ends (a failure is raised in its item's turn, or the caller closes it), no item is being worked on then:
    the memory that items lend is the caller's again.
    """

    def __call__(self, work: Callable[[T], R], items: Iterable[T | None], /) -> Generator[R, None, None]: ...


def alone(work: Callable[[T], R], items: Iterable[T | None], /) -> Generator[R, None, None]:
    """One item after the other, by the caller."""
    for item in items:
        if item is not None:
            yield work(item)


def several(work: Callable[[T], R], items: Iterable[T | None], /) -> Generator[R, None, None]:
    """In a few threads, which end with the items; the caller only waits.

    They are daemons: one that hangs in the kernel must not keep the process. It keeps whoever waits for it here.
    """
    left = iter(items)
    first, second = next(left, None), next(left, None)
    while first is not None and second is None:  # nothing to be done beside it
        yield work(first)
        first, second = next(left, None), next(left, None)
    if first is None:
        return
    ahead: SimpleQueue[tuple[T, Future[R]] | None] = SimpleQueue()
    under_way: deque[Future[R]] = deque()
    threads: list[threading.Thread] = []

    def run() -> None:
        while (some := ahead.get()) is not None:
            item, future = some
            try:
                future.set_result(work(item))
            except BaseException as failure:  # noqa: BLE001 - raised where the result is asked for
                future.set_exception(failure)

    try:
        for item in chain((first, second), left):
            if item is None:
                if not under_way:
                    break
                yield under_way.popleft().result()
                continue
            future: Future[R] = Future()
            ahead.put((item, future))
            under_way.append(future)
            if len(threads) < TOGETHER_THREADS:
                thread = threading.Thread(target=run, name=f"stowage-disk-piece-{len(threads)}", daemon=True)
                thread.start()
                threads.append(thread)
            if len(under_way) == TOGETHER_MAX:
                yield under_way.popleft().result()
        while under_way:
            yield under_way.popleft().result()
    finally:
        with suppress(Empty):
            while True:
                ahead.get_nowait()
        for _ in threads:
            ahead.put(None)
        for thread in threads:
            thread.join()


class Crew(Protocol):
    """Workers that take turns, each its own."""

    def wake(self, count: int = 1) -> None:
        """There is work for that many of them. Any thread; never lost: one that is busy asks again before it sleeps."""
        ...

    def join(self, timeout_s: float) -> bool:
        """Wait until all have ended, at most that long. Whether they have."""
        ...


class ThreadCrew:
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
    crew: Callable[[str, Sequence[Turn]], Crew] = ThreadCrew
    ahead: Ahead = some_at_once
    together: Together = several
