"""An event loop in a thread of its own: where a shared tier's work is done.

A process that is forked off has no such thread, and nothing of a tier works there. But its copy of the loop shares what
the loop watches in the kernel, so that a connection that is thrown away there would be deaf here. Hence the copy
watches nothing.

Where nobody has stopped it, it ends with the interpreter: libraries that answer from threads of their own must not find
Python half gone.
"""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import os
import select
import selectors
import threading
import time
import weakref
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, Final

_LAST_WORDS_S: Final = 1.0
_LETTING_GO_S: Final = 0.1
"""A library's thread that has answered lets go of Python within this time."""


class Worker:
    """A daemon: one that hangs must not keep the process. `run` and `stop` may be called from any thread."""

    def __init__(self, name: str) -> None:
        self._watched = selectors.EpollSelector()
        self._loop = asyncio.SelectorEventLoop(self._watched)
        forked = weakref.WeakMethod(self._forked)
        os.register_at_fork(after_in_child=lambda: forget() if (forget := forked()) is not None else None)
        self._tasks: set[asyncio.Task[None]] = set()
        atexit.register(self._at_exit)
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        try:
            self._loop.run_forever()
        finally:
            self._loop.close()

    def _forked(self) -> None:
        if not self._loop.is_closed():
            with select.epoll() as nothing:
                os.dup2(nothing.fileno(), self._watched.fileno(), inheritable=False)

    def run(self, work: Coroutine[Any, Any, None], ended: Callable[[], None]) -> None:
        """Begin that work; `ended` is called in the loop when it is over, also when it was cancelled before its first
        step. Not after `stop`."""
        self._loop.call_soon_threadsafe(self._begin, work, ended)

    def _begin(self, work: Coroutine[Any, Any, None], ended: Callable[[], None]) -> None:
        task = self._loop.create_task(work)
        self._tasks.add(task)

        def done(task: asyncio.Task[None]) -> None:
            self._tasks.discard(task)
            ended()

        task.add_done_callback(done)

    def stop(self, last: Callable[[], Awaitable[None]], timeout_s: float) -> bool:
        """Cancel all work, do `last`, end the thread. Whether it has ended within that time."""
        atexit.unregister(self._at_exit)
        asyncio.run_coroutine_threadsafe(self._end(last), self._loop)
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def _at_exit(self) -> None:
        if self._thread.is_alive():
            asyncio.run_coroutine_threadsafe(self._run_out(), self._loop)
            self._thread.join(2 * _LAST_WORDS_S)
            time.sleep(_LETTING_GO_S)

    async def _run_out(self) -> None:
        """What is under way may end by itself, for a moment; then it is cancelled."""
        try:
            if self._tasks:
                await asyncio.wait(self._tasks, timeout=_LAST_WORDS_S)
            for task in list(self._tasks):
                task.cancel()
        finally:
            self._loop.stop()

    async def _end(self, last: Callable[[], Awaitable[None]]) -> None:
        try:
            tasks = list(self._tasks)
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_LAST_WORDS_S):
                    await last()
        finally:
            self._loop.stop()
