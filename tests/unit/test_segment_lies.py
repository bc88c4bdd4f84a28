"""Pages and footers with a right checksum that say what cannot be: each is refused by the check that is there for it.

Whoever can write into the directory can make these. A parser that believed one of them would index or allocate on a
file's word. The good neighbour of each lie is parsed, so that a check which refuses too much is found too.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import xxhash

from stowage.core.geometry import PAGE_BYTES
from stowage.errors import FormatError
from stowage.storage.format import envelope, segment
from stowage.storage.format.protection import NO_MARK
from stowage.storage.format.segment import ENTRIES_MAX, ENTRY_BYTES, SegmentHeader, SegmentName, Trailer

ID = b"\1\2\3\4\5\6\7\0"
NAME = SegmentName(7, ID)
NAMESPACE = bytes(range(32))
FILE_BYTES = 1 << 20
PAGE = PAGE_BYTES


def refused(says: str) -> Any:
    return pytest.raises(FormatError, match=f"^{says}$")


def headers(lengths: Sequence[int], mask: int = 1) -> list[bytes]:
    return [envelope.pack_fields(bytes(32), NAMESPACE, mask, length) + bytes(16) for length in lengths]


def batch(
    lengths: Sequence[int], count: int | None = None, identity: bytes = ID, place: int = PAGE, length: int | None = None
) -> bytes:
    count = len(lengths) if count is None else count
    length = segment.batch_bytes(lengths) if length is None else length
    fields = segment._BATCH.pack(b"STOWBAT1", 1, count, identity, place, length)
    return segment._seal_page(fields, b"".join(headers(lengths))[: PAGE - 128])


def test_any_page_is_of_its_kind_its_version_and_whole() -> None:
    page = batch([1])
    segment.parse_batch_page(page, ID, PAGE, FILE_BYTES)
    for other in (page[:-1], page + b"\0", b"", b"STOWEND1" + page[8:]):
        with refused("not a page of kind STOWBAT1"):
            segment.parse_batch_page(other, ID, PAGE, FILE_BYTES)
    with refused("format version 258; this version reads 1"):
        segment.parse_batch_page(page[:8] + b"\2\1" + page[10:], ID, PAGE, FILE_BYTES)
    with refused("a damaged page of kind STOWBAT1"):
        segment.parse_batch_page(page[:-1] + b"\1", ID, PAGE, FILE_BYTES)


def test_a_segment_header_of_another_file() -> None:
    page = segment.pack_segment_header(NAME, FILE_BYTES, NAMESPACE)
    assert segment.parse_segment_header(page, NAME) == SegmentHeader(NAMESPACE, NO_MARK)
    for name in (SegmentName(8, ID), SegmentName(7, bytes(8))):
        with refused("a segment header of another file"):
            segment.parse_segment_header(page, name)


@pytest.mark.parametrize("count", [1, segment.BATCH_CHUNKS_MAX])
def test_a_batch_that_ends_with_its_file(count: int) -> None:
    entries, end = segment.parse_batch_page(batch([PAGE] * count), ID, PAGE, (2 + count) * PAGE)
    assert end == (2 + count) * PAGE
    assert entries["offset"].tolist() == [PAGE * (2 + at) for at in range(count)]


@pytest.mark.parametrize(
    ("page", "says"),
    [
        (batch([1], identity=bytes(8)), "a batch header of another offset"),
        (batch([1], place=2 * PAGE), "a batch header of another offset"),
        (batch([1], count=0), "a batch that does not lie in the file"),
        (batch([], length=PAGE), "a batch that does not lie in the file"),
        (batch([1] * 32), "a batch that does not lie in the file"),
        (batch([1], length=FILE_BYTES), "a batch that does not lie in the file"),
        (batch([1], length=2**64 - 1), "a batch that does not lie in the file"),
        (batch([FILE_BYTES + 1], length=2 * PAGE), "a chunk that is longer than its file"),
        (batch([1, 2**64 - 1], length=2 * PAGE), "a chunk that is longer than its file"),
        (batch([FILE_BYTES], length=2 * PAGE), "a batch whose chunks do not add up to its length"),
        (batch([1], length=PAGE), "a batch whose chunks do not add up to its length"),
        (batch([1, 1], length=2 * PAGE), "a batch whose chunks do not add up to its length"),
        (batch([1], length=3 * PAGE), "a batch whose chunks do not add up to its length"),
        (batch([PAGE + 1], length=2 * PAGE), "a batch whose chunks do not add up to its length"),
    ],
)
def test_a_batch_that_lies(page: bytes, says: str) -> None:
    with refused(says):
        segment.parse_batch_page(page, ID, PAGE, FILE_BYTES)


@pytest.mark.parametrize(("count", "offset"), [(0, PAGE), (segment.BATCH_CHUNKS_MAX + 1, PAGE), (1, PAGE + 512)])
def test_a_batch_that_could_not_be_read_is_not_written(count: int, offset: int) -> None:
    with pytest.raises(AssertionError):
        segment.pack_batch_page(ID, offset, headers([1] * count), [1] * count)
    assert len(segment.pack_batch_page(ID, PAGE, headers([1] * 31), [1] * 31)) == PAGE


def trailer(offset: int, entries: int, length: int | None = None, identity: bytes = ID) -> bytes:
    length = entries * ENTRY_BYTES if length is None else length
    return segment._seal_page(segment._TRAILER.pack(b"STOWEND1", 1, identity, offset, length, entries, bytes(16)))


@pytest.mark.parametrize(("offset", "entries"), [(3 * PAGE, 1), (3 * PAGE, ENTRIES_MAX), (900 * PAGE, 31)])
def test_a_trailer_that_fits(offset: int, entries: int) -> None:
    file_bytes = offset + segment.footer_room(entries)
    assert segment.parse_trailer(trailer(offset, entries), ID, file_bytes) == Trailer(
        offset, entries * ENTRY_BYTES, bytes(16)
    )
    for other in (file_bytes - PAGE, file_bytes + PAGE, file_bytes - 1, file_bytes + 1):
        with refused("a trailer that does not fit its file"):
            segment.parse_trailer(trailer(offset, entries), ID, other)
    with refused("a trailer of another segment"):
        segment.parse_trailer(trailer(offset, entries, identity=bytes(8)), ID, file_bytes)
    for length in (entries * ENTRY_BYTES - 1, entries * ENTRY_BYTES + 1, 0, 2**64 - 1):
        with refused("a footer of impossible length"):
            segment.parse_trailer(trailer(offset, entries, length), ID, file_bytes)


@pytest.mark.parametrize(
    ("offset", "entries", "says"),
    [
        (3 * PAGE, 0, "a footer of impossible length"),
        (3 * PAGE, ENTRIES_MAX + 1, "a footer of impossible length"),
        (3 * PAGE + 1, 1, "a trailer that does not fit its file"),
        (2 * PAGE, 1, "a trailer that does not fit its file"),  # no room for a batch of one chunk
        (0, 1, "a trailer that does not fit its file"),
    ],
)
def test_a_trailer_that_adds_up_and_cannot_be(offset: int, entries: int, says: str) -> None:
    with refused(says):
        segment.parse_trailer(trailer(offset, entries), ID, offset + segment.footer_room(entries))


def parse_footer(chunks: Sequence[tuple[int, int]], end: int = 6 * PAGE) -> segment.Entries:
    """A footer of chunks with these offsets and lengths, and a right checksum."""
    entries = np.zeros(len(chunks), segment._ENTRY)
    entries["offset"], entries["length"] = [offset for offset, _ in chunks], [length for _, length in chunks]
    data = entries.tobytes()
    return segment.parse_footer(data, Trailer(end, len(data), xxhash.xxh3_128_digest(data)))


GOOD = (2 * PAGE, PAGE)


def test_a_footer_whose_chunks_lie_in_the_batches() -> None:
    entries = parse_footer([GOOD, (3 * PAGE, 3 * PAGE), (5 * PAGE, 1), (6 * PAGE, 0)])
    assert entries["offset"].tolist() == [2 * PAGE, 3 * PAGE, 5 * PAGE, 6 * PAGE]


@pytest.mark.parametrize(
    ("chunk", "says"),
    [
        ((2 * PAGE, 6 * PAGE + 1), "a footer entry outside of the file"),
        ((2 * PAGE, 2**64 - 1), "a footer entry outside of the file"),
        ((7 * PAGE, 1), "a footer entry outside of the file"),
        ((2**64 - PAGE, 2 * PAGE), "a footer entry outside of the file"),
        ((2 * PAGE + 1, 1), "a footer entry outside of the file"),
        ((2 * PAGE, 6 * PAGE), "a footer entry outside of the batches"),
        ((6 * PAGE, 1), "a footer entry outside of the batches"),
        ((5 * PAGE, PAGE + 1), "a footer entry outside of the batches"),
        ((PAGE, 1), "a footer entry outside of the batches"),
        ((0, 1), "a footer entry outside of the batches"),
    ],
)
def test_a_footer_that_lies(chunk: tuple[int, int], says: str) -> None:
    for chunks in ([chunk], [GOOD, chunk], [chunk, GOOD]):
        with refused(says):
            parse_footer(chunks)


def test_a_footer_that_is_not_the_one_of_the_trailer() -> None:
    data = bytes(ENTRY_BYTES)
    for length, digest in ((ENTRY_BYTES, bytes(16)), (2 * ENTRY_BYTES, xxhash.xxh3_128_digest(data))):
        with refused("a damaged footer"):
            segment.parse_footer(data, Trailer(6 * PAGE, length, digest))


def test_a_footer_of_several_batches_and_of_as_many_chunks_as_may_be(monkeypatch: pytest.MonkeyPatch) -> None:
    first, end = segment.parse_batch_page(batch([1, 2]), ID, PAGE, FILE_BYTES)
    second, end = segment.parse_batch_page(batch([3], place=end), ID, end, FILE_BYTES)
    footer = segment.pack_footer([first, second], ID, end)
    found = segment.parse_trailer(footer[-PAGE:], ID, end + len(footer))
    assert segment.parse_footer(footer[: found.footer_bytes], found)["length"].tolist() == [1, 2, 3]
    one = segment.pack_footer([second], ID, end)
    assert segment.parse_trailer(one[-PAGE:], ID, end + len(one)).footer_bytes == ENTRY_BYTES
    monkeypatch.setattr(segment, "ENTRIES_MAX", 3)
    assert segment.pack_footer([first, second], ID, end) == footer
    for batches in ([], [first, first]):
        with pytest.raises(AssertionError):
            segment.pack_footer(batches, ID, end)


def test_names_use_every_hex_digit() -> None:
    name = SegmentName(0x0123456789ABCDEF, bytes.fromhex("fedcba9876543210"))
    assert str(name) == "0123456789abcdef-fedcba9876543210.seg"
    assert SegmentName.parse(str(name)) == name
    for other in ("X", "g", "-", " ", "A", "é"):
        assert SegmentName.parse(str(name)[:15] + other + str(name)[16:]) is None
        assert SegmentName.parse(str(name)[:32] + other + str(name)[33:]) is None
        assert SegmentName.parse(other + str(name)[1:]) is None


@pytest.mark.parametrize(
    ("place", "value"),
    [(0, b"STWX"), (4, b"\2\0"), (6, b"\7\0"), (40, bytes(32)), (72, bytes(8)), (80, bytes(8))],
    ids=["magic", "version", "method", "namespace", "mask", "length"],
)
def test_what_this_version_cannot_read_is_left_out_and_the_rest_is_whole(place: int, value: bytes) -> None:
    mask = (1 << 63) | 1
    first, other, last = headers([PAGE, PAGE, PAGE], mask)
    other = other[:place] + value + other[place + len(value) :]
    length = segment.batch_bytes([PAGE, int.from_bytes(other[80:88], "little"), PAGE])
    page = segment._seal_page(segment._BATCH.pack(b"STOWBAT1", 1, 3, ID, PAGE, length), first + other + last)
    entries, end = segment.parse_batch_page(page, ID, PAGE, FILE_BYTES)
    records = segment.select(entries, NAMESPACE)
    assert len(records) == 2 and records.offsets.tolist() == [2 * PAGE, end - PAGE]
    assert records.masks.tolist() == [mask, mask] and records.lengths.tolist() == [PAGE, PAGE]
    assert (records.masks.dtype, records.digests.dtype) == (np.uint64, np.uint64)
    assert (records.lengths.dtype, records.offsets.dtype) == (np.int64, np.int64)


def test_the_limits_are_those_of_the_documented_format() -> None:
    limits = (PAGE_BYTES, segment.BATCH_CHUNKS_MAX, ENTRY_BYTES, ENTRIES_MAX)
    assert limits == (4096, 31, 136, 1_048_576)
