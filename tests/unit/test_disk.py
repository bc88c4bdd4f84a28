"""The disk tier on real files: exact or absent, within its limit, never blocking, never raising for the disk."""

from __future__ import annotations

import errno
import os
import threading
import time
from pathlib import Path

import numpy as np
import pytest

from stowage.errors import BudgetError
from stowage.testing.faults import FaultyFileSystem
from stowage.tiers.disk import DiskTier, least_limit_bytes
from stowage.tiers.protocol import Described, Waitable
from tests.disk_client import (
    NAMESPACE,
    Client,
    aligned,
    descriptors,
    key,
    only_segment,
    payload,
    segments,
    used_bytes,
)

MIB = 1 << 20


def keys_of(*names: object) -> list[bytes]:
    return [key(name) for name in names]


@pytest.mark.parametrize("direct", [True, False])
@pytest.mark.parametrize("length", [1, 100, 4095, 4096, 4097, 70_000, 5 * MIB + 123])
def test_what_was_stored_is_loaded(tmp_path: Path, length: int, direct: bool) -> None:
    names = keys_of(*range(3 if length > MIB else 70))
    masks = [n + 1 for n in range(len(names))]
    with Client(tmp_path / "c", direct=direct) as client:
        assert not any(client.hits(names))
        assert client.store(names, [length] * len(names), masks).ok.all()
        assert client.tier.lookup(names).tolist() == masks
        outcome = client.load(names, [length] * len(names))
        assert outcome.ok.all() and outcome.masks.tolist() == masks and outcome.error == ""
        assert client.stats()["direct"] == direct, "the file system under the tests should take direct I/O"
        client.check()


def test_buffers_need_not_be_aligned(tmp_path: Path) -> None:
    lengths = [1, 4096, 10_000, 5 * MIB + 1]
    names = keys_of(*lengths)
    with Client(tmp_path / "c") as client:
        whole = memoryview(bytearray(sum(lengths) + 1))
        starts = np.cumsum([1, *lengths]).tolist()
        buffers = [whole[start : start + length] for start, length in zip(starts, lengths, strict=False)]
        for name, buffer in zip(names, buffers, strict=True):
            buffer[:] = payload(name, buffer.nbytes)
        assert client.outcome(client.begin("store", client.transfer(names, buffers))).ok.all()
        before = bytes(whole)
        whole[:] = bytes(len(whole))
        assert client.outcome(client.begin("load", client.transfer(names, buffers))).ok.all()
        assert bytes(whole) == before, "all bytes are back, and none was written beside the buffers"
        assert client.load(names, lengths).ok.all(), "stored from here, loaded to there"


def test_a_mixed_transfer_fails_per_chunk(tmp_path: Path) -> None:
    with Client(tmp_path / "c") as client:
        stored = keys_of(*range(40))
        client.store(stored, [8192] * 40)
        wanted = [name for pair in zip(stored, keys_of(*"x" * 40), strict=True) for name in pair]
        outcome = client.load(wanted[::-1], [8192] * 80)
        assert outcome.ok.tolist() == [False, True] * 40
        assert "40 of 80 chunks absent" in outcome.error


def test_a_chunk_of_another_length_is_a_miss_and_repaired(tmp_path: Path) -> None:
    with Client(tmp_path / "c") as client:
        client.store(keys_of(1), [8192])
        assert not client.load(keys_of(1), [4096]).ok.any()
        assert client.stats()["mismatched"] == 1 and client.hits(keys_of(1)) == [False]
        client.store(keys_of(1), [4096])
        assert client.load(keys_of(1), [4096]).ok.all()


def test_the_newest_store_of_a_key_wins_also_after_a_restart(tmp_path: Path) -> None:
    for _ in range(2):
        with Client(tmp_path / "c", segment_bytes=MIB) as client:
            for n in range(30):  # several segments
                client.store(keys_of("same", n), [100_000] * 2, [n + 1, 1])
        with Client(tmp_path / "c") as client:
            assert client.tier.lookup(keys_of("same")).tolist() == [30]
            assert client.load(keys_of("same"), [100_000]).masks.tolist() == [30]
            client.check()


