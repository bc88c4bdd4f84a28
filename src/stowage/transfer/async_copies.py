"""Asynchronous copies: what is to happen in host memory when they are done.

Owns the tickets of a transfer, and nothing else. Chunks are committed when their bytes have arrived. Slots that are
read from stay pinned until they have been read. Where copies are synchronous, everything happens at once.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

from stowage.errors import TransferError
from stowage.transfer.protocol import CopyTicket

__all__ = ["AsyncCopies"]

Then = Callable[[bool], None]
"""Called once the copies are done: whether all of them came right."""


class AsyncCopies:
    """Callbacks that wait for tickets. One thread calls, in the order of the copies."""

    def __init__(self) -> None:
        self._stores: deque[tuple[CopyTicket, Then]] = deque()
        self._reads: deque[tuple[CopyTicket, Callable[[], None]]] = deque()
        self._loaded: CopyTicket | None = None

    def __len__(self) -> int:
        return len(self._stores) + len(self._reads)

    def stored(self, ticket: CopyTicket | None, then: Then) -> None:
        """Copies to the host were begun."""
        if ticket is None:
            then(True)
        else:
            self._stores.append((ticket, then))

    def loaded(self, ticket: CopyTicket | None) -> None:
        """Copies to the device were begun."""
        if ticket is not None:
            self._loaded = ticket

    def when_read(self, then: Callable[[], None]) -> None:
        """What was loaded so far must stay as it is until ``then``."""
        if self._loaded is None or self._loaded.done:
            self._loaded = None
            then()
        else:
            self._reads.append((self._loaded, then))

    def read(self) -> None:
        """Wait until what was loaded so far has been read."""
        if self._loaded is not None:
            _succeeded(self._loaded)
            self._loaded = None
        self.collect()

    def collect(self, *, wait: bool = False) -> None:
        """Call back for copies that are done; ``wait``: wait for all of them."""
        while self._stores and (wait or self._stores[0][0].done):
            ticket, then = self._stores.popleft()
            then(_succeeded(ticket))
        while self._reads and (wait or self._reads[0][0].done):
            ticket, release = self._reads.popleft()
            _succeeded(ticket)
            release()


def _succeeded(ticket: CopyTicket) -> bool:
    try:
        ticket.wait()
    except TransferError:
        return False
    return True
