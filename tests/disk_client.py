"""A caller of the disk tier as simple as can be: blocking stores and loads of chunks whose bytes follow from keys."""

from __future__ import annotations

import hashlib
import mmap
import os
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from stowage.storage.disk import DiskTier
from stowage.storage.protocol import Outcome
from tests.tier_client import TierClient, payload

NAMESPACE = hashlib.sha256(b"a namespace").digest()


def numbers(chunk: bytes, length: int) -> bytes:
    """bfloat16 as keys and values have them, other ones for each chunk."""
    seed = int.from_bytes(chunk[:8], "little")
    drawn = np.random.default_rng(seed).standard_normal(length // 2 + 1, np.float32)
    return (drawn.view(np.uint32) >> 16).astype("<u2").tobytes()[:length]


def aligned(lengths: Sequence[int]) -> list[memoryview]:
    """Buffers as the arena has them: each begins on a page."""
    padded = [(length + 4095) // 4096 * 4096 for length in lengths]
    memory = memoryview(mmap.mmap(-1, max(4096, sum(padded))))
    starts = np.cumsum([0, *padded]).tolist()
    return [memory[start : start + length] for start, length in zip(starts, lengths, strict=False)]


def used_bytes(directory: Path) -> int:
    """Everything in the directory, itself included, by length or by blocks: whichever is larger."""
    total = 0
    for path in (directory, *directory.iterdir()):
        status = path.lstat()
        total += max(status.st_size, status.st_blocks * 512)
    return total


def steady_bytes(directory: Path) -> int:
    """`used_bytes` of one moment although other processes are at work: two listings that agree."""

    def listing() -> dict[str, tuple[int, int]]:
        found = {}
        for path in (directory, *directory.iterdir()):
            try:
                status = path.lstat()
            except FileNotFoundError:
                return {}
            found[path.name] = (status.st_ino, max(status.st_size, status.st_blocks * 512))
        return found

    while True:
        first, second = listing(), listing()
        if first and first == second:
            return sum(size for _, size in first.values())


class Client(TierClient):
    """One open tier, on disk."""

    tier: DiskTier

    def __init__(self, directory: Path, limit_bytes: int = 64 << 20, *, namespace: bytes = NAMESPACE, **options: Any):
        self.directory = directory
        self.limit_bytes = limit_bytes
        super().__init__(DiskTier(directory, limit_bytes, namespace, **options))

    def __enter__(self) -> Client:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self, seconds: float = 30.0) -> None:
        self.tier.close(time.monotonic() + seconds)

    def stats(self) -> dict[str, Any]:
        return self.tier.stats()

    def store(self, keys: list[bytes], lengths: Sequence[int], masks: Sequence[int] | None = None) -> Outcome:
        buffers = aligned(lengths)
        for chunk, buffer in zip(keys, buffers, strict=True):
            buffer[:] = payload(chunk, buffer.nbytes)
        return self.outcome(self.begin("store", self.transfer(keys, buffers, masks)))

    def load(self, keys: list[bytes], lengths: Sequence[int]) -> Outcome:
        """Loads and holds the promise: what is ok is exact, whatever else happened."""
        buffers = aligned(lengths)
        outcome = self.outcome(self.begin("load", self.transfer(keys, buffers)))
        for ok, chunk, buffer in zip(outcome.ok.tolist(), keys, buffers, strict=True):
            assert not ok or bytes(buffer) == payload(chunk, buffer.nbytes), "other bytes than were stored"
        assert (outcome.masks[~outcome.ok] == 0).all()
        return outcome

    def hits(self, keys: list[bytes]) -> list[bool]:
        return [bool(mask) for mask in self.tier.lookup(keys)]

    def wait_for(self, keys: list[bytes], seconds: float = 20.0) -> None:
        """Until look-ups find all of them."""
        until_s = time.monotonic() + seconds
        while not all(self.hits(keys)):
            assert time.monotonic() < until_s, "never found"
            time.sleep(0.01)

    def check(self) -> None:
        self.tier.check()
        assert self.stats()["faults"] == 0


def segments(directory: Path) -> list[Path]:
    """The segment files, oldest first."""
    return sorted(directory.glob("*.seg"))


def only_segment(directory: Path) -> Path:
    (path,) = segments(directory)
    return path


def descriptors(directory: Path) -> Iterator[str]:
    """What this process has open in the directory."""
    for number in os.listdir("/proc/self/fd"):
        try:
            target = os.readlink(f"/proc/self/fd/{number}")
        except FileNotFoundError:
            continue
        if target.startswith(str(directory)):
            yield target
