"""The layout of a segment file: header page, batches, footer, trailer (docs/format.md). Pure functions on bytes.

Whoever calls has the I/O. Every parser raises FormatError for what is not exactly as this version writes it; lengths
and offsets that come out have been checked against the file's length, so that nothing is allocated on a file's word.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
import xxhash
from numpy.typing import NDArray

from stowage.core.geometry import PAGE_BYTES, round_up
from stowage.errors import FormatError
from stowage.storage.format import envelope
from stowage.storage.format.protection import NO_MARK, Mark

BATCH_CHUNKS_MAX: Final = 31
ENTRY_BYTES: Final = envelope.HEADER_BYTES + 8
ENTRIES_MAX: Final = 1 << 20
VERSION: Final = 1

_SEGMENT: Final = struct.Struct("<8sHH4x8sQQ32s8s16s")
_BATCH: Final = struct.Struct("<8sHH4x8sQQ")
_TRAILER: Final = struct.Struct("<8sH6x8sQQQ16s")
_DIGEST: Final = slice(112, 128)
_ENTRY: Final = np.dtype(
    [
        ("magic", "V4"),
        ("version", "<u2"),
        ("flags", "<u2"),
        ("key", "V32"),
        ("namespace", "V32"),
        ("mask", "<u8"),
        ("length", "<u8"),
        ("reserved", "V24"),
        ("digest", "<u8", 2),
        ("offset", "<u8"),
    ]
)
# The same in words: bytes of numpy's V compare one by one, many times slower.
_WORDS: Final = np.dtype(
    {
        "names": ["begin", "namespace", "mask", "length"],
        "formats": ["<u8", ("<u8", 4), "<u8", "<u8"],
        "offsets": [0, 40, 72, 80],
        "itemsize": ENTRY_BYTES,
    }
)
assert _ENTRY.itemsize == ENTRY_BYTES

Entries = NDArray[np.void]
"""Envelopes and payload offsets, one footer entry each: what a footer holds, bit for bit."""


def batch_bytes(lengths: Sequence[int]) -> int:
    """What a batch of payloads of these lengths takes in the file, its header page included."""
    # As `round_up`, which is a call for each: this is asked for every batch that is written.
    return PAGE_BYTES + sum([(length + PAGE_BYTES - 1) // PAGE_BYTES * PAGE_BYTES for length in lengths])


def footer_room(entries: int) -> int:
    """What footer and trailer of that many entries take."""
    return round_up(entries * ENTRY_BYTES) + PAGE_BYTES


@dataclass(frozen=True, slots=True)
class SegmentName:
    """What a segment's file name says, and its header page must repeat."""

    sequence: int
    id: bytes

    def __str__(self) -> str:
        return f"{self.sequence:016x}-{self.id.hex()}.seg"

    @classmethod
    def parse(cls, name: str) -> SegmentName | None:
        """None for a name that this version would not give to a segment."""
        if len(name) != 37 or name[16] != "-" or not name.endswith(".seg") or name[0] not in "01234567":
            return None
        digits = name[:16] + name[17:33]
        if not set(digits) <= set("0123456789abcdef"):
            return None
        return cls(int(digits[:16], 16), bytes.fromhex(digits[16:]))


@dataclass(frozen=True, slots=True)
class SegmentHeader:
    """What page 0 says about the chunks of a segment."""

    namespace: bytes
    mark: Mark


@dataclass(frozen=True, slots=True)
class Records:
    """Chunks found in a segment, as parallel columns. `digests` is [n, 2] u64: the 16 checksum bytes as they lie.
    `lengths` and `digests` are those of what lies there, which may be `packed`.
    """

    keys: list[bytes]
    masks: NDArray[np.uint64]
    lengths: NDArray[np.int64]
    offsets: NDArray[np.int64]
    digests: NDArray[np.uint64]
    packed: NDArray[np.bool_]

    def __len__(self) -> int:
        return len(self.keys)


@dataclass(frozen=True, slots=True)
class Trailer:
    """Where a sealed segment's footer lies (= where its batches end), and what it must hash to."""

    footer_offset: int
    footer_bytes: int
    footer_digest: bytes


