"""Loads: a bounded queue of transfers, and the reader threads that serve it.

Transfers that wait at the same time and have nearly one deadline are planned together by the first free reader, so that
what is asked for at one time is read in the order of the disk, whatever the order of its chunks; those that come while
others of that deadline are being read are planned anew with what is left of these. Where much of a plan is scattered,
it waits for a moment first: what comes then may lie between. A run is cut off the plan when a reader is free, and a
transfer is finished by whoever reads its last chunks. A run whose deadline has passed is not started. A reader that
hangs in the kernel keeps the transfers of its run unreported (their buffers are in the kernel's hands) while the other
readers go on; what is queued behind expires by `expire`, which needs no reader.

What lies packed is read by a few readers at a time, which go on with the next run at once, and unpacked by the others:
a disk may tell of several reads together, and all who waited for them would unpack at the same time while it idles.
"""

from __future__ import annotations

import math
import threading
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Final

import numpy as np

from stowage.core.staging import Staging, leave_caches
from stowage.storage.disk.bundle import Bundle, Flight, Share
from stowage.storage.disk.read_plan import RUN_BYTES_MAX, Plan, Run, make_plan
from stowage.storage.disk.reader import Fetched, Reader, Result
from stowage.storage.disk.shared import Shared
from stowage.storage.format.segment import PAGE_BYTES
from stowage.storage.protocol import Transfer

__all__ = ["Loader", "patience_s"]

QUIET_S: Final = 0.0015
"""A scattered plan begins when nothing has come for so long. To ask for a thousand chunks takes a millisecond; beside
busy readers, whoever asks for several thousand is not done before much of them has been read piece by piece."""
SCATTERED_BYTES_MIN: Final = 4 << 20
SCATTERED_BYTES_PER_S: Final = 1.4e9
"""What a disk that gives twice that in one piece gives of 64 KiB here and there (docs/benchmarks.md)."""
PATIENCE: Final = 0.25
COUNTED: Final = {
    Result.CORRUPT: "corrupt",
    Result.GONE: "vanished",
    Result.FAILED: "read_errors",
    Result.UNKNOWN: "unknown_codes",
}


def patience_s(scattered_bytes: int) -> float:
    """How long a plan with so many bytes here and there waits at most, whatever comes: a quarter of the time that
    reading these takes.
    """
    return scattered_bytes / SCATTERED_BYTES_PER_S * PATIENCE if scattered_bytes >= SCATTERED_BYTES_MIN else 0.0


Arrival = tuple[list[Share], Run, Fetched, memoryview]
"""A run with packed chunks that was read into that memory."""


