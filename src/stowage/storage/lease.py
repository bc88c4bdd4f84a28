"""A lease of a part of one budget of memory, which the engines of a node share: the parts never sum above it.

A budget is a directory with one file per engine, which tells its bytes. All processes that map the memory hold a lock
on that file for as long as they live, so the part of a killed engine is free when the last of them has gone, and not
before. Nothing has to clean up.
"""

from __future__ import annotations

import fcntl
import os
import tempfile
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from stowage.config.memory import format_size
from stowage.errors import BudgetError, DirectoryError

_GATE = "gate"
_SUFFIX = ".part"
_NUMBER_BYTES = 32
"""Of a part's file; behind it stands what its engine publishes."""
_FILE_BYTES_MAX = 4096


def budget_directory(name: str) -> Path:
    """Where this user's engines on this machine meet for the budget ``name``."""
    base = os.environ.get("XDG_RUNTIME_DIR") or tempfile.gettempdir()
    return Path(base) / f"stowage-{os.getuid()}" / "budgets" / name


class Lease:
    """A part of a shared budget: ``nbytes`` of a budget of ``limit_bytes``, until ``release`` or the end of all
    processes that ``hold`` it.

    Raises BudgetError when so much is not left, DirectoryError for a directory that cannot be used.
    """

    def __init__(self, directory: Path, nbytes: int, limit_bytes: int) -> None:
        gate = _gate(directory)
        try:
            taken = sum(_parts_of_the_living(directory))
            if taken + nbytes > limit_bytes:
                raise BudgetError(
                    f"host_memory is {format_size(nbytes)}, and of the node's {format_size(limit_bytes)} other engines "
                    f"hold {format_size(taken)}. Give each engine a smaller host_memory, or node_host_memory a larger "
                    "one."
                )
            self.path = directory / f"{os.getpid()}-{uuid.uuid4().hex}{_SUFFIX}"
            self._file = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
            try:
                fcntl.flock(self._file, fcntl.LOCK_SH)
                os.write(self._file, str(nbytes).encode().ljust(_NUMBER_BYTES))
            except OSError:
                self.release()
                raise
        except OSError as error:
            raise _unusable(directory, error) from error
        finally:
            os.close(gate)

    def publish(self, table: str, arena: str, name: bytes) -> None:
        """Tell neighbours where this engine's memory is, and its table (`storage.host_table`) of that name."""
        os.write(self._file, f"\n{table}\n{arena}\n{name.hex()}\n".encode())

    def release(self) -> None:
        """The memory is unmapped here. Releasing again does nothing."""
        if self._file >= 0:
            os.close(self._file)
            self._file = -1


def hold(path: str) -> int:
    """Keep a lease for as long as this process lives, or until the descriptor that is returned is closed."""
    file = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    fcntl.flock(file, fcntl.LOCK_SH)
    return file


@dataclass(frozen=True)
class Published:
    """What the engine of a part has published."""

    part: Path
    table: str
    arena: str
    name: bytes


def published(directory: Path) -> Iterator[Published]:
    """By each engine of a budget, also by those that have ended since the last start."""
    for part in sorted(directory.glob(f"*{_SUFFIX}")):
        try:
            file = os.open(part, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
        except OSError:
            continue  # removed meanwhile
        try:
            told = os.read(file, _FILE_BYTES_MAX)[_NUMBER_BYTES:].decode("ascii", "replace").split("\n")
        finally:
            os.close(file)
        if len(told) == 5:
            yield Published(part, told[1], told[2], bytes.fromhex(told[3]))


def held_bytes(directory: Path) -> int:
    """What living engines hold of a budget. Raises DirectoryError for a directory that cannot be used."""
    if not directory.exists():
        return 0
    gate = _gate(directory)
    try:
        return sum(_parts_of_the_living(directory))
    finally:
        os.close(gate)


def _gate(directory: Path) -> int:
    """Holds the gate until the descriptor is closed: for a few file operations, by whoever starts."""
    try:
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        gate = os.open(directory / _GATE, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    except OSError as error:
        raise _unusable(directory, error) from error
    if os.fstat(gate).st_uid != os.getuid():
        os.close(gate)
        raise DirectoryError(f"The budget's directory {directory} is another user's. Remove it.")
    fcntl.flock(gate, fcntl.LOCK_EX)
    return gate


def _unusable(directory: Path, error: OSError) -> DirectoryError:
    return DirectoryError(
        f"The budget's directory {directory} cannot be used ({error.strerror}). Set XDG_RUNTIME_DIR to a directory of "
        "yours."
    )


def _parts_of_the_living(directory: Path) -> list[int]:
    """Bytes of each part that some process holds; the others are removed. Under the gate."""
    found = []
    for path in directory.glob(f"*{_SUFFIX}"):
        file = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            found.append(int(os.read(file, _NUMBER_BYTES) or b"0"))
        else:
            path.unlink()
        finally:
            os.close(file)
    return found
