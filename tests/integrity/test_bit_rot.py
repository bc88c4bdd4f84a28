"""Bits that flip at rest: a chunk is exact or absent, whichever bit it was; the tier counts it, a store repairs it."""

from __future__ import annotations

import os
import random
from pathlib import Path

import numpy as np
import pytest

from stowage.storage.disk.directory import SegmentFile
from stowage.storage.disk.read_plan import plan_runs
from stowage.storage.disk.reader import Reader, Result
from stowage.storage.disk.recovery import scan_segment
from stowage.storage.format.envelope import pack_fields
from tests.depth import few_or_all
from tests.disk_client import NAMESPACE, Client, aligned, only_segment
from tests.integrity.conftest import LIMIT, noticed, opened, repair_by_storing
from tests.segment_surgery import Surgery, flip
from tests.tier_client import key

CHUNK_BYTES = 64 << 10
COPIES = 512
MIB = 1 << 20


@pytest.mark.exhaustive
def test_every_bit_of_a_64_kib_payload_is_verified(tmp_path: Path) -> None:
    """All 524,288 bits, one at a time, in the bytes that arrived, against the tier's own verification.

    Nothing between file and buffer looks at a payload's content: what one flipped bit per byte shows of the way through
    the tier (the next test) holds for the other seven. What does depend on the bit is whether the checksum changes, and
    that is asked here for every one.
    """
    name = key("one")
    with opened(tmp_path / "c") as client:
        assert client.store([name], [CHUNK_BYTES], [5]).ok.all()
        (buffer,) = aligned([CHUNK_BYTES])
        found = client.tier._index.find([name])
        (run,) = plan_runs([name], [buffer], found, client.tier._catalog.opened)
        assert Reader(client.tier._directory, NAMESPACE).read(run) == [Result.OK]
        fields = pack_fields(name, NAMESPACE, 5, CHUNK_BYTES)
        verify, offset, digest = run.guard.verify, run.offsets[0], run.digests.tobytes()
        assert verify(fields, offset, buffer, digest)
        for byte in range(0, CHUNK_BYTES, few_or_all(61, 1)):
            for bit in range(8):
                buffer[byte] ^= 1 << bit
                assert not verify(fields, offset, buffer, digest), (byte, bit)
                buffer[byte] ^= 1 << bit
        assert verify(fields, offset, buffer, digest)


