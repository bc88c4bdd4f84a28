"""The limit of the disk tier: it holds, always; the oldest chunks go first, and those that are used stay."""

from __future__ import annotations

import errno
import os
import time
from pathlib import Path

import pytest

from stowage.errors import BudgetError
from stowage.storage.disk import DiskTier, least_limit_bytes
from stowage.storage.disk.files import RealFileSystem
from stowage.storage.disk.system import System
from stowage.testing.faults import FaultyFileSystem
from tests.disk_client import NAMESPACE, Client, only_segment, steady_bytes, used_bytes
from tests.tier_client import keys_of

MIB = 1 << 20


class FewFiles(RealFileSystem):
    """A file system with bytes to spare, and room for the lock and three files more."""

    def open(self, name: str, flags: int, dir_fd: int) -> int:
        if flags & os.O_EXCL and len(os.listdir(dir_fd)) >= 4:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return super().open(name, flags, dir_fd)


def test_the_limit_holds_and_the_oldest_go_first(tmp_path: Path) -> None:
    limit = 8 * MIB
    with Client(tmp_path / "c", limit) as client:
        for n in range(0, 400, 10):
            assert client.store(keys_of(*range(n, n + 10)), [100_000] * 10).ok.all()
            assert used_bytes(tmp_path / "c") <= limit
        hits = client.hits(keys_of(*range(400)))
        assert hits == sorted(hits) and 40 <= sum(hits) < 90, "a tail of the chunks, most of the limit"
        assert client.stats()["reclaimed_segments"] > 10
        live = [name for name, hit in zip(keys_of(*range(400)), hits, strict=True) if hit]
        assert client.load(live, [100_000] * len(live)).ok.all()
        client.check()


def test_chunks_that_are_hit_outlive_their_segment(tmp_path: Path) -> None:
    hot = keys_of("system prompt", "tools")
    with Client(tmp_path / "c", 8 * MIB) as client:
        client.store(hot, [100_000] * 2)
        for n in range(0, 400, 5):
            client.store(keys_of(*range(n, n + 5)), [100_000] * 5)
            assert client.load(hot, [100_000] * 2).ok.all(), f"after {n} others"
        assert client.stats()["rewritten"] >= 10
        assert used_bytes(tmp_path / "c") <= 8 * MIB
        client.check()


def test_reclaimed_space_is_free_at_once_even_where_somebody_reads(tmp_path: Path) -> None:
    with Client(tmp_path / "c", 8 * MIB) as client:
        client.store(keys_of("first"), [MIB])
        with only_segment(tmp_path / "c").open("rb") as reader:
            for n in range(20):
                client.store(keys_of(n), [MIB])
            status = os.fstat(reader.fileno())
            assert (status.st_nlink, status.st_size, status.st_blocks) == (0, 0, 0)
            assert reader.read() == b""


def test_a_lowered_limit_is_kept_from_the_start(tmp_path: Path) -> None:
    with Client(tmp_path / "c", 32 * MIB, segment_bytes=2 * MIB) as client:
        for n in range(30):
            client.store(keys_of(n), [MIB])
    assert used_bytes(tmp_path / "c") > 16 * MIB
    with Client(tmp_path / "c", 8 * MIB) as client:
        assert used_bytes(tmp_path / "c") <= 8 * MIB
        assert client.hits(keys_of(0, 29)) == [False, True]
    with Client(tmp_path / "c", 32 * MIB, segment_bytes=8 * MIB) as large:
        large.store(keys_of("live"), [MIB])
        with Client(tmp_path / "c", 8 * MIB) as small:
            assert small.hits(keys_of(29, "live")) == [False, True], "all that can go goes, even if it is not enough"


