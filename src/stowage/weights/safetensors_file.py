"""Writes a safetensors file front to back, one tensor in memory at a time; the header comes last, into reserved space.
Says what helps where a directory does not take it.

Format: https://github.com/huggingface/safetensors#format
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from torch import Tensor

from stowage.config.disk_room import free_bytes, why_not_written
from stowage.config.memory import format_size
from stowage.errors import StorageError, UnsupportedModelError
from stowage.weights.checkpoint import DTYPES, READ_AS_BYTES
from stowage.weights.file import pwrite_all
from stowage.weights.parameter_location import memory_of

_NAMES: Final = {dtype: name for name, dtype in DTYPES.items() if name != READ_AS_BYTES}


_WAY_OUT: Final = "Free some space there, or give a directory on another disk."


def not_taken(directory: Path, error: OSError, what: str = "the packed weights", also: str = "") -> StorageError:
    """Of a full disk, most often. ``also``: what else there is to know, a sentence."""
    why = why_not_written(directory, error)
    return StorageError(f"{directory} does not take {what}: {why}.{also and f' {also}'} {_WAY_OUT}")


def check_room(directory: Path, nbytes: int, what: str) -> None:
    """Raises StorageError where ``what``, which takes so many bytes, has no room; and OSError."""
    free = free_bytes(directory)
    if free < nbytes:
        raise StorageError(
            f"{what} takes {format_size(nbytes)}, and {format_size(free)} are free where {directory} lies. Nothing was "
            f"written. {_WAY_OUT}"
        )


class SafetensorsFile:
    """A new file at ``path``, whose tensors begin at byte ``data_at``. All methods raise OSError."""

    def __init__(self, path: Path, data_at: int = 0) -> None:
        self.data_at = data_at
        self.nbytes = 0
        """Bytes of the tensors so far."""
        self.entries: dict[str, dict[str, Any]] = {}
        self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)

    def append(self, name: str, values: Tensor) -> None:
        """Write a tensor. Raises UnsupportedModelError for a dtype that safetensors does not have here."""
        if values.dtype not in _NAMES:
            raise UnsupportedModelError(f"{name} has the type {values.dtype}, which is not written.")
        if values.nbytes:
            self.write(memory_of(values.contiguous()), self.nbytes)
        self.add(name, _NAMES[values.dtype], values.shape, values.nbytes)

    def write(self, content: bytes | memoryview, offset: int) -> None:
        """Write bytes ``offset`` bytes behind the first tensor's begin. `add` says which tensor they are."""
        pwrite_all(self._fd, content, self.data_at + offset)

    def add(self, name: str, dtype: str, shape: Sequence[int], nbytes: int) -> None:
        """The next ``nbytes`` bytes are a tensor of the safetensors type ``dtype``."""
        offsets = [self.nbytes, self.nbytes + nbytes]
        self.entries[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": offsets}
        self.nbytes += nbytes

    def finish(self, metadata: Mapping[str, str]) -> None:
        """Write the header, cut off what was written behind the last tensor, and wait for the disk."""
        header = json.dumps({"__metadata__": metadata, **self.entries}, separators=(",", ":")).encode()
        room = self.data_at - 8
        assert len(header) <= room
        pwrite_all(self._fd, room.to_bytes(8, "little") + header.ljust(room), 0)
        os.ftruncate(self._fd, self.data_at + self.nbytes)
        os.fsync(self._fd)

    def close(self) -> None:
        """May be called twice."""
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)
