"""One chunk on its own, as a value of a store that many machines share: a preface, an envelope, the payload.

Layout: docs/format.md, "Object envelope". A segment says once how its chunks are protected; each object says it for
itself, and has a key of its own, so that any number of machines may write under one secret. Pure: no I/O, and
randomness is passed in. Whatever is not exactly what `seal` made for this key and namespace is refused, never guessed.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from stowage.core import lossless
from stowage.errors import FormatError
from stowage.native.memory import copy
from stowage.storage.format.batch import DIGEST_BYTES
from stowage.storage.format.envelope import HEADER_BYTES, PACKED, pack_fields
from stowage.storage.format.protection import NO_MARK, Cipher, Guard, Mark, Method, Protection

VERSION: Final = 1
MAGIC: Final = b"STOWPCL1"
ID_BYTES: Final = 8

_PREFACE: Final = struct.Struct("<8sHH4x8s8s16s16x")
_MASK_AND_LENGTH: Final = struct.Struct("<QQ")
_FLAGS: Final = struct.Struct("<H")
_FLAGS_OFFSET: Final = _PREFACE.size + 6
_MASK_OFFSET: Final = _PREFACE.size + 72
HEAD_BYTES: Final = _PREFACE.size + HEADER_BYTES
"""What stands before the payload."""
_DIGEST_OFFSET: Final = HEAD_BYTES - DIGEST_BYTES


class Unreadable(FormatError):
    """Another version, another protection, or a key that is not there: nothing that had to be damaged."""


@dataclass(frozen=True, slots=True)
class Head:
    """What stands before a payload, for whoever asked for this key. `guard` knows the envelope's key."""

    mask: int
    length: int
    packed: bool
    fields: bytes
    digest: bytes
    guard: Guard


def sealed_bytes(payload_bytes: int) -> int:
    """The length of an object envelope."""
    return HEAD_BYTES + payload_bytes


def seal(
    key: bytes,
    namespace: bytes,
    mask: int,
    payload: memoryview,
    protection: Protection,
    random_bytes: Callable[[int], bytes],
    *,
    packed: bool = False,
) -> bytearray:
    """The envelope, a copy. Key and namespace: 32 bytes; mask and payload: not empty. `packed`: by `core.lossless`."""
    mark = protection.new_mark(random_bytes)
    object_id = bytes(ID_BYTES) if mark == NO_MARK else random_bytes(ID_BYTES)
    guard = protection.guard(object_id, mark)
    assert guard is not None, "a protection does not know the key that it writes with"
    flags = protection.method | PACKED if packed else protection.method
    fields = pack_fields(key, namespace, mask, payload.nbytes, flags)
    sealed = bytearray(sealed_bytes(payload.nbytes))
    room = memoryview(sealed)[HEAD_BYTES:]
    if isinstance(guard, Cipher):
        stream = guard.encrypt(fields, HEAD_BYTES, payload.nbytes)
        stream.update(payload, room)
        digest = stream.tag()
    else:
        copy(payload, room)
        digest = guard.digest(fields, HEAD_BYTES, room)
    preface = _PREFACE.pack(MAGIC, VERSION, mark.method, object_id, mark.key_id, mark.salt)
    sealed[:HEAD_BYTES] = preface + fields + digest
    return sealed


def parse_head(head: memoryview, key: bytes, namespace: bytes, protection: Protection) -> Head:
    """Reads the first `HEAD_BYTES`; says nothing about the payload. Raises FormatError (Unreadable).

    Every byte is checked, also those that mean nothing yet.
    """
    if head.nbytes != HEAD_BYTES:
        raise FormatError(f"the head of an object envelope has {HEAD_BYTES} bytes, not {head.nbytes}")
    magic, version, method, object_id, key_id, salt = _PREFACE.unpack_from(head)
    if magic != MAGIC:
        raise FormatError("not an object envelope")
    if version != VERSION:
        raise Unreadable(f"object envelope version {version}: this reads version {VERSION}")
    mark = Mark(method, key_id, salt)
    guard = protection.guard(object_id, mark)
    if guard is None:
        raise Unreadable("an object envelope under another protection, or a key that is not there")
    unkeyed = method == Method.CHECKSUM and (mark != NO_MARK or any(object_id))
    if unkeyed or head[: _PREFACE.size] != _PREFACE.pack(magic, version, method, object_id, key_id, salt):
        raise FormatError("an object envelope whose preface holds what no writer put there")
    mask, length = _MASK_AND_LENGTH.unpack_from(head, _MASK_OFFSET)
    if not mask or not length:
        raise FormatError("an object envelope without blocks or payload")
    packed = bool(_FLAGS.unpack_from(head, _FLAGS_OFFSET)[0] & PACKED)
    fields = pack_fields(key, namespace, mask, length, method | PACKED if packed else method)
    if head[_PREFACE.size : _DIGEST_OFFSET] != fields:
        raise FormatError("an object envelope of another key or namespace")
    return Head(mask, length, packed, fields, bytes(head[_DIGEST_OFFSET:]), guard)


def unseal(
    object_envelope: memoryview, key: bytes, namespace: bytes, protection: Protection, buffer: memoryview
) -> int:
    """Brings the payload to `buffer`, unpacked, and returns its valid blocks. Raises FormatError (Unreadable).

    After an error the buffer holds bytes that may be anything, unless nothing is encrypted or packed: then it is
    untouched. Nothing is unpacked before it has been verified.
    """
    head = parse_head(object_envelope[:HEAD_BYTES], key, namespace, protection)
    payload = object_envelope[HEAD_BYTES:]
    fits = head.length < buffer.nbytes if head.packed else head.length == buffer.nbytes
    if payload.nbytes != head.length or not fits:
        raise FormatError(f"a payload of {payload.nbytes} bytes, said to be {head.length}, for {buffer.nbytes}")
    if head.packed:
        _unpack(_verified(head, payload, None), buffer)
    elif (whole := _verified(head, payload, buffer)) is payload:
        copy(whole, buffer)
    return head.mask


def _verified(head: Head, payload: memoryview, room: memoryview | None) -> memoryview:
    """What was stored: ``payload``, or what a cipher makes of it, in ``room`` if there is any. Raises FormatError."""
    if isinstance(head.guard, Cipher):
        room = memoryview(bytearray(head.length)) if room is None else room
        stream = head.guard.decrypt(head.fields, HEAD_BYTES, head.digest)
        stream.update(payload, room)
        payload, exact = room, stream.verify()
    else:
        exact = head.guard.verify(head.fields, HEAD_BYTES, payload, head.digest)
    if not exact:
        raise FormatError("a payload that was not stored under this key")
    return payload


def _unpack(payload: memoryview, buffer: memoryview) -> None:
    try:
        lossless.unpack(payload, buffer)
    except lossless.UnknownCode as error:
        raise Unreadable(str(error)) from error
