"""A real process, killed at every file-related system call that it makes: before it, after it, in the middle of a
write.

Whatever it was doing (opening, repairing, storing, sealing, reclaiming, reading, closing), the next process opens
within a second, finds exact bytes or nothing, keeps the limit, and nothing is left behind.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import signal
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests import syscall_trap
from tests.disk_client import Client, segments, used_bytes
from tests.nursery import Nursery
from tests.syscall_trap import AFTER, BEFORE, NEVER, TORN, WRITES, Board
from tests.tier_client import key

LIMIT = 150 << 10
LIMIT_LOWERED = 96 << 10
LENGTHS = (4096, 100, 5000)
BATCHES = 4
OPTIONS = {"segment_bytes": 56 << 10, "readers": 1, "refresh_s": 1e9}
OPEN_S = 1.0
TRIES = 4
STAGES = 2
EVERY = int(os.environ.get("STOWAGE_KILL_EVERY", "11"))
"""`make crash` has time for every call."""

pytestmark = pytest.mark.slow


def batch(number: int) -> list[bytes]:
    return [key((number, n)) for n in range(len(LENGTHS))]


def live(library: str, board_path: str, directory: str, limit_bytes: int, first: int, last: int) -> None:
    """The process that is killed: open, store batch after batch with reads in between, close. Notes how far it came."""
    board = Board(Path(board_path))
    syscall_trap.arm(library, board)
    client = Client(Path(directory), limit_bytes, **OPTIONS)
    for number in range(first, last):
        assert client.store(batch(number), LENGTHS).ok.all()
        board.control.notes[0] = number + 1
        client.load(batch(number)[:1] + batch(max(number - 1, 0))[1:], LENGTHS)  # hit, so worth copying when it goes
    client.close()


@dataclass
class Stage:
    """Where a process lives and dies: one at a time. `template`: what its directory holds before, if any."""

    nursery: Nursery
    library: Path
    board_path: Path
    directory: Path

    def __post_init__(self) -> None:
        self.board = Board(self.board_path)

    def run(self, at: int, way: int, template: Path | None, limit_bytes: int, first: int, last: int) -> int:
        """One life, killed at that call (0: not killed). The signal that ended it."""
        shutil.rmtree(self.directory, ignore_errors=True)
        if template is not None:
            shutil.copytree(template, self.directory)
        self.board.kill(at, way)
        child = self.nursery.start(live, self.library, self.board_path, self.directory, limit_bytes, first, last)
        return child.wait()

    def names(self) -> list[str]:
        return syscall_trap.names(self.library, self.board.trace())


@pytest.fixture
def stages(tmp_path: Path) -> Iterator[list[Stage]]:
    library = syscall_trap.build(tmp_path)
    with contextlib.ExitStack() as stack:
        nurseries = [stack.enter_context(Nursery(__name__)) for _ in range(STAGES)]
        yield [Stage(n, library, tmp_path / f"board{i}", tmp_path / f"c{i}") for i, n in enumerate(nurseries)]


def assert_unlocked(directory: Path) -> None:
    for path in directory.iterdir():
        with path.open("rb") as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)


def assert_sealed(directory: Path) -> None:
    for path in segments(directory):
        assert path.read_bytes()[-4096:-4088] == b"STOWEND1", "a torn segment"


def restart(directory: Path, limit_bytes: int, batches: int, certain: int) -> float:
    """What the next process finds. `batches` may have been stored, the last of `certain` was. Seconds to open."""
    began_s = time.monotonic()
    client = Client(directory, limit_bytes, **OPTIONS)
    open_s = time.monotonic() - began_s
    with client:
        assert used_bytes(directory) <= limit_bytes
        assert_sealed(directory)
        keys = [chunk for number in range(batches) for chunk in batch(number)]
        found = client.load(keys, LENGTHS * batches).ok  # asserts that what is found is exact
        assert not certain or found[len(LENGTHS) * (certain - 1) :][: len(LENGTHS)].all(), (
            "the last batch stored is found"
        )
        assert client.stats()["corrupt"] == 0, "payloads are written before their headers"
        assert client.store(batch(-1), LENGTHS).ok.all() and client.load(batch(-1), LENGTHS).ok.all()
        client.check()
    assert {path.suffix for path in directory.iterdir()} <= {".seg", ""}, "a temporary file"
    assert_sealed(directory)
    assert used_bytes(directory) <= limit_bytes
    assert_unlocked(directory)
    return open_s


@dataclass
class Case:
    """The lives of one test: they begin with `template`, and store the batches from `first` to `last`. `used_before`:
    what may lie in the directory until a life has opened it.
    """

    limit_bytes: int
    first: int
    last: int
    template: Path | None = None
    used_before: int = 0

    def run(self, stage: Stage, at: int, way: int) -> int:
        return stage.run(at, way, self.template, self.limit_bytes, self.first, self.last)

    def kill(self, stage: Stage, at: int, way: int, trace: list[int]) -> float:
        """One life that ends there, and what the next process finds. Seconds that it took to open."""
        assert self.run(stage, at, way) == signal.SIGKILL, f"call {at} was never made"
        assert stage.board.trace() == trace[:at], "killed at another call than the dry run had there"
        if stage.directory.exists():
            assert used_bytes(stage.directory) <= max(self.limit_bytes, self.used_before)
            assert_unlocked(stage.directory)
        return restart(stage.directory, self.limit_bytes, self.last, stage.board.control.notes[0])


def kill_everywhere(stages: list[Stage], case: Case) -> list[str]:
    """Kill a life at each `EVERY`th of its calls; names of the calls."""
    for stage in stages:
        assert case.run(stage, 0, NEVER) == 0
    trace, names = stages[0].board.trace(), stages[0].names()
    assert all(stage.board.trace() == trace for stage in stages), "lives that are not killed make the same calls"
    # After a call is before the next one: between them nothing leaves the process. So only the last has an after.
    points = [(at, BEFORE) for at in range(1, len(trace) + 1)] + [(len(trace), AFTER)]
    points += [(at, TORN) for at, name in enumerate(names, 1) if name in WRITES]
    points = points[::EVERY]
    done = []

    def kill_some(number: int) -> None:
        for at, way in points[number::STAGES]:
            opened_s = min_until(OPEN_S, lambda at=at, way=way: case.kill(stages[number], at, way, trace))
            assert opened_s < OPEN_S, f"{opened_s:.2f} s to open after a kill at call {at} ({names[at - 1]})"
            done.append((at, way))

    with ThreadPoolExecutor(STAGES) as pool:
        list(pool.map(kill_some, range(STAGES)))
    assert sorted(done) == sorted(points)
    assert not any(stage.nursery.left_in_shared_memory() for stage in stages)
    return names


def min_until(limit_s: float, measure: Callable[[], float]) -> float:
    """The shortest of some measurements; the first one below the limit ends them."""
    measured_s = [measure()]
    while measured_s[-1] >= limit_s and len(measured_s) < TRIES:
        measured_s.append(measure())
    return min(measured_s)


def test_store_reclaim_read_and_close(stages: list[Stage]) -> None:
    names = kill_everywhere(stages, Case(LIMIT, 0, BATCHES))
    assert names.count("unlinkat") >= 1 and names.count("fallocate") >= 4, "segments were made and reclaimed"
    assert {"pwritev2", "preadv2", "ftruncate", "flock"} <= set(names)


def test_open_of_a_directory_that_needs_repair(stages: list[Stage], tmp_path: Path) -> None:
    """A torn segment, what two writers left that died early, and more than the limit, which was lowered."""
    before, stage = Case(LIMIT, 0, BATCHES), stages[0]
    assert before.run(stage, 0, NEVER) == 0
    writes = [at for at, name in enumerate(stage.names(), 1) if name in WRITES]
    assert before.run(stage, writes[-2], TORN) == signal.SIGKILL
    for number, content in enumerate((b"", bytes(8192))):
        (stage.directory / f"{number:016x}-{number:016x}.seg").write_bytes(content)
    template = stage.directory.rename(tmp_path / "template")
    used = used_bytes(template)
    assert used > LIMIT_LOWERED
    names = kill_everywhere(stages, Case(LIMIT_LOWERED, BATCHES, BATCHES + 1, template, used))
    assert names.count("unlinkat") >= 3, "leftovers were removed, and segments for the limit"
