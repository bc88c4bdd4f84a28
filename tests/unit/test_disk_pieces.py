"""What the disk tier writes in pieces, several at a time, and what it does when some of them fail."""

from __future__ import annotations

import errno
import fcntl
import itertools
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from stowage.core.geometry import PAGE_BYTES
from stowage.storage.disk.files import RealFileSystem
from stowage.storage.disk.system import System
from stowage.testing.faults import FaultyFileSystem
from tests.disk_client import Client, aligned, only_segment
from tests.tier_client import keys_of, payload

CHUNK_BYTES = 1 << 20
PATIENCE_S = 60.0


class Order(RealFileSystem):
    """Notes what was written where, once it is. Payloads of the first batch are held back until others have passed.
    Those from ``fails_from`` on fail, when ``fails_after`` bytes of payloads before them are written.
    """

    def __init__(self, held_below: int, passed_first: int) -> None:
        self.written: list[tuple[int, int]] = []
        self.fails_from = 1 << 62
        self.fails_after = 0
        self._held_below, self._passed_first = held_below, passed_first
        self._lock = threading.Lock()
        self._passed = threading.Semaphore(0)

    def pwritev(self, fd: int, buffers: list[memoryview], offset: int) -> int:
        length = sum(buffer.nbytes for buffer in buffers)
        if length > PAGE_BYTES:
            if offset >= self.fails_from:
                self._wait_for_those_before()
                raise OSError(errno.EIO, "no")
            if offset < self._held_below:
                for _ in range(self._passed_first):
                    assert self._passed.acquire(timeout=PATIENCE_S), "payloads are not written at the same time"
                self._passed_first = 0
        done = super().pwritev(fd, buffers, offset)
        with self._lock:
            self.written.append((offset, length))
        if offset >= self._held_below:
            self._passed.release()
        return done

    def _wait_for_those_before(self) -> None:
        until_s = time.monotonic() + PATIENCE_S
        while self.fails_after > sum(length for _, length in list(self.written) if length > PAGE_BYTES):
            assert time.monotonic() < until_s, "the payloads before it are not written"
            time.sleep(0.01)
        time.sleep(0.1)  # so that whoever wrote the last of them has said so


def test_a_header_page_is_written_after_all_payloads_of_its_batch(tmp_path: Path) -> None:
    """Also where a later batch was quicker."""
    batch_bytes = 31 * 256 * 1024
    files = Order(held_below=2 * PAGE_BYTES + (4 << 20), passed_first=2)
    names = keys_of(*range(62))
    with Client(tmp_path / "c", system=System(files=files), segment_bytes=32 << 20) as client:
        assert client.store(names, [256 * 1024] * 62).ok.all()
        headers = [(at, offset) for at, (offset, length) in enumerate(files.written) if length == PAGE_BYTES and offset]
        headers.sort(key=lambda header: header[1])  # their own order does not matter
        for number, (at, offset) in enumerate(headers[:2]):
            assert offset == PAGE_BYTES + number * (PAGE_BYTES + batch_bytes)
            begin, end = offset + PAGE_BYTES, offset + PAGE_BYTES + batch_bytes
            for place, length in sorted(files.written[:at]):
                if place <= begin:
                    begin = max(begin, place + length)
            assert begin >= end, "not all of it"
        assert client.load(names, [256 * 1024] * 62).ok.all()
        client.check()


def test_a_batch_whose_payloads_failed_is_absent_and_those_before_it_are_not(tmp_path: Path) -> None:
    files = Order(held_below=0, passed_first=0)
    names = keys_of(*range(93))
    with Client(tmp_path / "c", system=System(files=files), segment_bytes=32 << 20) as client:
        files.fails_after = 31 * 256 * 1024
        files.fails_from = 2 * PAGE_BYTES + 31 * 256 * 1024 + PAGE_BYTES // 2  # the second batch's first payload
        outcome = client.store(names, [256 * 1024] * 93)
        assert outcome.ok.tolist() == [True] * 31 + [False] * 62
        assert client.hits(names) == [True] * 31 + [False] * 62
        client.check()
    with Client(tmp_path / "c") as client:
        assert client.load(names[:31], [256 * 1024] * 31).ok.all()
        assert not any(client.hits(names[31:]))