class Loader:
    """Any thread may submit. `_queued` waits to be planned, `_planned` has runs that no reader has taken yet, and
    `_arrived` waits to be unpacked.

    A plan waits for others no longer than `patience_s` of the bytes that are scattered in it.
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
        self._queued: deque[Flight] = deque()
        self._newest_s = -math.inf
        self._planning = False
        self._planned: deque[Bundle] = deque()
        self._arrived: deque[Arrival] = deque()
        self._staging = Staging(RUN_BYTES_MAX + PAGE_BYTES)
        self._in_flight = 0
        self._closing = False
        self._readers = readers
        self._patience_s = patience_s
        turns = [partial(self._turn, Reader(shared.directory, shared.namespace)) for _ in range(readers)]
        self._worker_pool = shared.system.worker_pool("stowage-disk-read", turns)

    @property
    def in_flight(self) -> int:
        """Transfers that were taken and not reported yet."""
        return self._in_flight

    @property
    def waiting(self) -> bool:
        """Whether there is something that no reader has begun."""
        return bool(self._queued or self._planned)

    def submit(self, transfer: Transfer) -> bool:
        """Takes the transfer, or returns False at once when the queue is full or closed."""
        count = len(transfer.keys)
        flight = Flight(transfer, np.zeros(count, np.bool_), np.zeros(count, np.uint64))
        with self._lock:
            if self._closing or self._in_flight >= self._transfers_max:
                return False
            self._in_flight += 1
            self._queued.append(flight)
            self._newest_s = self._timer()
            first = len(self._queued) == 1
        if first:  # whoever comes for the first plans those behind it too
            self._worker_pool.wake()
        return True

    def expire(self) -> None:
        """Gives up what is queued past its deadline. Cheap when nothing is."""
        if self.waiting:
            now_s = self._clock()
            self._give_up(lambda deadline_s: deadline_s < now_s)

    def close(self, seconds: Callable[[], float]) -> bool:
        """Ends the threads once the queue is empty; after `seconds()` gives up what has not begun. False: one hangs."""
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
        """Nobody has begun these chunks, and nobody will."""
        assert bundle.plan is not None
        for flight, mine, _ in bundle.share(bundle.plan.rest()[0].tolist()):
            self._expired(flight, len(mine))
            self._settled(flight, len(mine))

    def _expired(self, flight: Flight, chunks: int) -> None:
        self._counters.add("timed_out", chunks)
        with self._lock:
            flight.failures["timed out"] += chunks

    def _turn(self, reader: Reader) -> float | None:
        """A reader's turn: one run that is read, or else unpacked, or the transfers that wait to be planned."""
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
                    helpers = 1  # should this reader hang, somebody else plans them
                run, memory = self._take(bundle)
            elif bundle is None and self._arrived:
                arrival = self._arrived.popleft()
        if helpers:
            self._worker_pool.wake(helpers)
        if arrival is not None:
            self._serve_arrived(reader, *arrival)
        elif bundle is None:
            reader.rest()
            return None if closing else pause_s or math.inf
        elif run is None:
            self._serve_fresh(bundle, fresh)
        else:
            self._serve_run(reader, bundle, run, memory)
        return 0

    def _pause_s(self) -> float:
        """How long the first bundle still waits for others. The lock is held."""
        if not self._planned:
            return 0.0
        return max(0.0, min(self._newest_s + QUIET_S, self._planned[0].limit_s) - self._timer())

    @staticmethod
    def _begin(bundle: Bundle) -> bool:
        """It waits no more. Whether it did: then its readers have to be woken."""
        held = not math.isinf(bundle.limit_s)
        bundle.limit_s = -math.inf
        return held

    def _helpers(self, bundle: Bundle) -> int:
        """How many readers it is worth waking."""
        assert bundle.plan is not None
        return min(self._readers, bundle.plan.runs_about)

    def _may_take(self) -> bool:
        """Whether there is a run, and memory for it. The lock is held."""
        if not self._planned:
            return False
        plan = self._planned[0].plan
        assert plan is not None
        return not plan.is_packed_next or self._staging.may_lend

    def _take(self, bundle: Bundle) -> tuple[Run, memoryview | None]:
        """The next run of the first bundle, and memory for what lies packed. The lock is held."""
        assert bundle.plan is not None
        run = bundle.plan.take(bundle.keys, bundle.buffers)
        if not len(bundle.plan):
            self._planned.popleft()
        nbytes = run.packed_bytes
        return run, self._staging.lend(nbytes) if nbytes else None

    def _waiting_for_a_plan(self) -> tuple[list[Flight], Bundle | None]:
        """Takes the oldest transfer from the queue and those that suit it, with the bundle that they belong to.

        None if that is not their turn: others are being read, or are being planned (whoever does it looks here again
        when it is done). The lock is held.
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

    def _serve_fresh(self, bundle: Bundle, fresh: list[Flight]) -> None:
        """Plans what is new in a bundle that nobody else can see now."""
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
                self._newest_s = self._timer()  # nobody could ask while this was planned, and held Python's lock
                bundle.limit_s = self._newest_s + wait_s if wait_s > 0 else -math.inf
                self._planned.appendleft(bundle)
        if left is not None and wait_s <= 0:
            self._worker_pool.wake(self._helpers(bundle))
        for flight in done:
            self._report(flight)

    def _plan(self, bundle: Bundle, first: int) -> Plan:
        """Where the chunks from flight `first` on lie, in the order of the disk, with what is left of those before.
        What is absent or of another length fails here; the rest is what the flights have left.
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
                reader.rest()  # before anybody hears of it: who does may want the segment's room
        except Exception:  # noqa: BLE001 - the thread's outermost frame; counted and logged
            self._counters.fault("a disk reader failed")
        if memory is None:
            self._serve_fetched(reader, shares, run, fetched)
            return
        with self._lock:
            self._staging.was_read(run.packed_bytes)
            if fetched is None:
                self._staging.give_back(memory, run.packed_bytes)
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
            leave_caches(memory[: run.packed_bytes])
        finally:
            self._rates.unpacking.end(begun, raw_bytes, run.form)
            with self._lock:
                self._staging.give_back(memory, run.packed_bytes)

    def _serve_fetched(self, reader: Reader, shares: list[Share], run: Run, fetched: Fetched | None) -> None:
        """The rest for a run; None: it was not read."""
        try:
            if fetched is not None:
                self._settle(shares, run, reader.finish(fetched))
        except Exception:  # noqa: BLE001 - the thread's outermost frame; counted and logged
            self._counters.fault("a disk reader failed")
        for flight, mine, _ in shares:
            self._settled(flight, len(mine))

    def _settle(self, shares: list[Share], run: Run, results: list[Result]) -> None:
        all_good = results.count(Result.OK) == len(results)
        for flight, mine, indices in shares:
            if all_good:
                flight.ok[indices] = True  # nobody else writes these
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
                # Even where it was only the disk that failed: forgotten, the chunk is written anew by the next store.
                self._index.drop_record(run.keys[at], run.segment, run.offsets[at])
                self._counters.add(COUNTED[result], segment=str(run.name))

    def _settled(self, flight: Flight, chunks: int) -> None:
        """So many chunks of a flight will not be touched any more. Reports it with the last ones."""
        with self._lock:
            flight.chunks_left -= chunks
            done = flight.chunks_left == 0
        if done:
            self._report(flight)

    def _report(self, flight: Flight) -> None:
        flight.masks[~flight.ok] = 0
        self._finish(flight.outcome())
        with self._lock:
            self._in_flight -= 1
