"""A background thread that drives a store for a program with a loop of its own, so that writes go on while it computes.

Owns one thread, the store and what reads its arena, and ends them together. The store is touched under ``turn`` only;
whoever holds it may also drive the store itself.
"""

from __future__ import annotations

import logging
import os
import queue
import threading
import time
from collections.abc import Callable
from typing import Protocol

from stowage.cache.store import TieredStore

_WAIT_S = 0.05
"""How long the thread sleeps at most while something is under way: deadlines may have been added meanwhile. What it is
woken for in that time it does together.
"""


class Closable(Protocol):
    """What holds views of the arena."""

    def close(self) -> None: ...


class Background:
    """A thread that drives ``store``. ``store`` and ``reader`` are closed with it. ``name``: of the thread and of the
    log. ``after_poll``: called under ``turn`` when the thread has polled, and soon after each ``wake``.
    """

    def __init__(
        self,
        store: TieredStore,
        reader: Closable | None = None,
        name: str = "prefixes",
        after_poll: Callable[[], None] = lambda: None,
    ) -> None:
        self.turn = threading.RLock()
        self.store = store
        self.closed = False
        self._ending = threading.RLock()
        self._ended = False
        self._process = os.getpid()
        self._reader = reader
        self._after_poll = after_poll
        self._name = f"stowage-{name}"
        self._logger = logging.getLogger(f"stowage.{name}")
        self._work: queue.SimpleQueue[None] = queue.SimpleQueue()  # an event's methods take a step ten times as long
        self._thread = threading.Thread(target=self._run, name=self._name, daemon=True)
        self._thread.start()

    @property
    def forked(self) -> bool:
        """Whether this is a child of the process that has the thread. Here ``turn`` may be held for ever."""
        return os.getpid() != self._process

    def notice(self) -> None:
        """Something may be under way: look after it."""
        if not self.store.idle:
            self.wake()

    def wake(self) -> None:
        """Poll now. Needs no ``turn``."""
        if self._work.empty():
            self._work.put(None)

    def _run(self) -> None:
        try:
            while self._drive():
                self.store.wait(_WAIT_S)
        except Exception:  # the thread's outermost frame: a bug; stores still work, writes wait for the next call
            self._logger.exception("writing in the background stopped", extra={"stowage_event": "fault"})

    def _drive(self) -> bool:
        """Poll once, when there is something to poll for; False when closing."""
        self._work.get()  # before anything is looked at: what comes meanwhile is another wake
        with self.turn:
            if self.closed:
                return False
            self.store.poll()
            self._after_poll()
            self.notice()
        return True

    def close(self, timeout_s: float) -> None:
        """Let writes finish within ``timeout_s``, give all memory back. Again: what an interrupt left undone. Does
        nothing in a forked child.
        """
        if self.forked:
            return
        if threading.current_thread() is self._thread:  # garbage was collected in the middle of a poll
            threading.Thread(target=self.close, args=(timeout_s,), name=f"{self._name}-end").start()
            return
        with self._ending:
            if self._ended:
                return
            with self.turn:
                self.closed = True
            until_s = time.monotonic() + timeout_s
            self._work.put(None)
            self._thread.join(timeout_s)
            if self._reader is not None:
                self._reader.close()
            self.store.close(max(0.0, until_s - time.monotonic()))
            self._ended = True
