"""What the disk tier does in pieces: payloads written several at a time, transfers that are read together."""

from __future__ import annotations

import errno
import fcntl
import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import ClassVar

import numpy as np
import pytest

from stowage.format.segment import PAGE_BYTES
from stowage.testing.faults import FaultyFileSystem
from stowage.tiers.disk import DiskTier
from stowage.tiers.disk.files import RealFileSystem
from stowage.tiers.disk.loader import PATIENCE, QUIET_S, SCATTERED_BYTES_PER_S
from stowage.tiers.disk.system import System, Together, alone, several
from stowage.tiers.protocol import Transfer
from tests.disk_client import NEVER_S, Client, aligned, keys_of, only_segment, payload
from tests.inline_crew import InlineCrew

CHUNK_BYTES = 1 << 20
PATIENCE_S = 60.0


def test_results_come_in_the_order_of_the_items_whichever_ends_first() -> None:
    last_is_done = threading.Event()

    def work(item: int) -> int:
        if item == 3:
            last_is_done.set()
        assert last_is_done.wait(PATIENCE_S), "the items are not worked on at the same time"
        return item * item

    assert list(several(work, [0, 1, 2, 3])) == [0, 1, 4, 9]


@pytest.mark.parametrize("together", [alone, several])
def test_where_there_is_nothing_now_it_is_asked_again_after_each_result(together: Together) -> None:
    taken: list[int] = []

    def items() -> Iterator[int | None]:
        yield 1
        yield None  # nothing is under way: asked again once the result was taken
        assert taken == [1]
        yield from (2, 3, 4)
        while len(taken) < 4:
            yield None
        yield 5

    with closing(together(lambda item: item, items())) as results:
        for result in results:
            taken.append(result)
    assert taken == [1, 2, 3, 4, 5]


def test_who_has_nothing_while_nothing_is_under_way_is_done() -> None:
    asked = []

    def items() -> Iterator[int | None]:
        for item in (1, 2, None, None, None, 3):
            asked.append(item)
            yield item

    assert list(several(lambda item: item, items())) == [1, 2]
    assert asked == [1, 2, None, None, None]


@pytest.mark.parametrize("fails", [True, False], ids=["a failure", "closed by the caller"])
def test_nothing_is_being_worked_on_when_it_ends(fails: bool) -> None:
    begun, working = threading.Barrier(3), []
    lock = threading.Lock()

    def work(item: int) -> int:
        if item < 3:
            begun.wait(PATIENCE_S)
        if item == 0:
            if fails:
                raise OSError(errno.EIO, "no")
            return 0
        with lock:
            working.append(item)
        time.sleep(0.05)  # long enough to be seen by whoever does not wait for it
        with lock:
            working.remove(item)
        return item

    with closing(several(work, list(range(50)))) as results:
        if fails:
            with pytest.raises(OSError, match="no"):
                next(results)
        else:
            assert next(results) == 0
    assert not working


class Order(RealFileSystem):
    """Notes what was written where, once it is. Payloads of the first batch are held back until others have passed."""

    def __init__(self, held_below: int, passed_first: int) -> None:
        self.written: list[tuple[int, int]] = []
        self.fails_from = 1 << 62
        self._held_below, self._passed_first = held_below, passed_first
        self._lock = threading.Lock()
        self._passed = threading.Semaphore(0)

    def pwritev(self, fd: int, buffers: list[memoryview], offset: int) -> int:
        length = sum(buffer.nbytes for buffer in buffers)
        if length > PAGE_BYTES:
            if offset >= self.fails_from:
                raise OSError(errno.EIO, "no")
            if offset < self._held_below:
                for _ in range(self._passed_first):
                    assert self._passed.acquire(timeout=PATIENCE_S), "payloads are not written at the same time"
                self._passed_first = 0
        done = super().pwritev(fd, buffers, offset)
        with self._lock:
            self.written.append((offset, length))
        if offset >= self._held_below:
            self._passed.release()
        return done


