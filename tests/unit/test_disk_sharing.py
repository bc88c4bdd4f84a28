"""Several disk tiers, or one after another, in the same directory: what one leaves, the others find or clear away."""

from __future__ import annotations

import errno
import os
import shutil
import threading
import time
from collections.abc import Generator, Iterable
from pathlib import Path
from typing import TypeVar

import pytest

from stowage.storage.disk import least_limit_bytes
from stowage.storage.disk.files import RealFileSystem
from stowage.storage.disk.system import System
from stowage.storage.disk.write_jobs import Job, ParallelJobs
from stowage.testing.faults import FaultyFileSystem
from tests.disk_client import Client, aligned, only_segment, segments, used_bytes
from tests.tier_client import keys_of

MIB = 1 << 20
R = TypeVar("R")


def test_an_unclosed_tier_is_taken_over_when_its_lock_is_gone(tmp_path: Path) -> None:
    """The writer's thread ends without sealing, as in a killed process (tests/crash does it with real ones)."""
    files = FaultyFileSystem()
    client = Client(tmp_path / "c", system=System(files=files))
    client.store(keys_of(*range(50)), [5000] * 50)
    files.fail("pwritev", errno.EIO)
    client.close()
    assert client.stats()["write_errors"] == 1
    size = only_segment(tmp_path / "c").stat().st_size
    with Client(tmp_path / "c") as client:
        assert client.load(keys_of(*range(50)), [5000] * 50).ok.all()
        assert client.stats()["repaired_segments"] == 1
        assert only_segment(tmp_path / "c").stat().st_size < size, "cut to what is in it"


def test_a_torn_segment_is_taken_over_by_those_who_are_open(tmp_path: Path) -> None:
    files = FaultyFileSystem()
    with Client(tmp_path / "c", refresh_s=60) as survivor:
        client = Client(tmp_path / "c", system=System(files=files))
        client.store(keys_of(1), [5000])
        files.fail("pwritev", errno.EIO)
        client.close()
        torn = only_segment(tmp_path / "c")
        before = used_bytes(tmp_path / "c")
        survivor.store(keys_of(2), [5000])
        assert survivor.stats()["repaired_segments"] == 1
        assert torn.stat().st_size <= 5 * 4096 + 8192 < before
        assert survivor.load(keys_of(1, 2), [5000] * 2).ok.all()


def test_leftovers_of_a_writer_that_died_early_are_removed(tmp_path: Path) -> None:
    Client(tmp_path / "c").close()
    for n, content in enumerate((b"", bytes(1 * MIB))):
        (tmp_path / "c" / f"{n:016x}-{n:016x}.seg").write_bytes(content)
    with Client(tmp_path / "c") as client:
        assert client.stats()["removed_leftovers"] == 2
        assert not segments(tmp_path / "c")


def test_two_tiers_share_a_directory(tmp_path: Path) -> None:
    files = FaultyFileSystem()
    with (
        Client(tmp_path / "c", refresh_s=0.05, system=System(files=files)) as one,
        Client(tmp_path / "c", refresh_s=0.05) as two,
    ):
        for n in range(5):  # into live segments, which the other one follows
            one.store(keys_of("one", n), [20_000] * 2)
            two.store(keys_of("two", -n), [20_000] * 2)
            one.wait_for(keys_of("two", -n))
            two.wait_for(keys_of("one", n))
            assert one.load(keys_of("two", -n), [20_000] * 2).ok.all()
            assert two.load(keys_of("one", n), [20_000] * 2).ok.all()
        files.calls.clear()
        time.sleep(0.3)
        assert files.calls["preadv"] <= 2 * files.calls["open"], "batches that are known are not read again"
        one.close()
        two.store(keys_of("after"), [10])
        assert two.load(keys_of("one", 4), [20_000] * 2).ok.all()
        two.check()


def test_a_segment_reclaimed_by_another_process_is_a_miss(tmp_path: Path) -> None:
    with Client(tmp_path / "c", 8 * MIB, refresh_s=60) as one, Client(tmp_path / "c", 8 * MIB, refresh_s=60) as two:
        one.store(keys_of("mine"), [MIB])
        one.close()
    with Client(tmp_path / "c", 8 * MIB, refresh_s=60) as one, Client(tmp_path / "c", 8 * MIB, refresh_s=60) as two:
        for n in range(20):
            two.store(keys_of(n), [MIB])
        assert one.hits(keys_of("mine")) == [True], "it has not looked yet"
        assert not one.load(keys_of("mine"), [MIB]).ok.any()
        assert one.stats()["vanished"] == 1 and one.stats()["corrupt"] == 0
        assert used_bytes(tmp_path / "c") <= 8 * MIB


