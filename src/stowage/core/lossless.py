"""A payload of floating-point numbers in fewer bytes, and back to the bit: the lossless code of KV and weights.

    packed = pack(payload, room)        what it takes there; 0: it does not pay
    unpack(room[:packed], buffer)       the very bytes that were packed

Of a trained network's numbers only the exponents can be said in fewer bits: 2.5 to 2.8 instead of 8, where sign and
mantissa are noise. Blocks of 8 KiB are coded alone: the most frequent exponents get codes of a few bits, one of which
says that another level of codes follows. That comes within 1 % of the entropy, and is decoded by shuffles of bytes
(docs/benchmarks.md). docs/format.md, "Packed payload", is the contract.

Nobody has to say what the numbers are: each block is taken as bfloat16, float16, float32 or bytes, whichever is the
shortest. In C where that was built (`native/lossless`), else in numpy: the same bytes, a hundred times slower. So
whoever has no C can read all, and should not pack.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import numpy as np
from numpy.typing import NDArray

from stowage.core import lossless_blocks
from stowage.errors import FormatError
from stowage.native import extension as _native
from stowage.native import is_wanted

__all__ = ["LEAST_BYTES", "UnknownCode", "is_quick", "pack", "pack_frames", "unpack", "unpack_frames", "worth_bytes"]

LEAST_BYTES: Final = 1 << 10
"""Shorter payloads stay as they are."""
_SAVED: Final = 16
"""One part in this many is what packing has to save."""


class UnknownCode(FormatError):
    """Packed by a code of a later version: nothing that had to be damaged."""


def is_quick() -> bool:
    """Whether there is compiled code, which packs and unpacks as fast as memory is copied."""
    return is_wanted()


def worth_bytes(raw_bytes: int) -> int:
    """The most that a payload of that length may take packed. 0: it is not worth trying."""
    return raw_bytes - raw_bytes // _SAVED if raw_bytes >= LEAST_BYTES else 0


def pack(payload: memoryview, room: memoryview) -> int:
    """Packs into the beginning of `room`; returns the length there. 0: it is more than there is room for, and what lies
    there now means nothing. Without the interpreter's lock.
    """
    if is_wanted():
        return _native.pack_floats(payload, room)
    packed = lossless_blocks.pack(bytes(payload))
    if len(packed) > room.nbytes:
        return 0
    room[: len(packed)] = packed
    return len(packed)


def pack_frames(payloads: list[memoryview], most: Sequence[int], step: int, room: memoryview) -> list[int]:
    """Packs each payload into at most so many bytes (0: it is not tried), one behind the other, each from a multiple of
    `step` on; zeros lie between them. Returns what each takes there, in whole steps; 0: it does not pay. There must be
    room for `most`, in whole steps. Without the interpreter's lock.
    """
    lengths = np.zeros(len(payloads), np.int64)
    if is_wanted():
        _native.pack_frames(payloads, np.array(most, np.int64), step, room, lengths)
        return lengths.tolist()
    at = 0
    for number, (payload, some) in enumerate(zip(payloads, most, strict=True)):
        packed = pack(payload, room[at : at + some]) if some else 0
        whole = -(-packed // step) * step
        room[at + packed : at + whole] = bytes(whole - packed)
        lengths[number] = whole
        at += whole
    return lengths.tolist()


def unpack(packed: memoryview, buffer: memoryview) -> None:
    """Fills the buffer, whose length is that of what was packed. Less than 4 KiB may follow behind the packed bytes.

    Raises FormatError (UnknownCode) for what is not the packed form of a payload of that length; the buffer holds bytes
    that may be anything then. No bytes make it read or write anywhere else.
    """
    _raise_unless_whole(_unpack(packed, buffer), buffer.nbytes)


def _unpack(packed: memoryview, buffer: memoryview) -> int:
    return _native.unpack_floats(packed, buffer) if is_wanted() else lossless_blocks.unpack(bytes(packed), buffer)


def unpack_frames(packed: memoryview, lengths: NDArray[np.int64], frame_bytes: int, buffer: memoryview) -> None:
    """As `unpack`, of payloads that lie one behind the other. Each is one of `frame_bytes`, the last one of what is
    left; `lengths` are theirs as they lie, and one that is as long as its bytes was not packed.
    """
    if is_wanted():
        _raise_unless_whole(_native.unpack_frames(packed, lengths, frame_bytes, buffer), buffer.nbytes)
        return
    at = 0
    for frame, length in enumerate(lengths.tolist()):
        target = buffer[frame * frame_bytes : (frame + 1) * frame_bytes]
        stored = packed[at : at + length]
        if not target.nbytes or stored.nbytes < length:
            _raise_unless_whole(lossless_blocks.DAMAGED, buffer.nbytes)
        if length == target.nbytes:
            target[:] = stored
        else:
            unpack(stored, target)
        at += length
    if len(lengths) * frame_bytes < buffer.nbytes:
        _raise_unless_whole(lossless_blocks.DAMAGED, buffer.nbytes)


def _raise_unless_whole(result: int, raw_bytes: int) -> None:
    if result == lossless_blocks.UNKNOWN:
        raise UnknownCode("a payload that was packed by a code which this version does not know")
    if result != lossless_blocks.WHOLE:
        raise FormatError(f"a packed payload that does not unpack to {raw_bytes} bytes")
