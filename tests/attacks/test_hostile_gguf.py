"""GGUF files whose headers lie, are cut, or are anything at all: refused, and nothing large is made first."""

from __future__ import annotations

import itertools
import struct
import tracemalloc
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from stowage.errors import CheckpointError
from stowage.weights import gguf

STRING, ARRAY = 8, 9
MEMORY_MOST = 1 << 20


def text(value: bytes) -> bytes:
    return struct.pack("<Q", len(value)) + value


def field(name: bytes, kind: int, value: bytes) -> bytes:
    return text(name) + struct.pack("<I", kind) + value


def tensor(name: bytes, shape: tuple[int, ...], kind: int, offset: int) -> bytes:
    return text(name) + struct.pack(f"<I{len(shape)}QIQ", len(shape), *shape, kind, offset)


FIELDS = [
    field(b"general.architecture", STRING, text(b"llama")),
    field(b"llama.block_count", 4, struct.pack("<I", 2)),
    field(b"llama.norm", 6, struct.pack("<f", 1e-5)),
    field(b"tokens", ARRAY, struct.pack("<IQ", STRING, 3) + text(b"a") + text(b"bc") + text("é".encode())),
    field(b"numbers", ARRAY, struct.pack("<IQ4i", 5, 4, 1, -2, 3, 4)),
]
TENSORS = [tensor(b"a", (32, 2), 2, 0), tensor(b"b", (8,), 0, 64)]


def made(fields: list[bytes] = FIELDS, tensors: list[bytes] = TENSORS, version: int = 3, data: int = 96) -> bytes:
    head = b"GGUF" + struct.pack("<IQQ", version, len(tensors), len(fields)) + b"".join(fields + tensors)
    return head + bytes(-len(head) % 32) + bytes(data)


GOOD = made()


@pytest.fixture
def read(tmp_path: Path) -> Callable[[bytes], gguf.GgufFile]:
    path = tmp_path / "model.gguf"

    def reader(data: bytes) -> gguf.GgufFile:
        path.write_bytes(data)
        return gguf.read(path)

    return reader


def test_the_good_file_is_read_whole(read: Callable[[bytes], gguf.GgufFile]) -> None:
    found = read(GOOD)
    assert found.fields["tokens"] == ["a", "bc", "é"]
    assert found.fields["numbers"] == [1, -2, 3, 4]
    assert found.fields["llama.norm"] == 1e-5, "the number that was meant, not the float32"
    assert [(t.name, t.type.name, t.shape, t.nbytes) for t in found.tensors.values()] == [
        ("a", "Q4_0", (2, 32), 36),
        ("b", "F32", (8,), 32),
    ]
    assert found.tensors["b"].offset - found.tensors["a"].offset == 64


def test_a_file_that_is_cut_anywhere_is_refused(read: Callable[[bytes], gguf.GgufFile]) -> None:
    for length in range(len(GOOD)):
        with pytest.raises(CheckpointError, match=r"no whole GGUF file"):
            read(GOOD[:length])


