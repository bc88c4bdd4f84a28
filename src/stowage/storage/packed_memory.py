"""The compressed part of host memory, a tier between arena and disk: chunks at two thirds of their size, without loss.

    store: arena slot --packed into--> log         load: log --unpacked into--> arena slot

Chunks lie in a circular log, in the order in which they came. What was loaded since it was written is moved to the
front once when its turn to go comes, as the disk tier does (`disk/compaction`). Their memory is one mapping of the size
that was asked for; 300 bytes of Python's memory per chunk come on top. What does not pack lies there as it is. There is
no checksum, as in the arena: bytes in memory are the machine's own affair.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import repeat
from typing import Final

import numpy as np
from numpy.typing import NDArray

from stowage.core import lossless
from stowage.errors import FormatError
from stowage.log import Trouble
from stowage.storage.circular_log import CircularLog, Piece
from stowage.storage.counters import TierCounters
from stowage.storage.flight import Flight
from stowage.storage.host import map_memory
from stowage.storage.protocol import TRANSFERS_MAX, Reporter, Transfer

LOADED_BYTES: Final = 4 << 20
"""A reader takes so many bytes of a load, or one longer chunk, at a time."""
READERS_MAX: Final = 8
MOVED_SHARE: Final = 4
"""One byte in so many that are stored is moved at most, to keep what is in use."""

_COUNTERS: Final = ("writes", "write_bytes", "reads", "read_bytes", "packed", "packed_bytes_saved", "moved", "evicted")
_TROUBLES: Final = ("refused", "dropped", "timed_out", "faults")


@dataclass(slots=True, eq=False)
class _Chunk(Piece):
    """One packed chunk. `length`: of the payload. `readers`: who unpack it now; meanwhile it stays where it is."""

    key: bytes
    mask: int
    length: int
    is_packed: bool
    readers: int = 0
    was_read: bool = False


@dataclass(slots=True, eq=False)
class _Flight(Flight):
    """A transfer that was taken. `left`: its parts that have not ended."""

    is_load: bool = True
    left: int = 1


class PackedMemoryTier(Reporter):
    """Implements Tier, Waitable and Described (stowage.storage.protocol). Raises ConfigError when the machine lacks the
    memory.

    One thread stores, so that a prompt that is being computed has the other cores; all cores load.
    """

    def __init__(self, limit_bytes: int, *, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__()
        self.name = "packed"
        self._clock = clock
        self._mapping = map_memory(limit_bytes, "host_packed")
        self._view = memoryview(self._mapping)
        self._memory = np.frombuffer(self._mapping, np.uint8)
        self._log: CircularLog[_Chunk] = CircularLog(limit_bytes)  # some of its chunks are not found any more
        self._chunks: dict[bytes, _Chunk] = {}
        self._masks: dict[bytes, int] = {}  # of the same keys: look-ups need nothing else
        self._moving: dict[bytes, tuple[_Chunk, NDArray[np.uint8]]] = {}  # not in the log now; not found meanwhile
        self._may_move_bytes = self._filled_bytes = 0
        self._change = threading.Condition()
        self._under_way = {True: 0, False: 0}
        self._closed = False
        self._counters = TierCounters((*_COUNTERS, *_TROUBLES), {}, Trouble("stowage.packed"))
        self._loads = ThreadPoolExecutor(min(READERS_MAX, os.cpu_count() or 1), "stowage-packed-load")
        self._stores = ThreadPoolExecutor(1, "stowage-packed-store")

    def lookup(self, keys: list[bytes]) -> NDArray[np.uint64]:
        """The valid-block mask of each key, 0 where absent."""
        return np.fromiter(map(self._masks.get, keys, repeat(0)), np.uint64, len(keys))

    def load(self, transfer: Transfer) -> None:
        """Unpacks the chunks into their buffers, some at a time on each core."""
        parts = _parts([buffer.nbytes for buffer in transfer.buffers])
        under = self._begin(transfer, True, len(parts))
        if under is not None:
            for part in parts:
                self._loads.submit(self._run, self._load_part, under, part)

    def store(self, transfer: Transfer) -> None:
        """Packs the chunks into the log, one after the other."""
        under = self._begin(transfer, False, 1)
        if under is not None:
            self._stores.submit(self._run, self._store_all, under, range(len(transfer.keys)))

    def _begin(self, transfer: Transfer, is_load: bool, parts: int) -> _Flight | None:
        under = _Flight(transfer, is_load=is_load, left=parts)
        if not is_load:
            under.masks[:] = transfer.masks
        with self._change:
            taken = not self._closed and self._under_way[is_load] < TRANSFERS_MAX and parts > 0
            if taken:
                self._under_way[is_load] += 1
                return under
        self._counters.add("dropped", len(transfer.keys))
        self._report(under.dropped())
        return None

    def _run(self, work: Callable[[_Flight, range], None], under: _Flight, part: range) -> None:
        """A part of a transfer, in a thread. However it ends, the transfer is reported when all parts have ended."""
        if self._closed:
            under.refused = True
            self._fail(under, "given up: closing", len(part))
        elif self._clock() > under.transfer.deadline_s:
            self._counters.add("timed_out", len(part))
            self._fail(under, "timed out in the queue", len(part))
        else:
            try:
                work(under, part)
            except Exception:  # noqa: BLE001 - the thread's outermost frame; counted and logged
                self._counters.fault("a transfer failed")
                self._fail(under, "failed", int(np.count_nonzero(~under.ok[part.start : part.stop])))
        with self._change:
            under.left -= 1
            ended = not under.left
            if ended:
                self._under_way[under.is_load] -= 1
        if ended:
            self._report(under.outcome())

    def _fail(self, under: _Flight, what: str, chunks: int = 1) -> None:
        with self._change:
            under.failures[what] += chunks

    def discard(self, keys: list[bytes]) -> None:
        """Forgets the keys. Their bytes go when their turn comes."""
        with self._change:
            for key in keys:
                self._forget(key)
                self._moving.pop(key, None)

    def _forget(self, key: bytes) -> None:
        if (chunk := self._chunks.pop(key, None)) is not None:
            del self._masks[key]
            self._filled_bytes -= chunk.nbytes

    # Loads

    def _load_part(self, under: _Flight, part: range) -> None:
        keys, buffers = under.transfer.keys, under.transfer.buffers
        for at in part:
            with self._change:
                chunk = self._chunks.get(keys[at])
                if chunk is None or chunk.length != buffers[at].nbytes:
                    self._fail(under, "not there any more")
                    continue
                chunk.readers += 1
                chunk.was_read = True
            try:
                self._fill(buffers[at], chunk)
                under.ok[at], under.masks[at] = True, chunk.mask
            except FormatError:
                self._counters.fault("a packed chunk in memory does not unpack")
                self._fail(under, "failed")
            finally:
                with self._change:
                    chunk.readers -= 1
                    self._change.notify_all()
        good = [at for at in part if under.ok[at]]
        self._counters.add("reads", len(good))
        self._counters.add("read_bytes", sum(buffers[at].nbytes for at in good))

    def _fill(self, buffer: memoryview, chunk: _Chunk) -> None:
        where = slice(chunk.start, chunk.end)
        if chunk.is_packed:
            lossless.unpack(self._view[where], buffer)
        else:
            np.copyto(np.frombuffer(buffer, np.uint8), self._memory[where])

    # Stores

    def _store_all(self, under: _Flight, part: range) -> None:
        keys, buffers, masks = under.transfer.keys, under.transfer.buffers, under.transfer.masks.tolist()
        for at in part:
            nbytes = buffers[at].nbytes
            if self._closed:
                self._fail(under, "given up: closing", part.stop - at)
                return
            if not 0 < nbytes <= self._log.bytes or not masks[at]:
                self._counters.add("refused")
                self._fail(under, "do not fit")
                continue
            self._may_move_bytes = min(self._may_move_bytes + nbytes // MOVED_SHARE, self._log.bytes // MOVED_SHARE)
            self._put(keys[at], masks[at], buffers[at])
            under.ok[at] = True
            while self._moving:
                self._put_back()

    def _put(self, key: bytes, mask: int, payload: memoryview) -> None:
        start = self._space(payload.nbytes, moves=True)
        most = lossless.worth_bytes(payload.nbytes)
        length = lossless.pack(payload, self._view[start : start + most]) if most else 0
        end = start + (length or payload.nbytes)
        if not length:
            np.copyto(self._memory[start:end], np.frombuffer(payload, np.uint8))
        self._add(_Chunk(start, end, key, mask, payload.nbytes, bool(length)))
        self._counters.add("writes")
        self._counters.add("write_bytes", length or payload.nbytes)
        if length:
            self._counters.add("packed")
            self._counters.add("packed_bytes_saved", payload.nbytes - length)

    def _put_back(self) -> None:
        """Writes a chunk that is being moved again in front, as it lies; that it was read until now counts no more."""
        with self._change:
            if not self._moving:
                return
            old, stored = next(iter(self._moving.values()))
        start = self._space(len(stored), moves=False)
        end = start + len(stored)
        self._memory[start:end] = stored
        with self._change:
            if self._moving.pop(old.key, None) is None:
                return  # discarded meanwhile
            self._add(_Chunk(start, end, old.key, old.mask, old.length, old.is_packed))
        self._counters.add("moved")

    def _space(self, nbytes: int, moves: bool) -> int:
        """Where so many bytes are free. The oldest chunks go for them, but for those that are `_moving` then. The
        storing thread alone uses the log.
        """
        while (start := self._log.space(nbytes)) is None:
            with self._change:
                chunk = self._log.oldest
                while chunk.readers:
                    self._change.wait()
                self._log.drop_oldest()
                if self._chunks.get(chunk.key) is not chunk:
                    continue  # written anew, or discarded
                self._forget(chunk.key)
                if moves and chunk.was_read and chunk.nbytes <= self._may_move_bytes:
                    self._may_move_bytes -= chunk.nbytes
                    self._moving[chunk.key] = chunk, self._memory[chunk.start : chunk.end].copy()
                    continue
            self._counters.add("evicted")
        return start

    def _add(self, chunk: _Chunk) -> None:
        """From now on it is found."""
        with self._change:
            self._forget(chunk.key)
            self._moving.pop(chunk.key, None)
            self._log.append(chunk)
            self._chunks[chunk.key] = chunk
            self._masks[chunk.key] = chunk.mask
            self._filled_bytes += chunk.nbytes

    def stats(self) -> dict[str, int | float | str]:
        """Counters since opening (chunks, unless their name says otherwise) and gauges."""
        with self._change:
            gauges = {
                "chunks": len(self._chunks),
                "bytes_limit": self._log.bytes,
                "bytes_used": self._filled_bytes,
                "loads_under_way": self._under_way[True],
                "stores_under_way": self._under_way[False],
            }
        return {**gauges, **self._counters.snapshot()}

    def check(self) -> None:
        """Assert the invariants. Only while nothing is under way."""
        with self._change:
            self._log.check()
            assert self._masks == {key: chunk.mask for key, chunk in self._chunks.items()}
            assert set(self._chunks.values()) <= set(self._log), "a chunk that is found does not lie in the log"
            assert self._filled_bytes == sum(chunk.nbytes for chunk in self._chunks.values())
            assert not any(chunk.readers for chunk in self._log)

    def close(self, deadline_s: float) -> None:
        """Gives up what has not begun, and waits for the rest: all of it is memory's work, and short."""
        with self._change:
            self._closed = True
        self._loads.shutdown()
        self._stores.shutdown()
        with self._change:
            for key in list(self._chunks):
                self._forget(key)


def _parts(lengths: list[int]) -> list[range]:
    """Runs of neighbours of some bytes each."""
    parts, first, size = [], 0, 0
    for at, length in enumerate(lengths):
        if size and size + length > LOADED_BYTES:
            parts.append(range(first, at))
            first, size = at, 0
        size += length
    if lengths:
        parts.append(range(first, len(lengths)))
    return parts
