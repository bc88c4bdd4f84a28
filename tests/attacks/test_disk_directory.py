"""Who may use a cache directory, and what else may lie in it (F8): modes, owners, links, pipes."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest

from stowage.errors import DirectoryError
from tests.disk_client import Client, key, only_segment, segments

KEYS = [key(n) for n in range(3)]
ROOT = os.geteuid() == 0


@pytest.fixture(params=[0o000, 0o022, 0o077])
def umask(request: pytest.FixtureRequest) -> object:
    before = os.umask(request.param)
    yield request.param
    os.umask(before)


def modes(directory: Path) -> dict[str, int]:
    return {path.name: stat.S_IMODE(path.stat().st_mode) for path in directory.iterdir()}


def test_modes_do_not_depend_on_the_umask(tmp_path: Path, umask: int) -> None:
    directory = tmp_path / "a" / "b" / "cache"
    with Client(directory) as client:
        client.store(KEYS, [5000] * 3)
        for made in (directory, directory.parent, directory.parent.parent):
            assert stat.S_IMODE(made.stat().st_mode) == 0o700
        assert set(modes(directory).values()) == {0o600} and len(modes(directory)) == 2


def test_an_empty_directory_is_made_private(tmp_path: Path) -> None:
    directory = tmp_path / "cache"
    directory.mkdir(mode=0o755)
    Client(directory).close()
    assert stat.S_IMODE(directory.stat().st_mode) == 0o700


def test_a_readable_directory_with_other_files_is_refused(tmp_path: Path) -> None:
    directory = tmp_path / "home"
    directory.mkdir(mode=0o755)
    (directory / "letter.txt").write_text("dear")
    with pytest.raises(DirectoryError, match="mkdir -m 700"):
        Client(directory)
    assert stat.S_IMODE(directory.stat().st_mode) == 0o755
    directory.chmod(0o700)
    Client(directory).close()
    assert (directory / "letter.txt").read_text() == "dear"


@pytest.mark.parametrize("mode", [0o770, 0o707, 0o777, 0o1777, 0o720])
def test_a_directory_that_others_can_write_in_is_refused(tmp_path: Path, mode: int) -> None:
    directory = tmp_path / "cache"
    directory.mkdir()
    directory.chmod(mode)
    with pytest.raises(DirectoryError, match="chmod 700"):
        Client(directory)
    assert not list(directory.iterdir())


@pytest.mark.skipif(not ROOT, reason="only root can give a directory away")
def test_a_foreign_directory_is_refused(tmp_path: Path) -> None:
    directory = tmp_path / "cache"
    directory.mkdir(mode=0o700)
    os.chown(directory, 12345, 12345)
    with pytest.raises(DirectoryError, match=r"12345.*chown"):
        Client(directory)
    assert not list(directory.iterdir())


@pytest.mark.parametrize("slash", ["", "/"])
def test_a_link_is_refused(tmp_path: Path, slash: str) -> None:
    (tmp_path / "real").mkdir(mode=0o700)
    (tmp_path / "link").symlink_to("real")
    with pytest.raises(DirectoryError, match="symbolic link"):
        Client(str(tmp_path / "link") + slash)  # type: ignore[arg-type]
    assert not list((tmp_path / "real").iterdir())


def test_what_is_no_directory_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(DirectoryError, match="Choose a directory"):
        Client(tmp_path / "file")
    with pytest.raises(DirectoryError, match="Choose a directory"):
        Client(tmp_path / "file" / "below")


def test_a_lock_that_is_a_link_is_refused(tmp_path: Path) -> None:
    (tmp_path / "c").mkdir(mode=0o700)
    (tmp_path / "victim").write_text("precious")
    (tmp_path / "c" / "lock").symlink_to(tmp_path / "victim")
    with pytest.raises(DirectoryError, match="lock"):
        Client(tmp_path / "c")
    assert (tmp_path / "victim").read_text() == "precious"


def test_what_is_no_regular_file_is_neither_opened_nor_removed(tmp_path: Path) -> None:
    """Pipes (an open would hang), links to files and to segments, hard links, directories, under names of segments."""
    directory = tmp_path / "c"
    with Client(directory, 8 << 20) as client:
        client.store(KEYS, [5000] * 3)
    good = only_segment(directory)
    outside = tmp_path / "outside.seg"
    good.rename(outside)
    before = outside.read_bytes()
    os.mkfifo(directory / f"{1:016x}-{1:016x}.seg")
    (directory / f"{2:016x}-{2:016x}.seg").symlink_to(outside)
    (directory / good.name).symlink_to(outside)
    os.link(outside, directory / f"{3:016x}-{good.name[17:]}")
    (directory / f"{4:016x}-{4:016x}.seg").mkdir()
    with Client(directory, 8 << 20) as client:
        assert not any(client.hits(KEYS))
        assert client.stats()["strangers"] == 5
        for n in range(100, 200):
            assert client.store([key(n)], [100_000]).ok.all()
        assert client.load([key(199)], [100_000]).ok.all()
        client.check()
    assert len(segments(directory)) > 5
    assert outside.read_bytes() == before, "not truncated through a link"


@pytest.mark.skipif(not ROOT, reason="only root can give a file away")
def test_a_segment_of_another_user_is_not_read(tmp_path: Path) -> None:
    with Client(tmp_path / "c") as client:
        client.store(KEYS, [5000] * 3)
    os.chown(only_segment(tmp_path / "c"), 12345, 12345)
    with Client(tmp_path / "c") as client:
        assert not any(client.hits(KEYS)) and client.stats()["strangers"] == 1


def test_a_segment_swapped_for_a_link_under_an_open_tier_is_a_miss(tmp_path: Path) -> None:
    with Client(tmp_path / "c", refresh_s=60) as client:
        client.store(KEYS, [5000] * 3)
        path = only_segment(tmp_path / "c")
        path.rename(tmp_path / "moved.seg")
        path.symlink_to(tmp_path / "moved.seg")
        assert not client.load(KEYS[:1], [5000]).ok.any()
        path.unlink()
        os.mkfifo(path)
        assert not client.load(KEYS[1:2], [5000]).ok.any()
        path.unlink()
        os.link(tmp_path / "moved.seg", path)
        assert not client.load(KEYS[2:], [5000]).ok.any()
