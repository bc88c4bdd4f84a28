"""Bytes of files into memory, by several threads.

Owns the threads and their queue. Reads go past the page cache, except for what lies there already: straight into memory
where offset, length and memory are whole pages, through a page-aligned buffer of the thread where they are long. Every
read that was asked for ends: done, or failed with the reason.

A packed tensor is read in one step and unpacked in another. Reading goes first: whichever thread has read goes on with
what comes next, so that a disk that tells of several reads together has others to do while they are unpacked.
"""

from __future__ import annotations

import contextlib
import enum
import queue
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Final

import numpy as np

from stowage.core.geometry import PAGE_BYTES
from stowage.core.read_buffers import ReadBuffers
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
_UNPACKING: Final = 4
"""Threads besides, where anything is packed: with half as many, too few read while the others unpack (1.30 instead of
1.45 of the disk's rate)."""
_PACKED_BYTES: Final = 2 << 20
"""Of a packed tensor at most: two thirds of it are read by one call."""
_READ_BUFFER_BYTES: Final = 4 << 20
"""That one part of a packed tensor takes packed, with the frames and pages around it."""
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


class _End(enum.Enum):
    """The last word in a queue."""

    END = enum.auto()


_END: Final = _End.END


class _Batch:
    """Reads that can be given up together."""

    __slots__ = ("given_up",)

    def __init__(self) -> None:
        self.given_up = False


@dataclass(slots=True)
class _Part:
    """Of a read: what one thread does in one go."""

    read: Read
    ticket: Ticket
    batch: _Batch


@dataclass(slots=True)
class _PackedPart:
    """One of a packed tensor, and the memory that it is read into."""

    part: _Part
    source: PackedTensor
    nbytes: int
    buffer: memoryview


