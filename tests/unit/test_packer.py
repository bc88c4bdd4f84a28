"""Which chunks the disk's writer packs, as rates and other chunks tell, and what is packed ahead of it."""

from __future__ import annotations

import hashlib
import threading
import time
from collections import deque
from typing import Any

import numpy as np
import pytest

from stowage.core import lossless
from stowage.core.geometry import PAGE_BYTES
from stowage.storage.disk.counters import Counters
from stowage.storage.disk.packing import GROUP_BYTES, Packer
from stowage.storage.disk.packing_rates import JUDGED_BYTES, PackingRates
from stowage.storage.disk.write_queue import GROUPS_AHEAD, WriteQueue
from stowage.storage.protocol import Transfer
from tests.disk_client import aligned, numbers
from tests.native import needs_native
from tests.tier_client import NEVER_S, key

MIB = 1 << 20


class StoppedClock:
    """Moves when it is told to."""

    now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


def rates_by(read_s: float, unpack_s: float) -> PackingRates:
    """Enough was loaded to tell: what a byte took to be read and unpacked."""
    clock = StoppedClock()
    rates = PackingRates(clock)
    for meter, byte_s in ((rates.reading, read_s), (rates.unpacking, unpack_s)):
        begun = meter.begin(JUDGED_BYTES)
        clock.now_s += byte_s * JUDGED_BYTES
        meter.end(begun, JUDGED_BYTES)
    return rates


def is_packed(packer: Packer, buffer: memoryview) -> bool:
    """Alone."""
    memory, _, (packed,) = packer.finish(packer.begin([buffer]))
    if memory is not None:
        packer.give_back(memory)
    return packed


def test_packing_that_holds_up_what_waits_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("stowage.storage.disk.packing_rates.JUDGED_BYTES", 4 * MIB)
    clock, waiting = StoppedClock(), [True]
    rates = PackingRates(clock)
    new_memory_s = [100.0 * MIB]
    pack_frames = lossless.pack_frames

    def slowly(payloads: list[memoryview], most: list[int], step: int, room: memoryview) -> list[int]:
        clock.now_s += sum(payload.nbytes for payload, some in zip(payloads, most, strict=True) if some)
        if new_memory_s:
            clock.now_s += new_memory_s.pop()
        return pack_frames(payloads, most, step, room)

    monkeypatch.setattr(lossless, "pack_frames", slowly)
    packer = Packer(Counters(), rates, lambda: waiting[0])
    buffers = of_numbers(100, MIB)

    def packed() -> int:
        return sum(is_packed(packer, buffer) for buffer in buffers)

    def written(byte_s: float) -> None:
        begun = rates.writing.begin(MIB)
        clock.now_s += MIB * byte_s
        rates.writing.end(begun, MIB)

    written(1.5)
    assert packed() == 100, "the memory that was new is not what packing takes"
    written(0.5)
    assert packed() <= 4, "it takes twice as long as writing, and stores wait"
    waiting[0] = False
    assert packed() == 100, "nobody waits"


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


def test_where_loads_would_be_slower_chunks_are_not_even_tried(tried: list[int]) -> None:
    packer = Packer(Counters(), rates_by(read_s=1.0, unpack_s=5.0))
    assert not any(is_packed(packer, buffer) for buffer in of_numbers(100, 64 << 10)) and not tried
    packer = Packer(Counters(), rates_by(read_s=1.0, unpack_s=5.0), is_auto=False)
    assert all(is_packed(packer, buffer) for buffer in of_numbers(100, 64 << 10)), "always packed"


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
    packer = Packer(Counters(), PackingRates(time.monotonic))
    half = np.random.default_rng(0).standard_normal(MIB // 2, np.float32).astype(np.float16)
    (buffer,) = aligned([MIB])
    buffer[:] = half.tobytes()
    packed = [is_packed(packer, buffer) for _ in range(40)]
    assert all(packed) and len(tried) == len(packed), "0.86"


@needs_native
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
    while chunks := stream.peek(100):
        assert all(chunks.packed) and chunks.masks == [1] * len(chunks)
        written += chunks.keys
        for chunk, payload in zip(chunks.keys, chunks.payloads, strict=True):
            raw = memoryview(bytearray(length))
            lossless.unpack(payload, raw)
            assert bytes(raw) == numbers(chunk, length)
        stream.take(len(chunks))
        begun = stream.pack_ahead()
        stream.payloads_written(len(chunks))
        stream.written(len(chunks))
    for thread in threads:
        thread.join()
    assert written == [key(number) for number in range(count)] and not begun and len(stream.pop_finished()) == 3


@needs_native
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
        assert stream.peek(5).keys == [keys[number]]
        stream.take(1)
    assert not stream.peek(5) and not stream.pack_ahead(), "the payloads that were taken have to be written first"
    stream.payloads_written(1)
    assert stream.peek(1).keys == [keys[2]] and packer.is_full
    stream.payloads_written(1)
    assert len(stream.pack_ahead()) == 1
    stream.written(2)
    with pytest.raises(AssertionError):
        stream.written(1)
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
