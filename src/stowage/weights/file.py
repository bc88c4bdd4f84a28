"""An open file of weights: two descriptors, and the size and time by which a later change is noticed.

Long reads bypass the page cache, but what is cached already is copied from there: a copy is several times faster than a
disk, and evicts nothing.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import mmap
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import numpy as np

from stowage.core.geometry import PAGE_BYTES
from stowage.errors import CheckpointError
from stowage.native.memory import address_of

_HEADER_BYTES_MAX: Final = 100 << 20
_MINCORE: Final[Any] = getattr(ctypes.CDLL(None, use_errno=True), "mincore", None)


class File:
    """An open file of weights. ``direct``: see ``open_direct``."""

    __slots__ = ("_mark", "_pages", "_view", "direct", "fd", "path")

    def __init__(self, path: Path, fd: int, direct: int) -> None:
        self.path, self.fd, self.direct = path, fd, direct
        self._mark = mark_of(fd) if fd >= 0 else (0, 0)
        self._view: mmap.mmap | None = None
        self._pages: mmap.mmap | bytes | None = None

    @classmethod
    def open(cls, path: Path) -> File:
        """Raises CheckpointError when the file cannot be opened."""
        try:
            fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        except OSError as error:
            raise CheckpointError(f"{path} cannot be opened: {error.strerror}.") from error
        direct = open_direct(fd)
        if direct >= 0:
            # Nothing is read ahead: a copy from the page cache would bring in what follows, a little more each time,
            # until all of the file lies there that is read directly beside it.
            with contextlib.suppress(OSError):
                os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_RANDOM)
        return cls(path, fd, direct)

    @property
    def length(self) -> int:
        return self._mark[0]

    @property
    def is_packed(self) -> bool:
        """Whether the stored bytes are packed."""
        return False

    def pread(self, length: int, offset: int) -> bytes:
        """``length`` bytes from ``offset`` on, or fewer at the end of the file. Raises OSError."""
        return os.pread(self.fd, length, offset)

    def fill(self, into: memoryview, offset: int, *, whole_pages: bool) -> None:
        """Fill ``into`` from ``offset`` on; bytes of its last page that lie beyond the file's end are left unchanged.

        ``whole_pages``: offset, length and memory are page-aligned, so direct I/O can be used. Raises OSError.
        """
        direct_from = into.nbytes
        if whole_pages and self.direct >= 0:
            direct_from = self._cached_bytes(into.nbytes, offset)
        done = 0
        while done < into.nbytes:
            fd, until = (self.direct, into.nbytes) if done >= direct_from else (self.fd, direct_from)
            count = os.preadv(fd, [into[done:until]], offset + done)
            if count == 0 and offset + done >= self.length:
                return  # the last page of a file: what follows belongs to nothing
            if count == 0:
                raise OSError(f"{self.path} ends too early")
            done += count
            if count % PAGE_BYTES:
                direct_from = into.nbytes  # direct reads cannot go on from within a page; the file ends, most often

    def _cached_bytes(self, length: int, offset: int) -> int:
        """How many of the ``length`` bytes from ``offset`` on are in the page cache without a gap, in whole pages.

        Uses mincore(2), because reads with RWF_NOWAIT start readahead for what they do not find. For files that this
        user neither owns nor may write, mincore reports every page as cached.
        """
        if self._pages is None:
            self._pages = self._mapped_to_ask()
        pages = self._pages  # another thread may map it too
        if not pages or offset >= self.length:
            return 0
        begin = address_of(pages)
        resident = np.zeros(-(-min(length, self.length - offset) // PAGE_BYTES), np.uint8)
        if _MINCORE(ctypes.c_void_p(begin + offset), ctypes.c_size_t(resident.size * PAGE_BYTES), resident.ctypes):
            return 0
        gaps = np.flatnonzero(resident & 1 == 0)
        return (int(gaps[0]) if gaps.size else resident.size) * PAGE_BYTES

    def _mapped_to_ask(self) -> mmap.mmap | bytes:
        """The file mapped for mincore; empty where mincore does not answer."""
        told = _MINCORE is not None and (
            os.fstat(self.fd).st_uid == os.geteuid() or os.access(f"/proc/self/fd/{self.fd}", os.W_OK)
        )
        with contextlib.suppress(OSError, ValueError):  # some file systems map nothing, and nothing maps an empty file
            return mmap.mmap(self.fd, 0, prot=mmap.PROT_READ) if told else b""
        return b""

    def check(self) -> None:
        """Raises CheckpointError when the file has changed since it was opened."""
        if mark_of(self.fd) != self._mark:
            raise CheckpointError(
                f"{self.path} was changed while a model is running from it, so its weights are no longer those that "
                "were loaded. Nothing more is computed with them: load the model again. To update a checkpoint under a "
                "running model, write the new file beside it and put it in its place with mv."
            )

    def settle(self) -> None:
        """Accept the file's present size and time as unchanged."""
        self._mark = mark_of(self.fd)

    def view(self) -> mmap.mmap:
        """The file mapped into memory; what is written there stays in this process."""
        if self._view is None:
            self._view = mmap.mmap(self.fd, 0, flags=mmap.MAP_PRIVATE, prot=mmap.PROT_READ | mmap.PROT_WRITE)
        return self._view

    def close(self) -> None:
        """Tensors over ``view`` stay usable; the mapping goes with the last of them."""
        self._view = self._pages = None
        fds, self.fd, self.direct = (self.fd, self.direct), -1, -1
        for fd in fds:
            if fd >= 0:
                os.close(fd)

    def __del__(self) -> None:
        self.close()


def open_direct(fd: int) -> int:
    """A second descriptor of a file, for direct I/O; -1 where the file system has none."""
    try:
        return os.open(f"/proc/self/fd/{fd}", os.O_RDONLY | os.O_CLOEXEC | getattr(os, "O_DIRECT", 0))
    except OSError:
        return -1


def mark_of(fd: int) -> tuple[int, int]:
    """Size and modification time: they change when the file is written to, not when it is renamed."""
    stat = os.fstat(fd)
    return stat.st_size, stat.st_mtime_ns


def pwrite_all(fd: int, content: bytes | memoryview, offset: int) -> None:
    """Write all of ``content``, bytes, at ``offset``: one call may take a part of it. Raises OSError."""
    done = 0
    while done < len(content):
        done += os.pwrite(fd, content[done:], offset + done)


def safetensors_header(fd: int) -> tuple[dict[str, Any], int]:
    """The header of a safetensors file, and the offset at which its tensors begin. Its length is checked before memory
    is allocated for it. Raises OSError and ValueError.

    Format: an unsigned 64-bit little-endian length, that many bytes of JSON, then the tensors
    (https://github.com/huggingface/safetensors).
    """
    length = int.from_bytes(os.pread(fd, 8, 0), "little")
    if not 2 <= length <= min(_HEADER_BYTES_MAX, os.fstat(fd).st_size - 8):
        raise ValueError(f"its header is said to take {length} bytes")
    return json.loads(os.pread(fd, length, 8)), 8 + length


def safetensors_place(name: str, entry: Mapping[str, Any], data_bytes: int) -> tuple[int, int, tuple[int, ...]]:
    """Where the tensor ``name`` of a header begins and ends in the ``data_bytes`` behind it, and its shape. Raises
    ValueError where that is outside of them; KeyError and TypeError for an entry that lacks something.
    """
    begin, end = entry["data_offsets"]
    shape = tuple(int(size) for size in entry["shape"])
    if not 0 <= begin <= end <= data_bytes or min(shape, default=0) < 0:
        raise ValueError(f"{name} lies outside of the file")
    return begin, end, shape
