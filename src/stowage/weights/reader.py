"""Bytes of files into memory, by several threads.

Owns the threads and their queue. Reads go past the page cache: into place where place, length and memory are in whole
pages, through a page-aligned buffer of the thread where they are long. Every read that was asked for ends: done, or
failed with the reason.
"""

from __future__ import annotations

import mmap
import os
import queue
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from stowage.errors import StorageError
from stowage.weights.checkpoint import PAGE_BYTES, File

__all__ = ["Read", "Readers", "Stall", "Ticket"]

THREADS: Final = 4
READ_BYTES: Final = 1 << 20
"""Per system call at least, of long reads: so that several threads share a small module evenly."""
READ_BYTES_MAX: Final = 4 << 20
"""Of a large module: fewer calls leave more of the processor to who computes (8 to 10 % of a step, with 1 MiB)."""
_BUFFERED_BYTES: Final = 64 << 10
"""Shorter reads, as of an embedding's rows, are left to the page cache."""


@dataclass(frozen=True, slots=True)
class Read:
    """Fill ``into`` from ``offset`` of ``source``: a file, or host memory (then ``offset`` counts in it)."""

    source: File | memoryview
    offset: int
    into: memoryview


class Ticket:
    """Some reads that belong together."""

    __slots__ = ("_done", "_left", "_lock", "error")

    def __init__(self, count: int) -> None:
        self._left = count
        self._lock = threading.Lock()
        self._done = threading.Event()
        self.error: Exception | None = None
        if not count:
            self._done.set()

    @property
    def done(self) -> bool:
        return self._done.is_set()

    def ended(self, error: Exception | None = None) -> None:
        with self._lock:
            self.error = self.error or error
            self._left -= 1
            if not self._left:
                self._done.set()

    def wait(self, timeout_s: float) -> None:
        """Until all have ended, well or not. Raises StorageError when the time is over."""
        if not self._done.wait(timeout_s):
            raise StorageError(
                f"weights were not read within {timeout_s:g} s: the disk does not answer. The request failed; the next "
                "one tries again."
            )

    def raise_error(self) -> None:
        """Raises StorageError when a read failed; all have ended."""
        if self.error is not None:
            raise StorageError(
                f"weights could not be read: {self.error}. The request failed; the next one tries again."
            ) from self.error


@dataclass(slots=True)
class Stall:
    """How long somebody has waited for reads, in all, who waits for none longer than ``timeout_s``."""

    timeout_s: float
    seconds: float = 0.0

    def wait(self, ticket: Ticket) -> None:
        """As ``Ticket.wait``."""
        if ticket.done:
            return
        began_s = time.perf_counter()
        try:
            ticket.wait(self.timeout_s)
        finally:
            self.seconds += time.perf_counter() - began_s


class Readers:
    """``threads`` of them, started with the first read."""

    def __init__(self, threads: int = THREADS) -> None:
        self._count = threads
        self._threads: list[threading.Thread] = []
        self._queue: queue.SimpleQueue[tuple[Read, Ticket] | None] = queue.SimpleQueue()
        self._closed = False

    def start(self, reads: Sequence[Read]) -> Ticket:
        """Begin ``reads``, in their order, after those that were begun before."""
        assert not self._closed, "closed readers read nothing"
        while len(self._threads) < self._count:
            thread = threading.Thread(target=self._run, name="stowage-weights", daemon=True)
            self._threads.append(thread)
            thread.start()
        share_bytes = sum(read.into.nbytes for read in reads) // (2 * self._count)
        part_bytes = min(max(share_bytes // READ_BYTES * READ_BYTES, READ_BYTES), READ_BYTES_MAX)
        parts = [part for read in reads for part in _parts(read, part_bytes)]
        ticket = Ticket(len(parts))
        for part in parts:
            self._queue.put((part, ticket))
        return ticket

    def close(self, timeout_s: float = 10.0) -> bool:
        """End the threads after what is queued. Whether all have ended: if not, their memory must stay."""
        self._closed = True
        for _ in self._threads:
            self._queue.put(None)
        for thread in self._threads:
            thread.join(timeout_s)
        return not any(thread.is_alive() for thread in self._threads)

    def _run(self) -> None:
        buffer = _Buffer()
        while (work := self._queue.get()) is not None:
            read, ticket = work
            try:
                _fill(read, buffer)
            except Exception as error:  # noqa: BLE001  # a thread's outermost frame: whoever waits is told
                ticket.ended(error)
            else:
                ticket.ended()
            del read, ticket, work


def _parts(read: Read, part_bytes: int) -> list[Read]:
    if not _in_whole_pages(read):
        part_bytes = READ_BYTES  # they go through a thread's buffer, which is no larger
    return [
        Read(read.source, read.offset + at, read.into[at : at + part_bytes])
        for at in range(0, read.into.nbytes, part_bytes)
    ]


class _Buffer:
    """For the longest read, with the pages around it. It takes memory when it is used first."""

    def __init__(self) -> None:
        self._memory: mmap.mmap | None = None

    def taken(self, nbytes: int) -> memoryview:
        assert nbytes <= READ_BYTES + 2 * PAGE_BYTES
        self._memory = self._memory or mmap.mmap(-1, READ_BYTES + 2 * PAGE_BYTES)
        return memoryview(self._memory)[:nbytes]


def _copy(source: memoryview, into: memoryview) -> None:
    np.copyto(np.frombuffer(into, np.uint8), np.frombuffer(source, np.uint8))  # others compute meanwhile


def _in_whole_pages(read: Read) -> bool:
    address = int(np.frombuffer(read.into, np.uint8).__array_interface__["data"][0])
    return not (read.offset % PAGE_BYTES or read.into.nbytes % PAGE_BYTES or address % PAGE_BYTES)


def _fill(read: Read, buffer: _Buffer) -> None:
    if isinstance(read.source, memoryview):
        _copy(read.source[read.offset : read.offset + read.into.nbytes], read.into)
        return
    whole_pages = _in_whole_pages(read)
    if read.source.direct >= 0 and not whole_pages and read.into.nbytes >= _BUFFERED_BYTES:
        begin = read.offset // PAGE_BYTES * PAGE_BYTES
        end = -(-(read.offset + read.into.nbytes) // PAGE_BYTES) * PAGE_BYTES
        around = buffer.taken(end - begin)
        _fill(Read(read.source, begin, around), buffer)
        _copy(around[read.offset - begin :][: read.into.nbytes], read.into)
        return
    fd = read.source.direct if whole_pages and read.source.direct >= 0 else read.source.fd
    done = 0
    while done < read.into.nbytes:
        count = os.preadv(fd, [read.into[done:]], read.offset + done)
        if count == 0 and read.offset + done >= read.source.length:
            return  # the last page of a file: what follows belongs to nothing
        if count == 0:
            raise OSError(f"{read.source.path} ends too early")
        done += count
        if count % PAGE_BYTES and fd == read.source.direct:
            fd = read.source.fd  # direct reads cannot go on from within a page; there the file ends, most often
