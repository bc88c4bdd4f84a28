"""What is done for many payloads at a time: the same in C, in Python, and one by one; and what the kernel refuses."""

from __future__ import annotations

import math
import mmap
from itertools import accumulate, pairwise

import numpy as np
import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from stowage.storage.format import batch, envelope, segment
from stowage.storage.format.batch import (
    FIELD_BYTES,
    Fields,
    all_begin_on,
    all_begin_on_one_by_one,
    digests_of,
    digests_one_by_one,
    is_wanted,
)
from stowage.storage.format.protection import NO_MARK, Cipher, Mark, Method, Protection, SecretKey

built = pytest.mark.skipif(not batch._BUILT, reason="no C compiler when it was installed, or another build of xxhash")
LENGTHS = st.lists(st.integers(1, 1200) | st.sampled_from([16, 128, 129, 240, 241, 40_000]), min_size=1, max_size=6)


def drawn(lengths: list[int], seed: int) -> tuple[Fields, list[memoryview]]:
    """Random fields and payloads, which lie one after the other, so anywhere."""
    chance = np.random.default_rng(seed)
    fields = np.frombuffer(chance.bytes(len(lengths) * FIELD_BYTES), np.uint8).reshape(-1, FIELD_BYTES)
    memory = memoryview(chance.bytes(sum(lengths)))
    return fields, [memory[begin:end] for begin, end in pairwise(accumulate(lengths, initial=0))]


@given(lengths=LENGTHS, seed=st.integers(0, 1 << 30), writable=st.booleans())
def test_digests_are_the_same_both_ways(lengths: list[int], seed: int, writable: bool) -> None:
    fields, payloads = drawn(lengths, seed)
    if writable:
        payloads = [memoryview(bytearray(payload)) for payload in payloads]
    expected = [xxhash.xxh3_128_digest(bytes(row) + payload) for row, payload in zip(fields, payloads, strict=True)]
    for found in (digests_of(fields, payloads), digests_one_by_one(fields, payloads)):
        assert found.shape == (len(lengths), 2) and found.tobytes() == b"".join(expected)


@given(lengths=LENGTHS, seed=st.integers(0, 1 << 30), offset=st.integers(0, 1 << 40), method=st.sampled_from(Method))
def test_a_guard_does_with_many_what_it_does_with_each(
    lengths: list[int], seed: int, offset: int, method: Method
) -> None:
    keys = [SecretKey(bytes(32))] if method is not Method.CHECKSUM else []
    mark = Mark(method, keys[0].id, bytes(16)) if keys else NO_MARK
    guard = Protection(method, keys).guard(bytes(8), mark)
    if guard is None or isinstance(guard, Cipher):
        return
    fields, payloads = drawn(lengths, seed)
    offsets = [offset + 4096 * at for at in range(len(lengths))]
    digests = guard.digest_all(fields, offsets, payloads)
    assert digests.tobytes() == b"".join(map(guard.digest, map(bytes, fields), offsets, payloads))
    assert guard.verify_all(fields, offsets, payloads, digests).tolist() == [True] * len(lengths)
    wrong = seed % len(lengths)
    damaged = payloads.copy()
    damaged[wrong] = memoryview(bytes(payloads[wrong][:-1]) + bytes([payloads[wrong][-1] ^ 1]))
    expected = [at != wrong for at in range(len(lengths))]
    assert guard.verify_all(fields, offsets, damaged, digests).tolist() == expected
    for column in (0, 1):  # either half of a digest counts
        others = digests.copy()
        others[wrong, column] ^= np.uint64(1)
        assert guard.verify_all(fields, offsets, payloads, others).tolist() == expected


@given(lengths=LENGTHS, seed=st.integers(0, 1 << 30), method=st.integers(0, 2))
def test_fields_and_entries_of_many_are_those_of_each(lengths: list[int], seed: int, method: int) -> None:
    chance = np.random.default_rng(seed)
    keys, namespace = [chance.bytes(32) for _ in lengths], chance.bytes(32)
    masks = chance.integers(1, 1 << 63, len(lengths)).tolist()
    fields = envelope.pack_fields_of(keys, namespace, masks, lengths, method)
    each = zip(keys, masks, lengths, strict=True)
    assert [*map(bytes, fields)] == [envelope.pack_fields(key, namespace, *rest, method) for key, *rest in each]
    headers = np.hstack((fields, np.frombuffer(chance.bytes(16 * len(lengths)), np.uint8).reshape(-1, 16)))
    page = segment.pack_batch_page(bytes(8), 8192, headers, lengths)
    assert page == segment.pack_batch_page(bytes(8), 8192, [*map(bytes, headers)], lengths)
    parsed, _ = segment.parse_batch_page(page, bytes(8), 8192, 1 << 40)
    assert segment.batch_entries(headers, 8192, lengths).tobytes() == parsed.tobytes()


