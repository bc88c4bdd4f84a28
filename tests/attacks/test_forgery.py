"""Whoever can write in the directory, against keyed hashes and encryption.

The attacker knows the format and the code, makes every checksum right, has old copies of everything, and lacks the
keys. What they reach is a miss. The same forgeries do pass a checksum, which shows that they are well made, and what
the keys are for.
"""

from __future__ import annotations

import os
import shutil
import struct
from collections.abc import Callable
from pathlib import Path

import pytest
import xxhash

from stowage.core.geometry import PAGE_BYTES
from stowage.storage.format import envelope, segment
from stowage.storage.format.protection import NO_MARK, Mark, Method, Protection, SecretKey
from stowage.storage.format.segment import SegmentName
from tests.disk_client import NAMESPACE, Client, aligned, only_segment, segments
from tests.segment_surgery import Surgery
from tests.tier_client import key

NAMES = [key(n) for n in range(5)]
LENGTHS = [4096, 100, 8192, 4096, 6000]
LIMIT = 8 << 20
OURS, LEAKED = SecretKey(b"\1" * 32), SecretKey(b"\2" * 32)
KEYED = [Method.BLAKE3, Method.AES_256_GCM]
EVIL = b"not what was stored under that key" * 1000


def under(method: Method) -> Protection:
    return Protection(method, [] if method is Method.CHECKSUM else [OURS])


@pytest.fixture(params=KEYED, ids=lambda method: method.label)
def method(request: pytest.FixtureRequest) -> Method:
    found: Method = request.param
    return found


def stored(directory: Path, method: Method) -> Path:
    """A directory with one sealed segment of five chunks in one batch."""
    with Client(directory, LIMIT, protection=under(method)) as client:
        assert client.store(NAMES, LENGTHS, [3] * 5).ok.all()
    return directory


class Forger(Surgery):
    """Changes a segment as its owner's enemy would: index and header as they like, all checksums made right."""

    def overwrite(self, number: int, at: int, value: bytes) -> None:
        """Part of an envelope. Beyond it, only the footer has more: the offset."""
        for place in self.envelopes(number)[1 if at >= 128 else 0 :]:
            self.data[place + at : place + at + len(value)] = value

    def header(self, mark: Mark, namespace: bytes = NAMESPACE) -> None:
        self.data[:PAGE_BYTES] = segment.pack_segment_header(self.name, len(self.data), namespace, mark)

    def put_payload(self, number: int, payload: bytes) -> None:
        self.data[self.offsets[number] : self.offsets[number] + len(payload)] = payload

    def checksum(self, number: int) -> None:
        """The digest that a checksum would have."""
        payload = self.data[self.payload(number)]
        self.overwrite(number, 112, xxhash.xxh3_128_digest(self.envelope(number)[:112] + payload))

    def save_as(self, torn: bool) -> None:
        """`torn`: without a trailer, so that the batches are scanned."""
        self.save()
        self.path.write_bytes(self.data + b"\0" * torn)


def put_another_key(forger: Forger) -> None:
    forger.overwrite(0, 8, key("another"))


def trade_keys(forger: Forger) -> None:
    """Two chunks of one length: each is offered under the other's key."""
    forger.overwrite(0, 8, NAMES[3])
    forger.overwrite(3, 8, NAMES[0])


def trade_envelopes(forger: Forger) -> None:
    first, fourth = forger.envelope(0), forger.envelope(3)
    forger.overwrite(0, 0, fourth)
    forger.overwrite(3, 0, first)


def trade_chunks(forger: Forger) -> None:
    """Envelope and payload together: whole chunks, each in the other's place."""
    trade_envelopes(forger)
    forger.swap(forger.payload(0), forger.payload(3))


def claim_more_blocks(forger: Forger) -> None:
    forger.overwrite(0, 72, struct.pack("<Q", 7))


def claim_fewer_blocks(forger: Forger) -> None:
    forger.overwrite(0, 72, struct.pack("<Q", 1))


def claim_another_place(forger: Forger) -> None:
    forger.overwrite(0, 128, struct.pack("<Q", forger.offsets[3]))


def change_the_payload(forger: Forger) -> None:
    forger.put_payload(0, EVIL[:4096])
    forger.checksum(0)


def flip_a_bit_and_zero_the_digest(forger: Forger) -> None:
    forger.data[forger.offsets[0]] ^= 1
    forger.overwrite(0, 112, bytes(16))


def take_the_other_method_for_all(forger: Forger) -> None:
    forger.overwrite(0, 6, struct.pack("<H", 3 - forger.data[10]))


def downgrade_one_envelope(forger: Forger) -> None:
    forger.overwrite(0, 6, bytes(2))
    change_the_payload(forger)


