"""Copies that go on while the engine does: what is to happen in host memory when they are done.

Owns the tickets of a transfer, and nothing else. Chunks are committed when their bytes have arrived, slots that are
read from stay pinned until they have been read. Without copies that go on by themselves everything happens at once.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

from stowage.errors import TransferError
from stowage.transfer.protocol import Ticket

__all__ = ["AsyncCopies"]

Then = Callable[[bool], None]
"""Called once the copies are done: whether all of them came right."""


class AsyncCopies:
    """What waits for tickets. One thread calls, in the order of the copies."""

    def __init__(self) -> None:
        self._stores: deque[tuple[Ticket, Then]] = deque()
        self._reads: deque[tuple[Ticket, Callable[[], None]]] = deque()
        self._loaded: Ticket | None = None

    def __len__(self) -> int:
        return len(self._stores) + len(self._reads)

    def stored(self, ticket: Ticket | None, then: Then) -> None:
        """Copies to the host were begun."""
        if ticket is None:
            then(True)
        else:
            self._stores.append((ticket, then))

    def loaded(self, ticket: Ticket | None) -> None:
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
            _came(self._loaded)
            self._loaded = None
        self.collect()

    def collect(self, *, wait: bool = False) -> None:
        """Let happen what is due; ``wait``: for all there is."""
        while self._stores and (wait or self._stores[0][0].done):
            ticket, then = self._stores.popleft()
            then(_came(ticket))
        while self._reads and (wait or self._reads[0][0].done):
            ticket, release = self._reads.popleft()
            _came(ticket)
            release()


def _came(ticket: Ticket) -> bool:
    try:
        ticket.wait()
    except TransferError:
        return False
    return True
