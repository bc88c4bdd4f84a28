"""The lossless code in numpy, block by block: byte for byte what the C code (`native/lossless`) does.

It reads packed payloads where nothing was compiled, and tests compare the C code with it. Pure.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

WHOLE: Final = 0
DAMAGED: Final = 1
UNKNOWN: Final = 2

RAW_MAX: Final = 8192
"""Bytes of a block, before they are packed."""
_HEAD: Final = struct.Struct("<4sHHQ")
_MAGIC: Final = b"STLC"
_CODE: Final = 1
_BLOCK: Final = struct.Struct("<BBHI")
_LEVEL: Final = struct.Struct("<BBH")
_STORED, _BFLOAT16, _FLOAT16, _FLOAT32 = range(4)
_WIDTH_MAX: Final = 4
_LEVELS_MAX: Final = 8
_SYMBOLS_MAX: Final = 64
_FOUND_MAX: Final = 96
_LEVEL_COST: Final = 16
_SAMPLED: Final = 4
_COUNTED_WHOLE: Final = 1024
_SERVED: Final = 15
_WORSE: Final = 32
_RESTING: Final = 3
_KEPT_BITS: Final = 3
_PADDING: Final = 4096

Bytes = NDArray[np.uint8]


class _Damaged(Exception):
    pass


@dataclass(frozen=True, slots=True)
class _Shape:
    widths: list[int]
    symbols: list[int]
    bytes: int


_NO_SHAPE: Final = _Shape([], [], 0)


@dataclass(slots=True)
class _Known:
    """A shape that is reused for the next `uses` blocks, while each takes at most `most` bytes with its header. After a
    block took more, the next `rest` blocks get shapes of their own before a shape is reused again.
    """

    shape: _Shape = _NO_SHAPE
    uses: int = 0
    most: int = 0
    rest: int = 0


def _plane_bytes(count: int) -> int:
    return (count + 63) // 64 * 8


# Packing


def pack(payload: bytes) -> bytes:
    """Packs the payload, whether that saves bytes or not."""
    known = _Known()
    blocks = [_pack_block(payload[at : at + RAW_MAX], known) for at in range(0, len(payload), RAW_MAX)]
    return _HEAD.pack(_MAGIC, _CODE, 0, len(payload)) + b"".join(blocks)


def _shape(counts: NDArray[np.int64], n: int, extra: int) -> _Shape:
    """The levels that code n values in the fewest bytes; `extra` bytes are added to the shape's size."""
    order = [symbol for symbol in sorted(range(256), key=lambda symbol: (-counts[symbol], symbol)) if counts[symbol]]
    if len(order) > _FOUND_MAX:
        return _Shape([], [], n + extra)
    last = min(len(order), _SYMBOLS_MAX)
    symbols = order[:last] + [order[last - 1]] * (_SYMBOLS_MAX - last)  # those that are repeated are not used
    size = _SYMBOLS_MAX + 16
    left = [int(sum(counts[symbol] for symbol in order[at if at < last else last :])) for at in range(size)]
    cost, width, depth = left.copy(), [0] * size, [0] * size
    for at in range(last, -1, -1):
        for bits in range(1, _WIDTH_MAX + 1):
            after = at + (1 << bits) - 1
            if not left[at] or after > _SYMBOLS_MAX or depth[after] == _LEVELS_MAX:
                continue
            whole = bits * _plane_bytes(left[at]) + _LEVEL.size + (1 << bits) - 1 + _LEVEL_COST + cost[after]
            if whole < cost[at]:
                cost[at], width[at], depth[at] = whole, bits, depth[after] + 1
    widths: list[int] = []
    at = 0
    while len(widths) < depth[0]:
        widths.append(width[at])
        at += (1 << width[at]) - 1
    return _Shape(widths, symbols, cost[0] - _LEVEL_COST * depth[0] + extra)


