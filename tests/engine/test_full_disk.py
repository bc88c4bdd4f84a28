"""A full disk, and limits that shrink while others write: they cost hits, never a request; hits come back with room."""

from __future__ import annotations

import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from stowage.engine.engine import Engine
from stowage.storage.disk.tier import segment_bytes_within
from tests.disk_client import Client, steady_bytes, used_bytes
from tests.engine.conftest import Reference, assert_same, greedy, random_prompt
from tests.nursery import wait_until
from tests.tier_client import key

MIB = 1 << 20
SMALL = 64 * MIB


@pytest.fixture
def small(tmp_path: Path) -> Iterator[Path]:
    """A file system of 64 MiB."""
    target = tmp_path / "small"
    target.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", f"size={SMALL},mode=0700", "none", str(target)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    except FileNotFoundError:
        pytest.skip("no mount command")
    if done.returncode:
        pytest.skip(f"no right to mount: {done.stderr.strip()}")
    try:
        yield target
    finally:
        subprocess.run(["umount", "--lazy", str(target)], check=True)


def fill(small: Path) -> Path:
    """Take all the room that is left."""
    filler = small / "filler"
    with filler.open("wb", buffering=0) as file, pytest.raises(OSError, match="No space"):
        while True:
            file.write(bytes(MIB))
    with filler.open("ab", buffering=0) as file, pytest.raises(OSError, match="No space"):
        while True:
            file.write(bytes(4096))
    return filler


def test_a_disk_that_is_really_full(small: Path) -> None:
    """Under a limit of 512 MiB: what fits is kept, the rest costs hits, nothing raises, and room is used again."""
    with Client(small / "c", 512 * MIB, segment_bytes=8 * MIB) as client:
        newest = [client.store([key(n)], [MIB]).ok.all() for n in range(100)]
        assert all(newest[:50]), "the oldest make room for the newest"
        assert client.stats()["enospc"] > 0
        filler = fill(small)
        for n in range(100, 130):
            client.store([key(n)], [MIB])
        live = [n for n in range(130) if client.hits([key(n)])[0]]
        assert client.load([key(n) for n in live], [MIB] * len(live)).ok.all()
        filler.unlink()
        wait_until(lambda: bool(client.store([key("again")], [MIB]).ok.all()), "a store that succeeds again")
        client.check()
    with Client(small / "c", 512 * MIB) as client:
        assert client.load([key("again")], [MIB]).ok.all()


def test_a_limit_larger_than_the_file_system(small: Path) -> None:
    """An eighth of such a limit may be all that there is, or more: segments follow the file system's size."""
    with Client(small / "c", 1024 * MIB) as client:
        assert all(client.store([key(n)], [MIB]).ok.all() for n in range(100))
        live = [n for n in range(100) if client.hits([key(n)])[0]]
        assert len(live) > 40 and live[-1] == 99
        assert client.load([key(n) for n in live], [MIB] * len(live)).ok.all()
        client.tier.set_limit(32 * MIB)
        assert client.stats()["segment_bytes"] == segment_bytes_within(32 * MIB, 0)


@pytest.mark.slow
def test_an_engine_on_a_full_disk(
    small: Path, engines: Callable[..., Engine], references: Callable[..., Reference]
) -> None:
    engine = engines("llama", kv_cache_memory="4MiB", host_memory="2MiB", disk=f"{small / 'c'}:512MiB")
    reference = references("llama")

    def ask(seed: int) -> int:
        """One request, which has to be answered right. Its tokens from disk."""
        (completion,) = engine.generate([random_prompt(300, seed=seed)], greedy(4))
        assert_same(completion, reference.answer(random_prompt(300, seed=seed), 4))
        engine.flush(10)
        engine.drop_device_cache()
        engine.drop_host()
        return completion.reused_tokens.get("disk", 0)

    (small / "early").write_bytes(bytes(SMALL // 2))
    filler = fill(small)
    for seed in range(5):
        assert ask(seed) == 0
    store = engine.stats()["store"]
    assert store["disk.enospc"] > 0 and store["disk.chunks"] == 0
    filler.unlink()
    (small / "early").unlink()
    wait_until(lambda: ask(100) > 0, "hits, with the room that is there again")
    filler = fill(small)
    assert ask(100) > 0, "what is stored needs no room"
    for seed in range(5):
        ask(seed)
    filler.unlink()
    wait_until(lambda: ask(101) > 0, "hits again")
    engine.check()


@pytest.mark.rare
def test_a_limit_that_shrinks_and_grows_while_others_write(tmp_path: Path) -> None:
    """Four writers in one directory, each told the new limits; what they read meanwhile is exact."""
    limits = [24 * MIB, 6 * MIB, 16 * MIB, 5 * MIB, 24 * MIB]
    clients = [Client(tmp_path / "c", limits[0], segment_bytes=MIB, refresh_s=0.05) for _ in range(4)]
    over = threading.Event()

    def write(number: int) -> None:
        client, count = clients[number], 0
        while not over.is_set():
            client.store([key((number, count))], [100_000])
            client.load([key((number, n)) for n in range(max(0, count - 5), count)], [100_000] * min(5, count))
            count += 1
        client.check()

    pool = ThreadPoolExecutor(len(clients))
    writers = [pool.submit(write, number) for number in range(len(clients))]
    for limit, before in zip(limits[1:], limits, strict=False):
        time.sleep(0.5)
        for client in clients:
            client.tier.set_limit(limit)
        if limit < before:
            wait_until(lambda limit=limit: steady_bytes(tmp_path / "c") <= limit, f"{limit} bytes", 20.0)
        until_s = time.monotonic() + 0.5
        while time.monotonic() < until_s:
            assert steady_bytes(tmp_path / "c") <= limit
    wait_until(lambda: steady_bytes(tmp_path / "c") > 12 * MIB, "the room that is there again is used", 60.0)
    over.set()
    for writer in writers:
        writer.result(60)
    for client in clients:
        client.close()
    assert not any(client.stats()["corrupt"] for client in clients)
    assert used_bytes(tmp_path / "c") <= limits[-1]


def test_another_process_has_a_smaller_limit(tmp_path: Path) -> None:
    """It shrinks the directory to its own when it opens; the first one loses hits, and nothing else."""
    with Client(tmp_path / "c", 24 * MIB, segment_bytes=2 * MIB, refresh_s=0.05) as first:
        for n in range(40):
            assert first.store([key(n)], [500_000]).ok.all()
        assert used_bytes(tmp_path / "c") > 16 * MIB
        with Client(tmp_path / "c", 6 * MIB, segment_bytes=MIB, refresh_s=0.05) as second:
            assert used_bytes(tmp_path / "c") <= 6 * MIB, "all but the segment that the first one writes can go"
            time.sleep(0.2)
            assert first.load([key(n) for n in range(40)], [500_000] * 40).ok[-1], "the newest is still there"
            assert first.stats()["corrupt"] == 0
            assert second.store([key("second")], [500_000]).ok.all()
            assert used_bytes(tmp_path / "c") <= 6 * MIB
            for n in range(40, 80):
                first.store([key(n)], [500_000])
                assert used_bytes(tmp_path / "c") <= 24 * MIB
            first.check()
