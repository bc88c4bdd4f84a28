"""Files of weights are read past the page cache, and from it where they lie there: the same bytes."""

from __future__ import annotations

import errno
import mmap
import os
import random
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from stowage.weights import checkpoint
from stowage.weights.file import File

PAGE = mmap.PAGESIZE
PAGES = 64


@pytest.fixture
def content() -> bytes:
    return random.Random(0).randbytes(PAGES * PAGE - 100)  # ends within a page


@pytest.fixture
def file(tmp_path: Path, content: bytes) -> Iterator[File]:
    path = tmp_path / "weights"
    path.write_bytes(content)
    file = File.open(path)
    if file.direct < 0:
        pytest.skip("this file system has no direct reads")
    yield file
    file.close()


def drop(file: File) -> None:
    """Nothing of it is left in the page cache."""
    os.fsync(file.fd)
    os.posix_fadvise(file.fd, 0, 0, os.POSIX_FADV_DONTNEED)


def filled(file: File, first: int, pages: int) -> bytes:
    with mmap.mmap(-1, pages * PAGE) as memory, memoryview(memory) as view:
        file.fill(view, first * PAGE, whole_pages=True)
        return bytes(view)


@pytest.mark.parametrize("cached", [range(0), range(PAGES), range(10, 20), range(10), range(5, PAGES)])
def test_the_bytes_are_the_files_whatever_is_cached(file: File, content: bytes, cached: range) -> None:
    drop(file)
    for page in cached:
        os.pread(file.fd, PAGE, page * PAGE)
    for first, pages in ((0, PAGES), (8, 16), (12, 4), (PAGES - 1, 1), (PAGES - 3, 3)):
        wanted = content[first * PAGE : (first + pages) * PAGE]
        assert filled(file, first, pages)[: len(wanted)] == wanted


def test_what_is_cached_is_not_read_from_the_disk(file: File, content: bytes) -> None:
    os.pread(file.fd, len(content), 0)
    null = os.open("/dev/null", os.O_RDONLY)
    os.dup2(null, file.direct)  # reads nothing
    assert filled(file, 0, PAGES - 1) == content[: (PAGES - 1) * PAGE]


def test_what_is_not_cached_does_not_enter_the_cache(file: File) -> None:
    drop(file)
    if file._cached_bytes(PAGE, 30 * PAGE):
        pytest.skip("this file system keeps its pages")
    filled(file, 16, 32)
    assert not file._cached_bytes(PAGE, 30 * PAGE)


def test_a_file_whose_pages_are_kept_secret_is_read_directly(
    file: File, content: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    """mincore says of another user's file that all of it was cached."""
    monkeypatch.setattr(os, "access", lambda *_: False)
    monkeypatch.setattr(os, "geteuid", lambda: -1)
    os.pread(file.fd, len(content), 0)
    assert not file._cached_bytes(PAGE, 0)
    assert filled(file, 0, 4) == content[: 4 * PAGE]


def test_a_file_system_that_maps_nothing_is_read(file: File, content: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise OSError(errno.ENODEV, "no such device")

    with mmap.mmap(-1, 4 * PAGE) as memory, memoryview(memory) as view:
        monkeypatch.setattr(mmap, "mmap", refuse)
        file.fill(view, 0, whole_pages=True)
        assert bytes(view) == content[: 4 * PAGE]


def test_a_file_that_was_cut_is_an_error(file: File) -> None:
    os.truncate(file.path, 8 * PAGE)
    with pytest.raises(OSError, match="ends too early"):
        filled(file, 4, 16)


def test_what_is_cached_brings_in_nothing_more(file: File, content: bytes) -> None:
    """A file's header lies in the page cache; what follows is read past it, however often."""
    drop(file)
    os.pread(file.fd, PAGE, 0)
    before = file._cached_bytes(PAGES * PAGE, 0)
    for _ in range(4):
        filled(file, 0, PAGES)
    assert file._cached_bytes(PAGES * PAGE, 0) == before


def test_a_stored_tensor_is_read_without_the_header_of_its_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A quantised mixture has tens of thousands of small ones, and a header that takes as long to read as they do."""
    path = tmp_path / "model.safetensors"
    values = {f"t{number}": torch.randn(3, number + 1) for number in range(4)}
    save_file(values, path)
    stored = checkpoint.stored_in(path)

    def again(*_: object) -> None:
        raise AssertionError("the header is read again")

    monkeypatch.setattr(checkpoint, "safetensors_header", again)
    assert all(torch.equal(one.read(), values[one.name]) for one in stored)
    assert len(stored) == len(values)