def test_a_prefix_is_read_in_few_calls(tmp_path: Path) -> None:
    files = FaultyFileSystem()
    names = keys_of(*range(200))
    with Client(tmp_path / "c", files=files, readers=4) as client:
        client.store(names, [65536] * 200)
        files.calls.clear()
        assert client.load(names, [65536] * 200).ok.all()
        assert files.calls["preadv"] <= 6, "12.5 MiB, over four readers"


def test_restart_finds_everything_and_leaves_nothing_open(tmp_path: Path) -> None:
    names = keys_of(*range(100))
    with Client(tmp_path / "c", segment_bytes=MIB) as client:
        client.store(names, [50_000] * 100)
        client.check()
    assert not list(descriptors(tmp_path))
    files = FaultyFileSystem()
    with Client(tmp_path / "c", files=files) as client:
        assert files.calls["preadv"] <= 4 * len(segments(tmp_path / "c")), "opened from the footers only"
        assert client.load(names, [50_000] * 100).ok.all()
        client.check()


def test_an_unclosed_tier_is_taken_over_when_its_lock_is_gone(tmp_path: Path) -> None:
    """The writer's thread ends without sealing, as in a killed process (tests/crash does it with real ones)."""
    files = FaultyFileSystem()
    client = Client(tmp_path / "c", files=files)
    client.store(keys_of(*range(50)), [5000] * 50)
    files.fail("pwritev", errno.EIO)
    client.close()
    assert client.stats()["write_errors"] == 1
    size = only_segment(tmp_path / "c").stat().st_size
    with Client(tmp_path / "c") as client:
        assert client.load(keys_of(*range(50)), [5000] * 50).ok.all()
        assert client.stats()["repaired_segments"] == 1
        assert only_segment(tmp_path / "c").stat().st_size < size, "cut to what is in it"


def test_a_torn_segment_is_taken_over_by_those_who_are_open(tmp_path: Path) -> None:
    files = FaultyFileSystem()
    with Client(tmp_path / "c", refresh_s=60) as survivor:
        client = Client(tmp_path / "c", files=files)
        client.store(keys_of(1), [5000])
        files.fail("pwritev", errno.EIO)
        client.close()
        torn = only_segment(tmp_path / "c")
        before = used_bytes(tmp_path / "c")
        survivor.store(keys_of(2), [5000])
        assert survivor.stats()["repaired_segments"] == 1
        assert torn.stat().st_size <= 5 * 4096 + 8192 < before
        assert survivor.load(keys_of(1, 2), [5000] * 2).ok.all()


def test_leftovers_of_a_writer_that_died_early_are_removed(tmp_path: Path) -> None:
    Client(tmp_path / "c").close()
    for n, content in enumerate((b"", bytes(1 * MIB))):
        (tmp_path / "c" / f"{n:016x}-{n:016x}.seg").write_bytes(content)
    with Client(tmp_path / "c") as client:
        assert client.stats()["removed_leftovers"] == 2
        assert not segments(tmp_path / "c")


def test_the_limit_holds_and_the_oldest_go_first(tmp_path: Path) -> None:
    limit = 8 * MIB
    with Client(tmp_path / "c", limit) as client:
        for n in range(0, 400, 10):
            assert client.store(keys_of(*range(n, n + 10)), [100_000] * 10).ok.all()
            assert used_bytes(tmp_path / "c") <= limit
        hits = client.hits(keys_of(*range(400)))
        assert hits == sorted(hits) and 40 <= sum(hits) < 90, "a tail of the chunks, most of the limit"
        assert client.stats()["reclaimed_segments"] > 10
        live = [name for name, hit in zip(keys_of(*range(400)), hits, strict=True) if hit]
        assert client.load(live, [100_000] * len(live)).ok.all()
        client.check()


def test_chunks_that_are_hit_outlive_their_segment(tmp_path: Path) -> None:
    hot = keys_of("system prompt", "tools")
    with Client(tmp_path / "c", 8 * MIB) as client:
        client.store(hot, [100_000] * 2)
        for n in range(0, 400, 5):
            client.store(keys_of(*range(n, n + 5)), [100_000] * 5)
            assert client.load(hot, [100_000] * 2).ok.all(), f"after {n} others"
        assert client.stats()["rewritten"] >= 10
        assert used_bytes(tmp_path / "c") <= 8 * MIB
        client.check()


