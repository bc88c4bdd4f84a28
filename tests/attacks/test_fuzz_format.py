"""Hostile headers, pages, footers and files from hypothesis, with and without right checksums.

What must hold is asserted in `fuzz_format.one_input`, which atheris feeds too (`make fuzz`). Here hypothesis makes
inputs that come close: fields at the edges of what is allowed, entries that nearly fit, a few bytes of a good file
changed.
"""

from __future__ import annotations

import struct

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from stowage.core.geometry import PAGE_BYTES
from stowage.storage.format import envelope, segment
from stowage.storage.format.segment import ENTRY_BYTES, SegmentName
from tests.attacks import fuzz_format
from tests.attacks.fuzz_format import NAME, NAMESPACE, one_input

PAGE, SEALED_PAGE, FOOTER, PATCHED_FILE = range(4)

edges = st.one_of(
    st.sampled_from([0, 1, 31, 32, 135, 136, 4095, 4096, 4097, 8191, 12288, 1 << 20, (1 << 20) + 1, (1 << 64) - 1]),
    st.integers(0, 12).map(lambda pages: pages * PAGE_BYTES),
    st.integers(0, 12 * PAGE_BYTES),
    st.integers(0, 63).map(lambda power: 1 << power),
    st.integers(1, 1 << 14).map(lambda back: (1 << 64) - back),
    st.integers(0, (1 << 64) - 1),
)


def mostly(good: int, hostile: st.SearchStrategy[int]) -> st.SearchStrategy[int]:
    """One field at a time is enough to break a parser; several hide each other."""
    return st.one_of(st.just(good), st.just(good), st.just(good), hostile)


ENTRY = struct.Struct("<4sHH32s32sQQ24s16sQ")
FIELDS: dict[int, st.SearchStrategy[int | bytes]] = {
    0: st.binary(min_size=4, max_size=4),  # magic
    1: st.integers(0, 65535),  # version
    2: st.integers(0, 65535),  # flags
    3: st.sampled_from([*fuzz_format.PAYLOADS, bytes(32)]),  # key
    4: st.sampled_from([bytes(32), NAMESPACE[::-1]]),  # namespace
    5: edges,  # mask
    6: edges,  # length
    7: st.binary(min_size=24, max_size=24),  # reserved
    8: st.binary(min_size=16, max_size=16),  # checksum
    9: edges,  # offset
}


@st.composite
def entries(draw: st.DrawFn) -> bytes:
    """A footer entry that is right but for one field or two; its first 128 bytes are an envelope."""
    fields: list[int | bytes] = [
        b"STWC",
        1,
        0,
        bytes([1]) * 32,
        NAMESPACE,
        3,
        4096,
        bytes(24),
        bytes(16),
        2 * PAGE_BYTES,
    ]
    for field in draw(st.lists(st.sampled_from(list(FIELDS)), min_size=1, max_size=2)):
        fields[field] = draw(FIELDS[field])
    return ENTRY.pack(*fields)


envelopes = entries().map(lambda entry: entry[:128])


@given(st.integers(0, 3), st.binary(max_size=500))
@settings(max_examples=300)
def test_any_bytes(kind: int, data: bytes) -> None:
    one_input(bytes([kind]) + data)


