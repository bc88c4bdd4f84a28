"""Bytes of files into memory, by several threads.

Owns the threads and their queue. Reads go past the page cache, except for what lies there already: straight into memory
where offset, length and memory are whole pages, through a page-aligned buffer of the thread where they are long. Every
read that was asked for ends: done, or failed with the reason.
"""

from __future__ import annotations

import contextlib
import queue
import threading
import time
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from stowage.core.geometry import PAGE_BYTES
from stowage.errors import StorageError
from stowage.native.memory import HUGE_BYTES, pages
from stowage.weights.file import File
from stowage.weights.lossless.packed_tensor import PackedTensor

_LATE: Final = (
    "weights were not read within {:g} s: the disk does not answer. The request failed; the next one tries again."
)

__all__ = ["Read", "Readers", "Stall", "Ticket"]

THREADS: Final = 4
READ_BYTES: Final = 1 << 20
"""Per system call at least, of long reads: so that several threads share a small module evenly."""
READ_BYTES_MAX: Final = 4 << 20
"""Of a large module: fewer calls leave more of the processor to who computes (8 to 10 % of a step, with 1 MiB)."""
_PACKED_BYTES: Final = 3 << 19
"""Of a packed tensor: two thirds of it are read by one call, and all that can be fills a huge page."""
_HALF_BYTES: Final = HUGE_BYTES // 2
_AROUND_BYTES: Final = _HALF_BYTES - 2 * PAGE_BYTES
"""Of what does not begin on a page: with the pages around it, half a huge page."""
_BUFFERED_BYTES: Final = 64 << 10
"""Shorter reads, as of an embedding's rows, are left to the page cache."""


@dataclass(frozen=True, slots=True)
class Read:
    """Fill ``into`` from ``offset`` of ``source``: a file, or host memory (then ``offset`` counts in it)."""

    source: File | memoryview
    offset: int
    into: memoryview


class Ticket:
    """Some reads that belong together. Whoever waits may be interrupted anywhere, and wait again."""

    __slots__ = ("_latch", "_left", "_lock", "error")

    def __init__(self, count: int) -> None:
        self._left = count
        self._lock = threading.Lock()
        self._latch = threading.Lock()
        self.error: Exception | None = None
        if count:
            self._latch.acquire()

    @property
    def done(self) -> bool:
        return not self._left

    def ended(self, error: Exception | None = None) -> None:
        with self._lock:
            self.error = self.error or error
            self._left -= 1
            if not self._left:
                self._latch.release()

    def wait(self, timeout_s: float) -> None:
        """Until all have ended, well or not. Raises StorageError when the time is over."""
        if self.done:
            return
        if not self._latch.acquire(timeout=timeout_s):
            raise StorageError(_LATE.format(timeout_s))
        self._latch.release()

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


class _Batch:
    """Reads that can be given up together."""

    __slots__ = ("given_up",)

    def __init__(self) -> None:
        self.given_up = False


class _Work:
    """What the threads share. They know nothing else, so they end when nobody has the readers any more."""

    __slots__ = ("busy", "halves", "queue")

    def __init__(self) -> None:
        self.queue: queue.SimpleQueue[tuple[Read, Ticket, _Batch] | None] = queue.SimpleQueue()
        self.busy: set[int] = set()
        """Threads that may be writing to memory."""
        self.halves: queue.SimpleQueue[memoryview] = queue.SimpleQueue()
        """Of huge pages that one thread's buffer shares with the next one's."""


