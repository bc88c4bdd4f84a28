"""Eight processes of four threads each in one directory: look-ups, loads, stores and discards, while some of the
processes are killed and started again. Nothing wrong is ever read, the limit holds throughout, and the dead hold no
lock.

A tier is driven by one thread (the contract of `storage.protocol`), so each thread has a tier of its own, as four
engines in one process have. An operation is one key looked up, loaded, stored or discarded.
`STOWAGE_SHARING_OPERATIONS` says how many.
"""

from __future__ import annotations

import fcntl
import os
import random
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from stowage.storage.disk import DiskTier
from stowage.storage.protocol import Outcome, Transfer
from tests.disk_client import NAMESPACE, aligned, steady_bytes, used_bytes
from tests.nursery import Child, Nursery
from tests.syscall_trap import Board
from tests.tier_client import NEVER_S, key

OPERATIONS = int(os.environ.get("STOWAGE_SHARING_OPERATIONS", "48000"))
PROCESSES, THREADS = 8, 4
KILLS = 6
LIMIT = 32 << 20
SEGMENT = 512 << 10
KEYS = 6000
LENGTHS = (4096, 520, 20_000, 8192)
LOOKED_UP, LOADED, STORED = 128, 24, 8
WRONG, DONE, HITS, OK_STORES, OPERATED = range(5)
"""The notes on a process's board."""

pytestmark = pytest.mark.slow
keys_of_all = [key(number) for number in range(KEYS)]


def content(number: int) -> NDArray[np.uint8]:
    """The only bytes that may ever be read under that key: no two pages and no two keys have the same."""
    words = (LENGTHS[number % len(LENGTHS)] + 7) // 8
    pattern = np.frombuffer(keys_of_all[number], np.uint64)
    return (np.resize(pattern, words) + np.arange(words, dtype=np.uint64)).view(np.uint8)[
        : LENGTHS[number % len(LENGTHS)]
    ]


class Worker:
    """One thread and its tier."""

    def __init__(self, directory: Path, board: Board, seed: int, operations: int) -> None:
        self._chance = random.Random(seed)
        self._notes = board.control.notes
        self._left = operations
        self._woken = threading.Event()
        self._tier = DiskTier(directory, LIMIT, NAMESPACE, segment_bytes=SEGMENT, readers=2, refresh_s=0.2)
        self._tier.wake = self._woken.set
        self._transfers = 0
        buffers = aligned([max(LENGTHS)] * LOADED)
        self._room = [np.frombuffer(buffer, np.uint8) for buffer in buffers]
        self._buffers = buffers

    def run(self) -> None:
        while self._left > 0:
            self._turn()
        self._tier.close(time.monotonic() + 60)
        assert self._tier.stats()["faults"] == 0 and self._tier.stats()["corrupt"] == 0
        self._tier.check()

    def _turn(self) -> None:
        """One look-up of many keys, loads of some that are there, stores of some that are not, sometimes a discard."""
        first = self._chance.randrange(KEYS)
        asked = [(first + n) % KEYS for n in range(LOOKED_UP)]
        masks = self._tier.lookup([keys_of_all[n] for n in asked])
        there = [n for n, mask in zip(asked, masks.tolist(), strict=True) if mask]
        absent = [n for n, mask in zip(asked, masks.tolist(), strict=True) if not mask]
        loaded = self._load(self._some(there, LOADED))
        stored = self._store(self._some(absent, STORED))
        discarded = self._some(there, 1) if self._chance.random() < 0.2 else []
        self._tier.discard([keys_of_all[n] for n in discarded])
        done = LOOKED_UP + loaded + stored + len(discarded)
        self._left -= done
        with counting:
            self._notes[OPERATED] += done

    def _some(self, numbers: list[int], count: int) -> list[int]:
        start = self._chance.randrange(max(1, len(numbers) - count))
        return numbers[start : start + count]

    def _load(self, numbers: list[int]) -> int:
        if not numbers:
            return 0
        for room in self._room[: len(numbers)]:
            room[:] = 0xAA
        outcome = self._transfer(self._tier.load, numbers)
        for ok, mask, number, room in zip(
            outcome.ok.tolist(), outcome.masks.tolist(), numbers, self._room, strict=False
        ):
            expected = content(number)
            if ok and not (mask == 1 + number % 7 and np.array_equal(room[: len(expected)], expected)):
                self._notes[WRONG] += 1
        with counting:
            self._notes[HITS] += int(outcome.ok.sum())
        return len(numbers)

    def _store(self, numbers: list[int]) -> int:
        if not numbers:
            return 0
        for number, room in zip(numbers, self._room, strict=False):
            expected = content(number)
            room[: len(expected)] = expected
        outcome = self._transfer(self._tier.store, numbers)
        with counting:
            self._notes[OK_STORES] += int(outcome.ok.sum())
        return len(numbers)

    def _transfer(self, verb: object, numbers: list[int]) -> Outcome:
        self._transfers += 1
        buffers = [b[: LENGTHS[n % len(LENGTHS)]] for n, b in zip(numbers, self._buffers, strict=False)]
        masks = np.array([1 + n % 7 for n in numbers], np.uint64)
        verb(Transfer(self._transfers, [keys_of_all[n] for n in numbers], buffers, masks, NEVER_S))  # type: ignore[operator]
        until_s = time.monotonic() + 120
        while True:
            self._woken.wait(1.0)
            self._woken.clear()
            for outcome in self._tier.poll():
                return outcome
            assert time.monotonic() < until_s, "no outcome"


