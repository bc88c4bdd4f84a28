"""Loads: a bounded queue of transfers, and the reader threads that serve it.

Transfers that wait at the same time and have one deadline are planned together by the first free reader, so that what
one prompt asks for is read in the order of the disk, whatever the order of its chunks. The plan is cut into runs, and a
transfer is finished by whoever reads the last run that has chunks of it. A run whose deadline has passed is not
started. A reader that hangs in the kernel keeps the transfers of its run unreported (their buffers are in the kernel's
hands) while the other readers go on; what is queued behind expires by `expire`, which needs no reader.
"""

from __future__ import annotations

import math
import threading
from bisect import bisect_right
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from itertools import accumulate, chain
from typing import Final

import numpy as np
from numpy.typing import NDArray

from stowage.tiers.disk.reader import Reader, Result, Run, plan_runs
from stowage.tiers.disk.shared import Shared
from stowage.tiers.protocol import Outcome, Transfer

__all__ = ["Loader"]

COUNTED: Final = {Result.CORRUPT: "corrupt", Result.GONE: "vanished", Result.FAILED: "read_errors"}


@dataclass(slots=True)
class Flight:
    """A transfer under way: `runs_left` runs have not reported yet."""

    transfer: Transfer
    ok: NDArray[np.bool_]
    masks: NDArray[np.uint64]
    runs_left: int = 0
    failures: Counter[str] = field(default_factory=Counter)

    def outcome(self) -> Outcome:
        text = ", ".join(f"{count} of {len(self.ok)} chunks {what}" for what, count in sorted(self.failures.items()))
        return Outcome(self.transfer.id, self.ok, self.masks, text)


@dataclass(slots=True)
class Bundle:
    """Flights of one deadline, planned together. Their chunks are numbered through: `starts[i]` is flight i's first."""

    flights: list[Flight]
    starts: list[int]

    @classmethod
    def of(cls, flights: list[Flight]) -> Bundle:
        return cls(flights, [0, *accumulate(len(flight.ok) for flight in flights[:-1])])

    def share(self, positions: list[int]) -> list[tuple[Flight, list[int], list[int]]]:
        """The flights that have these chunks: for each, which of the positions are its, and where they stand in it."""
        if len(self.flights) == 1:
            return [(self.flights[0], list(range(len(positions))), positions)]
        shares: dict[int, tuple[Flight, list[int], list[int]]] = {}
        for at, position in enumerate(positions):
            number = bisect_right(self.starts, position) - 1
            _, mine, places = shares.setdefault(number, (self.flights[number], [], []))
            mine.append(at)
            places.append(position - self.starts[number])
        return list(shares.values())


