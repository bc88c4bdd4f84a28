"""How the chunks of a segment are protected at rest: a checksum, a keyed hash, or authenticated encryption.

Owns the keys' derivation and the three methods; docs/format.md, "Protection", is the contract. Pure: no I/O, and
randomness is passed in. A method is a property of a segment. A `Protection` opens segments of its own method only,
under keys that it was given, so that nobody who can write files can make a reader trust less than it was told to.

Secrets stay inside `SecretKey` and what is derived from it; nothing here prints them, raises with them or compares in
variable time. `cryptography` is imported where AES-256-GCM is asked for, and nowhere else.
"""

from __future__ import annotations

import enum
import hmac
import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final, Protocol, TypeAlias

import numpy as np
import xxhash
from blake3 import blake3
from numpy.typing import NDArray

from stowage.errors import ConfigError
from stowage.storage.format.batch import DIGEST_BYTES, Digests, Fields, digests_of

SECRET_BYTES: Final = 32
KEY_ID_BYTES: Final = 8
SALT_BYTES: Final = 16

_ID_CONTEXT: Final = "stowage 2026 id of a key for data at rest, encoding 1"
_SEGMENT_CONTEXT: Final = "stowage 2026 root of the keys of segments, encoding 1"
_SEGMENT_KEY: Final = struct.Struct("<H8s16s")


class Method(enum.IntEnum):
    """The number in a segment's header page and in the flags of its envelopes."""

    CHECKSUM = 0
    BLAKE3 = 1
    AES_256_GCM = 2

    @property
    def label(self) -> str:
        """The name that users write."""
        return self.name.lower().replace("_", "-")

    @classmethod
    def labelled(cls, label: str) -> Method:
        """Raises KeyError for what is no label."""
        return cls[label.upper().replace("-", "_")]


class SecretKey:
    """A secret of 32 bytes, known by its id. What it protects is protected by keys that are derived from it."""

    __slots__ = ("_root", "_secret", "id")

    def __init__(self, secret: bytes) -> None:
        assert len(secret) == SECRET_BYTES
        self._secret = secret
        self._root = blake3(secret, derive_key_context=_SEGMENT_CONTEXT).digest()
        self.id: bytes = blake3(secret, derive_key_context=_ID_CONTEXT).digest(KEY_ID_BYTES)

    def __repr__(self) -> str:
        return f"SecretKey({self.id.hex()})"

    def reveal(self) -> str:
        """The secret in hex digits: for the key file, and for nothing else."""
        return self._secret.hex()

    def segment_key(self, method: Method, segment_id: bytes, salt: bytes) -> bytes:
        """The key of one segment. Segments share none: id and salt are 24 random bytes."""
        return blake3(_SEGMENT_KEY.pack(method, segment_id, salt), key=self._root).digest()


@dataclass(frozen=True, slots=True)
class Mark:
    """What a segment's header page says about protection. `method` is a number that this version may not know."""

    method: int
    key_id: bytes
    salt: bytes


NO_MARK: Final = Mark(Method.CHECKSUM, bytes(KEY_ID_BYTES), bytes(SALT_BYTES))


class Hash(Protocol):
    """Guards the chunks of one segment whose payloads lie as they are."""

    method: Method

    def digest(self, fields: bytes, offset: int, payload: memoryview) -> bytes:
        """The 16 bytes that go to rest with the payload. `fields`: the envelope's other 112 bytes."""

    def verify(self, fields: bytes, offset: int, payload: memoryview, digest: bytes) -> bool:
        """Whether this payload was stored with these fields at this offset."""

    def digest_all(self, fields: Fields, offsets: Sequence[int], payloads: list[memoryview]) -> Digests:
        """`digest` of each."""

    def verify_all(
        self, fields: Fields, offsets: Sequence[int], payloads: list[memoryview], digests: Digests
    ) -> NDArray[np.bool_]:
        """`verify` of each."""


class Stream(Protocol):
    """One payload on its way through a cipher, in parts, front to back. Used once."""

    def update(self, source: memoryview, target: memoryview) -> None:
        """The next part, to memory of the same length that does not overlap it."""


class _Checksum:
    """XXH3-128: finds damage, not forgery. The same in all segments; a chunk may lie anywhere."""

    method = Method.CHECKSUM

    def digest(self, fields: bytes, offset: int, payload: memoryview) -> bytes:
        state = xxhash.xxh3_128(fields)
        state.update(payload)
        return state.digest()

    def verify(self, fields: bytes, offset: int, payload: memoryview, digest: bytes) -> bool:
        return self.digest(fields, offset, payload) == digest

    def digest_all(self, fields: Fields, offsets: Sequence[int], payloads: list[memoryview]) -> Digests:
        return digests_of(fields, payloads)

    def verify_all(
        self, fields: Fields, offsets: Sequence[int], payloads: list[memoryview], digests: Digests
    ) -> NDArray[np.bool_]:
        equal: NDArray[np.bool_] = (digests_of(fields, payloads) == digests).all(axis=1)
        return equal


