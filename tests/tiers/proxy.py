"""A TCP proxy of our own that can be slow, cut connections, keep silent, or answer for the server behind it."""

from __future__ import annotations

import contextlib
import enum
import selectors
import socket
import threading
import time
from collections.abc import Iterator

BAD_GATEWAY = b"HTTP/1.1 503 Slow Down\r\nContent-Length: 0\r\nConnection: close\r\n\r\n"


class Mood(enum.Enum):
    """PASS: a good network. SILENT: takes connections and bytes, and never answers. CUT: ends each connection after
    `cut_bytes` of the answers. REFUSE: no connection. FAIL: answers each request with 503. SLOW: `rate` bytes a second.
    """

    PASS = enum.auto()
    SILENT = enum.auto()
    CUT = enum.auto()
    REFUSE = enum.auto()
    FAIL = enum.auto()
    SLOW = enum.auto()


class Proxy:
    """Listens on `port`, and passes everything to `target`. A change of mood holds for open connections too."""

    def __init__(self, target: tuple[str, int]) -> None:
        self._target = target
        self._mood = Mood.PASS
        self.cut_bytes = 0
        self.rate = 1000
        self.connections = 0
        self._listener: socket.socket | None = None
        self.port = 0
        self._listen()

    @property
    def mood(self) -> Mood:
        return self._mood

    @mood.setter
    def mood(self, mood: Mood) -> None:
        self._mood = mood
        if mood is Mood.REFUSE and self._listener is not None:
            self._listener.close()
            self._listener = None
        elif mood is not Mood.REFUSE and self._listener is None:
            self._listen()

    def _listen(self) -> None:
        self._listener = socket.create_server(("127.0.0.1", self.port), reuse_port=True)
        self._listener.settimeout(0.1)  # here: the thread may find it closed already
        self.port = self._listener.getsockname()[1]
        threading.Thread(target=self._accept, args=(self._listener,), daemon=True).start()

    def _accept(self, listener: socket.socket) -> None:
        while self._listener is listener:
            try:
                near, _ = listener.accept()
            except TimeoutError:
                continue
            except OSError:
                return
            self.connections += 1
            threading.Thread(target=self._serve, args=(near,), daemon=True).start()

    def _serve(self, near: socket.socket) -> None:
        with contextlib.suppress(OSError), near, socket.create_connection(self._target, timeout=5) as far:
            near.settimeout(5)
            with selectors.DefaultSelector() as selector:
                for end in (near, far):
                    selector.register(end, selectors.EVENT_READ)
                answered = 0
                while self._mood is not Mood.REFUSE:
                    for key, _ in selector.select(0.1):
                        if self._mood is Mood.SILENT:
                            time.sleep(0.02)
                            continue
                        data = key.fileobj.recv(1 << 16)  # type: ignore[union-attr]
                        if not data:
                            return
                        if key.fileobj is near:
                            if self._mood is Mood.FAIL:
                                near.sendall(BAD_GATEWAY)
                                return
                            far.sendall(data)
                            continue
                        if self._mood is Mood.CUT and answered + len(data) > self.cut_bytes:
                            near.sendall(data[: max(0, self.cut_bytes - answered)])
                            return
                        answered += len(data)
                        self._answer(near, data)

    def _answer(self, near: socket.socket, data: bytes) -> None:
        at = 0
        while at < len(data):
            if self._mood is not Mood.SLOW:
                near.sendall(data[at:])
                return
            step = max(1, self.rate // 50)
            near.sendall(data[at : at + step])
            at += step
            time.sleep(0.02)

    def close(self) -> None:
        self.mood = Mood.REFUSE


@contextlib.contextmanager
def proxied(port: int) -> Iterator[Proxy]:
    proxy = Proxy(("127.0.0.1", port))
    try:
        yield proxy
    finally:
        proxy.close()
