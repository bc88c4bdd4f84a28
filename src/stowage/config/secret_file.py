"""Opens a file that holds secrets: a regular file of this user's that nobody else can read or change, and no link."""

import os
import shlex
import stat
from pathlib import Path

from stowage.errors import ConfigError


def open_secret(path: Path, what: str, make: str, leaked: str = "") -> int:
    """A descriptor, for reading. ``what``: the file's name in messages; ``make``: the command that makes one;
    ``leaked``: what to do besides if others may have read it. Raises ConfigError for anything else than such a file.
    """
    try:
        # Without O_NONBLOCK, opening a pipe would block until something writes to it.
        fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except FileNotFoundError as error:
        raise ConfigError(f"The {what} {path} does not exist. Make one: {make}") from error
    except OSError as error:
        reason = (
            f"it is a link. Name the file itself: {os.path.realpath(path)}" if path.is_symlink() else error.strerror
        )
        raise ConfigError(f"The {what} {path} cannot be used: {reason}.") from error
    reason = _distrust(os.fstat(fd), path, leaked)
    if reason:
        os.close(fd)
        raise ConfigError(f"The {what} {path} cannot be used: {reason}.")
    return fd


def _distrust(status: os.stat_result, path: Path, leaked: str) -> str:
    """Why the file may not be used; empty: it may."""
    mode = stat.S_IMODE(status.st_mode)
    if not stat.S_ISREG(status.st_mode):
        return "it is not a regular file. Name one, or make one"
    if status.st_uid != os.geteuid():
        return f"it belongs to user {status.st_uid}, you are user {os.geteuid()}. Use one of your own"
    if mode & 0o177:
        way_out = f"chmod 600 {shlex.quote(str(path))}{leaked}"
        return f"its mode {mode:04o} lets others read or change it, or run it. Way out: {way_out}"
    return ""
