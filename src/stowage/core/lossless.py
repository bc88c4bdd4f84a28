"""Lossless compression ("packing") of floating-point payloads: KV chunks and weights.

    packed = pack(payload, room)        bytes used in room; 0: it does not pay
    unpack(room[:packed], buffer)       exactly the bytes that were packed

Of a trained network's numbers only the exponents compress, to 2.5 to 2.8 bits instead of 8; sign and mantissa are
noise. Each block of 8 KiB is coded by itself: the most frequent exponents get codes of a few bits, and one code is the
escape to another level of codes. The result is within 1 % of the entropy, and byte shuffles decode it
(docs/benchmarks.md). docs/format.md, "Packed payload", is the contract.

The number format need not be known: each block is coded as bfloat16, float16, float32 or bytes, whichever is shortest.
C code does it (`native/lossless`); without it numpy makes the same bytes, a hundred times slower: good for reading, not
for packing.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import numpy as np
from numpy.typing import NDArray

from stowage.core import lossless_blocks
from stowage.core.geometry import round_up
from stowage.errors import FormatError
from stowage.native import extension as _native
from stowage.native import is_wanted

LEAST_BYTES: Final = 1 << 10
"""Shorter payloads are not packed."""
_SAVED: Final = 16
"""Packing has to save at least one part in this many."""


class UnknownCode(FormatError):
    """Packed by a code of a later version; the bytes need not be damaged."""


def is_quick() -> bool:
    """Whether there is compiled code, which packs and unpacks as fast as memory is copied."""
    return is_wanted()


def worth_bytes(raw_bytes: int) -> int:
    """The most bytes that a payload of `raw_bytes` may take packed; 0: it is not worth trying."""
    return raw_bytes - raw_bytes // _SAVED if raw_bytes >= LEAST_BYTES else 0


def pack(payload: memoryview, room: memoryview) -> int:
    """Packs into `room`, without the interpreter's lock; returns the length. 0: too short, its content undefined."""
    if is_wanted():
        return _native.pack_floats(payload, room)
    packed = lossless_blocks.pack(bytes(payload))
    if len(packed) > room.nbytes:
        return 0
    room[: len(packed)] = packed
    return len(packed)


def pack_frames(payloads: list[memoryview], most: Sequence[int], step: int, room: memoryview) -> list[int]:
    """Packs payload i into at most `most[i]` bytes (0: it is not tried). They follow each other in `room`, padded with
    zeros to multiples of `step`. Returns each padded length; 0: packing does not pay. `room` must hold the sum of
    `most`, each rounded up to a multiple of `step`. Releases the interpreter's lock.
    """
    lengths = np.zeros(len(payloads), np.int64)
    if is_wanted():
        _native.pack_frames(payloads, np.array(most, np.int64), step, room, lengths)
        return lengths.tolist()
    at = 0
    for number, (payload, some) in enumerate(zip(payloads, most, strict=True)):
        packed = pack(payload, room[at : at + some]) if some else 0
        whole = round_up(packed, step)
        room[at + packed : at + whole] = bytes(whole - packed)
        lengths[number] = whole
        at += whole
    return lengths.tolist()


def unpack(packed: memoryview, buffer: memoryview) -> None:
    """Fills the buffer, whose length is the payload's. Less than 4 KiB of padding may follow the packed bytes.

    Raises FormatError (UnknownCode) where `packed` is not the packed form of a payload of that length; the buffer's
    content is undefined then. No input makes it read or write outside of its arguments.
    """
    state = _native.unpack_floats(packed, buffer) if is_wanted() else lossless_blocks.unpack(bytes(packed), buffer)
    _raise_unless_whole(state, buffer.nbytes)


def unpack_frames(packed: memoryview, lengths: NDArray[np.int64], frame_bytes: int, buffer: memoryview) -> None:
    """As `unpack`, of payloads that follow each other. Each unpacks to `frame_bytes`, the last one to the rest of the
    buffer. `lengths` are the stored lengths; a frame that is stored at its full length was not packed.
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
