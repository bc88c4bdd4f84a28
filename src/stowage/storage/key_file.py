"""The key file: the secrets that data at rest is protected with, one per line, the first for writing, all for reading.

    stowage-key-1 <64 hex digits>

A file that others could read or have made is refused, with the command that repairs it. Nothing here prints, logs or
raises with a secret; keys are known by their ids. Changes are atomic: whoever reads sees the old file or the new one.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import secrets
import shlex
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from stowage.config.secret_file import open_secret
from stowage.errors import ConfigError
from stowage.storage.format.protection import SECRET_BYTES, Method, Protection, SecretKey

KEYS_MAX: Final = 64
_LINE: Final = re.compile(rb"stowage-key-1 ([0-9a-f]{64})")
_FILE_BYTES_MAX: Final = 4 * KEYS_MAX * 80
_LOCK_TIMEOUT_S: Final = 5.0


def read(path: Path) -> list[SecretKey]:
    """The keys, the writing one first; at least one. Raises ConfigError."""
    fd = _open(path)
    try:
        return _read(fd, path)
    finally:
        os.close(fd)


def protection(label: str, path: Path | None) -> Protection:
    """What `disk_protection` and `disk_key_file` mean. Raises ConfigError."""
    return Protection(Method.labelled(label), read(path) if path is not None else ())


def _make_directories(path: Path) -> None:
    """`mkdir -p`, with mode 0700 for each one that is made (`Path.mkdir` gives its mode to the last one only). Where
    a file is in the way, whoever opens something below it will say so.
    """
    if not path.exists():
        _make_directories(path.parent)
        with contextlib.suppress(FileExistsError):
            path.mkdir(mode=0o700)


def make(path: Path) -> SecretKey:
    """A new file with one new key; its directories are yours alone. Raises ConfigError, also if it is there."""
    key = SecretKey(secrets.token_bytes(SECRET_BYTES))
    try:
        _make_directories(path.parent)
        _write(path, [key])
        _sync(path.parent)
    except FileExistsError as error:
        raise ConfigError(
            f"{path} exists already, and is left as it is. To put a new key in front of its keys: "
            f"stowage key rotate {_quoted(path)}"
        ) from error
    except OSError as error:
        raise ConfigError(
            f"The key file {path} cannot be made: {error.strerror}. Name a file in a directory of yours."
        ) from error
    return key


def rotate(path: Path) -> SecretKey:
    """Puts a new key in front, and returns it. Raises ConfigError."""
    with _changing(path) as keys:
        if len(keys) >= KEYS_MAX:
            raise ConfigError(
                f"{path} holds {len(keys)} keys, the most there may be. Drop one that no data needs any more, "
                f"for example the oldest: stowage key drop {_quoted(path)} {keys[-1].id.hex()}"
            )
        keys.insert(0, SecretKey(secrets.token_bytes(SECRET_BYTES)))
    return keys[0]


def drop(path: Path, key_id: str) -> None:
    """Removes the key with that id (hex). Never the writing one. Raises ConfigError."""
    with _changing(path) as keys:
        known = [key.id.hex() for key in keys]
        if key_id.lower() not in known:
            raise ConfigError(f"{path} holds no key {key_id}. It holds: {', '.join(known)}.")
        at = known.index(key_id.lower())
        if at == 0:
            raise ConfigError(
                f"{key_id} is the key that new data is written with. Put a new one in front first: "
                f"stowage key rotate {_quoted(path)}"
            )
        del keys[at]


@contextlib.contextmanager
def _changing(path: Path) -> Iterator[list[SecretKey]]:
    """The file's keys, to be changed by the caller; they replace the file's when it is done. One change at a time."""
    fd = _lock(path)
    try:
        keys = _read(fd, path)
        yield keys
        temporary = path.with_name(f".{path.name}.{secrets.token_hex(8)}")
        try:
            _write(temporary, keys)
            temporary.replace(path)
            _sync(path.parent)
        except OSError as error:
            with contextlib.suppress(FileNotFoundError):
                temporary.unlink()
            raise ConfigError(f"The key file {path} cannot be changed: {error.strerror}.") from error
    finally:
        os.close(fd)


def _lock(path: Path) -> int:
    """The open file, locked, and still the one of that name."""
    until_s = time.monotonic() + _LOCK_TIMEOUT_S
    while time.monotonic() < until_s:
        fd = _open(path)
        with contextlib.suppress(BlockingIOError, FileNotFoundError):
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if os.fstat(fd).st_ino == os.stat(path, follow_symlinks=False).st_ino:
                return fd
        os.close(fd)
        time.sleep(0.01)
    raise ConfigError(f"The key file {path} cannot be changed: another process is changing it. Try again.")


def _open(path: Path) -> int:
    name = _quoted(path)
    leaked = f", and if others may have read it: stowage key rotate {name}"
    return open_secret(path, "key file", f"stowage key new {name}", leaked)


def _read(fd: int, path: Path) -> list[SecretKey]:
    try:
        data = os.pread(fd, _FILE_BYTES_MAX + 1, 0)
    except OSError as error:
        raise ConfigError(f"The key file {path} cannot be read: {error.strerror}.") from error
    keys: list[SecretKey] = []
    for number, line in enumerate(data.removesuffix(b"\n").split(b"\n"), start=1):
        match = _LINE.fullmatch(line)
        if match is None:  # the line is not shown: it may be a secret with a typing error
            what = "It is empty" if not data else f"Line {number} is not `stowage-key-1` and 64 hex digits"
            raise ConfigError(f"The key file {path} cannot be used. {what}.")
        key = SecretKey(bytes.fromhex(match[1].decode("ascii")))
        if any(key.id == other.id for other in keys):
            raise ConfigError(f"The key file {path} cannot be used. Line {number} holds a key for the second time.")
        keys.append(key)
    if len(keys) > KEYS_MAX:
        raise ConfigError(f"The key file {path} cannot be used. It holds more than {KEYS_MAX} keys.")
    return keys


def _write(path: Path, keys: list[SecretKey]) -> None:
    """A new file, on the disk when this returns. Raises OSError; then there is none."""
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    try:
        os.fchmod(fd, 0o600)
        text = "".join(f"stowage-key-1 {key.reveal()}\n" for key in keys).encode("ascii")
        while text:
            text = text[os.write(fd, text) :]
        os.fsync(fd)
    except BaseException:
        os.unlink(path)
        raise
    finally:
        os.close(fd)


def _sync(directory: Path) -> None:
    """Makes a name in it survive a power cut."""
    fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def _quoted(path: Path) -> str:
    return shlex.quote(str(path))
