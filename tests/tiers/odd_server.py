"""A server that greets as Redis does, and gives the same answer to everything else."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Iterator

GREETINGS = (b"CLIENT", b"SELECT", b"PING", b"HELLO")


@contextlib.contextmanager
def odd_server(answer: bytes) -> Iterator[int]:
    """The port of one that answers so, in the protocol's own words."""
    listener = socket.create_server(("127.0.0.1", 0))
    threading.Thread(target=_accept, args=(listener, answer), daemon=True).start()
    try:
        yield listener.getsockname()[1]
    finally:
        listener.close()


def _accept(listener: socket.socket, answer: bytes) -> None:
    with contextlib.suppress(OSError):
        while True:
            near, _ = listener.accept()
            threading.Thread(target=_serve, args=(near, answer), daemon=True).start()


def _serve(near: socket.socket, answer: bytes) -> None:
    with contextlib.suppress(OSError, ValueError), near, near.makefile("rb") as lines:
        while line := lines.readline():
            words = []
            for _ in range(int(line[1:])):
                length = int(lines.readline()[1:])
                words.append(lines.read(length + 2)[:-2])
            near.sendall(b"+OK\r\n" if words[0].upper() in GREETINGS else answer)
