"""A directory of many segments is opened by several threads: with the same result as by one."""

from __future__ import annotations

import shutil
import threading
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from stowage.storage.disk.catalog import Catalog
from stowage.storage.disk.files import RealFileSystem
from stowage.storage.disk.system import AHEAD_MIN, ParallelMap, System, one_by_one, some_at_once
from tests.disk_client import Client, segments
from tests.tier_client import keys_of

KIB = 1 << 10
COUNT = AHEAD_MIN + 4


@pytest.fixture(scope="module")
def stored(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One chunk in each segment, and one more that each of them has: with the segment's number as mask."""
    directory = tmp_path_factory.mktemp("stored") / "c"
    for number in range(1, COUNT + 1):
        with Client(directory, segment_bytes=256 * KIB) as client:
            assert client.store(keys_of(number, "again"), [5000, 6000], [number, number]).ok.all()
    assert len(segments(directory)) == COUNT
    return directory


@pytest.mark.parametrize("ahead", [one_by_one, some_at_once])
def test_the_newest_record_is_found_whoever_read_it(stored: Path, tmp_path: Path, ahead: ParallelMap) -> None:
    shutil.copytree(stored, tmp_path / "c")
    threads = set()

    class Noting(Catalog):
        def _look(self, *arguments: Any) -> Any:
            threads.add(threading.current_thread().name)
            return super()._look(*arguments)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("stowage.storage.disk.tier.Catalog", Noting)
        client = Client(tmp_path / "c", system=System(ahead=ahead))
    with client:
        masks = client.tier.lookup(keys_of(*range(1, COUNT + 1), "again"))
        assert masks.tolist() == [*range(1, COUNT + 1), COUNT]
        assert client.load(keys_of(3, "again"), [5000, 6000]).ok.all()
        client.check()
    assert (threading.main_thread().name in threads) == (ahead is one_by_one)


@pytest.mark.parametrize("ahead", [one_by_one, some_at_once])
def test_damaged_and_torn_segments_cost_their_own_chunks(stored: Path, tmp_path: Path, ahead: ParallelMap) -> None:
    shutil.copytree(stored, tmp_path / "c")
    files = sorted(segments(tmp_path / "c"))
    for path, keep in ((files[4], 4096 + 4096 + 8192 + 8192), (files[9], 0), (files[-1], 100)):  # torn, empty, damaged
        with path.open("r+b") as file:
            file.truncate(keep)
    with Client(tmp_path / "c", system=System(ahead=ahead)) as client:
        found = client.tier.lookup(keys_of(*range(1, COUNT + 1), "again"))
        expected = np.arange(1, COUNT + 2)
        expected[[9, COUNT - 1]], expected[-1] = 0, COUNT - 1
        expected[4] = 0  # torn, and there is no room for a footer: its writer would have left some
        assert found.tolist() == expected.tolist()
        assert client.stats()["removed_leftovers"] == 2 and client.stats()["damaged_segments"] == 1
        client.check()


@pytest.mark.parametrize("ahead", [one_by_one, some_at_once])
def test_a_segment_that_was_repaired_at_opening_is_still_older_than_those_behind_it(
    stored: Path, tmp_path: Path, ahead: ParallelMap
) -> None:
    shutil.copytree(stored, tmp_path / "c")
    torn = sorted(segments(tmp_path / "c"))[4]
    with torn.open("r+b") as file:  # as a killed writer leaves it: as long as it was made, and without a trailer
        length = torn.stat().st_size
        file.truncate(length - 4096)
        file.truncate(length)
    with Client(tmp_path / "c", system=System(ahead=ahead)) as client:
        masks = client.tier.lookup(keys_of(*range(1, COUNT + 1), "again"))
        assert masks.tolist() == [*range(1, COUNT + 1), COUNT]
        assert client.stats()["repaired_segments"] == 1
        assert client.load(keys_of(5, "again"), [5000, 6000]).ok.all()
        client.check()


class CountingReads(RealFileSystem):
    """How often each file was opened and read."""

    def __init__(self) -> None:
        self.opened: Counter[str] = Counter()
        self.read: Counter[str] = Counter()
        self._name_of: dict[int, str] = {}
        self._lock = threading.Lock()

    def open(self, name: str, flags: int, dir_fd: int) -> int:
        fd = super().open(name, flags, dir_fd)
        with self._lock:
            self._name_of[fd] = name
            self.opened[name] += 1
        return fd

    def preadv(self, fd: int, buffers: list[memoryview], offset: int) -> int:
        with self._lock:
            self.read[self._name_of[fd]] += 1
        return super().preadv(fd, buffers, offset)


def test_what_is_whole_is_opened_once_and_its_header_trailer_and_footer_are_read_once(
    stored: Path, tmp_path: Path
) -> None:
    shutil.copytree(stored, tmp_path / "c")
    names = [path.name for path in segments(tmp_path / "c")]
    counting = CountingReads()
    with Client(tmp_path / "c", system=System(files=counting), refresh_s=3600) as client:
        assert {counting.opened[name] for name in names} == {1}
        assert {counting.read[name] for name in names} == {3}
        assert client.stats()["chunks"] == COUNT + 1


def test_a_torn_segment_of_another_namespace_is_repaired_at_opening(stored: Path, tmp_path: Path) -> None:
    shutil.copytree(stored, tmp_path / "c")
    torn = sorted(segments(tmp_path / "c"))[4]
    whole = torn.read_bytes()
    with torn.open("r+b") as file:
        file.truncate(len(whole) - 4096)
        file.truncate(len(whole))
    with Client(tmp_path / "c", namespace=bytes(32)) as client:
        assert client.stats()["chunks"] == 0 and client.stats()["repaired_segments"] == 1
    assert torn.read_bytes() == whole


def test_what_is_done_ahead_comes_in_order_and_fails_where_it_fails() -> None:
    def half(number: int) -> float:
        return 1 / (number - 20)

    answers = some_at_once(half, range(40))
    assert [next(answers) for _ in range(20)] == [1 / (number - 20) for number in range(20)]
    with pytest.raises(ZeroDivisionError):
        next(answers)
    assert list(some_at_once(abs, [-1, 2])) == list(one_by_one(abs, [-1, 2])) == [1, 2]
