"""DiskTier: chunks in a directory of segment files, within a hard byte limit, shared by the processes of one machine.

A façade: `Loader` reads, `Storer` writes and follows the directory, `Index` answers look-ups from memory. No method
blocks except `close`, and the constructor, which reads the footers of what the directory holds.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Final

import numpy as np
from numpy.typing import NDArray

from stowage.core.geometry import PAGE_BYTES, round_up
from stowage.errors import BudgetError, DirectoryError
from stowage.log import Trouble
from stowage.storage.disk.allocator import SegmentAllocator, segment_bytes_for
from stowage.storage.disk.catalog import Catalog
from stowage.storage.disk.counters import Counters
from stowage.storage.disk.directory import Directory
from stowage.storage.disk.index import Index
from stowage.storage.disk.loader import Loader, patience_s
from stowage.storage.disk.packing_rates import PackingRates
from stowage.storage.disk.shared import Shared
from stowage.storage.disk.storer import Storer
from stowage.storage.disk.system import System
from stowage.storage.flight import Flight
from stowage.storage.format.compression import Compression
from stowage.storage.format.protection import Protection
from stowage.storage.protocol import TRANSFERS_MAX, Outcome, Reporter, Transfer

SEGMENT_BYTES: Final = 256 << 20
SEGMENT_BYTES_SMALL: Final = 4 << 20
SEGMENTS: Final = 8
OWN_BYTES: Final = 16 << 10
"""Set aside for the directory's own blocks."""
RECOVER_TIMEOUT_S: Final = 10.0
OPENING_ROWS: Final = 1 << 16


def least_limit_bytes(chunk_bytes: int) -> int:
    """The smallest limit under which a chunk of that length can be stored."""
    return OWN_BYTES + segment_bytes_for(chunk_bytes)


