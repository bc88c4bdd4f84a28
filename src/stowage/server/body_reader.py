"""Reads request bodies within limits: of size, of time, and of the memory of all requests together."""

from __future__ import annotations

import asyncio

from starlette.requests import Request

from stowage.server.api_errors import ApiError
from stowage.server.limits import Limits
from stowage.server.memory import Reservation
from stowage.server.stream import ClientDisconnected


def took_too_long(limits: Limits) -> ApiError:
    what = f"The answer took longer than the {limits.request_timeout_s:g} s that a request may take."
    return ApiError(504, what, code="timeout")


class BodyReader:
    """See the module."""

    def __init__(self, limits: Limits) -> None:
        self._limits = limits

    async def read(self, request: Request, reservation: Reservation) -> bytearray:
        """The whole body, whose bytes are counted in `reservation`. Raises ApiError and ClientDisconnected."""
        self._check_head(request)
        body = bytearray()
        try:
            async with asyncio.timeout(self._limits.body_timeout_s):
                while await self._part(request, body, reservation):
                    pass
        except TimeoutError as error:
            what = f"The body did not arrive within {self._limits.body_timeout_s:g} s."
            raise ApiError(408, what, code="timeout", headers={"connection": "close"}) from error
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
