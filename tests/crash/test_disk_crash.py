"""Real processes, really killed: at any moment. The next one finds exact bytes, and the limit holds (F4, F5)."""

from __future__ import annotations

import os
import random
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.disk_client import Client, segments, used_bytes
from tests.nursery import Nursery, wait_until
from tests.syscall_trap import Board
from tests.tier_client import key, keys_of

LIMIT = 6 << 20
LENGTHS = (4096, 100, 70_000, 9000)


def length_of(number: int) -> int:
    return LENGTHS[number % len(LENGTHS)]


def write_forever(directory: str, limit_bytes: int, name: str, board_path: str) -> None:
    """The other process: stores, says how far it is, and reads what it stored lately: exact or absent."""
    notes = Board(Path(board_path)).control.notes
    client = Client(Path(directory), limit_bytes, refresh_s=0.05)
    notes[0] = 1
    number = 0
    while True:
        batch = range(number, number + 8)
        keys = [key((name, n)) for n in batch]
        client.store(keys, [length_of(n) for n in batch])
        earlier = range(max(0, number - 40), number + 8, 5)
        client.load([key((name, n)) for n in earlier], [length_of(n) for n in earlier])
        number += 8
        notes[1] = number


class Writer:
    """A process that runs `write_forever`, and has opened the directory."""

    def __init__(self, nursery: Nursery, directory: Path, limit_bytes: int, name: str) -> None:
        path = directory.parent / f"{name}.board"
        self._notes = Board(path).control.notes
        self._child = nursery.start(write_forever, directory, limit_bytes, name, path)
        wait_until(lambda: bool(self._notes[0]), "the writer has opened")

    def stop(self) -> int:
        """SIGSTOP, in the middle of whatever it does; returns how many chunks it had stored for certain."""
        os.kill(self._child.pid, signal.SIGSTOP)
        stat = Path(f"/proc/{self._child.pid}/stat")
        wait_until(lambda: stat.read_text().rpartition(")")[2].split()[0] == "T", "the writer has stopped")
        return int(self._notes[1])

    def go_on(self) -> None:
        """SIGCONT; it is at work again when this returns."""
        stored = self._notes[1]
        os.kill(self._child.pid, signal.SIGCONT)
        wait_until(lambda: self._notes[1] > stored + 8, "the writer goes on")

    def kill(self) -> int:
        """Kills it; returns how many chunks it had stored for certain."""
        self._child.kill()
        stored: int = self._notes[1]
        return stored


@pytest.fixture
def nursery() -> Iterator[Nursery]:
    with Nursery(__name__) as started:
        yield started


@pytest.mark.slow
def test_kill_at_any_moment(tmp_path: Path, nursery: Nursery) -> None:
    chance = random.Random(7)
    found_any = 0
    for round_ in range(400):
        if round_ >= 40 and found_any > 20:  # a busy machine kills many of them before their first store
            break
        writer = Writer(nursery, tmp_path / "c", LIMIT, f"w{round_}")
        time.sleep(chance.random() * 0.08)
        stored = writer.kill()
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
        writer = Writer(nursery, tmp_path / "c", LIMIT, "dead")
        time.sleep(0.5)
        stored = writer.kill()
        keys = [key(("dead", n)) for n in range(stored - 8, stored)]
        lengths = [length_of(n) for n in range(stored - 8, stored)]
        client.wait_for(keys)
        assert client.load(keys, lengths).ok.all()
        for n in range(100):
            assert client.store([key(n)], [100_000]).ok.all()
            assert used_bytes(tmp_path / "c") <= LIMIT
        assert not any(client.hits(keys)), "reclaimed in its turn"
        client.check()


@pytest.mark.rare
def test_a_writer_that_is_stopped_and_goes_on(tmp_path: Path, nursery: Nursery) -> None:
    """While it is stopped others read what it stored and write on, and its own segment stays its own."""
    writer = Writer(nursery, tmp_path / "c", 4 * LIMIT, "stopped")
    with Client(tmp_path / "c", 4 * LIMIT, refresh_s=0.05) as client:
        for round_ in range(5):
            time.sleep(0.02 * round_)
            stored = writer.stop()
            if stored:
                last = range(stored - 8, stored)
                keys = [key(("stopped", n)) for n in last]
                client.wait_for(keys)
                assert client.load(keys, [length_of(n) for n in last]).ok.all()
            kept = [client.store([key((round_, n))], [40_000]).ok.all() for n in range(20)]
            assert used_bytes(tmp_path / "c") <= 4 * LIMIT
            assert any(kept) or client.stats()["no_room"], "stores are lost only while the directory's lock is held"
            writer.go_on()
        wait_until(lambda: bool(client.store(keys_of("after"), [100_000]).ok.all()), "stores are kept again")
        assert client.stats()["corrupt"] == 0
        client.check()
    writer.kill()
