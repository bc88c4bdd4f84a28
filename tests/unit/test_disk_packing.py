"""Packed chunks on disk and in shared stores: exact or absent, in either form, by every reader."""

from __future__ import annotations

import hashlib
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from stowage.core import lossless
from stowage.core.geometry import PAGE_BYTES
from stowage.native.switches import PURE_PYTHON
from stowage.storage.disk.scrub import scrub
from stowage.storage.format.protection import Method, Protection, SecretKey
from stowage.storage.objects import ObjectTier
from stowage.storage.protocol import Transfer
from tests.disk_client import NAMESPACE, Client, aligned, numbers, only_segment, used_bytes
from tests.native import needs_native
from tests.tier_client import NEVER_S, key

MIB = 1 << 20
METHODS = [Method.CHECKSUM, Method.BLAKE3, Method.AES_256_GCM]


@pytest.fixture(autouse=True)
def payloads_of_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tests.disk_client.payload", numbers)


def protection(method: Method) -> Protection:
    return Protection(method, [] if method is Method.CHECKSUM else [SecretKey(bytes(range(32)))])


LENGTHS = [64 << 10, 100_000, 3 * MIB + 77, 5000, 20_001, 1000, 2]
KEYS = [key(n) for n in range(len(LENGTHS))]


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("direct", [True, False])
def test_they_take_less_and_come_back_exactly(tmp_path: Path, method: Method, direct: bool) -> None:
    options: dict[str, Any] = {"protection": protection(method), "direct": direct}
    with Client(tmp_path / "c", compression="on", **options) as client:
        assert client.store(KEYS, LENGTHS).ok.all()
        assert client.load(KEYS, LENGTHS).ok.all()
        stats = client.stats()
        assert stats["packed"] == 5 and stats["packed_bytes_saved"] > 0.3 * (sum(LENGTHS) - 1002) - 5 * PAGE_BYTES
        assert 0 < stats["bytes_filled"] < sum(LENGTHS) < stats["bytes_used"], "as they lie there"
        assert stats["write_bytes"] < 0.71 * sum(LENGTHS)
        client.check()
    assert used_bytes(tmp_path / "c") < 0.72 * sum(LENGTHS)
    with Client(tmp_path / "c", compression="off", **options) as client:
        assert client.load(KEYS[::-1], LENGTHS[::-1]).ok.all(), "a tier that does not pack reads what is packed"
        wrong = [length + 2 for length in LENGTHS]
        assert not client.load(KEYS, wrong).ok.any(), "another length than was stored"


@needs_native
def test_without_compiled_code_they_are_read_and_not_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with Client(tmp_path / "c") as client:
        assert client.store(KEYS[:4], LENGTHS[:4]).ok.all() and client.stats()["packed"] == 4
    monkeypatch.setenv(PURE_PYTHON, "1")
    with Client(tmp_path / "c") as client:
        assert client.load(KEYS[:2], LENGTHS[:2]).ok.all()
        assert client.store([key("other")], [64 << 10]).ok.all() and client.stats()["packed"] == 0


def test_one_that_saves_no_page_lies_as_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with Client(tmp_path / "c", compression="on") as client:
        assert client.store([key("short")], [4096]).ok.all()
        monkeypatch.setattr("tests.disk_client.payload", lambda chunk, length: hashlib.shake_128(chunk).digest(length))
        noise = [key(("noise", n)) for n in range(100)]
        assert client.store(noise, [64 << 10] * 100).ok.all() and client.load(noise, [64 << 10] * 100).ok.all()
        assert client.stats()["packed"] == 0