@pytest.mark.parametrize(
    ("key", "namespace", "mask", "length"),
    [
        (bytes(31), bytes(32), 1, 1),
        (bytes(32), bytes(33), 1, 1),
        (bytes(32), bytes(32), 0, 1),
        (bytes(32),) * 2 + (1, 0),
    ],
)
def test_what_could_not_be_read_back_is_not_packed(key: bytes, namespace: bytes, mask: int, length: int) -> None:
    with pytest.raises(AssertionError):
        envelope.pack_fields_of([bytes(32), key], namespace, [1, mask], [1, length])


@given(places=st.lists(st.sampled_from([0, 64, 4096, 4160, 8192, 12287]), max_size=4), read_only=st.booleans())
def test_who_begins_where(places: list[int], read_only: bool) -> None:
    memory = memoryview(mmap.mmap(-1, 16384))
    memory = memory.toreadonly() if read_only else memory
    payloads = [memory[place : place + 1] for place in places]
    for step in (1, 64, 4096):
        expected = all(place % step == 0 for place in places)
        assert all_begin_on(payloads, step) is expected is all_begin_on_one_by_one(payloads, step)


def test_the_kernel_is_chosen_unless_it_is_not_wanted(monkeypatch: pytest.MonkeyPatch) -> None:
    fields, payloads = drawn([100], 0)
    asked: list[str] = []
    monkeypatch.setattr(batch, "_in_c", lambda *_: asked.append("C"))
    monkeypatch.setattr(batch, "digests_one_by_one", lambda *_: asked.append("Python"))
    quick = "C" if batch._BUILT else "Python"
    for value, expected in (("", quick), ("0", quick), ("1", "Python")):
        monkeypatch.setenv("STOWAGE_PURE_PYTHON", value)
        assert is_wanted() is (expected == "C")
        digests_of(fields, payloads)
        assert asked.pop() == expected
    monkeypatch.delenv("STOWAGE_PURE_PYTHON")
    assert is_wanted() is batch._BUILT
    monkeypatch.setattr(batch, "_BUILT", False)
    assert not is_wanted()


@built
def test_a_kernel_that_cannot_hash_as_the_package_does_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    assert batch._connected()
    try:
        with monkeypatch.context() as patch:
            patch.setattr(batch, "_native", None)
            assert not batch._connected(), "it was not built"
        with monkeypatch.context() as patch:
            patch.setattr(xxhash, "_xxhash", None)
            assert not batch._connected(), "the package has no library"
        with monkeypatch.context() as patch:
            patch.setattr(xxhash, "_xxhash", math)
            patch.setattr(math, "__file__", batch._native.__file__, raising=False)
            assert not batch._connected(), "a library without those functions"
        with pytest.raises(ValueError, match="no hash"):
            batch._in_c(*drawn([1], 0))
        with monkeypatch.context() as patch:
            patch.setattr(batch, "digests_one_by_one", lambda fields, _: np.zeros((len(fields), 2), np.uint64))
            assert not batch._connected(), "it hashes in another way"
    finally:
        assert batch._connected()


@built
def test_what_the_kernel_refuses_changes_nothing() -> None:
    fields, payloads = drawn([10, 20], 1)
    found = np.full((2, 2), 7, np.uint64)
    kernel = batch._native
    for bad in ((fields[:1], payloads, found), (fields, payloads[:1], found), (fields, payloads, found[:1])):
        with pytest.raises(ValueError, match="another number"):
            kernel.digests(*bad)
    for wrong in ((fields, tuple(payloads), found), (fields, [payloads[0], "text"], found), (fields, payloads)):
        with pytest.raises(TypeError):
            kernel.digests(*wrong)  # type: ignore[arg-type]
    found.flags.writeable = False
    with pytest.raises((TypeError, ValueError, BufferError)):
        kernel.digests(fields, payloads, found)
    assert (found == 7).all()
    with pytest.raises(ValueError, match="positive"):
        kernel.all_begin_on(payloads, 0)
    with pytest.raises(TypeError):
        kernel.all_begin_on(["text"], 1)  # type: ignore[list-item]
    with pytest.raises(TypeError):
        kernel.all_begin_on(tuple(payloads), 1)  # type: ignore[arg-type]
    with pytest.raises(TypeError):
        kernel.connect(b"a path")  # type: ignore[arg-type]
    assert not kernel.connect("/nowhere/at/all.so")
    kernel.digests(fields[:0], [], np.empty((0, 2), np.uint64))
    assert digests_of(fields, payloads).tobytes() == digests_one_by_one(fields, payloads).tobytes()
