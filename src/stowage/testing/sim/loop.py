"""One seeded loop that plays clock, threads and processes: the same seed gives the same run, step for step.

A task is a greenlet; it runs until it sleeps, waits or touches the simulated disk, and the loop then picks the one
that is due next. How long anything takes is drawn from the seed, and so is the order in which tasks meet. Nothing here
waits for real time.

A process is a set of tasks. `kill` takes it out of the world between two steps, wherever its tasks stand: what they
would have done later is not done (code that runs while they unwind finds that nothing answers it any more).
"""

from __future__ import annotations

import contextlib
import heapq
import itertools
import math
import random
import struct
import zlib
from collections import deque
from collections.abc import Callable, Sequence

from stowage.storage.disk.system import Turn

try:
    from greenlet import GreenletExit, getcurrent, greenlet
except ImportError as error:  # an extra: only simulations need it
    raise ImportError("The simulator needs greenlet: pip install 'stowage[testing]'") from error

TRACE_LINES: int = 400


class Process:
    """A simulated process: alive until it is killed, or its main task has ended and its workers with it."""

    def __init__(self, loop: Loop) -> None:
        self.loop = loop
        self.name = f"p{next(loop.process_numbers)}"
        self.alive = True
        self.hangs = False
        """Whether one of its threads is stuck in the kernel for good."""
        self.stalled_until_s = 0.0
        """When the slowest operation that its threads have begun ends."""
        self.tasks: list[Task] = []
        self.worker_pools: list[SimWorkerPool] = []

    def spawn(self, name: str, work: Callable[[], None], after_s: float = 0.0) -> Task:
        """A new task, first run `after_s` from now."""
        assert self.alive
        task = Task(self, f"{self.name}/{name}", work)
        self.tasks.append(task)
        self.loop.schedule(task, after_s)
        return task

    def kill(self) -> None:
        """As SIGKILL does. Not to be called by one of its own tasks."""
        self.alive = False
        for task in self.tasks:
            task.kill()


class Task:
    """A thread of a process."""

    def __init__(self, process: Process, name: str, work: Callable[[], None]) -> None:
        self.process = process
        self.name = name
        self.is_main = not process.tasks
        self.ended = False
        self.due = 0
        """The number of the schedule entry that is valid; older ones are void."""
        self._greenlet: greenlet = greenlet(self._run, parent=process.loop.hub)
        self._work = work

    def _run(self) -> None:
        try:
            self._work()
        finally:
            self.ended = True

    def step(self) -> None:
        """Run until the task gives way."""
        self._greenlet.switch()

    def kill(self) -> None:
        """Unwind without effect: the process is dead already. What is raised meanwhile is nobody's matter any more."""
        assert not self.process.alive
        self.due = -1
        while self._greenlet:  # what catches it, and waits once more, is told again
            with contextlib.suppress(Exception):
                self._greenlet.throw(GreenletExit)
        self.ended = True


class Loop:
    """Clock and scheduler of one world."""

    def __init__(self, seed: int) -> None:
        self.chance = random.Random(seed)
        self.now_s = 1000.0
        self.steps = 0
        self.digest = 0
        """Of every step so far: who ran, and when."""
        self.process_numbers = itertools.count(1)
        self.trace: deque[str] = deque(maxlen=TRACE_LINES)
        self.hub: greenlet = getcurrent()
        self._heap: list[tuple[float, float, int, Task]] = []
        self._numbers = itertools.count(1)
        self.current: Task | None = None

    def clock(self) -> float:
        """Seconds."""
        return self.now_s

    def log(self, text: str) -> None:
        """A line of the trace, which a failure shows."""
        who = self.current.name if self.current else "world"
        self.trace.append(f"{self.now_s - 1000:11.6f} {who:<16} {text}")

    def schedule(self, task: Task, after_s: float) -> None:
        """The task runs next `after_s` from now; what it was scheduled for before is void."""
        task.due = next(self._numbers)
        if after_s < math.inf:
            heapq.heappush(self._heap, (self.now_s + after_s, self.chance.random(), task.due, task))

    def sleep(self, seconds: float) -> None:
        """Give way for that long. In a task only; outside of tasks time stands still."""
        task = self.current
        if task is None:
            return
        self.schedule(task, max(0.0, seconds))
        self.give_way()

    def give_way(self) -> None:
        """Let others run until somebody schedules this task and its time has come."""
        task = self.current
        assert task is not None
        if not task.process.alive:
            raise GreenletExit
        self.hub.switch()
        if not task.process.alive:
            raise GreenletExit

    def step(self) -> bool:
        """Run the task that is due next. False when there is none."""
        while self._heap:
            at_s, _, number, task = heapq.heappop(self._heap)
            if task.due != number or task.ended:
                continue
            self.now_s = max(self.now_s, at_s)
            self.steps += 1
            self.digest = zlib.crc32(struct.pack("<d", self.now_s) + task.name.encode(), self.digest)
            self.current = task
            try:
                task.step()
            finally:
                self.current = None
            return True
        return False


