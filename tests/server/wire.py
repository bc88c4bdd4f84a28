"""HTTP by hand, for what no client library would send, or for clients that go away."""

from __future__ import annotations

import contextlib
import json
import socket
import time
from collections.abc import Iterator

from tests.server.process import Server


def request(path: str, value: object, *headers: str, length: int | None = None) -> bytes:
    """A POST with a JSON body."""
    body = json.dumps(value).encode()
    head = [f"POST {path} HTTP/1.1", "host: localhost", "content-type: application/json", *headers]
    head.append(f"content-length: {len(body) if length is None else length}")
    return "\r\n".join(head).encode() + b"\r\n\r\n" + body


@contextlib.contextmanager
def connected(server: Server, receive_bytes: int = 0) -> Iterator[socket.socket]:
    """A connection; with a small window, so that the server soon cannot send, if `receive_bytes` is given."""
    with socket.socket() as made:
        if receive_bytes:
            made.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_bytes)
        made.settimeout(60)
        made.connect(("127.0.0.1", server.port))
        yield made


def answer(connection: socket.socket) -> tuple[int, dict[str, str], bytes]:
    """One whole response with a known length."""
    read = b""
    while b"\r\n\r\n" not in read:
        part = connection.recv(65536)
        assert part, f"closed after {read!r}"
        read += part
    head, _, body = read.partition(b"\r\n\r\n")
    first, *lines = head.decode().split("\r\n")
    headers = {name.lower(): value for name, _, value in (line.partition(": ") for line in lines)}
    while len(body) < int(headers["content-length"]):
        body += connection.recv(65536)
    return int(first.split()[1]), headers, body


def closed(connection: socket.socket) -> bool:
    """Whether the server ends the connection; waits for that. What comes before is thrown away."""
    with contextlib.suppress(ConnectionError):
        while connection.recv(65536):
            pass
    return True


def until(connection: socket.socket, words: bytes) -> bytes:
    """Read until `words` have come."""
    read = b""
    until_s = time.monotonic() + 60
    while words not in read:
        assert time.monotonic() < until_s
        part = connection.recv(65536)
        assert part, f"closed after {read!r}"
        read += part
    return read
