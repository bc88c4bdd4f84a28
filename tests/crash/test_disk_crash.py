"""Real processes, really killed: at any moment. The next one finds exact bytes, and the limit holds (F4, F5)."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.disk_client import Client, key, segments, steady_bytes, used_bytes

ROOT = Path(__file__).parents[2]
LIMIT = 6 << 20
LENGTHS = (4096, 100, 70_000, 9000)


def length_of(number: int) -> int:
    return LENGTHS[number % len(LENGTHS)]


def write_forever(directory: Path, limit_bytes: int, name: str) -> None:
    """The other process: stores, says how far it is, and reads what it stored lately: exact or absent."""
    client = Client(directory, limit_bytes, refresh_s=0.05)
    print("open", flush=True)
    number = 0
    while True:
        batch = range(number, number + 8)
        keys = [key((name, n)) for n in batch]
        client.store(keys, [length_of(n) for n in batch])
        earlier = range(max(0, number - 40), number + 8, 5)
        client.load([key((name, n)) for n in earlier], [length_of(n) for n in earlier])
        number += 8
        print(number, flush=True)


def serve_nursery() -> None:
    """The process that starts writers by forking, which is quick: one per line read (directory, limit, name)."""
    for line in sys.stdin:
        directory, limit_bytes, name = line.rstrip("\n").split("\t")
        child = os.fork()
        if child == 0:
            try:
                print(os.getpid(), flush=True)
                write_forever(Path(directory), int(limit_bytes), name)
            finally:
                traceback.print_exc()
                os._exit(1)
        _, status = os.waitpid(child, 0)
        print("killed" if os.WIFSIGNALED(status) else "failed", flush=True)


class Nursery:
    """One clean process, in which writers are forked one at a time."""

    def __init__(self) -> None:
        program = "from tests.crash.test_disk_crash import serve_nursery; serve_nursery()"
        self._process = subprocess.Popen(
            [sys.executable, "-c", program],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=dict(os.environ, PYTHONPATH=f"{ROOT / 'src'}:{ROOT}"),
            cwd=ROOT,
            text=True,
            start_new_session=True,
        )

    def start(self, directory: Path, limit_bytes: int, name: str) -> int:
        """Starts a writer and waits until it has opened; returns its process id."""
        assert self._process.stdin is not None
        print(directory, limit_bytes, name, sep="\t", file=self._process.stdin, flush=True)
        pid = int(self._line())
        assert self._line() == "open"
        return pid

    def kill(self, pid: int) -> int:
        """Kills the writer; returns how many chunks it had stored for certain."""
        os.kill(pid, signal.SIGKILL)
        count = 0
        while (line := self._line()) != "killed":
            assert line.isdigit(), f"the writer failed before it was killed: {line}"
            count = int(line)
        return count

    def _line(self) -> str:
        assert self._process.stdout is not None
        return self._process.stdout.readline().rstrip("\n")

    def __enter__(self) -> Nursery:
        return self

    def __exit__(self, *_: object) -> None:
        os.killpg(self._process.pid, signal.SIGKILL)  # a writer too, if a test failed before it killed it
        self._process.communicate()


@pytest.fixture
def nursery() -> Iterator[Nursery]:
    with Nursery() as started:
        yield started


def test_kill_at_any_moment(tmp_path: Path, nursery: Nursery) -> None:
    chance = random.Random(7)
    found_any = 0
    for round_ in range(40):
        pid = nursery.start(tmp_path / "c", LIMIT, f"w{round_}")
        time.sleep(chance.random() * 0.08)
        stored = nursery.kill(pid)
        assert used_bytes(tmp_path / "c") <= LIMIT
        with Client(tmp_path / "c", LIMIT) as client:
            # All that any writer so far may have stored: exact or absent, which load() asserts.
            for name, count in ((f"w{round_}", stored + 8), (f"w{round_ - 1}", 64)):
                keys = [key((name, n)) for n in range(count)]
                outcome = client.load(keys, [length_of(n) for n in range(count)])
                if name == f"w{round_}" and stored:
                    assert outcome.ok[stored - 8 : stored].all(), "the last batch that was stored is found"
                    found_any += 1
            assert client.stats()["corrupt"] == 0, "payloads are written before their headers"
            client.check()
        sealed = [path for path in segments(tmp_path / "c") if path.read_bytes()[-4096:-4088] == b"STOWEND1"]
        assert sealed == segments(tmp_path / "c"), "nothing torn is left behind"
        assert {path.suffix for path in (tmp_path / "c").iterdir()} <= {".seg", ""}
        assert used_bytes(tmp_path / "c") <= LIMIT
    assert found_any > 20


def test_a_process_killed_while_another_lives(tmp_path: Path, nursery: Nursery) -> None:
    """The survivor keeps finding, sees the other's chunks, and takes over its torn segment when it needs the room."""
    with Client(tmp_path / "c", LIMIT, refresh_s=0.05) as client:
        pid = nursery.start(tmp_path / "c", LIMIT, "dead")
        time.sleep(0.5)
        stored = nursery.kill(pid)
        keys = [key(("dead", n)) for n in range(stored - 8, stored)]
        lengths = [length_of(n) for n in range(stored - 8, stored)]
        client.wait_for(keys)
        assert client.load(keys, lengths).ok.all()
        for n in range(100):
            assert client.store([key(n)], [100_000]).ok.all()
            assert used_bytes(tmp_path / "c") <= LIMIT
        assert not any(client.hits(keys)), "reclaimed in its turn"
        client.check()


