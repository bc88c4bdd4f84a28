"""The layout of a segment: round trips, golden bytes, and bounds that hold for any bytes whatever."""

from __future__ import annotations

import hashlib

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from stowage.errors import FormatError
from stowage.storage.format import segment
from stowage.storage.format.protection import NO_MARK
from stowage.storage.format.segment import PAGE_BYTES, SegmentHeader, SegmentName
from tests.segment_surgery import header_of

NAMESPACE = bytes(range(31)) + b"\0"
NAME = SegmentName(7, b"\1\2\3\4\5\6\7\0")


def headers(lengths: list[int], namespace: bytes = NAMESPACE) -> list[bytes]:
    keys = [hashlib.sha256(bytes([at])).digest()[:31] + b"\0" for at in range(len(lengths))]
    return [
        header_of(key, namespace, at + 1, bytes(length))
        for at, (key, length) in enumerate(zip(keys, lengths, strict=True))
    ]


def test_names() -> None:
    assert str(NAME) == "0000000000000007-0102030405060700.seg"
    assert SegmentName.parse(str(NAME)) == NAME
    for name in ("lock", "x.seg", str(NAME).upper(), "8" + str(NAME)[1:], str(NAME) + "~", str(NAME).replace("-", "+")):
        assert SegmentName.parse(name) is None


def test_a_segment_header_belongs_to_its_file() -> None:
    page = segment.pack_segment_header(NAME, 1 << 20, NAMESPACE)
    assert segment.parse_segment_header(page, NAME) == SegmentHeader(NAMESPACE, NO_MARK)
    with pytest.raises(FormatError, match="another file"):
        segment.parse_segment_header(page, SegmentName(8, NAME.id))
    with pytest.raises(FormatError, match="another file"):
        segment.parse_segment_header(page, SegmentName(7, bytes(8)))


@given(lengths=st.lists(st.integers(1, 20_000), min_size=1, max_size=31), offset=st.integers(1, 1 << 40))
def test_a_batch_is_found_again(lengths: list[int], offset: int) -> None:
    offset *= PAGE_BYTES
    page = segment.pack_batch_page(NAME.id, offset, headers(lengths), lengths)
    entries, end = segment.parse_batch_page(page, NAME.id, offset, offset + segment.batch_bytes(lengths))
    assert end == offset + segment.batch_bytes(lengths)
    records = segment.select(entries, NAMESPACE)
    assert records.lengths.tolist() == lengths
    assert records.masks.tolist() == list(range(1, len(lengths) + 1))
    assert (records.offsets % PAGE_BYTES == 0).all() and records.offsets[0] == offset + PAGE_BYTES
    ends = records.offsets + (records.lengths + PAGE_BYTES - 1) // PAGE_BYTES * PAGE_BYTES
    assert (records.offsets[1:] == ends[:-1]).all() and ends[-1] == end
    for header, chunk, digest in zip(headers(lengths), records.keys, records.digests, strict=True):
        assert (header[8:40], header[112:]) == (chunk, digest.tobytes())


def test_a_batch_counts_only_where_it_was_written() -> None:
    page = segment.pack_batch_page(NAME.id, 4096, headers([5000]), [5000])
    for name, offset, file_bytes in ((NAME.id, 8192, 1 << 20), (bytes(8), 4096, 1 << 20), (NAME.id, 4096, 12288)):
        with pytest.raises(FormatError):
            segment.parse_batch_page(page, name, offset, file_bytes)


def footer_of(lengths: list[int]) -> tuple[bytes, segment.Trailer, int]:
    page = segment.pack_batch_page(NAME.id, 4096, headers(lengths), lengths)
    entries, end = segment.parse_batch_page(page, NAME.id, 4096, 1 << 30)
    footer = segment.pack_footer([entries], NAME.id, end)
    return footer, segment.parse_trailer(footer[-PAGE_BYTES:], NAME.id, end + len(footer)), end


def test_a_footer_holds_what_the_batches_held() -> None:
    footer, trailer, end = footer_of([1, 4096, 4097])
    assert trailer.footer_offset == end
    records = segment.select(segment.parse_footer(footer[: trailer.footer_bytes], trailer), NAMESPACE)
    assert records.offsets.tolist() == [8192, 12288, 16384]
    assert records.keys[1].endswith(b"\0"), "keys may end in zeros"


def test_the_bytes_at_rest_do_not_change_between_versions() -> None:
    footer, _, _ = footer_of([1, 4096, 4097])
    pages = segment.pack_segment_header(NAME, 1 << 20, NAMESPACE)
    pages += segment.pack_batch_page(NAME.id, 4096, headers([1, 4096, 4097]), [1, 4096, 4097])
    assert (
        hashlib.sha256(pages + footer).hexdigest() == "778666c386d5f3265ec13b4c5e262f57e54b0a854405b0e0fa9fd78945c17ec3"
    )


def test_every_flipped_bit_of_a_page_is_noticed() -> None:
    footer, trailer, end = footer_of([1, 4096])
    page = segment.pack_batch_page(NAME.id, 4096, headers([1, 4096]), [1, 4096])
    start = segment.pack_segment_header(NAME, 1 << 20, NAMESPACE)
    for bit in [*range(4096), *range(4096, 8 * PAGE_BYTES, 13)]:
        flip = np.zeros(PAGE_BYTES, np.uint8)
        flip[bit // 8] = 1 << bit % 8
        with pytest.raises(FormatError):
            segment.parse_batch_page((np.frombuffer(page, np.uint8) ^ flip).tobytes(), NAME.id, 4096, 1 << 30)
        with pytest.raises(FormatError):
            segment.parse_segment_header((np.frombuffer(start, np.uint8) ^ flip).tobytes(), NAME)
        with pytest.raises(FormatError):
            last = (np.frombuffer(footer[-PAGE_BYTES:], np.uint8) ^ flip).tobytes()
            segment.parse_trailer(last, NAME.id, end + len(footer))
    for bit in range(8 * trailer.footer_bytes):
        damaged = bytearray(footer[: trailer.footer_bytes])
        damaged[bit // 8] ^= 1 << bit % 8
        with pytest.raises(FormatError):
            segment.parse_footer(bytes(damaged), trailer)


@given(st.binary(max_size=200), st.sampled_from([b"STOWSEG1", b"STOWBAT1", b"STOWEND1"]))
def test_any_bytes_are_parsed_or_refused(junk: bytes, magic: bytes) -> None:
    """With a right frame and checksum, so that the checks behind them are reached."""
    page = segment._seal_page((magic + b"\1\0" + junk)[:112])
    for parse in (
        lambda: segment.parse_segment_header(page, NAME),
        lambda: segment.parse_batch_page(page, junk[6:14].ljust(8, b"\0"), 4096, 1 << 20),
        lambda: segment.parse_trailer(page, junk[6:14].ljust(8, b"\0"), 1 << 20),
    ):
        with pytest.raises(FormatError):
            parse()


def test_other_namespaces_versions_and_flags_are_left_out() -> None:
    page = headers([10, 10, 10, 10, 10])
    page[1] = page[1][:4] + b"\2\0" + page[1][6:]
    page[2] = page[2][:6] + b"\1\0" + page[2][8:]
    page[3] = page[3][:40] + bytes(32) + page[3][72:]
    page[4] = page[4][:72] + bytes(8) + page[4][80:]
    entries, _ = segment.parse_batch_page(
        segment.pack_batch_page(NAME.id, 4096, page, [10] * 5), NAME.id, 4096, 1 << 20
    )
    assert segment.select(entries, NAMESPACE).keys == [page[0][8:40]]
