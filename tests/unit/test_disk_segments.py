"""How stores go from one segment to the next: without a pause where that can be, and as before where it cannot."""

from __future__ import annotations

import errno
import os
import threading
import time
from pathlib import Path

import pytest

from stowage.core.geometry import PAGE_BYTES
from stowage.storage.disk.files import RealFileSystem
from stowage.storage.disk.system import System
from stowage.storage.format.segment import SegmentName
from tests.disk_client import Client, aligned
from tests.tier_client import keys_of, payload

MIB = 1 << 20
PATIENCE_S = 60.0


class Writes(RealFileSystem):
    """Notes what was written, by segment in the order of their making, offset and length, once it is."""

    def __init__(self) -> None:
        self.written: list[tuple[int, int, int]] = []
        self._inodes: list[int] = []
        self._lock = threading.Lock()

    def segment(self, fd: int) -> int:
        inode = os.fstat(fd).st_ino
        with self._lock:
            if inode not in self._inodes:
                self._inodes.append(inode)
            return self._inodes.index(inode)

    def pwritev(self, fd: int, buffers: list[memoryview], offset: int) -> int:
        done = super().pwritev(fd, buffers, offset)
        number = self.segment(fd)
        with self._lock:
            self.written.append((number, offset, done))
        return done


class LastPieceWaits(Writes):
    """Pieces of the first segment behind its first megabyte wait until a payload is in the second one."""

    def __init__(self) -> None:
        super().__init__()
        self.gone_on = threading.Event()

    def pwritev(self, fd: int, buffers: list[memoryview], offset: int) -> int:
        number, is_payload = self.segment(fd), sum(buffer.nbytes for buffer in buffers) > PAGE_BYTES
        if number == 0 and is_payload and offset > 4 * MIB:
            assert self.gone_on.wait(PATIENCE_S), "the next segment waits for the end of the one before"
        done = super().pwritev(fd, buffers, offset)
        if number == 1 and is_payload:
            self.gone_on.set()
        return done


def test_the_next_segment_is_begun_while_the_last_pieces_of_the_one_before_are_written(tmp_path: Path) -> None:
    files, names = LastPieceWaits(), keys_of(*range(20))
    with Client(tmp_path / "c", system=System(files=files), refresh_s=1e9, segment_bytes=10 * MIB) as client:
        assert client.store(names, [MIB] * 20).ok.all()
        assert files.gone_on.is_set() and client.stats()["segments"] == 3
        assert client.load(names, [MIB] * 20).ok.all()
        client.check()
    with Client(tmp_path / "c") as client:
        assert client.load(names, [MIB] * 20).ok.all()
        assert client.stats()["repaired_segments"] == 0, "all were sealed"


class FirstPageWaits(Writes):
    """The header page of the first segment waits until all payloads of the second one are written, and then some."""

    def __init__(self) -> None:
        super().__init__()
        self._gone_on = threading.Event()

    def pwritev(self, fd: int, buffers: list[memoryview], offset: int) -> int:
        number = self.segment(fd)
        if number == 0 and offset == PAGE_BYTES:
            assert self._gone_on.wait(PATIENCE_S), "the next segment waits for the end of the one before"
            time.sleep(0.05)  # a page that did not wait would be written now
        done = super().pwritev(fd, buffers, offset)
        if number == 1 and offset + done > 9 * MIB:
            self._gone_on.set()
        return done


def test_no_batch_is_whole_before_those_of_the_segment_before(tmp_path: Path) -> None:
    """Else a process that follows could take an older record of a key for the newest one."""
    files, names = FirstPageWaits(), keys_of(*range(18))
    with Client(tmp_path / "c", system=System(files=files), refresh_s=1e9, segment_bytes=10 * MIB) as client:
        assert client.store(names, [MIB] * 18).ok.all()
        pages = [number for number, offset, _ in files.written if offset == PAGE_BYTES]
        assert pages == [0, 1]
        client.check()


class FirstPayloadWaits(Writes):
    """The first payload waits for that of a third segment, but not for long."""

    def __init__(self) -> None:
        super().__init__()
        self.third_is_begun = threading.Event()

    def pwritev(self, fd: int, buffers: list[memoryview], offset: int) -> int:
        number = self.segment(fd)
        if number == 0 and offset == 2 * PAGE_BYTES:
            assert not self.third_is_begun.wait(0.2), "three segments at a time"
        elif number == 2:
            self.third_is_begun.set()
        return super().pwritev(fd, buffers, offset)