def test_a_header_page_is_written_after_all_payloads_of_its_batch(tmp_path: Path) -> None:
    """Also where a later batch was quicker."""
    batch_bytes = 31 * 256 * 1024
    files = Order(held_below=2 * PAGE_BYTES + (4 << 20), passed_first=2)
    names = keys_of(*range(62))
    with Client(tmp_path / "c", system=System(files=files), segment_bytes=32 << 20) as client:
        assert client.store(names, [256 * 1024] * 62).ok.all()
        headers = [(at, offset) for at, (offset, length) in enumerate(files.written) if length == PAGE_BYTES and offset]
        headers.sort(key=lambda header: header[1])  # their own order does not matter
        for number, (at, offset) in enumerate(headers[:2]):
            assert offset == PAGE_BYTES + number * (PAGE_BYTES + batch_bytes)
            payloads = [place for place, length in files.written[:at] if length > PAGE_BYTES and place > offset]
            assert sum(place < offset + PAGE_BYTES + batch_bytes for place in payloads) == 2, "4 MiB and the rest"
        assert client.load(names, [256 * 1024] * 62).ok.all()
        client.check()


def test_a_batch_whose_payloads_failed_is_absent_and_those_before_it_are_not(tmp_path: Path) -> None:
    files = Order(held_below=0, passed_first=0)
    names = keys_of(*range(93))
    with Client(tmp_path / "c", system=System(files=files), segment_bytes=32 << 20) as client:
        files.fails_from = 2 * PAGE_BYTES + 31 * 256 * 1024 + PAGE_BYTES // 2  # the second batch's first payload
        outcome = client.store(names, [256 * 1024] * 93)
        assert outcome.ok.tolist() == [True] * 31 + [False] * 62
        assert client.hits(names) == [True] * 31 + [False] * 62
        client.check()
    with Client(tmp_path / "c") as client:
        assert client.load(names[:31], [256 * 1024] * 31).ok.all()
        assert not any(client.hits(names[31:]))


def test_batches_that_were_whole_before_the_disk_failed_are_kept(tmp_path: Path) -> None:
    """Their header pages were under way with payloads of later batches, of which the first failed."""
    files = Order(held_below=0, passed_first=0)
    names, length = keys_of(*range(186)), 256 << 10
    with Client(tmp_path / "c", system=System(files=files), segment_bytes=56 << 20) as client:
        files.fails_from = PAGE_BYTES + 2 * (PAGE_BYTES + 31 * length) + PAGE_BYTES  # the third batch's first payload
        outcome = client.store(names, [length] * 186)
        assert outcome.ok.tolist() == [True] * 62 + [False] * 124
        assert client.stats()["faults"] == 0
        assert client.load(names[:62], [length] * 62).ok.all()
    with Client(tmp_path / "c") as client:
        assert client.hits(names) == [True] * 62 + [False] * 124
        client.check()


def test_a_transfer_of_many_pieces_goes_on_in_the_next_segment(tmp_path: Path) -> None:
    names = keys_of(*range(24))
    with Client(tmp_path / "c", segment_bytes=10 << 20) as client:
        assert client.store(names, [CHUNK_BYTES] * 24).ok.all()
        assert client.stats()["segments"] >= 3
        assert client.load(names[::-1], [CHUNK_BYTES] * 24).ok.all()
        client.check()


def test_a_transfer_of_many_batches_leaves_room_for_the_footer_of_all_its_chunks(tmp_path: Path) -> None:
    names = keys_of(*range(400))
    with Client(tmp_path / "c", segment_bytes=1 << 20) as client:
        assert client.store(names, [PAGE_BYTES] * 400).ok.all()
        client.check()
    assert all(path.stat().st_size <= 1 << 20 for path in (tmp_path / "c").glob("*.seg"))
    with Client(tmp_path / "c") as client:
        assert client.load(names, [PAGE_BYTES] * 400).ok.all()


class NotDirect(RealFileSystem):
    """Takes O_DIRECT when a file is opened, and refuses it when two threads write payloads at the same time."""

    def __init__(self) -> None:
        self._met = threading.Barrier(2)

    def pwritev(self, fd: int, buffers: list[memoryview], offset: int) -> int:
        direct = fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_DIRECT
        if direct and sum(buffer.nbytes for buffer in buffers) > PAGE_BYTES:
            self._met.wait(PATIENCE_S)
            raise OSError(errno.EINVAL, "not here")
        return super().pwritev(fd, buffers, offset)


@pytest.mark.skipif(not hasattr(os, "O_DIRECT"), reason="direct I/O is Linux's")
def test_threads_that_are_refused_direct_io_together_all_go_on_without(tmp_path: Path) -> None:
    names = keys_of(1, 2)
    with Client(tmp_path / "c", system=System(files=NotDirect()), segment_bytes=32 << 20) as client:
        assert client.stats()["direct"] == 1
        assert client.store(names, [4 << 20] * 2).ok.all()
        assert client.stats()["direct"] == 0
        assert client.load(names, [4 << 20] * 2).ok.all()