class Loader:
    """Any thread may submit."""

    def __init__(self, shared: Shared, *, readers: int) -> None:
        self._catalog = shared.catalog
        self._index = shared.index
        self._counters = shared.counters
        self._transfers_max = shared.transfers_max
        self._clock = shared.system.clock
        self._finish = shared.finish
        self._lock = threading.Lock()
        self._queued: deque[Flight] = deque()
        self._runs: deque[tuple[Bundle, Run]] = deque()
        self._under_way = 0
        self._closing = False
        self._readers = readers
        turns = [partial(self._turn, Reader(shared.directory, shared.namespace)) for _ in range(readers)]
        self._crew = shared.system.crew("stowage-disk-read", turns)

    @property
    def under_way(self) -> int:
        """Transfers that were taken and not reported yet."""
        return self._under_way

    def submit(self, transfer: Transfer) -> bool:
        """Takes the transfer, or returns False at once when the queue is full or closed."""
        count = len(transfer.keys)
        flight = Flight(transfer, np.zeros(count, np.bool_), np.zeros(count, np.uint64))
        with self._lock:
            if self._closing or self._under_way >= self._transfers_max:
                return False
            self._under_way += 1
            self._queued.append(flight)
        self._crew.wake()
        return True

    def expire(self) -> None:
        """Gives up what is queued past its deadline. Cheap when nothing is."""
        if self._queued or self._runs:
            now_s = self._clock()
            self._give_up(lambda flight: flight.transfer.deadline_s < now_s)

    def close(self, seconds: Callable[[], float]) -> bool:
        """Ends the threads once the queue is empty; after `seconds()` gives up what has not begun. False: one hangs."""
        self._closing = True
        self._crew.wake(self._readers)
        self._crew.join(max(0.0, seconds()))
        self._give_up(lambda _: True)
        return self._crew.join(max(0.05, seconds()))

    def _give_up(self, is_late: Callable[[Flight], bool]) -> None:
        with self._lock:
            late = [flight for flight in self._queued if is_late(flight)]
            late_runs = [item for item in self._runs if is_late(item[0].flights[0])]
            if late:
                self._queued = deque(flight for flight in self._queued if not is_late(flight))
            if late_runs:
                self._runs = deque(item for item in self._runs if not is_late(item[0].flights[0]))
        for flight in late:
            self._expired(flight, len(flight.transfer.keys))
            self._report(flight)
        for bundle, run in late_runs:
            self._run_expired(bundle, run)
            self._run_done(bundle, run)

    def _expired(self, flight: Flight, chunks: int) -> None:
        self._counters.add("timed_out", chunks)
        with self._lock:
            flight.failures["timed out"] += chunks

    def _run_expired(self, bundle: Bundle, run: Run) -> None:
        for flight, mine, _ in bundle.share(run.positions):
            self._expired(flight, len(mine))

    def _turn(self, reader: Reader) -> float | None:
        """A reader's turn: one run, or the transfers that wait to be planned."""
        run: Run | None = None
        with self._lock:
            if self._runs:
                bundle, run = self._runs.popleft()
            elif self._queued:
                bundle = self._take()
            else:
                return None if self._closing else math.inf
        try:
            self._serve(reader, bundle, run)
        except Exception:  # noqa: BLE001 - the thread's outermost frame; counted and logged
            self._counters.fault("a disk reader failed")
            self._run_done(bundle, run)
        return 0

    def _take(self) -> Bundle:
        """Takes the oldest transfer from the queue and those with its deadline. The lock is held."""
        deadline_s = self._queued[0].transfer.deadline_s
        bundle = Bundle.of([flight for flight in self._queued if flight.transfer.deadline_s == deadline_s])
        self._queued = deque(flight for flight in self._queued if flight.transfer.deadline_s != deadline_s)
        return bundle

    def _serve(self, reader: Reader, bundle: Bundle, run: Run | None) -> None:
        late = bundle.flights[0].transfer.deadline_s < self._clock()
        if run is None:
            for flight in bundle.flights:
                flight.runs_left = 1  # a planner that fails ends the flight like a failed run
            if late:
                for flight in bundle.flights:
                    self._expired(flight, len(flight.transfer.keys))
                runs = []
            else:
                runs = self._plan(bundle)
            with self._lock:
                for planned in runs:
                    for flight, _, _ in bundle.share(planned.positions):
                        flight.runs_left += 1
                self._runs.extend((bundle, planned) for planned in runs)
            self._crew.wake(len(runs))
        elif late:
            self._run_expired(bundle, run)
        else:
            self._settle(bundle, run, reader.read(run))
        self._run_done(bundle, run)

    def _plan(self, bundle: Bundle) -> list[Run]:
        """Where the chunks lie, in the order of the disk. What is absent or of another length fails here."""
        transfers = [flight.transfer for flight in bundle.flights]
        keys = list(chain.from_iterable(transfer.keys for transfer in transfers))
        buffers = list(chain.from_iterable(transfer.buffers for transfer in transfers))
        found = self._index.find(keys)
        lengths = np.fromiter((buffer.nbytes for buffer in buffers), np.int64, len(buffers))
        other = np.flatnonzero((found.segments >= 0) & (found.lengths != lengths))
        if len(other):
            self._counters.add("mismatched", len(other))
            self._index.drop([keys[at] for at in other.tolist()])
        runs = plan_runs(keys, buffers, found, self._catalog.opened, self._readers)
        planned = np.zeros(len(keys), np.bool_)
        planned[list(chain.from_iterable(run.positions for run in runs))] = True
        for flight, start in zip(bundle.flights, bundle.starts, strict=True):
            mine = slice(start, start + len(flight.ok))
            flight.masks[:] = found.masks[mine]
            absent = len(flight.ok) - int(np.count_nonzero(planned[mine]))
            if absent:
                flight.failures["absent"] = absent
        return runs

    def _settle(self, bundle: Bundle, run: Run, results: list[Result]) -> None:
        good = [at for at, result in enumerate(results) if result is Result.OK]
        for flight, mine, places in bundle.share(run.positions):
            fine = [place for at, place in zip(mine, places, strict=True) if results[at] is Result.OK]
            bad = [results[at].name.lower() for at in mine if results[at] is not Result.OK]
            with self._lock:
                flight.ok[fine] = True
                flight.failures.update(bad)
        self._counters.add("read_calls")
        if good:
            self._counters.add("reads", len(good))
            self._counters.add("read_bytes", sum(run.buffers[at].nbytes for at in good))
            self._index.mark_hits([run.keys[at] for at in good])
        for at, result in enumerate(results):
            if result is not Result.OK:
                # Even where it was only the disk that failed: forgotten, the chunk is written anew by the next store.
                self._index.drop_record(run.keys[at], run.segment, run.offsets[at])
                self._counters.add(COUNTED[result], segment=str(run.name))

    def _run_done(self, bundle: Bundle, run: Run | None) -> None:
        """Reports the flights that have nothing left to wait for. None: the bundle is planned."""
        flights = bundle.flights if run is None else [flight for flight, _, _ in bundle.share(run.positions)]
        finished = []
        with self._lock:
            for flight in flights:
                flight.runs_left -= 1
                if flight.runs_left == 0:
                    finished.append(flight)
        for flight in finished:
            self._report(flight)

    def _report(self, flight: Flight) -> None:
        flight.masks[~flight.ok] = 0
        self._finish(flight.outcome())
        with self._lock:
            self._under_way -= 1
