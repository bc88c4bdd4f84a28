"""The disk tier on disks and file systems that fail: a fault costs hits, never wrong bytes and never an exception."""

from __future__ import annotations

import errno
import os
import time
from pathlib import Path

import pytest

from stowage.storage.disk.system import System
from stowage.testing.faults import FaultyFileSystem
from tests.disk_client import Client
from tests.tier_client import keys_of


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT, errno.EIO])
@pytest.mark.parametrize("operation", ["allocate", "pwritev"])
def test_a_disk_that_fails_costs_hits_and_then_recovers(tmp_path: Path, operation: str, code: int) -> None:
    now = [0.0]
    files = FaultyFileSystem()
    with Client(tmp_path / "c", system=System(files=files, clock=lambda: now[0])) as client:
        assert client.store(keys_of(1), [10_000]).ok.all()
        client.close()
    with Client(tmp_path / "c", system=System(files=files, clock=lambda: now[0])) as client:
        files.fail(operation, code)
        assert not client.store(keys_of(2, 3), [10_000] * 2).ok.any()
        calls = sum(files.calls.values())
        assert not client.store(keys_of(2), [10_000]).ok.any()
        assert sum(files.calls.values()) == calls, "it backs off"
        assert client.stats()["backed_off"] == 1
        files.heal()
        now[0] += 31.0
        assert client.store(keys_of(2, 3), [10_000] * 2).ok.all()
        assert client.load(keys_of(2, 3), [10_000] * 2).ok.all()
        client.check()
        errors = client.stats()["enospc"] if code != errno.EIO else client.stats()["write_errors"]
        assert errors >= 1


def test_what_was_written_before_a_disk_failed_stays(tmp_path: Path) -> None:
    files = FaultyFileSystem()
    with Client(tmp_path / "c", system=System(files=files)) as client:
        client.store(keys_of(*range(10)), [10_000] * 10)
        files.fail("pwritev", errno.EIO, after=2, times=1)  # the first batch passes, the second one fails
        outcome = client.store(keys_of(*range(100, 150)), [10_000] * 50)
        assert outcome.ok.tolist() == [True] * 31 + [False] * 19
        assert client.load(keys_of(*range(10), *range(100, 131)), [10_000] * 41).ok.all()
        client.check()
    with Client(tmp_path / "c") as client:
        assert client.load(keys_of(*range(10), *range(100, 131)), [10_000] * 41).ok.all()
        assert not any(client.hits(keys_of(*range(131, 150))))


def test_a_bad_sector_costs_one_chunk(tmp_path: Path) -> None:
    files = FaultyFileSystem()
    with Client(tmp_path / "c", system=System(files=files), readers=1) as client:
        names = keys_of(*range(10))
        client.store(names, [8192] * 10)
        files.fail("preadv", errno.EIO, times=1)
        files.fail("preadv", errno.EIO, after=3, times=1)
        outcome = client.load(names, [8192] * 10)
        assert outcome.ok.tolist() == [True] * 3 + [False] + [True] * 6
        assert client.stats()["read_errors"] == 1
        assert client.hits(names) == outcome.ok.tolist(), "the next store writes it anew"


@pytest.mark.parametrize("code", [errno.EMFILE, errno.ENFILE])
def test_too_many_open_files_cost_no_stored_chunk(tmp_path: Path, code: int) -> None:
    files = FaultyFileSystem()
    names = keys_of(*range(10))
    with Client(tmp_path / "c", system=System(files=files), refresh_s=1e9) as client:
        client.store(names, [8192] * 10)
        client.close()
    with Client(tmp_path / "c", system=System(files=files), refresh_s=1e9) as client:
        files.fail("open", code)
        assert not client.load(names, [8192] * 10).ok.any()
        assert all(client.hits(names)) and client.stats()["read_errors"] == 10
        files.heal()
        assert client.load(names, [8192] * 10).ok.all()


def test_short_reads_and_writes_are_continued(tmp_path: Path) -> None:
    files = FaultyFileSystem()
    files.shorten("preadv", 8192)
    files.shorten("pwritev", 4096)
    with Client(tmp_path / "c", system=System(files=files)) as client:
        names = keys_of(*range(40))
        assert client.store(names, [9000] * 40).ok.all()
        assert client.load(names, [9000] * 40).ok.all()
    with Client(tmp_path / "c", system=System(files=files)) as client:
        assert client.load(names, [9000] * 40).ok.all()


def test_rot_on_the_way_is_a_miss(tmp_path: Path) -> None:
    files = FaultyFileSystem()
    with Client(tmp_path / "c", system=System(files=files)) as client:
        for bit in range(0, 8 * 4096, 997):
            assert client.store(keys_of(1), [4096]).ok.all()
            files.rot(bit, times=1)
            assert not client.load(keys_of(1), [4096]).ok.any()
            assert client.hits(keys_of(1)) == [False]
        assert client.stats()["corrupt"] == len(range(0, 8 * 4096, 997))


@pytest.mark.parametrize("where", ["open", "preadv", "pwritev"])
def test_a_file_system_without_direct_io_is_used_buffered(tmp_path: Path, where: str) -> None:
    files = FaultyFileSystem()
    with Client(tmp_path / "c", system=System(files=files)) as client:
        if where == "open":
            files.fail_flags(os.O_DIRECT, errno.EINVAL)
        else:
            files.fail(where, errno.EINVAL, times=1)
        assert client.store(keys_of(1, 2), [5000] * 2).ok.all()
        assert client.load(keys_of(1, 2), [5000] * 2).ok.all()
        assert client.stats()["direct"] == 0 and client.stats()["direct_fallbacks"] == 1
        assert client.store(keys_of(3), [5000]).ok.all()
        assert client.load(keys_of(1, 2, 3), [5000] * 3).ok.all()


def test_a_directory_that_disappears_costs_hits(tmp_path: Path) -> None:
    import shutil

    with Client(tmp_path / "c") as client:
        client.store(keys_of(1), [10])
        shutil.rmtree(tmp_path / "c")
        assert not client.load(keys_of(1), [10]).ok.any()
        client.store(keys_of(2), [10])
        assert client.stats()["faults"] == 0


def test_a_directory_that_is_emptied_is_filled_again(tmp_path: Path) -> None:
    with Client(tmp_path / "c", refresh_s=0.02) as client:
        client.store(keys_of(1), [10])
        for path in (tmp_path / "c").iterdir():
            path.unlink()
        until_s = time.monotonic() + 10
        while any(client.hits(keys_of(1))):
            assert time.monotonic() < until_s
            time.sleep(0.01)
        assert client.store(keys_of(1, 2), [10] * 2).ok.all()
        assert client.load(keys_of(1, 2), [10] * 2).ok.all()
        client.check()
    with Client(tmp_path / "c") as client:
        assert client.load(keys_of(1, 2), [10] * 2).ok.all()
