"""Locks, conditions and threads of a played process: what `engine.loop` takes in place of `threading`.

A task that has to wait gives way to the others. It also gives way, at random, before it takes a lock: so tasks meet at
every point where threads may.
"""

from __future__ import annotations

import asyncio
import math
from collections import deque
from collections.abc import Callable
from typing import Any, Final

from stowage.testing.sim.loop import Loop, Process, Task

GIVES_WAY: Final = 0.1
SOON_S: Final = 1e-4


class EngineLoop(Loop):
    """A loop whose tasks may run event loops of `asyncio`: of these only one runs at a time in a real thread."""

    def give_way(self) -> None:
        running = asyncio._get_running_loop()
        asyncio._set_running_loop(None)
        try:
            super().give_way()
        finally:
            asyncio._set_running_loop(running)


class PlayedLock:
    """`threading.RLock`. Code outside of all tasks (garbage that is collected) takes no part in it."""

    def __init__(self, loop: Loop) -> None:
        self._loop = loop
        self._owner: Task | None = None
        self._depth = 0
        self._waiting: deque[Task] = deque()

    @property
    def is_free(self) -> bool:
        return self._owner is None

    def __enter__(self) -> None:
        task = self._loop.current
        if task is None:
            return
        if self._owner is not task and self._loop.chance.random() < GIVES_WAY:
            self._loop.sleep(self._loop.chance.random() * SOON_S)
        while self._owner not in (None, task):
            self._waiting.append(task)
            self._loop.schedule(task, math.inf)
            self._loop.give_way()
        self._owner = task
        self._depth += 1

    def __exit__(self, *_: object) -> None:
        if self._loop.current is None or self._owner is not self._loop.current:
            return
        self._depth -= 1
        if not self._depth:
            self._owner = None
            if self._waiting:
                self._loop.schedule(self._waiting.popleft(), self._loop.chance.random() * SOON_S)


class PlayedCondition(PlayedLock):
    """`threading.Condition`."""

    def __init__(self, loop: Loop) -> None:
        super().__init__(loop)
        self._sleepers: deque[Task] = deque()

    def wait(self, timeout: float | None = None) -> None:
        task = self._loop.current
        assert task is not None and self._owner is task and self._depth == 1
        self._sleepers.append(task)
        self.__exit__()
        self._loop.schedule(task, math.inf if timeout is None else timeout)
        self._loop.give_way()
        if task in self._sleepers:
            self._sleepers.remove(task)
        self.__enter__()

    def notify(self) -> None:
        if self._sleepers:
            self._loop.schedule(self._sleepers.popleft(), self._loop.chance.random() * SOON_S)


class PlayedThread:
    """`threading.Thread`."""

    def __init__(self, process: Process, target: Callable[..., None], name: str, args: tuple[Any, ...]) -> None:
        self._process = process
        self._work = lambda: target(*args)
        self._name = name
        self._task: Task | None = None

    def start(self) -> None:
        if self._process.alive:
            self._task = self._process.spawn(self._name, self._work)

    def is_alive(self) -> bool:
        return self._task is not None and not self._task.ended

    def join(self, timeout: float | None = None) -> None:
        loop = self._process.loop
        until_s = loop.now_s + (math.inf if timeout is None else timeout)
        while self.is_alive() and loop.now_s < until_s:
            loop.sleep(0.01)


class PlayedThreads:
    """What `engine.loop` uses of the module `threading`."""

    def __init__(self, process: Process) -> None:
        self._process = process

    def RLock(self) -> PlayedLock:
        return PlayedLock(self._process.loop)

    def Condition(self) -> PlayedCondition:
        return PlayedCondition(self._process.loop)

    def Thread(
        self, target: Callable[..., None], name: str, args: tuple[Any, ...] = (), daemon: bool = True
    ) -> PlayedThread:
        return PlayedThread(self._process, target, name, args)