def _transfer(number: int, keys: list[bytes], length: int, deadline_s: float) -> Transfer:
    masks = np.array([1 + key[0] for key in keys], np.uint64)
    return Transfer(number, keys, aligned([length] * len(keys)), masks, deadline_s)


class Held(InlineCrew):
    """Does nothing before it is told to: several transfers are waiting by then."""

    crews: ClassVar[list[Held]] = []
    held: ClassVar[bool] = False

    def wake(self, count: int = 1) -> None:
        if self not in self.crews:
            self.crews.append(self)
        if not Held.held:
            super().wake(count)


@pytest.mark.parametrize("apart_s", [0.0, 0.02, 1.0], ids=["one deadline", "nearly one", "different deadlines"])
def test_transfers_of_one_deadline_are_read_in_the_order_of_the_disk(tmp_path: Path, apart_s: float) -> None:
    Held.crews.clear()
    length, count = 64 << 10, 24
    names = keys_of(*range(count))
    tier = DiskTier(tmp_path / "c", 64 << 20, bytes(32), system=System(crew=Held), readers=2)
    stored = _transfer(0, names, length, NEVER_S)
    for name, buffer in zip(names, stored.buffers, strict=True):
        buffer[:] = payload(name, length)
    tier.store(stored)
    assert tier.poll()[0].ok.all()
    before = tier.stats()["read_calls"]
    missing = keys_of("missing")
    loads = [
        _transfer(
            1 + part,
            names[part::3] + (missing if part == 1 else []),
            length,
            1e9 + part * apart_s,
        )
        for part in range(3)
    ]
    Held.held = True
    try:
        for load in loads:
            tier.load(load)
    finally:
        Held.held = False
    for crew in list(Held.crews):
        crew.wake()
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


def test_stores_that_wait_are_written_as_one(tmp_path: Path) -> None:
    files, length, count = FaultyFileSystem(), 64 << 10, 21
    names = keys_of(*range(count))
    with Client(tmp_path / "c", system=System(files=files), refresh_s=1e9) as client:
        hang = files.hang("pwritev", after=1)  # the header page of the segment is the first
        transfers = [client.transfer([name], aligned([length])) for name in names]
        for name, transfer in zip(names, transfers, strict=True):
            transfer.buffers[0][:] = payload(name, length)
        begun = [client.begin("store", transfers[0])]
        assert hang.reached.wait(PATIENCE_S)
        begun += [client.begin("store", transfer) for transfer in transfers[1:]]
        hang.release()
        assert all(client.outcome(number).ok.all() for number in begun)
        assert files.calls["pwritev"] == 1 + 2 + 2, "payloads and header page of the first one, and of the others"
        before = client.stats()["read_calls"]
        assert client.load(names, [length] * count).ok.all()
        assert client.stats()["read_calls"] - before == 2, "side by side"
        client.check()


class Continued(RealFileSystem):
    """Has another transfer stored while the first piece is written, and holds the third one until a payload of that
    transfer has been written.
    """

    def __init__(self) -> None:
        self.store_another: Callable[[], object] = lambda: None
        self.payloads: list[int] = []
        self._continued = threading.Event()
        self._lock = threading.Lock()

    def pwritev(self, fd: int, buffers: list[memoryview], offset: int) -> int:
        length = sum(buffer.nbytes for buffer in buffers)
        if length <= PAGE_BYTES:
            return super().pwritev(fd, buffers, offset)
        with self._lock:
            self.payloads.append(offset)
            number = sum(place < offset for place in self.payloads)
        if offset == 2 * PAGE_BYTES:
            self.store_another()
        elif offset == 2 * PAGE_BYTES + 2 * (4 << 20):
            assert self._continued.wait(PATIENCE_S), "what was stored meanwhile waits for the end of what came before"
        elif number >= 3:
            self._continued.set()
        return super().pwritev(fd, buffers, offset)


