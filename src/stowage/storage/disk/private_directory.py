"""Opens the cache directory, which only this user may enter (mode 0700); an error names the command that repairs it."""

from __future__ import annotations

import contextlib
import os
import stat
from pathlib import Path
from typing import Final

from stowage.errors import DirectoryError

LOCK_NAME: Final = "lock"
"""The file that every cache directory has."""


def open_private(path: Path) -> int:
    """A descriptor of the directory, made 0700 (with its parents) where it is missing. Follows no link at its end.

    Raises DirectoryError.
    """
    fd = _open(path)
    try:
        _make_private(fd, path)
    except BaseException:
        os.close(fd)
        raise
    return fd


def _open(path: Path) -> int:
    try:
        missing = [path]
        while not missing[-1].parent.exists():
            missing.append(missing[-1].parent)
        for directory in reversed(missing):
            with contextlib.suppress(FileExistsError):
                os.mkdir(directory, 0o700)
                if stat.S_IMODE(os.lstat(directory).st_mode) & 0o700 != 0o700:
                    os.chmod(directory, 0o700)  # a umask that takes rights from the owner
        return os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError as error:
        if os.path.islink(path):  # unlike Path.is_symlink this never raises
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
