"""Valid bytes in the wrong place: of another chunk, another store, another model, another tenant, another version.

Every part of them has a right checksum somewhere. What binds a payload to its place is that the checksum covers key,
namespace, mask and length, and that pages carry their segment's id and their offset.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from stowage.core.geometry import PAGE_BYTES
from stowage.core.key import Chain, group_keys, tenant_namespace
from stowage.storage.format import segment
from tests.disk_client import NAMESPACE, aligned, only_segment, segments
from tests.integrity.conftest import noticed, opened, repair_by_storing
from tests.segment_surgery import Surgery, reseal
from tests.tier_client import key

NAMES, LENGTHS = [key(n) for n in range(5)], [4096, 100, 8192, 4096, 8192]
KEY, SPACE, MASK, LENGTH, DIGEST = 8, 40, 72, 80, 112
OTHER_MODEL = bytes(range(32))


@pytest.fixture
def good(tmp_path: Path) -> Surgery:
    with opened(tmp_path / "c") as client:
        assert client.store(NAMES, LENGTHS, [1, 2, 3, 4, 5]).ok.all()
    return Surgery(only_segment(tmp_path / "c"))


def reopen(good: Surgery, expected: list[bool], *counters: str) -> None:
    """What is read is exact (the client asserts it) or absent, as expected; counted; and repaired by the next store."""
    with opened(good.path.parent) as client:
        assert client.load(NAMES, LENGTHS).ok.tolist() == expected
        stats = client.stats()
        assert all(stats[name] for name in counters), stats
        assert bool(noticed(stats)) == bool(counters)
        repair_by_storing(client, NAMES, LENGTHS)
    with opened(good.path.parent) as client:
        assert client.load(NAMES, LENGTHS).ok.all(), "repaired for good"


# two valid chunks of one segment, of one length


@pytest.mark.parametrize(("one", "other"), [(0, 3), (2, 4)])
def test_swapped_payloads(good: Surgery, one: int, other: int) -> None:
    good.swap(good.payload(one), good.payload(other))
    good.save()
    reopen(good, [n not in (one, other) for n in range(5)], "corrupt")


def test_swapped_envelopes(good: Surgery) -> None:
    """In batch and footer, with all checksums of pages made right: each envelope now leads to the other's bytes."""
    first, fourth = good.envelope(0), good.envelope(3)
    good.put(0, 0, fourth)
    good.put(3, 0, first)
    good.save()
    reopen(good, [False, True, True, False, True], "corrupt")


def test_swapped_payloads_and_envelopes(good: Surgery) -> None:
    """Each chunk whole, with its own envelope, where the other was: nothing is wrong with that."""
    first, fourth = good.envelope(0), good.envelope(3)
    good.put(0, 0, fourth)
    good.put(3, 0, first)
    good.swap(good.payload(0), good.payload(3))
    good.save()
    with opened(good.path.parent) as client:
        outcome = client.load(NAMES, LENGTHS)
        assert outcome.ok.all() and outcome.masks.tolist() == [1, 2, 3, 4, 5] and not noticed(client.stats())


@pytest.mark.parametrize("field", [KEY, MASK, LENGTH, DIGEST], ids=["key", "mask", "length", "checksum"])
def test_one_field_of_anothers_envelope(good: Surgery, field: int) -> None:
    """Between chunks of equal length, so that nothing but the checksum can tell."""
    width = {KEY: 32, MASK: 8, LENGTH: 8, DIGEST: 16}[field]
    good.put(0, field, good.envelope(3)[field : field + width])
    good.save()
    if field == LENGTH:
        reopen(good, [True] * 5)  # it is the same length
    elif field == KEY:
        reopen(good, [False, True, True, True, True])  # two records of one key: the newest wins, and is whole
    else:
        reopen(good, [False, True, True, True, True], "corrupt")


