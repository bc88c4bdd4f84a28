"""A scratch file for parameters in the form in which they are computed with, where the checkpoint lacks that form.

It has no name, and vanishes with the process, however that ends. Its bytes count, and have a limit.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from stowage.config.disk_room import why_not_written
from stowage.core.geometry import ALIGNMENT_BYTES, round_up
from stowage.errors import BudgetError, StorageError
from stowage.native.memory import address_of
from stowage.weights.checkpoint import Segment
from stowage.weights.file import File, open_direct, pwrite_all

_WRITTEN_BYTES = 8 << 20
_ELSEWHERE = "Name a directory that has room for them with disk, as DIR:SIZE."


def scratch_directory(mounts: Path = Path("/proc/self/mounts")) -> tuple[Path, int] | None:
    """A directory for scratch files of somebody who named none, and its limit: where the system keeps large temporary
    files, up to half of what is free there. ``None`` where that is memory.
    """
    for directory in (Path("/var/tmp"), Path(tempfile.gettempdir())):
        if os.access(directory, os.W_OK) and _on_disk(directory.resolve(), mounts):
            return directory, shutil.disk_usage(directory).free // 2
    return None


def _on_disk(directory: Path, mounts: Path) -> bool:
    try:
        lines = [line.split() for line in mounts.read_text(encoding="utf-8", errors="replace").splitlines()]
    except OSError:
        return True
    above = [(len(line[1]), line[2]) for line in lines if len(line) > 2 and directory.is_relative_to(line[1])]
    return max(above, default=(0, ""))[1] not in ("tmpfs", "ramfs")


class ScratchFile:
    """In ``directory``, of at most ``limit_bytes``. Raises StorageError where no such file can be made."""

    def __init__(self, directory: Path, limit_bytes: int) -> None:
        self._limit_bytes = limit_bytes
        self._used_bytes = 0
        try:
            directory.mkdir(mode=0o700, parents=True, exist_ok=True)
            fd = os.open(directory, os.O_RDWR | os.O_TMPFILE | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise StorageError(
                f"no file for weights can be made in {directory}: {error.strerror}. {_ELSEWHERE}"
            ) from error
        self.file = File(directory / "(weights)", fd, open_direct(fd))

    @property
    def nbytes(self) -> int:
        """Bytes of the file."""
        return self.file.length

    def add(self, raw: NDArray[np.uint8]) -> Segment:
        """Write ``raw`` (uint8, one dimension), at an offset with the phase of its address.

        Raises BudgetError above the limit, StorageError for a full disk.
        """
        phase = address_of(raw) % ALIGNMENT_BYTES
        offset = round_up(self._used_bytes, ALIGNMENT_BYTES) + phase
        end = round_up(offset + raw.nbytes)
        if end > self._limit_bytes:
            raise BudgetError(
                f"the weights have another form in memory than in the checkpoint (another dtype, most often), and that "
                f"form needs {end} bytes of disk or more; the limit is {self._limit_bytes}. Give disk a larger size, "
                "keep the checkpoint's dtype, or give the model more memory."
            )
        try:
            for at in range(0, raw.nbytes, _WRITTEN_BYTES):
                pwrite_all(self.file.fd, raw[at : at + _WRITTEN_BYTES].data, offset + at)
            os.ftruncate(self.file.fd, end)
        except OSError as error:
            raise StorageError(
                f"{self.file.path.parent} does not take the weights: "
                f"{why_not_written(self.file.path.parent, error, end)}. {_ELSEWHERE}"
            ) from error
        self._used_bytes = offset + raw.nbytes
        self.file.settle()
        return Segment(self.file, offset, raw.nbytes)

    def close(self) -> None:
        """The file is gone."""
        self.file.close()
