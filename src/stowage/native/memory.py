"""Memory in huge pages, where disks and kernels want it; and memory that is freed, which is kept for the next tensors.

A direct read of 1 MiB into small pages is 256 parts for the kernel, and takes up to three times as long as into one
huge page. Huge pages are a matter of speed only: where the system has none, memory is as ever.
"""

from __future__ import annotations

import ctypes
import mmap
from functools import cache
from typing import Final, TypeAlias

import numpy as np
from numpy.typing import NDArray

HUGE_BYTES: Final = 2 << 20
_MAP_NORESERVE: Final = 0x4000
_LARGEST_KEPT: Final = (32 << 20) - (64 << 10)
"""Just below ``DEFAULT_MMAP_THRESHOLD_MAX`` of glibc, with room for a chunk's header."""

_Memory: TypeAlias = "bytes | memoryview | mmap.mmap | NDArray[np.uint8]"


def anonymous(nbytes: int) -> mmap.mmap:
    """``nbytes`` of zeros, of this process alone. Raises OSError where the system has not so much."""
    return mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)


def reserved(nbytes: int) -> mmap.mmap:
    """``anonymous``, of which only what is written takes memory, however much is asked for."""
    return mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE)


def in_huge_pages(mapping: mmap.mmap, begin: int = 0, nbytes: int | None = None) -> bool:
    """Ask for them. False: the system has none."""
    try:
        mapping.madvise(mmap.MADV_HUGEPAGE, begin, len(mapping) - begin if nbytes is None else nbytes)
    except (AttributeError, OSError):
        return False
    return True


def pages(nbytes: int) -> memoryview:
    """Zeros that begin on a page, in huge pages as far as these are filled. Freed with the last view of it."""
    huge = nbytes // HUGE_BYTES * HUGE_BYTES
    if not huge:
        return memoryview(anonymous(nbytes))
    mapping = anonymous(nbytes + HUGE_BYTES)  # what lies around the huge pages is never touched, so it takes no memory
    begin = -address_of(mapping) % HUGE_BYTES
    in_huge_pages(mapping, begin, huge)
    return memoryview(mapping)[begin : begin + nbytes]


def address_of(memory: _Memory) -> int:
    """Where its first byte is."""
    return int(np.frombuffer(memory, np.uint8).__array_interface__["data"][0])


def copy(source: _Memory, target: _Memory) -> None:
    """All of ``source``, to as much memory, without the interpreter's lock: others go on."""
    np.copyto(np.frombuffer(target, np.uint8), np.frombuffer(source, np.uint8))


@cache
def keep_freed() -> None:
    """Let the C library keep up to 64 MiB that are freed, for what is asked for next.

    Layers make tensors of some MiB and free them again. glibc gives such memory back to the system, which fills it with
    zeros for the next tensor, page by page, until a piece of 32 MiB was freed once: its thresholds follow the largest
    piece so far (``mallopt(3)``, M_MMAP_THRESHOLD). So one is freed, whose pages were never touched. Whoever has set
    thresholds keeps them, and other C libraries forget it.
    """
    library = ctypes.CDLL(None)
    if not hasattr(library, "gnu_get_libc_version"):
        return
    library.malloc.restype, library.malloc.argtypes = ctypes.c_void_p, [ctypes.c_size_t]
    library.free.restype, library.free.argtypes = None, [ctypes.c_void_p]
    library.free(library.malloc(_LARGEST_KEPT))
