"""The file of weights that the checkpoint has in another form: a place that does not take it is told."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import numpy as np
import pytest

from stowage.errors import StorageError
from stowage.weights.scratch_file import ScratchFile

WAY_OUT = "Name a directory that has room for them with disk, as DIR:SIZE"


def test_a_file_where_the_directory_should_be(tmp_path: Path) -> None:
    (tmp_path / "mine").write_text("mine")
    with pytest.raises(StorageError, match=f"File exists.*{WAY_OUT}"):
        ScratchFile(tmp_path / "mine", 1 << 20)
    assert (tmp_path / "mine").read_text() == "mine"


def test_a_disk_that_fills_while_it_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(fd: int, data: memoryview, offset: int) -> int:
        if offset:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return real(fd, data[:1000], offset)

    scratch = ScratchFile(tmp_path, 1 << 20)
    real = os.pwrite
    monkeypatch.setattr(os, "pwrite", full)
    with pytest.raises(StorageError, match=rf"No space left on device \(.* free, .*KiB needed\). {WAY_OUT}"):
        scratch.add(np.ones(5000, np.uint8))
    scratch.close()
    assert not list(tmp_path.iterdir()), "it has no name"
