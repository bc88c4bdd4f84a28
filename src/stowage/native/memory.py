"""Memory in huge pages: where disks and kernels want it.

A direct read of 1 MiB into small pages is 256 parts for the kernel, and takes up to three times as long as into one
huge page. Huge pages are a matter of speed only: where the system has none, memory is as ever.
"""

from __future__ import annotations

import mmap
from typing import Final

import numpy as np

__all__ = ["HUGE_BYTES", "anonymous", "in_huge_pages", "pages"]

HUGE_BYTES: Final = 2 << 20


def anonymous(nbytes: int) -> mmap.mmap:
    """``nbytes`` of zeros, of this process alone. Raises OSError where the system has not so much."""
    return mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)


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
    begin = -int(np.frombuffer(mapping, np.uint8).__array_interface__["data"][0]) % HUGE_BYTES
    in_huge_pages(mapping, begin, huge)
    return memoryview(mapping)[begin : begin + nbytes]
