"""Buffers that packed bytes are read into until they are unpacked. Their limits say how far reading runs ahead.

In a virtual machine a disk fills memory more slowly while that memory's cache lines are held by a core other than the
one that serves the disk: 1.7 instead of 2.5 GB/s (docs/benchmarks.md, "Lossless compression"). So ``flush_from_caches``
flushes what the disk tier has unpacked. Streamed weights gained nothing from it.
"""

from __future__ import annotations

from typing import Final

from stowage.native import extension, is_wanted
from stowage.native.memory import pages

IN_FLIGHT_BYTES_MAX: Final = 9 << 20
"""Packed bytes that reads are under way for: three runs. A disk that reports several reads together idles after each
report, so it should not have to report often."""
HELD_BYTES_MAX: Final = 15 << 20
"""Packed bytes that are being read or wait to be unpacked. With less, the disk waits for the processors."""


class ReadBuffers:
    """A pool of buffers of ``buffer_bytes``, for one read each. Longer reads get a buffer of their own. Not
    thread-safe. The buffer that was released last is handed out first, so that no more memory is touched than needed.
    """

    def __init__(self, buffer_bytes: int) -> None:
        self._buffer_bytes = buffer_bytes
        self._free: list[memoryview] = []
        self._held_bytes = self._in_flight_bytes = 0

    @property
    def can_acquire(self) -> bool:
        """Whether another read may begin. If not, a read has to end or a buffer has to be released first."""
        return self._in_flight_bytes < IN_FLIGHT_BYTES_MAX and self._held_bytes < HELD_BYTES_MAX

    def acquire(self, nbytes: int) -> memoryview:
        """A page-aligned buffer of at least ``nbytes``; `read_done`, then `release` follow. Raises OSError."""
        if nbytes > self._buffer_bytes:
            buffer = pages(nbytes)
        else:
            buffer = self._free.pop() if self._free else pages(self._buffer_bytes)
        self._held_bytes += nbytes
        self._in_flight_bytes += nbytes
        return buffer

    def read_done(self, nbytes: int) -> None:
        """The read that a buffer was acquired for with this ``nbytes`` has ended, well or not."""
        self._in_flight_bytes -= nbytes

    def release(self, buffer: memoryview, nbytes: int) -> None:
        """Return a buffer that was acquired with this ``nbytes``."""
        self._held_bytes -= nbytes
        if nbytes <= self._buffer_bytes:
            self._free.append(buffer)

    def check(self) -> None:
        """What is being read is held."""
        assert 0 <= self._in_flight_bytes <= self._held_bytes


def flush_from_caches(memory: memoryview) -> None:
    """Flush the memory's cache lines: no processor reads it soon, and a device writes to it next. Releases the
    interpreter's lock. Does nothing without compiled code, or where the processor has no ``clflushopt``.
    """
    if is_wanted():
        extension.flush_from_caches(memory)
