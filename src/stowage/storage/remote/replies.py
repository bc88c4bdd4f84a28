"""Checks the lengths that a key-value server's replies announce, before a client makes objects of them.

Owns no reply: it looks at the lengths that a reply announces (Redis serialization protocol, version 2), on their way to
whatever parses it. A client library believes them: a list of 2**31 elements took it a minute of one thread, in which no
deadline was kept. One header is looked at for each value, whatever its length.
"""

from __future__ import annotations

from typing import Any, Final

BULK_BYTES_MAX: Final = 512 << 20
"""The most that servers themselves take, unless told otherwise."""
ELEMENTS_MAX: Final = 1 << 20
"""Of one reply, all lists in it together; the slots of a cluster are the longest list that is asked for."""
DEPTH_MAX: Final = 8
LINE_BYTES_MAX: Final = 1 << 16


class ReplyBounds:
    """Follows a stream of replies. `feed` raises ConnectionError for one that is beyond them."""

    def __init__(self) -> None:
        self._skip_bytes = 0
        self._line = b""
        self._left: list[int] = []
        """Elements that still come, of each list that is open."""
        self._elements = 0

    def feed(self, data: bytes) -> None:
        """The next bytes of the stream."""
        at = 0
        while at < len(data):
            skipped = min(self._skip_bytes, len(data) - at)
            self._skip_bytes -= skipped
            at += skipped
            if at == len(data):
                return
            end = data.find(b"\n", at) + 1
            self._line += data[at : end or len(data)]
            if len(self._line) > LINE_BYTES_MAX:
                raise ConnectionError("the server answers with a line that is too long")
            if not end:
                return
            line, self._line, at = self._line, b"", end
            self._header(line)

    def _header(self, line: bytes) -> None:
        kind = line[:1]
        if kind in (b"$", b"*"):
            try:
                length = int(line[1:])
            except ValueError as error:
                raise ConnectionError("the server announces no length") from error
            if kind == b"*" and length > 0:
                self._open(length)
                return
            if length > BULK_BYTES_MAX:
                raise ConnectionError(f"the server announces {length} bytes")
            self._skip_bytes = length + 2 if kind == b"$" and length >= 0 else 0
        while self._left:
            self._left[-1] -= 1
            if self._left[-1]:
                return
            self._left.pop()
        self._elements = 0

    def _open(self, length: int) -> None:
        self._elements += length
        if self._elements > ELEMENTS_MAX or len(self._left) >= DEPTH_MAX:
            raise ConnectionError(f"the server announces a list of {length} elements, {len(self._left)} lists deep")
        self._left.append(length)


class CheckedStream:
    """A stream to read from, whose bytes are held against `ReplyBounds` as they come."""

    def __init__(self, stream: Any) -> None:
        self._stream = stream
        self._bounds = ReplyBounds()

    async def read(self, count: int = -1) -> bytes:
        return self._seen(await self._stream.read(count))

    async def readline(self) -> bytes:
        return self._seen(await self._stream.readline())

    async def readexactly(self, count: int) -> bytes:
        return self._seen(await self._stream.readexactly(count))

    def _seen(self, data: bytes) -> bytes:
        self._bounds.feed(data)
        return data

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


def bounded(parser: type[Any]) -> type[Any]:
    """A parser of the client library, within bounds."""

    class Bounded(parser):  # type: ignore[misc]
        _stream: Any

        def on_connect(self, connection: Any) -> None:
            super().on_connect(connection)
            self._stream = CheckedStream(self._stream)

    return Bounded