class SimWorkerPool:
    """Implements WorkerPool (stowage.storage.disk.system): tasks that take turns as threads do."""

    def __init__(self, process: Process, name: str, turns: Sequence[Turn]) -> None:
        self._loop = process.loop
        self._signals = 0
        self._idle: list[Task] = []
        self._for_good: dict[Task, bool] = {}
        self.tasks = [
            process.spawn(f"{name.rpartition('-')[2]}{number}", self._runner(turn)) for number, turn in enumerate(turns)
        ]
        process.worker_pools.append(self)

    def _runner(self, turn: Turn) -> Callable[[], None]:
        def run() -> None:
            task = self._loop.current
            assert task is not None
            while (pause_s := turn()) is not None:
                if pause_s <= 0:
                    self._loop.sleep(self._loop.chance.random() * 1e-5)
                elif self._signals:
                    self._signals -= 1
                else:
                    self._idle.append(task)
                    self._for_good[task] = math.isinf(pause_s)
                    self._loop.schedule(task, pause_s)
                    self._loop.give_way()
                    if task in self._idle:  # the pause is over; a wake-up would have taken it out
                        self._idle.remove(task)

        return run

    def wake(self, count: int = 1) -> None:
        for _ in range(count):
            sleepers = [task for task in self._idle if not task.ended]
            if not sleepers:
                self._signals = min(self._signals + 1, len(self.tasks))
                continue
            task = self._loop.chance.choice(sleepers)
            self._idle.remove(task)
            self._loop.schedule(task, self._loop.chance.random() * 1e-4)

    def join(self, timeout_s: float) -> bool:
        until_s = self._loop.now_s + timeout_s
        while not all(task.ended for task in self.tasks) and self._loop.now_s < until_s:
            self._loop.sleep(min(0.01, until_s - self._loop.now_s))
        return all(task.ended for task in self.tasks)

    def all_asleep(self) -> bool:
        """Whether no worker will do anything unless it is woken, or its pause ends."""
        alive = [task for task in self.tasks if not task.ended]
        return bool(alive) and not self._signals and all(task in self._idle for task in alive)

    def all_asleep_for_good(self) -> bool:
        """Whether no worker will do anything unless it is woken."""
        return self.all_asleep() and all(self._for_good[task] for task in self._idle if not task.ended)


class SimSignal:
    """What the store sleeps on (see Signal in stowage.cache.store): an event of the simulated kind."""

    def __init__(self, process: Process) -> None:
        self._loop = process.loop
        self.is_set = False
        self.sleeper: Task | None = None

    def set(self) -> None:
        self.is_set = True
        if self.sleeper is not None:
            self._loop.schedule(self.sleeper, self._loop.chance.random() * 1e-4)
            self.sleeper = None

    def clear(self) -> None:
        self.is_set = False

    def wait(self, timeout: float | None = None) -> bool:
        if not self.is_set:
            self.sleeper = self._loop.current
            assert self.sleeper is not None
            self._loop.schedule(self.sleeper, math.inf if timeout is None else timeout)
            self._loop.give_way()
            self.sleeper = None
        return self.is_set
