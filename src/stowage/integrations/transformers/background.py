"""Drives a store between the calls of a program that has a loop of its own: writes go on while it computes.

Owns one thread, the store and what reads its arena, and ends them together. The store is touched under ``turn`` only;
whoever holds it may also drive the store itself.
"""

from __future__ import annotations

import logging
import threading
import time

from stowage.integrations.transformers.transfer import CacheTransfer
from stowage.store import TieredStore

logger = logging.getLogger("stowage.prefixes")
_WAIT_S = 0.05
"""How long the thread sleeps at most while something is under way: deadlines may have been added meanwhile."""


class Background:
    """``store`` and ``transfer`` are closed with it."""

    def __init__(self, store: TieredStore, transfer: CacheTransfer) -> None:
        self.turn = threading.RLock()
        self.store = store
        self.transfer = transfer
        self.closed = False
        self._work = threading.Event()
        self._thread = threading.Thread(target=self._run, name="stowage-prefixes", daemon=True)
        self._thread.start()

    def notice(self) -> None:
        """Something may be under way: look after it."""
        self._work.set()

    def _run(self) -> None:
        try:
            while self._drive():
                self.store.wait(_WAIT_S)
        except Exception:  # the thread's outermost frame: a bug; stores still work, writes wait for the next call
            logger.exception("writing in the background stopped", extra={"stowage_event": "fault"})

    def _drive(self) -> bool:
        """Poll once, when there is something to poll for; False when closing."""
        self._work.wait()
        with self.turn:
            if self.closed:
                return False
            self.store.poll()
            if self.store.idle:
                self._work.clear()
        return True

    def close(self, timeout_s: float) -> None:
        """Let writes finish within ``timeout_s``, give all memory back. Closing again does nothing."""
        if threading.current_thread() is self._thread:  # garbage was collected in the middle of a poll
            threading.Thread(target=self.close, args=(timeout_s,), name="stowage-prefixes-end").start()
            return
        with self.turn:
            if self.closed:
                return
            self.closed = True
        until_s = time.monotonic() + timeout_s
        self._work.set()
        self._thread.join(timeout_s)
        self.transfer.close()
        self.store.close(max(0.0, until_s - time.monotonic()))