def test_two_processes_under_one_small_limit(tmp_path: Path) -> None:
    """Both write at full speed and verify what they read; the directory is watched all the time."""
    samples = []
    with Nursery() as one, Nursery() as two, Client(tmp_path / "c", LIMIT, refresh_s=0.05) as client:
        pids = [nursery.start(tmp_path / "c", LIMIT, f"w{n}") for n, nursery in enumerate((one, two))]
        until_s = time.monotonic() + 4
        hits = 0
        while time.monotonic() < until_s:
            samples.append(steady_bytes(tmp_path / "c"))
            keys = [key((f"w{w}", n)) for w in range(2) for n in range(2000)]
            live = [at for at, hit in enumerate(client.hits(keys)) if hit][:200]
            outcome = client.load([keys[at] for at in live], [length_of(at % 2000) for at in live])
            hits += int(outcome.ok.sum())
        counts = [nursery.kill(pid) for nursery, pid in zip((one, two), pids, strict=True)]
        assert max(samples) <= LIMIT, f"{max(samples)} bytes of {LIMIT} after {len(samples)} samples"
        assert max(samples) > LIMIT * 2 // 3 and len(samples) > 20, "the limit was reached and watched"
        assert min(counts) > 100 and hits > 100, "both wrote, and the third one found it"
        assert client.stats()["corrupt"] == 0
    with Client(tmp_path / "c", LIMIT) as client:
        client.check()
        assert len(client.tier._index) > 0
    assert used_bytes(tmp_path / "c") <= LIMIT


def mounted(target: Path, size: int) -> bool:
    target.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", f"size={size},mode=0700", "none", str(target)]
    try:
        return subprocess.run(command, capture_output=True, check=False).returncode == 0
    except FileNotFoundError:
        return False


def test_a_disk_that_is_really_full(tmp_path: Path) -> None:
    """A file system of 8 MiB under a limit of 64 MiB: what fits is kept, the rest costs hits, nothing raises."""
    if not mounted(tmp_path / "small", 8 << 20):
        pytest.skip("no right to mount")
    try:
        with Client(tmp_path / "small" / "c", 64 << 20, segment_bytes=2 << 20) as client:
            newest = [client.store([key(n)], [200_000]).ok.all() for n in range(100)]
            assert all(newest[:30]), "the oldest make room for the newest"
            assert client.stats()["enospc"] > 0
            filler = tmp_path / "small" / "filler"
            with filler.open("wb") as file, pytest.raises(OSError, match="No space"):
                file.write(bytes(16 << 20))
            for n in range(100, 140):
                client.store([key(n)], [200_000])
            live = [n for n in range(140) if client.hits([key(n)])[0]]
            assert client.load([key(n) for n in live], [200_000] * len(live)).ok.all()
            filler.unlink()
            until_s = time.monotonic() + 40
            while not client.store([key("again")], [200_000]).ok.all():
                assert time.monotonic() < until_s
                time.sleep(0.1)
            client.check()
        with Client(tmp_path / "small" / "c", 64 << 20) as client:
            assert client.load([key("again")], [200_000]).ok.all()
    finally:
        subprocess.run(["umount", str(tmp_path / "small")], check=True)