HUGE = (1 << 64) - 1
LIES = {
    "magic": b"GGML" + GOOD[4:],
    "an old version": made(version=1),
    "big-endian": b"GGUF" + struct.pack(">I", 3) + GOOD[8:],
    "tensors": b"GGUF" + struct.pack("<IQQ", 3, HUGE, 0) + GOOD[24:],
    "fields": b"GGUF" + struct.pack("<IQQ", 3, 0, 1 << 40) + GOOD[24:],
    "a key's length": made([struct.pack("<Q", HUGE) + b"abc"]),
    "a text's length": made([field(b"x", STRING, struct.pack("<Q", 1 << 50) + b"abc")]),
    "a list's length": made([field(b"x", ARRAY, struct.pack("<IQ", 4, HUGE // 4 + 1))]),
    "a list of texts": made([field(b"x", ARRAY, struct.pack("<IQ", STRING, 1 << 61))]),
    "many empty texts": made([field(b"x", ARRAY, struct.pack("<IQ", STRING, 1 << 22))], data=1 << 20),
    "lists in a list": made([field(b"x", ARRAY, struct.pack("<IQ", ARRAY, 1 << 20))]),
    "a type of value": made([field(b"x", 77, b"")]),
    "no UTF-8": made([field(b"x", STRING, text(b"\xff\xfe"))]),
    "a key twice": made([*FIELDS, FIELDS[0]]),
    "an alignment of 0": made([field(b"general.alignment", 4, struct.pack("<I", 0))]),
    "an alignment of 3": made([field(b"general.alignment", 4, struct.pack("<I", 3))]),
    "an alignment of 2^31": made([field(b"general.alignment", 4, struct.pack("<I", 1 << 31))]),
    "an alignment that is a text": made([field(b"general.alignment", STRING, text(b"32"))]),
    "a type of tensor": made(tensors=[tensor(b"a", (32,), 4, 0)]),
    "no dimensions": made(tensors=[tensor(b"a", (), 0, 0)]),
    "five dimensions": made(tensors=[tensor(b"a", (1, 1, 1, 1, 1), 0, 0)]),
    "a dimension of 0": made(tensors=[tensor(b"a", (32, 0), 0, 0)]),
    "sizes that overflow": made(tensors=[tensor(b"a", (1 << 32, 1 << 32), 0, 0)]),
    "sizes that overflow to little": made(tensors=[tensor(b"a", (1 << 63, 1 << 63, 4), 2, 0)]),
    "part of a block": made(tensors=[tensor(b"a", (31, 2), 2, 0)]),
    "an offset that is not aligned": made(tensors=[tensor(b"a", (8,), 0, 4)]),
    "an offset behind the end": made(tensors=[tensor(b"a", (8,), 0, 1 << 40)]),
    "an offset that overflows": made(tensors=[tensor(b"a", (8,), 0, HUGE - 31)]),
    "a tensor that is too long": made(tensors=[tensor(b"a", (25,), 0, 0)]),
    "a tensor twice": made(tensors=[TENSORS[0], TENSORS[0]]),
    "tensors that share bytes": made(tensors=[TENSORS[0], tensor(b"b", (8,), 0, 32)]),
}


@pytest.mark.parametrize("data", LIES.values(), ids=list(LIES))
def test_lies_are_refused_before_memory_is_taken(data: bytes, read: Callable[[bytes], gguf.GgufFile]) -> None:
    tracemalloc.start()
    try:
        with pytest.raises(CheckpointError, match=r"no whole GGUF file|in the unknown type 4,|of version"):
            read(data)
        assert tracemalloc.get_traced_memory()[1] < len(data) + 12 * MEMORY_MOST
    finally:
        tracemalloc.stop()


@given(
    st.lists(st.tuples(st.integers(0, len(GOOD) - 1), st.integers(0, 255)), max_size=6),
    st.integers(0, len(GOOD)),
    st.binary(max_size=40),
)
@settings(max_examples=400, suppress_health_check=[HealthCheck.function_scoped_fixture])
@example([], len(GOOD), b"")
def test_any_bytes(
    read: Callable[[bytes], gguf.GgufFile], patches: list[tuple[int, int]], end: int, more: bytes
) -> None:
    """Whatever is accepted lies in the file, by itself."""
    data = bytearray(GOOD)
    for at, value in patches:
        data[at] = value
    data = data[:end] + more
    try:
        found = read(bytes(data))
    except CheckpointError:
        return
    spans = sorted((t.offset, t.offset + t.nbytes) for t in found.tensors.values())
    assert all(0 < begin < end <= len(data) for begin, end in spans)
    assert all(one[1] <= other[0] for one, other in itertools.pairwise(spans))


def test_split_files_must_be_all_there_and_under_their_names(tmp_path: Path) -> None:
    def split(number: int, tensors: list[bytes], said: int | None = None) -> bytes:
        own = number if said is None else said
        marks = [
            field(b"split.no", 2, struct.pack("<H", own)),
            field(b"split.count", 2, struct.pack("<H", 2)),
            field(b"split.tensors.count", 5, struct.pack("<i", 2)),
        ]
        return made([*FIELDS, *marks], tensors)

    first, second = (tmp_path / f"m-0000{n}-of-00002.gguf" for n in (1, 2))
    first.write_bytes(split(0, TENSORS[:1]))
    with pytest.raises(CheckpointError, match=r"m-00002-of-00002.gguf is missing"):
        gguf.read(first)
    second.write_bytes(split(1, TENSORS[1:]))
    assert gguf.read(second).tensors["a"].path == first, "any of them stands for all"
    second.write_bytes(split(1, TENSORS[:1]))
    with pytest.raises(CheckpointError, match=r"there twice"):
        gguf.read(first)
    second.write_bytes(split(1, TENSORS[1:], said=0))
    with pytest.raises(CheckpointError, match=r"says that it is file 0 of 2"):
        gguf.read(first)
    second.write_bytes(split(1, []))
    with pytest.raises(CheckpointError, match=r"has 1 tensors, and says 2"):
        gguf.read(first)