def test_what_is_stored_meanwhile_is_written_before_the_pieces_before_it_have_ended(tmp_path: Path) -> None:
    files, names = Continued(), keys_of(*range(24))
    with Client(tmp_path / "c", system=System(files=files), refresh_s=1e9, segment_bytes=48 << 20) as client:
        transfers = [client.transfer(part, aligned([CHUNK_BYTES] * 12)) for part in (names[:12], names[12:])]
        for transfer in transfers:
            for name, buffer in zip(transfer.keys, transfer.buffers, strict=True):
                buffer[:] = payload(name, CHUNK_BYTES)
        files.store_another = lambda: client.begin("store", transfers[1])
        client.begin("store", transfers[0])
        assert all(client.outcome(transfer.id).ok.all() for transfer in transfers)
        assert client.load(names, [CHUNK_BYTES] * 24).ok.all()
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


class HeldAndFailing(RealFileSystem):
    """Holds the first payload until it is told to go on; all payloads behind it fail. Header pages are written."""

    def __init__(self) -> None:
        self.reached, self.go_on = threading.Event(), threading.Event()

    def pwritev(self, fd: int, buffers: list[memoryview], offset: int) -> int:
        if offset == 2 * PAGE_BYTES:
            self.reached.set()
            assert self.go_on.wait(PATIENCE_S)
        elif sum(buffer.nbytes for buffer in buffers) > PAGE_BYTES:
            raise OSError(errno.EIO, "no")
        return super().pwritev(fd, buffers, offset)


def test_a_disk_that_fails_fails_all_that_it_was_given_and_no_more(tmp_path: Path) -> None:
    files, length, count = HeldAndFailing(), 64 << 10, 8
    names = keys_of(*range(count))
    with Client(tmp_path / "c", system=System(files=files), refresh_s=1e9) as client:
        transfers = [client.transfer([name], aligned([length])) for name in names]
        begun = [client.begin("store", transfers[0])]
        assert files.reached.wait(PATIENCE_S)
        begun += [client.begin("store", transfer) for transfer in transfers[1:]]
        files.go_on.set()
        outcomes = [client.outcome(number) for number in begun]
        assert [outcome.ok.all() for outcome in outcomes] == [True] + [False] * (count - 1)
        assert all("the disk failed" in outcome.error for outcome in outcomes[1:])
        assert client.stats()["write_errors"] >= 1 and client.stats()["stores_under_way"] == 0
        assert client.hits(names) == [True] + [False] * (count - 1)


@pytest.mark.parametrize("pure_first", [True, False])
def test_what_c_wrote_python_reads_and_the_other_way(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, pure_first: bool
) -> None:
    names, lengths = keys_of(*range(70)), [64 << 10] * 62 + [5000, 1, 4096, 100_001] * 2
    monkeypatch.setenv("STOWAGE_PURE_PYTHON", str(int(pure_first)))
    with Client(tmp_path / "c") as client:
        assert client.store(names, lengths).ok.all()
    with open(only_segment(tmp_path / "c"), "r+b") as file:
        file.seek(2 * PAGE_BYTES + (64 << 10) * 3 + 77)  # in the fourth payload
        byte = file.read(1)[0]
        file.seek(-1, os.SEEK_CUR)
        file.write(bytes([byte ^ 16]))
    monkeypatch.setenv("STOWAGE_PURE_PYTHON", str(int(not pure_first)))
    with Client(tmp_path / "c") as client:
        assert client.load(names, lengths).ok.tolist() == [at != 3 for at in range(70)]
        assert client.stats()["corrupt"] == 1
        client.check()


@pytest.mark.parametrize("pure", ["0", "1"])
def test_memory_that_does_not_begin_on_a_page_does_not_end_direct_io(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, pure: str
) -> None:
    monkeypatch.setenv("STOWAGE_PURE_PYTHON", pure)
    names, length = keys_of(1, 2, 3), 64 << 10
    with Client(tmp_path / "c") as client:
        direct = client.stats()["direct"]
        memory = aligned([4 * length])[0]
        buffers = [memory[at * length + 8 : (at + 1) * length + 8] for at in range(3)]
        for name, buffer in zip(names, buffers, strict=True):
            buffer[:] = payload(name, length)
        assert client.outcome(client.begin("store", client.transfer(names, buffers))).ok.all()
        memory[:] = bytes(4 * length)
        assert client.outcome(client.begin("load", client.transfer(names, buffers))).ok.all()
        assert [bytes(buffer) for buffer in buffers] == [payload(name, length) for name in names]
        assert client.stats()["direct"] == direct