ATTACKS: dict[str, Callable[[Forger], None]] = {
    attack.__name__: attack
    for attack in (
        put_another_key,
        trade_keys,
        trade_envelopes,
        trade_chunks,
        claim_more_blocks,
        claim_fewer_blocks,
        claim_another_place,
        change_the_payload,
        flip_a_bit_and_zero_the_digest,
        take_the_other_method_for_all,
        downgrade_one_envelope,
    )
}


@pytest.mark.parametrize("torn", [False, True], ids=["by the footer", "by the batches"])
@pytest.mark.parametrize("attack", ATTACKS.values(), ids=ATTACKS.keys())
def test_a_changed_index_yields_misses_only(
    tmp_path: Path, method: Method, attack: Callable[[Forger], None], torn: bool
) -> None:
    """What is read is exact (`Client.load` asserts it), what was attacked is not read, the rest still is."""
    torn &= attack is not claim_another_place  # batches name no offsets
    forger = Forger(only_segment(stored(tmp_path / "c", method)))
    attack(forger)
    forger.save_as(torn)
    with Client(tmp_path / "c", LIMIT, protection=under(method)) as client:
        outcome = client.load([*NAMES, key("another")], [*LENGTHS, 4096])
        hit = [1, 2, 4] if attack in (trade_keys, trade_envelopes, trade_chunks) else [1, 2, 3, 4]
        assert [n for n, ok in enumerate(outcome.ok) if ok] == hit
        assert (outcome.masks[hit] == 3).all()
        assert client.store(NAMES, LENGTHS).ok.all() and client.load(NAMES, LENGTHS).ok.all(), "repaired"
        client.check()


def forge_all(forger: Forger, mark: Mark, flags: int, hashed: int) -> None:
    """A segment of the attacker's own making under the stored keys. `hashed`: the flags that the checksums are for."""
    forger.header(mark)
    for n in range(5):
        forger.put_payload(n, EVIL[: LENGTHS[n]])
        forger.overwrite(n, 6, struct.pack("<H", hashed))
        forger.checksum(n)
        forger.overwrite(n, 6, struct.pack("<H", flags))


def test_the_same_forgery_passes_a_checksum(tmp_path: Path) -> None:
    """They find damage, not forgery: as docs/format.md says."""
    forger = Forger(only_segment(stored(tmp_path / "c", Method.CHECKSUM)))
    forge_all(forger, NO_MARK, 0, 0)
    forger.save_as(torn=False)
    with Client(tmp_path / "c", LIMIT) as client:
        buffers = aligned(LENGTHS)
        assert client.outcome(client.begin("load", client.transfer(NAMES, buffers))).ok.all()
        assert [bytes(buffer) for buffer in buffers] == [EVIL[:length] for length in LENGTHS]


DOWNGRADES = {
    "a checksum, and nothing that says otherwise": lambda method: (0, bytes(8), 0),
    "a checksum, in a segment that is marked as before": lambda method: (method, OURS.id, method),
    "a checksum in the envelopes": lambda method: (method, OURS.id, 0),
    "a checksum in the header": lambda method: (0, OURS.id, method),
    "the other keyed method": lambda method: (3 - method, OURS.id, 3 - method),
    "a key that we do not have": lambda method: (method, LEAKED.id, method),
    "no key": lambda method: (method, bytes(8), method),
    "a method that there is not": lambda method: (3, OURS.id, 3),
    "the largest number": lambda method: (65535, bytes(8), 65535),
}


@pytest.mark.parametrize("hashed", [0, None], ids=["hashed as a checksum", "hashed as it says"])
@pytest.mark.parametrize("downgrade", DOWNGRADES.values(), ids=DOWNGRADES.keys())
def test_a_downgrade_yields_misses(
    tmp_path: Path, method: Method, downgrade: Callable[[Method], tuple[int, bytes, int]], hashed: int | None
) -> None:
    number, key_id, flags = downgrade(method)
    hashed = flags if hashed is None else hashed
    forger = Forger(only_segment(stored(tmp_path / "c", method)))
    forge_all(forger, Mark(number, key_id, bytes(16)), flags, hashed)
    forger.save_as(torn=False)
    with Client(tmp_path / "c", LIMIT, protection=under(method)) as client:
        assert not client.load(NAMES, LENGTHS).ok.any()
        assert client.store(NAMES, LENGTHS).ok.all() and client.load(NAMES, LENGTHS).ok.all()
        client.check()


def test_chunks_and_files_moved_between_segments_are_misses(tmp_path: Path, method: Method) -> None:
    """The same chunks under the same key in two segments: nothing of one is worth anything in the other."""
    one = Forger(only_segment(stored(tmp_path / "one", method)))
    two = Forger(only_segment(stored(tmp_path / "two", method)))
    assert len(one.data) == len(two.data)
    for n in range(5):
        two.put_payload(n, bytes(one.data[one.payload(n)]))
        two.overwrite(n, 0, one.envelope(n))
    two.save_as(torn=False)
    with Client(tmp_path / "two", LIMIT, protection=under(method)) as client:
        assert all(client.hits(NAMES)) and not client.load(NAMES, LENGTHS).ok.any()
        assert client.stats()["corrupt"] == 5


