"""Stores: a bounded queue of transfers, and the one thread that writes them, reclaims space and follows other
processes.

Queued transfers are written as one stream, so many short ones keep the disk as busy as a long one. If the disk fails,
all transfers of the stream fail that are not complete yet.
Nothing raises into the caller. While the disk is full or failing, the thread backs off: transfers fail at once for a
while (0.1 s, doubled up to 30 s), so that a broken disk costs hits but no time.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from contextlib import closing
from functools import partial
from typing import Final

import numpy as np
from numpy.typing import NDArray

from stowage.config.disk_room import DISK_FULL
from stowage.core.geometry import PAGE_BYTES
from stowage.native.memory import pages
from stowage.storage.disk.allocator import LOCK_TIMEOUT_S, SegmentAllocator, segment_bytes_for
from stowage.storage.disk.catalog import Segment
from stowage.storage.disk.compaction import Compactor
from stowage.storage.disk.index import LENGTH_MAX
from stowage.storage.disk.packing import Packer
from stowage.storage.disk.shared import Shared
from stowage.storage.disk.write_pipeline import WritePipeline
from stowage.storage.disk.write_queue import WriteQueue
from stowage.storage.disk.writer import STAGING_BYTES, ActiveSegment
from stowage.storage.format.compression import Compression
from stowage.storage.format.segment import Entries
from stowage.storage.protocol import Outcome, Transfer

BACK_OFF_S_MIN: Final = 0.1
BACK_OFF_S_MAX: Final = 30.0
SHRINK_TIMEOUT_S: Final = 10.0
LATE_BYTES: Final = 32 << 20
"""With more bytes queued, packing must not slow the disk down."""
INDEXED_BATCHES: Final = 8
INDEXED_BYTES: Final = 16 << 20
"""This many batches are indexed at once, which costs hardly more than one. It delays no report: if nothing else is
queued, a transfer is indexed and reported as soon as it is written."""


class NoSpace(Exception):
    """No new segment fits within the limit, because live writers or other files take the rest."""


class Storer:
    """Any thread may submit. Segments take `segment_bytes` on disk, `room_bytes` if a chunk is so long."""

    def __init__(
        self,
        shared: Shared,
        room: SegmentAllocator,
        *,
        segment_bytes: int,
        room_bytes: int,
        refresh_s: float,
        compression: Compression,
    ) -> None:
        self._directory = shared.directory
        self._catalog = shared.catalog
        self._room = room
        self._namespace = shared.namespace
        self._counters = shared.counters
        self._segment_bytes = segment_bytes
        self._room_bytes = room_bytes
        self._transfers_max = shared.transfers_max
        self._refresh_s = refresh_s
        self._clock = shared.system.clock
        self._timer = shared.system.timer
        self._finish = shared.finish
        self._run_jobs = shared.system.job_runner()
        self._staging = pages(STAGING_BYTES)
        self._compactor = Compactor(shared)
        self._rates = shared.rates
        worth_a_thread_bytes = shared.system.worth_a_thread_bytes
        self._packer = Packer.wanted(compression, shared.counters, self._rates, self._is_late, worth_a_thread_bytes)
        self._lock = threading.Lock()
        self._queue: deque[Transfer] = deque()
        self._in_flight = 0
        self._queued_bytes = 0
        self._closing = False
        self._open: dict[ActiveSegment, Segment] = {}  # oldest first; new chunks go into the last one
        self._back_off_s = BACK_OFF_S_MIN
        self._retry_at_s = float("-inf")
        self._limit_changed = False
        self._refresh_at_s = self._timer() + refresh_s
        self._worker_pool = shared.system.worker_pool("stowage-disk-write", [self._turn])

    @property
    def in_flight(self) -> int:
        """Transfers that were accepted and not reported yet."""
        return self._in_flight

    def submit(self, transfer: Transfer) -> bool:
        """Queues the transfer, or returns False at once when the queue is full or closed."""
        with self._lock:
            if self._closing or self._in_flight >= self._transfers_max:
                return False
            self._in_flight += 1
            self._queued_bytes += _bytes_of(transfer)
            self._queue.append(transfer)
        self._worker_pool.wake()
        return True

    def _is_late(self) -> bool:
        """Whether too much is queued to wait for packing."""
        return self._queued_bytes > LATE_BYTES

    def expire(self) -> None:
        """Fails queued transfers past their deadline. Cheap when the queue is empty."""
        if self._queue:
            now_s = self._clock()
            self._give_up(lambda transfer: transfer.deadline_s < now_s)

    def close(self, seconds: Callable[[], float]) -> bool:
        """Ends the thread once the queue is empty and the segment sealed. After `seconds()`, fails what has not begun.
        False: the thread hangs."""
        self._closing = True
        self._worker_pool.wake()
        self._worker_pool.join(max(0.0, seconds()))
        self._give_up(lambda _: True)
        return self._worker_pool.join(max(0.05, seconds()))

    def change_limit(self, segment_bytes: int, room_bytes: int) -> None:
        """The directory's limit has changed: the worker reclaims down to it next. Any thread."""
        self._segment_bytes, self._room_bytes = segment_bytes, room_bytes
        self._limit_changed = True
        self._worker_pool.wake()

    def check(self) -> None:
        """Asserts the invariants. Only while nothing is stored."""
        for active in self._open:
            active.check()

    def _give_up(self, is_late: Callable[[Transfer], bool]) -> None:
        with self._lock:
            late = [transfer for transfer in self._queue if is_late(transfer)]
            if late:
                self._queue = deque(transfer for transfer in self._queue if not is_late(transfer))
        for transfer in late:
            self._counters.add("timed_out", len(transfer.keys))
            self._report(transfer, np.zeros(len(transfer.keys), np.bool_), "timed out in the queue")

    def _report(self, transfer: Transfer, ok: NDArray[np.bool_], error: str) -> None:
        self._finish(Outcome(transfer.id, ok, transfer.masks.copy(), error))
        with self._lock:
            self._in_flight -= 1
            self._queued_bytes -= _bytes_of(transfer)

    def _turn(self) -> float | None:
        """One turn of the worker: refresh the catalog when that is due, then write what is queued."""
        with self._lock:
            transfer = self._queue.popleft() if self._queue else None
            done = self._closing and transfer is None
        try:
            if done:
                self._seal()
                self._catalog.refresh()  # so that the last statistics are right
            else:
                if self._limit_changed:
                    self._shrink()
                self._refresh_when_due()
        except OSError:
            self._counters.add("read_errors")
        except Exception:  # noqa: BLE001 - the thread's outermost frame; counted and logged
            self._counters.fault("following the cache directory failed")
        if done:
            self._run_jobs.close()
            return None
        if transfer is not None:
            self._serve(transfer)
        return 0 if self._queue or self._closing else max(0.0, self._refresh_at_s - self._timer())

    def _shrink(self) -> None:
        """Seals the active segment, which may exceed the new limit, and reclaims down to it."""
        self._limit_changed = False
        self._seal()
        self._room.recover(SHRINK_TIMEOUT_S)
        self._catalog.refresh()

    def _refresh_when_due(self, *, writes: bool = False) -> bool:
        """False: not while it `writes`. Raises OSError."""
        started_s = self._timer()
        if started_s < self._refresh_at_s:
            return True
        removed = self._directory.is_removed()
        if removed and writes:
            return False
        try:
            if removed:
                self._reopen_directory()
            self._catalog.refresh()
        finally:
            now_s = self._timer()
            self._refresh_at_s = now_s + max(self._refresh_s, 20 * (now_s - started_s))
        return True

    def _reopen_directory(self) -> None:
        """The directory was removed: close the open segments, whose space no limit counts any more, and open it again.
        Raises OSError if that fails: it is retried at the next refresh.
        """
        self._seal()
        self._directory.renew()
        self._back_off_s, self._retry_at_s = BACK_OFF_S_MIN, float("-inf")

    def _serve(self, first: Transfer) -> None:
        """Writes a transfer, and those that arrive meanwhile, as one stream. Each is reported when it is written."""
        refusal = self._refusal(first)
        if refusal:
            self._report(first, np.zeros(len(first.keys), np.bool_), refusal)
            return
        waiting = [first]
        stream = WriteQueue(lambda: waiting.pop() if waiting else self._next(), self._fits, self._packer)
        error = ""
        try:
            self._store(stream)
        except NoSpace:
            self._counters.add("no_room")
            self._back_off()
            error = "no room within the limit"
        except OSError as failure:
            kind = "enospc" if failure.errno in DISK_FULL else "write_errors"
            self._counters.add(kind, error=str(failure.strerror), directory=str(self._directory.path))
            self._back_off()
            error = f"the disk failed: {failure.strerror}"
        except Exception:  # noqa: BLE001 - the thread's outermost frame; counted and logged
            self._counters.fault("the disk writer failed")
            self._seal()
            error = "the disk writer failed"
        self._count_refused(stream)
        stream.give_up()
        for writing in stream.unfinished:
            self._report(writing.transfer, writing.ok, error)

    def _refusal(self, transfer: Transfer) -> str:
        """Why a transfer fails before it begins; empty: it does not."""
        now_s = self._clock()
        if transfer.deadline_s < now_s:
            self._counters.add("timed_out", len(transfer.keys))
            return "timed out in the queue"
        if now_s < self._retry_at_s:
            self._counters.add("backed_off", len(transfer.keys))
            return "the disk failed lately"
        return ""

    def _next(self) -> Transfer | None:
        """The next queued transfer, for the current stream. None if other work is due first."""
        while not self._limit_changed and self._is_current():
            with self._lock:
                if not self._queue:
                    return None
                transfer = self._queue.popleft()
            refusal = self._refusal(transfer)
            if not refusal:
                return transfer
            self._report(transfer, np.zeros(len(transfer.keys), np.bool_), refusal)
        return None

    def _is_current(self) -> bool:
        """Whether the catalog is up to date, or could be refreshed without a pause in writing."""
        try:
            return self._refresh_when_due(writes=True)
        except OSError:
            self._counters.add("read_errors")
            return False

    def _fits(self, length: int) -> bool:
        """Whether a payload of that length can be stored within the limit."""
        return length <= LENGTH_MAX and segment_bytes_for(length) <= self._room_bytes

    def _back_off(self) -> None:
        self._seal()
        self._retry_at_s = self._clock() + self._back_off_s
        self._back_off_s = min(2 * self._back_off_s, BACK_OFF_S_MAX)

    def _seal(self, keep: int = 0) -> None:
        """Closes the open segments but the last `keep`."""
        for active in list(self._open)[: len(self._open) - keep]:
            self._close(active)

    def _close(self, active: ActiveSegment) -> None:
        """Seals the segment. One that cannot be sealed is scanned by the process that opens it next."""
        known = self._open.pop(active)
        if active.seal():
            self._counters.add("sealed_segments")
        else:
            known.complete, known.end = False, active.end
            self._counters.add("write_errors")

    def _store(self, stream: WriteQueue) -> None:
        """Writes the stream in batches, and reports transfers that are written and indexed. Raises OSError, NoSpace."""
        while ahead := stream.peek(1):
            active = self._make_ready(stream, ahead.payloads[0].nbytes)
            known = self._open[active]
            line = WritePipeline(stream, active, self._rates.writing, partial(self._next_segment, stream), self._close)
            whole: list[Entries] = []
            gathered = 0
            try:
                with closing(line.write(self._run_jobs)) as batches:
                    for active, entries in batches:
                        if self._open[active] is not known:
                            self._add_to_index(known, whole, stream)
                            known, gathered = self._open[active], 0
                        whole.append(entries)
                        gathered += int(entries["length"].sum())
                        many = len(whole) == INDEXED_BATCHES or gathered >= INDEXED_BYTES
                        if many or stream.awaits(sum(map(len, whole))):
                            self._add_to_index(known, whole, stream)
                            gathered = 0
            finally:  # complete batches are on disk, whatever happens to the rest
                self._add_to_index(known, whole, stream)
            self._back_off_s = BACK_OFF_S_MIN
        self._report_finished(stream)

    def _add_to_index(self, known: Segment, whole: list[Entries], stream: WriteQueue) -> None:
        """These batches are written: index them, so that look-ups find their chunks."""
        if whole:
            entries = np.concatenate(whole)
            whole.clear()
            if not self._is_gone(known):
                self._catalog.index_batch(known, entries)
            self._count(entries["length"])
            stream.written(len(entries))
            self._report_finished(stream)

    def _count_refused(self, stream: WriteQueue) -> None:
        """Counts refused chunks; call before their transfers are reported."""
        refused, stream.refused = stream.refused, 0
        if refused:
            self._counters.add("refused", refused)

    def _report_finished(self, stream: WriteQueue) -> None:
        self._count_refused(stream)
        for writing in stream.pop_finished():
            self._report(writing.transfer, writing.ok, "" if writing.ok.all() else "some chunks do not fit")

    def _count(self, lengths: NDArray[np.uint64]) -> None:
        self._counters.add("writes", len(lengths))
        self._counters.add("write_bytes", int(lengths.sum()))

    def _is_gone(self, known: Segment) -> bool:
        """Whether the file was removed by another process."""
        return self._catalog.name_of(known.number) is None

    def _make_ready(self, stream: WriteQueue, length: int) -> ActiveSegment:
        """Seals all open segments but one that has room for a payload of that length. Raises OSError, NoSpace."""
        if self._open:
            active, known = next(reversed(self._open.items()))
            if active.fitting([length]) and not self._is_gone(known):
                return active
        begun = self._begin(stream, length, LOCK_TIMEOUT_S)
        if begun is None:
            self._seal()  # returns unused space, and makes it reclaimable
            begun = self._begin(stream, length, LOCK_TIMEOUT_S)
        if begun is None:
            raise NoSpace
        self._seal(keep=1)
        return begun

    def _next_segment(self, stream: WriteQueue, length: int) -> ActiveSegment | None:
        """A new segment for a payload of that length, beside the one being written. None: retry when that is done."""
        before = set(self._open)
        try:
            return self._begin(stream, length, lock_timeout_s=0)
        except OSError:
            for active in self._open.keys() - before:
                self._close(active)
            return None

    def _begin(self, stream: WriteQueue, length: int, lock_timeout_s: float) -> ActiveSegment | None:
        """Creates a new segment for the stream's next payload, of that length, if there is room. Raises OSError."""
        wanted = max(self._segment_bytes, segment_bytes_for(length))
        created = self._room.create(wanted, self._catalog.complete(), lock_timeout_s)
        if created is None:
            return None
        active = ActiveSegment(created.file, created.name, self._namespace, created.guard, self._staging)
        known = self._catalog.add(created.name, guard=created.guard, complete=True, end=PAGE_BYTES)
        self._open[active] = known
        self._catalog.refresh()
        if created.victim is not None:
            waiting = stream.keys()
            for entries in self._compactor.copy(created.victim, active, known, keep_bytes=length, except_for=waiting):
                self._count(entries["length"])
        return active


def _bytes_of(transfer: Transfer) -> int:
    """An estimate from one chunk: most have the same length, and adding up thousands takes as long as submitting."""
    return len(transfer.buffers) * transfer.buffers[0].nbytes if transfer.buffers else 0
