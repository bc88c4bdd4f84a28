"""The layout of a segment: round trips, golden bytes, and flipped bits. What a page may not say: test_segment_lies."""

from __future__ import annotations

import hashlib

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from stowage.core.geometry import PAGE_BYTES
from stowage.errors import FormatError
from stowage.storage.format import segment
from stowage.storage.format.segment import SegmentName
from tests.segment_surgery import header_of

NAMESPACE = bytes(range(31)) + b"\0"
NAME = SegmentName(7, b"\1\2\3\4\5\6\7\0")


def headers(lengths: list[int], namespace: bytes = NAMESPACE) -> list[bytes]:
    keys = [hashlib.sha256(bytes([at])).digest()[:31] + b"\0" for at in range(len(lengths))]
    return [
        header_of(key, namespace, at + 1, bytes(length))
        for at, (key, length) in enumerate(zip(keys, lengths, strict=True))
    ]


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