class DiskTier(Reporter):
    """Implements Tier, Waitable and Described (stowage.storage.protocol).

    `limit_bytes` bounds the whole directory, whoever writes in it. `chunk_bytes_max` (0: not known) is the longest
    payload to be stored: the limit must hold it. `segment_bytes` is what one segment takes on disk (default: an eighth
    of the limit, or of the file system where that is smaller, up to 256 MiB). `protection`: what chunks are sealed
    with, a checksum by default; segments under another one are left alone until their turn to go. `compression`:
    whether chunks are packed without loss where that pays; whatever is there is read in either form. Loads of chunks
    here and there wait for others that may lie between, at most `patience_s` of their bytes. Memory: up to 4 MiB of
    staging for the writer and for each reader, what is being written packed (up to about 64 MiB) or read packed (about
    16 MiB), and what `Index` says per chunk.

    Raises DirectoryError for a directory that cannot be trusted or used, BudgetError for a limit that is too small.
    """

    name = "disk"

    def __init__(
        self,
        directory: str | os.PathLike[str],
        limit_bytes: int,
        namespace: bytes,
        *,
        segment_bytes: int | None = None,
        chunk_bytes_max: int = 0,
        readers: int = 16,
        direct: bool = True,
        transfers_max: int = TRANSFERS_MAX,
        refresh_s: float = 1.0,
        patience_s: Callable[[int], float] = patience_s,
        protection: Protection | None = None,
        compression: str = Compression.AUTO,
        system: System | None = None,
    ) -> None:
        assert len(namespace) == 32 and readers > 0 and transfers_max > 0
        super().__init__()
        self._limit_bytes = limit_bytes
        self._protection = protection or Protection()
        self._system = system or System()
        self._counters = Counters(Trouble("stowage.disk", self._system.timer))
        self._closed = False
        path = Path(directory)
        _check_limit(path, limit_bytes, chunk_bytes_max)
        self._chunk_bytes_max = chunk_bytes_max
        self._directory = Directory(path, limit_bytes, self._system, self._counters, direct)
        capacity_bytes = self._directory.capacity_bytes() or limit_bytes
        self._segment_bytes_of = partial(_segment_bytes, capacity_bytes, chunk_bytes_max, segment_bytes)
        self._segment_bytes = self._segment_bytes_of(limit_bytes)
        self._index = Index()
        self._catalog = Catalog(self._directory, self._index, namespace, self._protection, self._counters)
        room = SegmentAllocator(self._directory, namespace, self._protection, self._counters)
        try:
            self._catalog.refresh(OPENING_ROWS, to_first_torn=True)
            room.recover(RECOVER_TIMEOUT_S, self._catalog.readable())
            self._catalog.refresh(OPENING_ROWS)
        except OSError as error:
            self._directory.close()
            raise DirectoryError(
                f"Cannot read the cache directory {path} ({error.strerror}). Check the disk, or choose another one."
            ) from error
        shared = Shared(
            self._directory,
            self._catalog,
            self._index,
            self._counters,
            namespace,
            transfers_max,
            self._system,
            self._report,
            PackingRates(self._system.timer),
        )
        self._loader = Loader(shared, readers=readers, patience_s=patience_s)
        self._storer = Storer(
            shared,
            room,
            segment_bytes=self._segment_bytes,
            room_bytes=limit_bytes - OWN_BYTES,
            refresh_s=refresh_s,
            compression=Compression(compression),
        )

    def lookup(self, keys: list[bytes]) -> NDArray[np.uint64]:
        """The valid-block mask of each key, 0 where absent. Other processes' chunks are seen after `refresh_s`."""
        return self._index.masks(keys)

    def load(self, transfer: Transfer) -> None:
        """Queues the reads. Buffers that begin on a page are filled by the device itself."""
        if not self._loader.submit(transfer):
            self._drop(transfer)

    def store(self, transfer: Transfer) -> None:
        """Queues the writes, in the order of calls. A prefix stored by one transfer is read back in few reads."""
        if not self._storer.submit(transfer):
            self._drop(transfer)

    def _drop(self, transfer: Transfer) -> None:
        self._counters.add("dropped", len(transfer.keys))
        self._report(Flight(transfer).dropped())

    def poll(self) -> list[Outcome]:
        """The outcomes since the last call, among them those of queued transfers whose deadline has passed."""
        self._loader.expire()
        self._storer.expire()
        return super().poll()

    def discard(self, keys: list[bytes]) -> None:
        """Forgets the keys in this process. Their bytes stay until their segment goes; another process, or the next
        one, may find them again (which is harmless: a key names its content)."""
        self._index.drop(keys)

    def set_limit(self, limit_bytes: int) -> None:
        """Another limit for the directory, from now on; the worker reclaims down to it. Raises BudgetError.

        Every process that shares the directory keeps its own limit, so all should be given the same.
        """
        _check_limit(self._directory.path, limit_bytes, self._chunk_bytes_max)
        self._segment_bytes = self._segment_bytes_of(limit_bytes)
        self._limit_bytes = self._directory.limit_bytes = limit_bytes
        self._storer.change_limit(self._segment_bytes, limit_bytes - OWN_BYTES)

    def stats(self) -> dict[str, int | float | str]:
        """Counters since opening (chunks, unless their name says otherwise) and gauges."""
        return {
            "bytes_used": self._catalog.bytes_used,
            "bytes_filled": min(self._index.filled_bytes, self._catalog.bytes_used),
            "bytes_limit": self._limit_bytes,
            "segment_bytes": self._segment_bytes,
            "segments": len(self._catalog),
            "chunks": len(self._index),
            "direct": int(self._directory.direct),
            "protection": self._protection.method.label,
            "loads_under_way": self._loader.in_flight,
            "stores_under_way": self._storer.in_flight,
            "strangers": self._catalog.ignored,
            **self._counters.snapshot(),
        }

    def check(self) -> None:
        """Asserts the invariants of the index and the limit. For an idle tier."""
        self._catalog.check()
        self._storer.check()
        if self._closed:
            return
        with self._directory.locked(RECOVER_TIMEOUT_S) as held:
            if held:
                used = sum(entry.bytes for entry in self._directory.entries())
                assert used <= self._limit_bytes, f"{used} bytes in a directory of {self._limit_bytes}"

    def close(self, deadline_s: float) -> None:
        """Finishes what was begun until `deadline_s` (of the clock), gives up the rest, seals the segment. Idempotent,
        also where it was interrupted.

        Outcomes stay to be polled. A worker that hangs in the kernel is left behind, with its transfer unreported.
        """
        if self._closed:
            return
        seconds = self._countdown(deadline_s)
        loads_ended = self._loader.close(seconds)
        stores_ended = self._storer.close(seconds)
        if loads_ended and stores_ended:
            self._directory.close()
        self._closed = True

    def _countdown(self, deadline_s: float) -> Callable[[], float]:
        """Seconds of real time left; the injected clock is asked once, it may stand still."""
        timer = self._system.timer
        until_s = timer() + max(0.0, deadline_s - self._system.clock())
        return lambda: until_s - timer()


def _check_limit(path: Path, limit_bytes: int, chunk_bytes_max: int) -> None:
    least = least_limit_bytes(max(1, chunk_bytes_max))
    if limit_bytes < least:
        raise BudgetError(
            f"A limit of {limit_bytes} bytes for {path} holds no chunk"
            + (f" of {chunk_bytes_max} bytes" if chunk_bytes_max else "")
            + f". The least that works is {least} bytes: give it that or more."
        )


def _segment_bytes(capacity_bytes: int, chunk_bytes_max: int, wanted: int | None, limit_bytes: int) -> int:
    """Several segments fit into a file system that is smaller than the limit, too."""
    room_bytes = max(least_limit_bytes(max(1, chunk_bytes_max)), min(limit_bytes, capacity_bytes))
    return segment_bytes_within(room_bytes, chunk_bytes_max, wanted)


def segment_bytes_within(limit_bytes: int, chunk_bytes_max: int, wanted: int | None = None) -> int:
    """What one segment takes of a directory of `limit_bytes`, unless another size is `wanted`."""
    room = limit_bytes - OWN_BYTES
    if wanted is None:
        wanted = min(SEGMENT_BYTES, max(room // SEGMENTS, min(SEGMENT_BYTES_SMALL, room // 4)))
    wanted = max(wanted, segment_bytes_for(max(1, chunk_bytes_max)))
    return min(round_up(wanted), room // PAGE_BYTES * PAGE_BYTES)
