"""The host memory of other engines on this machine, as a tier that is read and never written.

    their arena --pread--> slot of ours          their table (storage.host_table) says where, and whether it stayed so

Owns nothing that outlives a transfer: a neighbour's memory is opened for as long as a copy takes, and its part of the
node's budget is held meanwhile, so one that is killed leaves nothing, and its memory is free at once. No lock is taken
that another engine waits for. A chunk is what the neighbour had under that key, whole, or it does not come.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np
from numpy.typing import NDArray

from stowage.log import Trouble
from stowage.storage.counters import TierCounters
from stowage.storage.flight import Flight
from stowage.storage.host_table import Layout, Reader, Snapshot, read_changes, read_header
from stowage.storage.lease import Lease, Published, hold, published
from stowage.storage.protocol import TRANSFERS_MAX, Inquiry, Probe, Reporter, Transfer

READERS_MAX: Final = 4


@dataclass(frozen=True)
class _Known:
    """A neighbour's table, as it was read last."""

    published: Published
    layout: Layout
    snapshot: Snapshot


class NeighbourTier(Reporter):
    """Implements Tier, Waitable, Probing, Described and ReadOnly (stowage.storage.protocol). ``lease``: this engine's
    part of the budget; the neighbours are those with another part of it.
    """

    read_only = True

    def __init__(self, lease: Lease, *, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__()
        self.name = "neighbours"
        self._lease = lease
        self._clock = clock
        self._known: dict[Path, _Known] = {}
        self._under_way = 0
        self._turn = threading.Lock()
        self._closed = False
        self._counters = TierCounters(
            ("reads", "read_bytes", "vanished", "dropped", "timed_out", "faults"), {}, Trouble("stowage.neighbours")
        )
        self._looks = ThreadPoolExecutor(1, "stowage-neighbours-look")
        self._loads = ThreadPoolExecutor(READERS_MAX, "stowage-neighbours-load")

    # What they have

    def lookup(self, keys: list[bytes]) -> NDArray[np.uint64]:
        """The valid-block mask of each key, 0 where absent, as of the last probe."""
        masks = [one.snapshot.masks for one in list(self._known.values())]
        found = np.zeros(len(keys), np.uint64)
        for held in masks:
            found |= np.where(found == 0, np.fromiter((held.get(key, 0) for key in keys), np.uint64, len(keys)), 0)
        return found

    def probe(self, inquiries: list[Inquiry]) -> Probe:
        """Read the neighbours' tables anew, where they have changed."""
        probe = Probe()
        if self._closed:
            probe.done = True
        else:
            self._looks.submit(self._look, probe)
        return probe

    def _look(self, probe: Probe) -> None:
        try:
            known: dict[Path, _Known] = {}
            for one in published(self._lease.path.parent):
                if one.part != self._lease.path and (found := self._read(one)) is not None:
                    known[one.part] = found
            self._known = known
        except Exception:  # noqa: BLE001 - the thread's outermost frame; counted and logged
            self._counters.fault("neighbours could not be looked at")
        probe.done = True
        self.wake()

    def _read(self, one: Published) -> _Known | None:
        try:
            file = os.open(one.table, os.O_RDONLY | os.O_CLOEXEC)
        except OSError:
            return None  # it has ended
        try:
            before = self._known.get(one.part)
            if before is not None and before.published == one and before.snapshot.changes == read_changes(file):
                return before
            layout = read_header(file, one.name)
            return None if layout is None else _Known(one, layout, Snapshot(file, layout))
        finally:
            os.close(file)

    # Loads

    def load(self, transfer: Transfer) -> None:
        """Copies the chunks into their buffers."""
        with self._turn:
            taken = not self._closed and self._under_way < TRANSFERS_MAX
            self._under_way += taken
        if taken:
            self._loads.submit(self._run, transfer)
        else:
            self._counters.add("dropped", len(transfer.keys))
            self._report(Flight(transfer).dropped())

    def store(self, transfer: Transfer) -> None:
        """Never: neighbours compute for themselves."""
        flight = Flight(transfer)
        flight.masks[:] = transfer.masks
        self._finish(flight)

    def _run(self, transfer: Transfer) -> None:
        flight = Flight(transfer)
        try:
            if self._closed or self._clock() > transfer.deadline_s:
                self._counters.add("timed_out", len(transfer.keys))
            else:
                for known in list(self._known.values()):
                    slots = known.snapshot.slots
                    mine = [at for at, key in enumerate(transfer.keys) if not flight.ok[at] and key in slots]
                    if mine:
                        self._copy(known, flight, mine)
                self._counters.add("vanished", flight.unsettled)
        except Exception:  # noqa: BLE001 - the thread's outermost frame; counted and logged
            self._counters.fault("a transfer failed")
        with self._turn:
            self._under_way -= 1
        self._finish(flight)

    def _copy(self, known: _Known, flight: Flight, mine: list[int]) -> None:
        """Of one neighbour, what it still has. Its part of the budget is taken as long as its memory is open here."""
        transfer, files = flight.transfer, list[int]()
        try:
            files.append(hold(str(known.published.part)))
            files.append(os.open(known.published.table, os.O_RDONLY | os.O_CLOEXEC))
            files.append(os.open(known.published.arena, os.O_RDONLY | os.O_CLOEXEC))
            _, table, arena = files
            if read_header(table, known.published.name) != known.layout:
                return
            reader = Reader(table, known.layout)
            for at in mine:
                slot, buffer = known.snapshot.slots[transfer.keys[at]], transfer.buffers[at]
                found = reader.begin(slot, transfer.keys[at])
                if found is None or not _fill(arena, buffer, found[2]) or not reader.confirm(slot, found[0]):
                    continue
                flight.ok[at], flight.masks[at] = True, found[1]
                self._counters.add("reads")
                self._counters.add("read_bytes", buffer.nbytes)
        except OSError:
            return  # it has ended
        finally:
            for file in files:
                os.close(file)

    def _finish(self, flight: Flight) -> None:
        """What did not come says nothing of this tier: it was evicted there, or the neighbour has ended."""
        if flight.unsettled:
            flight.failures["not there any more"] = flight.unsettled
        flight.refused = True
        self._report(flight.outcome())

    def discard(self, keys: list[bytes]) -> None:
        """Nothing: they are the neighbours'."""

    def stats(self) -> dict[str, int | float | str]:
        """Counters since opening (chunks, unless their name says otherwise) and gauges."""
        chunks = sum(len(one.snapshot.masks) for one in list(self._known.values()))
        return {"chunks": chunks, "loads_under_way": self._under_way, **self._counters.snapshot()}

    def close(self, deadline_s: float) -> None:
        """Gives up what has not begun."""
        with self._turn:
            self._closed = True
        self._looks.shutdown()
        self._loads.shutdown()


def _fill(file: int, buffer: memoryview, offset: int) -> bool:
    """Whether so many bytes are there."""
    filled = 0
    while filled < buffer.nbytes:
        count = os.preadv(file, [buffer[filled:]], offset + filled)
        if not count:
            return False
        filled += count
    return True
