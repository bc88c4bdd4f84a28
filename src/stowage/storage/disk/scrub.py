"""Reads every chunk in a cache directory, verifies it, and removes what does not verify. Safe while engines run on it.

A bad chunk is removed where it lies: its entry goes from the segment's footer, and from the page of its batch (so that
a scan does not find it either). No payload is moved, nothing grows, and no key is needed to keep what is good. The
bytes themselves go when their segment's turn comes; a segment without a good chunk goes at once.

Who is killed in between leaves either the old footer or pages that are all written: the next opener finds every good
chunk, and maybe some of the bad ones, which no reader takes. A segment that a live writer holds is checked and left
alone. Engines that know a removed chunk find that it does not verify, as before.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import numpy as np
from numpy.typing import NDArray

from stowage.core.geometry import PAGE_BYTES, round_up
from stowage.errors import DirectoryError, FormatError
from stowage.native.memory import pages
from stowage.storage.disk.directory import Directory, Entry, SegmentFile
from stowage.storage.disk.files import in_pages
from stowage.storage.disk.inspector import FILE_BYTES_MAX, Inspector, open_existing
from stowage.storage.disk.read_plan import RUN_BYTES_MAX
from stowage.storage.disk.reader import Result
from stowage.storage.disk.recovery import SegmentScan, State, scan_segment, seal
from stowage.storage.disk.system import System
from stowage.storage.format import segment
from stowage.storage.format.envelope import HEADER_BYTES
from stowage.storage.format.protection import SecretKey
from stowage.storage.format.segment import ENTRY_BYTES, Entries, SegmentName

LOCK_TIMEOUT_S: Final = 10.0
LISTED_MAX: Final = 1000
MEDIUM: Final = frozenset({errno.EIO, errno.EBADMSG, errno.EUCLEAN, errno.ENODATA, errno.EREMOTEIO})
"""Errors that say: this offset of the disk cannot be read. Others say that something else is wrong."""


@dataclass(frozen=True, slots=True)
class BadChunk:
    """A chunk that cannot be used, by its offset. `unreadable`: the disk refused it; else its bytes are wrong."""

    segment: str
    offset: int
    length: int
    unreadable: bool


@dataclass(slots=True)
class Report:
    """What was found, and what became of it. Chunks unless the name says segments.

    `bad` = `removed` + `vanished` (reclaimed meanwhile, or good when read again) + `left` (a writer holds the segment,
    or it could not be changed; all of them with `check`). `unchecked`: under a key that was not given, or longer than
    1 GiB. `torn_segments`: left by a killed writer, finished unless `check`. `damaged_segments`: none of their chunks
    can be found by anyone; removed unless `check` or held. `other_segments`: of another version, left alone.
    """

    segments: int = 0
    chunks: int = 0
    bytes: int = 0
    good: int = 0
    bad: int = 0
    unreadable: int = 0
    removed: int = 0
    vanished: int = 0
    left: int = 0
    unchecked: int = 0
    segments_in_use: int = 0
    segments_without_key: int = 0
    torn_segments: int = 0
    damaged_segments: int = 0
    damaged_segments_left: int = 0
    other_segments: int = 0
    empty_segments: int = 0
    removed_segments: int = 0
    errors: list[str] = field(default_factory=list)
    listed: list[BadChunk] = field(default_factory=list)
    """The bad chunks, the first thousand of them."""

    @property
    def open_cases(self) -> int:
        """Bad chunks whose end is not known yet."""
        return self.bad - self.removed - self.vanished - self.left

    @property
    def is_clean(self) -> bool:
        """Whether nothing bad is in the directory any more."""
        return not (self.left or self.damaged_segments_left or self.errors)


def scrub(
    path: Path,
    *,
    check: bool = False,
    secrets: Sequence[SecretKey] = (),
    bytes_per_s_max: float = float("inf"),
    progress: Callable[[int, int], None] = lambda done, total: None,
    system: System | None = None,
) -> Report:
    """Verifies every chunk in the directory, and removes the bad ones; with `check` it changes nothing.

    `secrets`: for segments under a key. `progress` is told the bytes of segments that are done, and of all. A read that
    fails ends nothing. Raises DirectoryError for a directory that holds no cache, or cannot be listed or trusted.
    """
    directory = open_existing(path, system or System(), direct=True)
    try:
        entries = [entry for entry in directory.entries() if entry.name is not None]
        return _Scrub(directory, Inspector(directory, secrets, bytes_per_s_max), check).run(entries, progress)
    except OSError as error:
        raise DirectoryError(f"Cannot list {path} ({error.strerror}). Check the disk.") from error
    finally:
        directory.close()


class _Scrub:
    """One pass over a directory."""

    def __init__(self, directory: Directory, inspector: Inspector, check: bool) -> None:
        self.report = Report()
        self._directory = directory
        self._inspector = inspector
        self._check = check

    def run(self, entries: list[Entry], progress: Callable[[int, int], None]) -> Report:
        report = self.report
        total, done = sum(entry.bytes for entry in entries), 0
        progress(0, total)
        for entry in entries:
            assert entry.name is not None
            try:
                self._segment(entry.name)
            except FileNotFoundError:  # reclaimed meanwhile by whoever writes
                report.vanished += report.open_cases
            except (OSError, FormatError) as error:
                text = error.strerror if isinstance(error, OSError) else str(error)
                report.errors.append(f"{entry.name}: {text}")
            report.left += report.open_cases
            done += entry.bytes
            progress(done, total)
        return report

    # One segment

    def _segment(self, name: SegmentName) -> None:
        with self._directory.open_segment(name) as file:
            found = _scan(file, name)
            if found.state is State.UNUSABLE and self._is_other_version(file):
                self.report.other_segments += 1
                return
        self.report.segments += 1
        in_use = False
        if found.state is not State.SEALED:
            found, in_use = self._finish_or_remove(name, found)
            self.report.segments_in_use += in_use
            if found.state in (State.EMPTY, State.UNUSABLE):
                return
        bad = self._verify(name, found)
        if bad and not in_use and not self._check:
            self._remove(name, bad)

    @staticmethod
    def _is_other_version(file: SegmentFile) -> bool:
        page = pages(PAGE_BYTES)
        try:
            whole = file.read([page], 0) == PAGE_BYTES
        except OSError:
            return False
        return whole and bytes(page[:8]) == b"STOWSEG1" and int.from_bytes(page[8:10], "little") != segment.VERSION

    def _finish_or_remove(self, name: SegmentName, found: SegmentScan) -> tuple[SegmentScan, bool]:
        """A segment without footer, or of no use: finished or removed, unless a live writer holds it (True)."""
        report = self.report
        with self._directory.locked(LOCK_TIMEOUT_S) as held, self._directory.open_segment(name, writable=True) as file:
            if not held or not file.lock():
                if found.state is State.UNUSABLE:
                    report.damaged_segments += 1
                    report.damaged_segments_left += 1
                return found, True
            found = _scan(file, name)  # once more: now nobody writes
            if found.state is State.SEALED:
                return found, False
            if found.state is State.UNUSABLE:
                report.damaged_segments += 1
                report.damaged_segments_left += self._check
            elif found.state is State.EMPTY or not found.batches:
                found.state = State.EMPTY
                report.empty_segments += 1
            else:
                report.torn_segments += 1
                if not self._check:
                    seal(file, name, found.batches, found.end)
                    found = scan_segment(file, name, FILE_BYTES_MAX)
                return found, False
            if not self._check:
                self._remove_segment(file, name)
            return found, False

    def _remove_segment(self, file: SegmentFile, name: SegmentName) -> None:
        """The caller has both locks."""
        file.truncate(0)
        self._directory.unlink(name)
        self.report.removed_segments += 1

    def _verify(self, name: SegmentName, found: SegmentScan) -> list[int]:
        """The offsets of the bad chunks, counted."""
        report = self.report
        guard = self._inspector.guard(name, found.header)
        if guard is None:
            count = sum(map(len, found.batches))
            report.segments_without_key += 1
            report.unchecked += count
            report.chunks += count
            return []
        bad = []
        for batch in found.batches:
            for offset, length, result in self._inspector.read(name, found.header, guard, batch):
                report.chunks += 1
                if result is None:
                    report.unchecked += 1
                    continue
                report.bytes += length
                if result is Result.OK:
                    report.good += 1
                    continue
                bad.append(offset)
                report.bad += 1
                is_unreadable = result in (Result.FAILED, Result.BUSY)
                report.unreadable += is_unreadable
                if len(report.listed) < LISTED_MAX:
                    report.listed.append(BadChunk(str(name), offset, length, is_unreadable))
        return bad

    # Removing

    def _remove(self, name: SegmentName, suspects: Collection[int]) -> None:
        """Removes the chunks at these offsets that are still bad, now that nobody else can change the segment."""
        report = self.report
        with self._directory.open_segment(name, writable=True) as file:
            if not file.lock():
                report.segments_in_use += 1
                return
            found = scan_segment(file, name, FILE_BYTES_MAX)
            bad = self._still_bad(file, name, found, np.array(sorted(suspects), np.uint64))
            with self._directory.locked(LOCK_TIMEOUT_S) as held:
                if not held:
                    report.segments_in_use += 1
                    return
                if len(bad):
                    self._drop(file, name, found, bad)
        report.removed += len(bad)
        report.vanished += len(suspects) - len(bad)

    def _still_bad(
        self, file: SegmentFile, name: SegmentName, found: SegmentScan, suspects: NDArray[np.uint64]
    ) -> NDArray[np.uint64]:
        """Read once more. Raises OSError where something else than the medium fails: that says nothing about chunks."""
        guard = self._inspector.guard(name, found.header)
        bad: list[int] = []
        if guard is None:
            return np.array(bad, np.uint64)
        for batch in found.batches:
            some = batch[np.isin(batch["offset"], suspects)]
            for offset, length, result in self._inspector.read(name, found.header, guard, some):
                if result is Result.BUSY:
                    raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
                if result is Result.FAILED:
                    _require_medium_error(file, offset, length)
                if result is not Result.OK:
                    bad.append(offset)
        return np.array(bad, np.uint64)

    def _drop(self, file: SegmentFile, name: SegmentName, found: SegmentScan, bad: NDArray[np.uint64]) -> None:
        """The caller has both locks. Pages first: until they are written, the old footer counts. Raises OSError."""
        kept: list[Entries] = [batch[~np.isin(batch["offset"], bad)] for batch in found.batches]
        kept = [batch for batch in kept if (batch["mask"] != 0).any()]
        if not kept:
            self._remove_segment(file, name)
            return
        _void(file, name, found.end, bad)
        seal(file, name, kept, found.end)


def _scan(file: SegmentFile, name: SegmentName) -> SegmentScan:
    """What lies in the segment; UNUSABLE where its pages cannot be read. Raises OSError for other failures."""
    try:
        return scan_segment(file, name, FILE_BYTES_MAX)
    except OSError as error:
        if error.errno not in MEDIUM:
            raise
        return SegmentScan(State.UNUSABLE)


def _require_medium_error(file: SegmentFile, offset: int, length: int) -> None:
    """Reads the offset again; raises the OSError unless it is one of the medium."""
    memory = pages(min(round_up(length), RUN_BYTES_MAX))
    for at in range(offset, offset + length, memory.nbytes):
        try:
            file.read([memory], at)
        except OSError as error:
            if error.errno not in MEDIUM:
                raise


def _void(file: SegmentFile, name: SegmentName, end: int, bad: NDArray[np.uint64]) -> None:
    """Empties the entries of bad chunks in the pages of their batches, as far as these can be read.

    Raises OSError for a write that fails.
    """
    page = pages(PAGE_BYTES)
    at = PAGE_BYTES
    while at < end and at < int(bad.max()):
        try:
            if file.read([page], at) < PAGE_BYTES:
                return
            entries, after = segment.parse_batch_page(page, name.id, at, file.bytes)
        except (OSError, FormatError):
            return  # what follows cannot be found by a scan either
        here = np.isin(entries["offset"], bad)
        if here.any():
            entries["mask"][here] = 0
            raw = entries.view(np.uint8).reshape(len(entries), ENTRY_BYTES)[:, :HEADER_BYTES]
            headers = [row.tobytes() for row in raw]
            file.write([in_pages(segment.pack_batch_page(name.id, at, headers, entries["length"].tolist()))], at)
        at = after
