"""The disk tier with keyed hashes and encryption: what it keeps under which key, what it leaves alone, rotation."""

from __future__ import annotations

import errno
import logging
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from stowage.core.geometry import PAGE_BYTES
from stowage.storage import key_file
from stowage.storage.disk.system import System
from stowage.storage.format import protection, segment
from stowage.storage.format.protection import Mark, Method, Protection, SecretKey
from stowage.storage.format.segment import SegmentName
from stowage.testing.faults import FaultyFileSystem
from tests.disk_client import Client, aligned, only_segment, segments
from tests.tier_client import keys_of, payload

MIB = 1 << 20
OLD, NEW = SecretKey(b"\1" * 32), SecretKey(b"\2" * 32)
KEYED = [Method.BLAKE3, Method.AES_256_GCM]


def under(method: Method, *ring: SecretKey) -> Protection:
    return Protection(method, [] if method is Method.CHECKSUM else ring or [OLD])


def mark_of(path: Path) -> Mark:
    name = SegmentName.parse(path.name)
    assert name is not None
    return segment.parse_segment_header(path.read_bytes()[:PAGE_BYTES], name).mark


@pytest.mark.parametrize("method", KEYED)
@pytest.mark.parametrize("direct", [True, False])
@pytest.mark.parametrize("length", [1, 4096, 4097, 5 * MIB + 123])
def test_what_was_stored_is_loaded_also_after_a_restart(
    tmp_path: Path, length: int, direct: bool, method: Method
) -> None:
    names = keys_of(*range(3 if length > MIB else 70))
    masks = [n + 1 for n in range(len(names))]
    options: dict[str, Any] = {"direct": direct, "protection": under(method)}
    with Client(tmp_path / "c", **options) as client:
        assert client.store(names, [length] * len(names), masks).ok.all()
        assert client.load(names, [length] * len(names)).ok.all()
        client.check()
    with Client(tmp_path / "c", **options) as client:
        outcome = client.load(names[::-1], [length] * len(names))
        assert outcome.ok.all() and outcome.masks.tolist() == masks[::-1]
        assert client.stats()["protection"] == method.label and client.stats()["corrupt"] == 0
        client.check()


@pytest.mark.parametrize("method", Method)
def test_buffers_need_not_be_aligned_and_are_only_read_by_a_store(tmp_path: Path, method: Method) -> None:
    lengths = [1, 4096, 10_000, 5 * MIB + 1]
    names = keys_of(*lengths)
    with Client(tmp_path / "c", protection=under(method)) as client:
        whole = memoryview(bytearray(sum(lengths) + 1))
        starts = np.cumsum([1, *lengths]).tolist()
        buffers = [whole[start : start + length] for start, length in zip(starts, lengths, strict=False)]
        for name, buffer in zip(names, buffers, strict=True):
            buffer[:] = payload(name, buffer.nbytes)
        before = bytes(whole)
        assert client.outcome(client.begin("store", client.transfer(names, buffers))).ok.all()
        assert bytes(whole) == before, "others read the arena's slots meanwhile"
        whole[:] = bytes(len(whole))
        assert client.outcome(client.begin("load", client.transfer(names, buffers))).ok.all()
        assert bytes(whole) == before, "all bytes are back, and none was written beside the buffers"
        assert client.load(names, lengths).ok.all(), "stored from here, loaded to there"