def test_other_files_count_towards_the_limit_and_are_left_alone(tmp_path: Path) -> None:
    with Client(tmp_path / "c", 8 * MIB) as client:
        stranger = tmp_path / "c" / "notes.txt"
        stranger.write_bytes(bytes(5 * MIB))
        for n in range(60):
            client.store(keys_of(n), [100_000])
            assert used_bytes(tmp_path / "c") <= 8 * MIB
        assert client.hits(keys_of(59)) == [True]
        stranger.write_bytes(bytes(8 * MIB))
        kept = [name for name in keys_of(*range(60)) if client.hits([name])[0]]
        outcome = client.store(keys_of(*range(100, 160)), [100_000] * 60)
        assert not outcome.ok[-1] and "no room" in outcome.error
        assert kept and client.load(kept, [100_000] * len(kept)).ok.all(), "nothing is given up in vain"
        assert stranger.stat().st_size == 8 * MIB


def test_a_limit_without_room_for_a_chunk_says_what_would_do(tmp_path: Path) -> None:
    least = least_limit_bytes(MIB)
    with pytest.raises(BudgetError, match=str(least)):
        DiskTier(tmp_path / "c", least - 1, NAMESPACE, chunk_bytes_max=MIB)
    assert not (tmp_path / "c").exists()
    with Client(tmp_path / "c", least, chunk_bytes_max=MIB) as client:
        for n in range(3):
            assert client.store(keys_of(n), [MIB]).ok.all()
            assert client.load(keys_of(n), [MIB]).ok.all()
            assert used_bytes(tmp_path / "c") <= least
        outcome = client.store(keys_of("large", "small"), [MIB + 1, 10])
        assert outcome.ok.tolist() == [False, True], "one that does not fit costs only itself"
        assert client.stats()["refused"] == 1


def test_a_full_disk_gives_up_the_oldest_for_the_newest(tmp_path: Path) -> None:
    files = FaultyFileSystem()
    with Client(tmp_path / "c", system=System(files=files), segment_bytes=2 * MIB) as client:
        for n in range(4):
            client.store(keys_of(n), [MIB])
        files.fail("allocate", errno.ENOSPC, times=1)
        assert client.store(keys_of(9), [MIB]).ok.all()
        assert client.hits(keys_of(0, 3, 9)) == [False, True, True]
        assert client.stats()["enospc"] == 1


def test_a_disk_without_room_for_another_file_gives_up_the_oldest_too(tmp_path: Path) -> None:
    with Client(tmp_path / "c", system=System(files=FewFiles()), segment_bytes=2 * MIB) as client:
        for n in range(6):
            assert client.store(keys_of(n), [MIB]).ok.all()
        assert client.hits(keys_of(*range(6))) == [False, False, False, True, True, True]
        assert client.load(keys_of(3, 4, 5), [MIB] * 3).ok.all()
        assert client.stats()["enospc"] == 3
        client.check()


def test_a_file_system_without_preallocation_still_keeps_the_limit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(fd: int, offset: int, length: int) -> None:
        raise OSError(errno.EOPNOTSUPP, "not supported")

    monkeypatch.setattr(os, "posix_fallocate", refuse)
    with Client(tmp_path / "c", 8 * MIB) as client:
        for n in range(100):
            assert client.store(keys_of(n), [100_000]).ok.all()
            assert used_bytes(tmp_path / "c") <= 8 * MIB


def test_the_limit_can_be_lowered_and_raised_while_running(tmp_path: Path) -> None:
    with Client(tmp_path / "c", 16 * MIB) as client:
        keys = keys_of(*range(120))
        client.store(keys, [100_000] * 120)
        assert used_bytes(tmp_path / "c") > 8 * MIB
        client.tier.set_limit(4 * MIB)
        until_s = time.monotonic() + 20
        while steady_bytes(tmp_path / "c") > 4 * MIB:
            assert time.monotonic() < until_s, "the limit was not made true"
            time.sleep(0.01)
        client.load(keys, [100_000] * 120)
        client.store(keys[:20], [100_000] * 20)
        assert used_bytes(tmp_path / "c") <= 4 * MIB and any(client.hits(keys[:20]))
        client.tier.set_limit(16 * MIB)
        client.store(keys, [100_000] * 120)
        assert sum(client.hits(keys)) > 60
        with pytest.raises(BudgetError, match="holds no chunk"):
            client.tier.set_limit(1000)
        client.check()
