"""A checkpoint's files, open: where each tensor lies, without reading one.

Owns the descriptors and the marks by which a file that changes under a running process is noticed. Format: an unsigned
64-bit little-endian length, that many bytes of JSON, then the tensors (https://github.com/huggingface/safetensors).
"""

from __future__ import annotations

import contextlib
import json
import mmap
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from stowage.core.geometry import PAGE_BYTES
from stowage.errors import CheckpointError

__all__ = ["PAGE_BYTES", "Checkpoint", "File", "Segment", "mark_of"]

_HEADER_BYTES_MAX: Final = 100 << 20


@dataclass(frozen=True, slots=True)
class Segment:
    """``length`` bytes of a file, from ``offset`` on."""

    file: File
    offset: int
    length: int


class File:
    """An open file of weights. ``direct`` is a second descriptor that goes past the page cache; -1 where the file
    system has none.
    """

    __slots__ = ("_mark", "_view", "direct", "fd", "path")

    def __init__(self, path: Path, fd: int, direct: int) -> None:
        self.path, self.fd, self.direct = path, fd, direct
        self._mark = mark_of(fd)
        self._view: mmap.mmap | None = None

    @classmethod
    def open(cls, path: Path) -> File:
        """Raises CheckpointError when the file cannot be opened."""
        try:
            fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        except OSError as error:
            raise CheckpointError(f"{path} cannot be opened: {error.strerror}.") from error
        direct = -1
        with contextlib.suppress(OSError):
            direct = os.open(f"/proc/self/fd/{fd}", os.O_RDONLY | os.O_CLOEXEC | getattr(os, "O_DIRECT", 0))
        return cls(path, fd, direct)

    @property
    def length(self) -> int:
        return self._mark[0]

    def check(self) -> None:
        """Raises CheckpointError when the file is not what it was when it was opened."""
        if mark_of(self.fd) != self._mark:
            raise CheckpointError(
                f"{self.path} was changed while a model is running from it, so its weights are no longer those that "
                "were loaded. Nothing more is computed with them: load the model again."
            )

    def settle(self) -> None:
        """What was written until now belongs to the file."""
        self._mark = mark_of(self.fd)

    def view(self) -> mmap.mmap:
        """The file mapped into memory; what is written there stays in this process."""
        if self._view is None:
            self._view = mmap.mmap(self.fd, 0, flags=mmap.MAP_PRIVATE, prot=mmap.PROT_READ | mmap.PROT_WRITE)
        return self._view

    def close(self) -> None:
        """Tensors over ``view`` stay usable; the mapping goes with the last of them."""
        self._view = None
        fds, self.fd, self.direct = (self.fd, self.direct), -1, -1
        for fd in fds:
            if fd >= 0:
                os.close(fd)

    def __del__(self) -> None:
        self.close()


def mark_of(fd: int) -> tuple[int, int]:
    """Size and time of modification: they change whenever the file is written to, not when it gets another name."""
    stat = os.fstat(fd)
    return stat.st_size, stat.st_mtime_ns


class Checkpoint:
    """The safetensors ``files`` of one model. Raises CheckpointError for a file that cannot be read or is damaged."""

    def __init__(self, files: Iterable[Path]) -> None:
        self.files: list[File] = []
        self.tensors: dict[str, Segment] = {}
        try:
            for path in files:
                self.files.append(File.open(path))
                self.tensors.update(_tensors(self.files[-1]))
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """May be called twice."""
        for file in self.files:
            file.close()
        self.files = []

    def mapped_at(self, address: int, length: int, mappings: Sequence[tuple[int, int, int, int]]) -> Segment | None:
        """The bytes of a file that lie at ``address`` in one of ``mappings`` (begin, end, offset, inode)."""
        for begin, end, offset, inode in mappings:
            if begin <= address and address + length <= end:
                for file in self.files:
                    if os.fstat(file.fd).st_ino == inode:
                        return Segment(file, offset + address - begin, length)
        return None

    def mappings(self) -> list[tuple[int, int, int, int]]:
        """Where this process has the files mapped: begin, end, offset, inode. Empty where the system does not say."""
        inodes = {(os.fstat(file.fd).st_ino, os.fstat(file.fd).st_dev) for file in self.files}
        found = []
        with contextlib.suppress(OSError), open("/proc/self/maps", encoding="utf-8", errors="replace") as lines:
            for line in lines:
                area, _, offset, device, inode = line.split(maxsplit=5)[:5]
                major, minor = (int(part, 16) for part in device.split(":"))
                if (int(inode), os.makedev(major, minor)) in inodes:
                    begin, end = (int(part, 16) for part in area.split("-"))
                    found.append((begin, end, int(offset, 16), int(inode)))
        return found


def _tensors(file: File) -> dict[str, Segment]:
    try:
        length = int.from_bytes(os.pread(file.fd, 8, 0), "little")
        if not 2 <= length <= min(_HEADER_BYTES_MAX, file.length - 8):
            raise ValueError(f"a header of {length} bytes")
        header = json.loads(os.pread(file.fd, length, 8))
        found = {}
        for name, entry in header.items():
            if name != "__metadata__":
                begin, end = entry["data_offsets"]
                if not 0 <= begin <= end <= file.length - 8 - length:
                    raise ValueError(f"{name} lies outside of the file")
                found[name] = Segment(file, 8 + length + begin, end - begin)
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{file.path} is damaged ({error}); download the checkpoint again.") from error
    return found
