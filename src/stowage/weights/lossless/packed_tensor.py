"""A tensor that lies packed without loss in a safetensors file, as a file of the tensor's own bytes.

A packed tensor is bytes (``U8``) under its own name, and the file's metadata ``stowage-lossless`` says what it is:
``{name: {"dtype", "shape", "phase", "frames"}}``. ``phase`` is its address modulo 64 where the original was mapped
(``weights.parameter_location`` says what for). ``frames`` are the lengths of its parts at rest, one after the other:
each holds 128 KiB of the tensor's bytes (the last one what is left), packed by ``core.lossless``; one that is as long
as its bytes lies as it is. So any part of a tensor can be read alone. Whatever loads such a file without knowing this
finds tensors of another shape, and refuses them.
"""

from __future__ import annotations

import mmap
from collections.abc import Mapping
from math import prod
from typing import Any, Final

import numpy as np

from stowage.core import lossless
from stowage.core.geometry import ALIGNMENT_BYTES, PAGE_BYTES, round_up
from stowage.errors import FormatError
from stowage.native.memory import copy
from stowage.weights.file import File

METADATA: Final = "stowage-lossless"
FRAME_BYTES: Final = 128 << 10
_AT_ONCE_BYTES: Final = 1 << 20
ITEM_BYTES: Final = {"BF16": 2, "F16": 2, "F32": 4}


class PackedTensor(File):
    """A losslessly packed tensor, read as if it were a file. ``entry``: what the metadata says of a tensor that lies at
    ``offset`` of ``file``, ``length`` bytes of it.

    Raises ValueError, KeyError and TypeError for an entry that cannot be right.
    """

    __slots__ = ("_at", "_file", "dtype", "phase", "shape")

    def __init__(self, file: File, offset: int, length: int, entry: Mapping[str, Any]) -> None:
        super().__init__(file.path, -1, -1)
        self.dtype, self.shape = str(entry["dtype"]), tuple(int(n) for n in entry["shape"])
        self.phase = int(entry["phase"]) % ALIGNMENT_BYTES
        nbytes = prod(self.shape) * ITEM_BYTES[self.dtype]
        frames = np.array(entry["frames"], np.int64)
        if min(self.shape, default=0) < 0 or frames.ndim != 1 or len(frames) != -(-nbytes // FRAME_BYTES):
            raise ValueError("frames of another tensor")
        if len(frames) and (frames.min() < 1 or frames.max() > FRAME_BYTES or int(frames.sum()) > length):
            raise ValueError("frames that do not lie in their tensor")
        self._file = file
        self._mark = (nbytes, 0)
        self._at = offset + np.concatenate((np.zeros(1, np.int64), np.cumsum(frames)))

    @property
    def is_packed(self) -> bool:
        return True

    def check(self) -> None:
        self._file.check()

    def pread(self, length: int, offset: int) -> bytes:
        raw = bytearray(max(0, min(length, self.length - offset)))
        if raw:
            self._fill(memoryview(raw), offset, memoryview(mmap.mmap(-1, self.around_bytes(offset, len(raw)))))
        return bytes(raw)

    def fill_all(self, into: memoryview) -> None:
        """All of it, by this thread."""
        around = memoryview(mmap.mmap(-1, _AT_ONCE_BYTES + 2 * PAGE_BYTES))
        for at in range(0, self.length, _AT_ONCE_BYTES):
            self._fill(into[at : at + _AT_ONCE_BYTES], at, around)

    def _fill(self, into: memoryview, offset: int, around: memoryview) -> None:
        self.fetch(offset, into.nbytes, around)
        self.unpack(offset, into, around)

    def _lies(self, offset: int, length: int) -> tuple[int, int, int, int]:
        """First and last frame of ``length`` bytes of the tensor from ``offset`` on, and the pages they lie in."""
        first, last = offset // FRAME_BYTES, -(-min(offset + length, self.length) // FRAME_BYTES)
        begin, end = int(self._at[first]), int(self._at[last])
        return first, last, begin // PAGE_BYTES * PAGE_BYTES, round_up(end)

    def around_bytes(self, offset: int, length: int) -> int:
        """Memory for what so many bytes from there on are unpacked from."""
        _, _, begin, end = self._lies(offset, length)
        return end - begin

    def fetch(self, offset: int, length: int, around: memoryview) -> None:
        """Read what ``length`` bytes from ``offset`` on are unpacked from. ``around``: `around_bytes` of memory, from
        a page on. Raises OSError.
        """
        _, last, begin, end = self._lies(offset, length)
        if int(self._at[last]) > self._file.length:
            raise OSError(f"{self.path} ends too early")
        self._file.fill(around[: end - begin], begin, whole_pages=True)

    def unpack(self, offset: int, into: memoryview, around: memoryview) -> None:
        """Unpack ``into`` from ``offset`` on, of what `fetch` has read. Raises FormatError for what was not packed."""
        end = min(offset + into.nbytes, self.length)
        first, last, page, _ = self._lies(offset, into.nbytes)
        whole_from, whole_to = -(-offset // FRAME_BYTES), last if end == self.length else end // FRAME_BYTES
        for frame in range(first, last):
            if not whole_from <= frame < whole_to:
                self._unpack_part(around[int(self._at[frame]) - page :], frame, offset, end, into)
        if whole_from < whole_to:
            packed = around[int(self._at[whole_from]) - page : int(self._at[whole_to]) - page]
            target = into[whole_from * FRAME_BYTES - offset : min(whole_to * FRAME_BYTES, end) - offset]
            self._unpack_frames(packed, whole_from, whole_to, target)

    def _unpack_part(self, packed: memoryview, frame: int, offset: int, end: int, into: memoryview) -> None:
        """As much as is wanted of one frame, with which ``packed`` begins."""
        begin = frame * FRAME_BYTES
        room = memoryview(bytearray(min(FRAME_BYTES, self.length - begin)))
        self._unpack_frames(packed[: int(self._at[frame + 1] - self._at[frame])], frame, frame + 1, room)
        first, last = max(begin, offset), min(begin + room.nbytes, end)
        copy(room[first - begin : last - begin], into[first - offset : last - offset])

    def _unpack_frames(self, packed: memoryview, first: int, after: int, into: memoryview) -> None:
        try:
            lossless.unpack_frames(packed, np.diff(self._at[first : after + 1]), FRAME_BYTES, into)
        except FormatError as error:
            raise FormatError(f"{self.path} is damaged ({error}); pack the checkpoint again.") from error
