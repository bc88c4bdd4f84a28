"""One chunk at rest: a 128-byte header that binds the payload to its key, namespace, mask and length.

Layout: docs/format.md, "Envelope". Written from here; read as columns, with the pages that hold it (`segment`), and
refused there where its version or flags are unknown. That a payload belongs to its header is found by `protection`. The
flags are the method of protection, and whether the payload is packed.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import Final

import numpy as np

from stowage.storage.format.batch import DIGEST_BYTES, FIELD_BYTES, Fields

HEADER_BYTES: Final = 128
VERSION: Final = 1
PACKED: Final = 0x100
"""Of the flags: the payload is packed (`core.lossless`). Length and digest are those of the packed bytes."""
MAGIC: Final = b"STWC"

_FIELDS: Final = struct.Struct("<4sHH32s32sQQ24x")  # everything that the checksum covers besides the payload
assert _FIELDS.size == FIELD_BYTES == HEADER_BYTES - DIGEST_BYTES


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
