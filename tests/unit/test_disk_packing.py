"""Packed chunks on disk and in shared stores: exact or absent, in either form, by every reader."""

from __future__ import annotations

import hashlib
import threading
import time
from collections import deque
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from stowage.core import lossless
from stowage.native import is_built
from stowage.native.switches import PURE_PYTHON
from stowage.storage.disk.counters import Counters
from stowage.storage.disk.packing import GROUP_BYTES, Packer, PackingRates
from stowage.storage.disk.scrub import scrub
from stowage.storage.disk.write_queue import GROUPS_AHEAD, WriteQueue
from stowage.storage.format.protection import Method, Protection, SecretKey
from stowage.storage.format.segment import PAGE_BYTES
from stowage.storage.objects import ObjectTier
from stowage.storage.protocol import Transfer
from tests.disk_client import NAMESPACE, NEVER_S, Client, aligned, key, only_segment, used_bytes

MIB = 1 << 20
METHODS = [Method.CHECKSUM, Method.BLAKE3, Method.AES_256_GCM]


def numbers(chunk: bytes, length: int) -> bytes:
    """bfloat16 as keys and values have them, other ones for each chunk."""
    seed = int.from_bytes(chunk[:8], "little")
    drawn = np.random.default_rng(seed).standard_normal(length // 2 + 1, np.float32)
    return (drawn.view(np.uint32) >> 16).astype("<u2").tobytes()[:length]


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


@pytest.mark.skipif(not is_built(), reason="no compiled code")
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
    monkeypatch.setattr("stowage.storage.disk.loader.leave_caches", lambda memory: gone.append(memory.nbytes))
    with Client(tmp_path / "c", compression="on", segment_bytes=16 * MIB) as client:
        assert client.store(KEYS, LENGTHS).ok.all() and client.load(KEYS, LENGTHS).ok.all()
        found = client.tier._index.find(KEYS)
    packed_bytes = sum(-(-length // PAGE_BYTES) * PAGE_BYTES for length in found.lengths[found.packed].tolist())
    assert sum(gone) == packed_bytes > 0, "all that was staged, and nothing else"


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


class StoppedClock:
    """Moves when it is told to."""

    now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


def loaded(rates: PackingRates, packed: bool, read_s: float, unpack_s: float = 0.0, readers: int = 1) -> None:
    """A run of a hundred bytes, read and unpacked by one of so many readers."""
    lengths = [70 if packed else 100]
    run: Any = SimpleNamespace(packed=[packed], lengths=lengths, buffers=[memoryview(bytearray(100))])
    rates.begin_read()
    rates.end_read(readers, run, read_s)
    if packed:
        rates.begin_unpack()
        rates.end_unpack(readers, run, unpack_s)


def test_packing_stops_where_it_makes_loads_slower() -> None:
    rates = PackingRates(time.monotonic)
    assert rates.pays(100, 70), "nothing was measured"
    loaded(rates, packed=True, read_s=70.0, unpack_s=80.0)
    assert rates.pays(100, 70) and not rates.pays(100, 101), "80 s instead of 100: it is read meanwhile"
    for _ in range(100):
        loaded(rates, packed=True, read_s=70.0, unpack_s=130.0)
    assert not rates.pays(100, 70), "130 s instead of 100"


def test_what_several_readers_unpack_at_once_is_shared_among_them() -> None:
    rates = PackingRates(time.monotonic)
    loaded(rates, packed=False, read_s=100.0)
    for _ in range(100):
        loaded(rates, packed=True, read_s=280.0, unpack_s=320.0, readers=4)
    assert rates.pays(100, 70), "each waits for the others' bytes: 80 s instead of 100"


def test_a_slow_time_long_ago_does_not_make_packing_look_good() -> None:
    rates = PackingRates(time.monotonic)
    loaded(rates, packed=False, read_s=1000.0)
    for _ in range(100):
        loaded(rates, packed=True, read_s=70.0, unpack_s=130.0)
    assert not rates.pays(100, 70)


def test_before_anything_was_loaded_storing_tells() -> None:
    rates = PackingRates(time.monotonic)
    rates.end_pack(rates.begin_pack(), 100 << 20, 1.0)
    assert rates.pays(100, 70) and rates.keeps_up(), "nothing was written"
    rates.end_write(rates.begin_write(), 100 << 20, 3.0)
    assert rates.pays(100, 70) and rates.keeps_up()
    rates = PackingRates(time.monotonic)
    rates.end_pack(rates.begin_pack(), 100 << 20, 3.0)
    rates.end_write(rates.begin_write(), 100 << 20, 1.0)
    assert not rates.pays(100, 70) and not rates.keeps_up()


def is_packed(packer: Packer, buffer: memoryview) -> bool:
    """Alone."""
    memory, _, (packed,) = packer.finish(packer.begin([buffer]))
    if memory is not None:
        packer.give_back(memory)
    return packed


def test_packing_that_holds_up_what_waits_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, waiting = StoppedClock(), [True]
    rates = PackingRates(clock)

    pack_frames = lossless.pack_frames

    def slowly(payloads: list[memoryview], most: list[int], step: int, room: memoryview) -> list[int]:
        clock.now_s += sum(payload.nbytes for payload, some in zip(payloads, most, strict=True) if some)
        return pack_frames(payloads, most, step, room)

    monkeypatch.setattr(lossless, "pack_frames", slowly)
    packer = Packer(Counters(), rates, lambda: waiting[0])
    buffers = aligned([1 << 20] * 100)
    for number, buffer in enumerate(buffers):
        buffer[:] = numbers(key(number), buffer.nbytes)

    def packed() -> int:
        return sum(is_packed(packer, buffer) for buffer in buffers)

    rates.end_write(rates.begin_write(), 1, 0.5)
    loaded(rates, packed=True, read_s=70.0, unpack_s=10.0)
    assert packed() < 6, "it takes twice as long as writing, and stores wait"
    waiting[0] = False
    assert packed() > 60, "nobody waits"


@pytest.fixture
def tried(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The lengths of chunks that were packed, or that this was tried with."""
    lengths: list[int] = []
    pack_frames = lossless.pack_frames

    def watched(payloads: list[memoryview], most: list[int], step: int, room: memoryview) -> list[int]:
        lengths.extend(payload.nbytes for payload, some in zip(payloads, most, strict=True) if some)
        return pack_frames(payloads, most, step, room)

    monkeypatch.setattr(lossless, "pack_frames", watched)
    return lengths


def of_numbers(count: int, length: int) -> list[memoryview]:
    buffers = aligned([length] * count)
    for number, buffer in enumerate(buffers):
        buffer[:] = numbers(key(number), length)
    return buffers


def of_noise(count: int, length: int) -> list[memoryview]:
    buffers = aligned([length] * count)
    for number, buffer in enumerate(buffers):
        buffer[:] = hashlib.shake_128(key(number)).digest(length)
    return buffers


def test_where_loads_get_slower_one_in_32_is_packed_so_that_rates_are_measured_anew(tried: list[int]) -> None:
    rates = PackingRates(time.monotonic)
    loaded(rates, packed=True, read_s=70.0, unpack_s=500.0)
    packer = Packer(Counters(), rates)
    buffers = of_numbers(100, 64 << 10)
    packed = [is_packed(packer, buffer) for buffer in buffers]
    assert [number for number, one in enumerate(packed) if one] == [31, 63, 95]
    assert len(tried) == 3, "what is written as it is was not packed before"
    for _ in range(100):
        loaded(rates, packed=True, read_s=70.0, unpack_s=1.0)
    assert all(is_packed(packer, buffer) for buffer in buffers)


@pytest.mark.parametrize("is_auto", [True, False])
def test_noise_is_hardly_tried_after_the_first_megabytes(tried: list[int], is_auto: bool) -> None:
    packer = Packer(Counters(), PackingRates(time.monotonic), is_auto=is_auto)
    assert not any(is_packed(packer, buffer) for buffer in of_noise(80, MIB))
    assert len(tried) < 16
    assert sum(is_packed(packer, buffer) for buffer in of_numbers(80, MIB)) > 40, "other bytes come"


def test_short_chunks_that_save_no_page_do_not_keep_others_from_being_packed(tried: list[int]) -> None:
    packer = Packer(Counters(), PackingRates(time.monotonic))
    short, long = of_numbers(500, PAGE_BYTES), of_numbers(10, 64 << 10)
    assert not any(is_packed(packer, buffer) for buffer in short) and not tried
    assert all(is_packed(packer, buffer) for buffer in long)
    noise = of_noise(200, 2 * PAGE_BYTES)
    assert not any(is_packed(packer, buffer) for buffer in noise) and len(tried) == len(long) + len(noise)
    assert all(is_packed(packer, buffer) for buffer in long), "these are few bytes"


def test_what_takes_fewer_bytes_is_written_so_though_it_packed_worse_than_others(tried: list[int]) -> None:
    rates = PackingRates(time.monotonic)
    loaded(rates, packed=False, read_s=100.0)
    loaded(rates, packed=True, read_s=87.5, unpack_s=10.0)
    packer = Packer(Counters(), rates)
    half = np.random.default_rng(0).standard_normal(MIB // 2, np.float32).astype(np.float16)
    (buffer,) = aligned([MIB])
    buffer[:] = half.tobytes()
    packed = [is_packed(packer, buffer) for _ in range(40)]
    assert packed.count(True) == len(tried) and all(packed[:5]) and not any(packed[12:39]), "0.86 is too much"


@pytest.mark.skipif(not is_built(), reason="no compiled code")
def test_other_threads_pack_what_comes_next_and_it_stays_in_its_order() -> None:
    count, length = 12, 3 * MIB
    buffers = aligned([length] * count)
    for number, buffer in enumerate(buffers):
        buffer[:] = numbers(key(number), length)
    transfers = deque(
        Transfer(
            at, [key(number) for number in range(at, at + 4)], buffers[at : at + 4], np.ones(4, np.uint64), NEVER_S
        )
        for at in range(0, count, 4)
    )
    packer = Packer(Counters(), PackingRates(time.monotonic), is_auto=False)
    stream = WriteQueue(lambda: transfers.popleft() if transfers else None, lambda _: True, packer)
    begun = stream.pack_ahead()
    assert len(begun) == GROUPS_AHEAD and not stream.pack_ahead(), "no more until some are taken"
    assert len(transfers) < 2, "of transfers that wait, too"
    threads = [threading.Thread(target=packing.work) for packing in reversed(begun)]
    for thread in threads:
        thread.start()
    written: list[bytes] = []
    while chunks := stream.ahead(100):
        assert all(chunks.packed) and chunks.masks == [1] * len(chunks)
        written += chunks.keys
        for chunk, payload in zip(chunks.keys, chunks.payloads, strict=True):
            raw = memoryview(bytearray(length))
            lossless.unpack(payload, raw)
            assert bytes(raw) == numbers(chunk, length)
        stream.take(len(chunks))
        begun = stream.pack_ahead()
        stream.written(len(chunks))
    for thread in threads:
        thread.join()
    assert written == [key(number) for number in range(count)] and not begun and len(stream.settled()) == 3


@pytest.mark.skipif(not is_built(), reason="no compiled code")
def test_no_more_is_packed_than_there_is_memory_for_and_all_of_it_comes_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("stowage.storage.disk.packing.MEMORY_BYTES", 2 * GROUP_BYTES)
    buffers = aligned([GROUP_BYTES] * 5)
    for number, buffer in enumerate(buffers):
        buffer[:] = numbers(key(number), buffer.nbytes)
    keys = [key(number) for number in range(5)]
    transfers = [Transfer(1, keys, buffers, np.ones(5, np.uint64), NEVER_S)]
    packer = Packer(Counters(), PackingRates(time.monotonic), is_auto=False)
    stream = WriteQueue(lambda: transfers.pop() if transfers else None, lambda _: True, packer)
    assert len(stream.pack_ahead()) == 2 and packer.is_full
    for number in range(2):
        assert stream.ahead(5).keys == [keys[number]]
        stream.take(1)
    assert not stream.ahead(5) and not stream.pack_ahead(), "what was taken has to be written first"
    stream.written(1)
    assert stream.ahead(1).keys == [keys[2]] and packer.is_full
    stream.written(1)
    assert len(stream.pack_ahead()) == 1
    stream.give_up()
    assert len(WriteQueue(lambda: None, lambda _: True, packer).pack_ahead()) == 0 and not packer.is_full
    again = [packer.begin(buffers[:1]) for _ in range(2)]
    assert packer.is_full
    for packing in again:
        packer.give_back(packing.buffer)


def test_what_fails_while_it_is_packed_ahead_fails_where_it_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: Any) -> list[int]:
        raise OSError("of some kind")

    monkeypatch.setattr(lossless, "pack_frames", fails)
    packer = Packer(Counters(), PackingRates(time.monotonic))
    packing = packer.begin(aligned([MIB]))
    packing.work()
    with pytest.raises(OSError, match="of some kind"):
        packer.finish(packing)


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
