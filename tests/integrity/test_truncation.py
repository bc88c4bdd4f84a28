"""Files that are too short or too long: what is still there whole is exact, the rest is absent, and nothing grows."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from stowage.storage.disk.directory import SegmentFile
from stowage.storage.disk.read_plan import plan_runs
from stowage.storage.disk.reader import Reader, Result
from stowage.storage.disk.recovery import State, repair, scan_segment
from tests.depth import few_or_all
from tests.disk_client import NAMESPACE, aligned, only_segment
from tests.integrity.conftest import LIMIT, noticed, opened, repair_by_storing
from tests.segment_surgery import Surgery
from tests.tier_client import key, payload

PAGE = 4096
NAMES, LENGTHS = [key(0), key(1)], [300, 5000]


@pytest.fixture
def good(tmp_path: Path) -> Surgery:
    """A small segment: header, two batches of one chunk each, footer, trailer: 32,768 bytes."""
    with opened(tmp_path / "c") as client:
        for n in range(2):
            assert client.store(NAMES[n : n + 1], LENGTHS[n : n + 1]).ok.all()
    return Surgery(only_segment(tmp_path / "c"))


def some_lengths(whole: int, step: int) -> list[int]:
    """Those around each page's edge, and every so many."""
    edges = {edge + d for edge in range(0, whole + 1, PAGE) for d in (-1, 0, 1)}
    return sorted((edges | set(range(0, whole, step))) & set(range(whole)))


@pytest.mark.exhaustive
def test_every_length_of_a_small_segment(good: Surgery, tmp_path: Path) -> None:
    """All 32,768 lengths, byte by byte, looked at by the tier's recovery: what it finds is all that is later read by,
    and it is the entries that were written, or the first of them, or none.
    """
    whole = len(good.data)
    assert whole == 8 * PAGE
    found = []
    with opened(tmp_path / "c") as client, good.path.open("r+b") as raw:
        written = [digest.tobytes() for digest in client.tier._index.find(NAMES).digests]
        lengths = few_or_all(some_lengths(whole, 11), list(range(whole)))[::-1]
        for length in lengths:
            os.truncate(raw.fileno(), length)
            file = SegmentFile(client.tier._directory, raw.fileno(), length, direct=False)
            batches = scan_segment(file, good.name, LIMIT).batches
            found.append(len(batches))
            assert [entries["digest"].tobytes() for entries in batches] == written[: len(batches)], length
    # The footer is gone with the first byte: the batches speak, while they lie in the file whole.
    assert found == [2 if n >= 6 * PAGE else 1 if n >= 3 * PAGE else 0 for n in lengths]


def test_repair_of_what_is_left(good: Surgery, tmp_path: Path) -> None:
    """Never longer than what was left: sealed with what fits before a footer, or given up (the tier removes it)."""
    whole = bytes(good.data)
    with opened(tmp_path / "c") as client:
        for length in some_lengths(len(whole), 61):
            good.path.write_bytes(whole[:length])
            fd = os.open(good.path, os.O_RDWR)
            with SegmentFile(client.tier._directory, fd, length, direct=False) as file:
                state = repair(file, good.name, LIMIT)
                assert file.bytes == os.fstat(fd).st_size <= length
                if length < PAGE:
                    assert state is (State.UNUSABLE if length else State.EMPTY)
                elif length < 5 * PAGE:
                    assert state is State.EMPTY, "no batch, or no room for a footer behind it"
                else:
                    assert state is State.SEALED and file.bytes == 5 * PAGE, "the first batch and a footer"
                    assert good.path.read_bytes()[: 3 * PAGE] == whole[: 3 * PAGE]


@pytest.mark.exhaustive
def test_lengths_through_a_whole_tier(good: Surgery, tmp_path: Path) -> None:
    """Opened, read, stored again, read again, opened once more."""
    whole = bytes(good.data)
    for length in some_lengths(len(whole), few_or_all(499, 97)):
        good.path.write_bytes(whole[:length])
        with opened(tmp_path / "c") as client:
            ok = client.load(NAMES, LENGTHS).ok.tolist()
            assert all(ok) or noticed(client.stats()), length
            repair_by_storing(client, NAMES, LENGTHS)
        with opened(tmp_path / "c") as client:
            assert client.load(NAMES, LENGTHS).ok.all(), "repaired for good"
        for path in (tmp_path / "c").glob("*.seg"):
            path.unlink()


@pytest.mark.exhaustive
def test_every_length_under_a_tier_that_has_the_index(good: Surgery, tmp_path: Path) -> None:
    """The file is cut after it was opened: what the index still promises is read as far as it goes, and verified."""
    whole = bytes(good.data)
    ends = [good.offsets[n] + LENGTHS[n] for n in range(2)]
    buffers = aligned(LENGTHS)
    with opened(tmp_path / "c") as client:
        reader = Reader(client.tier._directory, NAMESPACE)
        (run,) = plan_runs(NAMES, buffers, client.tier._index.find(NAMES), client.tier._catalog.opened)
        for length in range(len(whole), 0, few_or_all(-7, -1)):
            os.truncate(good.path, length)
            results = reader.read(run)
            assert results == [Result.OK if end <= length else Result.CORRUPT for end in ends], length
            assert all(
                r is not Result.OK or b == payload(k, b.nbytes) for r, b, k in zip(results, buffers, NAMES, strict=True)
            )
            if length < 8192:
                break  # from here on all lengths are before the first payload
        os.truncate(good.path, 0)
        assert reader.read(run) == [Result.GONE] * 2, "that is how segments are reclaimed"


def test_a_cut_under_an_open_tier_is_counted_and_stored_anew(good: Surgery, tmp_path: Path) -> None:
    whole = bytes(good.data)
    for length in range(0, good.offsets[1], 512):
        good.path.write_bytes(whole)
        with opened(tmp_path / "c", refresh_s=60) as client:
            os.truncate(good.path, length)
            ok = client.load(NAMES, LENGTHS).ok
            assert not ok[-1] and client.stats()["corrupt"] + client.stats()["vanished"] == (~ok).sum(), length
            repair_by_storing(client, NAMES, LENGTHS)
        for path in (tmp_path / "c").glob("*.seg"):
            path.unlink()


@pytest.mark.parametrize("extra", [b"\0", b"x" * 4095, bytes(4096), b"STOWBAT1" * 512, os.urandom(70_000)])
def test_appended_bytes(good: Surgery, tmp_path: Path, extra: bytes) -> None:
    good.path.write_bytes(good.data + extra)
    with opened(tmp_path / "c") as client:
        assert client.load(NAMES, LENGTHS).ok.all() and client.stats()["repaired_segments"] == 1
    assert good.path.read_bytes() == good.data, "cut off, and sealed as it was"


def test_a_copy_of_itself_appended(good: Surgery, tmp_path: Path) -> None:
    """The file ends with a trailer that was right, in another place."""
    good.path.write_bytes(good.data + good.data)
    with opened(tmp_path / "c") as client:
        assert client.load(NAMES, LENGTHS).ok.all() and client.stats()["repaired_segments"] == 1
    assert good.path.stat().st_size == len(good.data)
