"""Memory between reading and unpacking: how much is lent, and what is lent first."""

from __future__ import annotations

import mmap

import numpy as np
import pytest

from stowage.core import staging
from stowage.core.staging import Staging
from stowage.native import is_wanted

ROOM = 4 * mmap.PAGESIZE


def address(memory: memoryview) -> int:
    return int(np.frombuffer(memory, np.uint8).__array_interface__["data"][0])


def test_what_came_back_last_is_lent_first() -> None:
    memory = Staging(ROOM)
    first, second = memory.lend(ROOM), memory.lend(1)
    assert min(first.nbytes, second.nbytes) >= ROOM and not address(first) % mmap.PAGESIZE
    for nbytes, one in ((ROOM, first), (1, second)):
        memory.was_read(nbytes)
        memory.give_back(one, nbytes)
    assert address(memory.lend(5)) == address(second)
    assert address(memory.lend(5)) == address(first)
    memory.check()


def test_what_is_longer_is_not_kept() -> None:
    memory = Staging(ROOM)
    long = memory.lend(ROOM + 1)
    assert long.nbytes > ROOM
    memory.was_read(ROOM + 1)
    memory.give_back(long, ROOM + 1)
    assert memory.lend(ROOM).nbytes == ROOM
    memory.check()


def test_so_much_is_read_at_once_and_so_much_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(staging, "READING_BYTES", 2 * ROOM)
    monkeypatch.setattr(staging, "STAGED_BYTES", 3 * ROOM)
    memory = Staging(ROOM)
    lent = [memory.lend(ROOM), memory.lend(ROOM)]
    assert not memory.may_lend, "two are being read"
    memory.was_read(ROOM)
    assert memory.may_lend
    lent.append(memory.lend(ROOM))
    memory.was_read(ROOM)
    memory.was_read(ROOM)
    assert not memory.may_lend, "three wait to be unpacked"
    memory.give_back(lent.pop(), ROOM)
    assert memory.may_lend
    memory.check()


def test_where_there_is_no_memory_nothing_is_lent(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(_nbytes: int) -> memoryview:
        raise OSError("no memory")

    memory = Staging(ROOM)
    with monkeypatch.context() as patch:
        patch.setattr(staging, "pages", refuse)
        with pytest.raises(OSError, match="no memory"):
            memory.lend(1)
    memory.check()
    assert memory.may_lend and memory.lend(staging.STAGED_BYTES)


@pytest.mark.parametrize("first, after", [(0, 0), (0, ROOM), (1, 2), (63, 65), (777, ROOM - 5)])
def test_what_leaves_the_caches_keeps_its_bytes(first: int, after: int) -> None:
    raw = bytes(range(256)) * (ROOM // 256)
    memory = memoryview(bytearray(raw))
    staging.leave_caches(memory[first:after])
    assert bytes(memory) == raw


@pytest.mark.skipif(not is_wanted(), reason="no compiled code")
def test_only_memory_that_may_be_written_leaves_the_caches() -> None:
    with pytest.raises(BufferError):
        staging.leave_caches(memoryview(b"constant"))


def test_without_compiled_code_nothing_leaves_the_caches(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(staging, "is_wanted", lambda: False)
    staging.leave_caches(memoryview(b"constant"))
