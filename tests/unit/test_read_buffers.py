"""Buffers between reading and unpacking: how much may be held, and which one is reused first."""

from __future__ import annotations

import mmap

import numpy as np
import pytest

from stowage.core import read_buffers
from stowage.core.read_buffers import ReadBuffers
from stowage.native import is_wanted

BUFFER_BYTES = 4 * mmap.PAGESIZE


def address(memory: memoryview) -> int:
    return int(np.frombuffer(memory, np.uint8).__array_interface__["data"][0])


def test_the_buffer_released_last_is_reused_first() -> None:
    buffers = ReadBuffers(BUFFER_BYTES)
    first, second = buffers.acquire(BUFFER_BYTES), buffers.acquire(1)
    assert min(first.nbytes, second.nbytes) >= BUFFER_BYTES and not address(first) % mmap.PAGESIZE
    for nbytes, one in ((BUFFER_BYTES, first), (1, second)):
        buffers.read_done(nbytes)
        buffers.release(one, nbytes)
    assert address(buffers.acquire(5)) == address(second)
    assert address(buffers.acquire(5)) == address(first)
    buffers.check()


def test_a_longer_buffer_is_not_kept() -> None:
    buffers = ReadBuffers(BUFFER_BYTES)
    long = buffers.acquire(BUFFER_BYTES + 1)
    assert long.nbytes > BUFFER_BYTES
    buffers.read_done(BUFFER_BYTES + 1)
    buffers.release(long, BUFFER_BYTES + 1)
    assert buffers.acquire(BUFFER_BYTES).nbytes == BUFFER_BYTES
    buffers.check()


def test_bytes_in_flight_and_bytes_held_have_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(read_buffers, "IN_FLIGHT_BYTES_MAX", 2 * BUFFER_BYTES)
    monkeypatch.setattr(read_buffers, "HELD_BYTES_MAX", 3 * BUFFER_BYTES)
    buffers = ReadBuffers(BUFFER_BYTES)
    held = [buffers.acquire(BUFFER_BYTES), buffers.acquire(BUFFER_BYTES)]
    assert not buffers.can_acquire, "two are being read"
    buffers.read_done(BUFFER_BYTES)
    assert buffers.can_acquire
    held.append(buffers.acquire(BUFFER_BYTES))
    buffers.read_done(BUFFER_BYTES)
    buffers.read_done(BUFFER_BYTES)
    assert not buffers.can_acquire, "three wait to be unpacked"
    buffers.release(held.pop(), BUFFER_BYTES)
    assert buffers.can_acquire
    buffers.check()


def test_where_there_is_no_memory_nothing_counts_as_held(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(_nbytes: int) -> memoryview:
        raise OSError("no memory")

    buffers = ReadBuffers(BUFFER_BYTES)
    with monkeypatch.context() as patch:
        patch.setattr(read_buffers, "pages", refuse)
        with pytest.raises(OSError, match="no memory"):
            buffers.acquire(1)
    buffers.check()
    assert buffers.can_acquire and buffers.acquire(read_buffers.HELD_BYTES_MAX)


@pytest.mark.parametrize("first, after", [(0, 0), (0, BUFFER_BYTES), (1, 2), (63, 65), (777, BUFFER_BYTES - 5)])
def test_what_leaves_the_caches_keeps_its_bytes(first: int, after: int) -> None:
    raw = bytes(range(256)) * (BUFFER_BYTES // 256)
    memory = memoryview(bytearray(raw))
    read_buffers.flush_from_caches(memory[first:after])
    assert bytes(memory) == raw


@pytest.mark.skipif(not is_wanted(), reason="no compiled code")
def test_only_memory_that_may_be_written_leaves_the_caches() -> None:
    with pytest.raises(BufferError):
        read_buffers.flush_from_caches(memoryview(b"constant"))


def test_without_compiled_code_nothing_leaves_the_caches(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(read_buffers, "is_wanted", lambda: False)
    read_buffers.flush_from_caches(memoryview(b"constant"))
