"""A directory for what is not finished: locked, removed at the end, or by the next one where its process was killed."""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Final

_FLAGS: Final = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC


@contextmanager
def scratch_directory(place: Path, pattern: str, grace_s: float = 0.0) -> Iterator[Path]:
    """Context: a new directory in ``place``, removed at the end, together with those that killed processes of this user
    left there: nobody has locked them, for ``grace_s`` at least. ``pattern``: of their names, a prefix and wildcards.
    Where file systems lock no directories, those stay. Raises OSError.
    """
    for left in place.glob(pattern):
        with suppress(OSError), _opened(left) as descriptor:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            made = os.fstat(descriptor)
            if made.st_uid == os.geteuid() and time.time() - made.st_mtime >= grace_s:
                shutil.rmtree(left, ignore_errors=True)
    directory, descriptor = _made(place, pattern.rstrip("*?"))
    try:
        yield directory
    finally:
        shutil.rmtree(directory, ignore_errors=True)
        os.close(descriptor)


def _made(place: Path, prefix: str) -> tuple[Path, int]:
    """A new directory and the descriptor of its lock. A directory that is not locked counts as left behind."""
    while True:
        directory = Path(tempfile.mkdtemp(prefix=prefix, dir=place))
        try:
            descriptor = os.open(directory, _FLAGS)
        except FileNotFoundError:
            continue
        with suppress(OSError):
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        if directory.exists():
            return directory, descriptor
        os.close(descriptor)


@contextmanager
def _opened(directory: Path) -> Iterator[int]:
    descriptor = os.open(directory, _FLAGS)
    try:
        yield descriptor
    finally:
        os.close(descriptor)
