"""Hostile segment files, kept as code: damaged, truncated, swapped, extended, foreign, forged.

A file is stored well, attacked behind the tier's back, and opened again (or read by the tier that has it open). In all
cases: what is read is exact or absent (`Client.load` asserts it), the damage is counted, nothing raises, and the next
store makes it whole (F1).
"""

from __future__ import annotations

import os
import random
import shutil
import struct
import tracemalloc
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import xxhash

from stowage.storage.format import segment
from stowage.storage.format.segment import PAGE_BYTES, SegmentName
from tests.depth import few_or_all, mostly_rare
from tests.disk_client import Client, key, only_segment, payload, segments
from tests.segment_surgery import flip

NAMES = [key(n) for n in range(5)]
LENGTHS = [4096, 100, 8192, 4096, 6000]
FIRST_PAYLOAD = 2 * PAGE_BYTES
LIMIT = 8 << 20


@pytest.fixture
def stored(tmp_path: Path) -> Path:
    """A directory with one sealed segment of five chunks."""
    with Client(tmp_path / "good", LIMIT) as client:
        assert client.store(NAMES, LENGTHS).ok.all()
    return tmp_path / "good"


def read_and_repair(directory: Path, *, expect: list[bool] | None = None) -> dict[str, int]:
    """Opens, reads everything, stores everything, reads it again; returns the counters after the first reading."""
    with Client(directory, LIMIT) as client:
        outcome = client.load(NAMES, LENGTHS)
        counts = dict(client.stats())
        if expect is not None:
            assert outcome.ok.tolist() == expect
        assert client.hits(NAMES) == outcome.ok.tolist(), "what did not verify is not offered again"
        missing = [n for n, ok in enumerate(outcome.ok.tolist()) if not ok]
        assert client.store([NAMES[n] for n in missing], [LENGTHS[n] for n in missing]).ok.all()
        assert client.load(NAMES, LENGTHS).ok.all()
        client.check()
    with Client(directory, LIMIT) as client:
        assert client.load(NAMES, LENGTHS).ok.all(), "repaired for good"
    return counts


