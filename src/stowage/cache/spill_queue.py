"""The queue of chunks to be written to one lower tier.

Queued chunks are not pinned: they take no extra memory, and a chunk that is evicted first is dropped and counted. Only
chunks in flight are pinned: at most `bytes_max` bytes in `TRANSFERS_MAX` transfers (one chunk is always allowed). So a
slow tier gets larger batches and never fills the arena. One transfer takes only a share of `bytes_max`, so that the
tier has other transfers to work on while the next one is prepared.
"""

from __future__ import annotations

from collections import deque
from typing import Final

from stowage.core.geometry import IntArray

SPILL_BYTES_MAX: Final = 256 << 20
HOST_SHARE: Final = 4
"""The most bytes in flight to all lower tiers: so many, and no more than one part in so many of host memory."""
TRANSFERS_MAX: Final = 4
"""Stores in flight per tier. More would only be smaller."""

TRANSFER_BYTES_MIN: Final = 4 << 20
"""A transfer may always be this large: a tier's fixed cost per transfer is small beside it."""


class SpillQueue:
    """Batches of chunks, oldest first, and the bytes in flight. Holds at most `chunks_max` chunks."""

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
        """Whether the tier is read-only."""

    def add(self, slots: IntArray, keys: list[bytes]) -> None:
        """Queue ready chunks. Over `chunks_max` the oldest are dropped, which would be evicted first anyway."""
        if not keys or self.closed:
            return
        self._batches.append((slots, keys))
        self.chunks += len(keys)
        while self.chunks > self._chunks_max:
            _, oldest = self._batches.popleft()
            self.chunks -= len(oldest)
            self.dropped += len(oldest)

    def drop(self) -> None:
        """Drop everything that is queued."""
        self.dropped += self.chunks
        self.chunks = 0
        self._batches.clear()

    def room(self) -> bool:
        """Whether something is queued and another transfer may begin."""
        full = self.transfers >= TRANSFERS_MAX or self.bytes_in_flight >= self._bytes_max
        return bool(self._batches) and (not full or self.transfers == 0)

    def pop(self, count: int) -> tuple[IntArray, list[bytes]]:
        """The oldest batch, or its first `count` chunks."""
        slots, keys = self._batches.popleft()
        if count < len(keys):
            self._batches.appendleft((slots[count:], keys[count:]))
            slots, keys = slots[:count], keys[:count]
        self.chunks -= len(keys)
        return slots, keys

    def push_back(self, slots: IntArray, keys: list[bytes]) -> None:
        """Put back the rest of the batch popped last."""
        if keys:
            self._batches.appendleft((slots, keys))
            self.chunks += len(keys)

    def allowed_bytes(self, gathered_bytes: int, transfer_bytes_max: int) -> int:
        """How many bytes may be added to a transfer that has `gathered_bytes` so far; but see `fitting`."""
        share = max(self._bytes_max // TRANSFERS_MAX, TRANSFER_BYTES_MIN)
        return min(self._bytes_max - self.bytes_in_flight, share, transfer_bytes_max) - gathered_bytes

    def fitting(self, sizes: IntArray, gathered_bytes: int, transfer_bytes_max: int) -> int:
        """How many chunks of these sizes, in order, may be added to such a transfer.

        A single chunk may exceed a transfer's share, but not `bytes_max`, unless nothing else is in flight.
        """
        count = int(sizes.cumsum().searchsorted(self.allowed_bytes(gathered_bytes, transfer_bytes_max), side="right"))
        if count or gathered_bytes or not len(sizes):
            return count
        return int(self.transfers == 0 or self.bytes_in_flight + int(sizes[0]) <= self._bytes_max)

    def begin(self, payload_bytes: int) -> None:
        """A transfer of `payload_bytes` starts."""
        self.transfers += 1
        self.bytes_in_flight += payload_bytes

    def end(self, payload_bytes: int) -> None:
        """A transfer of `payload_bytes` was reported."""
        self.transfers -= 1
        self.bytes_in_flight -= payload_bytes

    def idle(self) -> bool:
        """Whether nothing is queued and nothing in flight."""
        return not self._batches and self.transfers == 0

    def check(self) -> None:
        """Assert the invariants."""
        assert self.chunks == sum(len(keys) for _, keys in self._batches) <= self._chunks_max
        assert 0 <= self.transfers <= TRANSFERS_MAX and self.bytes_in_flight >= 0
        assert (self.bytes_in_flight == 0) == (self.transfers == 0)
        assert self.transfers <= 1 or self.bytes_in_flight <= self._bytes_max, "too much is in flight"