def test_reclaimed_space_is_free_at_once_even_where_somebody_reads(tmp_path: Path) -> None:
    with Client(tmp_path / "c", 8 * MIB) as client:
        client.store(keys_of("first"), [MIB])
        with only_segment(tmp_path / "c").open("rb") as reader:
            for n in range(20):
                client.store(keys_of(n), [MIB])
            status = os.fstat(reader.fileno())
            assert (status.st_nlink, status.st_size, status.st_blocks) == (0, 0, 0)
            assert reader.read() == b""


def test_a_lowered_limit_is_kept_from_the_start(tmp_path: Path) -> None:
    with Client(tmp_path / "c", 32 * MIB, segment_bytes=2 * MIB) as client:
        for n in range(30):
            client.store(keys_of(n), [MIB])
    assert used_bytes(tmp_path / "c") > 16 * MIB
    with Client(tmp_path / "c", 8 * MIB) as client:
        assert used_bytes(tmp_path / "c") <= 8 * MIB
        assert client.hits(keys_of(0, 29)) == [False, True]
    with Client(tmp_path / "c", 32 * MIB, segment_bytes=8 * MIB) as large:
        large.store(keys_of("live"), [MIB])
        with Client(tmp_path / "c", 8 * MIB) as small:
            assert small.hits(keys_of(29, "live")) == [False, True], "all that can go goes, even if it is not enough"


def test_other_files_count_towards_the_limit_and_are_left_alone(tmp_path: Path) -> None:
    with Client(tmp_path / "c", 8 * MIB) as client:
        stranger = tmp_path / "c" / "notes.txt"
        stranger.write_bytes(bytes(5 * MIB))
        for n in range(60):
            client.store(keys_of(n), [100_000])
            assert used_bytes(tmp_path / "c") <= 8 * MIB
        assert client.hits(keys_of(59)) == [True]
        stranger.write_bytes(bytes(8 * MIB))
        kept = [name for name in keys_of(*range(60)) if client.hits([name])[0]]
        outcome = client.store(keys_of(*range(100, 160)), [100_000] * 60)
        assert not outcome.ok[-1] and "no room" in outcome.error
        assert kept and client.load(kept, [100_000] * len(kept)).ok.all(), "nothing is given up in vain"
        assert stranger.stat().st_size == 8 * MIB


def test_a_limit_without_room_for_a_chunk_says_what_would_do(tmp_path: Path) -> None:
    least = least_limit_bytes(MIB)
    with pytest.raises(BudgetError, match=str(least)):
        DiskTier(tmp_path / "c", least - 1, NAMESPACE, chunk_bytes_max=MIB)
    assert not (tmp_path / "c").exists()
    with Client(tmp_path / "c", least, chunk_bytes_max=MIB) as client:
        for n in range(3):
            assert client.store(keys_of(n), [MIB]).ok.all()
            assert client.load(keys_of(n), [MIB]).ok.all()
            assert used_bytes(tmp_path / "c") <= least
        outcome = client.store(keys_of("large", "small"), [MIB + 1, 10])
        assert outcome.ok.tolist() == [False, True], "one that does not fit costs only itself"
        assert client.stats()["refused"] == 1


def test_discarded_keys_are_absent_until_stored_again(tmp_path: Path) -> None:
    with Client(tmp_path / "c") as client:
        client.store(keys_of(1, 2), [10, 10])
        client.tier.discard(keys_of(1, 3))
        assert client.hits(keys_of(1, 2)) == [False, True]
        client.store(keys_of(1), [10])
        assert client.load(keys_of(1, 2), [10, 10]).ok.all()


def test_two_tiers_share_a_directory(tmp_path: Path) -> None:
    files = FaultyFileSystem()
    with Client(tmp_path / "c", refresh_s=0.05, files=files) as one, Client(tmp_path / "c", refresh_s=0.05) as two:
        for n in range(5):  # into live segments, which the other one follows
            one.store(keys_of("one", n), [20_000] * 2)
            two.store(keys_of("two", -n), [20_000] * 2)
            one.wait_for(keys_of("two", -n))
            two.wait_for(keys_of("one", n))
            assert one.load(keys_of("two", -n), [20_000] * 2).ok.all()
            assert two.load(keys_of("one", n), [20_000] * 2).ok.all()
        files.calls.clear()
        time.sleep(0.3)
        assert files.calls["preadv"] <= 2 * files.calls["open"], "batches that are known are not read again"
        one.close()
        two.store(keys_of("after"), [10])
        assert two.load(keys_of("one", 4), [20_000] * 2).ok.all()
        two.check()


