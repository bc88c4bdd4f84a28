"""Memory that packed bytes are read into until they are unpacked, and how far reading goes ahead of unpacking.

A device that is a processor of a virtual machine's host fills memory more slowly while its lines lie in a cache that is
not its own: 1.6 instead of 2.5 GB/s here, for as long as the host has it run there (docs/benchmarks.md, "Lossless
compression"). So chunks' bytes leave the caches once they are unpacked; streamed weights came no sooner for it.
"""

from __future__ import annotations

from typing import Final

from stowage.native import extension, is_wanted
from stowage.native.memory import pages

__all__ = ["Staging", "leave_caches"]

READING_BYTES: Final = 9 << 20
"""Of what lies packed, before no more is asked for at a time: three runs. A disk that tells of several reads together
idles after each time that it tells, so it should not be too often."""
STAGED_BYTES: Final = 15 << 20
"""That are lent, before no more are: with less a disk waits for processors."""


class Staging:
    """Lent for one run each, mostly of up to ``room_bytes``. Not for several threads at once. What came back last is
    lent first, so that no more is used than is needed.
    """

    def __init__(self, room_bytes: int) -> None:
        self._room_bytes = room_bytes
        self._free: list[memoryview] = []
        self._lent_bytes = self._reading_bytes = 0

    @property
    def may_lend(self) -> bool:
        """Whether more is to be read now. If not, something has to be read or given back before."""
        return self._reading_bytes < READING_BYTES and self._lent_bytes < STAGED_BYTES

    def lend(self, nbytes: int) -> memoryview:
        """So many bytes at least, from a page on, to be read into: `was_read` follows, then `give_back`. Raises OSError
        where the system has no more.
        """
        if nbytes > self._room_bytes:
            memory = pages(nbytes)  # for this run alone
        else:
            memory = self._free.pop() if self._free else pages(self._room_bytes)
        self._lent_bytes += nbytes
        self._reading_bytes += nbytes
        return memory

    def was_read(self, nbytes: int) -> None:
        """Reading so many bytes has ended, well or not."""
        self._reading_bytes -= nbytes

    def give_back(self, memory: memoryview, nbytes: int) -> None:
        """Nothing in it is needed any more; it was lent for so many bytes."""
        self._lent_bytes -= nbytes
        if nbytes <= self._room_bytes:
            self._free.append(memory)

    def check(self) -> None:
        """What is being read is lent."""
        assert 0 <= self._reading_bytes <= self._lent_bytes


def leave_caches(memory: memoryview) -> None:
    """What lies there is read by no processor soon, and by a device next. Without the interpreter's lock. Does nothing
    without compiled code, or where a processor has no instruction for it.
    """
    if is_wanted():
        extension.leave_caches(memory)
