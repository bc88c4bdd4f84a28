"""`scrub` finds exactly the bad chunks and removes exactly them, at the speed that it is told."""

from __future__ import annotations

import fcntl
import hashlib
import os
import random
import stat
from pathlib import Path

import pytest

from stowage.core.geometry import round_up
from stowage.errors import DirectoryError
from stowage.storage.disk.scrub import scrub
from stowage.storage.disk.system import System
from stowage.storage.format.protection import Method, Protection, SecretKey
from tests.disk_client import NAMESPACE, Client, segments
from tests.numbered_chunks import SEGMENT, Cache, fill, length_of, place_of
from tests.tier_client import key

OTHER = hashlib.sha256(b"another namespace").digest()


def first_of(cache: Cache, path: Path) -> int:
    return min((n for n, place in cache.places.items() if place.path == path), key=lambda n: cache.places[n].offset)


def test_a_good_directory_is_left_as_it_is(cache: Cache) -> None:
    before = cache.image()
    report = cache.scrub()
    assert report.is_clean and (report.chunks, report.good, report.bad) == (200, 200, 0)
    assert report.bytes == sum(place.length for place in cache.places.values())
    assert report.segments == len(before) and cache.image() == before


def test_exactly_the_bad_chunks_are_found_and_gone(cache: Cache) -> None:
    firsts = {first_of(cache, path) for path in segments(cache.directory)}
    bad = firsts | set(random.Random(5).sample(range(200), 17)) | {199}
    cache.flip(*bad)
    assert cache.loaded() == set(range(200)) - bad
    report = cache.scrub()
    assert (report.bad, report.removed, report.good) == (len(bad), len(bad), 200 - len(bad)) and report.is_clean
    expected = {(cache.places[n].path.name, cache.places[n].offset, cache.places[n].length) for n in bad}
    assert {(b.segment, b.offset, b.length) for b in report.listed} == expected
    assert cache.found() == set(range(200)) - bad
    again = cache.scrub()
    assert again.bad == 0 and again.chunks == 200 - len(bad)


def test_check_changes_nothing(cache: Cache) -> None:
    cache.flip(3, 50, 120)
    before = cache.image()
    report = cache.scrub(check=True)
    assert (report.bad, report.left, report.removed) == (3, 3, 0) and not report.is_clean
    assert cache.image() == before


def test_a_removed_chunk_stays_gone_when_its_segment_loses_its_footer(cache: Cache) -> None:
    bad = {n for n in range(200) if n % 9 == 0}
    cache.flip(*bad)
    cache.scrub()
    for path in segments(cache.directory):
        path.write_bytes(path.read_bytes()[:-4096] + bytes(65536))
    with Client(cache.directory) as client:
        assert client.stats()["repaired_segments"] == len(segments(cache.directory))
    assert cache.found() == set(range(200)) - bad


def test_a_segment_without_a_good_chunk_goes(cache: Cache) -> None:
    victim = segments(cache.directory)[1]
    bad = {n for n, place in cache.places.items() if place.path == victim}
    cache.flip(*bad)
    report = cache.scrub()
    assert report.removed == len(bad) and report.removed_segments == 1 and not victim.exists()
    assert cache.found() == set(range(200)) - bad


def test_a_segment_goes_when_its_last_good_chunk_has_gone_bad(cache: Cache) -> None:
    victim = segments(cache.directory)[1]
    first, *rest = (n for n, place in cache.places.items() if place.path == victim)
    cache.flip(*rest)
    cache.scrub()
    victim.write_bytes(victim.read_bytes()[:-4096] + bytes(65536))  # a scan sees the emptied entries again
    assert cache.scrub().torn_segments == 1
    cache.flip(first)
    report = cache.scrub()
    assert (report.removed, report.removed_segments) == (1, 1) and not victim.exists()


def test_what_a_scrub_removed_is_stored_again(cache: Cache) -> None:
    cache.flip(7, 8)
    cache.scrub()
    with Client(cache.directory) as client:
        assert client.hits([key(7), key(8), key(9)]) == [False, False, True]
        assert client.store([key(7)], [length_of(7)]).ok.all()
    assert cache.found() == set(range(200)) - {8}


