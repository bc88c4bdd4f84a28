"""The cache directory is removed under a running tier: exact or absent, within the limit, and back by itself."""

from __future__ import annotations

import os
import shutil
import threading
import time
from pathlib import Path

import pytest

from tests.disk_client import Client, descriptors, steady_bytes, used_bytes
from tests.tier_client import keys_of

LENGTH = 65536
LIMIT = 2 << 20


def until(client: Client, counted: int) -> None:
    """Until the tier has noticed, and stores again."""
    until_s = time.monotonic() + 30
    while client.stats()["removed_directories"] < counted or not client.store(keys_of("probe"), [4096]).ok.all():
        assert time.monotonic() < until_s, client.stats()
        time.sleep(0.02)


@pytest.mark.parametrize("remade", [False, True])
def test_it_comes_back(remade: bool, tmp_path: Path) -> None:
    """By its own making, with the parents, or in one that somebody else made; again and again."""
    path = tmp_path / "a" / "c"
    with Client(path, LIMIT, refresh_s=0.05) as client:
        for turn in range(1, 4):
            names = keys_of(*((turn, number) for number in range(8)))
            assert client.store(names, [LENGTH] * 8).ok.all() and all(client.load(names, [LENGTH] * 8).ok)
            shutil.rmtree(path.parent)
            if remade:
                path.parent.mkdir(mode=0o700)
                path.mkdir(mode=0o700)
            client.load(names, [LENGTH] * 8)  # exact or absent, whenever it looks
            until(client, turn)
            assert not any(client.hits(names)), "what was removed is absent"
            assert client.store(names, [LENGTH] * 8).ok.all() and all(client.load(names, [LENGTH] * 8).ok)
            assert used_bytes(path) <= LIMIT
            until_s = time.monotonic() + 30
            while [text for text in descriptors(path) if text.endswith("(deleted)")]:
                assert time.monotonic() < until_s, "space nobody counts"
                time.sleep(0.02)
        assert client.stats()["removed_directories"] == 3
        client.check()
    with Client(path, LIMIT) as client:
        assert all(client.load(names, [LENGTH] * 8).ok), "what is stored outlives the process"


def test_only_its_files_are_removed(tmp_path: Path) -> None:
    with Client(tmp_path / "c", LIMIT, refresh_s=0.05) as client:
        client.store(keys_of(1, 2), [LENGTH] * 2)
        for file in (tmp_path / "c").iterdir():
            file.unlink()
        while any(client.hits(keys_of(1, 2))):
            time.sleep(0.01)
        assert client.store(keys_of(1, 2), [LENGTH] * 2).ok.all() and all(client.load(keys_of(1, 2), [LENGTH] * 2).ok)
        assert client.stats()["removed_directories"] == 0 and used_bytes(tmp_path / "c") <= LIMIT
        client.check()


def test_what_is_there_instead_cannot_be_trusted(tmp_path: Path) -> None:
    """A directory that others can write in is not used; once it is right, the tier goes on."""
    path = tmp_path / "c"
    with Client(path, LIMIT, refresh_s=0.05) as client:
        client.store(keys_of(1), [LENGTH])
        shutil.rmtree(path)
        path.mkdir()
        path.chmod(0o777)
        until_s = time.monotonic() + 30
        while not client.stats()["removed_directories"]:
            assert time.monotonic() < until_s
            time.sleep(0.01)
        time.sleep(0.2)
        assert not client.store(keys_of(2), [LENGTH]).ok.any() and list(path.iterdir()) == []
        assert not client.load(keys_of(1), [LENGTH]).ok.any()
        path.chmod(0o700)
        until(client, 1)
        assert client.store(keys_of(2), [LENGTH]).ok.all() and client.load(keys_of(2), [LENGTH]).ok.all()
        client.check()


def test_while_it_is_written_and_read(tmp_path: Path) -> None:
    """Removed at any moment of stores and loads: `Client.load` asserts that whatever is said to be there is exact."""
    path, stop = tmp_path / "c", threading.Event()
    with Client(path, LIMIT, refresh_s=0.02) as client:

        def remove() -> None:
            while not stop.wait(0.05):
                shutil.rmtree(path, ignore_errors=True)

        remover = threading.Thread(target=remove)
        remover.start()
        found = 0
        try:
            until_s = time.monotonic() + 2
            while time.monotonic() < until_s:
                for number in range(6):
                    names = keys_of(number, number + 1)
                    client.store(names, [LENGTH] * 2)
                    found += int(client.load(names, [LENGTH] * 2).ok.sum())
        finally:
            stop.set()
            remover.join()
        assert found and client.stats()["removed_directories"] >= 2
        until_s = time.monotonic() + 30
        while not (path.is_dir() and client.store(keys_of("end"), [LENGTH]).ok.all()):
            assert time.monotonic() < until_s, "it has not noticed the last removal"
            time.sleep(0.02)
        assert steady_bytes(path) <= LIMIT
        assert len(list(descriptors(path))) <= 4 and len(os.listdir("/proc/self/fd")) < 200
        client.check()
