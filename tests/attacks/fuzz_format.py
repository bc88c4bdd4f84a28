"""The format under arbitrary bytes: `one_input` takes any bytes and makes of them what a hostile file could hold.

`test_fuzz_format.py` feeds it from hypothesis in every test run. As a program (`make fuzz SECONDS=60`) it is fed by
atheris, which follows the coverage; where atheris is not installed, by plain random mutation, which does not.

What must hold for every input: nothing but FormatError is raised; whatever a parser accepts lies in the file; what is
allocated does not exceed the file by much; a chunk that verifies is the one that was stored.
"""

from __future__ import annotations

import argparse
import contextlib
import random
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    sys.path[:0] = [str(Path(__file__).parents[2]), str(Path(__file__).parents[2] / "src")]
try:
    import atheris
except ImportError:
    atheris = None

if atheris is not None and __name__ == "__main__":
    with atheris.instrument_imports(include=["stowage.storage.format", "stowage.storage.disk.recovery"]):
        from stowage.storage.disk import recovery
        from stowage.storage.format import envelope, segment
else:
    from stowage.storage.disk import recovery
    from stowage.storage.format import envelope, segment

from stowage.core.geometry import PAGE_BYTES, round_up
from stowage.errors import FormatError
from stowage.storage.format.segment import BATCH_CHUNKS_MAX, ENTRIES_MAX, ENTRY_BYTES, SegmentName
from tests.segment_surgery import header_of

NAME = SegmentName(7, b"\1\2\3\4\5\6\7\x08")
NAMESPACE = bytes(range(32))
FILE_BYTES_MAX = 1 << 20
PAYLOADS = {bytes([n]) * 32: bytes([n]) * length for n, length in enumerate((4096, 1, 6000), start=1)}
KINDS = (b"STOWSEG1", b"STOWBAT1", b"STOWEND1")


class MemoryFile:
    """What recovery asks of a segment file, over bytes. `asked` is the longest single read."""

    def __init__(self, data: bytes) -> None:
        self.data = data
        self.bytes = len(data)
        self.asked = 0

    def read(self, buffers: list[memoryview], offset: int) -> int:
        done = 0
        for buffer in buffers:
            part = self.data[offset + done : offset + done + buffer.nbytes]
            buffer[: len(part)] = part
            done += len(part)
            self.asked = max(self.asked, buffer.nbytes)
        return done


def good_segment() -> bytes:
    """A sealed segment with the payloads above in two batches."""
    data = bytearray(segment.pack_segment_header(NAME, FILE_BYTES_MAX, NAMESPACE))
    batches = []
    chunks = list(PAYLOADS.items())
    for some in (chunks[:2], chunks[2:]):
        at, lengths = len(data), [len(payload) for _, payload in some]
        headers = [header_of(key, NAMESPACE, 3, payload) for key, payload in some]
        page = segment.pack_batch_page(NAME.id, at, headers, lengths)
        data += page + b"".join(payload + bytes(-len(payload) % PAGE_BYTES) for _, payload in some)
        batches.append(segment.parse_batch_page(page, NAME.id, at, FILE_BYTES_MAX)[0])
    return bytes(data + segment.pack_footer(batches, NAME.id, len(data)))


GOOD = good_segment()


def one_input(data: bytes) -> None:
    """The first byte says what the others are; see the functions below."""
    if data:
        (_page, _sealed_page, _footer, _patched_file)[data[0] % 4](data[1:])


def _page(data: bytes) -> None:
    """A page as it comes: of no kind, or with a checksum that is not right."""
    _parse_all(data[:PAGE_BYTES].ljust(PAGE_BYTES, b"\0"), ENTRIES_MAX * ENTRY_BYTES)


def _sealed_page(data: bytes) -> None:
    """A page with right magic, version and checksum: only its fields are hostile."""
    if len(data) < 4:
        return
    page = bytearray(data[4:PAGE_BYTES].ljust(PAGE_BYTES, b"\0"))
    page[:8], page[8:10] = KINDS[data[0] % 3], b"\1\0"
    if data[1] & 1:
        page[16:24] = NAME.id
    if data[1] & 2:
        page[24:32] = (PAGE_BYTES if data[0] % 3 == 1 else NAME.sequence).to_bytes(8, "little")
    page[112:128] = segment._page_digest(page)
    _parse_all(bytes(page), int.from_bytes(data[2:4], "little") * PAGE_BYTES)


def _parse_all(page: bytes, file_bytes: int) -> None:
    """All parsers of pages; what they accept lies in the file."""
    with contextlib.suppress(FormatError):
        segment.parse_segment_header(page, NAME)
    try:
        entries, end = segment.parse_batch_page(page, NAME.id, PAGE_BYTES, file_bytes)
    except FormatError:
        pass
    else:
        assert 0 < len(entries) <= BATCH_CHUNKS_MAX and PAGE_BYTES < end <= file_bytes
        _assert_within(entries, end)
    try:
        trailer = segment.parse_trailer(page, NAME.id, file_bytes)
    except FormatError:
        return
    entries_count, rest = divmod(trailer.footer_bytes, ENTRY_BYTES)
    assert 0 < entries_count <= ENTRIES_MAX and not rest and trailer.footer_offset >= 3 * PAGE_BYTES
    assert trailer.footer_offset + segment.footer_room(entries_count) == file_bytes


