"""A fair queue for long work off the event loop: one thread, shared round-robin by clients.

Owns the order, and how much processor time each client has used: at most `limit_s` per minute. Abandoned work is not
begun; work that has begun ends at its next `check`.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Any, Final, TypeVar

from stowage.server.api_errors import busy

T = TypeVar("T")
_MINUTE_S: Final = 60.0
_CLIENTS_MAX: Final = 4096


class Abandoned(Exception):
    """The caller no longer waits for the work."""


@dataclass(eq=False, slots=True)
class Job:
    """One piece of work. `check` is for the work itself, from time to time."""

    client: str
    work: Callable[[Job], Any]
    done: asyncio.Future[Any]
    left_s: float
    began_s: float = 0.0
    running: bool = False
    abandoned: bool = False

    def check(self) -> None:
        """Raises Abandoned when the caller no longer waits, ApiError when the client has used up its time."""
        if self.abandoned:
            raise Abandoned
        if self.spent_s > self.left_s:
            what = "Reading this client's requests has taken more processor time than one client may have; try later."
            raise busy(what, 5)

    @property
    def spent_s(self) -> float:
        """Processor time so far. On the worker thread."""
        return time.thread_time() - self.began_s


class FairQueue:
    """All methods are called on the event loop's thread. `limit_s`: processor time per client and minute."""

    def __init__(self, name: str, limit_s: float = math.inf, clock: Callable[[], float] = time.monotonic) -> None:
        self._threads = ThreadPoolExecutor(1, name)
        self._limit_s = limit_s
        self._clock = clock
        self._waiting: dict[str, deque[Job]] = {}
        self._spent: dict[str, tuple[float, float]] = {}
        self._busy = False

    async def run(self, client: str, work: Callable[[Job], T]) -> T:
        """What `work` returns, when it is the client's turn. Raises what it raises."""
        job = Job(client, work, asyncio.get_running_loop().create_future(), 0.0)
        self._waiting.setdefault(client, deque()).append(job)
        self._begin()
        try:
            found: T = await asyncio.shield(job.done)
            return found
        except asyncio.CancelledError:
            job.abandoned = True
            if job.running:  # its memory may be returned only after it has ended
                await asyncio.wait({job.done})
                job.done.exception()
            raise

    def close(self) -> None:
        """Cancel all jobs that have not begun."""
        for job in [job for jobs in self._waiting.values() for job in jobs]:
            job.done.cancel()
        self._waiting.clear()
        self._threads.shutdown(wait=False, cancel_futures=True)

    def spent_s(self, client: str) -> float:
        """Processor time that counts against a client: what it has used, less what was refilled since."""
        spent_s, at_s = self._spent.get(client, (0.0, 0.0))
        if math.isinf(self._limit_s):
            return 0.0
        return max(0.0, spent_s - (self._clock() - at_s) * self._limit_s / _MINUTE_S)

    def _begin(self) -> None:
        while self._waiting and not self._busy:
            client = next(iter(self._waiting))
            jobs = self._waiting.pop(client)
            job = jobs.popleft()
            if jobs:
                self._waiting[client] = jobs  # after those of all others
            if job.abandoned:
                job.done.cancel()
                continue
            self._busy = job.running = True
            job.left_s = self._limit_s - self.spent_s(client)
            working = asyncio.get_running_loop().run_in_executor(self._threads, _timed, job)
            working.add_done_callback(partial(self._ended, job))

    def _ended(self, job: Job, working: asyncio.Future[tuple[Any, BaseException | None, float]]) -> None:
        self._busy = False
        if working.cancelled():
            job.done.cancel()
            return
        found, error, seconds = working.result()
        self._spent[job.client] = (self.spent_s(job.client) + seconds, self._clock())
        while len(self._spent) > _CLIENTS_MAX:
            del self._spent[next(iter(self._spent))]
        if error is not None:
            job.done.set_exception(error)
        else:
            job.done.set_result(found)
        self._begin()


def _timed(job: Job) -> tuple[Any, BaseException | None, float]:
    job.began_s = time.thread_time()
    try:
        job.check()
        return job.work(job), None, job.spent_s
    except BaseException as error:  # noqa: BLE001 - raised where it is waited for
        return None, error, job.spent_s