def test_a_chunk_that_claims_the_key_of_an_absent_one(good: Surgery) -> None:
    """Whole, verified under its own key, and offered under another: the key is in the checksum."""
    wanted = key("never stored")
    good.put(2, KEY, wanted)
    good.save()
    with opened(good.path.parent) as client:
        assert client.hits([wanted]) == [True], "the index cannot know"
        assert not client.load([wanted], [8192]).ok.any() and client.stats()["corrupt"] == 1
        assert client.store([wanted], [8192]).ok.all() and client.load([wanted], [8192]).ok.all()


@pytest.mark.parametrize("mask", [1, 8, (1 << 64) - 1])
def test_blocks_that_were_not_stored_are_not_claimed(good: Surgery, mask: int) -> None:
    """Blocks that a mask leaves out hold whatever lay there."""
    good.put(1, MASK, struct.pack("<Q", mask))
    good.save()
    reopen(good, [True, False, True, True, True], "corrupt")


# another store


def other_store(directory: Path, namespace: bytes = NAMESPACE) -> Surgery:
    """Of the same shape, with another content under every key."""
    with opened(directory, namespace=namespace) as client:
        buffers = aligned(LENGTHS)
        for buffer in buffers:
            buffer[:] = b"?" * buffer.nbytes
        transfer = client.transfer(NAMES, buffers, [1, 2, 3, 4, 5])
        assert client.outcome(client.begin("store", transfer)).ok.all()
    return Surgery(only_segment(directory))


def test_a_segment_of_another_store_under_our_name(good: Surgery, tmp_path: Path) -> None:
    """Whole and sealed; the id in its header is another one than in the name."""
    good.path.write_bytes(other_store(tmp_path / "other").data)
    reopen(good, [False] * 5, "damaged_segments")


def test_a_segment_of_another_store_behind_our_header(good: Surgery, tmp_path: Path) -> None:
    """Its batches and its trailer carry its own id."""
    other = other_store(tmp_path / "other")
    good.path.write_bytes(good.data[:PAGE_BYTES] + other.data[PAGE_BYTES:])
    reopen(good, [False] * 5, "removed_leftovers")


@pytest.mark.parametrize("part", ["payloads", "batch", "footer and trailer"])
def test_parts_of_another_store(good: Surgery, tmp_path: Path, part: str) -> None:
    other = other_store(tmp_path / "other")
    first, end = {
        "payloads": (2 * PAGE_BYTES, good.footer),
        "batch": (PAGE_BYTES, 2 * PAGE_BYTES),
        "footer and trailer": (good.footer, len(good.data)),
    }[part]
    good.data[first:end] = other.data[first:end]
    good.save(seal=False)
    if part == "payloads":
        reopen(good, [False] * 5, "corrupt")
    elif part == "batch":
        reopen(good, [True] * 5)  # the footer says it as well
    else:
        reopen(good, [True] * 5, "repaired_segments")


def test_an_older_segment_in_the_place_of_a_newer_one(tmp_path: Path) -> None:
    """A lost write brings back what lay there before: pages of another segment's life do not verify in this one."""
    for n in range(2):
        with opened(tmp_path / "c") as client:
            client.store(NAMES[n : n + 1], LENGTHS[n : n + 1])
    old, new = map(Surgery, segments(tmp_path / "c"))
    new.path.write_bytes(new.data[:PAGE_BYTES] + old.data[PAGE_BYTES:])
    with opened(tmp_path / "c") as client:
        assert client.load(NAMES[:2], LENGTHS[:2]).ok.tolist() == [True, False]


# another model, another tenant


def test_a_segment_of_another_model(good: Surgery, tmp_path: Path) -> None:
    """Beside ours, under its own name: it is not ours to read, and not damaged. Both are served from one directory."""
    other = other_store(tmp_path / "other", OTHER_MODEL)
    (good.path.parent / other.path.name).write_bytes(other.data)
    (good.path.parent / other.path.name).chmod(0o600)
    reopen(good, [True] * 5)
    good.path.unlink()
    for path in segments(good.path.parent):
        if path.name != other.path.name:
            path.unlink()
    with opened(good.path.parent) as client:
        assert not any(client.hits(NAMES)) and not client.load(NAMES, LENGTHS).ok.any()