def test_a_segment_reclaimed_while_it_is_being_opened_is_no_corruption(tmp_path: Path) -> None:
    class Reclaiming(RealFileSystem):
        armed = False

        def open(self, name: str, flags: int, dir_fd: int) -> int:
            fd = super().open(name, flags, dir_fd)
            if self.armed and name.endswith(".seg"):
                os.unlink(name, dir_fd=dir_fd)
            return fd

    files = Reclaiming()
    with Client(tmp_path / "c", system=System(files=files), refresh_s=60) as client:
        client.store(keys_of(1, 2), [MIB] * 2)
        files.armed = True
        assert not client.load(keys_of(1, 2), [MIB] * 2).ok.any()
        assert client.stats()["vanished"] == 2 and client.stats()["corrupt"] == 0


def test_the_segment_of_a_live_writer_is_never_taken(tmp_path: Path) -> None:
    with Client(tmp_path / "c", 8 * MIB) as quiet, Client(tmp_path / "c", 8 * MIB) as busy:
        quiet.store(keys_of("kept"), [100_000])
        for n in range(100):
            assert busy.store(keys_of(n), [200_000]).ok.all(), "the oldest is passed over"
            assert used_bytes(tmp_path / "c") <= 8 * MIB
        assert quiet.store(keys_of("more"), [100_000]).ok.all()
        assert quiet.load(keys_of("kept", "more"), [100_000] * 2).ok.all()


def test_the_least_limit_serves_one_writer_at_a_time(tmp_path: Path) -> None:
    least = least_limit_bytes(MIB)
    with Client(tmp_path / "c", least, chunk_bytes_max=MIB) as one, Client(tmp_path / "c", least) as two:
        assert one.store(keys_of(1), [MIB]).ok.all()
        assert "no room" in two.store(keys_of(2), [MIB]).error
        assert two.stats()["no_room"] == 1
        one.close()
        time.sleep(0.15)
        assert two.store(keys_of(2), [MIB]).ok.all()
        assert used_bytes(tmp_path / "c") <= least


def test_namespaces_do_not_see_each_other_but_share_the_limit(tmp_path: Path) -> None:
    with Client(tmp_path / "c", 8 * MIB) as mine, Client(tmp_path / "c", 8 * MIB, namespace=bytes(32)) as other:
        mine.store(keys_of(1), [100_000])
        mine.close()
        for n in range(2, 100):
            assert other.store(keys_of(n), [100_000]).ok.all()
            assert used_bytes(tmp_path / "c") <= 8 * MIB
        assert other.hits(keys_of(1)) == [False]
    with Client(tmp_path / "c", 8 * MIB) as mine:
        assert mine.stats()["chunks"] == 0, "reclaimed by the other, whose own are not ours"


@pytest.mark.rare
def test_a_stuck_directory_lock_costs_stores_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import fcntl

    monkeypatch.setattr("stowage.storage.disk.allocator.LOCK_TIMEOUT_S", 0.05)
    with Client(tmp_path / "c") as client:
        with (tmp_path / "c" / "lock").open() as held:
            fcntl.flock(held, fcntl.LOCK_EX)
            assert "no room" in client.store(keys_of(1), [10]).error
        time.sleep(0.15)
        assert client.store(keys_of(1), [10]).ok.all()


@pytest.mark.parametrize("removed", [False, True])
def test_others_are_followed_without_a_pause_in_writing_unless_all_is_gone(tmp_path: Path, removed: bool) -> None:
    keys, begun, going_on = keys_of(1, 2), threading.Event(), threading.Event()
    streams: list[int] = []
    later_s = [0.0]

    class Slow(RealFileSystem):
        def pwritev(self, fd: int, buffers: list[memoryview], offset: int) -> int:
            if offset and not begun.is_set():
                begun.set()
                assert going_on.wait(30)
            return super().pwritev(fd, buffers, offset)

    class Counted(ParallelJobs):
        def __call__(self, jobs: Iterable[Job[R] | None], /) -> Generator[R, None, None]:
            streams.append(1)
            return super().__call__(jobs)

    system = System(files=Slow(), timer=lambda: time.monotonic() + later_s[0], job_runner=Counted)
    with Client(tmp_path / "c", refresh_s=1e6, system=system) as client:
        first = client.begin("store", client.transfer(keys[:1], aligned([5000])))
        assert begun.wait(30)
        second = client.begin("store", client.transfer(keys[1:], aligned([5000])))
        later_s[0] = 2e6
        if removed:
            shutil.rmtree(tmp_path / "c")
        going_on.set()
        assert client.outcome(first).ok.all() and client.outcome(second).ok.all()
        assert len(streams) == (2 if removed else 1)
        assert client.hits(keys) == [not removed, True]