counting = threading.Lock()


def work(directory: str, board_path: str, seed: int, operations: int) -> None:
    """One process."""
    board = Board(Path(board_path))

    def run(number: int) -> None:
        Worker(Path(directory), board, seed * THREADS + number, operations // THREADS).run()

    with ThreadPoolExecutor(THREADS) as pool:
        list(pool.map(run, range(THREADS)))
    board.control.notes[DONE] = 1


@pytest.mark.rare
def test_eight_processes_share_one_directory(tmp_path: Path) -> None:
    chance = random.Random(3)
    directory = tmp_path / "c"
    boards = [Board(tmp_path / f"board{number}") for number in range(PROCESSES)]
    total = np.zeros(16, np.int64)
    samples = []
    seeds = iter(range(1 << 20))

    def start(number: int) -> Child:
        left = max(1, OPERATIONS // PROCESSES - int(boards[number].control.notes[OPERATED]))
        return nursery.start(work, directory, tmp_path / f"board{number}", next(seeds), left)

    began_s = time.monotonic()
    with Nursery(__name__) as nursery:
        children = [start(number) for number in range(PROCESSES)]
        killed = 0
        while not all(board.control.notes[DONE] for board in boards):
            if directory.exists():
                samples.append(steady_bytes(directory))
            operated = sum(int(board.control.notes[OPERATED]) for board in boards)
            if killed < KILLS and operated > OPERATIONS * (killed + 1) // (KILLS + 2):
                number = chance.randrange(PROCESSES)
                if not boards[number].control.notes[DONE]:
                    children[number].kill()
                    children[number] = start(number)
                    killed += 1
            for child, board in zip(children, boards, strict=True):
                assert child.alive() or board.control.notes[DONE], "a process failed: see its traceback"
            time.sleep(0.01)
        for child in children:
            assert child.wait() == 0
    for board in boards:
        total += np.array(board.control.notes)
    print(
        f"{total[OPERATED]} operations in {time.monotonic() - began_s:.1f} s, {total[HITS]} hits, "
        f"{total[OK_STORES]} stores, {killed} killed, at most {max(samples)} of {LIMIT} bytes in {len(samples)} samples"
    )
    assert total[WRONG] == 0, "wrong bytes"
    assert killed == KILLS and total[OPERATED] >= OPERATIONS * 9 // 10
    assert total[HITS] > OPERATIONS // 100 and total[OK_STORES] > OPERATIONS // 200
    assert LIMIT * 3 // 4 < max(samples) <= LIMIT
    assert used_bytes(directory) <= LIMIT
    for path in directory.iterdir():
        assert path.suffix in (".seg", "")
        with path.open("rb") as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)  # no lock is held by the dead