def test_a_segment_reclaimed_by_another_process_is_a_miss(tmp_path: Path) -> None:
    with Client(tmp_path / "c", 8 * MIB, refresh_s=60) as one, Client(tmp_path / "c", 8 * MIB, refresh_s=60) as two:
        one.store(keys_of("mine"), [MIB])
        one.close()
    with Client(tmp_path / "c", 8 * MIB, refresh_s=60) as one, Client(tmp_path / "c", 8 * MIB, refresh_s=60) as two:
        for n in range(20):
            two.store(keys_of(n), [MIB])
        assert one.hits(keys_of("mine")) == [True], "it has not looked yet"
        assert not one.load(keys_of("mine"), [MIB]).ok.any()
        assert one.stats()["vanished"] == 1 and one.stats()["corrupt"] == 0
        assert used_bytes(tmp_path / "c") <= 8 * MIB


def test_the_segment_of_a_live_writer_is_never_taken(tmp_path: Path) -> None:
    with Client(tmp_path / "c", 8 * MIB) as quiet, Client(tmp_path / "c", 8 * MIB) as busy:
        quiet.store(keys_of("kept"), [100_000])
        for n in range(100):
            assert busy.store(keys_of(n), [200_000]).ok.all(), "the oldest is passed over"
            assert used_bytes(tmp_path / "c") <= 8 * MIB
        assert quiet.store(keys_of("more"), [100_000]).ok.all()
        assert quiet.load(keys_of("kept", "more"), [100_000] * 2).ok.all()


def test_the_least_limit_serves_one_writer_at_a_time(tmp_path: Path) -> None:
    least = least_limit_bytes(MIB)
    with Client(tmp_path / "c", least, chunk_bytes_max=MIB) as one, Client(tmp_path / "c", least) as two:
        assert one.store(keys_of(1), [MIB]).ok.all()
        assert "no room" in two.store(keys_of(2), [MIB]).error
        assert two.stats()["no_room"] == 1
        one.close()
        time.sleep(0.15)
        assert two.store(keys_of(2), [MIB]).ok.all()
        assert used_bytes(tmp_path / "c") <= least


def test_namespaces_do_not_see_each_other_but_share_the_limit(tmp_path: Path) -> None:
    with Client(tmp_path / "c", 8 * MIB) as mine, Client(tmp_path / "c", 8 * MIB, namespace=bytes(32)) as other:
        mine.store(keys_of(1), [100_000])
        mine.close()
        for n in range(2, 100):
            assert other.store(keys_of(n), [100_000]).ok.all()
            assert used_bytes(tmp_path / "c") <= 8 * MIB
        assert other.hits(keys_of(1)) == [False]
    with Client(tmp_path / "c", 8 * MIB) as mine:
        assert mine.stats()["chunks"] == 0, "reclaimed by the other, whose own are not ours"


def test_a_full_queue_drops_at_once(tmp_path: Path) -> None:
    files = FaultyFileSystem()
    with Client(tmp_path / "c", files=files, transfers_max=3, readers=1) as client:
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
    with Client(tmp_path / "c", files=files, readers=2) as client:
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
    with Client(tmp_path / "c", files=files, readers=1) as client:
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
    with Client(tmp_path / "c", files=files) as client:
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
    with Client(tmp_path / "c", clock=lambda: now[0]) as client:
        buffers = aligned([10])
        for verb in ("store", "load"):
            number = client.begin(verb, client.transfer(keys_of(1), buffers, deadline_s=99.0))
            assert not client.outcome(number).ok.any()
        assert client.stats()["timed_out"] == 2 and client.stats()["writes"] == 0


