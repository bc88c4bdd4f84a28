"""Simulated tiers below host memory: their contents, and the time of each transfer. No bytes, no files, no clock.

    StartLoad, StartStore ──> Tier.begin ──> Landing(when, which chunks) ──(the caller waits)──> Tier.land

`Segments` (`disk_segments.py`) does the bookkeeping of `storage.disk`: when the disk is full, the oldest segment is
reclaimed for a new one, and chunks of the next victim that were hit are rewritten. `Objects` evicts nothing, and may be
shared by many nodes. A transfer that cannot begin before its deadline fails; one that began succeeds, however late.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable
from itertools import compress
from typing import Final, NamedTuple, Protocol

import numpy as np

from stowage.cache.flow_types import StartLoad, StartStore
from stowage.core.geometry import BoolArray, MaskArray
from stowage.core.table import make_rows
from stowage.simulator.scenario import Link
from stowage.storage.protocol import TRANSFERS_MAX

_FIELD_BYTES: Final = 8
"""Size of a row's fields: the minimum. They are not used."""
_OWNER: Final = 0


class Content(Protocol):
    """The contents of a tier, of `held_bytes` bytes."""

    @property
    def held_bytes(self) -> int: ...

    def masks(self, keys: list[bytes]) -> MaskArray:
        """1 for each key that is present, else 0."""

    def put(self, keys: list[bytes]) -> int:
        """Write the chunks. Returns the bytes written."""

    def hit(self, keys: Iterable[bytes]) -> None:
        """The chunks were read."""

    def drop(self, keys: Iterable[bytes]) -> None:
        """Forget the chunks."""

    def check(self) -> None:
        """Assert the invariants."""


class Objects:
    """An object store that evicts nothing. A table of 50 bytes per chunk, because there can be very many."""

    def __init__(self, chunk_bytes: int) -> None:
        self._rows = make_rows(_FIELD_BYTES)
        self._extents: list[int] = []
        self._chunk_bytes = chunk_bytes

    @property
    def held_bytes(self) -> int:
        """Bytes of all chunks."""
        return len(self._rows) * self._chunk_bytes

    def masks(self, keys: list[bytes]) -> MaskArray:
        return self._known(keys).astype(np.uint64)

    def put(self, keys: list[bytes]) -> int:
        """Write the chunks that are not present. Returns the bytes written."""
        known = self._known(keys)
        new = keys if not known.any() else list(compress(keys, (~known).tolist()))
        before = len(self._rows)
        joined = np.frombuffer(b"".join(new), np.uint8)
        self._rows.insert(_OWNER, self._extents, joined, np.zeros(len(new) * _FIELD_BYTES, np.uint8))
        return (len(self._rows) - before) * self._chunk_bytes

    def hit(self, keys: Iterable[bytes]) -> None:
        pass

    def drop(self, keys: Iterable[bytes]) -> None:
        self._rows.drop(list(keys))

    def check(self) -> None:
        self._rows.check()

    def _known(self, keys: list[bytes]) -> BoolArray:
        owners = np.empty(len(keys), np.int64)
        self._rows.find(keys, owners, np.empty(len(keys) * _FIELD_BYTES, np.uint8))
        known: BoolArray = owners == _OWNER
        return known


class TransferEnd(NamedTuple):
    """The future end of a transfer. `refused`: it was not tried."""

    at_s: float
    ok: BoolArray
    refused: bool = False


class _Pipe:
    """One direction of a link: transfers share its rate, first come first served; `parallel` latencies overlap."""

    def __init__(self, bytes_per_s: float, latency_s: float, parallel: int) -> None:
        self._bytes_per_s = bytes_per_s
        self._latency_s = latency_s
        self._lanes = [0.0] * parallel
        self._free_s = 0.0
        self.under_way = 0

    def begins_s(self, now_s: float) -> float:
        """When a transfer that is submitted now would begin."""
        return max(now_s, self._lanes[0], self._free_s - self._latency_s)

    def end_s(self, payload_bytes: int, now_s: float) -> float:
        """Begin a transfer; returns when it ends."""
        end_s = max(self._free_s, self.begins_s(now_s) + self._latency_s) + payload_bytes / self._bytes_per_s
        heapq.heapreplace(self._lanes, end_s)
        self._free_s = end_s
        return end_s


class Tier:
    """One node's link to a tier, with the bytes that went over it."""

    def __init__(self, link: Link, content: Content, chunk_bytes: int) -> None:
        self.content = content
        self.read_bytes = 0
        self.written_bytes = 0
        self._chunk_bytes = chunk_bytes
        self._reads = _Pipe(link.read_bytes_per_s, link.latency_s, link.parallel)
        self._writes = _Pipe(link.write_bytes_per_s, link.latency_s, link.parallel)

    def begin(self, action: StartLoad | StartStore, now_s: float) -> TransferEnd:
        """Begin a transfer. Returns when and how it ends; `land` must be called then."""
        pipe = self._reads if isinstance(action, StartLoad) else self._writes
        count = len(action.keys)
        pipe.under_way += 1
        if pipe.under_way > TRANSFERS_MAX:
            return TransferEnd(now_s, np.zeros(count, np.bool_), refused=True)
        if pipe.begins_s(now_s) > action.deadline_s:
            return TransferEnd(action.deadline_s, np.zeros(count, np.bool_))
        if isinstance(action, StartStore):
            return TransferEnd(pipe.end_s(count * self._chunk_bytes, now_s), np.ones(count, np.bool_))
        ok = self.content.masks(action.keys) != 0
        return TransferEnd(pipe.end_s(int(np.count_nonzero(ok)) * self._chunk_bytes, now_s), ok)

    def land(self, action: StartLoad | StartStore, landing: TransferEnd) -> None:
        """The transfer has ended."""
        moved = int(np.count_nonzero(landing.ok))
        if isinstance(action, StartLoad):
            self._reads.under_way -= 1
            if moved:
                self.read_bytes += moved * self._chunk_bytes
                self.content.hit(compress(action.keys, landing.ok.tolist()))
        else:
            self._writes.under_way -= 1
            if moved:
                self.written_bytes += self.content.put(action.keys)
