"""A file system that fails on demand, for tests of the disk tier and of whatever is built on it.

Real files underneath; only the calls that a test names go wrong. Faults are armed per operation ("open", "preadv",
"pwritev", "allocate", "truncate", "unlink"), let `after` calls pass, and hit the next `times` calls. Any number of
threads.
"""

from __future__ import annotations

import os
import threading
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final

from stowage.storage.disk.files import FileSystem, RealFileSystem

OPERATIONS: Final = frozenset({"open", "preadv", "pwritev", "allocate", "truncate", "unlink"})
FOREVER: Final = 1 << 60
HANG_S_MAX: Final = 60.0


@dataclass(frozen=True, slots=True)
class Hang:
    """A call that waits: `reached` is set when it is entered; it goes on after `release()` (or a minute)."""

    reached: threading.Event = field(default_factory=threading.Event)
    released: threading.Event = field(default_factory=threading.Event)

    def release(self) -> None:
        self.released.set()


@dataclass(slots=True)
class _Fault:
    operation: str
    after: int
    times: int
    errno: int = 0
    bytes_max: int = FOREVER
    rotten_bit: int = -1
    hang: Hang | None = None
    only: Callable[[int], bool] = lambda _: True


class FaultyFileSystem:
    """Implements FileSystem. `calls` counts them by name, also those that failed."""

    def __init__(self, real: FileSystem | None = None) -> None:
        self.calls: Counter[str] = Counter()
        self._real = real or RealFileSystem()
        self._lock = threading.Lock()
        self._faults: list[_Fault] = []

    def fail(self, operation: str, errno: int, *, after: int = 0, times: int = FOREVER) -> None:
        """The calls raise OSError(errno)."""
        self._arm(_Fault(operation, after, times, errno=errno))

    def fail_flags(self, flags: int, errno: int) -> None:
        """Opening with any of these flags raises, as a file system without O_DIRECT does."""
        self._arm(_Fault("open", 0, FOREVER, errno=errno, only=lambda given: bool(given & flags)))

    def shorten(self, operation: str, bytes_max: int, *, after: int = 0, times: int = FOREVER) -> None:
        """The calls move at most that many bytes."""
        self._arm(_Fault(operation, after, times, bytes_max=bytes_max))

    def rot(self, bit: int, *, after: int = 0, times: int = FOREVER) -> None:
        """The reads come back with that bit (counted from the first byte read) flipped; modulo what was read."""
        self._arm(_Fault("preadv", after, times, rotten_bit=bit))

    def hang(self, operation: str, *, after: int = 0, times: int = 1) -> Hang:
        """The calls wait until they are released."""
        hang = Hang()
        self._arm(_Fault(operation, after, times, hang=hang))
        return hang

    def heal(self) -> None:
        """Disarms everything; hanging calls go on hanging until released."""
        with self._lock:
            self._faults.clear()

    def _arm(self, fault: _Fault) -> None:
        assert fault.operation in OPERATIONS, fault.operation
        with self._lock:
            self._faults.append(fault)

    def _strike(self, operation: str, flags: int = 0) -> _Fault | None:
        """The fault that hits this call, used up by one. Raises for one that fails; waits for one that hangs."""
        with self._lock:
            self.calls[operation] += 1
            fault = self._next(operation, flags)
        if fault is None:
            return None
        if fault.hang is not None:
            fault.hang.reached.set()
            fault.hang.released.wait(HANG_S_MAX)
        if fault.errno:
            raise OSError(fault.errno, os.strerror(fault.errno))
        return fault

    def _next(self, operation: str, flags: int) -> _Fault | None:
        for fault in self._faults:
            if fault.operation != operation or not fault.only(flags) or not fault.times:
                continue
            if fault.after:
                fault.after -= 1
                continue
            fault.times -= 1
            return fault
        return None

    def open(self, name: str, flags: int, dir_fd: int) -> int:
        self._strike("open", flags)
        return self._real.open(name, flags, dir_fd)

    def preadv(self, fd: int, buffers: list[memoryview], offset: int) -> int:
        fault = self._strike("preadv")
        done = self._real.preadv(fd, _first(buffers, fault), offset)
        if fault is not None and fault.rotten_bit >= 0 and done:
            _flip(buffers, fault.rotten_bit % (8 * done))
        return done

    def pwritev(self, fd: int, buffers: list[memoryview], offset: int) -> int:
        return self._real.pwritev(fd, _first(buffers, self._strike("pwritev")), offset)

    def allocate(self, fd: int, length: int) -> None:
        self._strike("allocate")
        self._real.allocate(fd, length)

    def truncate(self, fd: int, length: int) -> None:
        self._strike("truncate")
        self._real.truncate(fd, length)

    def unlink(self, name: str, dir_fd: int) -> None:
        self._strike("unlink")
        self._real.unlink(name, dir_fd)


def _first(buffers: list[memoryview], fault: _Fault | None) -> list[memoryview]:
    """The buffers cut to what the fault lets through."""
    left = fault.bytes_max if fault is not None else FOREVER
    cut = []
    for buffer in buffers:
        if left <= 0:
            break
        cut.append(buffer[:left])
        left -= buffer.nbytes
    return cut


def _flip(buffers: list[memoryview], bit: int) -> None:
    at, mask = bit // 8, 1 << bit % 8
    for buffer in buffers:
        if at < buffer.nbytes:
            buffer[at] ^= mask
            return
        at -= buffer.nbytes