def test_every_namespace_is_verified(cache: Cache) -> None:
    with Client(cache.directory, namespace=OTHER) as client:
        client.store([key("theirs"), key("bad")], [9000, 9000])
        place = place_of(client, "bad")  # type: ignore[arg-type]
    Cache(cache.directory, {0: place}).flip(0)
    cache.flip(11)
    report = cache.scrub()
    assert (report.chunks, report.bad, report.removed) == (202, 2, 2)
    assert cache.found() == set(range(200)) - {11}
    with Client(cache.directory, namespace=OTHER) as client:
        assert client.load([key("theirs"), key("bad")], [9000, 9000]).ok.tolist() == [True, False]
        assert client.stats()["corrupt"] == 0


def test_a_live_writer_is_checked_and_left_alone(cache: Cache) -> None:
    with Client(cache.directory, segment_bytes=SEGMENT, refresh_s=0.02) as client:
        client.store([key(n) for n in range(200, 210)], [length_of(n) for n in range(200, 210)])
        cache.places.update({n: place_of(client, n) for n in range(200, 210)})
        live = cache.places[205].path
        cache.flip(5, 205)
        before = live.read_bytes()
        report = cache.scrub()
        assert (report.bad, report.removed, report.left, report.segments_in_use) == (2, 1, 1, 1)
        assert not report.is_clean and live.read_bytes() == before
        numbers = [4, 5, 6, 204, 205, 206]
        ok = client.load([key(n) for n in numbers], [length_of(n) for n in numbers]).ok.tolist()
        assert ok == [True, False, True, True, False, True], "the running tier loses the bad ones and nothing else"
        assert client.store([key(5), key(205)], [length_of(5), length_of(205)]).ok.all()
        client.check()
    assert cache.found() == set(range(210))


def test_a_segment_that_somebody_else_changes_is_left_alone(cache: Cache) -> None:
    cache.flip(5, 150)
    held = cache.places[5].path
    before = held.read_bytes()
    with held.open() as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        report = cache.scrub()
    assert (report.bad, report.removed, report.left, report.segments_in_use) == (2, 1, 1, 1)
    assert held.read_bytes() == before
    assert cache.scrub().removed == 1


def test_a_torn_segment_is_finished(cache: Cache) -> None:
    torn = segments(cache.directory)[0]
    data = torn.read_bytes()
    torn.write_bytes(data[:-8192] + bytes(65536))  # as a killed writer leaves it: no footer, room to spare
    bad = first_of(cache, torn)
    cache.flip(bad)
    before = cache.image()
    report = cache.scrub(check=True)
    assert (report.torn_segments, report.bad, report.left) == (1, 1, 1) and cache.image() == before
    report = cache.scrub()
    assert (report.torn_segments, report.bad, report.removed) == (1, 1, 1) and report.is_clean
    assert cache.found() == set(range(200)) - {bad}


def test_a_damaged_footer_is_written_anew(cache: Cache) -> None:
    for path in segments(cache.directory):
        data = bytearray(path.read_bytes())
        data[int.from_bytes(data[-4096 + 24 : -4096 + 32], "little") + 50] ^= 1
        path.write_bytes(data)
    report = cache.scrub()
    assert report.torn_segments == len(segments(cache.directory)) and report.bad == 0 and report.is_clean
    assert cache.found() == set(range(200))
    assert cache.scrub().torn_segments == 0


def test_segments_that_nobody_can_read_go_and_those_of_another_version_stay(cache: Cache) -> None:
    damaged, newer, empty = *segments(cache.directory)[:2], cache.directory / f"{1:016x}-{'ab' * 8}.seg"
    with damaged.open("r+b") as file:
        file.seek(20)
        file.write(b"xx")
    with newer.open("r+b") as file:
        file.seek(8)
        file.write(b"\x09")
    empty.touch(mode=0o600)
    before = cache.image()
    report = cache.scrub(check=True)
    assert (report.damaged_segments, report.other_segments, report.empty_segments) == (1, 1, 1)
    assert not report.is_clean and cache.image() == before
    report = cache.scrub()
    assert (report.damaged_segments, report.other_segments, report.removed_segments) == (1, 1, 2) and report.is_clean
    assert not damaged.exists() and not empty.exists() and newer.read_bytes() == before[newer.name]


