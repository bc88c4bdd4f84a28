"""Memory that packed chunks are read into, until they are unpacked."""

from __future__ import annotations

from typing import Final

from stowage.storage.disk.files import pages
from stowage.storage.disk.read_plan import RUN_BYTES_MAX
from stowage.storage.format.segment import PAGE_BYTES

__all__ = ["Staging"]

ROOM_BYTES: Final = RUN_BYTES_MAX + PAGE_BYTES
STAGED_BYTES: Final = 8 << 20
"""That are lent, before no more are. With less a disk waits for processors; with more, what was read has left the cache
when it is unpacked, and what is read next goes to memory that is in none: a fifth slower."""


class Staging:
    """Lent for one run each. Not for several threads at once. What came back last is lent first: it is in a cache."""

    def __init__(self) -> None:
        self._free: list[memoryview] = []
        self._lent_bytes = 0

    @property
    def is_empty(self) -> bool:
        """Whether some has to be given back before more is lent."""
        return self._lent_bytes >= STAGED_BYTES

    def lend(self, nbytes: int) -> memoryview:
        """So many bytes at least, from a page on."""
        self._lent_bytes += nbytes
        if nbytes > ROOM_BYTES:
            return pages(nbytes)  # for this run alone
        return self._free.pop() if self._free else pages(ROOM_BYTES)

    def give_back(self, memory: memoryview, nbytes: int) -> None:
        """Nothing in it is needed any more; it was lent for so many bytes."""
        self._lent_bytes -= nbytes
        if nbytes <= ROOM_BYTES:
            self._free.append(memory)
