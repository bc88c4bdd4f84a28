"""Connections: how many there may be, and how long a client may take to send and to read.

Owns the timers that uvicorn lacks, and how a connection ends. It ends when the head of a request does not arrive in
time, when the client reads nothing for too long, and when there are too many connections. A client that is refused
while it still sends gets its answer: the rest of what it sends is discarded for a while, because closing at once would
reset the connection, and the answer with it. Content is not looked at.
"""

from __future__ import annotations

import asyncio
import sys
from typing import Any, Final

import h11
from starlette.types import ASGIApp, Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol

from stowage.server.api_errors import ApiError
from stowage.server.limits import Limits
from stowage.server.stream import send_json

LINGER_S: Final = 5.0
LINGER_BYTES: Final = 64 << 20
"""How long, and up to how many bytes, the rest of a refused request is discarded."""


def protocol(limits: Limits) -> type[asyncio.Protocol]:
    """The class of connections that keep `limits`."""

    class Limited(Connection):
        pass

    Limited.limits = limits
    return Limited


class Connection(H11Protocol):
    """One connection.

    Waiting for a head means: connected, or something has come, and no request is being answered. uvicorn's own timer
    runs while nothing has come since the last answer.
    """

    limits: Limits

    def __init__(self, *arguments: Any, **named: Any) -> None:
        super().__init__(*arguments, **named)
        self.timeout_keep_alive = self.limits.keep_alive_s  # type: ignore[assignment]  # a float will do
        self._head_timer: asyncio.TimerHandle | None = None
        self._stall_timer: asyncio.TimerHandle | None = None
        self._linger_timer: asyncio.TimerHandle | None = None
        self._lingered_bytes = 0
        self._refused = False
        self.app = _within(self.app, self.limits.header_bytes_max)

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._real, self.transport = transport, _Ending(transport, self)  # type: ignore[assignment]
        # Whatever the system does not take counts as unread at once, so that no answer can wait for ever.
        transport.set_write_buffer_limits(high=0)
        if len(self.connections) > self.limits.max_connections:
            self._say(ApiError(503, "Too many connections; try again later.", code="too_many_connections"))
            return
        self._await_head()

    def connection_lost(self, exc: Exception | None) -> None:
        self._head_timer = _stopped(self._head_timer)
        self._stall_timer = _stopped(self._stall_timer)
        self._linger_timer = _stopped(self._linger_timer)
        super().connection_lost(exc)
        self._unset_keepalive_if_required()

    @property
    def lingers(self) -> bool:
        """Whether the answer is sent, and what still arrives is discarded."""
        return self._linger_timer is not None

    def end(self) -> None:
        """Close the connection; only after a while where the client is still sending a refused request."""
        sending = self._refused or (self.cycle is not None and self.cycle.more_body)
        if not sending or self._real.is_closing():
            self._real.close()
        elif not self.lingers:
            self._linger_timer = self.loop.call_later(LINGER_S, self._real.abort)
            self._real.write_eof()
            self._real.resume_reading()

    def data_received(self, data: bytes) -> None:
        if self.lingers:
            self._lingered_bytes += len(data)
            if self._lingered_bytes > LINGER_BYTES:
                self._real.abort()
            return
        if self.transport.is_closing():
            return
        super().data_received(data)
        if self.cycle is not None and not self.cycle.response_complete:
            self._head_timer = _stopped(self._head_timer)
        else:
            self._await_head()

    def pause_writing(self) -> None:
        super().pause_writing()
        if self._stall_timer is None:
            self._stall_timer = self.loop.call_later(self.limits.stall_timeout_s, self.transport.abort)

    def resume_writing(self) -> None:
        self._stall_timer = _stopped(self._stall_timer)
        super().resume_writing()

    def send_400_response(self, msg: str) -> None:
        """Called where the client does not speak HTTP, while that error is being handled."""
        if self.conn.our_state not in (h11.IDLE, h11.SEND_RESPONSE):
            self.transport.abort()  # in the middle of an answer there is nothing to say
            return
        status = getattr(sys.exc_info()[1], "error_status_hint", 400)
        if status == 431:
            what = _head_too_large(self.limits.header_bytes_max)
        else:
            what = "This is no HTTP request that can be understood."
        self._say(ApiError(status, what, code="invalid_http"))

    def _await_head(self) -> None:
        if self._head_timer is None and not self.transport.is_closing():
            self._head_timer = self.loop.call_later(self.limits.header_timeout_s, self.transport.abort)

    def _say(self, error: ApiError) -> None:
        """Answer without the application, and end the connection."""
        self._head_timer = _stopped(self._head_timer)
        self._refused = True
        body = error.encoded
        head = (
            f"HTTP/1.1 {error.status} Refused\r\ncontent-type: application/json\r\ncontent-length: {len(body)}\r\n"
            "connection: close\r\n" + "".join(f"{name}: {value}\r\n" for name, value in error.headers.items()) + "\r\n"
        )
        self.transport.write(head.encode("latin-1") + body)
        self.transport.close()


class _Ending:
    """A transport whose `close` is `Connection.end`."""

    def __init__(self, transport: asyncio.Transport, connection: Connection) -> None:
        self._transport = transport
        self._connection = connection

    def close(self) -> None:
        self._connection.end()

    def is_closing(self) -> bool:
        return self._connection.lingers or self._transport.is_closing()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)


def _within(app: ASGIApp, header_bytes_max: int) -> ASGIApp:
    """`app`, which refuses larger request heads: h11 limits a head only while it waits for the rest of it."""

    async def checked(scope: Scope, receive: Receive, send: Send) -> None:
        line = len(scope["method"]) + len(scope["raw_path"]) + len(scope["query_string"]) + len("  HTTP/1.1\r\n\r\n")
        if line + sum(len(name) + len(value) + len(": \r\n") for name, value in scope["headers"]) <= header_bytes_max:
            await app(scope, receive, send)
            return
        error = ApiError(431, _head_too_large(header_bytes_max), code="invalid_http", headers={"connection": "close"})
        await send_json(send, error.status, error.encoded, error.headers)

    return checked


def _head_too_large(header_bytes_max: int) -> str:
    return f"The head of the request is larger than the {header_bytes_max} bytes that it may have."


def _stopped(timer: asyncio.TimerHandle | None) -> asyncio.TimerHandle | None:
    """Stop a timer. Returns None, to replace it with."""
    if timer is not None:
        timer.cancel()
    return None
