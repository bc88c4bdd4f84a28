"""The catalog of known segments, and the refresh that follows other processes writing to the same directory.

Only the tier's writer changes it (the lock is for `check`); other threads look up numbers. A number is never reused, so
a row of the index can never refer to another file.

Invariants (`check`): names and numbers are in bijection; the index holds rows of known segments only.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass
from functools import partial
from itertools import count

from stowage.core.geometry import PAGE_BYTES
from stowage.errors import FormatError
from stowage.native.memory import pages
from stowage.storage.disk.counters import Counters
from stowage.storage.disk.directory import Directory
from stowage.storage.disk.index import ROWS_AT_ONCE, Columns, Index
from stowage.storage.disk.recovery import SegmentScan, State, is_sealed, scan_batches, scan_segment
from stowage.storage.format import segment
from stowage.storage.format.protection import Guard, Protection
from stowage.storage.format.segment import SegmentHeader, SegmentName


@dataclass(slots=True)
class Segment:
    """A segment. `end`: how far it was scanned; `complete`: nothing more will be added.

    `guard`: seals and opens its chunks. None: they cannot be used here (another namespace, another protection, or an
    unknown key), and are not in the index.
    """

    number: int
    name: SegmentName
    guard: Guard | None
    end: int
    complete: bool


@dataclass(frozen=True, slots=True)
class _Seen:
    """The scan of a segment: for each batch the usable chunks, and the number of others. `found` has no batches."""

    found: SegmentScan
    columns: list[tuple[Columns, int]]


class _Memory(threading.local):
    """A buffer for footers, reused in each thread: touching new pages is slow."""

    def __init__(self) -> None:
        self._pages = pages(PAGE_BYTES)

    def __call__(self, length: int) -> memoryview:
        if length > self._pages.nbytes:
            self._pages = pages(length)
        return self._pages[:length]


class Catalog:
    """Known segments by name and by number."""

    def __init__(
        self, directory: Directory, index: Index, namespace: bytes, protection: Protection, counters: Counters
    ) -> None:
        self._directory = directory
        self._ahead = directory.system.ahead
        self._index = index
        self._namespace = namespace
        self._protection = protection
        self._counters = counters
        self._numbers = count()
        self._by_name: dict[SegmentName, Segment] = {}
        self._by_number: dict[int, Segment] = {}
        self._damaged: set[SegmentName] = set()
        self._lock = threading.RLock()
        self.bytes_used = 0
        self.ignored = 0

    def __len__(self) -> int:
        return len(self._by_name)

    def name_of(self, number: int) -> SegmentName | None:
        """None if the segment is gone."""
        known = self._by_number.get(number)
        return known.name if known else None

    def opened(self, number: int) -> tuple[SegmentName, Guard] | None:
        """Name and guard of a segment with chunks in the index. None if it is gone."""
        known = self._by_number.get(number)
        return (known.name, known.guard) if known and known.guard else None

    def number_of(self, name: SegmentName) -> int | None:
        known = self._by_name.get(name)
        return known.number if known else None

    def complete(self) -> set[SegmentName]:
        """Segments that are not known to need repair."""
        return {name for name, known in self._by_name.items() if known.complete}

    def add(self, name: SegmentName, *, guard: Guard | None, complete: bool, end: int) -> Segment:
        """Adds a segment that was found or created."""
        with self._lock:
            known = Segment(next(self._numbers), name, guard, end, complete)
            self._by_number[known.number] = known
            self._by_name[name] = known
            return known

    def index_batch(self, known: Segment, entries: segment.Entries, copied_from: int = -1) -> None:
        """Indexes chunks of our namespace that were written to a segment. `copied_from`: see `Index.insert`."""
        self._index_columns(known, *self._columns(entries), copied_from=copied_from)

    def _columns(self, entries: segment.Entries) -> tuple[Columns, int]:
        """The usable chunks, and the number of others. Any thread."""
        voided = entries["mask"] == 0  # a scrub empties the entries of what it removes
        if voided.any():
            entries = entries[~voided]
        ours = segment.fitting(entries, self._namespace, self._protection.method)
        return Columns.of(ours), len(entries) - len(ours)

    def _index_columns(
        self, known: Segment, columns: Columns, others: int, rows_at_once: int = ROWS_AT_ONCE, copied_from: int = -1
    ) -> None:
        if others:  # no writer puts such envelopes into a segment of this namespace and method
            self._counters.add("corrupt", others, segment=str(known.name))
        self._index.insert(known.number, columns, rows_at_once, copied_from)

    def forget(self, name: SegmentName) -> None:
        """Removes a segment that is gone, and its chunks."""
        with self._lock:
            known = self._by_name.pop(name, None)
            if known is not None:
                del self._by_number[known.number]
                self._counters.add("evicted", self._index.drop_segment(known.number))

    def readable(self) -> set[SegmentName]:
        """Segments whose footers were read: these need no repair. Others may be complete for us, and torn."""
        return {name for name, known in self._by_name.items() if known.complete and known.guard is not None}

    def refresh(self, rows_at_once: int = ROWS_AT_ONCE, *, to_first_torn: bool = False) -> None:
        """Finds new segments and new batches of live ones, drops what has vanished. Raises OSError.

        `rows_at_once`: see `Index.insert`; many while the index is not in use yet. `to_first_torn`: stop at the first
        torn segment. Later ones must wait, because the newest record of a key has to be indexed last.
        """
        entries = self._directory.entries()
        names = {entry.name for entry in entries if entry.name}
        self.bytes_used = sum(entry.bytes for entry in entries)
        self.ignored = max(0, len(entries) - len(names) - 2)  # without the directory itself and its lock
        for gone in [name for name in self._by_name if name not in names]:
            self.forget(gone)
        self._damaged &= names
        due = [(name, self._by_name.get(name)) for name in (entry.name for entry in entries) if name is not None]
        due = [(name, known) for name, known in due if known is None or not known.complete]
        look = partial(self._look, _Memory())
        for (name, known), seen in zip(due, self._ahead(look, due), strict=True):
            if to_first_torn and not (isinstance(seen, _Seen) and seen.found.state is State.SEALED):
                return
            if isinstance(seen, FileNotFoundError):
                self.forget(name)
            elif isinstance(seen, Exception):
                self._counters.add("read_errors", segment=str(name))
            else:
                self._take(name, known, seen, rows_at_once)

    def _look(
        self, memory: _Memory, segment_known: tuple[SegmentName, Segment | None]
    ) -> _Seen | OSError | FormatError:
        """Scans a new segment, or what was added to a live one. Any thread; changes nothing."""
        name, known = segment_known
        try:
            with self._directory.open_segment(name) as file:
                if known is None:
                    found = scan_segment(file, name, self._directory.limit_bytes, partial(self._guard, name), memory)
                else:
                    # Asked before scanning: nothing is missed.
                    state = State.SEALED if is_sealed(file, name) else State.OPEN
                    found = scan_batches(file, name, SegmentScan(state, end=known.end))
            columns = [self._columns(entries) for entries in found.batches]
            found.batches.clear()
            return _Seen(found, columns)
        except (OSError, FormatError) as error:
            return error

    def _take(self, name: SegmentName, known: Segment | None, seen: _Seen, rows_at_once: int) -> None:
        """Indexes the scan of a segment."""
        found = seen.found
        if found.state is State.EMPTY:
            return  # in the making
        if found.state is State.UNUSABLE:
            if name not in self._damaged:
                self._damaged.add(name)
                self._counters.add("damaged_segments", segment=str(name))
            return
        if found.damaged:
            self._counters.add("damaged_segments", segment=str(name))
        if known is None:
            guard = self._guard(name, found.header)
            if guard is None and found.header.namespace == self._namespace:
                self._counters.add("unreadable_segments", segment=str(name))
            known = self.add(name, guard=guard, complete=False, end=found.end)
        if known.guard is not None:
            for columns, others in seen.columns:
                self._index_columns(known, columns, others, rows_at_once)
        known.end = found.end
        known.complete = found.state is State.SEALED

    def _guard(self, name: SegmentName, header: SegmentHeader) -> Guard | None:
        """The guard of a segment; None: its chunks cannot be used here."""
        return self._protection.guard(name.id, header.mark) if header.namespace == self._namespace else None

    def check(self) -> None:
        """Asserts the invariants."""
        with self._lock:
            assert len(self._by_name) == len(self._by_number), "a segment with two numbers"
            for number, known in self._by_number.items():
                assert known.number == number and self._by_name[known.name] is known, "a segment under a foreign number"
            self._index.check()
            assert self._index.segments() <= self._by_number.keys(), "chunks of an unknown segment"
            unguarded = {number for number, known in self._by_number.items() if known.guard is None}
            assert not self._index.segments() & unguarded, "chunks of a segment that is not to be read"
