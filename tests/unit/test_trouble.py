"""Whatever goes wrong below the engine is counted and reported, in one line of its kind."""

from __future__ import annotations

import errno
import logging
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from stowage.cache.circuit_breaker import FAILURES_MAX, OPEN_S
from stowage.cache.store import TieredStore
from stowage.storage.disk.counters import LOGGED, NAMES
from stowage.storage.disk.system import System
from stowage.testing.faults import FaultyFileSystem
from tests.disk_client import Client, only_segment, segments
from tests.tier_client import keys_of
from tests.unit.test_store import FULL, GEOMETRY, HOST_BYTES, MemoryTier


@pytest.fixture
def events(caplog: pytest.LogCaptureFixture) -> Callable[[], list[str]]:
    caplog.set_level(logging.DEBUG, logger="stowage")
    return lambda: [getattr(record, "stowage_event", record.getMessage()) for record in caplog.records]


def fields_of(caplog: pytest.LogCaptureFixture, event: str) -> dict[str, object]:
    (record,) = [record for record in caplog.records if getattr(record, "stowage_event", "") == event]
    return dict(record.stowage_fields)  # type: ignore[attr-defined]


def test_every_logged_counter_exists() -> None:
    assert LOGGED.keys() <= set(NAMES)


def test_corruption(tmp_path: Path, events: Callable[[], list[str]], caplog: pytest.LogCaptureFixture) -> None:
    with Client(tmp_path / "c") as client:
        client.store(keys_of(*range(5)), [8192] * 5)
        path = only_segment(tmp_path / "c")
        data = bytearray(path.read_bytes())
        for at in range(0, len(data), 4096):
            data[at + 100] ^= 4
        path.write_bytes(data)
        assert not client.load(keys_of(*range(5)), [8192] * 5).ok.any()
        assert client.stats()["corrupt"] == 5
    assert events().count("corrupt") == 1, "five chunks in one moment are one line"
    assert fields_of(caplog, "corrupt")["segment"] == path.name


@pytest.mark.parametrize(
    ("operation", "code", "event"),
    [("pwritev", errno.ENOSPC, "enospc"), ("pwritev", errno.EIO, "write_errors"), ("preadv", errno.EIO, "read_errors")],
)
def test_a_disk_that_fails(
    tmp_path: Path, operation: str, code: int, event: str, events: Callable[[], list[str]]
) -> None:
    files = FaultyFileSystem()
    with Client(tmp_path / "c", system=System(files=files)) as client:
        client.store(keys_of(1), [8192])
        assert event not in events()
        files.fail(operation, code)
        client.store(keys_of(2), [8192])
        client.load(keys_of(1), [8192])
        files.heal()
        assert client.stats()[event] >= 1
    assert event in events()


def test_the_limit_is_reached(tmp_path: Path, events: Callable[[], list[str]]) -> None:
    (tmp_path / "c").mkdir(mode=0o700)
    (tmp_path / "c" / "lock").touch(mode=0o600)
    (tmp_path / "c" / "other").write_bytes(bytes(900_000))
    with Client(tmp_path / "c", 1 << 20) as client:
        assert not client.store(keys_of(1), [200_000]).ok.any()
        assert client.stats()["no_room"] == 1
    assert events().count("no_room") == 1


def test_a_torn_segment_is_repaired_and_a_damaged_one_reported(tmp_path: Path, events: Callable[[], list[str]]) -> None:
    with Client(tmp_path / "c", segment_bytes=1 << 20) as client:
        for n in range(20):
            client.store(keys_of(n), [200_000])
    torn, damaged = segments(tmp_path / "c")[:2]
    with torn.open("r+b") as file:
        file.truncate(torn.stat().st_size - 4096)
    with damaged.open("r+b") as file:
        file.write(b"nothing")
    with Client(tmp_path / "c") as client:
        stats = client.stats()
        assert stats["repaired_segments"] == 1 and stats["damaged_segments"] == 1
    assert events().count("repaired_segments") == 1 and events().count("damaged_segments") == 1


def test_chunks_that_go_with_their_segment_are_counted(tmp_path: Path) -> None:
    with Client(tmp_path / "c", 1 << 20, segment_bytes=256 << 10) as client:
        for n in range(40):
            client.store(keys_of(n), [50_000])
        stats, left = client.stats(), sum(client.hits(keys_of(*range(40))))
        assert stats["evicted"] == 40 - left > 0 and stats["reclaimed_segments"] > 0


def test_a_bug_in_a_worker_is_counted_and_reported(
    tmp_path: Path, events: Callable[[], list[str]], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with Client(tmp_path / "c") as client:
        client.store(keys_of(1), [100])
        monkeypatch.setattr("stowage.storage.disk.loader.make_plan", lambda *_: 1 / 0)
        assert not client.load(keys_of(1), [100]).ok.any()
        assert client.stats()["faults"] == 1
    assert events().count("fault") == 1 and "ZeroDivisionError" in caplog.text


def test_the_breaker_of_a_tier(events: Callable[[], list[str]], caplog: pytest.LogCaptureFixture) -> None:
    now = [0.0]
    tier = MemoryTier(delay_s=0)
    store = TieredStore(GEOMETRY, HOST_BYTES, [tier], clock=lambda: now[0])

    def put(name: str) -> None:
        slots = store.reserve(0, keys_of(name), FULL * (store.locate(keys_of(name))[0] + 1))
        store.commit(slots)
        until_s = time.monotonic() + 30
        while not store.flush(0.0):
            assert time.monotonic() < until_s
            time.sleep(0.001)

    tier.refuses = True
    for n in range(FAILURES_MAX):
        assert "breaker_opened" not in events()
        put(f"bad {n}")
    store.poll()
    assert events().count("breaker_opened") == 1
    assert fields_of(caplog, "breaker_opened") == {"tier": "memory"}
    assert store.stats()["memory.breaker"] == "open"
    tier.refuses = False
    now[0] += OPEN_S + 1
    put("good")
    store.poll()
    assert events().count("breaker_closed") == 1 and store.stats()["memory.breaker"] == "closed"
    now[0] += 100
    put("still good")
    assert events().count("breaker_closed") == 1 and events().count("breaker_opened") == 1
    store.close()


def test_a_load_that_is_given_up_and_memory_that_does_not_come_back(
    events: Callable[[], list[str]], caplog: pytest.LogCaptureFixture
) -> None:
    now = [0.0]
    tier = MemoryTier(delay_s=0)
    store = TieredStore(GEOMETRY, HOST_BYTES, [tier], clock=lambda: now[0])
    key = keys_of("there")
    tier.held[key[0]] = (bytes(GEOMETRY.groups[0].bytes_per_chunk), FULL)
    tier.gate.clear()
    fetch = store.fetch([(0, key)], deadline_s=1.0)
    store.poll()
    assert not fetch.done and "gave_up" not in events()
    now[0] = 1.5
    store.poll()
    assert fetch.done and events().count("gave_up") == 1
    assert fields_of(caplog, "gave_up") == {"count": 1}
    store.release(fetch)
    store.close(0.0)
    assert events().count("memory_kept") == 1
    tier.gate.set()


def test_host_memory_full_of_chunks_in_use(events: Callable[[], list[str]]) -> None:
    store = TieredStore(GEOMETRY, HOST_BYTES)
    slots = store.reserve(0, keys_of(*range(1000)), np.full(1000, FULL, np.uint64))
    assert (slots < 0).any()
    store.poll()
    assert events().count("no_room") == 1
    assert store.stats()["stores_without_room"] > 0
    store.close()
