"""An event loop in a thread of its own: where a shared tier's work is done."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, Final

__all__ = ["Worker"]

_LAST_WORDS_S: Final = 1.0


class Worker:
    """A daemon: one that hangs must not keep the process. `run` and `stop` may be called from any thread."""

    def __init__(self, name: str) -> None:
        self._loop = asyncio.new_event_loop()
        self._tasks: set[asyncio.Task[None]] = set()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        try:
            self._loop.run_forever()
        finally:
            self._loop.close()

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
        asyncio.run_coroutine_threadsafe(self._end(last), self._loop)
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

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
