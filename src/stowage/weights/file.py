"""An open file of weights: two descriptors, and the mark by which a change under a running process is noticed."""

from __future__ import annotations

import contextlib
import mmap
import os
from pathlib import Path

from stowage.errors import CheckpointError

__all__ = ["File", "mark_of"]


class File:
    """An open file of weights. ``direct`` is a second descriptor that goes past the page cache; -1 where the file
    system has none.
    """

    __slots__ = ("_mark", "_view", "direct", "fd", "path")

    def __init__(self, path: Path, fd: int, direct: int) -> None:
        self.path, self.fd, self.direct = path, fd, direct
        self._mark = mark_of(fd) if fd >= 0 else (0, 0)
        self._view: mmap.mmap | None = None

    @classmethod
    def open(cls, path: Path) -> File:
        """Raises CheckpointError when the file cannot be opened."""
        try:
            fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        except OSError as error:
            raise CheckpointError(f"{path} cannot be opened: {error.strerror}.") from error
        direct = -1
        with contextlib.suppress(OSError):
            direct = os.open(f"/proc/self/fd/{fd}", os.O_RDONLY | os.O_CLOEXEC | getattr(os, "O_DIRECT", 0))
        return cls(path, fd, direct)

    @property
    def length(self) -> int:
        return self._mark[0]

    @property
    def is_packed(self) -> bool:
        """Whether its bytes are made of others that lie there."""
        return False

    def pread(self, length: int, offset: int) -> bytes:
        """So many bytes from there on, or fewer at the end. Raises OSError."""
        return os.pread(self.fd, length, offset)

    def check(self) -> None:
        """Raises CheckpointError when the file is not what it was when it was opened."""
        if mark_of(self.fd) != self._mark:
            raise CheckpointError(
                f"{self.path} was changed while a model is running from it, so its weights are no longer those that "
                "were loaded. Nothing more is computed with them: load the model again."
            )

    def settle(self) -> None:
        """What was written until now belongs to the file."""
        self._mark = mark_of(self.fd)

    def view(self) -> mmap.mmap:
        """The file mapped into memory; what is written there stays in this process."""
        if self._view is None:
            self._view = mmap.mmap(self.fd, 0, flags=mmap.MAP_PRIVATE, prot=mmap.PROT_READ | mmap.PROT_WRITE)
        return self._view

    def close(self) -> None:
        """Tensors over ``view`` stay usable; the mapping goes with the last of them."""
        self._view = None
        fds, self.fd, self.direct = (self.fd, self.direct), -1, -1
        for fd in fds:
            if fd >= 0:
                os.close(fd)

    def __del__(self) -> None:
        self.close()


def mark_of(fd: int) -> tuple[int, int]:
    """Size and time of modification: they change whenever the file is written to, not when it gets another name."""
    stat = os.fstat(fd)
    return stat.st_size, stat.st_mtime_ns
