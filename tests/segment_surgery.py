"""A sealed segment file taken apart and put together again with right checksums, for tests that say nonsense in it."""

from __future__ import annotations

from pathlib import Path

from stowage.core.geometry import PAGE_BYTES, round_up
from stowage.storage.format import segment
from stowage.storage.format.envelope import HEADER_BYTES, pack_fields
from stowage.storage.format.protection import NO_MARK, Protection
from stowage.storage.format.segment import ENTRY_BYTES, SegmentName

FRAME_BYTES = 128
"""What a page begins with before its content: magic, version, fields, checksum."""


def header_of(key: bytes, namespace: bytes, mask: int, payload: bytes) -> bytes:
    """A chunk's envelope, with the checksum of its payload."""
    guard, fields = Protection().guard(bytes(8), NO_MARK), pack_fields(key, namespace, mask, len(payload))
    return fields + guard.digest(fields, 0, memoryview(payload))  # type: ignore[union-attr]


class Surgery:
    """The bytes of a segment, and where things lie in them. Chunks are numbered in the order of writing."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.data = bytearray(path.read_bytes())
        name = SegmentName.parse(path.name)
        assert name is not None
        self.name = name
        trailer = segment.parse_trailer(bytes(self.data[-PAGE_BYTES:]), name.id, len(self.data))
        self.footer = trailer.footer_offset
        self.count = trailer.footer_bytes // ENTRY_BYTES
        footer = bytes(self.data[self.footer : self.footer + trailer.footer_bytes])
        entries = segment.parse_footer(footer, trailer)
        self.offsets: list[int] = entries["offset"].tolist()
        self.lengths: list[int] = entries["length"].tolist()
        self.batches = self._find_batches()
        self._in_batch = {
            page + PAGE_BYTES: (page, 0) for page in self.batches
        }  # where a payload begins -> its envelope's page and number there
        for offset, length in zip(self.offsets, self.lengths, strict=True):
            page, number = self._in_batch[offset]
            self._in_batch.setdefault(offset + round_up(length), (page, number + 1))

    def _find_batches(self) -> list[int]:
        found, at = [], PAGE_BYTES
        while at < self.footer:
            found.append(at)
            _, at = segment.parse_batch_page(self.data[at : at + PAGE_BYTES], self.name.id, at, len(self.data))
        return found

    def payload(self, chunk: int) -> slice:
        """Where its bytes lie."""
        return slice(self.offsets[chunk], self.offsets[chunk] + self.lengths[chunk])

    def envelopes(self, chunk: int) -> list[int]:
        """Where its envelope lies: in its batch's page, and in the footer."""
        page, number = self._in_batch[self.offsets[chunk]]
        return [page + FRAME_BYTES + number * HEADER_BYTES, self.footer + chunk * ENTRY_BYTES]

    def envelope(self, chunk: int) -> bytes:
        at = self.envelopes(chunk)[1]
        return bytes(self.data[at : at + HEADER_BYTES])

    def put(self, chunk: int, field: int, value: bytes) -> None:
        """Other bytes in both copies of an envelope, `field` bytes from its beginning."""
        for at in self.envelopes(chunk):
            self.data[at + field : at + field + len(value)] = value

    def swap(self, one: slice, other: slice) -> None:
        """The bytes of two places of one length change places."""
        self.data[one], self.data[other] = self.data[other], self.data[one]

    def save(self, *, seal: bool = True) -> None:
        """Writes the file; `seal`: with checksums of pages and footer that fit what they say now."""
        if seal:
            footer = self.data[self.footer : self.footer + self.count * ENTRY_BYTES]
            self.data[-PAGE_BYTES + 48 : -PAGE_BYTES + 64] = segment.xxhash.xxh3_128_digest(footer)
            for page in (0, *self.batches, len(self.data) - PAGE_BYTES):
                reseal(self.data, page)
        self.path.write_bytes(self.data)


def reseal(data: bytearray, page: int) -> None:
    """Makes the checksum of the page at that offset right."""
    whole = data[page : page + PAGE_BYTES]
    data[page + 112 : page + 128] = segment._page_digest(whole)


def flip(path: Path, bit: int) -> None:
    """Changes one bit of a file."""
    with path.open("r+b") as file:
        file.seek(bit // 8)
        byte = file.read(1)[0]
        file.seek(bit // 8)
        file.write(bytes([byte ^ 1 << bit % 8]))
