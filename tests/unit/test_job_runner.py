"""What the disk tier reads in which order: transfers are read together, and scattered chunks wait for others."""

from __future__ import annotations

import time
from pathlib import Path
from typing import ClassVar

import numpy as np
import pytest

from stowage.storage.disk import DiskTier
from stowage.storage.disk.loader import PATIENCE, QUIET_S, SCATTERED_BYTES_PER_S
from stowage.storage.disk.system import System
from stowage.storage.protocol import Transfer
from stowage.testing.faults import FaultyFileSystem
from tests.disk_client import Client, aligned
from tests.inline_worker_pool import InlineWorkerPool
from tests.tier_client import NEVER_S, keys_of, payload

PATIENCE_S = 60.0


def _transfer(number: int, keys: list[bytes], length: int, deadline_s: float) -> Transfer:
    masks = np.array([1 + key[0] for key in keys], np.uint64)
    return Transfer(number, keys, aligned([length] * len(keys)), masks, deadline_s)


class SwappedBlocks(InlineWorkerPool):
    """Does nothing before it is told to: several transfers are waiting by then."""

    worker_pools: ClassVar[list[SwappedBlocks]] = []
    held: ClassVar[bool] = False

    def wake(self, count: int = 1) -> None:
        if self not in self.worker_pools:
            self.worker_pools.append(self)
        if not SwappedBlocks.held:
            super().wake(count)


@pytest.mark.parametrize("apart_s", [0.0, 0.02, 1.0], ids=["one deadline", "nearly one", "different deadlines"])
def test_transfers_of_one_deadline_are_read_in_the_order_of_the_disk(tmp_path: Path, apart_s: float) -> None:
    SwappedBlocks.worker_pools.clear()
    length, count = 64 << 10, 24
    names = keys_of(*range(count))
    tier = DiskTier(tmp_path / "c", 64 << 20, bytes(32), system=System(worker_pool=SwappedBlocks), readers=2)
    stored = _transfer(0, names, length, NEVER_S)
    for name, buffer in zip(names, stored.buffers, strict=True):
        buffer[:] = payload(name, length)
    tier.store(stored)
    assert tier.poll()[0].ok.all()
    before = tier.stats()["read_calls"]
    missing = keys_of("missing")
    loads = [
        _transfer(1 + part, names[part::3] + (missing if part == 1 else []), length, 1e9 + part * apart_s)
        for part in range(3)
    ]
    SwappedBlocks.held = True
    try:
        for load in loads:
            tier.load(load)
    finally:
        SwappedBlocks.held = False
    for worker_pool in list(SwappedBlocks.worker_pools):
        worker_pool.wake()
    outcomes = {outcome.id: outcome for outcome in tier.poll()}
    assert sorted(outcomes) == [1, 2, 3]
    for load in loads:
        wanted = [key != missing[0] for key in load.keys]
        outcome = outcomes[load.id]
        assert outcome.ok.tolist() == wanted and outcome.masks.tolist() == (load.masks * wanted).tolist()
        assert outcome.error == ("" if all(wanted) else "1 of 9 chunks absent")
        for key, buffer, ok in zip(load.keys, load.buffers, wanted, strict=True):
            assert not ok or bytes(buffer) == payload(key, length)
    calls = tier.stats()["read_calls"] - before  # type: ignore[operator]
    assert calls >= 24 if apart_s == 1.0 else calls <= 2
    tier.close(NEVER_S)


