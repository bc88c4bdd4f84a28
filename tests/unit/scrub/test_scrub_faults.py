"""`scrub` may be killed or disturbed at any moment: by its disk, by others, by the end of its process."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from stowage.storage.disk.files import RealFileSystem
from stowage.storage.disk.system import System
from tests.disk_client import segments
from tests.numbered_chunks import Cache, Place, copy_of, fill

# Disks that fail


class BadSectors(RealFileSystem):
    """Reads of a range of one file fail; `times` bounds how often."""

    def __init__(self, place: Place, code: int = errno.EIO, times: int = 1 << 30) -> None:
        self._place = place
        self._code = code
        self.times = times

    def preadv(self, fd: int, buffers: list[memoryview], offset: int) -> int:
        length = sum(buffer.nbytes for buffer in buffers)
        here = os.readlink(f"/proc/self/fd/{fd}") == str(self._place.path)
        start, end = self._place.offset, self._place.offset + self._place.length
        if here and offset < end and offset + length > start and self.times > 0:
            self.times -= 1
            raise OSError(self._code, os.strerror(self._code))
        return super().preadv(fd, buffers, offset)


def test_an_unreadable_chunk_is_bad_and_its_neighbours_are_not(cache: Cache) -> None:
    system = System(files=BadSectors(cache.places[40]))
    report = cache.scrub(system=system)
    assert (report.bad, report.unreadable, report.removed, report.good) == (1, 1, 1, 199) and report.is_clean
    assert report.listed[0].unreadable
    assert cache.found() == set(range(200)) - {40}


def test_a_read_that_fails_once_costs_nothing(cache: Cache) -> None:
    report = cache.scrub(system=System(files=BadSectors(cache.places[40], times=2)))  # together, then alone
    assert (report.bad, report.vanished, report.removed) == (1, 1, 0) and report.is_clean
    assert cache.found() == set(range(200))


def test_a_machine_without_memory_says_nothing_about_chunks(cache: Cache) -> None:
    report = cache.scrub(system=System(files=BadSectors(cache.places[40], errno.ENOMEM)))
    assert (report.bad, report.left, report.removed) == (1, 1, 0) and not report.is_clean
    assert len(report.errors) == 1 and cache.places[40].path.name in report.errors[0]
    assert cache.found() == set(range(200))


def test_a_machine_without_memory_says_nothing_about_segments(cache: Cache) -> None:
    victim = segments(cache.directory)[0]
    report = cache.scrub(system=System(files=BadSectors(Place(victim, 0, 4096), errno.ENOMEM)))
    assert len(report.errors) == 1 and not report.is_clean and report.damaged_segments == 0
    assert cache.found() == set(range(200))


def test_an_unreadable_header_page_costs_the_segment_and_the_rest_is_verified(cache: Cache) -> None:
    victim = segments(cache.directory)[0]
    lost = {n for n, place in cache.places.items() if place.path == victim}
    cache.flip(max(cache.places))
    report = cache.scrub(system=System(files=BadSectors(Place(victim, 0, 4096))))
    assert (report.damaged_segments, report.removed) == (1, 1) and not victim.exists()
    assert cache.found() == set(range(199)) - lost


class NoWrites(RealFileSystem):
    def pwritev(self, fd: int, buffers: list[memoryview], offset: int) -> int:
        raise OSError(errno.EIO, os.strerror(errno.EIO))


def test_a_disk_that_takes_no_writes_is_reported(cache: Cache) -> None:
    cache.flip(9)
    report = cache.scrub(system=System(files=NoWrites()))
    assert (report.bad, report.left) == (1, 1) and report.errors and not report.is_clean
    assert cache.loaded() == set(range(200)) - {9}


class Meanwhile(RealFileSystem):
    """Calls something at the n-th read of a payload."""

    def __init__(self, at: int, event: Callable[[], None]) -> None:
        self._left = at
        self._event = event

    def preadv(self, fd: int, buffers: list[memoryview], offset: int) -> int:
        self._left -= 1
        if self._left == 0:
            self._event()
        return super().preadv(fd, buffers, offset)


@pytest.mark.parametrize("at", range(1, 14))
def test_a_segment_that_is_reclaimed_meanwhile(cache: Cache, at: int) -> None:
    victim = segments(cache.directory)[0]
    mine = [n for n, place in cache.places.items() if place.path == victim]
    cache.flip(*mine[:3], 150)

    def reclaim() -> None:
        with victim.open("r+b") as file:
            file.truncate(0)
        victim.unlink()

    report = cache.scrub(system=System(files=Meanwhile(at, reclaim)))
    assert report.is_clean and report.errors == [] and not victim.exists()
    assert cache.found() == set(range(200)) - set(mine) - {150}


# Killed


class Killed(BaseException):
    """The process is gone."""


class KilledAt(RealFileSystem):
    """The n-th change of a file is the last; `half`: a write that is under way gets that far."""

    def __init__(self, at: int, half: bool) -> None:
        self._left = at
        self._half = half

    def _is_last(self) -> bool:
        self._left -= 1
        return self._left == 0

    def pwritev(self, fd: int, buffers: list[memoryview], offset: int) -> int:
        if self._is_last():
            if self._half:
                data = b"".join(buffers)
                os.lseek(fd, 0, os.SEEK_SET)
                super().pwritev(fd, [_aligned(data[: len(data) // 8192 * 4096])], offset)
            raise Killed
        return super().pwritev(fd, buffers, offset)

    def truncate(self, fd: int, length: int) -> None:
        if self._is_last():
            raise Killed
        super().truncate(fd, length)

    def unlink(self, name: str, dir_fd: int) -> None:
        if self._is_last():
            raise Killed
        super().unlink(name, dir_fd)


def _aligned(data: bytes) -> memoryview:
    memory = np.zeros(len(data) + 4096, np.uint8)
    start = -memory.ctypes.data % 4096
    memory[start : start + len(data)] = np.frombuffer(data, np.uint8)
    return memory[start : start + len(data)].data


@pytest.mark.parametrize("half", [False, True])
def test_killed_at_every_change_it_loses_nothing_good(tmp_path: Path, half: bool) -> None:
    filled = fill(tmp_path / "filled", 80)
    at = 0
    while True:
        at += 1
        cache = copy_of(filled, tmp_path / f"c{at}")
        victim = segments(cache.directory)[0]
        bad = {n for n, place in cache.places.items() if place.path == victim} | {60, 61, 75}
        torn = segments(cache.directory)[-1]
        torn.write_bytes(torn.read_bytes()[:-4096] + bytes(65536))
        cache.flip(*bad)
        try:
            cache.scrub(system=System(files=KilledAt(at, half)))
        except Killed:
            pass
        else:
            break
        good = set(range(80)) - bad
        assert cache.loaded() >= good, f"killed at change {at}"
        report = cache.scrub()
        assert report.is_clean and cache.found() == good
    assert at > 6
