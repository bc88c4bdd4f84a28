"""Where a unit's parameters lie while they are offloaded, and how they lie in a slot of the ring.

A slot takes whole pages: what is read from a file keeps its offset within a page, so that direct reads land where the
module computes from, and no byte is copied. Neighbours in the file are read as one.

Wherever a parameter is put, its address has the remainder modulo 64 that it had when loading left it, its phase:
kernels take other ways for other alignments, and those round differently (by 4e-6 in float32, on one family of 94).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from stowage.core.geometry import ALIGNMENT_BYTES, PAGE_BYTES, round_up
from stowage.weights.checkpoint import Segment
from stowage.weights.file import File
from stowage.weights.reader import Read


def as_bytes(tensor: Tensor) -> NDArray[np.uint8]:
    """The memory of a contiguous tensor, uint8, one dimension; shared, not copied."""
    flat: NDArray[np.uint8] = tensor.detach().reshape(-1).view(torch.uint8).numpy()
    return flat


def phase_of(tensor: Tensor) -> int:
    """The address modulo 64."""
    return tensor.data_ptr() % ALIGNMENT_BYTES


def copy_of(tensor: Tensor) -> Tensor:
    """A contiguous copy in memory of its own, at an address with the same phase."""
    values = tensor.detach().contiguous()
    phase = phase_of(values)
    raw = torch.empty(values.nbytes + ALIGNMENT_BYTES, dtype=torch.uint8)
    begin = (phase - raw.data_ptr()) % ALIGNMENT_BYTES
    if (raw.storage_offset() + begin) % values.element_size():
        return values.clone()
    copy = raw[begin : begin + values.nbytes].view(values.dtype).view(values.shape)
    return copy.copy_(values)


def memory_of(tensor: Tensor) -> memoryview:
    """The same, as a buffer."""
    return as_bytes(tensor).data


@dataclass(frozen=True, slots=True)
class ParameterLocation:
    """Where the bytes of one parameter of ``shape`` and ``dtype`` are: in ``segments`` of files, end to end, or in
    ``host`` memory. ``phase``: see above.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    segments: tuple[Segment, ...] = ()
    host: Tensor | None = None
    phase: int = 0

    @property
    def nbytes(self) -> int:
        return self.dtype.itemsize * int(np.prod(self.shape))

    @property
    def mappable(self) -> bool:
        """Whether a view over the mapped file is the parameter."""
        segment = self.segments[0] if len(self.segments) == 1 else None
        return segment is not None and not segment.file.is_packed and segment.offset % self.dtype.itemsize == 0

    @property
    def in_page(self) -> int:
        """Where in a page it should begin: as in its file, so that direct reads land there, or as its phase says."""
        offset = self.segments[0].offset if self.mappable else self.phase
        return offset % PAGE_BYTES if offset % ALIGNMENT_BYTES == self.phase else self.phase

    def reads(self, begin: int, into: memoryview) -> list[Read]:
        """What fills ``into`` with its bytes from ``begin`` on."""
        end, at, found = begin + into.nbytes, 0, list[Read]()
        assert 0 <= begin <= end <= self.nbytes
        if self.host is not None:
            return [Read(memory_of(self.host), begin, into)]
        for segment in self.segments:
            first, last = max(begin, at), min(end, at + segment.length)
            if first < last:
                found.append(Read(segment.file, segment.offset + first - at, into[first - begin : last - begin]))
            at += segment.length
        return found

    def mapped(self) -> Tensor:
        """A view over the mapped file. What is written to it stays in this process."""
        (segment,) = self.segments
        count = segment.length // self.dtype.itemsize
        view = torch.frombuffer(segment.file.view(), dtype=self.dtype, count=count, offset=segment.offset)
        return view.view(self.shape)


@dataclass(frozen=True, slots=True)
class _Piece:
    """``length`` bytes from ``offset`` of ``source`` go to ``at`` in the slot."""

    source: File | memoryview
    offset: int
    at: int
    length: int


@dataclass(frozen=True, slots=True)
class SlotLayout:
    """Where the parameters of a unit lie in a slot of the ring: ``pieces`` fill a slot, ``offsets`` are where each
    parameter begins in it, in the order of its unit.
    """

    pieces: tuple[_Piece, ...]
    offsets: tuple[int, ...]
    nbytes: int

    def reads(self, memory: memoryview) -> list[Read]:
        """What fills ``memory``, a slot."""
        return [Read(piece.source, piece.offset, memory[piece.at : piece.at + piece.length]) for piece in self.pieces]

    def tensors(self, locations: Sequence[ParameterLocation], memory: memoryview) -> list[Tensor]:
        """The parameters of the unit, as views of a slot that was filled."""
        return [
            torch.frombuffer(
                memory, dtype=location.dtype, count=location.nbytes // location.dtype.itemsize, offset=at
            ).view(location.shape)
            for location, at in zip(locations, self.offsets, strict=True)
        ]


def layout(locations: Sequence[ParameterLocation]) -> SlotLayout:
    """How a unit with ``locations`` lies in a slot: of at most its bytes and two pages for each parameter."""
    pieces: list[_Piece] = []
    offsets = [0] * len(locations)
    end = 0
    single = [at for at, location in enumerate(locations) if len(location.segments) == 1 and location.mappable]
    single.sort(key=lambda at: (id(locations[at].segments[0].file), locations[at].segments[0].offset))
    for at in single:
        segment = locations[at].segments[0]
        begin = segment.offset // PAGE_BYTES * PAGE_BYTES
        last = round_up(segment.offset + segment.length)
        before = pieces[-1] if pieces else None
        if before is not None and before.source is segment.file and begin <= before.offset + before.length:
            offset = before.at + segment.offset - before.offset
            pieces[-1] = _Piece(segment.file, before.offset, before.at, max(last - before.offset, before.length))
            end = pieces[-1].at + pieces[-1].length
        else:
            offset = end + segment.offset - begin
            pieces.append(_Piece(segment.file, begin, end, last - begin))
            end += last - begin
        offsets[at] = offset
    for at, location in enumerate(locations):
        if at in single:
            continue
        end += location.phase
        offsets[at] = end
        if location.host is not None:
            pieces.append(_Piece(memory_of(location.host), 0, end, location.nbytes))
            end += location.nbytes
        for segment in location.segments:
            pieces.append(_Piece(segment.file, segment.offset, end, segment.length))
            end += segment.length
        end = round_up(end)
    return SlotLayout(tuple(pieces), tuple(offsets), end)