def test_close_does_not_wait_for_a_hung_read(tmp_path: Path) -> None:
    files = FaultyFileSystem()
    client = Client(tmp_path / "c", files=files, readers=1)
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


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT, errno.EIO])
@pytest.mark.parametrize("operation", ["allocate", "pwritev"])
def test_a_disk_that_fails_costs_hits_and_then_recovers(tmp_path: Path, operation: str, code: int) -> None:
    now = [0.0]
    files = FaultyFileSystem()
    with Client(tmp_path / "c", files=files, clock=lambda: now[0]) as client:
        assert client.store(keys_of(1), [10_000]).ok.all()
        client.close()
    with Client(tmp_path / "c", files=files, clock=lambda: now[0]) as client:
        files.fail(operation, code)
        assert not client.store(keys_of(2, 3), [10_000] * 2).ok.any()
        calls = sum(files.calls.values())
        assert not client.store(keys_of(2), [10_000]).ok.any()
        assert sum(files.calls.values()) == calls, "it backs off"
        assert client.stats()["backed_off"] == 1
        files.heal()
        now[0] += 31.0
        assert client.store(keys_of(2, 3), [10_000] * 2).ok.all()
        assert client.load(keys_of(2, 3), [10_000] * 2).ok.all()
        client.check()
        errors = client.stats()["enospc"] if code != errno.EIO else client.stats()["write_errors"]
        assert errors >= 1


def test_what_was_written_before_a_disk_failed_stays(tmp_path: Path) -> None:
    files = FaultyFileSystem()
    with Client(tmp_path / "c", files=files) as client:
        client.store(keys_of(*range(10)), [10_000] * 10)
        files.fail("pwritev", errno.EIO, after=2, times=1)  # the first batch passes, the second one fails
        outcome = client.store(keys_of(*range(100, 150)), [10_000] * 50)
        assert outcome.ok.tolist() == [True] * 31 + [False] * 19
        assert client.load(keys_of(*range(10), *range(100, 131)), [10_000] * 41).ok.all()
        client.check()
    with Client(tmp_path / "c") as client:
        assert client.load(keys_of(*range(10), *range(100, 131)), [10_000] * 41).ok.all()
        assert not any(client.hits(keys_of(*range(131, 150))))


def test_a_full_disk_gives_up_the_oldest_for_the_newest(tmp_path: Path) -> None:
    files = FaultyFileSystem()
    with Client(tmp_path / "c", files=files, segment_bytes=2 * MIB) as client:
        for n in range(4):
            client.store(keys_of(n), [MIB])
        files.fail("allocate", errno.ENOSPC, times=1)
        assert client.store(keys_of(9), [MIB]).ok.all()
        assert client.hits(keys_of(0, 3, 9)) == [False, True, True]
        assert client.stats()["enospc"] == 1


def test_a_bad_sector_costs_one_chunk(tmp_path: Path) -> None:
    files = FaultyFileSystem()
    with Client(tmp_path / "c", files=files, readers=1) as client:
        names = keys_of(*range(10))
        client.store(names, [8192] * 10)
        files.fail("preadv", errno.EIO, times=1)
        files.fail("preadv", errno.EIO, after=3, times=1)
        outcome = client.load(names, [8192] * 10)
        assert outcome.ok.tolist() == [True] * 3 + [False] + [True] * 6
        assert client.stats()["read_errors"] == 1
        assert client.hits(names) == outcome.ok.tolist(), "the next store writes it anew"


def test_short_reads_and_writes_are_continued(tmp_path: Path) -> None:
    files = FaultyFileSystem()
    files.shorten("preadv", 8192)
    files.shorten("pwritev", 4096)
    with Client(tmp_path / "c", files=files) as client:
        names = keys_of(*range(40))
        assert client.store(names, [9000] * 40).ok.all()
        assert client.load(names, [9000] * 40).ok.all()
    with Client(tmp_path / "c", files=files) as client:
        assert client.load(names, [9000] * 40).ok.all()


def test_rot_on_the_way_is_a_miss(tmp_path: Path) -> None:
    files = FaultyFileSystem()
    with Client(tmp_path / "c", files=files) as client:
        for bit in range(0, 8 * 4096, 997):
            assert client.store(keys_of(1), [4096]).ok.all()
            files.rot(bit, times=1)
            assert not client.load(keys_of(1), [4096]).ok.any()
            assert client.hits(keys_of(1)) == [False]
        assert client.stats()["corrupt"] == len(range(0, 8 * 4096, 997))


