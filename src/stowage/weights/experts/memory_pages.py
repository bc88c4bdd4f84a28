"""Frames of memory that are mapped at changing addresses, for tensors that are larger than the memory.

Owns a file in memory, divided into frames, and the mapping of frames into spans of reserved addresses. What is not
mapped to a frame reads as NaN in every float type (all bits are set), and cannot be written to. Only the frames take
memory, so their number is a hard limit; mapping a frame elsewhere copies nothing.
"""

from __future__ import annotations

import ctypes
import mmap
import os
from typing import Final

from stowage.core.geometry import PAGE_BYTES
from stowage.errors import StorageError
from stowage.native.memory import address_of, reserved
from stowage.weights.file import pwrite_all

_MAP_FIXED: Final = 0x10
_MAPPINGS_SHARE: Final = 0.8
"""Share of the mappings that a process may have; the rest is left to other uses."""


def supported() -> bool:
    """Whether this system supports the needed calls."""
    return hasattr(os, "memfd_create")


def mappings_most() -> int:
    """About how many mappings a process may have."""
    try:
        with open("/proc/sys/vm/max_map_count", encoding="ascii") as limit:
            return int(int(limit.read()) * _MAPPINGS_SHARE)
    except (OSError, ValueError):
        return int(65_530 * _MAPPINGS_SHARE)


class Span:
    """``nbytes`` of reserved addresses, which take no memory themselves. They live as long as ``memory`` does."""

    def __init__(self, nbytes: int) -> None:
        self.memory = reserved(nbytes)
        self.address = address_of(self.memory)


class Frames:
    """Memory for experts: ``count`` of ``frame_bytes``, a multiple of a page."""

    def __init__(self, count: int, frame_bytes: int) -> None:
        assert frame_bytes % PAGE_BYTES == 0
        self.count, self.frame_bytes = count, frame_bytes
        self._mmap = _system_mmap()
        self._frames = self._offloaded = -1
        try:
            self._frames = os.memfd_create("stowage-experts", os.MFD_CLOEXEC)
            os.ftruncate(self._frames, count * frame_bytes)
            self._offloaded = os.memfd_create("stowage-away", os.MFD_CLOEXEC)
            pwrite_all(self._offloaded, b"\xff" * frame_bytes, 0)
        except OSError as error:
            self.close()
            raise StorageError(f"no memory for a cache of experts: {error.strerror}.") from error

    @property
    def used_bytes(self) -> int:
        """Memory that the frames take at the moment."""
        return os.fstat(self._frames).st_blocks * 512

    def show(self, span: Span, offset: int, length: int, frame: int, within: int) -> None:
        """Map ``length`` bytes of ``frame``, from ``within`` on, at ``offset`` of ``span``. Raises StorageError."""
        assert 0 <= frame < self.count
        assert within + length <= self.frame_bytes
        self._map(
            span, offset, length, mmap.PROT_READ | mmap.PROT_WRITE, self._frames, frame * self.frame_bytes + within
        )

    def hide(self, span: Span, offset: int, length: int) -> None:
        """Unmap ``length`` bytes of ``span`` from ``offset`` on: they read as NaN. Raises StorageError."""
        assert length <= self.frame_bytes
        self._map(span, offset, length, mmap.PROT_READ, self._offloaded, 0)

    def close(self) -> None:
        """Close the file; mapped frames stay until their spans end. May be called twice."""
        for fd in (self._frames, self._offloaded):
            if fd >= 0:
                os.close(fd)
        self._frames = self._offloaded = -1

    def __del__(self) -> None:
        self.close()

    def _map(self, span: Span, offset: int, length: int, access: int, fd: int, begin: int) -> None:
        assert not (offset % PAGE_BYTES or length % PAGE_BYTES or begin % PAGE_BYTES)
        assert 0 <= offset <= offset + length <= len(span.memory)
        address = span.address + offset
        if self._mmap(address, length, access, mmap.MAP_SHARED | _MAP_FIXED, fd, begin) != address:
            reason = os.strerror(ctypes.get_errno())
            raise StorageError(
                f"an expert could not be mapped ({reason}). The limit of mappings is sysctl vm.max_map_count: raise it "
                "or stream whole layers: --weights 'model.layers.*=stream'."
            )


def _system_mmap() -> ctypes._NamedFuncPointer:
    function = ctypes.CDLL(None, use_errno=True).mmap
    function.argtypes = (ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long)
    function.restype = ctypes.c_void_p
    return function
