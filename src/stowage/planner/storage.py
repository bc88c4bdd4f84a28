"""Measures memory copies, and disk reads and writes without the page cache, in bounded time.

Owns one temporary file per measurement, which is always removed. Where a file system refuses direct reads, the file is
dropped from the page cache instead.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import numpy as np

from stowage.errors import DirectoryError
from stowage.native.memory import pages

MIB = 1 << 20
FILE_BYTES = 256 * MIB
_READ_INTO_BYTES = 16 * MIB
_ROUNDS = 3


def memcpy_bytes_per_s(threads: int, nbytes: int) -> float:
    """Best rate of copying ``nbytes`` by each of ``threads`` threads at once, between buffers no cache holds."""
    buffers = [(np.ones(nbytes, np.uint8), np.zeros(nbytes, np.uint8)) for _ in range(threads)]
    best_s = float("inf")
    for _ in range(_ROUNDS):
        best_s = min(best_s, _together([partial(np.copyto, target, source) for source, target in buffers]))
    return threads * nbytes / best_s


def _together(jobs: list[Callable[[], object]]) -> float:
    """Seconds until all jobs, each in a thread of its own, are done. Raises the first error of a job."""
    errors: list[BaseException] = []

    def run(job: Callable[[], object]) -> None:
        try:
            job()
        except OSError as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=(job,)) for job in jobs]
    began_s = time.perf_counter()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
    return max(time.perf_counter() - began_s, 1e-9)


@contextmanager
def written(directory: Path, nbytes: int) -> Iterator[tuple[Path, float]]:
    """Context: a temporary file of random bytes in ``directory``, and the rate at which it was written and synced.
    Raises ``DirectoryError`` where it cannot be written.
    """
    path = directory / f".stowage-probe-{os.getpid()}-{secrets.token_hex(4)}"
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    except OSError as error:
        what = f"no file can be made in {directory} to measure its disk: {error.strerror}. Give another directory."
        raise DirectoryError(what) from error
    try:
        try:
            piece = secrets.token_bytes(4 * MIB)
            began_s = time.perf_counter()
            for at in range(0, nbytes, len(piece)):
                os.write(descriptor, piece[: min(len(piece), nbytes - at)])
            os.fsync(descriptor)
            rate = nbytes / max(time.perf_counter() - began_s, 1e-9)
        except OSError as error:
            raise DirectoryError(f"the disk of {directory} cannot be measured: {error}.") from error
        finally:
            os.close(descriptor)
        yield path, rate
    finally:
        with contextlib.suppress(OSError):
            path.unlink()


def read_bytes_per_s(path: Path, depth: int, *, direct: bool = True) -> float:
    """Best rate of reading the file once with ``depth`` reads of 1 MiB in flight. ``direct``: with direct I/O where the
    file system supports it, else after dropping the file from the page cache. Raises ``DirectoryError``.

    Reads into huge pages, as weights are read: a disk then needs fewer operations for as many bytes (with pages of
    4 KiB a virtual disk gave 1.1 instead of 2.7 GB/s).
    """
    flags = os.O_RDONLY | os.O_CLOEXEC
    try:
        descriptor = os.open(path, flags | (os.O_DIRECT if direct else 0))
    except OSError:
        descriptor = os.open(path, flags)
    try:
        nbytes = os.fstat(descriptor).st_size
        return max(_read_once(descriptor, nbytes, depth) for _ in range(_ROUNDS))
    except OSError as error:
        raise DirectoryError(f"the disk of {path.parent} cannot be read to measure it: {error}.") from error
    finally:
        os.close(descriptor)


def forget(descriptor: int) -> None:
    """Drop the file from the page cache, except pages that are dirty or in use by a mapping."""
    os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)


def _read_once(descriptor: int, nbytes: int, depth: int) -> float:
    forget(descriptor)
    view = pages(_READ_INTO_BYTES)
    view[:] = bytes(len(view))

    def read(worker: int) -> None:
        for at in range(worker * MIB, nbytes, depth * MIB):
            into = at % _READ_INTO_BYTES
            os.preadv(descriptor, [view[into : into + MIB]], at)

    seconds = _together([partial(read, worker) for worker in range(depth)])
    return nbytes / seconds