class _Work:
    """What the threads share. They know nothing else, so they end when nobody has the readers any more.

    What is packed waits apart, so that a thread can choose. ``queue`` has None for it: somebody may do a step of that.
    """

    __slots__ = ("arrived", "busy", "halves", "lock", "packed", "queue", "read_buffers")

    def __init__(self) -> None:
        self.queue: queue.SimpleQueue[_Part | _End | None] = queue.SimpleQueue()
        self.busy: set[int] = set()
        """Threads that may be writing to memory."""
        self.halves: queue.SimpleQueue[memoryview] = queue.SimpleQueue()
        """Of huge pages that one thread's buffer shares with the next one's."""
        self.lock = threading.Lock()
        """For what follows."""
        self.packed: deque[_PackedPart] = deque()
        """To be read."""
        self.arrived: deque[_PackedPart] = deque()
        """To be unpacked."""
        self.read_buffers = ReadBuffers(_READ_BUFFER_BYTES)

    def call(self) -> None:
        """If there is a step to be done, somebody else may do it. The lock is held, after anything changed."""
        if self.arrived or (self.packed and self.read_buffers.can_acquire):
            self.queue.put(None)


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
        weakref.finalize(self, self._work.queue.put, _END).atexit = False

    def start(self, reads: Sequence[Read]) -> Ticket:
        """Begin ``reads``, in their order, after those that were begun before."""
        assert not self._closed, "closed readers read nothing"
        is_packed = any(isinstance(read.source, PackedTensor) for read in reads)
        while len(self._threads) < self._count + _UNPACKING * is_packed:
            thread = threading.Thread(target=_run, args=(self._work,), name="stowage-weights", daemon=True)
            thread.start()
            self._threads.append(thread)
        share_bytes = sum(read.into.nbytes for read in reads) // (2 * self._count)
        part_bytes = min(max(share_bytes // READ_BYTES * READ_BYTES, READ_BYTES), READ_BYTES_MAX)
        parts = [part for read in reads for part in _parts(read, part_bytes)]
        ticket = Ticket(len(parts))
        packed = []
        for read in parts:
            part = _Part(read, ticket, self._batch)
            if isinstance(read.source, PackedTensor):
                nbytes = read.source.around_bytes(read.offset, read.into.nbytes)
                packed.append(_PackedPart(part, read.source, nbytes, memoryview(b"")))
            else:
                self._work.queue.put(part)
        if packed:
            with self._work.lock:
                self._work.packed += packed
                self._work.call()
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
        self._work.queue.put(_END)
        threads = [thread for thread in self._threads if thread is not threading.current_thread()]
        for thread in threads:
            thread.join(timeout_s)
        return not any(thread.is_alive() for thread in threads)


def _run(work: _Work) -> None:
    """A thread's life. The last word in the queue is for all threads."""
    buffer = _Buffer(work.halves)
    while (part := work.queue.get()) is not _END:
        if isinstance(part, _Part):
            if _done(work, part, partial(_fill, part.read, buffer)):
                part.ticket.ended()
        else:
            _step(work)
        del part
    while _step(work):
        pass  # whoever still reads unpacks it, too
    work.queue.put(_END)


def _done(work: _Work, part: _Part, fill: Callable[[], None]) -> bool:
    """Whether that could be done. If not, whoever waits is told."""
    own = threading.get_ident()
    work.busy.add(own)  # before the look: who gives up waits for whoever looked earlier
    try:
        if part.batch.given_up:
            raise StorageError("reading was given up, because the forward that asked did not end")
        fill()
    except Exception as error:  # noqa: BLE001  # a thread's outermost frame: whoever waits is told
        part.ticket.ended(error)
        return False
    finally:
        work.busy.discard(own)
    return True


def _step(work: _Work) -> bool:
    """Read the next part of what is packed, or else unpack one that was read. False: there is nothing to do now."""
    packed = arrived = None
    with work.lock:
        if work.packed and work.read_buffers.can_acquire:
            packed = work.packed.popleft()
            try:
                packed.buffer = work.read_buffers.acquire(packed.nbytes)
            except OSError as error:
                packed.part.ticket.ended(error)
                work.call()
                return True
        elif work.arrived:
            arrived = work.arrived.popleft()
        work.call()
    if packed is not None:
        _fetch(work, packed)
    elif arrived is not None:
        _unpack(work, arrived)
    return packed is not None or arrived is not None


def _fetch(work: _Work, packed: _PackedPart) -> None:
    read = packed.part.read
    fetched = _done(work, packed.part, partial(packed.source.fetch, read.offset, read.into.nbytes, packed.buffer))
    with work.lock:
        work.read_buffers.read_done(packed.nbytes)
        if fetched:
            work.arrived.append(packed)
        else:
            work.read_buffers.release(packed.buffer, packed.nbytes)
        work.call()


def _unpack(work: _Work, packed: _PackedPart) -> None:
    part, read = packed.part, packed.part.read
    unpacked = _done(work, part, partial(packed.source.unpack, read.offset, read.into, packed.buffer))
    with work.lock:
        work.read_buffers.release(packed.buffer, packed.nbytes)
        work.call()
    if unpacked:
        part.ticket.ended()


def _parts(read: Read, part_bytes: int) -> list[Read]:
    if isinstance(read.source, PackedTensor):
        part_bytes = min(part_bytes, _PACKED_BYTES)
    elif not _in_whole_pages(read):
        part_bytes = _AROUND_BYTES
    return [
        Read(read.source, read.offset + at, read.into[at : at + part_bytes])
        for at in range(0, read.into.nbytes, part_bytes)
    ]


class _Buffer:
    """A thread's, for its longest read with the pages around it: half a huge page, whose other half another thread has.
    It takes memory when it is used first.
    """

    def __init__(self, halves: queue.SimpleQueue[memoryview]) -> None:
        self._halves = halves
        self._memory = memoryview(b"")

    def taken(self, nbytes: int) -> memoryview:
        assert nbytes <= _HALF_BYTES
        if not self._memory.nbytes:
            self._memory = self._half()
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


def _in_whole_pages(read: Read) -> bool:
    return not (read.offset % PAGE_BYTES or read.into.nbytes % PAGE_BYTES or _address(read.into) % PAGE_BYTES)


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
    read.source.fill(read.into, read.offset, whole_pages=whole_pages)
