"""Codes for `benchmarks.lossless`: ours and those whose package is installed."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from stowage.core import lossless

MIB = 1 << 20


def codes() -> Iterator[tuple[str, Callable[[bytes], bytes], Callable[[bytes, int], Any]]]:
    """Name, packing, unpacking."""

    room, buffer = memoryview(bytearray(MIB + 4096)), memoryview(bytearray(MIB))  # used again, as the tiers do

    def pack(raw: bytes) -> bytes:
        return bytes(room[: lossless.pack(memoryview(raw), room)])

    def unpack(packed: bytes, length: int) -> memoryview:
        lossless.unpack(memoryview(packed), buffer[:length])
        return buffer[:length]

    yield "ours", pack, unpack
    for name, squeeze, expand in general_codes():
        yield name, squeeze, expand
        if name == "zipnn":
            continue  # it sees to the planes itself
        yield f"{name} of planes", *of_planes(squeeze, expand)


def general_codes() -> Iterator[tuple[str, Callable[[bytes], bytes], Callable[[bytes, int], Any]]]:
    try:
        import zstandard

        packer, unpacker = zstandard.ZstdCompressor(1), zstandard.ZstdDecompressor()
        yield "zstd -1", packer.compress, lambda packed, length: unpacker.decompress(packed, length)
    except ImportError:
        pass
    try:
        from zipnn import ZipNN

        code = ZipNN(bytearray_dtype="bfloat16", input_format="byte", threads=1)
        yield "zipnn", lambda raw: code.compress(bytearray(raw)), lambda packed, _: bytes(code.decompress(packed))
    except ImportError:
        pass
    try:
        import lz4.block

        yield "lz4", lz4.block.compress, lambda packed, _: lz4.block.decompress(packed)
    except ImportError:
        pass


def of_planes(
    squeeze: Callable[[bytes], bytes], expand: Callable[[bytes, int], Any]
) -> tuple[Callable[[bytes], bytes], Callable[[bytes, int], Any]]:
    """The same for exponents alone, apart from sign and mantissa."""

    def pack(raw: bytes) -> bytes:
        words = np.frombuffer(raw, "<u2")
        turned = words << 1 | words >> 15
        return turned.astype(np.uint8).tobytes() + squeeze((turned >> 8).astype(np.uint8).tobytes())

    def unpack(packed: bytes, length: int) -> bytes:
        low = np.frombuffer(packed[: length // 2], np.uint8)
        high = np.frombuffer(expand(packed[length // 2 :], length // 2), np.uint8)
        turned = high.astype("<u2") << 8 | low
        return (turned >> 1 | turned << 15).astype("<u2").tobytes()

    return pack, unpack