def _footer(data: bytes) -> None:
    """A footer with a right checksum: only its entries are hostile."""
    if len(data) < 2 + ENTRY_BYTES:
        return
    end = (3 + int.from_bytes(data[:2], "little")) * PAGE_BYTES
    footer = data[2 : 2 + (len(data) - 2) // ENTRY_BYTES * ENTRY_BYTES]
    trailer = segment.Trailer(end, len(footer), segment.xxhash.xxh3_128_digest(footer))
    for other in (segment.Trailer(end, len(footer), bytes(16)), segment.Trailer(end, len(footer) - 1, bytes(16))):
        try:
            segment.parse_footer(footer, other)
        except FormatError:
            continue
        raise AssertionError("a footer with a wrong checksum")
    try:
        entries = segment.parse_footer(footer, trailer)
    except FormatError:
        return
    _assert_within(entries, end)


def _assert_within(entries: Any, end: int) -> None:
    records = segment.select(entries, NAMESPACE)
    for offset, length, mask in zip(
        records.offsets.tolist(), records.lengths.tolist(), records.masks.tolist(), strict=True
    ):
        assert mask and length > 0 and offset >= 2 * PAGE_BYTES and not offset % PAGE_BYTES
        assert round_up(offset + length) <= end


def _patched_file(data: bytes) -> None:
    """A good segment with bytes changed wherever the input says (place as two bytes, then the byte), cut or grown, and
    then, if the input says so, with all checksums of pages and footer made right.
    """
    if len(data) < 3:
        return
    flags, length = data[0], int.from_bytes(data[1:3], "little")
    file = bytearray(GOOD)
    for at in range(3, len(data) - 2, 3):
        file[int.from_bytes(data[at : at + 2], "little") % len(file)] = data[at + 2]
    if flags & 1:
        footer = bytes(file[-2 * PAGE_BYTES : -2 * PAGE_BYTES + 3 * ENTRY_BYTES])
        file[-PAGE_BYTES + 48 : -PAGE_BYTES + 64] = segment.xxhash.xxh3_128_digest(footer)
    if flags & 2:
        for page in range(0, len(file), PAGE_BYTES):
            if bytes(file[page : page + 8]) in KINDS:
                file[page + 112 : page + 128] = segment._page_digest(file[page : page + PAGE_BYTES])
    if flags & 4:
        file = file[: length % len(file)] if flags & 8 else file + bytes(length)
    memory = MemoryFile(bytes(file))
    found = recovery.scan_segment(memory, NAME, FILE_BYTES_MAX)  # type: ignore[arg-type]
    assert memory.asked <= max(len(file) + PAGE_BYTES, recovery.AHEAD_BYTES)
    assert PAGE_BYTES <= found.end <= max(PAGE_BYTES, len(file))
    for entries in found.batches:
        records = segment.select(entries, NAMESPACE)
        columns = (records.keys, records.masks.tolist(), records.lengths.tolist(), records.offsets.tolist())
        for at, (key, mask, size, offset) in enumerate(zip(*columns, strict=True)):
            payload = bytes(file[offset : offset + size])
            assert len(payload) == size, "a chunk that does not lie in its file"
            if header_of(key, NAMESPACE, mask, payload)[-envelope.DIGEST_BYTES :] == records.digests[at].tobytes():
                assert PAYLOADS[key] == payload and mask == 3, "other bytes than were stored"


def _mutate(seconds: float) -> int:
    """Plain random inputs for so long; how many. What atheris would keep, this forgets."""
    chance = random.Random()
    until_s, count = time.monotonic() + seconds, 0
    while time.monotonic() < until_s:
        data = bytearray(chance.randbytes(chance.choice((4, 40, 140, 300, 1000, 4200))))
        if chance.random() < 0.5 and len(data) > 200:
            start = chance.randrange(len(GOOD) - len(data))
            data[1:] = GOOD[start : start + len(data) - 1]
            for _ in range(chance.randrange(8)):
                data[chance.randrange(len(data))] = chance.randrange(256)
        one_input(bytes(data))
        count += 1
    return count


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=int, default=60)
    seconds = parser.parse_args().seconds
    if atheris is None:
        print("atheris is not installed here: plain random inputs, which find less")
        print(f"{_mutate(seconds)} inputs, none of which broke a rule")
        return
    with tempfile.TemporaryDirectory() as corpus:
        for kind in range(5):
            (Path(corpus) / f"kind{kind}").write_bytes(bytes([kind]) + GOOD[:4200])
            (Path(corpus) / f"short{kind}").write_bytes(bytes([kind, 3, 0, 0]) + bytes(140))
        options = [f"-max_total_time={seconds}", "-max_len=5000", "-print_final_stats=1", "-verbosity=1"]
        atheris.Setup(
            [sys.argv[0], *options, f"-artifact_prefix={tempfile.gettempdir()}/stowage-fuzz-", corpus], one_input
        )
        atheris.Fuzz()


if __name__ == "__main__":
    main()
