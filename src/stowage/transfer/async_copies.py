"""Callbacks for asynchronous copies: stored chunks are committed, and loaded slots unpinned, when copies are done.

Owns the tickets of a transfer, and nothing else. Where copies are synchronous, callbacks are called at once.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

from stowage.errors import TransferError
from stowage.transfer.protocol import CopyTicket


class AsyncCopies:
    """Tickets with their callbacks. One thread calls, in the order of the copies."""

    def __init__(self) -> None:
        self._stores: deque[tuple[CopyTicket, Callable[[bool], None]]] = deque()
        self._loads: deque[tuple[CopyTicket, Callable[[], None]]] = deque()
        self._last_load: CopyTicket | None = None

    def __len__(self) -> int:
        return len(self._stores) + len(self._loads)

    def when_stored(self, ticket: CopyTicket | None, callback: Callable[[bool], None]) -> None:
        """Call back when these copies to the host are done, with whether all of them succeeded."""
        if ticket is None:
            callback(True)
        else:
            self._stores.append((ticket, callback))

    def add_load(self, ticket: CopyTicket | None) -> None:
        """Copies to the device have begun."""
        if ticket is not None:
            self._last_load = ticket

    def when_loaded(self, callback: Callable[[], None]) -> None:
        """Call back when all loads so far are done. Until then the slots that they read must not change."""
        if self._last_load is None or self._last_load.done:
            self._last_load = None
            callback()
        else:
            self._loads.append((self._last_load, callback))

    def wait_for_loads(self) -> None:
        """Wait until all loads so far are done."""
        if self._last_load is not None:
            _succeeded(self._last_load)
            self._last_load = None
        self.collect()

    def collect(self, *, wait: bool = False) -> None:
        """Call back for copies that are done; ``wait``: wait for all of them."""
        while self._stores and (wait or self._stores[0][0].done):
            ticket, callback = self._stores.popleft()
            callback(_succeeded(ticket))
        while self._loads and (wait or self._loads[0][0].done):
            ticket, release = self._loads.popleft()
            _succeeded(ticket)
            release()


def _succeeded(ticket: CopyTicket) -> bool:
    try:
        ticket.wait()
    except TransferError:
        return False
    return True