def test_what_comes_while_others_are_read_is_read_with_what_is_left(tmp_path: Path) -> None:
    """Every third chunk first; while the only reader hangs in the first of them, all others of that deadline come."""
    files, length, count = FaultyFileSystem(), 256 << 10, 24
    names = keys_of(*range(count))
    with Client(tmp_path / "c", system=System(files=files), readers=1) as client:
        assert client.store(names, [length] * count).ok.all()
        before = client.stats()["read_calls"]
        hang = files.hang("preadv")
        parts = [names[0::3], names[1::3], names[2::3]]
        loads = [client.transfer(part, aligned([length] * len(part))) for part in parts]
        begun = [client.begin("load", loads[0])]
        assert hang.reached.wait(PATIENCE_S)
        begun += [client.begin("load", load) for load in loads[1:]]
        hang.release()
        for number, load in zip(begun, loads, strict=True):
            assert client.outcome(number).ok.all()
            assert [bytes(buffer) for buffer in load.buffers] == [payload(key, length) for key in load.keys]
        # 1 MiB of the first ones, four stretches; then the pairs between these, and all that follows as one stretch.
        assert client.stats()["read_calls"] - before == 4 + 4
        client.check()


class StillTimer:
    """Time that passes when it is told to."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


def _stored_in_order(client: Client, count: int, length: int) -> list[bytes]:
    names = keys_of(*range(count))
    assert client.store(names, [length] * count).ok.all()
    return names


def _planned(client: Client) -> None:
    """Until a reader has taken what was asked for."""
    until_s = time.monotonic() + PATIENCE_S
    while client.tier._loader._queued or not client.tier._loader._planned:
        assert time.monotonic() < until_s
        time.sleep(0.001)


def test_scattered_chunks_wait_for_those_between_them(tmp_path: Path) -> None:
    timer, length, count = StillTimer(), 64 << 10, 256
    with Client(tmp_path / "c", system=System(timer=timer), refresh_s=1e9, readers=4) as client:
        names = _stored_in_order(client, count, length)
        before = client.stats()["read_calls"]
        loads = [client.transfer(names[part::4], aligned([length] * 64)) for part in range(4)]
        client.begin("load", loads[0])
        _planned(client)
        for load in loads[1:]:
            client.begin("load", load)
        assert client.stats()["read_calls"] == before, "time stands still"
        timer.now_s += QUIET_S
        assert all(client.outcome(load.id).ok.all() for load in loads)
        assert client.stats()["read_calls"] - before <= 6, "16 MiB, up to 4 at a time"
        for load in loads:
            assert [bytes(buffer) for buffer in load.buffers] == [payload(key, length) for key in load.keys]
        client.check()


def test_scattered_chunks_wait_no_longer_than_a_part_of_the_time_that_they_take(tmp_path: Path) -> None:
    timer, length, count = StillTimer(), 64 << 10, 256
    with Client(tmp_path / "c", system=System(timer=timer), refresh_s=1e9, readers=4) as client:
        names = _stored_in_order(client, count, length)
        load = client.transfer(names[::3], aligned([length] * 86))
        client.begin("load", load)
        _planned(client)
        (bundle,) = client.tier._loader._planned
        assert bundle.limit_s == pytest.approx(86 * length / SCATTERED_BYTES_PER_S * PATIENCE)
        client.tier._loader._newest_s = timer.now_s = bundle.limit_s  # as if others had come all the time
        assert client.outcome(load.id).ok.all()


def test_what_waits_for_others_is_read_when_the_tier_closes(tmp_path: Path) -> None:
    timer, length, count = StillTimer(), 64 << 10, 256
    with Client(tmp_path / "c", system=System(timer=timer), refresh_s=1e9, readers=4) as client:
        load = client.transfer(_stored_in_order(client, count, length)[::3], aligned([length] * 86))
        client.begin("load", load)
        _planned(client)
        client.close()
        assert client.outcome(load.id).ok.all()


@pytest.mark.parametrize("step, count", [(1, 256), (3, 60)], ids=["side by side", "too few to be worth it"])
def test_nothing_else_waits(tmp_path: Path, step: int, count: int) -> None:
    length = 64 << 10
    with Client(tmp_path / "c", system=System(timer=StillTimer()), refresh_s=1e9, readers=4) as client:
        names = _stored_in_order(client, 256, length)[::step][:count]
        assert client.load(names, [length] * len(names)).ok.all()
