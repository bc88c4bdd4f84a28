"""The cache directory: who may use it, what lies in it, how much it takes, and the lock over all of that.

Owns the directory's descriptor. Every file is opened relative to it, without following links, and only if it is a
regular file of ours with one name. Nothing else there is opened or removed, but all of it counts towards the limit.
"""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from stowage.errors import DirectoryError, FormatError
from stowage.storage.disk.counters import Counters
from stowage.storage.disk.files import read_exact, write_all
from stowage.storage.disk.private_directory import LOCK_NAME
from stowage.storage.disk.system import System
from stowage.storage.format.segment import SegmentName

LOCK_POLL_S: Final = 0.005


@dataclass(frozen=True, slots=True)
class Entry:
    """One file in the directory. `name` is None for what is not a regular file with a segment's name."""

    name: SegmentName | None
    bytes: int


class SegmentFile:
    """An open segment. Direct where the file system takes it; falls back to buffered I/O for good on EINVAL."""

    __slots__ = ("_directory", "bytes", "direct", "fd")

    def __init__(self, directory: Directory, fd: int, length: int, direct: bool) -> None:
        self._directory = directory
        self.fd = fd
        self.bytes = length
        self.direct = direct

    def read(self, buffers: list[memoryview], offset: int) -> int:
        """Fills the buffers from `offset`; fewer bytes only where the file ends. Raises OSError."""
        direct = self.direct
        try:
            return read_exact(self._directory.system.files, self.fd, buffers, offset, direct)
        except OSError as error:
            self._fall_back(error, direct)
            return read_exact(self._directory.system.files, self.fd, buffers, offset, self.direct)

    def write(self, buffers: list[memoryview], offset: int) -> None:
        """Writes all. Any number of threads at a time. Raises OSError."""
        direct = self.direct
        try:
            write_all(self._directory.system.files, self.fd, buffers, offset)
        except OSError as error:
            self._fall_back(error, direct)
            write_all(self._directory.system.files, self.fd, buffers, offset)

    def _fall_back(self, error: OSError, direct: bool) -> None:
        """`direct`: what the call was that failed; another thread may have fallen back since."""
        if error.errno != errno.EINVAL or not direct:
            raise error
        self._directory.system.descriptors.make_buffered(self.fd)
        self.direct = False
        self._directory.give_up_direct()

    def allocate(self, length: int) -> None:
        """Makes the file that long, on disk. Raises OSError."""
        self._directory.system.files.allocate(self.fd, length)
        self.bytes = length

    def truncate(self, length: int) -> None:
        self._directory.system.files.truncate(self.fd, length)
        self.bytes = length

    def is_reclaimed(self) -> bool:
        """Whether the file was emptied and unlinked while it was open."""
        return self._directory.system.descriptors.status(self.fd).length == 0

    def lock(self) -> bool:
        """Takes the writer's lock if nobody has it; held until the file is closed or the process is gone."""
        return self._directory.system.descriptors.lock(self.fd)

    def close(self) -> None:
        if self.fd >= 0:
            self._directory.system.descriptors.close(self.fd)
            self.fd = -1

    def __enter__(self) -> SegmentFile:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class Directory:
    """A directory that is ours alone. Raises DirectoryError, with the command that repairs it, where it is not."""

    def __init__(self, path: Path, limit_bytes: int, system: System, counters: Counters, direct: bool) -> None:
        self.path = path
        self.limit_bytes = limit_bytes
        self.system = system
        self.direct = direct and hasattr(os, "O_DIRECT")
        self._counters = counters
        self._fd = system.descriptors.open_directory(path)
        self._before = -1
        self._is_missing = False
        try:
            self._check_writable()
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        for fd in (self._fd, self._before):
            if fd >= 0:
                self.system.descriptors.close(fd)
        self._fd = self._before = -1

    def is_removed(self) -> bool:
        """Whether the directory was removed while open; counted once. To be asked now and then. Raises OSError."""
        if self._before >= 0:
            self.system.descriptors.close(self._before)
            self._before = -1
        gone = self.system.descriptors.status(self._fd).links == 0
        if gone and not self._is_missing:
            self._counters.add("removed_directories")
        self._is_missing = gone
        return gone

    def renew(self) -> None:
        """Opens what is there now instead of what was removed, or makes it. Raises OSError if it cannot be used."""
        try:
            fd = self.system.descriptors.open_directory(self.path)
        except DirectoryError as error:
            raise OSError(errno.ENOENT, str(error)) from error
        # Readers may be about to use the old one, where they rightly find nothing: it is closed at the next look.
        self._before, self._fd, self._is_missing = self._fd, fd, False

    def give_up_direct(self) -> None:
        """The file system refused direct I/O: buffered from now on."""
        self._counters.add("direct_fallbacks")
        self.direct = False

    def _check_writable(self) -> None:
        try:
            self.system.descriptors.close(self._open_lock())
        except OSError as error:
            raise DirectoryError(
                f"Cannot use {self.path} as cache directory: its lock file cannot be opened ({error.strerror}). "
                f"Check its permissions and the mount, or choose another directory."
            ) from error

    def _open_lock(self) -> int:
        fd = self.system.files.open(LOCK_NAME, os.O_RDWR | os.O_CREAT, self._fd)
        try:
            found = self.system.descriptors.status(fd)
            if found.links and not found.ours:  # without links: somebody removed it just now
                raise OSError(errno.EPERM, "it is not a regular file of yours with one name")
        except BaseException:
            self.system.descriptors.close(fd)
            raise
        return fd

    @contextlib.contextmanager
    def locked(self, timeout_s: float) -> Iterator[bool]:
        """The directory's lock, among threads and processes. Yields False if it was not to be had in time."""
        fd = self._acquire(self.system.timer() + timeout_s)
        try:
            yield fd is not None
        finally:
            if fd is not None:
                self.system.descriptors.close(fd)

    def _acquire(self, until_s: float) -> int | None:
        descriptors = self.system.descriptors
        while True:
            fd = self._open_lock()
            held = False
            try:
                # Somebody may have removed the file in between: then others lock another one.
                if descriptors.lock(fd):
                    held = descriptors.status(fd).inode == descriptors.status(self._fd, LOCK_NAME).inode
            except FileNotFoundError:
                pass
            finally:
                if not held:
                    descriptors.close(fd)
            if held:
                return fd
            if self.system.timer() >= until_s:
                return None
            self.system.sleep(LOCK_POLL_S)

    def entries(self) -> list[Entry]:
        """What lies in the directory, oldest segment first; its own blocks are an entry too. Raises OSError."""
        descriptors = self.system.descriptors
        found = [Entry(None, descriptors.status(self._fd).bytes)]
        for text, status in descriptors.listing(self._fd):
            found.append(Entry(SegmentName.parse(text) if status.ours else None, status.bytes))
        found.sort(key=lambda entry: (entry.name.sequence, entry.name.id) if entry.name else (-1, b""))
        return found

    def capacity_bytes(self) -> int:
        """What the file system has in all; 0: it does not say."""
        return self.system.descriptors.capacity(self._fd)

    def open_segment(self, name: SegmentName, *, writable: bool = False) -> SegmentFile:
        """An existing segment. Raises OSError (ENOENT: reclaimed), FormatError for what must not be read."""
        file = self._open(str(name), os.O_RDWR if writable else os.O_RDONLY)
        try:
            status = self.system.descriptors.status(file.fd)
            if not status.links:  # reclaimed since it was opened
                raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(name))
            if not status.ours:
                raise FormatError(f"{name} is not a regular file of ours")
        except BaseException:
            file.close()
            raise
        file.bytes = status.length
        return file

    def create_segment(self, name: SegmentName) -> SegmentFile:
        """A new, empty, locked file. The directory's lock must be held. Raises OSError."""
        file = self._open(str(name), os.O_RDWR | os.O_CREAT | os.O_EXCL)
        try:
            if not file.lock():
                raise OSError(errno.EBUSY, "a new segment is locked by somebody else")
        except BaseException:
            file.close()
            raise
        return file

    def remove_segment(self, name: SegmentName) -> bool:
        """Frees the segment's space at once, even where others have it open. False if a live writer has it."""
        try:
            with self.open_segment(name, writable=True) as file:
                if not file.lock():
                    return False
                file.truncate(0)
                self.unlink(name)
        except FileNotFoundError:
            pass
        return True

    def unlink(self, name: SegmentName) -> None:
        """Removes the name. Raises OSError."""
        self.system.files.unlink(str(name), self._fd)

    def _open(self, name: str, flags: int) -> SegmentFile:
        if self.direct:
            try:
                return SegmentFile(self, self.system.files.open(name, flags | os.O_DIRECT, self._fd), 0, True)
            except OSError as error:
                if error.errno != errno.EINVAL:
                    raise
                self.give_up_direct()
                flags &= ~os.O_EXCL  # some systems create the file before they refuse
        return SegmentFile(self, self.system.files.open(name, flags, self._fd), 0, False)
