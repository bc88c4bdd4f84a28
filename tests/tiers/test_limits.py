"""Limits hold while many write at once, and from the first moment on."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Sequence
from pathlib import Path

import obstore
import pytest

from stowage.storage.remote.backend import Answer, Bounds, Failure
from stowage.storage.remote.tier import RemoteTier
from tests.tier_client import key
from tests.tiers.client import Client
from tests.tiers.servers import wait_until

Open = Callable[..., RemoteTier]


def size_of(path: Path) -> int:
    """0 for what is no file, or has just been removed."""
    try:
        return path.stat().st_size if path.is_file() else 0
    except FileNotFoundError:
        return 0


def test_the_byte_limit_holds_while_many_are_written(
    tiers: Open, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An object on its way cannot be removed yet: it waits, or another one goes."""
    limit = 10 * (4096 + 192)
    put, largest = obstore.put_async, 0

    async def slow_put(*arguments: object, **options: object) -> object:
        nonlocal largest
        await asyncio.sleep(0.002)
        done = await put(*arguments, **options)  # type: ignore[arg-type]
        largest = max(largest, sum(map(size_of, tmp_path.rglob("*"))))
        return done

    monkeypatch.setattr(obstore, "put_async", slow_put)
    client = Client(tiers(f"file://{tmp_path}", limit_bytes=limit))
    for turn in range(3):
        assert client.store(range(100 * turn, 100 * turn + 40)).ok.all()
    assert largest == limit
    there = [number for number in range(300) if client.load([number]).ok.all()]
    assert len(there) == 10 == client.tier.stats()["bytes_used"] // (4096 + 192)


class Heads:
    """A backend that has nothing, and answers when it is told to."""

    bounds = Bounds(batch_keys=1, batch_bytes=1, reads_max=1, writes_max=1, probes_max=2, search_widths=(8, 8))

    def __init__(self) -> None:
        self.answers = threading.Event()
        self.asked = self.now = self.most = 0

    async def head(self, names: Sequence[str], length: int) -> Sequence[Answer]:
        self.asked += 1
        self.now += 1
        self.most = max(self.most, self.now)
        while not self.answers.is_set():
            await asyncio.sleep(0.001)
        self.now -= 1
        return [None] * len(names)

    async def get(self, names: Sequence[str], lengths: Sequence[int]) -> Sequence[Answer]:
        raise AssertionError

    async def put(self, names: Sequence[str], values: Sequence[bytearray]) -> Sequence[Failure | None]:
        raise AssertionError

    async def close(self) -> None:
        """Nothing to give back."""

    def stats(self) -> dict[str, int | float | str]:
        return {}


def test_the_first_question_counts_like_any_other() -> None:
    """That of a tier that has just been opened: a store that is slow then has no more connections than it should."""
    backend = Heads()
    tier = RemoteTier("slow", backend, bytes(32), bytes.hex, absent_s=0.0, request_timeout_s=30.0)
    client = Client(tier)
    wait_until(lambda: backend.asked)
    timer = threading.Timer(0.1, backend.answers.set)
    timer.start()
    client.ask([key(number) for number in range(8)])
    assert (backend.asked, backend.most) == (1 + 8, backend.bounds.probes_max)
    timer.join()
    tier.close(0.0)