def claim_the_header(other: Surgery) -> None:
    other.data[40:72] = NAMESPACE


def claim_the_envelopes_too(other: Surgery) -> None:
    claim_the_header(other)
    for n in range(5):
        other.put(n, SPACE, NAMESPACE)


@pytest.mark.parametrize("claim", [claim_the_header, claim_the_envelopes_too])
def test_a_segment_of_another_model_that_says_it_is_ours(tmp_path: Path, claim: Callable[[Surgery], None]) -> None:
    """The same keys, so that only the namespace tells them apart. All checksums of pages are right."""
    other = other_store(tmp_path / "other", OTHER_MODEL)
    claim(other)
    other.save()
    with opened(tmp_path / "other") as client:
        assert all(client.hits(NAMES)) == (claim is claim_the_envelopes_too)
        assert not client.load(NAMES, LENGTHS).ok.any()
        assert client.stats()["corrupt"] == 5, "not indexed at all, or found out by the payload's checksum"
        repair_by_storing(client, NAMES, LENGTHS)


def test_a_segment_of_another_tenant(tmp_path: Path) -> None:
    """Tenants of one engine share its segments. One prompt has two keys; a chunk moved to the other does not verify."""
    keys = {
        salt: group_keys(Chain(tenant_namespace(NAMESPACE, salt), 4).extend(np.arange(20)), 0) for salt in ("a", "b")
    }
    with opened(tmp_path / "c") as client:
        assert client.store(keys["a"], LENGTHS).ok.all()
        assert not any(client.hits(keys["b"])) and not client.load(keys["b"], LENGTHS).ok.any()
    stolen = Surgery(only_segment(tmp_path / "c"))
    for n, wanted in enumerate(keys["b"]):
        stolen.put(n, KEY, wanted)
    stolen.save()
    with opened(tmp_path / "c") as client:
        assert all(client.hits(keys["b"])) and not client.load(keys["b"], LENGTHS).ok.any()
        assert client.stats()["corrupt"] == 5
        repair_by_storing(client, keys["b"], LENGTHS)


# another version


@pytest.mark.parametrize("version", [0, 2, 255, 512, 65535])
@pytest.mark.parametrize("where", ["header", "batch", "footer's trailer", "envelopes", "flags"])
def test_another_format_version(good: Surgery, where: str, version: int) -> None:
    """Right checksums, a version or a flag that this one does not know: unreadable, never guessed at."""
    raw = struct.pack("<H", version)
    pages = {"header": 0, "batch": PAGE_BYTES, "footer's trailer": len(good.data) - PAGE_BYTES}
    if where in pages:
        good.data[pages[where] + 8 : pages[where] + 10] = raw
        reseal(good.data, pages[where])
        good.save(seal=False)
    elif version or where == "envelopes":
        for n in range(5):
            good.put(n, 4 if where == "envelopes" else 6, raw)
        good.save()
    expected, counters = {
        "header": ([False] * 5, ["damaged_segments"]),
        "batch": ([True] * 5, []),
        "footer's trailer": ([True] * 5, ["repaired_segments"]),
        "envelopes": ([False] * 5, ["corrupt"]),
        "flags": ([not version] * 5, ["corrupt"] if version else []),
    }[where]
    reopen(good, expected, *counters)


def test_the_whole_segment_of_a_later_version(good: Surgery, monkeypatch: pytest.MonkeyPatch) -> None:
    """As a later Stowage would have written it: left alone, and not read."""
    monkeypatch.setattr(segment, "VERSION", 2)
    with opened(good.path.parent / "later") as client:
        assert client.store(NAMES, LENGTHS).ok.all()
    monkeypatch.undo()
    later = only_segment(good.path.parent / "later")
    content = later.read_bytes()
    with opened(later.parent) as client:
        assert not any(client.hits(NAMES)) and client.stats()["damaged_segments"] == 1
        repair_by_storing(client, NAMES, LENGTHS)
    assert later.read_bytes() == content