def test_no_more_than_two_segments_are_written_at_a_time(tmp_path: Path) -> None:
    """Each takes its full length of the limit until it is sealed."""
    files, names = FirstPayloadWaits(), keys_of(*range(32))
    with Client(tmp_path / "c", system=System(files=files), segment_bytes=MIB) as client:
        assert client.store(names, [128 << 10] * 32).ok.all()
        assert files.third_is_begun.is_set()
        client.check()


def test_segments_shorter_than_a_piece_follow_each_other(tmp_path: Path) -> None:
    names = keys_of(*range(64))
    with Client(tmp_path / "c", segment_bytes=MIB) as client:
        assert client.store(names, [128 << 10] * 64).ok.all()
        assert client.stats()["segments"] >= 10
        assert client.load(names, [128 << 10] * 64).ok.all()
        client.check()
    with Client(tmp_path / "c") as client:
        assert client.load(names, [128 << 10] * 64).ok.all()
        assert client.stats()["repaired_segments"] == 0


def test_where_no_two_segments_have_room_one_takes_the_place_of_the_other(tmp_path: Path) -> None:
    names = keys_of(*range(30))
    with Client(tmp_path / "c", limit_bytes=12 * MIB, segment_bytes=8 * MIB) as client:
        outcome = client.store(names, [MIB] * 30)
        assert outcome.ok.all(), "they were stored, and the first ones left again"
        there = client.hits(names)
        assert there[-1] and not there[0] and client.load(names[-2:], [MIB] * 2).ok.all()
        assert client.stats()["no_room"] == 0
        client.check()


class FailsToAllocate(RealFileSystem):
    """Making a segment fails, as often as it is told."""

    def __init__(self) -> None:
        self.failures = 0
        self.failed = 0

    def allocate(self, fd: int, length: int) -> None:
        if self.failures:
            self.failures -= 1
            self.failed += 1
            raise OSError(errno.EIO, "no")
        super().allocate(fd, length)


@pytest.mark.parametrize("failures", [1, 2])
def test_a_segment_that_cannot_be_begun_beside_another_is_tried_again_when_that_is_whole(
    tmp_path: Path, failures: int
) -> None:
    files, names = FailsToAllocate(), keys_of(*range(20))
    with Client(tmp_path / "c", system=System(files=files), segment_bytes=10 * MIB) as client:
        assert client.store(names[:1], [MIB]).ok.all()
        files.failures = failures
        outcome = client.store(names[1:], [MIB] * 19)
        assert files.failed == failures
        assert outcome.ok.all() if failures == 1 else 8 <= outcome.ok.sum() < 19
        stored = [names[0], *(name for name, ok in zip(names[1:], outcome.ok, strict=True) if ok)]
        assert client.load(stored, [MIB] * len(stored)).ok.all()
        client.check()
    with Client(tmp_path / "c") as client:
        assert client.load(stored, [MIB] * len(stored)).ok.all()


class SecondSegmentFails(Writes):
    """Payloads of the second segment cannot be written."""

    def pwritev(self, fd: int, buffers: list[memoryview], offset: int) -> int:
        if self.segment(fd) == 1 and sum(buffer.nbytes for buffer in buffers) > PAGE_BYTES:
            raise OSError(errno.EIO, "no")
        return super().pwritev(fd, buffers, offset)


def test_what_fails_in_the_next_segment_costs_nothing_of_the_one_before(tmp_path: Path) -> None:
    names = keys_of(*range(20))
    with Client(tmp_path / "c", system=System(files=SecondSegmentFails()), segment_bytes=10 * MIB) as client:
        outcome = client.store(names, [MIB] * 20)
        there = outcome.ok.tolist()
        assert there[0] and not there[-1] and there == sorted(there, reverse=True)
        assert client.hits(names) == there and client.stats()["write_errors"] == 1
        client.check()
    with Client(tmp_path / "c") as client:
        assert client.hits(names) == there
        assert client.load(names[: sum(there)], [MIB] * sum(there)).ok.all()


class RemovedMeanwhile(Writes):
    """Somebody removes the first segment when the second one is begun."""

    def __init__(self, directory: Path) -> None:
        super().__init__()
        self._directory = directory

    def allocate(self, fd: int, length: int) -> None:
        super().allocate(fd, length)
        names = sorted(path for path in self._directory.iterdir() if SegmentName.parse(path.name))
        if len(names) == 2:
            names[0].unlink()


def test_chunks_of_a_segment_that_was_removed_while_it_was_written_are_not_found(tmp_path: Path) -> None:
    names, files = keys_of(*range(20)), RemovedMeanwhile(tmp_path / "c")
    with Client(tmp_path / "c", system=System(files=files), segment_bytes=14 * MIB, refresh_s=1e9) as client:
        assert client.store(names, [MIB] * 20).ok.all()
        there = client.hits(names)
        assert there[-1] and not there[0]
        kept = [name for name, hit in zip(names, there, strict=True) if hit]
        assert client.load(kept, [MIB] * len(kept)).ok.all()
        client.check()


