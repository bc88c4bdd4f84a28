"""The disk tier never blocks: full queues, hung operations, deadlines and close."""

from __future__ import annotations

import threading
import time
from pathlib import Path

from stowage.storage.disk.system import System
from stowage.testing.faults import FaultyFileSystem
from tests.disk_client import Client, aligned
from tests.tier_client import key, keys_of, payload


def test_a_full_queue_drops_at_once(tmp_path: Path) -> None:
    files = FaultyFileSystem()
    with Client(tmp_path / "c", system=System(files=files), transfers_max=3, readers=1) as client:
        client.store(keys_of(1), [4096])
        for verb, operation in (("load", "preadv"), ("store", "pwritev")):
            hang = files.hang(operation)
            started = [client.begin(verb, client.transfer(keys_of(1), aligned([4096])))]
            assert hang.reached.wait(10)
            started += [client.begin(verb, client.transfer(keys_of(1), aligned([4096]))) for _ in range(2)]
            before_s = time.monotonic()
            dropped = client.begin(verb, client.transfer(keys_of(1), aligned([4096])))
            assert "queue full" in client.outcome(dropped).error and time.monotonic() - before_s < 5
            hang.release()
            for number in started:
                client.outcome(number)
        assert client.stats()["dropped"] == 2


def test_a_hung_read_costs_its_own_chunks_and_nobody_waits(tmp_path: Path) -> None:
    files = FaultyFileSystem()
    with Client(tmp_path / "c", system=System(files=files), readers=2) as client:
        client.store(keys_of(1, 2), [4096] * 2)
        hang = files.hang("preadv")
        buffers = aligned([4096])
        hung = client.begin("load", client.transfer(keys_of(1), buffers, deadline_s=time.monotonic() + 0.05))
        assert hang.reached.wait(10)
        time.sleep(0.06)
        assert client.tier.poll() == [], "its buffers are in the kernel's hands, whatever the deadline says"
        assert client.load(keys_of(2), [4096]).ok.all(), "the other reader goes on"
        hang.release()
        assert client.outcome(hung).ok.all() and bytes(buffers[0]) == payload(key(1), 4096)


def test_what_waits_behind_a_hung_reader_expires(tmp_path: Path) -> None:
    files = FaultyFileSystem()
    with Client(tmp_path / "c", system=System(files=files), readers=1) as client:
        client.store(keys_of(1, 2), [4096] * 2)
        hang = files.hang("preadv")
        hung = client.begin("load", client.transfer(keys_of(1), aligned([4096])))
        assert hang.reached.wait(10)
        buffers = aligned([4096])
        late = client.begin("load", client.transfer(keys_of(2), buffers, deadline_s=time.monotonic() + 0.02))
        assert not client.outcome(late, 10).ok.any(), "while the only reader still hangs"
        assert client.stats()["timed_out"] == 1
        hang.release()
        assert client.outcome(hung).ok.all()
        assert bytes(buffers[0]) == bytes(4096), "never touched"
        assert client.hits(keys_of(2)) == [True], "late, not lost"


def test_what_waits_behind_a_hung_write_expires(tmp_path: Path) -> None:
    files = FaultyFileSystem()
    with Client(tmp_path / "c", system=System(files=files)) as client:
        hang = files.hang("pwritev")
        hung = client.begin("store", client.transfer(keys_of(1), aligned([4096])))
        assert hang.reached.wait(10)
        late = client.begin("store", client.transfer(keys_of(2), aligned([4096]), deadline_s=time.monotonic() + 0.02))
        assert not client.outcome(late, 10).ok.any()
        assert client.stats()["timed_out"] == 1
        hang.release()
        assert client.outcome(hung).ok.all()


def test_deadlines_are_of_the_given_clock(tmp_path: Path) -> None:
    now = [100.0]
    with Client(tmp_path / "c", system=System(clock=lambda: now[0])) as client:
        buffers = aligned([10])
        for verb in ("store", "load"):
            number = client.begin(verb, client.transfer(keys_of(1), buffers, deadline_s=99.0))
            assert not client.outcome(number).ok.any()
        assert client.stats()["timed_out"] == 2 and client.stats()["writes"] == 0


def test_close_does_not_wait_for_a_hung_read(tmp_path: Path) -> None:
    files = FaultyFileSystem()
    client = Client(tmp_path / "c", system=System(files=files), readers=1)
    client.store(keys_of(1), [4096])
    hang = files.hang("preadv")
    hung = client.begin("load", client.transfer(keys_of(1), aligned([4096])))
    assert hang.reached.wait(10)
    queued = client.begin("load", client.transfer(keys_of(1), aligned([4096])))
    before_s = time.monotonic()
    client.close(0.1)
    client.close(0.1)
    assert time.monotonic() - before_s < 5
    assert not client.outcome(queued).ok.any()
    refused = client.begin("load", client.transfer(keys_of(1), aligned([4096])))
    assert not client.outcome(refused).ok.any()
    hang.release()
    assert client.outcome(hung).ok.all(), "reported when it comes back, even then"


def test_close_finishes_what_was_begun(tmp_path: Path) -> None:
    client = Client(tmp_path / "c")
    names = keys_of(*range(20))
    for name in names:
        buffers = aligned([50_000])
        buffers[0][:] = payload(name, 50_000)
        client.begin("store", client.transfer([name], buffers))
    client.close()
    outcomes = client.tier.poll()
    assert len(outcomes) == 20 and all(outcome.ok.all() for outcome in outcomes)
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("stowage-disk")]
    with Client(tmp_path / "c") as client:
        assert client.load(names, [50_000] * 20).ok.all()