def test_what_was_unpacked_leaves_the_caches_before_the_disk_fills_it_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gone: list[int] = []
    monkeypatch.setattr("stowage.storage.disk.loader.flush_from_caches", lambda memory: gone.append(memory.nbytes))
    with Client(tmp_path / "c", compression="on", segment_bytes=16 * MIB) as client:
        assert client.store(KEYS, LENGTHS).ok.all() and client.load(KEYS, LENGTHS).ok.all()
        found = client.tier._index.find(KEYS)
    packed_bytes = sum(-(-length // PAGE_BYTES) * PAGE_BYTES for length in found.lengths[found.packed].tolist())
    assert sum(gone) == packed_bytes > 0, "all that was staged, and nothing else"


def test_what_is_read_unpacked_packed_and_written_is_measured(tmp_path: Path) -> None:
    keys, length = [key(n) for n in range(32)], MIB
    with Client(tmp_path / "c", compression="on") as client:
        rates = client.tier._storer._rates
        for part in (keys[:16], keys[16:]):
            assert client.store(part, [length] * 16).ok.all() and client.load(part, [length] * 16).ok.all()
        stored = int(client.tier._index.find(keys).lengths.sum())
        assert rates.reading.measured_bytes(True) == stored and not rates.reading.measured_bytes(False)
        assert rates.unpacking.measured_bytes() == 32 * MIB
        assert rates.writing.measured_bytes() >= stored
        assert rates.packing.measured_bytes() == 16 * MIB, "the first ones were packed into new memory"
        assert all(meter.seconds() > 0 for meter in (rates.reading, rates.unpacking, rates.writing, rates.packing))


def test_damage_is_found_before_anything_is_unpacked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with Client(tmp_path / "c", compression="on", segment_bytes=16 * MIB) as client:
        assert client.store(KEYS[:3], LENGTHS[:3]).ok.all()
        found = client.tier._index.find(KEYS[:3])
        assert found.packed.all()
    with only_segment(tmp_path / "c").open("r+b") as file:
        for offset, length in zip(found.offsets.tolist()[1:], found.lengths.tolist()[1:], strict=True):
            file.seek(offset + length // 2)
            byte = file.read(1)[0]
            file.seek(-1, 1)
            file.write(bytes([byte ^ 4]))
    asked: list[int] = []
    unpack = lossless.unpack

    def watched(packed: memoryview, buffer: memoryview) -> None:
        asked.append(buffer.nbytes)
        unpack(packed, buffer)

    monkeypatch.setattr(lossless, "unpack", watched)
    report = scrub(tmp_path / "c", check=True)
    assert (report.good, report.bad) == (1, 2) and not asked
    with Client(tmp_path / "c") as client:
        assert client.load(KEYS[:3], LENGTHS[:3]).ok.tolist() == [True, False, False]
        assert client.stats()["corrupt"] == 2 and asked == LENGTHS[:1]
        assert client.hits(KEYS[:3]) == [True, False, False]


def test_scrub_removes_the_bad_ones_alone(tmp_path: Path) -> None:
    keys = [key(n) for n in range(12)]
    with Client(tmp_path / "c", compression="on") as client:
        assert client.store(keys, [64 << 10] * 12).ok.all()
        found = client.tier._index.find(keys)
    with only_segment(tmp_path / "c").open("r+b") as file:
        file.seek(int(found.offsets[5]) + 1000)
        file.write(b"\x00\x01\x02\x03")
    report = scrub(tmp_path / "c")
    assert (report.good, report.bad, report.removed) == (11, 1, 1)
    with Client(tmp_path / "c") as client:
        outcome = client.load(keys, [64 << 10] * 12)
        assert outcome.ok.tolist() == [n != 5 for n in range(12)] and client.stats()["corrupt"] == 0


@pytest.mark.parametrize("change, counter", [((4, 2), "unknown_codes"), ((8, 1), "corrupt"), ((17, 9), "corrupt")])
def test_what_cannot_be_unpacked_is_a_miss(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, change: tuple[int, int], counter: str
) -> None:
    """As a later version would write it, or somebody who makes valid checksums."""
    pack_frames = lossless.pack_frames

    def pack_strangely(payloads: list[memoryview], most: list[int], step: int, room: memoryview) -> list[int]:
        lengths = pack_frames(payloads, most, step, room)
        room[change[0]] = change[1]
        return lengths

    with Client(tmp_path / "c", compression="on") as client:
        monkeypatch.setattr(lossless, "pack_frames", pack_strangely)
        assert client.store(KEYS[:1], LENGTHS[:1]).ok.all()
        monkeypatch.undo()
        monkeypatch.setattr("tests.disk_client.payload", numbers)
        assert not client.load(KEYS[:1], LENGTHS[:1]).ok.any() and client.stats()[counter] == 1
        assert client.hits(KEYS[:1]) == [False]
        assert client.store(KEYS[:1], LENGTHS[:1]).ok.all() and client.load(KEYS[:1], LENGTHS[:1]).ok.all()


def test_hot_ones_are_copied_as_they_lie(tmp_path: Path) -> None:
    limit, length = 1 * MIB, 64 << 10
    with Client(tmp_path / "c", limit, compression="on", segment_bytes=256 << 10) as client:
        for n in range(60):
            assert client.store([key(n)], [length]).ok.all()
            assert client.load([key(0)], [length]).ok.all(), "it is hot, so it outlives its segment"
        stats = client.stats()
        assert stats["rewritten"] > 0 and stats["reclaimed_segments"] > 0
        assert client.tier._index.find([key(0)]).packed.all()
        client.check()


@pytest.mark.parametrize("method", METHODS)
def test_shared_stores_hold_them_packed(tmp_path: Path, method: Method) -> None:
    url = f"file://{tmp_path}/objects"
    buffers = aligned(LENGTHS)
    for chunk, buffer in zip(KEYS, buffers, strict=True):
        buffer[:] = numbers(chunk, buffer.nbytes)
    masks = np.ones(len(KEYS), np.uint64)

    def move(compression: str, verb: str, into: list[memoryview]) -> list[bool]:
        tier = ObjectTier(url, NAMESPACE, compression=compression, protection=protection(method))
        getattr(tier, verb)(Transfer(1, KEYS, into, masks, NEVER_S))
        while not (outcomes := tier.poll()):
            time.sleep(0.001)
        stats = tier.stats()
        assert stats["faults"] == 0 and (verb == "load" or stats["packed"] == (6 - 1 if compression == "on" else 0))
        tier.close(time.monotonic() + 10)
        return [bool(ok) for ok in outcomes[0].ok]

    assert all(move("on", "store", buffers))
    stored = sum(path.stat().st_size for path in (tmp_path / "objects").rglob("*") if path.is_file())
    assert stored < 0.7 * sum(LENGTHS)
    for compression in ("on", "off"):
        arrived = aligned(LENGTHS)
        assert all(move(compression, "load", arrived))
        assert [*map(bytes, arrived)] == [*map(bytes, buffers)]
    assert not any(move("on", "load", aligned([length + 1 for length in LENGTHS])))
