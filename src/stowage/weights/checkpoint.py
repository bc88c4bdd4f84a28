"""A checkpoint's open files: the location of each tensor, without reading one.

Owns the file descriptors. Losslessly packed tensors (``lossless``) are files of their own here.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Final

import torch
from torch import Tensor

from stowage.errors import CheckpointError, damaged
from stowage.weights.file import File, safetensors_header, safetensors_place
from stowage.weights.gguf import MAGIC
from stowage.weights.lossless.packed_tensor import METADATA, PackedTensor

_COMPARED_BYTES: Final = 4 << 20
READ_AS_BYTES: Final = "F8_E8M0"
"""A power of two, read as uint8."""
DTYPES: Final[Mapping[str, torch.dtype]] = {
    "BOOL": torch.bool,
    "U8": torch.uint8,
    "I8": torch.int8,
    "I16": torch.int16,
    "I32": torch.int32,
    "I64": torch.int64,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F32": torch.float32,
    "F64": torch.float64,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    READ_AS_BYTES: torch.uint8,
}
"""The dtypes of a safetensors file."""


@dataclass(frozen=True, slots=True)
class Segment:
    """``length`` bytes of a file, from ``offset`` on."""

    file: File
    offset: int
    length: int


@dataclass(frozen=True, slots=True)
class Span:
    """``length`` bytes of the file at ``path``, from ``offset`` on."""

    path: Path
    offset: int
    length: int


@dataclass(frozen=True, slots=True)
class Stored:
    """A tensor in a safetensors file, not read yet."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    span: Span

    def read(self) -> Tensor:
        """The values, without parsing a header of thousands of tensors again. Raises CheckpointError."""
        file = File.open(self.span.path)
        try:
            segment = Segment(file, self.span.offset, self.span.length)
            return read_segments([segment], torch.empty(self.shape, dtype=self.dtype))
        finally:
            file.close()

    def is_as(self, other: Stored) -> bool:
        """Whether both are of one type and shape, and hold the same bytes. Raises CheckpointError."""
        if (self.dtype, self.shape) != (other.dtype, other.shape):
            return False
        files = [File.open(stored.span.path) for stored in (self, other)]
        try:
            one, another = (
                Segment(file, stored.span.offset, stored.span.length)
                for file, stored in zip(files, (self, other), strict=True)
            )
            return same_bytes(one, another)
        finally:
            for file in files:
                file.close()


class Checkpoint:
    """The safetensors ``files`` of one model, or its GGUF files, which were checked before and are only opened here.
    Raises CheckpointError for a file that cannot be read or is damaged.
    """

    def __init__(self, files: Iterable[Path]) -> None:
        self.files: list[File] = []
        self.tensors: dict[str, Segment] = {}
        self.float32_lengths: set[int] = set()
        """Bytes of each tensor of float32."""
        self.kinds: dict[str, str] = {}
        """Types of the tensors, as the files call them."""
        try:
            for path in files:
                self.files.append(File.open(path))
                found = _tensors(self.files[-1])
                self.tensors |= {name: segment for name, (segment, _) in found.items()}
                self.kinds |= {name: kind for name, (_, kind) in found.items()}
                self.float32_lengths |= {segment.length for segment, kind in found.values() if kind == "F32"}
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """May be called twice."""
        for file in self.files:
            file.close()
        self.files = []

    def segments(self, parts: Mapping[str, Sequence[Span]]) -> dict[str, tuple[Segment, ...]]:
        """``parts`` as segments of the open files."""
        files = {file.path: file for file in self.files}
        return {
            name: tuple(Segment(files[span.path], span.offset, span.length) for span in spans)
            for name, spans in parts.items()
        }

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
        numbers = {str(inode) for inode, _ in inodes}
        found = []
        with contextlib.suppress(OSError), open("/proc/self/maps", encoding="utf-8", errors="replace") as lines:
            for line in lines:
                area, _, offset, device, inode = line.split(maxsplit=5)[:5]
                if inode not in numbers:  # most are of no file that matters here
                    continue
                major, minor = (int(part, 16) for part in device.split(":"))
                if (int(inode), os.makedev(major, minor)) in inodes:
                    begin, end = (int(part, 16) for part in area.split("-"))
                    found.append((begin, end, int(offset, 16), int(inode)))
        return found


def same_bytes(one: Segment, other: Segment) -> bool:
    """Whether they hold the same."""
    return one.length == other.length and all(
        one.file.pread(size, one.offset + at) == other.file.pread(size, other.offset + at)
        for at in range(0, one.length, _COMPARED_BYTES)
        for size in [min(_COMPARED_BYTES, one.length - at)]
    )


def read_segments(segments: Sequence[Segment], into: Tensor) -> Tensor:
    """Fills ``into`` with the bytes of the segments, end to end. Raises CheckpointError."""
    raw, at = into.view(-1).view(torch.uint8).numpy().data, 0
    assert sum(segment.length for segment in segments) == into.nbytes, "what is not read would be anything"
    for segment in segments:
        done = 0
        while done < segment.length:
            try:
                count = os.preadv(segment.file.fd, [raw[at + done : at + segment.length]], segment.offset + done)
            except OSError as error:
                raise CheckpointError(f"{segment.file.path} cannot be read: {error.strerror}.") from error
            if not count:
                raise CheckpointError(f"{segment.file.path} is shorter than it was; download the checkpoint again.")
            done += count
        at += segment.length
    return into


def stored_in(path: Path) -> list[Stored]:
    """The tensors of a safetensors file, except those of dtypes that torch does not have. Each is checked to lie within
    the file and to have the size of its shape. Raises CheckpointError.
    """
    file, found = File.open(path), list[Stored]()
    try:
        header, begin = safetensors_header(file.fd)
        if METADATA in (header.get("__metadata__") or {}):
            raise CheckpointError(f"{path} has tensors that lie packed, so none is computed from as it lies.")
        for name, entry in header.items():
            dtype = DTYPES.get(entry["dtype"]) if name != "__metadata__" else None
            if dtype is None:
                continue
            first, end, shape = safetensors_place(name, entry, file.length - begin)
            if prod(shape) * dtype.itemsize != end - first:
                raise ValueError(f"{name} has another size than its shape")
            found.append(Stored(name, dtype, shape, Span(path, begin + first, end - first)))
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise damaged(path, error) from error
    finally:
        file.close()
    return found


def _tensors(file: File) -> dict[str, tuple[Segment, str]]:
    """Where each tensor lies, and of which type it is."""
    if os.pread(file.fd, len(MAGIC), 0) == MAGIC:
        return {}
    try:
        header, data = safetensors_header(file.fd)
        packed = json.loads((header.get("__metadata__") or {}).get(METADATA, "{}"))
        found = dict[str, tuple[Segment, str]]()
        for name, entry in header.items():
            if name != "__metadata__":
                begin, end, _ = safetensors_place(name, entry, file.length - data)
                found[name] = Segment(file, data + begin, end - begin), sys.intern(str(entry["dtype"]))
                if name in packed:
                    tensor = PackedTensor(file, data + begin, end - begin, packed[name])
                    found[name] = Segment(tensor, 0, tensor.length), tensor.dtype
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise damaged(file.path, error) from error
    return found