def test_a_file_under_another_id_is_worth_nothing(tmp_path: Path, method: Method) -> None:
    path = only_segment(stored(tmp_path / "c", method))
    mark = segment.parse_segment_header(path.read_bytes()[:PAGE_BYTES], Forger(path).name).mark
    other = SegmentName(1, os.urandom(8))
    data = bytearray(path.read_bytes())
    data[:PAGE_BYTES] = segment.pack_segment_header(other, len(data), NAMESPACE, mark)
    for start in (PAGE_BYTES, len(data) - PAGE_BYTES):
        page = data[start : start + PAGE_BYTES]
        page[16:24] = other.id
        page[112:128] = segment._page_digest(page)
        data[start : start + PAGE_BYTES] = page
    path.with_name(str(other)).write_bytes(data)
    path.unlink()
    with Client(tmp_path / "c", LIMIT, protection=under(method)) as client:
        assert all(client.hits(NAMES)), "the index is as good as before"
        assert not client.load(NAMES, LENGTHS).ok.any() and client.stats()["corrupt"] == 5


def test_old_files_that_come_back_are_exact(tmp_path: Path, method: Method) -> None:
    """A replay brings what was stored under that key once: exact, which is all that a key promises."""
    directory = stored(tmp_path / "c", method)
    kept = tmp_path / "kept"
    shutil.copytree(directory, kept)
    os.truncate(only_segment(directory), 0)
    with Client(directory, LIMIT, protection=under(method)) as client:
        assert not any(client.hits(NAMES))
        client.store(NAMES[:2], LENGTHS[:2], [1] * 2)
    again = only_segment(kept)
    shutil.copy(again, directory / again.name)
    old = SegmentName.parse(again.name)
    assert old is not None
    moved = SegmentName(99, old.id)  # as if it were the newest
    data = bytearray(again.read_bytes())
    mark = segment.parse_segment_header(bytes(data[:PAGE_BYTES]), old).mark
    data[:PAGE_BYTES] = segment.pack_segment_header(moved, len(data), NAMESPACE, mark)
    (directory / str(moved)).write_bytes(data)
    for path in segments(directory):
        path.chmod(0o600)
    with Client(directory, LIMIT, protection=under(method)) as client:
        assert client.load(NAMES, LENGTHS).ok.all()
        client.check()


def test_a_key_that_leaked_and_was_dropped_forges_nothing(tmp_path: Path, method: Method) -> None:
    """Good work under a key that is not in the key file any more."""
    with Client(tmp_path / "c", LIMIT, protection=Protection(method, [LEAKED])) as client:
        buffers = aligned(LENGTHS)
        for buffer in buffers:
            buffer[:] = EVIL[: buffer.nbytes]
        assert client.outcome(client.begin("store", client.transfer(NAMES, buffers))).ok.all()
    with Client(tmp_path / "c", LIMIT, protection=under(method)) as client:
        assert not any(client.hits(NAMES)) and not client.load(NAMES, LENGTHS).ok.any()
    with Client(tmp_path / "c", LIMIT, protection=Protection(method, [OURS, LEAKED])) as client:
        assert all(client.hits(NAMES)), "until it is dropped, it is as good as the others"


def test_flipped_bits_all_over_a_file(tmp_path: Path, method: Method) -> None:
    path = only_segment(stored(tmp_path / "c", method))
    good, offsets = path.read_bytes(), Surgery(path).offsets
    for bit in range(0, 8 * len(good), 8209):
        damaged = bytearray(good)
        damaged[bit // 8] ^= 1 << bit % 8
        shutil.rmtree(tmp_path / "opened", ignore_errors=True)
        shutil.copytree(tmp_path / "c", tmp_path / "opened")
        (tmp_path / "opened" / path.name).write_bytes(damaged)
        with Client(tmp_path / "opened", LIMIT, readers=1, protection=under(method)) as client:
            ok = client.load(NAMES, LENGTHS).ok.tolist()
        hurt = [at <= bit // 8 < at + length for at, length in zip(offsets, LENGTHS, strict=True)]
        if bit < 8 * PAGE_BYTES:
            assert not any(ok), "the header page"
        else:
            assert ok == [not it for it in hurt], "a page of the index is there twice; a payload is not"


def test_the_layout_that_the_attacks_assume(tmp_path: Path, method: Method) -> None:
    forger = Forger(only_segment(stored(tmp_path / "c", method)))
    for n in range(5):
        batch, footer = (bytes(forger.data[at : at + 128]) for at in forger.envelopes(n))
        assert batch == footer and batch[8:40] == NAMES[n] and batch[:8] == b"STWC\1\0" + struct.pack("<H", method)
        assert batch[:112] == envelope.pack_fields(NAMES[n], NAMESPACE, 3, LENGTHS[n], method)