def test_batches_that_were_whole_before_the_disk_failed_are_kept(tmp_path: Path) -> None:
    """Their header pages were under way with payloads of later batches, of which the first failed."""
    files = Order(held_below=0, passed_first=0)
    names, length = keys_of(*range(186)), 256 << 10
    with Client(tmp_path / "c", system=System(files=files), segment_bytes=56 << 20) as client:
        files.fails_after = 62 * length
        files.fails_from = PAGE_BYTES + 2 * (PAGE_BYTES + 31 * length) + PAGE_BYTES  # the third batch's first payload
        outcome = client.store(names, [length] * 186)
        assert outcome.ok.tolist() == [True] * 62 + [False] * 124
        assert client.stats()["faults"] == 0
        assert client.load(names[:62], [length] * 62).ok.all()
    with Client(tmp_path / "c") as client:
        assert client.hits(names) == [True] * 62 + [False] * 124
        client.check()


def test_a_transfer_of_many_pieces_goes_on_in_the_next_segment(tmp_path: Path) -> None:
    names = keys_of(*range(24))
    with Client(tmp_path / "c", segment_bytes=10 << 20) as client:
        assert client.store(names, [CHUNK_BYTES] * 24).ok.all()
        assert client.stats()["segments"] >= 3
        assert client.load(names[::-1], [CHUNK_BYTES] * 24).ok.all()
        client.check()


def test_a_transfer_of_many_batches_leaves_room_for_the_footer_of_all_its_chunks(tmp_path: Path) -> None:
    names = keys_of(*range(400))
    with Client(tmp_path / "c", segment_bytes=1 << 20) as client:
        assert client.store(names, [PAGE_BYTES] * 400).ok.all()
        client.check()
    assert all(path.stat().st_size <= 1 << 20 for path in (tmp_path / "c").glob("*.seg"))
    with Client(tmp_path / "c") as client:
        assert client.load(names, [PAGE_BYTES] * 400).ok.all()


class NotDirect(RealFileSystem):
    """Takes O_DIRECT when a file is opened, and refuses it from when two threads write payloads at the same time."""

    def __init__(self) -> None:
        self._met = threading.Barrier(2)
        self._writing = itertools.count()

    def pwritev(self, fd: int, buffers: list[memoryview], offset: int) -> int:
        direct = fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_DIRECT
        if direct and sum(buffer.nbytes for buffer in buffers) > PAGE_BYTES:
            if next(self._writing) < 2:  # a third one may come before these have told anybody
                self._met.wait(PATIENCE_S)
            raise OSError(errno.EINVAL, "not here")
        return super().pwritev(fd, buffers, offset)


@pytest.mark.skipif(not hasattr(os, "O_DIRECT"), reason="direct I/O is Linux's")
def test_threads_that_are_refused_direct_io_together_all_go_on_without(tmp_path: Path) -> None:
    names = keys_of(1, 2)
    with Client(tmp_path / "c", system=System(files=NotDirect()), segment_bytes=32 << 20) as client:
        assert client.stats()["direct"] == 1
        assert client.store(names, [4 << 20] * 2).ok.all()
        assert client.stats()["direct"] == 0
        assert client.load(names, [4 << 20] * 2).ok.all()


def test_stores_that_wait_are_written_as_one(tmp_path: Path) -> None:
    files, length, count = FaultyFileSystem(), 64 << 10, 21
    names = keys_of(*range(count))
    with Client(tmp_path / "c", system=System(files=files), refresh_s=1e9) as client:
        hang = files.hang("pwritev", after=1)  # the header page of the segment is the first
        transfers = [client.transfer([name], aligned([length])) for name in names]
        for name, transfer in zip(names, transfers, strict=True):
            transfer.buffers[0][:] = payload(name, length)
        begun = [client.begin("store", transfers[0])]
        assert hang.reached.wait(PATIENCE_S)
        begun += [client.begin("store", transfer) for transfer in transfers[1:]]
        hang.release()
        assert all(client.outcome(number).ok.all() for number in begun)
        assert files.calls["pwritev"] == 1 + 2 + 2, "payloads and header page of the first one, and of the others"
        before = client.stats()["read_calls"]
        assert client.load(names, [length] * count).ok.all()
        assert client.stats()["read_calls"] - before == 2, "side by side"
        client.check()


class Continued(RealFileSystem):
    """Has another transfer stored while the first piece is written, and holds a later one until a payload of that
    transfer, behind the 12 MiB of the first, has been written.
    """

    def __init__(self) -> None:
        self.store_another: Callable[[], object] = lambda: None
        self._continued = threading.Event()

    def pwritev(self, fd: int, buffers: list[memoryview], offset: int) -> int:
        length = sum(buffer.nbytes for buffer in buffers)
        if length <= PAGE_BYTES:
            return super().pwritev(fd, buffers, offset)
        if offset == 2 * PAGE_BYTES:
            self.store_another()
        elif offset == 2 * PAGE_BYTES + (8 << 20):
            assert self._continued.wait(PATIENCE_S), "what was stored meanwhile waits for the end of what came before"
        elif offset >= 2 * PAGE_BYTES + (12 << 20):
            self._continued.set()
        return super().pwritev(fd, buffers, offset)