def _sample(high: Bytes) -> tuple[Bytes, int]:
    """Every fourth group of 64 values, and how many values each stands for; all values of a short block."""
    if len(high) < _COUNTED_WHOLE:
        return high, 1
    return high[np.arange(len(high)) // 64 % _SAMPLED == 0], _SAMPLED


def _choose(all_high: Bytes) -> tuple[int, _Shape]:
    """The number format and the shape that take the fewest bytes, judged by a sample."""
    n = len(all_high)
    high, weight = _sample(all_high)
    kind, shape = _BFLOAT16, _shape(np.bincount(high, minlength=256) * weight, n, n)
    if 4 * shape.bytes <= 3 * 2 * n:
        return kind, shape
    if n % 2 == 0:
        other = _shape(np.bincount(high[1::2], minlength=256) * weight, n // 2, n + n // 2)
        if other.bytes < shape.bytes:
            kind, shape = _FLOAT32, other
    other = _shape(np.bincount(high & 0xF8, minlength=256) * weight, n, n + _KEPT_BITS * _plane_bytes(n))
    if other.bytes < shape.bytes:
        kind, shape = _FLOAT16, other
    return (kind, shape) if shape.bytes < 2 * n else (_STORED, shape)


def _planes(codes: Bytes, width: int) -> bytes:
    padded = np.zeros(_plane_bytes(len(codes)) * 8, np.uint8)
    padded[: len(codes)] = codes
    return b"".join(np.packbits(padded >> plane & 1, bitorder="little").tobytes() for plane in range(width))


def _pack_levels(values: Bytes, shape: _Shape) -> tuple[bytes, bytes]:
    headers = body = b""
    symbols = shape.symbols
    for width in shape.widths:
        escape = (1 << width) - 1
        code_of = np.full(256, escape, np.uint8)
        used = dict.fromkeys(symbols[:escape])
        code_of[[*used]] = range(len(used))
        codes = code_of[values]
        body += _planes(codes, width)
        values = values[codes == escape]
        headers += _LEVEL.pack(width, 0, len(values)) + bytes(symbols[:escape])
        symbols = symbols[escape:]
    return headers, body + values.tobytes()


def _coded(raw: bytes, high: Bytes, low: Bytes, kind: int, shape: _Shape) -> bytes:
    """A block, whose high and low bytes were separated, coded by the shape."""
    before = b""
    if kind == _FLOAT32:
        before = np.frombuffer(raw, "<u2", len(raw) // 2)[::2].tobytes()
        high, low = high[1::2], low[1::2]
    before += low.tobytes()
    if kind == _FLOAT16:
        before += _planes(high & np.uint8(7), _KEPT_BITS)
        high = high & np.uint8(0xF8)
    headers, body = _pack_levels(high, shape)
    whole = headers + before + body + raw[len(raw) // 2 * 2 :]
    return _BLOCK.pack(kind, len(shape.widths), 0, len(whole)) + whole


def _coded_known(raw: bytes, high: Bytes, low: Bytes, known: _Known) -> bytes:
    """As `_coded`, by the shape to be reused or by a new one; empty where no shape saves bytes."""
    if len(raw) == RAW_MAX and known.uses:
        known.uses -= 1
        coded = _coded(raw, high, low, _BFLOAT16, known.shape)
        if len(coded) <= known.most:
            return coded
        known.uses, known.rest = 0, _RESTING
    kind, shape = _choose(high)
    if kind == _STORED:
        return b""
    coded = _coded(raw, high, low, kind, shape)
    if known.rest:
        known.rest -= 1
    elif len(raw) == RAW_MAX and kind == _BFLOAT16:
        known.shape, known.uses, known.most = shape, _SERVED, len(coded) + len(coded) // _WORSE
    return coded


def _pack_block(raw: bytes, known: _Known) -> bytes:
    words = np.frombuffer(raw, "<u2", len(raw) // 2)
    turned = words << 1 | words >> 15
    high, low = (turned >> 8).astype(np.uint8), turned.astype(np.uint8)
    coded = _coded_known(raw, high, low, known) if len(words) else b""
    if not coded or len(coded) - _BLOCK.size >= len(raw):
        return _BLOCK.pack(_STORED, 0, 0, len(raw)) + raw
    return coded


# Unpacking


class _Body:
    """Reads bytes from the front; raises `_Damaged` where there are too few."""

    def __init__(self, data: Bytes) -> None:
        self._data = data
        self._at = 0

    def take(self, length: int) -> Bytes:
        part = self._data[self._at : self._at + length]
        if len(part) < length:
            raise _Damaged
        self._at += length
        return part

    @property
    def left(self) -> int:
        return len(self._data) - self._at


def unpack(packed: bytes, buffer: memoryview) -> int:
    """Fills the buffer; WHOLE, DAMAGED or UNKNOWN, as in C."""
    if len(packed) < _HEAD.size or packed[:4] != _MAGIC:
        return DAMAGED
    _, code, reserved, raw_bytes = _HEAD.unpack_from(packed)
    if code != _CODE or reserved:
        return UNKNOWN
    if raw_bytes != buffer.nbytes:
        return DAMAGED
    target = np.frombuffer(buffer, np.uint8)
    body = _Body(np.frombuffer(packed, np.uint8)[_HEAD.size :])
    try:
        for at in range(0, raw_bytes, RAW_MAX):
            kind, levels, reserved, length = _BLOCK.unpack(body.take(_BLOCK.size).tobytes())
            if reserved:
                return DAMAGED
            _unpack_block(kind, levels, _Body(body.take(length)), target[at : at + RAW_MAX])
    except _Damaged:
        return DAMAGED
    return WHOLE if body.left < _PADDING else DAMAGED


def _codes(planes: Bytes, count: int, width: int) -> Bytes:
    codes = np.zeros(count, np.uint8)
    for plane, bits in enumerate(planes.reshape(width, -1)):
        codes |= np.unpackbits(bits, count=count, bitorder="little") << np.uint8(plane)
    return codes


def _unpack_levels(body: _Body, headers: list[tuple[int, int, Bytes]], count: int) -> Bytes:
    levels = []
    for width, left, symbols in headers:
        levels.append((_codes(body.take(width * _plane_bytes(count)), count, width), symbols))
        if left > count:
            raise _Damaged
        count = left
    values = body.take(count)
    for codes, symbols in reversed(levels):
        escapes = codes == len(symbols)
        if np.count_nonzero(escapes) != len(values):
            raise _Damaged
        found = np.append(symbols, np.uint8(0))[codes]
        found[escapes] = values
        values = found
    return values


def _unpack_block(kind: int, levels: int, body: _Body, target: Bytes) -> None:
    words = len(target) // 2
    count = words // 2 if kind == _FLOAT32 else words
    if kind == _STORED:
        if levels or body.left != len(target):
            raise _Damaged
        target[:] = body.take(len(target))
        return
    if kind > _FLOAT32 or levels > _LEVELS_MAX or not count or (kind == _FLOAT32 and words % 2):
        raise _Damaged
    headers = []
    for _ in range(levels):
        width, _, left = _LEVEL.unpack(body.take(_LEVEL.size).tobytes())
        if not 1 <= width <= _WIDTH_MAX:
            raise _Damaged
        headers.append((width, left, body.take((1 << width) - 1)))
    even = body.take(2 * count) if kind == _FLOAT32 else body.take(0)
    low = body.take(count)
    kept = body.take(_KEPT_BITS * _plane_bytes(count)) if kind == _FLOAT16 else body.take(0)
    high = _unpack_levels(body, headers, count)
    if body.left != len(target) % 2:
        raise _Damaged
    if kind == _FLOAT16:
        high = high | _codes(kept, count, _KEPT_BITS)
    turned = high.astype("<u2") << 8 | low
    found = (turned >> 1 | turned << 15).astype("<u2")
    if kind == _FLOAT32:
        found = np.column_stack((even.view("<u2"), found)).reshape(-1)
    target[: 2 * words] = found.view(np.uint8)
    target[2 * words :] = body.take(len(target) % 2)