@pytest.mark.exhaustive
def test_a_flipped_bit_in_every_byte_of_a_64_kib_payload(tmp_path: Path) -> None:
    """65,536 flips in the file, one at a time per chunk, read through the whole tier: 512 chunks are stored; in every
    round each has a bit flipped in another byte, a new tier finds all of them in its index, and none may come back.
    """
    names, lengths = [key(n) for n in range(COPIES)], [CHUNK_BYTES] * COPIES
    limit = 48 * MIB
    with opened(tmp_path / "c", limit, segment_bytes=40 * MIB) as client:
        assert client.store(names, lengths).ok.all()
    path = only_segment(tmp_path / "c")
    starts = np.array(Surgery(path).offsets)
    file = np.memmap(path, np.uint8, "r+")
    buffers = aligned(lengths)
    caught = 0
    firsts = range(0, CHUNK_BYTES, few_or_all(8, 1) * COPIES)
    for first in firsts:
        at = starts + first + np.arange(COPIES)
        mask = (1 << (at // 4096 + at) % 8).astype(np.uint8)
        file[at] ^= mask
        with opened(tmp_path / "c", limit) as client:
            assert all(client.hits(names))
            outcome = client.outcome(client.begin("load", client.transfer(names, buffers)))
            assert not outcome.ok.any(), "a flipped bit came back as data"
            assert not any(client.hits(names)), "what did not verify is not offered again"
            caught += client.stats()["corrupt"]
        file[at] ^= mask
    assert caught == len(firsts) * COPIES
    with opened(tmp_path / "c", limit) as client:
        assert client.load(names, lengths).ok.all()


@pytest.mark.exhaustive
def test_every_bit_of_both_copies_of_an_envelope(tmp_path: Path) -> None:
    """2,112 bits, one at a time: in the batch's page and in the footer. Whichever copy is damaged, what the tier finds
    out about the segment is, bit for bit, what was written; in a torn segment, which has one copy, it is that or less.

    Entries are all that later reads go by. Every seventh bit besides goes through a whole tier that is opened, read,
    repaired by the next store, and read again.
    """
    names, lengths = [key(n) for n in range(3)], [4096, 100, 6000]
    with opened(tmp_path / "c") as client:
        assert client.store(names, lengths).ok.all()
    good = Surgery(only_segment(tmp_path / "c"))
    in_batch, in_footer = good.envelopes(1)
    torn = bytes(good.data[: good.footer]) + bytes(8192)
    for whole, first, count in (
        (bytes(good.data), in_batch, 128),
        (bytes(good.data), in_footer, 136),
        (torn, in_batch, 128),
    ):
        good.path.write_bytes(whole)
        expected = entries_in(client, good)
        assert len(expected) == 3 * 136
        for bit in range(8 * first, 8 * (first + count), few_or_all(5, 1)):
            flip(good.path, bit)
            found = entries_in(client, good)
            assert found == expected or (whole is torn and not found), bit
            if bit % 7 == 0:
                read_and_repair(tmp_path / "c", names, lengths, [whole is not torn] * 3)
                for path in (tmp_path / "c").glob("*.seg"):
                    path.unlink()
                good.path.write_bytes(whole)
            else:
                flip(good.path, bit)


def entries_in(client: Client, good: Surgery) -> bytes:
    """The footer entries that the tier makes of the segment as it lies there now."""
    path = client.directory / good.path.name
    fd = os.open(path, os.O_RDONLY)
    with SegmentFile(client.tier._directory, fd, path.stat().st_size, direct=False) as file:
        return b"".join(entries.tobytes() for entries in scan_segment(file, good.name, LIMIT).batches)


def read_and_repair(directory: Path, names: list[bytes], lengths: list[int], expected: list[bool]) -> None:
    with opened(directory) as client:
        assert client.load(names, lengths).ok.tolist() == expected
        assert all(expected) or noticed(client.stats())
        repair_by_storing(client, names, lengths)


@pytest.mark.slow
@pytest.mark.exhaustive
def test_a_hundred_thousand_random_flips_over_16_mib(tmp_path: Path) -> None:
    """In rounds of 500 flips anywhere behind the header: batches, payloads, padding, footer, trailer. What is read is
    exact, what has a flip in its payload is absent, and every tenth round is repaired by storing.
    """
    chance = random.Random(5)
    names = [key(n) for n in range(530)]
    lengths = [chance.choice([1, 4095, 20_000, 40_960, 50_001, 65_536]) for _ in names]
    with opened(tmp_path / "c", 64 * MIB, segment_bytes=24 * MIB) as client:
        assert client.store(names, lengths).ok.all()
    good = Surgery(only_segment(tmp_path / "c"))
    assert len(good.data) > 16 * MIB
    payloads = [bytes(good.data[good.payload(n)]) for n in range(len(names))]
    begins, ends = np.array(good.offsets), np.array(good.offsets) + lengths
    buffers = aligned(lengths)
    hurt, absent, spared = 0, 0, 0
    rounds = few_or_all(40, 200)
    for number in range(rounds):
        bits = np.array(chance.sample(range(8 * 4096, 8 * len(good.data)), 500))
        flip_all(good.path, bits)
        in_chunk = np.searchsorted(begins, bits // 8, side="right") - 1
        damaged = np.zeros(len(names), bool)
        damaged[in_chunk[(in_chunk >= 0) & (bits // 8 < ends[in_chunk])]] = True
        with opened(tmp_path / "c", 64 * MIB) as client:
            ok = client.outcome(client.begin("load", client.transfer(names, buffers))).ok
            assert not (ok & damaged).any(), "a flipped bit came back as data"
            assert all(buffers[n] == payloads[n] for n in np.flatnonzero(ok)), "other bytes than were stored"
            assert noticed(client.stats()) >= 1
            hurt, absent, spared = hurt + damaged.sum(), absent + (~ok).sum(), spared + ok.sum()
            if number % 10 == 0:
                repair_by_storing(client, names, lengths)
        for path in set((tmp_path / "c").glob("*.seg")) - {good.path}:
            path.unlink()
        if client.stats()["repaired_segments"] or client.stats()["removed_leftovers"]:
            good.path.write_bytes(good.data)
        else:
            flip_all(good.path, bits)  # much less to write than all of it
    assert hurt > 100 * rounds and spared > 100 * rounds and absent >= hurt, "both kinds were seen"


def flip_all(path: Path, bits: np.ndarray) -> None:
    """Changes these bits of a file."""
    with path.open("r+b") as file:
        for bit in bits.tolist():
            (byte,) = os.pread(file.fileno(), 1, bit // 8)
            os.pwrite(file.fileno(), bytes([byte ^ 1 << bit % 8]), bit // 8)


@pytest.mark.exhaustive
def test_a_flipped_header_costs_its_segment_only(tmp_path: Path) -> None:
    """What page 0 says: if it is damaged the whole segment is not believed, its neighbour is."""
    names, lengths = [key(n) for n in range(2)], [4096, 5000]
    for n in range(2):
        with opened(tmp_path / "c") as client:
            client.store(names[n : n + 1], lengths[n : n + 1])
    first = sorted((tmp_path / "c").glob("*.seg"))[0]
    for bit in range(0, 8 * 128, few_or_all(13, 3)):
        flip(first, bit)
        with opened(tmp_path / "c") as client:
            assert client.load(names, lengths).ok.tolist() == [False, True]
            assert client.stats()["damaged_segments"] == 1
        flip(first, bit)
    with opened(tmp_path / "c") as client:
        assert client.load(names, lengths).ok.all()


def test_a_flipped_batch_page_of_a_torn_segment_loses_only_what_follows(tmp_path: Path) -> None:
    names = [key(n) for n in range(2)]
    with opened(tmp_path / "c") as client:
        for name in names:
            client.store([name], [4096])
    path = only_segment(tmp_path / "c")
    os.truncate(path, path.stat().st_size - 1)  # no trailer: the tier scans its batches
    flip(path, 8 * 3 * 4096 + 200)
    with opened(tmp_path / "c") as client:
        assert client.load(names, [4096] * 2).ok.tolist() == [True, False]
        assert client.stats()["repaired_segments"] == 1
        client.check()
