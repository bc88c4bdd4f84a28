"""Room in the directory: makes new segments within the limit, reclaims the oldest, repairs what killed writers left.

All of it happens under the directory's lock, so that any number of processes keep one limit. A segment is made at its
full length, and only after the sum of everything in the directory leaves room for it: nothing grows later.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Set
from dataclasses import dataclass
from functools import partial
from typing import Final, TypeVar

from stowage.config.disk_room import DISK_FULL
from stowage.config.memory import format_size
from stowage.core.geometry import PAGE_BYTES
from stowage.errors import FormatError
from stowage.storage.disk.counters import Counters
from stowage.storage.disk.directory import Directory, Entry, SegmentFile
from stowage.storage.disk.files import in_pages
from stowage.storage.disk.recovery import State, is_sealed, repair
from stowage.storage.format import segment
from stowage.storage.format.protection import Guard, Mark, Protection
from stowage.storage.format.segment import SegmentName, pack_segment_header

T = TypeVar("T")

LOCK_TIMEOUT_S: Final = 2.0
SEQUENCE_MAX: Final = (1 << 63) - 1


def metadata_bytes(segment_bytes: int) -> int:
    """What a segment leaves free for blocks that the file system adds (extent trees: below 1/340 at the very worst)."""
    return max(16 << 10, segment_bytes // 256 // PAGE_BYTES * PAGE_BYTES)


def segment_bytes_for(chunk_bytes: int) -> int:
    """The least that a segment with one such chunk takes on disk."""
    length = PAGE_BYTES + segment.batch_bytes([chunk_bytes]) + segment.footer_room(1)
    total = length + metadata_bytes(length)
    while total - metadata_bytes(total) < length:
        total += PAGE_BYTES
    return total


@dataclass(frozen=True, slots=True)
class Created:
    """A new segment, locked by its file. `victim`: the one that has to go when the next is made, if any."""

    file: SegmentFile
    name: SegmentName
    guard: Guard
    victim: SegmentName | None


class SegmentAllocator:
    """Not for several threads at once (the tier's writer owns it)."""

    def __init__(self, directory: Directory, namespace: bytes, protection: Protection, counters: Counters) -> None:
        self._directory = directory
        self._namespace = namespace
        self._protection = protection
        self._counters = counters

    def recover(self, timeout_s: float, sealed: Set[SegmentName] = frozenset()) -> None:
        """Repairs what killed writers left; shrinks to the limit if that was lowered. Raises OSError.

        `sealed` are segments that need no repair.
        """
        with self._directory.locked(timeout_s) as held:
            if held:
                self._repair(self._directory.entries(), sealed)
                entries = self._directory.entries()
                self._reclaim(entries, _sum(entries) - self._directory.limit_bytes, partly=True)

    def create(self, segment_bytes: int, sealed: Set[SegmentName], timeout_s: float) -> Created | None:
        """A new segment that takes at most `segment_bytes`, or None if there is no room for it within the limit, or
        somebody has the directory's lock for longer than `timeout_s`.

        `sealed` are segments that need no repair. Raises OSError (a full disk only after old segments went in vain).
        """
        directory = self._directory
        with directory.locked(timeout_s) as held:
            if not held:
                return None
            self._repair(directory.entries(), sealed)
            entries = directory.entries()
            excess = _sum(entries) + segment_bytes - directory.limit_bytes
            if not self._reclaim(entries, excess):
                return None
            entries = directory.entries()
            sequence = max((entry.name.sequence for entry in entries if entry.name), default=0)
            name = SegmentName(min(sequence + 1, SEQUENCE_MAX), directory.system.random_bytes(8))
            mark = self._protection.new_mark(directory.system.random_bytes)
            guard = self._protection.guard(name.id, mark)
            assert guard is not None, "what we mark, we can read"
            file = self._make(name, segment_bytes, mark)
            try:
                return Created(file, name, guard, self._next_victim(segment_bytes))
            except OSError:
                self._discard(file, name)  # nobody else would ever give it back: it is locked as long as we live
                raise

    def _make(self, name: SegmentName, segment_bytes: int, mark: Mark) -> SegmentFile:
        """Makes the file at its full length. A full disk, also of files, costs the oldest segments first."""
        length = segment_bytes - metadata_bytes(segment_bytes)
        file = self._on_full_disk(partial(self._directory.create_segment, name))
        try:
            self._on_full_disk(partial(self._allocate, file, length), length)
            file.write([in_pages(pack_segment_header(name, length, self._namespace, mark))], 0)
        except BaseException:
            self._discard(file, name)
            raise
        return file

    def _on_full_disk(self, make: Callable[[], T], needed_bytes: int = 0) -> T:
        """What `make` returns; while the disk is full for it, the oldest segment goes. Raises OSError."""
        while True:
            try:
                return make()
            except OSError as error:
                if error.errno not in DISK_FULL:
                    raise
                needed = format_size(needed_bytes) if needed_bytes else "one more file"
                self._counters.add("enospc", directory=str(self._directory.path), needed=needed)
                if not self._reclaim(self._directory.entries(), 1):
                    raise

    @staticmethod
    def _allocate(file: SegmentFile, length: int) -> None:
        try:
            file.allocate(length)
        except OSError:
            file.truncate(0)  # some of it may have been given
            raise

    def _discard(self, file: SegmentFile, name: SegmentName) -> None:
        """Takes back a file that could not be made."""
        try:
            file.truncate(0)
            self._directory.unlink(name)
        except OSError:
            self._counters.add("write_errors")
        finally:
            file.close()

    def _reclaim(self, entries: list[Entry], excess: int, *, partly: bool = False) -> bool:
        """Removes the oldest idle segments until `excess` bytes are free. Unless `partly`: that many, or none."""
        chosen: list[Entry] = []
        for entry in self._idle(entries) if excess > 0 else ():
            if excess <= sum(victim.bytes for victim in chosen):
                break
            chosen.append(entry)
        enough = excess <= sum(victim.bytes for victim in chosen)
        if enough or partly:
            for victim in chosen:
                assert victim.name is not None
                if not self._directory.remove_segment(victim.name):
                    return False
                self._counters.add("reclaimed_segments", segment=str(victim.name))
        return enough

    def _idle(self, entries: list[Entry]) -> Iterator[Entry]:
        """The segments that no live writer holds, oldest first."""
        for entry in entries:
            if entry.name is None:
                continue
            try:
                with self._directory.open_segment(entry.name) as file:
                    idle = file.lock()
            except (OSError, FormatError):
                continue
            if idle:
                yield entry

    def _repair(self, entries: list[Entry], sealed: Set[SegmentName]) -> None:
        """Seals torn segments without a live writer, and removes what is empty."""
        unsure = [entry.name for entry in entries if entry.name is not None and entry.name not in sealed]
        for _ in self._directory.system.ahead(self._repair_if_possible, unsure):
            pass

    def _repair_if_possible(self, name: SegmentName) -> None:
        """Any thread, each segment by one."""
        try:
            self._repair_one(name)
        except (OSError, FormatError):
            self._counters.add("read_errors", segment=str(name))

    def _repair_one(self, name: SegmentName) -> None:
        with self._directory.open_segment(name, writable=True) as file:
            if not file.lock() or is_sealed(file, name):
                return
            state = repair(file, name, self._directory.limit_bytes)
            if state is State.EMPTY:
                file.truncate(0)
                self._directory.unlink(name)
                self._counters.add("removed_leftovers", segment=str(name))
            elif state is State.SEALED:
                self._counters.add("repaired_segments", segment=str(name))

    def _next_victim(self, segment_bytes: int) -> SegmentName | None:
        entries = self._directory.entries()
        if _sum(entries) + segment_bytes <= self._directory.limit_bytes:
            return None
        return next((entry.name for entry in self._idle(entries)), None)


def _sum(entries: list[Entry]) -> int:
    return sum(entry.bytes for entry in entries)
