"""Loads: a bounded queue of transfers, and the reader threads that serve it.

The first free reader plans all queued transfers with similar deadlines together (a bundle), so that they are read in
disk order. Transfers that arrive later with such a deadline are merged into the rest of the plan. If many chunks of a
plan are scattered, it waits a moment first, since chunks in between may be requested next. A reader takes one run of
the plan at a time; the reader of a transfer's last chunks reports it. A run past its deadline is not started. A reader
that hangs in the kernel keeps the transfers of its run unreported (the kernel may still write to their buffers); the
other readers go on, and `expire` fails what is queued, without a reader.

Only a few readers at a time read packed chunks, and go on with the next run at once; the others unpack. Otherwise, when
a disk completes several reads together, all readers would unpack at the same time while the disk idles.
"""

from __future__ import annotations

import math
import threading
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Final

import numpy as np

from stowage.core.geometry import PAGE_BYTES
from stowage.core.read_buffers import ReadBuffers, flush_from_caches
from stowage.storage.disk.bundle import Bundle, LoadFlight, Share
from stowage.storage.disk.read_plan import RUN_BYTES_MAX, Plan, Run, make_plan
from stowage.storage.disk.reader import Fetched, Reader, Result
from stowage.storage.disk.shared import Shared
from stowage.storage.protocol import Transfer

QUIET_S: Final = 0.0015
"""A scattered plan begins when no transfer has arrived for this long. Requesting a thousand chunks takes a millisecond,
more beside busy readers: without the wait, many would be read one by one before the rest is requested."""
SCATTERED_BYTES_MIN: Final = 4 << 20
SCATTERED_BYTES_PER_S: Final = 1.4e9
"""Rate for scattered reads of 64 KiB, on a disk with twice that for sequential ones (docs/benchmarks.md)."""
PATIENCE: Final = 0.25
COUNTED: Final = {
    Result.CORRUPT: "corrupt",
    Result.GONE: "vanished",
    Result.FAILED: "read_errors",
    Result.BUSY: "read_errors",
    Result.UNKNOWN: "unknown_codes",
}


def patience_s(scattered_bytes: int) -> float:
    """How long a plan with this many scattered bytes waits at most: a quarter of the time that reading them takes."""
    return scattered_bytes / SCATTERED_BYTES_PER_S * PATIENCE if scattered_bytes >= SCATTERED_BYTES_MIN else 0.0


Arrival = tuple[list[Share], Run, Fetched, memoryview]
"""A run with packed chunks, and the memory that it was read into."""


