"""Who may use a cache directory, and what else may lie in it (F8): modes, owners, links, pipes."""

from __future__ import annotations

import os
import shutil
import socket
import stat
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from stowage.errors import DirectoryError
from tests.disk_client import Client, only_segment, segments
from tests.tier_client import key

KEYS = [key(n) for n in range(3)]
ROOT = os.geteuid() == 0
NOBODY = 65534


@pytest.fixture(params=[0o000, 0o022, 0o077, 0o277, 0o777], ids=oct)
def umask(request: pytest.FixtureRequest) -> Iterator[int]:
    before = os.umask(request.param)
    yield request.param
    os.umask(before)


@pytest.fixture(params=["ourselves", "a plain user"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Path]:
    """A directory of whoever runs the test; root, whom no mode stops, runs it as somebody else too."""
    if request.param == "ourselves":
        yield tmp_path
        return
    if not ROOT:
        pytest.skip("we are a plain user already")
    home = Path(tempfile.mkdtemp(prefix="stowage-test-"))  # tmp_path lies where only root may look
    os.chown(home, NOBODY, NOBODY)
    os.seteuid(NOBODY)
    try:
        yield home
    finally:
        os.seteuid(0)
        shutil.rmtree(home)


def modes(directory: Path) -> dict[str, int]:
    return {path.name: stat.S_IMODE(path.stat().st_mode) for path in directory.iterdir()}


def test_modes_do_not_depend_on_the_umask(place: Path, umask: int) -> None:
    """000 gives everybody everything, 277 and 777 take from the owner what a cache directory needs."""
    directory = place / "a" / "b" / "cache"
    with Client(directory) as client:
        assert client.store(KEYS, [5000] * 3).ok.all() and client.load(KEYS, [5000] * 3).ok.all()
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


@pytest.mark.parametrize("mode", [0o000, 0o300, 0o500], ids=oct)
def test_a_directory_that_its_owner_cannot_use(place: Path, mode: int) -> None:
    """Refused with a message, or made usable; never a bare PermissionError."""
    directory = place / "cache"
    directory.mkdir()
    directory.chmod(mode)
    try:
        with Client(directory) as client:
            assert client.store(KEYS, [5000] * 3).ok.all()
    except DirectoryError as error:
        assert "Permission denied" in str(error)
    else:
        assert stat.S_IMODE(directory.stat().st_mode) == 0o700
    directory.chmod(0o700)


def test_a_path_that_we_may_not_look_into(place: Path) -> None:
    locked = place / "locked"
    locked.mkdir(mode=0o000)
    if os.access(locked, os.X_OK, effective_ids=True):
        pytest.skip("nothing is closed to root")
    with pytest.raises(DirectoryError, match="Permission denied"):
        Client(locked / "cache")
    with pytest.raises(DirectoryError, match="Permission denied"):
        Client(locked / "below" / "cache")
    locked.chmod(0o700)


def link_to(victim: Path) -> Callable[[Path], None]:
    return lambda lock: lock.symlink_to(victim)


def second_name_of(victim: Path) -> Callable[[Path], None]:
    return lambda lock: os.link(victim, lock)


def listen(lock: Path) -> None:
    with socket.socket(socket.AF_UNIX) as server:
        here = os.getcwd()
        os.chdir(lock.parent)  # the name of a socket must be short
        try:
            server.bind(lock.name)
        finally:
            os.chdir(here)


def device(lock: Path) -> None:
    os.mknod(lock, stat.S_IFCHR | 0o666, os.makedev(1, 5))  # /dev/zero


def foreign_file(lock: Path) -> None:
    lock.touch(mode=0o666)
    lock.chmod(0o666)
    os.chown(lock, 12345, 12345)


@pytest.mark.parametrize(
    ("make", "only_root"),
    [
        (link_to, False),
        (second_name_of, False),
        (os.mkfifo, False),
        (os.mkdir, False),
        (listen, False),
        (device, True),
        (foreign_file, True),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_a_lock_that_is_no_file_of_ours_is_refused(tmp_path: Path, make: Callable, only_root: bool) -> None:
    """Whoever could write here once may have left it: opening it must not hang, follow, change or lock anything."""
    if only_root and not ROOT:
        pytest.skip("only root can make it")
    (tmp_path / "c").mkdir(mode=0o700)
    victim = tmp_path / "victim"
    victim.write_text("precious")
    victim.chmod(0o644)
    (make(victim) if make in (link_to, second_name_of) else make)(tmp_path / "c" / "lock")
    with pytest.raises(DirectoryError, match="lock"):
        Client(tmp_path / "c")
    assert victim.read_text() == "precious" and stat.S_IMODE(victim.stat().st_mode) == 0o644


def test_a_lock_that_is_exchanged_while_we_run(tmp_path: Path) -> None:
    """Removed: made again. Replaced by what is not ours: stores fail, nothing is waited for, what is stored is read."""
    with Client(tmp_path / "c", 8 << 20) as client:
        assert client.store(KEYS, [5000] * 3).ok.all()
        (tmp_path / "c" / "lock").unlink()
        assert all(client.store([key(n)], [400_000]).ok.all() for n in range(10)), "new segments are made"
        (tmp_path / "c" / "lock").unlink()
        os.mkfifo(tmp_path / "c" / "lock")
        assert not all(client.store([key(n)], [400_000]).ok.all() for n in range(10, 20))
        assert client.load([key(9)], [400_000]).ok.all()
        (tmp_path / "c" / "lock").unlink()


def test_what_is_no_regular_file_is_neither_opened_nor_removed(tmp_path: Path) -> None:
    """Under names of segments: pipes (an open would hang), links to files and to segments, hard links, directories,
    sockets, devices.
    """
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
    listen(directory / f"{5:016x}-{5:016x}.seg")
    if ROOT:
        device(directory / f"{6:016x}-{6:016x}.seg")
    with Client(directory, 8 << 20) as client:
        assert not any(client.hits(KEYS))
        assert client.stats()["strangers"] == 6 + ROOT
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
        assert client.stats()["corrupt"] + client.stats()["read_errors"] == 3


@pytest.mark.parametrize("make", [listen, os.mkdir])
def test_a_segment_swapped_for_what_cannot_be_opened(tmp_path: Path, make: Callable[[Path], None]) -> None:
    with Client(tmp_path / "c", refresh_s=0.01) as client:
        client.store(KEYS, [5000] * 3)
        path = only_segment(tmp_path / "c")
        path.unlink()
        make(path)
        assert not client.load(KEYS, [5000] * 3).ok.any()
        while not client.stats()["strangers"]:
            time.sleep(0.01)
        assert client.store(KEYS, [5000] * 3).ok.all() and client.load(KEYS, [5000] * 3).ok.all()