@pytest.mark.parametrize("method", Method)
def test_plaintext_lies_on_the_disk_only_where_nothing_encrypts(tmp_path: Path, method: Method) -> None:
    """Chunks that fill pages, leave tails, are longer than the staging memory, and were rewritten from a victim."""
    pattern = b"the known text of a secret prompt"
    lengths = [100, 4096, 4097, 70_000, 5 * MIB + 123]
    names = keys_of(*lengths)
    buffers = aligned(lengths)
    for buffer in buffers:
        buffer[:] = (pattern * (buffer.nbytes // len(pattern) + 1))[: buffer.nbytes]
    before = [bytes(buffer) for buffer in buffers]
    with Client(tmp_path / "c", protection=under(method)) as client:
        assert client.outcome(client.begin("store", client.transfer(names, buffers))).ok.all()
        assert [bytes(buffer) for buffer in buffers] == before
    files = [path.read_bytes() for path in (tmp_path / "c").iterdir()]
    found = any(pattern[at : at + 16] in data for data in files for at in range(len(pattern) - 16))
    assert found == (method is not Method.AES_256_GCM)
    if method is Method.AES_256_GCM:
        at_rest = next(data for data in files if data)[2 * PAGE_BYTES + 3 * PAGE_BYTES :][: 5 * MIB]
        counts = np.bincount(np.frombuffer(at_rest, np.uint8), minlength=256)
        assert counts.max() < 2 * counts.min(), "looks random"
    secrets = [OLD.reveal().encode(), bytes.fromhex(OLD.reveal())]
    assert not any(secret in data for data in files for secret in secrets)


@pytest.mark.parametrize("method", Method)
def test_a_segment_is_marked_with_its_method_and_the_key_for_writing(tmp_path: Path, method: Method) -> None:
    for _ in range(2):
        with Client(tmp_path / "c", protection=under(method, NEW, OLD)) as client:
            client.store(keys_of(1), [4096])
    marks = [mark_of(path) for path in segments(tmp_path / "c")]
    assert {mark.method for mark in marks} == {method}
    if method is Method.CHECKSUM:
        assert set(marks) == {protection.NO_MARK}
    else:
        assert {mark.key_id for mark in marks} == {NEW.id} and len({mark.salt for mark in marks}) == 2


@pytest.mark.parametrize("theirs", Method)
@pytest.mark.parametrize("ours", Method)
def test_only_segments_of_the_own_method_are_read(tmp_path: Path, ours: Method, theirs: Method) -> None:
    """Neither way: an encrypted cache is no use without a key, and an open one is not to be trusted with one."""
    with Client(tmp_path / "c", protection=under(theirs)) as client:
        client.store(keys_of(1, 2), [4096] * 2)
    with Client(tmp_path / "c", protection=under(ours)) as client:
        same = ours is theirs
        assert client.hits(keys_of(1, 2)) == [same] * 2
        assert client.load(keys_of(1, 2), [4096] * 2).ok.tolist() == [same] * 2
        assert client.stats()["unreadable_segments"] == (not same) and client.stats()["damaged_segments"] == 0
        assert client.store(keys_of(1, 2), [4096] * 2).ok.all() and client.load(keys_of(1, 2), [4096] * 2).ok.all()
        client.check()
    with Client(tmp_path / "c", protection=under(theirs)) as client:
        assert client.load(keys_of(1, 2), [4096] * 2).ok.all(), "what others wrote was left in place"


def test_tiers_with_different_protections_share_a_directory(tmp_path: Path) -> None:
    options: dict[str, Any] = {"refresh_s": 0.02}
    clients = [Client(tmp_path / "c", protection=under(method), **options) for method in Method for _ in range(2)]
    try:
        for at, client in enumerate(clients):
            assert client.store(keys_of(("by", at)), [10_000]).ok.all()
        for at, client in enumerate(clients):
            peer = at ^ 1
            client.wait_for(keys_of(("by", peer)))
            assert client.load(keys_of(("by", at), ("by", peer)), [10_000] * 2).ok.all()
            others = [("by", other) for other in range(len(clients)) if other not in (at, peer)]
            assert not any(client.hits(keys_of(*others)))
            client.check()
    finally:
        for client in clients:
            client.close()


@pytest.mark.parametrize("method", KEYED)
def test_rotation(tmp_path: Path, method: Method) -> None:
    """The whole life of a key, with the key file that the commands change."""
    file, directory = tmp_path / "keys", tmp_path / "c"
    first = key_file.make(file)

    def opened() -> Client:
        return Client(directory, protection=key_file.protection(method.label, file))

    with opened() as client:
        client.store(keys_of("old"), [9000])
        second = key_file.rotate(file)
        client.store(keys_of("old too"), [9000])  # a running process goes on with the keys it has
    with opened() as client:
        assert client.load(keys_of("old", "old too"), [9000] * 2).ok.all()
        client.store(keys_of("new"), [9000])
    assert [mark_of(path).key_id for path in segments(directory)] == [first.id, second.id]
    key_file.drop(file, first.id.hex())
    with opened() as client:
        assert client.hits(keys_of("old", "old too", "new")) == [False, False, True]
        outcome = client.load(keys_of("old", "new"), [9000] * 2)
        assert outcome.ok.tolist() == [False, True] and client.stats()["unreadable_segments"] == 1
        assert client.store(keys_of("old"), [9000]).ok.all(), "the next store brings it back"
        client.check()
    with opened() as client:
        assert client.load(keys_of("old", "new"), [9000] * 2).ok.all()
    with Client(directory, protection=under(method, first)) as client:
        assert client.hits(keys_of("old", "new")) == [True, False], "the first key opens what it wrote, and no more"


@pytest.mark.parametrize("method", KEYED)
def test_unreadable_segments_count_and_go_in_their_turn(tmp_path: Path, method: Method) -> None:
    limit = 4 * MIB
    with Client(tmp_path / "c", limit, protection=under(method, OLD)) as client:
        for n in range(20):
            client.store(keys_of(("old", n)), [100_000])
    before = {path.name for path in segments(tmp_path / "c")}
    with Client(tmp_path / "c", limit, protection=under(method, NEW)) as client:
        assert client.stats()["bytes_used"] > 20 * 100_000
        for n in range(80):
            assert client.store(keys_of(("new", n)), [100_000]).ok.all()
            client.check()
        assert client.load(keys_of(("new", 79)), [100_000]).ok.all()
    assert not before & {path.name for path in segments(tmp_path / "c")}


@pytest.mark.parametrize("method", KEYED)
def test_a_hot_chunk_moves_to_the_new_key(tmp_path: Path, method: Method) -> None:
    limit = 4 * MIB
    with Client(tmp_path / "c", limit, protection=under(method, OLD)) as client:
        client.store(keys_of("hot"), [50_000])
    with Client(tmp_path / "c", limit, protection=under(method, NEW, OLD)) as client:
        for n in range(100):
            assert client.load(keys_of("hot"), [50_000]).ok.all()
            client.store(keys_of(n), [100_000])
        assert client.stats()["rewritten"] > 0
    with Client(tmp_path / "c", limit, protection=under(method, NEW)) as client:
        assert client.load(keys_of("hot"), [50_000]).ok.all()
        assert client.stats()["unreadable_segments"] == 0


@pytest.mark.parametrize("method", KEYED)
def test_a_torn_segment_is_repaired_without_its_key(tmp_path: Path, method: Method) -> None:
    with Client(tmp_path / "c", protection=under(method)) as client:
        client.store(keys_of(1, 2), [4096] * 2)
    with only_segment(tmp_path / "c").open("ab") as file:
        file.write(b"\0")  # its trailer is not its last page any more
    with Client(tmp_path / "c") as client:
        assert client.stats()["repaired_segments"] == 1
    with Client(tmp_path / "c", protection=under(method)) as client:
        assert client.load(keys_of(1, 2), [4096] * 2).ok.all() and client.stats()["repaired_segments"] == 0


@pytest.mark.parametrize("method", KEYED)
def test_a_bad_sector_or_a_short_file_costs_what_is_on_it(tmp_path: Path, method: Method) -> None:
    files = FaultyFileSystem()
    names = keys_of(*range(10))
    with Client(tmp_path / "c", system=System(files=files), readers=1, protection=under(method)) as client:
        client.store(names, [8192] * 10)
        files.fail("preadv", errno.EIO, times=2)
        assert client.load(names, [8192] * 10).ok.tolist() == [False] + [True] * 9
        files.rot(3 * 8 * 8192, times=1)
        assert client.load(names[1:], [8192] * 9).ok.tolist() == [True] * 3 + [False] + [True] * 5
        assert client.stats()["corrupt"] == 1 and client.stats()["read_errors"] == 1
        client.check()


def test_no_nonce_is_used_for_two_payloads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Over every way in which writing can go wrong: full disks, errors, short and refused writes, files that vanish.

    The pair of a segment's key and an offset is what must not come back with another payload.
    """
    seen: dict[tuple[bytes, int], bytes] = {}
    encrypt = protection.Cipher.encrypt

    def watched(self: protection.Cipher, fields: bytes, offset: int, length: int) -> protection.Encryption:
        place = (self._algorithm.key, offset)
        assert place not in seen, "a nonce comes back"
        seen[place] = fields
        return encrypt(self, fields, offset, length)

    monkeypatch.setattr(protection.Cipher, "encrypt", watched)
    monkeypatch.setattr(protection.Cipher, "_next", property(lambda _: 0, lambda *_: None))  # without the last guard
    chance = random.Random(7)
    files, now = FaultyFileSystem(), [0.0]
    system = System(files=files, clock=lambda: now[0])
    for turn in range(6):
        with Client(tmp_path / "c", 6 * MIB, system=system, protection=under(Method.AES_256_GCM)) as client:
            for step in range(25):
                now[0] += 31.0
                after, times = chance.randrange(6), chance.randrange(1, 3)
                match chance.randrange(7):
                    case 0:
                        files.fail("pwritev", chance.choice([errno.EIO, errno.ENOSPC]), after=after, times=times)
                    case 1:
                        files.shorten("pwritev", chance.choice([0, 512, 4096, 100_000]), after=after, times=times)
                    case 2:
                        files.fail("pwritev", errno.EINVAL, after=after, times=1)  # direct I/O is given up
                    case 3:
                        files.fail(chance.choice(["allocate", "truncate"]), errno.ENOSPC, times=times)
                    case 4:
                        for path in segments(tmp_path / "c")[-1:]:
                            path.unlink()
                count = chance.randrange(1, 40)
                names = keys_of(*((turn, step, n) for n in range(count)))
                client.store(names, [chance.choice([100, 4096, 9000, 60_000]) for _ in names])
                files.heal()
            now[0] += 31.0
            assert client.store(keys_of("last"), [4096]).ok.all() and client.stats()["faults"] == 0
    assert len(seen) > 1000


def test_nothing_that_is_shown_holds_a_secret(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    files = FaultyFileSystem()
    ring = [NEW, OLD]
    shown = []
    for method in KEYED:
        tier_protection = under(method, *ring)
        with Client(tmp_path / "c", system=System(files=files), protection=tier_protection) as client:
            client.store(keys_of(1), [4096])
            files.fail("pwritev", errno.EIO, times=1)
            files.fail("preadv", errno.EIO, times=9)
            shown += [client.store(keys_of(2), [4096]).error, client.load(keys_of(1), [4096]).error]
            shown += [repr(client.stats()), repr(client.tier), repr(vars(client.tier))]
            shown += [repr(known) for known in client.tier._catalog._by_name.values()]
            files.heal()
    shown.append(caplog.text)
    for key in ring:
        assert not any(key.reveal() in text for text in shown)
        assert not any(repr(bytes.fromhex(key.reveal()))[2:-1] in text for text in shown)
