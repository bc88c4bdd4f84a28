"""What every peer of `benchmarks.tiers` is asked, and how each is: by clients in threads, its loads compared."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path

WAIT_S = 120.0


class Peer:
    """One backend with room for all chunks in host memory. Numbers are those of the chunks."""

    def open(self, directory: Path) -> None:
        """A new place for chunks."""

    def store(self, parts: list[list[int]]) -> float:
        """Seconds until all chunks are stored, each part by a client of its own."""
        raise NotImplementedError

    def load(self, parts: list[list[int]]) -> float:
        """Seconds until all are in host memory (host tiers: back on the device)."""
        raise NotImplementedError

    def close(self) -> None:
        """Give the place up; its files stay."""


def at_once(work: Callable[[list[int]], None], parts: list[list[int]]) -> float:
    """Seconds that it takes, each part in a thread of its own."""
    failures: list[BaseException] = []

    def run(part: list[int]) -> None:
        try:
            work(part)
        except BaseException as failure:  # noqa: BLE001 - raised by whoever waits
            failures.append(failure)

    threads = [threading.Thread(target=run, args=(part,)) for part in parts[1:]]
    began_s = time.perf_counter()
    for thread in threads:
        thread.start()
    run(parts[0])
    for thread in threads:
        thread.join()
    elapsed_s = time.perf_counter() - began_s
    if failures:
        raise failures[0]
    return elapsed_s


def check(numbers: Sequence[int], first_words: Sequence[int]) -> None:
    assert list(numbers) == list(first_words), "a peer has loaded other chunks than were stored"
