"""What waits to be written to one lower tier.

Chunks wait in host without being pinned: a wait costs no room, and a chunk that is evicted first is dropped, counted.
Only chunks that a transfer reads right now are pinned, at most `bytes_max` of them and `TRANSFERS_MAX` transfers, so
that a slow tier gathers larger batches and never holds the arena. One chunk may always be under way. A transfer takes a
part of what may be under way, unless that is little: a tier that has reported one has others while the next is made.
"""

from __future__ import annotations

from collections import deque
from typing import Final

from stowage.core.geometry import IntArray

__all__ = ["TRANSFERS_MAX", "SpillQueue"]

TRANSFERS_MAX: Final = 4
"""Stores under way at a tier. More would only be smaller ones."""

TRANSFER_BYTES_MIN: Final = 4 << 20
"""What a transfer may have at least. Tiers have something to write with each, which is little beside so much."""


class SpillQueue:
    """Batches of chunks, oldest first, and the bytes that are under way. Holds at most `chunks_max` chunks."""

    __slots__ = ("_batches", "_bytes_max", "_chunks_max", "bytes_in_flight", "chunks", "closed", "dropped", "transfers")

    def __init__(self, bytes_max: int, chunks_max: int) -> None:
        self._batches: deque[tuple[IntArray, list[bytes]]] = deque()
        self._bytes_max = bytes_max
        self._chunks_max = chunks_max
        self.chunks = 0
        self.bytes_in_flight = 0
        self.transfers = 0
        self.dropped = 0
        self.closed = False
        """Whether its tier takes nothing."""

    def add(self, slots: IntArray, keys: list[bytes]) -> None:
        """Queue ready chunks. When too many wait the oldest are dropped: they leave the host first anyway."""
        if not keys or self.closed:
            return
        self._batches.append((slots, keys))
        self.chunks += len(keys)
        while self.chunks > self._chunks_max:
            _, oldest = self._batches.popleft()
            self.chunks -= len(oldest)
            self.dropped += len(oldest)

    def drop(self) -> None:
        """Forget everything that waits."""
        self.dropped += self.chunks
        self.chunks = 0
        self._batches.clear()

    def room(self) -> bool:
        """Whether something waits and another transfer may begin."""
        full = self.transfers >= TRANSFERS_MAX or self.bytes_in_flight >= self._bytes_max
        return bool(self._batches) and (not full or self.transfers == 0)

    def pop(self, count: int) -> tuple[IntArray, list[bytes]]:
        """The oldest batch, or so many of its chunks."""
        slots, keys = self._batches.popleft()
        if count < len(keys):
            self._batches.appendleft((slots[count:], keys[count:]))
            slots, keys = slots[:count], keys[:count]
        self.chunks -= len(keys)
        return slots, keys

    def push_back(self, slots: IntArray, keys: list[bytes]) -> None:
        """Return what did not fit of the batch popped last."""
        if keys:
            self._batches.appendleft((slots, keys))
            self.chunks += len(keys)

    def allowed_bytes(self, gathered_bytes: int, transfer_bytes_max: int) -> int:
        """How many bytes may join a transfer that has `gathered_bytes` and has not begun; but see `fitting`."""
        share = max(self._bytes_max // TRANSFERS_MAX, TRANSFER_BYTES_MIN)
        return min(self._bytes_max - self.bytes_in_flight, share, transfer_bytes_max) - gathered_bytes

    def fitting(self, sizes: IntArray, gathered_bytes: int, transfer_bytes_max: int) -> int:
        """How many chunks of these sizes, in order, may join such a transfer.

        One chunk is a transfer, however long it is, while no more is under way than may be; the only one, always.
        """
        count = int(sizes.cumsum().searchsorted(self.allowed_bytes(gathered_bytes, transfer_bytes_max), side="right"))
        if count or gathered_bytes or not len(sizes):
            return count
        return int(self.transfers == 0 or self.bytes_in_flight + int(sizes[0]) <= self._bytes_max)

    def begin(self, payload_bytes: int) -> None:
        """A transfer of so many bytes starts."""
        self.transfers += 1
        self.bytes_in_flight += payload_bytes

    def end(self, payload_bytes: int) -> None:
        """It was reported."""
        self.transfers -= 1
        self.bytes_in_flight -= payload_bytes

    def idle(self) -> bool:
        """Nothing waits and nothing is under way."""
        return not self._batches and self.transfers == 0

    def check(self) -> None:
        """Assert the invariants."""
        assert self.chunks == sum(len(keys) for _, keys in self._batches) <= self._chunks_max
        assert 0 <= self.transfers <= TRANSFERS_MAX and self.bytes_in_flight >= 0
        assert (self.bytes_in_flight == 0) == (self.transfers == 0)
        assert self.transfers <= 1 or self.bytes_in_flight <= self._bytes_max, "too much is under way"
