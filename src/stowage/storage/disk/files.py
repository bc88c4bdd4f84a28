"""File operations of the disk tier: six on bytes, seven that look after descriptors; scattered I/O on top.

Everything is relative to a directory descriptor, follows no links and is closed on exec. Direct I/O wants addresses,
lengths and offsets in whole pages; `pages` gives memory for what does not lie so.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import stat
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Protocol

from stowage.core.geometry import PAGE_BYTES
from stowage.native.memory import pages
from stowage.storage.disk.private_directory import open_private
from stowage.storage.format.batch import all_begin_on

CALL_BYTES_MAX: Final = 4 << 20
"""Bytes per system call."""
BUFFERS_MAX: Final = min(1024, os.sysconf("SC_IOV_MAX"))


class FileSystem(Protocol):
    """What the tier does to files. All raise OSError. `testing.faults` has one that fails on demand."""

    def open(self, name: str, flags: int, dir_fd: int) -> int:
        """A descriptor; new files get mode 0600, whatever the umask. `name` has no slash."""

    def preadv(self, fd: int, buffers: list[memoryview], offset: int) -> int: ...

    def pwritev(self, fd: int, buffers: list[memoryview], offset: int) -> int: ...

    def allocate(self, fd: int, length: int) -> None:
        """Reserves `length` bytes of disk for the file, which then has at least that length."""

    def truncate(self, fd: int, length: int) -> None: ...

    def unlink(self, name: str, dir_fd: int) -> None: ...


class RealFileSystem:
    """The operating system's."""

    def open(self, name: str, flags: int, dir_fd: int) -> int:
        fd = os.open(name, flags | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK, 0o600, dir_fd=dir_fd)
        if flags & os.O_CREAT:
            try:
                if _status(os.fstat(fd)).ours:  # else whoever opened it finds out, and nothing of others was changed
                    os.fchmod(fd, 0o600)
            except OSError:
                os.close(fd)
                raise
        return fd

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


@dataclass(frozen=True, slots=True)
class Status:
    """What is asked of a file. `allocated` are the bytes of its blocks on disk."""

    regular: bool
    links: int
    owner: int
    length: int
    allocated: int
    inode: int

    @property
    def bytes(self) -> int:
        """What the file counts for: its length or its blocks, whichever is larger."""
        return max(self.length, self.allocated)

    @property
    def ours(self) -> bool:
        """Whether it is a regular file of this user with one name."""
        return self.regular and self.links == 1 and self.owner == os.geteuid()


class Descriptors(Protocol):
    """The bookkeeping besides `FileSystem`. All but `close` and `capacity` raise OSError."""

    def open_directory(self, path: Path) -> int:
        """A descriptor of a directory that is ours alone, made where it is missing. Raises DirectoryError."""

    def close(self, fd: int) -> None: ...

    def status(self, fd: int, name: str | None = None) -> Status:
        """Of an open file, or of `name` in an open directory; a link is not followed."""

    def capacity(self, dir_fd: int) -> int:
        """Bytes that the file system of an open directory has in all; 0: it does not say."""

    def listing(self, dir_fd: int) -> list[tuple[str, Status]]:
        """What lies in an open directory, in no order. What vanishes meanwhile is left out."""

    def lock(self, fd: int) -> bool:
        """Takes the exclusive lock on an open file if nobody has it; held until closed, or the process is gone."""

    def make_buffered(self, fd: int) -> None:
        """Direct I/O no more."""


class RealDescriptors:
    """The operating system's."""

    def open_directory(self, path: Path) -> int:
        return open_private(path)

    def close(self, fd: int) -> None:
        os.close(fd)

    def status(self, fd: int, name: str | None = None) -> Status:
        return _status(os.fstat(fd) if name is None else os.stat(name, dir_fd=fd, follow_symlinks=False))

    def capacity(self, dir_fd: int) -> int:
        try:
            found = os.fstatvfs(dir_fd)
        except OSError:
            return 0
        return found.f_blocks * found.f_frsize

    def listing(self, dir_fd: int) -> list[tuple[str, Status]]:
        found = []
        # A descriptor of its own: scandir's position would be shared between threads.
        fd = os.open(".", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC, dir_fd=dir_fd)
        try:
            with os.scandir(fd) as items:
                for item in items:
                    with contextlib.suppress(FileNotFoundError):
                        found.append((item.name, _status(item.stat(follow_symlinks=False))))
        finally:
            os.close(fd)
        return found

    def lock(self, fd: int) -> bool:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            return False
        return True

    def make_buffered(self, fd: int) -> None:
        fcntl.fcntl(fd, fcntl.F_SETFL, fcntl.fcntl(fd, fcntl.F_GETFL) & ~os.O_DIRECT)


def _status(found: os.stat_result) -> Status:
    regular = stat.S_ISREG(found.st_mode)
    return Status(regular, found.st_nlink, found.st_uid, found.st_size, found.st_blocks * 512, found.st_ino)


def in_pages(data: bytes) -> memoryview:
    """A copy that begins on a page."""
    copy = pages(len(data))
    copy[:] = data
    return copy


def is_aligned(buffer: memoryview) -> bool:
    """Whether the buffer begins on a page."""
    return all_begin_on([buffer], PAGE_BYTES)


def all_aligned(buffers: list[memoryview]) -> bool:
    """Whether every buffer begins on a page."""
    return all_begin_on(buffers, PAGE_BYTES)


def _calls(buffers: list[memoryview]) -> Iterator[list[memoryview]]:
    """The buffers in groups that fit one system call; a larger buffer is cut, in whole pages."""
    if len(buffers) <= BUFFERS_MAX and 0 < sum([buffer.nbytes for buffer in buffers]) <= CALL_BYTES_MAX:
        yield buffers
        return
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
    if done == sum([buffer.nbytes for buffer in buffers]):
        return []
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
