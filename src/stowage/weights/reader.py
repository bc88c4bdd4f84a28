"""Reads bytes of files into memory, by several threads.

Owns the threads and their queue. Reads bypass the page cache (``O_DIRECT``), except for what is cached already:
directly into memory where offset, length and address are multiples of a page, through the thread's page-aligned buffer
where they are not and the read is long. Every read ends: done, or failed with the reason.

A packed tensor is read in one step and unpacked in another. Reading goes first, so that a disk which reports several
reads together has others in flight while these are unpacked.
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

from stowage.core.geometry import PAGE_BYTES, round_up
from stowage.core.read_buffers import ReadBuffers
from stowage.errors import StorageError
from stowage.native.memory import HUGE_BYTES, address_of, copy, pages
from stowage.weights.file import File
from stowage.weights.lossless.packed_tensor import PackedTensor

_LATE: Final = (
    "weights were not read within {:g} s: the disk does not answer. The request failed; the next one tries again."
)

THREADS: Final = 4
READ_BYTES: Final = 1 << 20
"""The least that one system call of a long read takes, so that several threads share a small module evenly."""
READ_BYTES_MAX: Final = 4 << 20
"""The most, for a large module: fewer calls leave more processor time for computing (8 to 10 % of a step, at 1 MiB)."""
_UNPACKING: Final = 4
"""Additional threads where a tensor is packed: with half as many, too few read while the others unpack (1.30 instead of
1.45 times the disk's rate)."""
_PACKED_BYTES: Final = 2 << 20
"""The most of a packed tensor, unpacked, in one part: one call reads about two thirds as many bytes."""
_READ_BUFFER_BYTES: Final = 4 << 20
"""The most that one part of a packed tensor takes packed, with the frames and pages around it."""
_HALF_BYTES: Final = HUGE_BYTES // 2
_AROUND_BYTES: Final = _HALF_BYTES - 2 * PAGE_BYTES
"""The most of one unaligned part: with the pages around it, half a huge page."""
_BUFFERED_BYTES: Final = 64 << 10
"""Shorter unaligned reads, such as an embedding's rows, go through the page cache."""


@dataclass(frozen=True, slots=True)
class Read:
    """Fill ``into`` from byte ``offset`` of ``source``: a file, or host memory."""

    source: File | memoryview
    offset: int
    into: memoryview


class Ticket:
    """Reads that belong together. A wait for them may be interrupted at any instruction, and repeated."""

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
        """Whether all reads have ended, successfully or not."""
        return not self._left

    def ended(self, error: Exception | None = None) -> None:
        """One read has ended. The first ``error`` is kept."""
        with self._lock:
            self.error = self.error or error
            self._left -= 1
            if not self._left:
                self._latch.release()

    def wait(self, timeout_s: float) -> None:
        """Wait until all have ended, successfully or not. Raises StorageError after ``timeout_s``."""
        if self.done:
            return
        if not self._latch.acquire(timeout=timeout_s):
            raise StorageError(_LATE.format(timeout_s))
        self._latch.release()

    def raise_error(self) -> None:
        """Raises StorageError if a read failed. Call it when all have ended."""
        if self.error is not None:
            raise StorageError(
                f"weights could not be read: {self.error}. The request failed; the next one tries again."
            ) from self.error


@dataclass(slots=True)
class Stall:
    """Waits for reads, each at most ``timeout_s``, and adds up the time."""

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
    """The last item of a queue."""

    END = enum.auto()


_END: Final = _End.END


class _Batch:
    """Reads that are cancelled together."""

    __slots__ = ("given_up",)

    def __init__(self) -> None:
        self.given_up = False


@dataclass(slots=True)
class _Part:
    """A part of a read, which one thread does at once."""

    read: Read
    ticket: Ticket
    batch: _Batch


@dataclass(slots=True)
class _PackedPart:
    """A part of a packed tensor, and the buffer that its packed bytes are read into."""

    part: _Part
    source: PackedTensor
    nbytes: int
    buffer: memoryview


class _Work:
    """What the threads share. They have no reference to `Readers`, so that they end when it is dropped.

    Packed parts wait in queues of their own, so that a thread can choose between reading and unpacking. For each step
    of theirs that can be done there is a ``None`` in ``queue``.
    """

    __slots__ = ("arrived", "busy", "halves", "lock", "packed", "queue", "read_buffers")

    def __init__(self) -> None:
        self.queue: queue.SimpleQueue[_Part | _End | None] = queue.SimpleQueue()
        self.busy: set[int] = set()
        """Ids of the threads that may be writing to memory."""
        self.halves: queue.SimpleQueue[memoryview] = queue.SimpleQueue()
        """Unused halves of huge pages; the other half is a thread's buffer."""
        self.lock = threading.Lock()
        """Guards the fields below."""
        self.packed: deque[_PackedPart] = deque()
        """To be read."""
        self.arrived: deque[_PackedPart] = deque()
        """To be unpacked."""
        self.read_buffers = ReadBuffers(_READ_BUFFER_BYTES)

    def call(self) -> None:
        """Wake a thread if a step of a packed part can be done. Call it with the lock held, after any change."""
        if self.arrived or (self.packed and self.read_buffers.can_acquire):
            self.queue.put(None)


class Readers:
    """Reading threads, started with the first read. They end with `close`, or when this object is dropped."""

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
        """Queue ``reads``, in their order."""
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
        """Cancel all reads. When this returns, no thread writes to memory any more. May be interrupted, and called
        again. Raises StorageError after ``timeout_s``.
        """
        self._batch.given_up = True
        until_s = time.monotonic() + timeout_s
        while self._work.busy:
            if time.monotonic() > until_s:
                raise StorageError(_LATE.format(timeout_s))
            time.sleep(0.001)
        self._batch = _Batch()

    def forked(self) -> None:
        """Call it in a forked process, which has none of the threads: starts anew."""
        self._begin()

    def close(self, timeout_s: float = 10.0) -> bool:
        """End the threads after what is queued. Returns whether all have ended; if not, their memory must stay."""
        self._closed = True
        self._work.queue.put(_END)
        threads = [thread for thread in self._threads if thread is not threading.current_thread()]
        for thread in threads:
            thread.join(timeout_s)
        return not any(thread.is_alive() for thread in threads)


def _run(work: _Work) -> None:
    """The thread function. The last item of the queue ends all threads."""
    buffer = _Buffer(work.halves)
    while (part := work.queue.get()) is not _END:
        if isinstance(part, _Part):
            if _done(work, part, partial(_fill, part.read, buffer)):
                part.ticket.ended()
        else:
            _step(work)
        del part
    while _step(work):
        pass  # a thread that still reads unpacks that, too
    work.queue.put(_END)


def _done(work: _Work, part: _Part, fill: Callable[[], None]) -> bool:
    """Call ``fill``. Returns whether it succeeded; an error goes to the part's ticket."""
    own = threading.get_ident()
    work.busy.add(own)  # before given_up is read: ``drain`` waits for the busy threads
    try:
        if part.batch.given_up:
            raise StorageError("reading was cancelled, because the forward that needed it failed")
        fill()
    except Exception as error:  # noqa: BLE001  # a thread's outermost frame: the ticket gets the error
        part.ticket.ended(error)
        return False
    finally:
        work.busy.discard(own)
    return True


def _step(work: _Work) -> bool:
    """Read the next packed part, or else unpack one that was read. Returns False if there is nothing to do."""
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
    """A thread's buffer for unaligned reads and their pages: half a huge page, made at first use; half is another's."""

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


def _in_whole_pages(read: Read) -> bool:
    return not (read.offset % PAGE_BYTES or read.into.nbytes % PAGE_BYTES or address_of(read.into) % PAGE_BYTES)


def _fill(read: Read, buffer: _Buffer) -> None:
    if isinstance(read.source, memoryview):
        copy(read.source[read.offset : read.offset + read.into.nbytes], read.into)
        return
    whole_pages = _in_whole_pages(read)
    if read.source.direct >= 0 and not whole_pages and read.into.nbytes >= _BUFFERED_BYTES:
        begin = read.offset // PAGE_BYTES * PAGE_BYTES
        end = round_up(read.offset + read.into.nbytes)
        around = buffer.taken(end - begin)
        _fill(Read(read.source, begin, around), buffer)
        copy(around[read.offset - begin :][: read.into.nbytes], read.into)
        return
    read.source.fill(read.into, read.offset, whole_pages=whole_pages)
