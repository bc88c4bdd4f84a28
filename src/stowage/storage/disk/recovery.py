"""Reads the index of a segment file: from its footer, or batch by batch where it has none.

Reads pages only, never payloads. Whatever is not as docs/format.md says ends the scan there; nothing raises
FormatError from here, and nothing is allocated on a file's word that was not checked against its length and the limit.
"""

from __future__ import annotations

import enum
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final

from stowage.core.geometry import PAGE_BYTES, round_up
from stowage.errors import FormatError
from stowage.native.memory import pages
from stowage.storage.disk.directory import SegmentFile
from stowage.storage.disk.files import in_pages
from stowage.storage.format import segment
from stowage.storage.format.protection import NO_MARK, Guard
from stowage.storage.format.segment import Entries, SegmentHeader, SegmentName


class State(enum.Enum):
    """EMPTY: a writer died, or is busy, making it. UNUSABLE: no header that fits. OPEN: torn, or being written."""

    EMPTY = enum.auto()
    UNUSABLE = enum.auto()
    SEALED = enum.auto()
    OPEN = enum.auto()


AHEAD_BYTES: Final = 1 << 20
SHORT_BYTES: Final = 128 << 10
NO_HEADER: Final = SegmentHeader(b"", NO_MARK)


@dataclass(slots=True)
class SegmentScan:
    """`batches` are all chunks found, whatever their namespace; `end` is where the last valid batch ends.

    `damaged`: there is a trailer that fits, and its footer does not; what was found is what the batches still say.
    """

    state: State
    header: SegmentHeader = NO_HEADER
    batches: list[Entries] = field(default_factory=list)
    end: int = PAGE_BYTES
    damaged: bool = False


def scan_segment(
    file: SegmentFile,
    name: SegmentName,
    file_bytes_max: int,
    guard: Callable[[SegmentHeader], Guard | None] | None = None,
    memory: Callable[[int], memoryview] = pages,
) -> SegmentScan:
    """Reads a segment's index. `guard`: leave out the chunks of a segment that it has none for. `memory`: for a footer,
    which the batch then lies in. Raises OSError."""
    page = pages(PAGE_BYTES)
    if file.bytes < PAGE_BYTES or file.read([page], 0) < PAGE_BYTES:
        return SegmentScan(State.EMPTY if file.bytes == 0 else State.UNUSABLE)
    if not any(page):
        return SegmentScan(State.EMPTY)
    if file.bytes > file_bytes_max:
        return SegmentScan(State.UNUSABLE)
    try:
        header = segment.parse_segment_header(page, name)
    except FormatError:
        return SegmentScan(State.UNUSABLE)
    if guard is not None and guard(header) is None:
        return SegmentScan(State.SEALED, header)
    found = _by_footer(file, name, header, memory)
    return found if found.state is State.SEALED else scan_batches(file, name, found)


def scan_batches(file: SegmentFile, name: SegmentName, found: SegmentScan) -> SegmentScan:
    """Scans on from `found.end`; adds to `found`, up to what one footer can list, and returns it. Raises OSError."""
    ahead = _ReadAhead(file)
    count = sum(map(len, found.batches))
    while (page := ahead.page(found.end)) is not None:
        try:
            entries, end = segment.parse_batch_page(page, name.id, found.end, file.bytes)
        except FormatError:
            break
        count += len(entries)
        if count > segment.ENTRIES_MAX:
            break
        ahead.short = end - found.end <= SHORT_BYTES
        found.batches.append(entries)
        found.end = end
    return found


class _ReadAhead:
    """Pages of a file in ascending order. While batches are short, many are read at once: a read for each page would
    take minutes for a segment of nothing but tiny batches."""

    def __init__(self, file: SegmentFile) -> None:
        self.short = False
        self._file = file
        self._window = pages(PAGE_BYTES)
        self._start = 0
        self._bytes = 0

    def page(self, offset: int) -> memoryview | None:
        """Valid until the next call. None where the file ends. Raises OSError."""
        if not self._start <= offset <= self._start + self._bytes - PAGE_BYTES:
            self._read(offset)
        at = offset - self._start
        return self._window[at : at + PAGE_BYTES] if at + PAGE_BYTES <= self._bytes else None

    def _read(self, offset: int) -> None:
        self._start = offset
        if self.short and self._window.nbytes < AHEAD_BYTES:
            self._window = pages(AHEAD_BYTES)
        try:
            self._bytes = self._file.read([self._window[: AHEAD_BYTES if self.short else PAGE_BYTES]], offset)
        except OSError:
            if not self.short:
                raise
            self._bytes = self._file.read([self._window[:PAGE_BYTES]], offset)  # only this page matters now


def _by_footer(
    file: SegmentFile, name: SegmentName, header: SegmentHeader, memory: Callable[[int], memoryview]
) -> SegmentScan:
    """The scan by footer; OPEN and empty where there is no valid one."""
    found = SegmentScan(State.OPEN, header)
    page = pages(PAGE_BYTES)
    if file.bytes % PAGE_BYTES or file.read([page], file.bytes - PAGE_BYTES) < PAGE_BYTES:
        return found
    try:
        trailer = segment.parse_trailer(page, name.id, file.bytes)
    except FormatError:
        return found
    footer = memory(round_up(trailer.footer_bytes))
    if file.read([footer], trailer.footer_offset) < trailer.footer_bytes:
        return found  # reclaimed just now
    try:
        entries = segment.parse_footer(footer[: trailer.footer_bytes], trailer)
    except FormatError:
        found.damaged = True
        return found
    return SegmentScan(State.SEALED, header, [entries], trailer.footer_offset)


def is_sealed(file: SegmentFile, name: SegmentName) -> bool:
    """Whether the file ends with a trailer of its own. Raises OSError."""
    page = pages(PAGE_BYTES)
    if file.bytes % PAGE_BYTES or file.bytes < 2 * PAGE_BYTES:
        return False
    if file.read([page], file.bytes - PAGE_BYTES) < PAGE_BYTES:
        return False
    try:
        segment.parse_trailer(page, name.id, file.bytes)
    except FormatError:
        return False
    return True


def seal(file: SegmentFile, name: SegmentName, batches: list[Entries], end: int) -> bool:
    """Writes footer and trailer at `end` and cuts the file there, without ever making it longer.

    Gives up the last batches if the footer has no room. False if no batch is left: then nothing was changed.
    Raises OSError.
    """
    batches = list(batches)
    count = sum(map(len, batches))
    while batches and end + segment.footer_room(count) > file.bytes:
        given_up = batches.pop()
        count -= len(given_up)
        end = int(given_up["offset"][0]) - PAGE_BYTES
    if not batches:
        return False
    footer = segment.pack_footer(batches, name.id, end)
    file.write([in_pages(footer)], end)
    file.truncate(end + len(footer))
    return True


def repair(file: SegmentFile, name: SegmentName, file_bytes_max: int) -> State:
    """Seals a torn segment. The caller has the directory's lock and the segment's. EMPTY: nothing in it, remove it.

    Raises OSError.
    """
    found = scan_segment(file, name, file_bytes_max)
    if found.state is State.OPEN:
        return State.SEALED if seal(file, name, found.batches, found.end) else State.EMPTY
    return found.state