def _seal_page(fields: bytes, rest: bytes = b"") -> bytes:
    """A page of these fields: checksum at 112, `rest` from 128 on."""
    page = bytearray(PAGE_BYTES)
    page[: len(fields)] = fields
    page[128 : 128 + len(rest)] = rest
    page[_DIGEST] = _page_digest(page)
    return bytes(page)


def _page_digest(page: bytes | bytearray | memoryview) -> bytes:
    state = xxhash.xxh3_128(page[: _DIGEST.start])
    state.update(page[_DIGEST.stop :])
    return state.digest()


def _open_page(page: bytes | memoryview, magic: bytes) -> None:
    if len(page) != PAGE_BYTES or page[:8] != magic:
        raise FormatError(f"not a page of kind {magic.decode()}")
    version = int.from_bytes(page[8:10], "little")
    if version != VERSION:
        raise FormatError(f"format version {version}; this version reads {VERSION}")
    if page[_DIGEST] != _page_digest(page):
        raise FormatError(f"a damaged page of kind {magic.decode()}")


def pack_segment_header(name: SegmentName, segment_bytes: int, namespace: bytes, mark: Mark = NO_MARK) -> bytes:
    """Page 0."""
    fields = (name.id, name.sequence, segment_bytes, namespace, mark.key_id, mark.salt)
    return _seal_page(_SEGMENT.pack(b"STOWSEG1", VERSION, mark.method, *fields))


def parse_segment_header(page: bytes | memoryview, name: SegmentName) -> SegmentHeader:
    """Page 0, which must belong to the file of that name."""
    _open_page(page, b"STOWSEG1")
    _, _, method, identity, sequence, _, namespace, key_id, salt = _SEGMENT.unpack_from(page)
    if identity != name.id or sequence != name.sequence:
        raise FormatError("a segment header of another file")
    return SegmentHeader(namespace, Mark(method, key_id, salt))


def pack_batch_page(
    segment_id: bytes, offset: int, headers: Sequence[bytes] | NDArray[np.uint8], lengths: Sequence[int]
) -> bytes:
    """The header page of a batch that begins at `offset`; `lengths` are those of its payloads. `headers`: 128 bytes for
    each of them, as [n, 128] or one by one.
    """
    assert 0 < len(headers) <= BATCH_CHUNKS_MAX and offset % PAGE_BYTES == 0
    fields = _BATCH.pack(b"STOWBAT1", VERSION, len(headers), segment_id, offset, batch_bytes(lengths))
    return _seal_page(fields, b"".join(headers))


def parse_batch_page(page: bytes | memoryview, segment_id: bytes, offset: int, file_bytes: int) -> tuple[Entries, int]:
    """The chunks of the batch at `offset`, and where the next batch begins.

    The batch must lie in the file whole. Progress is certain: the next offset is larger.
    """
    _open_page(page, b"STOWBAT1")
    _, _, count, identity, stored_offset, length = _BATCH.unpack_from(page)
    if identity != segment_id or stored_offset != offset:
        raise FormatError("a batch header of another offset")
    if not 0 < count <= BATCH_CHUNKS_MAX or offset + length > file_bytes:
        raise FormatError("a batch that does not lie in the file")
    raw = np.frombuffer(page, np.uint8, count * envelope.HEADER_BYTES, envelope.HEADER_BYTES)
    entries = _entries(raw.reshape(count, -1))
    if (entries["length"] > file_bytes).any():
        raise FormatError("a chunk that is longer than its file")
    ends = offset + PAGE_BYTES + np.cumsum(_padded(entries["length"]))
    if int(ends[-1]) != offset + length:
        raise FormatError("a batch whose chunks do not add up to its length")
    entries["offset"][0] = offset + PAGE_BYTES
    entries["offset"][1:] = ends[:-1]
    return entries, offset + length


def _entries(headers: NDArray[np.uint8]) -> Entries:
    """[n, 128] as entries whose offsets are 0."""
    entries = np.zeros(len(headers), _ENTRY)
    entries.view(np.uint8).reshape(-1, ENTRY_BYTES)[:, : envelope.HEADER_BYTES] = headers
    return entries