class Readers:
    """``threads`` of them, started with the first read. They end with `close`, or when this is dropped."""

    def __init__(self, threads: int = THREADS) -> None:
        self._count = threads
        self._closed = False
        self._begin()

    def _begin(self) -> None:
        self._threads: list[threading.Thread] = []
        self._batch = _Batch()
        self._work = _Work()
        weakref.finalize(self, self._work.queue.put, None).atexit = False

    def start(self, reads: Sequence[Read]) -> Ticket:
        """Begin ``reads``, in their order, after those that were begun before."""
        assert not self._closed, "closed readers read nothing"
        while len(self._threads) < self._count:
            thread = threading.Thread(target=_run, args=(self._work,), name="stowage-weights", daemon=True)
            thread.start()
            self._threads.append(thread)
        share_bytes = sum(read.into.nbytes for read in reads) // (2 * self._count)
        part_bytes = min(max(share_bytes // READ_BYTES * READ_BYTES, READ_BYTES), READ_BYTES_MAX)
        parts = [part for read in reads for part in _parts(read, part_bytes)]
        ticket = Ticket(len(parts))
        for part in parts:
            self._work.queue.put((part, ticket, self._batch))
        return ticket

    def drain(self, timeout_s: float) -> None:
        """Give up what was begun and is not done. When this returns nothing is written to memory any more. May be
        interrupted, and called again. Raises StorageError when the time is over.
        """
        self._batch.given_up = True
        until_s = time.monotonic() + timeout_s
        while self._work.busy:
            if time.monotonic() > until_s:
                raise StorageError(_LATE.format(timeout_s))
            time.sleep(0.001)
        self._batch = _Batch()

    def forked(self) -> None:
        """This is another process than the one whose threads were reading: it has none of them."""
        self._begin()

    def close(self, timeout_s: float = 10.0) -> bool:
        """End the threads after what is queued. Whether all have ended: if not, their memory must stay."""
        self._closed = True
        self._work.queue.put(None)
        threads = [thread for thread in self._threads if thread is not threading.current_thread()]
        for thread in threads:
            thread.join(timeout_s)
        return not any(thread.is_alive() for thread in threads)


def _run(work: _Work) -> None:
    """A thread's life. The last word in the queue is for all threads."""
    buffer, own = _Buffer(work.halves), threading.get_ident()
    while (item := work.queue.get()) is not None:
        read, ticket, batch = item
        work.busy.add(own)  # before the look: who gives up waits for whoever looked earlier
        try:
            if batch.given_up:
                raise StorageError("reading was given up, because the forward that asked did not end")
            _fill(read, buffer)
        except Exception as error:  # noqa: BLE001  # a thread's outermost frame: whoever waits is told
            ticket.ended(error)
        else:
            ticket.ended()
        work.busy.discard(own)
        del read, ticket, batch, item
    work.queue.put(None)


def _parts(read: Read, part_bytes: int) -> list[Read]:
    if _is_packed(read.source):
        part_bytes = _PACKED_BYTES  # they go through a thread's buffer, which is not much larger
    elif not _in_whole_pages(read):
        part_bytes = _AROUND_BYTES
    return [
        Read(read.source, read.offset + at, read.into[at : at + part_bytes])
        for at in range(0, read.into.nbytes, part_bytes)
    ]


class _Buffer:
    """A thread's, for its longest read with the pages around it: half a huge page, whose other half another thread has,
    or a whole one for packed tensors. It takes memory when it is used first.
    """

    def __init__(self, halves: queue.SimpleQueue[memoryview]) -> None:
        self._halves = halves
        self._memory = memoryview(b"")

    def taken(self, nbytes: int) -> memoryview:
        assert nbytes <= HUGE_BYTES
        if nbytes > self._memory.nbytes:
            self._memory = self._half() if nbytes <= _HALF_BYTES else pages(HUGE_BYTES)
        return self._memory[:nbytes]

    def _half(self) -> memoryview:
        with contextlib.suppress(queue.Empty):
            return self._halves.get_nowait()
        whole = pages(HUGE_BYTES)
        self._halves.put(whole[_HALF_BYTES:])
        return whole[:_HALF_BYTES]


def _address(memory: memoryview) -> int:
    return int(np.frombuffer(memory, np.uint8).__array_interface__["data"][0])


def _copy(source: memoryview, into: memoryview) -> None:
    np.copyto(np.frombuffer(into, np.uint8), np.frombuffer(source, np.uint8))  # others compute meanwhile


def _is_packed(source: File | memoryview) -> bool:
    return isinstance(source, PackedTensor)


def _in_whole_pages(read: Read) -> bool:
    return not (read.offset % PAGE_BYTES or read.into.nbytes % PAGE_BYTES or _address(read.into) % PAGE_BYTES)


def _fill(read: Read, buffer: _Buffer) -> None:
    if isinstance(read.source, memoryview):
        _copy(read.source[read.offset : read.offset + read.into.nbytes], read.into)
        return
    if isinstance(read.source, PackedTensor):
        read.source.unpack(read.offset, read.into, buffer.taken(PackedTensor.around_bytes(read.into.nbytes)))
        return
    whole_pages = _in_whole_pages(read)
    if read.source.direct >= 0 and not whole_pages and read.into.nbytes >= _BUFFERED_BYTES:
        begin = read.offset // PAGE_BYTES * PAGE_BYTES
        end = -(-(read.offset + read.into.nbytes) // PAGE_BYTES) * PAGE_BYTES
        around = buffer.taken(end - begin)
        _fill(Read(read.source, begin, around), buffer)
        _copy(around[read.offset - begin :][: read.into.nbytes], read.into)
        return
    read.source.fill(read.into, read.offset, whole_pages=whole_pages)
