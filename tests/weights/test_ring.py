"""The ring: the right bytes in any order, whatever a disk does."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stowage.core.geometry import PAGE_BYTES
from stowage.errors import CheckpointError, ModelError, StorageError
from stowage.weights import reader
from stowage.weights.checkpoint import Checkpoint
from stowage.weights.file import File
from stowage.weights.reader import Read, Readers
from stowage.weights.ring import Ring

UNITS = 5
SLOT = 3 * PAGE_BYTES


@pytest.fixture(scope="module")
def table(tmp_path_factory: pytest.TempPathFactory) -> Iterator[File]:
    """Unit n is SLOT bytes of n + 1."""
    path = tmp_path_factory.mktemp("ring") / "table"
    path.write_bytes(b"".join(bytes([n + 1]) * SLOT for n in range(UNITS)))
    file = File.open(path)
    yield file
    file.close()


def ring_of(table: File, slots: int, timeout_s: float = 60.0) -> tuple[Ring, Readers]:
    readers = Readers()

    def reads(unit: int, memory: memoryview) -> list[Read]:
        return [Read(table, unit * SLOT, memory[:SLOT])]

    return Ring(UNITS, slots, SLOT, reads, readers, timeout_s), readers


@given(st.lists(st.integers(0, UNITS - 1), max_size=25), st.integers(2, 4), st.booleans())
def test_any_order_gives_the_right_bytes(table: File, order: list[int], slots: int, learned: bool) -> None:
    ring, readers = ring_of(table, slots)
    if learned:
        ring.follow([*order, *range(UNITS)])
    for unit in order:
        slot = ring.take(unit)
        assert bytes(slot.memory) == bytes([unit + 1]) * SLOT
        ring.check()
        ring.give_back(unit)
        ring.give_back(unit)
        ring.check()
    assert readers.close()


def test_a_known_order_reads_everything_once_a_round(table: File) -> None:
    ring, readers = ring_of(table, 2)
    order = [4, 0, 3, 0, 1, 2]
    ring.follow(order)
    ring.start()
    before = ring.read_bytes
    for unit in order * 3:
        ring.take(unit)
        ring.give_back(unit)
    assert ring.read_bytes - before == 3 * len(order) * SLOT
    readers.close()


def test_a_slot_that_is_lent_is_not_written_to(table: File) -> None:
    ring, readers = ring_of(table, 3)
    first = ring.take(0)
    second = ring.take(1)
    assert bytes(first.memory) == b"\1" * SLOT
    assert bytes(second.memory) == b"\2" * SLOT
    with pytest.raises(ModelError, match="two forwards"):
        ring.take(0)
    errors: list[BaseException] = []

    def other() -> None:
        try:
            ring.take(2)
        except ModelError as error:
            errors.append(error)

    thread = threading.Thread(target=other)
    thread.start()
    thread.join()
    assert errors
    readers.close()


def test_a_disk_that_fails_costs_a_take_and_no_more(tmp_path: Path) -> None:
    path = tmp_path / "table"
    path.write_bytes(b"".join(bytes([n + 1]) * SLOT for n in range(UNITS)))
    file = File.open(path)
    ring, readers = ring_of(file, 2)
    ring.take(0)
    ring.give_back(0)
    kept = os.dup(file.fd), os.dup(file.direct)
    null = os.open(tmp_path, os.O_RDONLY)  # a directory: every read of it fails
    for fd in (file.fd, file.direct):
        os.dup2(null, fd)
    failures = 0
    for _ in range(4):  # what was read ahead is still good
        for unit in range(1, UNITS):
            try:
                slot = ring.take(unit)
            except StorageError as error:
                assert "could not be read" in str(error)
                failures += 1
            else:
                assert bytes(slot.memory) == bytes([unit + 1]) * SLOT
                ring.give_back(unit)
            ring.check()
    assert failures >= 12
    for fd, good in zip((file.fd, file.direct), kept, strict=True):
        os.dup2(good, fd)
    failed_still = 0
    for unit in [0, 1, 2, 3, 4, 0]:
        try:
            slot = ring.take(unit)
        except StorageError:  # had been read ahead while it failed
            failed_still += 1
            slot = ring.take(unit)
        assert bytes(slot.memory) == bytes([unit + 1]) * SLOT
        ring.give_back(unit)
    assert failed_still <= 2
    assert readers.close()
    file.close()


def test_a_disk_that_hangs_has_a_deadline_and_keeps_its_slot(table: File, monkeypatch: pytest.MonkeyPatch) -> None:
    """What may still be written to is given to nobody."""
    answers = threading.Event()
    fill = reader._fill

    def hangs(*asked: Any) -> None:
        answers.wait(60)
        fill(*asked)

    monkeypatch.setattr(reader, "_fill", hangs)
    ring, readers = ring_of(table, 2, timeout_s=0.05)
    for unit in (0, 1, 0):
        with pytest.raises(StorageError, match=r"within 0.05 s"):
            ring.take(unit)
        ring.check()
    answers.set()
    ring._timeout_s = 60.0
    for unit in (3, 0):
        assert bytes(ring.take(unit).memory) == bytes([unit + 1]) * SLOT
        ring.give_back(unit)
    assert readers.close()


def header(text: bytes, length: int | None = None) -> bytes:
    return (len(text) if length is None else length).to_bytes(8, "little") + text


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"\xff" * 8,
        header(b"{}", 1 << 40),
        header(b"not json"),
        header(b'{"a": {"data_offsets": [0, 9]}}') + b"12345678",
        header(b'{"a": {"data_offsets": [5, 2]}}') + b"12345678",
        header(b'{"a": {"data_offsets": "xy"}}') + b"12345678",
        header(b"[1, 2]"),
    ],
)
def test_a_damaged_header_is_refused_before_anything_is_read(content: bytes, tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    path.write_bytes(content)
    before = set(os.listdir("/proc/self/fd"))
    with pytest.raises(CheckpointError, match="damaged"):
        Checkpoint([path])
    assert set(os.listdir("/proc/self/fd")) == before
