"""The host arena: one mapping, cut into the slots of the slab classes.

Owns the bytes and nothing about their meaning. Maps exactly the bytes that the slab classes add up to, so it is never
larger than the host budget that they were split from. The memory has no name in any file system, not even where other
processes map it too (they find it through the process that made it): killed processes leave nothing behind. Nothing is
pinned here (that is one decision, made elsewhere).
"""

from __future__ import annotations

import errno
import mmap
import os
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from stowage.config.memory import ram_total_bytes
from stowage.core.geometry import IntArray, SlabClass
from stowage.errors import ConfigError
from stowage.native.memory import anonymous, in_huge_pages


class HostArena:
    """The bytes of all slots. Slots are global numbers, as in the ledger. `path`: what `map_arena` takes in another
    process of the same user on this machine; empty unless `shared`.
    """

    def __init__(self, slabs: Sequence[SlabClass], *, shared: bool = False) -> None:
        """Map the arena. Raises ConfigError when the slab classes hold nothing or the machine lacks the memory."""
        self.path = ""
        self.bytes = sum(slab.slots * slab.slot_bytes for slab in slabs)
        if self.bytes == 0:
            raise ConfigError("the host arena has no slot: every cache group has chunks of zero bytes")
        try:
            if self.bytes > ram_total_bytes():  # which some systems map, and kill whoever fills it
                raise OSError(errno.ENOMEM, f"there are {ram_total_bytes()}")
            self._mapping = self._shared() if shared else anonymous(self.bytes)
        except OSError as error:
            raise ConfigError(
                f"host memory of {self.bytes} bytes could not be mapped ({error.strerror}); set host_memory "
                "to a smaller size"
            ) from error
        self._offsets: IntArray = np.concatenate([slab.slot_offsets_bytes for slab in slabs])
        self._sizes: IntArray = np.concatenate([np.full(slab.slots, slab.slot_bytes, np.int64) for slab in slabs])
        in_huge_pages(self._mapping)
        self._view: memoryview | None = memoryview(self._mapping)
        self._array: NDArray[np.uint8] | None = np.frombuffer(self._mapping, np.uint8)

    def _shared(self) -> mmap.mmap:
        """Memory behind a file that has no name. The descriptor lives as long as this process: it is the way in."""
        file = os.memfd_create("stowage-arena", os.MFD_CLOEXEC)
        try:
            os.ftruncate(file, self.bytes)
            mapping = mmap.mmap(file, self.bytes, flags=mmap.MAP_SHARED)
        except OSError:
            os.close(file)
            raise
        self._file = file
        self.path = f"/proc/{os.getpid()}/fd/{file}"
        return mapping

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
        if self.path:
            os.close(self._file)
            self.path = ""
        self._view.release()
        self._view = self._array = None
        try:
            self._mapping.close()
        except BufferError:
            return False
        return True


def map_arena(path: str, nbytes: int) -> NDArray[np.uint8]:
    """The shared arena of another process, writable; it stays mapped as long as the array lives.

    Raises ConfigError when it cannot be mapped: the process is gone, is another user's, or runs on another machine.
    """
    try:
        file = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        try:
            return np.frombuffer(mmap.mmap(file, nbytes, flags=mmap.MAP_SHARED), np.uint8)
        finally:
            os.close(file)
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"The host arena {path} of {nbytes} bytes cannot be mapped ({error}). Its process must be alive, on this "
            "machine, in the same container, and of the same user."
        ) from error


def map_memory(nbytes: int, setting: str) -> mmap.mmap:
    """Memory of this process, zeros. Raises ConfigError, which names the setting, when the machine lacks it."""
    try:
        mapping = anonymous(nbytes)
    except OSError as error:
        raise ConfigError(
            f"{setting} of {nbytes} bytes could not be mapped ({error.strerror}); set it to a smaller size"
        ) from error
    in_huge_pages(mapping)
    return mapping