class _KeyedHash:
    """BLAKE3 under the segment's key: finds forgery too."""

    __slots__ = ("_key",)
    method = Method.BLAKE3

    def __init__(self, key: bytes) -> None:
        self._key = key

    def digest(self, fields: bytes, offset: int, payload: memoryview) -> bytes:
        state = blake3(fields + offset.to_bytes(8, "little"), key=self._key)
        state.update(payload)
        digest: bytes = state.digest(DIGEST_BYTES)
        return digest

    def verify(self, fields: bytes, offset: int, payload: memoryview, digest: bytes) -> bool:
        return hmac.compare_digest(self.digest(fields, offset, payload), digest)

    def digest_all(self, fields: Fields, offsets: Sequence[int], payloads: list[memoryview]) -> Digests:
        found = map(self.digest, map(bytes, fields), offsets, payloads)
        return np.frombuffer(b"".join(found), np.uint64).reshape(-1, 2)

    def verify_all(
        self, fields: Fields, offsets: Sequence[int], payloads: list[memoryview], digests: Digests
    ) -> NDArray[np.bool_]:
        right = map(self.verify, map(bytes, fields), offsets, payloads, map(bytes, digests))
        return np.fromiter(right, np.bool_, len(payloads))


class Encryption:
    """A payload on its way to the disk. `tag` ends it."""

    __slots__ = ("_context", "update")

    def __init__(self, context: Any) -> None:
        self._context = context
        self.update: Callable[[memoryview, memoryview], None] = context.update_into

    def tag(self) -> bytes:
        """The 16 bytes that go to rest with the ciphertext."""
        self._context.finalize()
        tag: bytes = self._context.tag
        return tag


class Decryption:
    """A payload on its way from the disk. What `update` wrote is not to be used unless `verify` says so."""

    __slots__ = ("_context", "_refusal", "update")

    def __init__(self, context: Any, refusal: type[Exception]) -> None:
        self._context = context
        self._refusal = refusal
        self.update: Callable[[memoryview, memoryview], None] = context.update_into

    def verify(self) -> bool:
        """Whether all of it is what was encrypted with these fields at this offset. Ends the stream."""
        try:
            self._context.finalize()
        except self._refusal:
            return False
        return True


class Cipher:
    """AES-256-GCM under the segment's key: guards the chunks of one segment whose payloads lie encrypted.

    The nonce is the payload's offset in the file, so no offset may be encrypted at twice. A segment has one writer,
    which has one of these, and this one takes offsets in ascending order only: an attempt that failed cannot be
    repeated with other bytes.
    """

    __slots__ = ("_algorithm", "_cipher", "_mode", "_next", "_refusal")
    method = Method.AES_256_GCM

    def __init__(self, key: bytes) -> None:
        try:
            from cryptography.exceptions import InvalidTag
            from cryptography.hazmat.primitives.ciphers import Cipher as Construction
            from cryptography.hazmat.primitives.ciphers import algorithms, modes
        except ImportError as error:
            raise ConfigError(
                "Encryption at rest needs the package cryptography, which is not installed. "
                "Install it: pip install 'stowage[encryption]'"
            ) from error
        self._algorithm = algorithms.AES256(key)
        self._cipher: Any = Construction
        self._mode = modes.GCM
        self._refusal = InvalidTag
        self._next = 0

    def encrypt(self, fields: bytes, offset: int, length: int) -> Encryption:
        """A stream for the payload of that length that will lie at that offset."""
        if offset < self._next:  # not an assert: `python -O` must not let it pass
            raise AssertionError("an offset of a segment is encrypted once")
        self._next = offset + length
        context = self._cipher(self._algorithm, self._mode(_nonce(offset))).encryptor()
        context.authenticate_additional_data(fields)
        return Encryption(context)

    def decrypt(self, fields: bytes, offset: int, digest: bytes) -> Decryption:
        """A stream for the payload that lies at that offset."""
        context = self._cipher(self._algorithm, self._mode(_nonce(offset), digest)).decryptor()
        context.authenticate_additional_data(fields)
        return Decryption(context, self._refusal)


def _nonce(offset: int) -> bytes:
    return offset.to_bytes(12, "little")


Guard: TypeAlias = "Hash | Cipher"
"""What stands between the bytes of one segment and whoever reads or writes them."""

_CHECKSUM: Final = _Checksum()


class Protection:
    """The one method that a tier uses, and its keys: the first is for new segments, any is for reading.

    Raises ConfigError where the method needs a package that is not installed.
    """

    def __init__(self, method: Method = Method.CHECKSUM, keys: Sequence[SecretKey] = ()) -> None:
        assert bool(keys) == (method is not Method.CHECKSUM), "a checksum has no key, the others need one"
        self.method = method
        self._keys = {key.id: key for key in reversed(keys)}
        self._first = keys[0] if keys else None
        if method is Method.AES_256_GCM:
            Cipher(bytes(SECRET_BYTES))  # a missing package is found now, not at the first store

    def __repr__(self) -> str:
        return f"Protection({self.method.label}, {len(self._keys)} keys)"

    def new_mark(self, random_bytes: Callable[[int], bytes]) -> Mark:
        """For the header page of a new segment."""
        return NO_MARK if self._first is None else Mark(self.method, self._first.id, random_bytes(SALT_BYTES))

    def guard(self, segment_id: bytes, mark: Mark) -> Guard | None:
        """For the chunks of a segment with that mark. None: another method, or a key that is not there."""
        if mark.method != self.method:
            return None
        if self.method is Method.CHECKSUM:
            return _CHECKSUM
        key = self._keys.get(mark.key_id)
        if key is None:
            return None
        secret = key.segment_key(self.method, segment_id, mark.salt)
        return _KeyedHash(secret) if self.method is Method.BLAKE3 else Cipher(secret)