class Loader:
    """Any thread may submit. `_queued`: to be planned; `_planned`: runs to be read; `_arrived`: runs to be unpacked.

    A plan waits for other transfers at most `patience_s` of its scattered bytes.
    """

    def __init__(self, shared: Shared, *, readers: int, patience_s: Callable[[int], float]) -> None:
        self._catalog = shared.catalog
        self._index = shared.index
        self._counters = shared.counters
        self._transfers_max = shared.transfers_max
        self._clock = shared.system.clock
        self._timer = shared.system.timer
        self._rates = shared.rates
        self._finish = shared.finish
        self._lock = threading.Lock()
        self._queued: deque[LoadFlight] = deque()
        self._newest_s = -math.inf
        self._planning = False
        self._planned: deque[Bundle] = deque()
        self._arrived: deque[Arrival] = deque()
        self._read_buffers = ReadBuffers(RUN_BYTES_MAX + PAGE_BYTES)
        self._in_flight = 0
        self._closing = False
        self._readers = readers
        self._patience_s = patience_s
        turns = [partial(self._turn, Reader(shared.directory, shared.namespace)) for _ in range(readers)]
        self._worker_pool = shared.system.worker_pool("stowage-disk-read", turns)

    @property
    def in_flight(self) -> int:
        """Transfers that were accepted and not reported yet."""
        return self._in_flight

    @property
    def waiting(self) -> bool:
        """Whether some transfer or run has not been started by a reader."""
        return bool(self._queued or self._planned)

    def submit(self, transfer: Transfer) -> bool:
        """Queues the transfer, or returns False at once when the queue is full or closed."""
        flight = LoadFlight(transfer)
        with self._lock:
            if self._closing or self._in_flight >= self._transfers_max:
                return False
            self._in_flight += 1
            self._queued.append(flight)
            self._newest_s = self._timer()
            first = len(self._queued) == 1
        if first:  # the reader that plans the first transfer plans those behind it, too
            self._worker_pool.wake()
        return True

    def expire(self) -> None:
        """Fails queued transfers past their deadline. Cheap when the queue is empty."""
        if self.waiting:
            now_s = self._clock()
            self._give_up(lambda deadline_s: deadline_s < now_s)

    def close(self, seconds: Callable[[], float]) -> bool:
        """Ends the threads once the queue is empty; after `seconds()`, fails what has not begun. False: one hangs."""
        self._closing = True
        self._worker_pool.wake(self._readers)
        self._worker_pool.join(max(0.0, seconds()))
        self._give_up(lambda _: True)
        return self._worker_pool.join(max(0.05, seconds()))

    def _give_up(self, is_late: Callable[[float], bool]) -> None:
        with self._lock:
            late = [flight for flight in self._queued if is_late(flight.transfer.deadline_s)]
            late_bundles = [bundle for bundle in self._planned if is_late(bundle.deadline_s)]
            if late:
                self._queued = deque(flight for flight in self._queued if not is_late(flight.transfer.deadline_s))
            if late_bundles:
                self._planned = deque(bundle for bundle in self._planned if not is_late(bundle.deadline_s))
        for flight in late:
            self._expired(flight, len(flight.transfer.keys))
            self._report(flight)
        for bundle in late_bundles:
            self._give_up_rest(bundle)

    def _give_up_rest(self, bundle: Bundle) -> None:
        """Fails the chunks of the bundle that no reader has started."""
        assert bundle.plan is not None
        for flight, mine, _ in bundle.share(bundle.plan.rest()[0].tolist()):
            self._expired(flight, len(mine))
            self._chunks_done(flight, len(mine))

    def _expired(self, flight: LoadFlight, chunks: int) -> None:
        self._counters.add("timed_out", chunks)
        with self._lock:
            flight.failures["timed out"] += chunks

    def _turn(self, reader: Reader) -> float | None:
        """One turn of a reader: read a run, or unpack one, or plan queued transfers."""
        helpers = 0
        run = memory = arrival = None
        with self._lock:
            closing = self._closing
            pause_s = 0.0 if closing else self._pause_s()
            fresh, bundle = ([], None) if pause_s > 0 else self._waiting_for_a_plan()
            if pause_s <= 0 and bundle is None and self._may_take():
                bundle = self._planned[0]
                if self._begin(bundle):
                    helpers = self._helpers(bundle)
                elif self._queued:
                    helpers = 1  # if this reader hangs, another one plans them
                run, memory = self._take(bundle)
            elif bundle is None and self._arrived:
                arrival = self._arrived.popleft()
        if helpers:
            self._worker_pool.wake(helpers)
        if arrival is not None:
            self._serve_arrived(reader, *arrival)
        elif bundle is None:
            reader.close_file()
            return None if closing else pause_s or math.inf
        elif run is None:
            self._serve_fresh(bundle, fresh)
        else:
            self._serve_run(reader, bundle, run, memory)
        return 0

    def _pause_s(self) -> float:
        """How long the first bundle still waits for other transfers. The lock is held."""
        if not self._planned:
            return 0.0
        return max(0.0, min(self._newest_s + QUIET_S, self._planned[0].limit_s) - self._timer())

    @staticmethod
    def _begin(bundle: Bundle) -> bool:
        """Ends the bundle's wait. Returns whether it was waiting: then readers must be woken."""
        held = not math.isinf(bundle.limit_s)
        bundle.limit_s = -math.inf
        return held

    def _helpers(self, bundle: Bundle) -> int:
        """How many readers to wake for the bundle."""
        assert bundle.plan is not None
        return min(self._readers, bundle.plan.runs_about)

    def _may_take(self) -> bool:
        """Whether there is a run to read, and memory for it. The lock is held."""
        if not self._planned:
            return False
        plan = self._planned[0].plan
        assert plan is not None
        return not plan.is_packed_next or self._read_buffers.can_acquire

    def _take(self, bundle: Bundle) -> tuple[Run, memoryview | None]:
        """The next run of the bundle, and memory for its packed chunks. The lock is held."""
        assert bundle.plan is not None
        run = bundle.plan.take(bundle.keys, bundle.buffers)
        if not len(bundle.plan):
            self._planned.popleft()
        nbytes = run.packed_bytes
        return run, self._read_buffers.acquire(nbytes) if nbytes else None

    def _waiting_for_a_plan(self) -> tuple[list[LoadFlight], Bundle | None]:
        """Takes the oldest transfer and those with similar deadlines from the queue, with the bundle that they join.

        None while another bundle is being read or planned (its reader looks here again afterwards). The lock is held.
        """
        if not self._queued or self._planning:
            return [], None
        if not self._planned:
            bundle = Bundle(self._queued[0].transfer.deadline_s)
        elif self._planned[0].suits(self._queued[0]):
            bundle = self._planned.popleft()
        else:
            return [], None
        fresh = [flight for flight in self._queued if bundle.suits(flight)]
        self._queued = deque(flight for flight in self._queued if not bundle.suits(flight))
        self._planning = True
        return fresh, bundle

    def _serve_fresh(self, bundle: Bundle, fresh: list[LoadFlight]) -> None:
        """Plans the new transfers of a bundle that no other thread can see now."""
        first = len(bundle.flights)
        bundle.add(fresh)
        plan: Plan | None = None
        try:
            if bundle.deadline_s >= self._clock():
                plan = self._plan(bundle, first)
            else:
                for flight in fresh:
                    self._expired(flight, len(flight.transfer.keys))
        except Exception:  # noqa: BLE001 - the thread's outermost frame; counted and logged
            self._counters.fault("a disk reader failed")
        done = fresh
        if plan is not None:
            bundle.plan = plan
            done = [flight for flight in fresh if not flight.chunks_left]
        left = bundle.plan if bundle.plan is not None and len(bundle.plan) else None
        wait_s = self._patience_s(left.scattered_bytes) if left is not None and first == 0 else 0.0
        with self._lock:
            self._planning = False
            if left is not None:
                # Read anew: planning held Python's lock, so no transfer could be submitted meanwhile.
                self._newest_s = self._timer()
                bundle.limit_s = self._newest_s + wait_s if wait_s > 0 else -math.inf
                self._planned.appendleft(bundle)
        if left is not None and wait_s <= 0:
            self._worker_pool.wake(self._helpers(bundle))
        for flight in done:
            self._report(flight)

    def _plan(self, bundle: Bundle, first: int) -> Plan:
        """A plan, in disk order, of the chunks from flight `first` on and the unread rest of the old plan. Chunks that
        are absent or of another length fail here.
        """
        begin = bundle.starts[first]
        keys, buffers = bundle.keys[begin:], bundle.buffers[begin:]
        found = self._index.find(keys)
        lengths = np.fromiter((buffer.nbytes for buffer in buffers), np.int64, len(buffers))
        as_long = np.where(found.packed, found.lengths < lengths, found.lengths == lengths)
        is_there = (found.segments >= 0) & as_long
        other = np.flatnonzero((found.segments >= 0) & ~is_there)
        if len(other):
            self._counters.add("mismatched", len(other))
            self._index.drop([keys[at] for at in other.tolist()])
        here = np.flatnonzero(is_there)
        plan = make_plan(here + begin, found.part(here), self._catalog.opened, self._readers, bundle.plan)
        planned = np.zeros(len(bundle.keys), np.bool_)
        planned[plan.positions] = True
        for flight, start in zip(bundle.flights[first:], bundle.starts[first:], strict=True):
            flight.masks[:] = found.masks[start - begin : start - begin + len(flight.ok)]
            flight.chunks_left = int(np.count_nonzero(planned[start : start + len(flight.ok)]))
            if flight.chunks_left < len(flight.ok):
                flight.failures["absent"] = len(flight.ok) - flight.chunks_left
        return plan

    def _serve_run(self, reader: Reader, bundle: Bundle, run: Run, memory: memoryview | None) -> None:
        shares = bundle.share(run.positions)
        fetched: Fetched | None = None
        try:
            if bundle.deadline_s < self._clock():
                for flight, mine, _ in shares:
                    self._expired(flight, len(mine))
            else:
                fetched = self._fetch(reader, run, memory)
            if not self.waiting:
                reader.close_file()  # before the report: its receiver may need the segment's space
        except Exception:  # noqa: BLE001 - the thread's outermost frame; counted and logged
            self._counters.fault("a disk reader failed")
        if memory is None:
            self._serve_fetched(reader, shares, run, fetched)
            return
        with self._lock:
            self._read_buffers.read_done(run.packed_bytes)
            if fetched is None:
                self._read_buffers.release(memory, run.packed_bytes)
            else:
                self._arrived.append((shares, run, fetched, memory))
            goes_on = bool(self._planned)
        if fetched is None:
            self._serve_fetched(reader, shares, run, fetched)
        elif goes_on:
            self._worker_pool.wake()

    def _fetch(self, reader: Reader, run: Run, memory: memoryview | None) -> Fetched:
        nbytes = sum(run.lengths)
        begun = self._rates.reading.begin(nbytes)
        try:
            return reader.fetch(run, memory)
        finally:
            self._rates.reading.end(begun, nbytes, run.form)

    def _serve_arrived(
        self, reader: Reader, shares: list[Share], run: Run, fetched: Fetched, memory: memoryview
    ) -> None:
        raw_bytes = sum([buffer.nbytes for buffer in run.buffers])
        begun = self._rates.unpacking.begin(raw_bytes)
        try:
            self._serve_fetched(reader, shares, run, fetched)
            flush_from_caches(memory[: run.packed_bytes])
        finally:
            self._rates.unpacking.end(begun, raw_bytes, run.form)
            with self._lock:
                self._read_buffers.release(memory, run.packed_bytes)

    def _serve_fetched(self, reader: Reader, shares: list[Share], run: Run, fetched: Fetched | None) -> None:
        """Verifies and unpacks a run that was read, and records its results; None: it was not read."""
        try:
            if fetched is not None:
                self._record_results(shares, run, reader.finish(fetched))
        except Exception:  # noqa: BLE001 - the thread's outermost frame; counted and logged
            self._counters.fault("a disk reader failed")
        for flight, mine, _ in shares:
            self._chunks_done(flight, len(mine))

    def _record_results(self, shares: list[Share], run: Run, results: list[Result]) -> None:
        all_good = results.count(Result.OK) == len(results)
        for flight, mine, indices in shares:
            if all_good:
                flight.ok[indices] = True  # no other thread writes these
                continue
            fine = [index for at, index in zip(mine, indices, strict=True) if results[at] is Result.OK]
            bad = [results[at].name.lower() for at in mine if results[at] is not Result.OK]
            flight.ok[fine] = True
            with self._lock:
                flight.failures.update(bad)
        good = range(len(run)) if all_good else [at for at, result in enumerate(results) if result is Result.OK]
        self._counters.add("read_calls", len(run.bounds) - 1)
        if good:
            self._counters.add("reads", len(good))
            self._counters.add("read_bytes", sum([run.lengths[at] for at in good]))
            self._index.mark_hits(run.keys if all_good else [run.keys[at] for at in good])
        if all_good:
            return
        for at, result in enumerate(results):
            if result is not Result.OK:
                if result is not Result.BUSY:
                    # Even if only the disk failed: once forgotten, the chunk is written again by the next store.
                    self._index.drop_record(run.keys[at], run.segment, run.offsets[at])
                self._counters.add(COUNTED[result], segment=str(run.name))

    def _chunks_done(self, flight: LoadFlight, chunks: int) -> None:
        """This many chunks of a flight are finished; reports it with the last ones."""
        with self._lock:
            flight.chunks_left -= chunks
            done = flight.chunks_left == 0
        if done:
            self._report(flight)

    def _report(self, flight: LoadFlight) -> None:
        flight.masks[~flight.ok] = 0
        self._finish(flight.outcome())
        with self._lock:
            self._in_flight -= 1
