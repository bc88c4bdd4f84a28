"""Lets so many operations, and so many bytes, through at a time, first come, first served. For one event loop."""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import AsyncIterator


class Limiter:
    """At most `count_max` at once, and `bytes_max` bytes, except that one may always be through."""

    def __init__(self, count_max: int, bytes_max: int) -> None:
        assert count_max > 0
        self._count_max = count_max
        self._bytes_max = bytes_max
        self.count = 0
        self.bytes = 0
        self._waiting: deque[tuple[asyncio.Future[None], int]] = deque()

    @contextlib.asynccontextmanager
    async def passing(self, nbytes: int) -> AsyncIterator[None]:
        """While inside, `nbytes` count. Cancelled while waiting, it takes nothing."""
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.append((turn, nbytes))
        self._admit()
        try:
            await turn
        except asyncio.CancelledError:
            if turn.cancelled():
                self._admit()  # those behind may fit
            else:
                self._leave(nbytes)
            raise
        try:
            yield
        finally:
            self._leave(nbytes)

    def _leave(self, nbytes: int) -> None:
        self.count -= 1
        self.bytes -= nbytes
        self._admit()

    def _admit(self) -> None:
        while self._waiting:
            turn, nbytes = self._waiting[0]
            if turn.cancelled():
                self._waiting.popleft()
                continue
            if self.count and (self.count >= self._count_max or self.bytes + nbytes > self._bytes_max):
                return
            self._waiting.popleft()
            self.count += 1
            self.bytes += nbytes
            turn.set_result(None)

    def check(self) -> None:
        """Assert the invariants."""
        assert 0 <= self.count <= self._count_max
        assert self.bytes <= self._bytes_max or self.count == 1, "more bytes under way than the limit allows"
        assert self.count or not self._waiting, "somebody waits for nobody"