def batch_entries(headers: NDArray[np.uint8], offset: int, lengths: Sequence[int]) -> Entries:
    """What `parse_batch_page` finds in the page of these headers, [n, 128], and payloads, at `offset`."""
    entries = _entries(headers)
    ends = np.cumsum(_padded(np.array(lengths, np.uint64)))
    entries["offset"][0] = offset + PAGE_BYTES
    entries["offset"][1:] = ends[:-1] + np.uint64(offset + PAGE_BYTES)
    return entries


def pack_footer(batches: Sequence[Entries], segment_id: bytes, footer_offset: int) -> bytes:
    """Footer and trailer of these batches, as they follow the last one at `footer_offset`. At least one entry."""
    footer = b"".join(entries.tobytes() for entries in batches)
    count = len(footer) // ENTRY_BYTES
    assert 0 < count <= ENTRIES_MAX
    digest = xxhash.xxh3_128_digest(footer)
    fields = _TRAILER.pack(b"STOWEND1", VERSION, segment_id, footer_offset, len(footer), count, digest)
    return footer + bytes(round_up(len(footer)) - len(footer)) + _seal_page(fields)


def parse_trailer(page: bytes | memoryview, segment_id: bytes, file_bytes: int) -> Trailer:
    """The file's last page. Its offsets must add up to the file's length."""
    _open_page(page, b"STOWEND1")
    _, _, identity, offset, length, entries, digest = _TRAILER.unpack_from(page)
    if identity != segment_id:
        raise FormatError("a trailer of another segment")
    if not 0 < entries <= ENTRIES_MAX or length != entries * ENTRY_BYTES:
        raise FormatError("a footer of impossible length")
    if offset % PAGE_BYTES or offset < 3 * PAGE_BYTES or offset + footer_room(entries) != file_bytes:
        raise FormatError("a trailer that does not fit its file")
    return Trailer(offset, length, bytes(digest))


def parse_footer(data: bytes | memoryview, trailer: Trailer) -> Entries:
    """The chunks of a sealed segment. `data` is the footer without padding, and stays referenced."""
    if len(data) != trailer.footer_bytes or xxhash.xxh3_128_digest(data) != trailer.footer_digest:
        raise FormatError("a damaged footer")
    entries = np.frombuffer(data, _ENTRY)
    lengths, offsets = entries["length"], entries["offset"]
    end = np.uint64(trailer.footer_offset)
    if (lengths > end).any() or (offsets > end).any() or (offsets % np.uint64(PAGE_BYTES)).any():
        raise FormatError("a footer entry outside of the file")
    if (offsets < np.uint64(2 * PAGE_BYTES)).any() or (offsets + _padded(lengths) > end).any():
        raise FormatError("a footer entry outside of the batches")
    return entries


def _padded(lengths: NDArray[np.uint64]) -> NDArray[np.uint64]:
    page = np.uint64(PAGE_BYTES)
    return (lengths + page - np.uint64(1)) // page * page


def fitting(entries: Entries, namespace: bytes, method: int = 0) -> Entries:
    """The entries that this version can read, of the namespace and with that method of protection."""
    words = entries.view(_WORDS)
    raw, packed = (_begin(method | flag) for flag in (0, envelope.PACKED))
    fit = (words["begin"] == raw) | (words["begin"] == packed)
    fit &= (words["mask"] != 0) & (words["length"] != 0)
    for column, word in enumerate(np.frombuffer(namespace, "<u8")):
        fit &= words["namespace"][:, column] == word
    return entries if fit.all() else entries[fit]


def _begin(flags: int) -> np.uint64:
    """The first eight bytes of an envelope with those flags."""
    begin: np.uint64 = np.frombuffer(envelope.MAGIC + struct.pack("<HH", envelope.VERSION, flags), "<u8")[0]
    return begin


def are_packed(entries: Entries) -> NDArray[np.bool_]:
    """Which payloads are."""
    packed: NDArray[np.bool_] = (entries["flags"] & envelope.PACKED) != 0
    return packed


def select(entries: Entries, namespace: bytes, method: int = 0) -> Records:
    """As `fitting`, as columns, copied."""
    entries = fitting(entries, namespace, method)
    raw = entries["key"].tobytes()
    return Records(
        [raw[at : at + 32] for at in range(0, len(raw), 32)],
        entries["mask"].astype(np.uint64),
        entries["length"].astype(np.int64),
        entries["offset"].astype(np.int64),
        entries["digest"].astype(np.uint64),
        are_packed(entries),
    )
