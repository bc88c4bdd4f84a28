"""One chunk at rest: a 128-byte header that binds the payload to its key, namespace, mask and length.

Layout: docs/format.md, "Envelope". A header is parsed without its payload (so that an index can be read alone), which
says nothing about the payload; `verify` does. Unknown versions and flags are refused, never guessed. The flags are the
method of protection (`protection`), and whether the payload is packed: besides `pack_fields`, all here is for flags 0.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
import xxhash

from stowage.errors import FormatError
from stowage.storage.format.batch import DIGEST_BYTES, FIELD_BYTES, Fields

__all__ = [
    "DIGEST_BYTES",
    "HEADER_BYTES",
    "PACKED",
    "VERSION",
    "Envelope",
    "checksum",
    "pack_fields",
    "pack_fields_of",
    "pack_header",
    "parse_header",
    "verify",
]

HEADER_BYTES: Final = 128
VERSION: Final = 1
PACKED: Final = 0x100
"""Of the flags: the payload is packed (`core.lossless`). Length and digest are those of the packed bytes."""
MAGIC: Final = b"STWC"

_FIELDS: Final = struct.Struct("<4sHH32s32sQQ24x")  # everything that the checksum covers besides the payload
assert _FIELDS.size == FIELD_BYTES == HEADER_BYTES - DIGEST_BYTES


@dataclass(frozen=True, slots=True)
class Envelope:
    """A parsed header. `digest` is the XXH3-128 of the header's other 112 bytes and the payload."""

    key: bytes
    namespace: bytes
    mask: int
    length: int
    digest: bytes


def pack_fields(key: bytes, namespace: bytes, mask: int, length: int, flags: int = 0) -> bytes:
    """A header without its digest. Key and namespace have 32 bytes; mask and length are not 0."""
    assert len(key) == 32 and len(namespace) == 32 and mask and length
    return _FIELDS.pack(MAGIC, VERSION, flags, key, namespace, mask, length)


def pack_fields_of(
    keys: Sequence[bytes],
    namespace: bytes,
    masks: Sequence[int],
    lengths: Sequence[int],
    method: int = 0,
    packed: Sequence[bool] | None = None,
) -> Fields:
    """`pack_fields` of each of some chunks. `packed`: which of them are; none by default."""
    assert len(namespace) == 32 and {*map(len, keys)} <= {32} and all(masks) and all(lengths)
    pack = _FIELDS.pack
    rows = [
        pack(MAGIC, VERSION, method | PACKED if is_packed else method, key, namespace, mask, length)
        for key, mask, length, is_packed in zip(keys, masks, lengths, packed or [False] * len(keys), strict=True)
    ]
    return np.frombuffer(b"".join(rows), np.uint8).reshape(-1, _FIELDS.size)


def checksum(key: bytes, namespace: bytes, mask: int, payload: memoryview) -> bytes:
    """XXH3-128 over the header's fields and the payload. Releases the interpreter lock for large payloads."""
    state = xxhash.xxh3_128(pack_fields(key, namespace, mask, payload.nbytes))
    state.update(payload)
    return state.digest()


def pack_header(key: bytes, namespace: bytes, mask: int, payload: memoryview) -> bytes:
    """The 128 bytes that go to rest with `payload`. Key and namespace have 32 bytes; mask and payload are not empty."""
    return pack_fields(key, namespace, mask, payload.nbytes) + checksum(key, namespace, mask, payload)


def parse_header(data: bytes | memoryview) -> Envelope:
    """Reads 128 bytes. Raises FormatError for a foreign magic, version or flag, and for an empty mask or payload."""
    if len(data) != HEADER_BYTES:
        raise FormatError(f"an envelope header has {HEADER_BYTES} bytes, not {len(data)}")
    magic, version, flags, key, namespace, mask, length = _FIELDS.unpack_from(data)
    if magic != MAGIC:
        raise FormatError("not an envelope")
    if version != VERSION or flags:
        raise FormatError(f"envelope version {version}, flags {flags}: this reads version {VERSION}, flags 0")
    if not mask or not length:
        raise FormatError("an envelope without blocks or payload")
    return Envelope(key, namespace, mask, length, bytes(data[HEADER_BYTES - DIGEST_BYTES :]))


def verify(envelope: Envelope, payload: memoryview) -> bool:
    """Whether `payload` is exactly what was stored under this header."""
    if payload.nbytes != envelope.length:
        return False
    return checksum(envelope.key, envelope.namespace, envelope.mask, payload) == envelope.digest