@pytest.mark.exhaustive
def test_every_flipped_bit_of_a_payload_is_a_miss(tmp_path: Path) -> None:
    """All 32,768 bits of a chunk: 512 chunks at a time, each with another bit flipped."""
    names, lengths = [key(n) for n in range(512)], [4096] * 512
    with Client(tmp_path / "c", 4 * LIMIT) as client:
        client.store(names, lengths)
    path = only_segment(tmp_path / "c")
    good = np.fromfile(path, np.uint8)
    batches, rest = divmod(np.arange(512), segment.BATCH_CHUNKS_MAX)
    starts = FIRST_PAYLOAD + PAGE_BYTES * (batches * (segment.BATCH_CHUNKS_MAX + 1) + rest)
    assert all(
        good[start : start + 4096].tobytes() == payload(name, 4096) for start, name in zip(starts, names, strict=True)
    )
    for first in range(0, 8 * 4096, few_or_all(8, 1) * 512):
        bits = first + np.arange(512)
        damaged = good.copy()
        damaged[starts + bits // 8] ^= (1 << bits % 8).astype(np.uint8)
        damaged.tofile(path)
        with Client(tmp_path / "c", LIMIT) as client:
            assert all(client.hits(names))
            assert not client.load(names, lengths).ok.any()
            assert client.stats()["corrupt"] == 512
    good.tofile(path)
    with Client(tmp_path / "c", LIMIT) as client:
        assert client.load(names, lengths).ok.all()


@pytest.mark.exhaustive
@pytest.mark.parametrize("page", ["header", "batch", "footer", "trailer"])
def test_every_flipped_bit_of_the_pages_is_a_miss_or_harmless(stored: Path, tmp_path: Path, page: str) -> None:
    size = only_segment(stored).stat().st_size
    first = {"header": 0, "batch": PAGE_BYTES, "footer": size - 2 * PAGE_BYTES, "trailer": size - PAGE_BYTES}[page]
    content = {"header": 128, "batch": 128 + 5 * 128, "footer": 5 * segment.ENTRY_BYTES, "trailer": 128}[page]
    for at, bit in enumerate([*range(0, 8 * content, few_or_all(211, 61)), 8 * content + 9, 8 * PAGE_BYTES - 1]):
        directory = tmp_path / f"{at}"
        shutil.copytree(stored, directory)
        flip(only_segment(directory), 8 * first + bit)
        with Client(directory, LIMIT, readers=1) as client:
            ok = client.load(NAMES, LENGTHS).ok
            # Footer and trailer are a copy of what the batches say, and the batches of what the footer says.
            assert ok.all() or page == "header", bit
            if page == "header":
                assert not ok.any() and client.stats()["damaged_segments"] == 1
                assert client.store(NAMES, LENGTHS).ok.all() and client.load(NAMES, LENGTHS).ok.all()
        shutil.rmtree(directory)


def test_a_flipped_batch_page_of_a_torn_segment_loses_only_what_follows(stored: Path) -> None:
    with Client(stored, LIMIT) as client:
        client.store([key("second")], [4096])
        client.store([key("third")], [4096])
    path = segments(stored)[-1]
    size = path.stat().st_size
    os.truncate(path, size - 1)  # no trailer: it will be scanned
    flip(path, 8 * (PAGE_BYTES + 2 * PAGE_BYTES) + 200)
    with Client(stored, LIMIT) as client:
        assert client.load([key("second"), key("third")], [4096] * 2).ok.tolist() == [True, False]
        assert client.stats()["repaired_segments"] == 1
        client.check()


@pytest.mark.exhaustive
def test_truncation_at_every_512_bytes(stored: Path, tmp_path: Path) -> None:
    size = only_segment(stored).stat().st_size
    for length in range(0, size, few_or_all(5, 1) * 512):
        directory = tmp_path / f"cut-{length}"
        shutil.copytree(stored, directory)
        os.truncate(only_segment(directory), length)
        shutil.copytree(directory, tmp_path / "opened")
        Client(tmp_path / "opened", LIMIT).close()
        assert all(path.stat().st_size <= length for path in segments(tmp_path / "opened")), (
            "repair makes nothing longer"
        )
        shutil.rmtree(tmp_path / "opened")
        counts = read_and_repair(directory)
        noticed = counts["damaged_segments"] + counts["repaired_segments"] + counts["removed_leftovers"]
        assert noticed or counts["reads"] == 5, length
        shutil.rmtree(directory)


def test_truncation_under_a_tier_that_has_it_open(stored: Path, tmp_path: Path) -> None:
    for length in range(0, FIRST_PAYLOAD + 4 * PAGE_BYTES, 512):
        directory = tmp_path / f"cut-{length}"
        shutil.copytree(stored, directory)
        with Client(directory, LIMIT, refresh_s=60) as client:
            os.truncate(only_segment(directory), length)
            outcome = client.load(NAMES, LENGTHS)
            assert not outcome.ok[-1]
            counted = client.stats()["corrupt"] + client.stats()["vanished"]
            assert counted == (~outcome.ok).sum()
            again = [n for n, ok in enumerate(outcome.ok.tolist()) if not ok]
            assert client.store([NAMES[n] for n in again], [LENGTHS[n] for n in again]).ok.all()
            assert client.load(NAMES, LENGTHS).ok.all()
        shutil.rmtree(directory)


@pytest.mark.parametrize("extra", [1, 511, 512, 4096, 5000, 1 << 20])
def test_appended_bytes_are_cut_off(stored: Path, extra: int) -> None:
    size = only_segment(stored).stat().st_size
    with only_segment(stored).open("ab") as file:
        file.write(os.urandom(extra))
    counts = read_and_repair(stored, expect=[True] * 5)
    assert counts["repaired_segments"] == 1
    assert only_segment(stored).stat().st_size == size


def test_swapped_payloads_are_misses(stored: Path) -> None:
    path = only_segment(stored)
    data = bytearray(path.read_bytes())
    first, fourth = FIRST_PAYLOAD, FIRST_PAYLOAD + PAGE_BYTES + PAGE_BYTES + 2 * PAGE_BYTES
    assert data[first : first + 4096] == payload(NAMES[0], 4096) and data[fourth:][:4096] == payload(NAMES[3], 4096)
    data[first : first + 4096], data[fourth : fourth + 4096] = data[fourth:][:4096], data[first:][:4096]
    path.write_bytes(data)
    counts = read_and_repair(stored, expect=[False, True, True, False, True])
    assert counts["corrupt"] == 2


def test_swapped_chunks_of_two_segments_are_misses(tmp_path: Path) -> None:
    """Two files that trade contents: each is whole and valid, in the wrong place."""
    for n in range(2):
        with Client(tmp_path / "c", LIMIT) as client:
            client.store([NAMES[n]], [4096])
    one, two = segments(tmp_path / "c")
    contents = one.read_bytes(), two.read_bytes()
    two.write_bytes(contents[0])
    one.write_bytes(contents[1])
    with Client(tmp_path / "c", LIMIT) as client:
        assert not any(client.hits(NAMES[:2]))
        assert client.stats()["damaged_segments"] == 2
        assert client.store(NAMES, LENGTHS).ok.all()


def test_a_segment_of_another_namespace_is_not_ours(stored: Path) -> None:
    with Client(stored, LIMIT, namespace=bytes(32)) as client:
        assert not any(client.hits(NAMES))
        assert not client.load(NAMES, LENGTHS).ok.any()
    # A header that claims the chunks for that namespace does not make them so: the envelopes say otherwise.
    path = only_segment(stored)
    name = SegmentName.parse(path.name)
    assert name is not None
    data = bytearray(path.read_bytes())
    data[:PAGE_BYTES] = segment.pack_segment_header(name, len(data), bytes(32))
    path.write_bytes(data)
    with Client(stored, LIMIT, namespace=bytes(32)) as client:
        assert not any(client.hits(NAMES))
    read_and_repair(stored, expect=[False] * 5)


def reseal(page: bytearray, place: int, value: bytes) -> bytes:
    """The page with other content and a right checksum."""
    page[place : place + len(value)] = value
    page[112:128] = segment._page_digest(page)
    return bytes(page)


@pytest.mark.parametrize("version", [0, 2, 65535])
def test_another_format_version_is_not_read(stored: Path, version: int) -> None:
    path = only_segment(stored)
    data = bytearray(path.read_bytes())
    data[:PAGE_BYTES] = reseal(data[:PAGE_BYTES], 8, struct.pack("<H", version))
    path.write_bytes(data)
    counts = read_and_repair(stored, expect=[False] * 5)
    assert counts["damaged_segments"] == 1


U64_MAX = (1 << 64) - 1
FORGED: dict[str, Callable[[bytearray], None]] = {}


def forged(place: int, value: int) -> Callable[[bytearray], None]:
    def attack(data: bytearray) -> None:
        data[-PAGE_BYTES:] = reseal(data[-PAGE_BYTES:], place, struct.pack("<Q", value))

    return attack


for place, field in ((24, "footer offset"), (32, "footer length"), (40, "entries")):
    for value in (0, 1, 135, 4096, 1 << 20, 1 << 40, (1 << 63) - 1, U64_MAX):
        FORGED[f"{field} {value}"] = forged(place, value)


@pytest.mark.parametrize("attack", FORGED.values(), ids=FORGED.keys())
def test_a_forged_trailer_neither_allocates_nor_lies(stored: Path, attack: Callable[[bytearray], None]) -> None:
    path = only_segment(stored)
    data = bytearray(path.read_bytes())
    attack(data)
    path.write_bytes(data)
    read_and_repair(stored, expect=[True] * 5)


@pytest.mark.parametrize("value", [0, 1, 4095, 12288, 1 << 40, (1 << 63) - 4096, U64_MAX - 4095, U64_MAX])
@pytest.mark.parametrize("column", ["length", "offset", "mask"])
def test_a_forged_footer_entry_neither_allocates_nor_lies(stored: Path, column: str, value: int) -> None:
    """The footer's and the trailer's checksums are right; only the entry says nonsense."""
    path = only_segment(stored)
    data = bytearray(path.read_bytes())
    start = len(data) - 2 * PAGE_BYTES
    place = start + {"mask": 72, "length": 80, "offset": 128}[column]
    data[place : place + 8] = struct.pack("<Q", value)
    footer = bytes(data[start : start + 5 * segment.ENTRY_BYTES])
    data[-PAGE_BYTES:] = reseal(data[-PAGE_BYTES:], 48, xxhash.xxh3_128_digest(footer))
    path.write_bytes(data)
    tracemalloc.start()
    with Client(stored, LIMIT) as client:
        outcome = client.load(NAMES, LENGTHS)
        assert client.store(NAMES, LENGTHS).ok.all() and client.load(NAMES, LENGTHS).ok.all()
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 4 << 20
    assert outcome.ok[1:].all()


def test_a_sparse_giant_is_not_read(stored: Path) -> None:
    """As long as a file can be, and empty: neither its length nor its trailer is believed."""
    os.truncate(only_segment(stored), 1 << 43)
    with Client(stored, LIMIT) as client:
        assert not any(client.hits(NAMES))
        assert client.store(NAMES, LENGTHS).ok.all()
        assert client.load(NAMES, LENGTHS).ok.all()
        client.check()


@pytest.mark.parametrize("seed", mostly_rare(range(30), range(10)))
def test_random_garbage_over_any_part(stored: Path, seed: int) -> None:
    chance = random.Random(seed)
    path = only_segment(stored)
    data = bytearray(path.read_bytes())
    for _ in range(chance.randrange(1, 4)):
        start = chance.randrange(len(data))
        length = min(chance.choice([1, 16, 128, 512, 4096, 9000]), len(data) - start)
        data[start : start + length] = chance.randbytes(length)
    path.write_bytes(data)
    read_and_repair(stored)
