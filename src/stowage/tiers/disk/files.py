"""File operations of the disk tier: the six that can fail in interesting ways, injected; and scattered I/O on top.

Everything is relative to a directory descriptor, follows no links and is closed on exec. Direct I/O wants addresses,
lengths and offsets in whole pages; `pages` gives memory for what does not lie so.
"""

from __future__ import annotations

import errno
import mmap
import os
from collections.abc import Iterator
from typing import Final, Protocol

import numpy as np

from stowage.format.segment import PAGE_BYTES

__all__ = [
    "CALL_BYTES_MAX",
    "DISK_FULL",
    "FileSystem",
    "RealFileSystem",
    "in_pages",
    "is_aligned",
    "pages",
    "read_exact",
    "write_all",
]

CALL_BYTES_MAX: Final = 4 << 20
"""Bytes per system call."""
BUFFERS_MAX: Final = min(1024, os.sysconf("SC_IOV_MAX"))
DISK_FULL: Final = frozenset({errno.ENOSPC, errno.EDQUOT})


class FileSystem(Protocol):
    """What the tier does to files. All raise OSError. `testing.faults` has one that fails on demand."""

    def open(self, name: str, flags: int, dir_fd: int) -> int:
        """A descriptor; new files get mode 0600. `name` has no slash."""
        ...

    def preadv(self, fd: int, buffers: list[memoryview], offset: int) -> int: ...

    def pwritev(self, fd: int, buffers: list[memoryview], offset: int) -> int: ...

    def allocate(self, fd: int, length: int) -> None:
        """Reserves `length` bytes of disk for the file, which then has at least that length."""
        ...

    def truncate(self, fd: int, length: int) -> None: ...

    def unlink(self, name: str, dir_fd: int) -> None: ...


class RealFileSystem:
    """The operating system's."""

    def open(self, name: str, flags: int, dir_fd: int) -> int:
        return os.open(name, flags | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK, 0o600, dir_fd=dir_fd)

    def preadv(self, fd: int, buffers: list[memoryview], offset: int) -> int:
        return os.preadv(fd, buffers, offset)

    def pwritev(self, fd: int, buffers: list[memoryview], offset: int) -> int:
        return os.pwritev(fd, buffers, offset)

    def allocate(self, fd: int, length: int) -> None:
        try:
            os.posix_fallocate(fd, 0, length)
        except OSError as error:
            if error.errno not in (errno.EOPNOTSUPP, errno.EINVAL, errno.ENOSYS, errno.ENODEV):
                raise
            os.ftruncate(fd, length)  # a hole: the length still counts, ENOSPC just comes later

    def truncate(self, fd: int, length: int) -> None:
        os.ftruncate(fd, length)

    def unlink(self, name: str, dir_fd: int) -> None:
        os.unlink(name, dir_fd=dir_fd)


def pages(length: int) -> memoryview:
    """Fresh zeroed memory that begins on a page. Freed with the last view of it."""
    return memoryview(mmap.mmap(-1, length, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS))


def in_pages(data: bytes) -> memoryview:
    """A copy that begins on a page."""
    copy = pages(len(data))
    copy[:] = data
    return copy


def is_aligned(buffer: memoryview) -> bool:
    """Whether the buffer begins on a page."""
    address: int = np.frombuffer(buffer, np.uint8).__array_interface__["data"][0]
    return address % PAGE_BYTES == 0


def _calls(buffers: list[memoryview]) -> Iterator[list[memoryview]]:
    """The buffers in groups that fit one system call; a larger buffer is cut, in whole pages."""
    group: list[memoryview] = []
    size = 0
    for buffer in buffers:
        while size + buffer.nbytes > CALL_BYTES_MAX:
            part = (CALL_BYTES_MAX - size) // PAGE_BYTES * PAGE_BYTES
            if part:
                group.append(buffer[:part])
                buffer = buffer[part:]
            if group:
                yield group
            group, size = [], 0
        if buffer.nbytes:
            group.append(buffer)
            size += buffer.nbytes
        if len(group) == BUFFERS_MAX:
            yield group
            group, size = [], 0
    if group:
        yield group


def _advance(buffers: list[memoryview], done: int) -> list[memoryview]:
    """What is left of the buffers after `done` bytes."""
    for at, buffer in enumerate(buffers):
        if done < buffer.nbytes:
            return [buffer[done:], *buffers[at + 1 :]]
        done -= buffer.nbytes
    return []


def read_exact(files: FileSystem, fd: int, buffers: list[memoryview], offset: int, whole_pages: bool) -> int:
    """Fills the buffers in order from `offset`. Returns the bytes read: fewer only where the file ends. Raises OSError.

    `whole_pages`: direct I/O, which cannot go on from within a page (nor need it: there the file ends).
    """
    total = 0
    for group in _calls(buffers):
        while group:
            done = files.preadv(fd, group, offset + total)
            if done == 0:
                return total
            total += done
            group = _advance(group, done)
            if whole_pages and done % PAGE_BYTES:
                return total
    return total


def write_all(files: FileSystem, fd: int, buffers: list[memoryview], offset: int) -> None:
    """Writes the buffers in order at `offset`. Raises OSError, also where the system writes nothing."""
    for group in _calls(buffers):
        while group:
            done = files.pwritev(fd, group, offset)
            if done == 0:
                raise OSError(errno.EIO, "nothing was written")
            offset += done
            group = _advance(group, done)
