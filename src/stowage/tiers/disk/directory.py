"""The cache directory: who may use it, what lies in it, how much it takes, and the lock over all of that.

Owns the directory's descriptor. Every file is opened relative to it, without following links, and only if it is a
regular file of ours with one name. Nothing else there is opened or removed, but all of it counts towards the limit.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import stat
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from stowage.errors import DirectoryError, FormatError
from stowage.format.segment import SegmentName
from stowage.tiers.disk.counters import Counters
from stowage.tiers.disk.files import FileSystem, read_exact, write_all

__all__ = ["Directory", "Entry", "SegmentFile"]

LOCK_NAME: Final = "lock"
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
        try:
            return read_exact(self._directory.files, self.fd, buffers, offset, self.direct)
        except OSError as error:
            self._fall_back(error)
            return read_exact(self._directory.files, self.fd, buffers, offset, self.direct)

    def write(self, buffers: list[memoryview], offset: int) -> None:
        """Writes all. Raises OSError."""
        try:
            write_all(self._directory.files, self.fd, buffers, offset)
        except OSError as error:
            self._fall_back(error)
            write_all(self._directory.files, self.fd, buffers, offset)

    def _fall_back(self, error: OSError) -> None:
        if error.errno != errno.EINVAL or not self.direct:
            raise error
        flags = fcntl.fcntl(self.fd, fcntl.F_GETFL)
        fcntl.fcntl(self.fd, fcntl.F_SETFL, flags & ~os.O_DIRECT)
        self.direct = False
        self._directory.give_up_direct()

    def truncate(self, length: int) -> None:
        self._directory.files.truncate(self.fd, length)
        self.bytes = length

    def is_reclaimed(self) -> bool:
        """Whether the file was emptied and unlinked while it was open."""
        return os.fstat(self.fd).st_size == 0

    def lock(self) -> bool:
        """Takes the writer's lock if nobody has it; held until the file is closed or the process is gone."""
        try:
            fcntl.flock(self.fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            return False
        return True

    def close(self) -> None:
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1

    def __enter__(self) -> SegmentFile:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class Directory:
    """A directory that is ours alone. Raises DirectoryError, with the command that repairs it, where it is not."""

    def __init__(self, path: Path, limit_bytes: int, files: FileSystem, counters: Counters, direct: bool) -> None:
        self.path = path
        self.limit_bytes = limit_bytes
        self.files = files
        self.direct = direct and hasattr(os, "O_DIRECT")
        self._counters = counters
        self._fd = _open_directory(path)
        try:
            _make_private(self._fd, path)
            self._check_writable()
        except BaseException:
            os.close(self._fd)
            raise

    def close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def give_up_direct(self) -> None:
        """The file system refused direct I/O: buffered from now on."""
        self._counters.add("direct_fallbacks")
        self.direct = False

    def _check_writable(self) -> None:
        try:
            os.close(self._open_lock())
        except OSError as error:
            raise DirectoryError(
                f"Cannot use {self.path} as cache directory: its lock file cannot be opened ({error.strerror}). "
                f"Check its permissions and the mount, or choose another directory."
            ) from error

    def _open_lock(self) -> int:
        fd = self.files.open(LOCK_NAME, os.O_RDWR | os.O_CREAT, self._fd)
        os.fchmod(fd, 0o600)
        return fd

    @contextlib.contextmanager
    def locked(self, timeout_s: float) -> Iterator[bool]:
        """The directory's lock, among threads and processes. Yields False if it was not to be had in time."""
        fd = self._acquire(time.monotonic() + timeout_s)
        try:
            yield fd is not None
        finally:
            if fd is not None:
                os.close(fd)

    def _acquire(self, until_s: float) -> int | None:
        while True:
            fd = self._open_lock()
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                # Somebody may have removed the file in between: then others lock another one.
                if os.fstat(fd).st_ino == os.stat(LOCK_NAME, dir_fd=self._fd, follow_symlinks=False).st_ino:
                    return fd
            except (BlockingIOError, FileNotFoundError):
                pass
            except BaseException:
                os.close(fd)
                raise
            os.close(fd)
            if time.monotonic() >= until_s:
                return None
            time.sleep(LOCK_POLL_S)

    def entries(self) -> list[Entry]:
        """What lies in the directory, oldest segment first; its own blocks are an entry too. Raises OSError."""
        own = os.fstat(self._fd)
        found = [Entry(None, _size(own))]
        # A descriptor of its own: scandir's position would be shared between threads.
        fd = os.open(".", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC, dir_fd=self._fd)
        try:
            with os.scandir(fd) as listing:
                for item in listing:
                    try:
                        status = item.stat(follow_symlinks=False)
                    except FileNotFoundError:
                        continue
                    name = SegmentName.parse(item.name)
                    if name is not None and not _is_ours(status):
                        name = None
                    found.append(Entry(name, _size(status)))
        finally:
            os.close(fd)
        found.sort(key=lambda entry: (entry.name.sequence, entry.name.id) if entry.name else (-1, b""))
        return found

    def open_segment(self, name: SegmentName, *, writable: bool = False) -> SegmentFile:
        """An existing segment. Raises OSError (ENOENT: reclaimed), FormatError for what must not be read."""
        file = self._open(str(name), os.O_RDWR if writable else os.O_RDONLY)
        status = os.fstat(file.fd)
        if not _is_ours(status):
            file.close()
            raise FormatError(f"{name} is not a regular file of ours")
        file.bytes = status.st_size
        return file

    def create_segment(self, name: SegmentName) -> SegmentFile:
        """A new, empty, locked file. The directory's lock must be held. Raises OSError."""
        file = self._open(str(name), os.O_RDWR | os.O_CREAT | os.O_EXCL)
        try:
            os.fchmod(file.fd, 0o600)
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
        self.files.unlink(str(name), self._fd)

    def _open(self, name: str, flags: int) -> SegmentFile:
        if self.direct:
            try:
                return SegmentFile(self, self.files.open(name, flags | os.O_DIRECT, self._fd), 0, True)
            except OSError as error:
                if error.errno != errno.EINVAL:
                    raise
                self.give_up_direct()
                flags &= ~os.O_EXCL  # some systems create the file before they refuse
        return SegmentFile(self, self.files.open(name, flags, self._fd), 0, False)


def _size(status: os.stat_result) -> int:
    return max(status.st_size, status.st_blocks * 512)


def _is_ours(status: os.stat_result) -> bool:
    return stat.S_ISREG(status.st_mode) and status.st_nlink == 1 and status.st_uid == os.geteuid()


def _open_directory(path: Path) -> int:
    """Creates the directory (and its parents, 0700) where it is missing. Never follows a link in its last part."""
    missing = [path]
    while not missing[-1].parent.exists():
        missing.append(missing[-1].parent)
    try:
        for directory in reversed(missing):
            with contextlib.suppress(FileExistsError):
                os.mkdir(directory, 0o700)
        return os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError as error:
        if path.is_symlink():
            reason = f"it is a symbolic link. Name the directory itself: {os.path.realpath(path)}"
        else:
            reason = f"{error.strerror}. Choose a directory that you can write in"
        raise DirectoryError(f"Cannot use {path} as cache directory: {reason}.") from error


def _make_private(fd: int, path: Path) -> None:
    """Refuses a directory that others own or can write in. One that others can read is made private if nothing of
    theirs can be in it."""
    status = os.fstat(fd)
    if status.st_uid != os.geteuid():
        raise DirectoryError(
            f"Cannot use {path} as cache directory: it belongs to user {status.st_uid}, you are user {os.geteuid()}. "
            f"Choose a directory of your own, or: chown {os.geteuid()} {path}"
        )
    mode = stat.S_IMODE(status.st_mode)
    if not mode & 0o077:
        if mode != 0o700:
            os.fchmod(fd, 0o700)
        return
    names = os.listdir(fd)
    ours = LOCK_NAME in names
    if mode & 0o022 or (names and not ours):
        reason = "other users can write in it" if mode & 0o022 else "it holds other files, and other users can read it"
        # Advice to close a directory that serves others too, such as /tmp or /etc, would do harm.
        fix = f"chmod 700 {path}" if ours or not names else f"mkdir -m 700 {path / 'stowage'}, and name that one"
        raise DirectoryError(f"Cannot use {path} as cache directory: {reason} (mode {mode:04o}). Way out: {fix}")
    os.fchmod(fd, 0o700)
