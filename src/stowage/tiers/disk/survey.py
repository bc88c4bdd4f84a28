"""What lies in one segment file: read from its footer, or batch by batch where it has none.

Reads pages only, never payloads. Whatever is not as docs/format.md says ends the survey there; nothing raises
FormatError from here, and nothing is allocated on a file's word that was not checked against its length and the limit.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass, field

from stowage.errors import FormatError
from stowage.format import segment
from stowage.format.segment import PAGE_BYTES, Entries, SegmentName
from stowage.tiers.disk.directory import SegmentFile
from stowage.tiers.disk.files import in_pages, pages

__all__ = ["State", "Survey", "is_sealed", "repair", "seal", "survey", "survey_batches"]


class State(enum.Enum):
    """EMPTY: a writer died, or is busy, making it. UNUSABLE: no header that fits. OPEN: torn, or being written."""

    EMPTY = enum.auto()
    UNUSABLE = enum.auto()
    SEALED = enum.auto()
    OPEN = enum.auto()


@dataclass(slots=True)
class Survey:
    """`batches` are all chunks found, whatever their namespace; `end` is where the last valid batch ends."""

    state: State
    namespace: bytes = b""
    batches: list[Entries] = field(default_factory=list)
    end: int = PAGE_BYTES


def survey(file: SegmentFile, name: SegmentName, file_bytes_max: int, only: bytes | None = None) -> Survey:
    """Reads a segment's index. `only`: leave out the chunks of a segment of another namespace. Raises OSError."""
    page = pages(PAGE_BYTES)
    if file.bytes < PAGE_BYTES or file.read([page], 0) < PAGE_BYTES:
        return Survey(State.EMPTY if file.bytes == 0 else State.UNUSABLE)
    if not any(page):
        return Survey(State.EMPTY)
    if file.bytes > file_bytes_max:
        return Survey(State.UNUSABLE)
    try:
        namespace = segment.parse_segment_header(page, name)
    except FormatError:
        return Survey(State.UNUSABLE)
    if only is not None and namespace != only:
        return Survey(State.SEALED, namespace)
    sealed = _sealed(file, name, namespace)
    return sealed or survey_batches(file, name, Survey(State.OPEN, namespace))


def survey_batches(file: SegmentFile, name: SegmentName, found: Survey) -> Survey:
    """Scans on from `found.end`; adds to `found` and returns it. Raises OSError."""
    page = pages(PAGE_BYTES)
    while found.end + PAGE_BYTES <= file.bytes and file.read([page], found.end) == PAGE_BYTES:
        try:
            entries, end = segment.parse_batch_page(page, name.id, found.end, file.bytes)
        except FormatError:
            break
        found.batches.append(entries)
        found.end = end
    return found


def _sealed(file: SegmentFile, name: SegmentName, namespace: bytes) -> Survey | None:
    """The survey by footer; None where there is no valid one."""
    page = pages(PAGE_BYTES)
    if file.bytes % PAGE_BYTES or file.read([page], file.bytes - PAGE_BYTES) < PAGE_BYTES:
        return None
    try:
        trailer = segment.parse_trailer(page, name.id, file.bytes)
        footer = pages(segment.round_up(trailer.footer_bytes))
        if file.read([footer], trailer.footer_offset) < trailer.footer_bytes:
            return None
        entries = segment.parse_footer(footer[: trailer.footer_bytes], trailer)
    except FormatError:
        return None
    return Survey(State.SEALED, namespace, [entries], trailer.footer_offset)


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
    while batches and end + segment.footer_room(sum(map(len, batches))) > file.bytes:
        end = int(batches.pop()["offset"][0]) - PAGE_BYTES
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
    if is_sealed(file, name):
        return State.SEALED
    found = survey(file, name, file_bytes_max)
    if found.state is State.OPEN:
        return State.SEALED if seal(file, name, found.batches, found.end) else State.EMPTY
    return found.state
