"""Sends answers over ASGI: whole ones, and server-sent events, one JSON object each; OpenAI's are closed by `[DONE]`.

data: {"id": ..., "choices": [{"index": 0, "delta": {"content": "Hel"}, ...}]}
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from typing import Any, Final, TypeVar

from starlette.types import Message, Receive, Send

from stowage.server.api_errors import ApiError, encoded_error

T = TypeVar("T")
DONE: Final = b"data: [DONE]\n\n"
KEEP_ALIVE: Final = b": still working\n\n"
KEEP_ALIVE_S: Final = 15.0
"""How often a comment is sent while the engine sends nothing, so that no proxy takes the connection for dead."""


class ClientDisconnected(Exception):
    """The client has closed its connection."""


async def while_connected(receive: Receive, work: Coroutine[Any, Any, T]) -> T:
    """What `work` returns. Cancels it and raises ClientDisconnected when the client disconnects; the request's body
    must have been read before.
    """
    working, leaving = asyncio.create_task(work), asyncio.create_task(_left(receive))
    try:
        await asyncio.wait({working, leaving}, return_when=asyncio.FIRST_COMPLETED)
        if working.done():
            return working.result()
        raise ClientDisconnected
    finally:
        for task in (working, leaving):
            task.cancel()
        await asyncio.gather(working, leaving, return_exceptions=True)


async def _left(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def send_json(send: Send, status: int, body: bytes, headers: Mapping[str, str] | None = None) -> None:
    """A whole answer."""
    listed = {"content-type": "application/json", "content-length": str(len(body))} | dict(headers or {})
    await send(_start(status, listed))
    await send({"type": "http.response.body", "body": body})


def encoded(value: Mapping[str, Any]) -> bytes:
    """JSON in ASCII: some clients take Unicode line separators for the end of an event."""
    return json.dumps(value, allow_nan=False, separators=(",", ":")).encode("ascii")


class EventStream:
    """Server-sent events: `begin` first; nothing after `fail` or `end`. `failure` makes the event of an error."""

    def __init__(self, send: Send, failure: Callable[[ApiError], tuple[str, Mapping[str, Any]]]) -> None:
        self._send = send
        self._failure = failure

    async def begin(self) -> None:
        headers = {
            "content-type": "text/event-stream; charset=utf-8",
            "cache-control": "no-cache",
            "x-accel-buffering": "no",
        }
        await self._send(_start(200, headers))

    async def event(self, value: bytes, name: str = "") -> None:
        """One event; `value` is what `encoded` made."""
        await self._part(_event(name, value))

    async def keep_alive(self) -> None:
        await self._part(KEEP_ALIVE)

    async def end(self, done: bytes = DONE) -> None:
        await self._part(done, more=False)

    async def fail(self, error: ApiError) -> None:
        """End with an error event: the status is sent. No `[DONE]`, so that the answer is not taken for complete."""
        name, value = self._failure(error)
        await self._part(_event(name, encoded_error(value)), more=False)

    async def _part(self, body: bytes, more: bool = True) -> None:
        await self._send({"type": "http.response.body", "body": body, "more_body": more})


async def with_keep_alive(wait: Callable[[], Awaitable[T]], meanwhile: Callable[[], Awaitable[None]]) -> T:
    """What `wait` returns; calls `meanwhile` every `KEEP_ALIVE_S` until it does."""
    waiting = asyncio.ensure_future(wait())
    try:
        while not (await asyncio.wait({waiting}, timeout=KEEP_ALIVE_S))[0]:
            await meanwhile()
        return waiting.result()
    finally:
        waiting.cancel()


def _event(name: str, value: bytes) -> bytes:
    return (f"event: {name}\n".encode() if name else b"") + b"data: " + value + b"\n\n"


def _start(status: int, headers: Mapping[str, str]) -> Message:
    listed = [(name.encode("latin-1"), value.encode("latin-1")) for name, value in headers.items()]
    return {"type": "http.response.start", "status": status, "headers": listed}
