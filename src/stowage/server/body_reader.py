"""Reads request bodies within limits of size, time and the memory of all requests; ends requests that take too long."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from starlette.requests import Request

from stowage.server.api_errors import ApiError
from stowage.server.limits import Limits
from stowage.server.memory import RequestMemory, Reservation, bytes_to_read
from stowage.server.stream import ClientDisconnected


class BodyReader:
    """See the module."""

    def __init__(self, limits: Limits, memory: RequestMemory) -> None:
        self._limits, self._memory = limits, memory

    @asynccontextmanager
    async def reserved(self, client: str) -> AsyncIterator[Reservation]:
        """The memory of one request of `client` while it is answered. Raises ApiError when that takes too long."""
        reservation = Reservation(self._memory, client)
        try:
            async with asyncio.timeout(self._limits.request_timeout_s):
                yield reservation
        except TimeoutError as error:
            what = f"The answer took longer than the {self._limits.request_timeout_s:g} s that a request may take."
            raise ApiError(504, what, code="timeout") from error
        finally:
            reservation.close()

    async def read(self, request: Request, reservation: Reservation) -> bytearray:
        """The body; it and its parsing are counted in `reservation`. Raises ApiError and ClientDisconnected."""
        self._check_head(request)
        body = bytearray()
        try:
            async with asyncio.timeout(self._limits.body_timeout_s):
                while await self._part(request, body, reservation):
                    pass
        except TimeoutError as error:
            what = f"The body did not arrive within {self._limits.body_timeout_s:g} s."
            raise ApiError(408, what, code="timeout", headers={"connection": "close"}) from error
        reservation.take(bytes_to_read(body))
        return body

    async def _part(self, request: Request, body: bytearray, reservation: Reservation) -> bool:
        """Add the next part to `body`; whether there are more."""
        message = await request.receive()
        if message["type"] == "http.disconnect":
            raise ClientDisconnected
        part = message.get("body", b"")
        if len(body) + len(part) > self._limits.body_bytes_max:
            raise self._too_large()
        reservation.take(len(part))
        body += part
        return bool(message.get("more_body", False))

    def _check_head(self, request: Request) -> None:
        kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
        if kind != "application/json":  # a web page can send other types without being asked for permission
            how = "Send the body as JSON, with the header 'content-type: application/json'."
            raise ApiError(415, how, code="unsupported_media_type")
        if request.headers.get("content-encoding", "identity").lower() != "identity":
            raise ApiError(415, "Send the body without compression.", code="unsupported_media_type")
        length = request.headers.get("content-length", "0")
        if length.isdecimal() and int(length) > self._limits.body_bytes_max:
            raise self._too_large()

    def _too_large(self) -> ApiError:
        what = f"The body is larger than the {self._limits.body_bytes_max} bytes that it may have."
        return ApiError(413, what, code="body_too_large", headers={"connection": "close"})