def test_what_is_stored_meanwhile_is_written_before_the_pieces_before_it_have_ended(tmp_path: Path) -> None:
    files, names = Continued(), keys_of(*range(24))
    with Client(tmp_path / "c", system=System(files=files), refresh_s=1e9, segment_bytes=48 << 20) as client:
        transfers = [client.transfer(part, aligned([CHUNK_BYTES] * 12)) for part in (names[:12], names[12:])]
        for transfer in transfers:
            for name, buffer in zip(transfer.keys, transfer.buffers, strict=True):
                buffer[:] = payload(name, CHUNK_BYTES)
        files.store_another = lambda: client.begin("store", transfers[1])
        client.begin("store", transfers[0])
        assert all(client.outcome(transfer.id).ok.all() for transfer in transfers)
        assert client.load(names, [CHUNK_BYTES] * 24).ok.all()
        client.check()


class HeldAndFailing(RealFileSystem):
    """Holds the first payload until it is told to go on; all payloads behind it fail. Header pages are written."""

    def __init__(self) -> None:
        self.reached, self.go_on = threading.Event(), threading.Event()

    def pwritev(self, fd: int, buffers: list[memoryview], offset: int) -> int:
        if offset == 2 * PAGE_BYTES:
            self.reached.set()
            assert self.go_on.wait(PATIENCE_S)
        elif sum(buffer.nbytes for buffer in buffers) > PAGE_BYTES:
            raise OSError(errno.EIO, "no")
        return super().pwritev(fd, buffers, offset)


def test_a_disk_that_fails_fails_all_that_it_was_given_and_no_more(tmp_path: Path) -> None:
    files, length, count = HeldAndFailing(), 64 << 10, 8
    names = keys_of(*range(count))
    with Client(tmp_path / "c", system=System(files=files), refresh_s=1e9) as client:
        transfers = [client.transfer([name], aligned([length])) for name in names]
        begun = [client.begin("store", transfers[0])]
        assert files.reached.wait(PATIENCE_S)
        begun += [client.begin("store", transfer) for transfer in transfers[1:]]
        files.go_on.set()
        outcomes = [client.outcome(number) for number in begun]
        assert [outcome.ok.all() for outcome in outcomes] == [True] + [False] * (count - 1)
        assert all("the disk failed" in outcome.error for outcome in outcomes[1:])
        assert client.stats()["write_errors"] >= 1 and client.stats()["stores_under_way"] == 0
        assert client.hits(names) == [True] + [False] * (count - 1)


@pytest.mark.parametrize("pure_first", [True, False])
def test_what_c_wrote_python_reads_and_the_other_way(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, pure_first: bool
) -> None:
    names, lengths = keys_of(*range(70)), [64 << 10] * 62 + [5000, 1, 4096, 100_001] * 2
    monkeypatch.setenv("STOWAGE_PURE_PYTHON", str(int(pure_first)))
    with Client(tmp_path / "c") as client:
        assert client.store(names, lengths).ok.all()
    with open(only_segment(tmp_path / "c"), "r+b") as file:
        file.seek(2 * PAGE_BYTES + (64 << 10) * 3 + 77)  # in the fourth payload
        byte = file.read(1)[0]
        file.seek(-1, os.SEEK_CUR)
        file.write(bytes([byte ^ 16]))
    monkeypatch.setenv("STOWAGE_PURE_PYTHON", str(int(not pure_first)))
    with Client(tmp_path / "c") as client:
        assert client.load(names, lengths).ok.tolist() == [at != 3 for at in range(70)]
        assert client.stats()["corrupt"] == 1
        client.check()


@pytest.mark.parametrize("pure", ["0", "1"])
def test_memory_that_does_not_begin_on_a_page_does_not_end_direct_io(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, pure: str
) -> None:
    monkeypatch.setenv("STOWAGE_PURE_PYTHON", pure)
    names, length = keys_of(1, 2, 3), 64 << 10
    with Client(tmp_path / "c") as client:
        direct = client.stats()["direct"]
        memory = aligned([4 * length])[0]
        buffers = [memory[at * length + 8 : (at + 1) * length + 8] for at in range(3)]
        for name, buffer in zip(names, buffers, strict=True):
            buffer[:] = payload(name, length)
        assert client.outcome(client.begin("store", client.transfer(names, buffers))).ok.all()
        memory[:] = bytes(4 * length)
        assert client.outcome(client.begin("load", client.transfer(names, buffers))).ok.all()
        assert [bytes(buffer) for buffer in buffers] == [payload(name, length) for name in names]
        assert client.stats()["direct"] == direct