def test_foreign_things_are_not_touched(cache: Cache, tmp_path: Path) -> None:
    elsewhere = tmp_path / "elsewhere"
    elsewhere.write_bytes(b"precious")
    name = f"{5:016x}-{'cd' * 8}.seg"
    (cache.directory / name).symlink_to(elsewhere)
    os.mkfifo(cache.directory / f"{6:016x}-{'cd' * 8}.seg")
    (cache.directory / "notes.txt").write_text("mine")
    (cache.directory / f"{7:016x}-{'cd' * 8}.seg").mkdir()
    linked = cache.directory / f"{8:016x}-{'cd' * 8}.seg"
    os.link(elsewhere, linked)
    report = cache.scrub()
    assert report.is_clean and report.chunks == 200
    assert elsewhere.read_bytes() == b"precious" and (cache.directory / "notes.txt").read_text() == "mine"
    assert (cache.directory / name).is_symlink() and linked.exists()
    assert stat.S_ISFIFO((cache.directory / f"{6:016x}-{'cd' * 8}.seg").stat().st_mode)


def test_what_is_no_cache_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DirectoryError, match="no cache has been stored"):
        scrub(tmp_path / "nowhere")
    with pytest.raises(DirectoryError, match="not a Stowage cache"):
        scrub(tmp_path)
    assert list(tmp_path.iterdir()) == []


# Protected by a key


def key_of(text: str) -> SecretKey:
    return SecretKey(hashlib.sha256(text.encode()).digest())


@pytest.mark.parametrize("method", [Method.BLAKE3, Method.AES_256_GCM])
def test_protected_chunks_are_verified_with_their_key(tmp_path: Path, method: Method) -> None:
    old, new = key_of("old"), key_of("new")
    cache = fill(tmp_path / "c", 100, Protection(method, [old]))
    cache.flip(10, 90)
    before = cache.image()
    for secrets in ([], [new]):
        report = cache.scrub(secrets=secrets)
        assert (report.unchecked, report.bad, report.good) == (100, 0, 0)
        assert report.segments_without_key == len(before) and cache.image() == before
    report = cache.scrub(secrets=[new, old])
    assert (report.removed, report.good, report.unchecked) == (2, 98, 0) and report.is_clean
    assert cache.found() == set(range(100)) - {10, 90}


def test_protections_may_be_mixed_in_one_directory(cache: Cache) -> None:
    secret = key_of("secret")
    for method, namespace in ((Method.BLAKE3, NAMESPACE), (Method.AES_256_GCM, OTHER)):
        with Client(cache.directory, namespace=namespace, protection=Protection(method, [secret])) as client:
            client.store([key((method, 1)), key((method, 2))], [9000, 9000])
            place = place_of(client, (method, 1))  # type: ignore[arg-type]
        Cache(cache.directory, {0: place}).flip(0)
    cache.flip(0)
    report = cache.scrub()
    assert (report.chunks, report.unchecked, report.removed) == (204, 4, 1)
    report = cache.scrub(secrets=[secret])
    assert (report.chunks, report.unchecked, report.removed, report.good) == (203, 0, 2, 201)


# How it goes about it


def test_progress_ends_at_all_of_it(cache: Cache) -> None:
    told: list[tuple[int, int]] = []
    cache.scrub(progress=lambda done, total: told.append((done, total)))
    total = sum(path.stat().st_size for path in segments(cache.directory))
    assert told[0][0] == 0 and told[-1][0] == told[-1][1] >= total
    assert [done for done, _ in told] == sorted(done for done, _ in told)


def test_it_reads_no_faster_than_told(cache: Cache) -> None:
    now = [0.0]

    def sleep(seconds: float) -> None:
        now[0] += seconds

    report = cache.scrub(system=System(timer=lambda: now[0], sleep=sleep), bytes_per_s_max=100_000.0)
    read = sum(round_up(place.length) for place in cache.places.values())
    assert report.good == 200
    assert read / 100_000 - 2 < now[0] < read / 100_000 * 1.2 + 2


def test_it_gives_up_a_directory_that_is_locked_and_says_so(cache: Cache) -> None:
    """Somebody holds the directory's lock for ever: nothing is changed, nothing hangs."""
    cache.flip(3)
    before = cache.image()
    now = [0.0]

    def sleep(seconds: float) -> None:
        now[0] += seconds

    with (cache.directory / "lock").open() as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        report = cache.scrub(system=System(timer=lambda: now[0], sleep=sleep))
    assert (report.bad, report.left, report.segments_in_use) == (1, 1, 1) and cache.image() == before