@given(st.lists(envelopes, min_size=1, max_size=3), mostly(0, edges), mostly(0, edges), st.integers(-2, 2))
@settings(max_examples=300)
def test_batch_pages(headers: list[bytes], count: int, length: int, more: int) -> None:
    """Right checksums; count and length are right unless drawn otherwise, in files that are long enough or nearly."""
    lengths = [int.from_bytes(header[80:88], "little") for header in headers]
    fits = segment.batch_bytes(lengths)
    fields = (
        struct.pack("<H4x", (count or len(headers)) & 0xFFFF)
        + bytes(8)
        + struct.pack("<QQ", 0, length or fits & (1 << 64) - 1)
    )
    page = (bytes(10) + fields).ljust(128, b"\0") + b"".join(headers)
    file_pages = min(max(0, 1 + fits // PAGE_BYTES + more), 65535)
    one_input(bytes([SEALED_PAGE, 1, 3]) + struct.pack("<H", file_pages) + page)


@given(st.integers(0, 40), mostly(0, edges), mostly(0, edges), mostly(0, edges), st.integers(1, 40))
@settings(max_examples=300)
def test_trailers(pages: int, offset: int, length: int, entries: int, right: int) -> None:
    """Right checksums; the three numbers are those of a footer of `right` entries unless drawn otherwise."""
    fields = struct.pack("<QQQ", offset or 3 * PAGE_BYTES, length or right * ENTRY_BYTES, entries or right)
    page = bytes(16) + bytes(8) + fields
    for file_pages in {pages, 3 + segment.footer_room(right) // PAGE_BYTES}:
        one_input(bytes([SEALED_PAGE, 2, 1]) + struct.pack("<H", file_pages) + page)


@given(st.sampled_from([0, 1, 2]), st.integers(0, 3), st.integers(0, 65535), st.binary(max_size=300), st.booleans())
def test_other_pages(kind: int, right: int, pages: int, content: bytes, sealed: bool) -> None:
    """Anything in the place of fields, with the checksum right or wrong."""
    one_input(bytes([SEALED_PAGE if sealed else PAGE, kind, right]) + struct.pack("<H", pages) + content)


@pytest.mark.slow
@given(st.integers(0, 8), st.lists(entries(), min_size=1, max_size=2))
@settings(max_examples=400)
@example(0, [ENTRY.pack(b"STWC", 1, 0, bytes(32), NAMESPACE, 3, 4096, bytes(24), bytes(16), 3 * PAGE_BYTES)])
def test_footers(pages: int, some: list[bytes]) -> None:
    """Right checksums; what the entries say may be anything."""
    assert ENTRY.size == ENTRY_BYTES
    one_input(bytes([FOOTER]) + struct.pack("<H", pages) + b"".join(some))


# Places where the format has its fields, so that small changes hit something that matters.
places = st.one_of(
    st.builds(lambda page, at: page * PAGE_BYTES + at, st.integers(0, 9), st.integers(0, 400)),
    st.integers(0, len(fuzz_format.GOOD) - 1),
)


@given(st.integers(0, 15), st.integers(0, 65535), st.lists(st.tuples(places, st.integers(0, 255)), max_size=8))
@settings(max_examples=300)
@example(0, 0, [])
def test_files(flags: int, length: int, patches: list[tuple[int, int]]) -> None:
    """A good segment, a few bytes changed, cut or grown, with none, some or all checksums made right afterwards."""
    changes = b"".join(struct.pack("<HB", place, value) for place, value in patches)
    one_input(bytes([PATCHED_FILE, flags]) + struct.pack("<H", length) + changes)


@given(st.one_of(st.text(max_size=40), st.from_regex(r"[0-9a-fA]{16}-[0-9a-fA]{16}\.seg", fullmatch=True)))
@example(str(NAME))
@example("../../../../../../../../etc/passwd-1.seg")
def test_names(text: str) -> None:
    """What is taken for a segment's name is exactly what this version would write."""
    name = SegmentName.parse(text)
    assert name is None or (str(name) == text and "/" not in text and 0 <= name.sequence < 1 << 63)


def test_the_good_file_is_found_whole() -> None:
    """The fuzzing starts from what is right, or it would show nothing."""
    found = fuzz_format.recovery.scan_segment(fuzz_format.MemoryFile(fuzz_format.GOOD), NAME, 1 << 20)  # type: ignore[arg-type]
    assert [len(entries) for entries in found.batches] == [3] and found.state is fuzz_format.recovery.State.SEALED
    keys = segment.select(found.batches[0], NAMESPACE).keys
    assert keys == list(fuzz_format.PAYLOADS) and envelope.VERSION == 1
