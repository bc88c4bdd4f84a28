"""A directory to scrub, and that nothing of it stays open."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.numbered_chunks import Cache, copy_of, fill


@pytest.fixture(scope="module")
def filled(tmp_path_factory: pytest.TempPathFactory) -> Cache:
    return fill(tmp_path_factory.mktemp("filled") / "c")


@pytest.fixture
def cache(filled: Cache, tmp_path: Path) -> Cache:
    return copy_of(filled, tmp_path / "c")


@pytest.fixture(autouse=True)
def _nothing_is_left_open(tmp_path: Path) -> Iterator[None]:
    yield
    open_files = [os.readlink(f"/proc/self/fd/{fd}") for fd in os.listdir("/proc/self/fd") if _exists(fd)]
    assert [path for path in open_files if path.startswith(str(tmp_path))] == []


def _exists(fd: str) -> bool:
    return os.path.lexists(f"/proc/self/fd/{fd}")