class GoesOnFirst(RealFileSystem):
    """Once armed, what lies behind the first megabytes of a segment waits until a payload is in another one."""

    def __init__(self) -> None:
        self.armed = False
        self._first = -1
        self.gone_on = threading.Event()

    def pwritev(self, fd: int, buffers: list[memoryview], offset: int) -> int:
        inode, is_payload = os.fstat(fd).st_ino, sum(buffer.nbytes for buffer in buffers) > PAGE_BYTES
        if self.armed and is_payload:
            if self._first < 0:
                self._first = inode
            if inode != self._first:
                self.gone_on.set()
            elif offset > 6 * MIB:
                assert self.gone_on.wait(PATIENCE_S), "the next segment waits for the end of the one before"
        return super().pwritev(fd, buffers, offset)


def test_what_is_being_written_is_not_copied_from_the_segment_that_goes_next(tmp_path: Path) -> None:
    """The copy would lie behind it, and be taken for the newest one by whoever opens the directory."""
    files, names = GoesOnFirst(), keys_of(*range(44))
    again, before = names[9], names[10]
    with Client(tmp_path / "c", 42 * MIB, system=System(files=files), refresh_s=1e9, segment_bytes=10 * MIB) as client:
        assert client.store(names[:28], [MIB] * 28).ok.all()  # nine in each of three segments, one in the fourth
        assert client.load([again, before], [MIB] * 2).ok.all()
        files.armed = True
        some = [*names[28:35], again, *names[35:]]
        assert client.store(some, [MIB] * len(some), [3 if name == again else 1 for name in some]).ok.all()
        assert files.gone_on.is_set() and client.stats()["rewritten"] == 1
        assert client.tier.lookup([again, before]).tolist() == [3, 1]
        client.check()
    with Client(tmp_path / "c", 42 * MIB) as client:
        assert client.tier.lookup([again, before]).tolist() == [3, 1]


class CopyWaits(RealFileSystem):
    """Once armed, the first payload that is written waits until it is told to go on."""

    def __init__(self) -> None:
        self.armed = False
        self.reached = threading.Event()
        self.go_on = threading.Event()

    def pwritev(self, fd: int, buffers: list[memoryview], offset: int) -> int:
        if self.armed and sum(buffer.nbytes for buffer in buffers) > PAGE_BYTES:
            self.armed = False
            self.reached.set()
            assert self.go_on.wait(PATIENCE_S)
        return super().pwritev(fd, buffers, offset)


def test_what_is_discarded_while_it_is_copied_does_not_come_back(tmp_path: Path) -> None:
    files, names = CopyWaits(), keys_of(*range(40))
    gone, kept = names[9], names[10]
    with Client(tmp_path / "c", 42 * MIB, system=System(files=files), refresh_s=1e9, segment_bytes=10 * MIB) as client:
        assert client.store(names[:36], [MIB] * 36).ok.all()  # nine in each of four segments
        assert client.load([gone, kept], [MIB] * 2).ok.all()
        files.armed = True  # the next that is written is a copy: nothing fits into the last segment
        transfer = client.transfer(names[36:37], aligned([MIB]))
        number = client.begin("store", transfer)
        assert files.reached.wait(PATIENCE_S)
        client.tier.discard([gone])
        files.go_on.set()
        assert client.outcome(number).ok.all()
        assert client.stats()["rewritten"] == 2
        assert client.tier.lookup([gone, kept]).tolist() == [0, 1]
        client.check()


@pytest.mark.parametrize("odd_at", [3, 12, 19])
def test_payloads_that_do_not_go_straight_to_the_disk_do_so_in_their_turn(tmp_path: Path, odd_at: int) -> None:
    """One that does not fill its last page, among those that do."""
    names, lengths = keys_of(*range(20)), [MIB] * 20
    lengths[odd_at] -= 100
    with Client(tmp_path / "c", segment_bytes=10 * MIB) as client:
        transfer = client.transfer(names, aligned(lengths))
        for name, length, buffer in zip(names, lengths, transfer.buffers, strict=True):
            buffer[:] = payload(name, length)
        assert client.outcome(client.begin("store", transfer)).ok.all()
        assert client.stats()["sealed_segments"] == client.stats()["segments"] - 1
        assert client.load(names, lengths).ok.all()
        client.check()
    with Client(tmp_path / "c") as client:
        assert client.load(names, lengths).ok.all()
        assert client.stats()["repaired_segments"] == 0