@pytest.mark.parametrize("where", ["open", "preadv", "pwritev"])
def test_a_file_system_without_direct_io_is_used_buffered(tmp_path: Path, where: str) -> None:
    files = FaultyFileSystem()
    with Client(tmp_path / "c", files=files) as client:
        if where == "open":
            files.fail_flags(os.O_DIRECT, errno.EINVAL)
        else:
            files.fail(where, errno.EINVAL, times=1)
        assert client.store(keys_of(1, 2), [5000] * 2).ok.all()
        assert client.load(keys_of(1, 2), [5000] * 2).ok.all()
        assert client.stats()["direct"] == 0 and client.stats()["direct_fallbacks"] == 1
        assert client.store(keys_of(3), [5000]).ok.all()
        assert client.load(keys_of(1, 2, 3), [5000] * 3).ok.all()


def test_a_file_system_without_preallocation_still_keeps_the_limit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(fd: int, offset: int, length: int) -> None:
        raise OSError(errno.EOPNOTSUPP, "not supported")

    monkeypatch.setattr(os, "posix_fallocate", refuse)
    with Client(tmp_path / "c", 8 * MIB) as client:
        for n in range(100):
            assert client.store(keys_of(n), [100_000]).ok.all()
            assert used_bytes(tmp_path / "c") <= 8 * MIB


def test_a_stuck_directory_lock_costs_stores_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import fcntl

    monkeypatch.setattr("stowage.tiers.disk.room.LOCK_TIMEOUT_S", 0.05)
    with Client(tmp_path / "c") as client:
        with (tmp_path / "c" / "lock").open() as held:
            fcntl.flock(held, fcntl.LOCK_EX)
            assert "no room" in client.store(keys_of(1), [10]).error
        time.sleep(0.15)
        assert client.store(keys_of(1), [10]).ok.all()


def test_a_directory_that_disappears_costs_hits(tmp_path: Path) -> None:
    import shutil

    with Client(tmp_path / "c") as client:
        client.store(keys_of(1), [10])
        shutil.rmtree(tmp_path / "c")
        assert not client.load(keys_of(1), [10]).ok.any()
        client.store(keys_of(2), [10])
        assert client.stats()["faults"] == 0


def test_a_directory_that_is_emptied_is_filled_again(tmp_path: Path) -> None:
    with Client(tmp_path / "c", refresh_s=0.02) as client:
        client.store(keys_of(1), [10])
        for path in (tmp_path / "c").iterdir():
            path.unlink()
        until_s = time.monotonic() + 10
        while any(client.hits(keys_of(1))):
            assert time.monotonic() < until_s
            time.sleep(0.01)
        assert client.store(keys_of(1, 2), [10] * 2).ok.all()
        assert client.load(keys_of(1, 2), [10] * 2).ok.all()
        client.check()
    with Client(tmp_path / "c") as client:
        assert client.load(keys_of(1, 2), [10] * 2).ok.all()


def test_empty_payloads_and_masks_are_refused(tmp_path: Path) -> None:
    with Client(tmp_path / "c") as client:
        assert client.store(keys_of(1, 2, 3), [10, 0, 10], [0, 1, 1]).ok.tolist() == [False, False, True]
        assert client.load(keys_of(1, 2, 3), [10, 0, 10]).ok.tolist() == [False, False, True]
        assert client.outcome(client.begin("load", client.transfer([], []))).ok.shape == (0,)
        assert client.outcome(client.begin("store", client.transfer([], []))).ok.shape == (0,)


def test_it_is_what_the_store_expects(tmp_path: Path) -> None:
    with Client(tmp_path / "c") as client:
        assert isinstance(client.tier, Waitable) and isinstance(client.tier, Described)
        assert client.tier.name == "disk"
        client.store(keys_of(1), [100], [2**64 - 1])
        stats = client.stats()
        assert (stats["chunks"], stats["segments"], stats["writes"], stats["write_bytes"]) == (1, 1, 1, 100)
        assert client.load(keys_of(1), [100]).masks.tolist() == [2**64 - 1]
