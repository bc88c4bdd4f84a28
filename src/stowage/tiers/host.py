"""The host arena: one anonymous mapping, cut into the slots of the slab classes.

Owns the bytes and nothing about their meaning. Maps exactly the bytes that the slab classes add up to, so it is never
larger than the host budget that they were split from. Anonymous memory belongs to no file and no name: a killed process
leaves nothing behind. Nothing is pinned here (that is one decision, made elsewhere).
"""

from __future__ import annotations

import mmap
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from stowage.core.geometry import IntArray, SlabClass
from stowage.errors import ConfigError

__all__ = ["HostArena"]


class HostArena:
    """The bytes of all slots. Slots are global numbers, as in the ledger."""

    def __init__(self, slabs: Sequence[SlabClass]) -> None:
        """Map the arena. Raises ConfigError when the slab classes hold nothing or the machine lacks the memory."""
        self.bytes = sum(slab.slots * slab.slot_bytes for slab in slabs)
        if self.bytes == 0:
            raise ConfigError("the host arena has no slot: every cache group has chunks of zero bytes")
        self._offsets: IntArray = np.concatenate(
            [slab.offset_bytes + slab.slot_bytes * np.arange(slab.slots, dtype=np.int64) for slab in slabs]
        )
        self._sizes: IntArray = np.concatenate([np.full(slab.slots, slab.slot_bytes, np.int64) for slab in slabs])
        try:
            self._mapping = mmap.mmap(-1, self.bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        except OSError as error:
            raise ConfigError(
                f"host memory of {self.bytes} bytes could not be mapped ({error.strerror}); set host to a smaller size"
            ) from error
        if hasattr(mmap, "MADV_HUGEPAGE"):
            try:
                self._mapping.madvise(mmap.MADV_HUGEPAGE)
            except OSError:
                self.huge_pages = False  # a kernel without them: a matter of speed only
            else:
                self.huge_pages = True
        else:
            self.huge_pages = False
        self._view: memoryview | None = memoryview(self._mapping)
        self._array: NDArray[np.uint8] | None = np.frombuffer(self._mapping, np.uint8)

    @property
    def slots(self) -> int:
        """How many slots there are."""
        return len(self._offsets)

    def slot_view(self, slot: int, size: int) -> memoryview:
        """The first `size` bytes of a slot, writable. Valid until `close`."""
        assert 0 <= size <= self._sizes[slot], f"slot {slot} is smaller than {size} bytes"
        offset = int(self._offsets[slot])
        return self._open_view()[offset : offset + size]

    def slot_views(self, slots: IntArray, sizes: IntArray) -> list[memoryview]:
        """The first `sizes[i]` bytes of `slots[i]`, writable."""
        assert (sizes <= self._sizes[slots]).all(), "a payload is larger than its slot"
        begins = self._offsets[slots]
        view = self._open_view()
        return [view[begin:end] for begin, end in zip(begins.tolist(), (begins + sizes).tolist(), strict=True)]

    def numpy(self) -> NDArray[np.uint8]:
        """All bytes of the arena, writable. Whoever holds it keeps the memory mapped."""
        assert self._array is not None, "the arena is closed"
        return self._array

    def _open_view(self) -> memoryview:
        assert self._view is not None, "the arena is closed"
        return self._view

    def close(self) -> bool:
        """Unmap. False when somebody still holds a view: the memory then stays until the last view is gone."""
        if self._view is None:
            return self._mapping.closed
        self._view.release()
        self._view = self._array = None
        try:
            self._mapping.close()
        except BufferError:
            return False
        return True
