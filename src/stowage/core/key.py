"""Namespaces and chained chunk keys: what a stored chunk is called.

    digest[-1] = 32 zero bytes
    digest[i]  = BLAKE3(key = namespace, digest[i-1] || tokens of chunk i as little-endian u32 || media of chunk i)
    key        = first 30 bytes of digest[i] || group index as little-endian u16

The namespace names all that the bytes depend on besides the tokens (case F3), so a digest names the whole prefix.
A tenant's namespace is derived from the engine's and the tenant's salt, so tenants have no key in common.
Media of a chunk are encoded as (offset in the chunk u32, length u32, digest), sorted. Every encoding is explicit in
width, order and length: keys are equal on every platform and hash seed, and golden vectors in the tests hold them so.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from typing import Final, TypeAlias

import numpy as np
import numpy.typing as npt
from blake3 import blake3

from stowage.core.gather import packed_u32
from stowage.core.geometry import Group

DIGEST_BYTES: Final = 32
KEY_BYTES: Final = 32
NO_DIGEST: Final = bytes(DIGEST_BYTES)
"""The digest before the first chunk."""

_TOKEN_BYTES: Final = 4
_GROUP_BYTES: Final = 2
_NAMESPACE_CONTEXT: Final = "stowage 2026 namespace of chunk keys, encoding 1"
_TENANT_CONTEXT: Final = "stowage 2026 namespace of a tenant, encoding 1"
_ADAPTER_CONTEXT: Final = "stowage 2026 namespace of an adapter, encoding 1"
_PRIVATE_CONTEXT: Final = "stowage 2026 private chunk key, encoding 1"

Field: TypeAlias = "str | int | float | bytes | bool | Sequence[Field] | Mapping[str, Field] | None"
Tokens: TypeAlias = "Sequence[int] | npt.NDArray[np.integer]"
Media: TypeAlias = "Sequence[tuple[int, bytes]]"


def namespace(fields: Mapping[str, Field]) -> bytes:
    """The 32-byte digest of named fields. Their order does not matter; every name, type and value does.

    Raises TypeError for a value that is not a Field.
    """
    return blake3(_encode(fields), derive_key_context=_NAMESPACE_CONTEXT).digest()


def tenant_namespace(namespace: bytes, salt: str | bytes) -> bytes:
    """The namespace of one tenant of an engine; the empty salt's is the engine's own. Text is taken as UTF-8.

    Without the salt no key of the tenant can be computed. Raises ValueError for text that has no UTF-8 form.
    """
    assert len(namespace) == DIGEST_BYTES
    raw = salt.encode() if isinstance(salt, str) else salt
    return blake3(namespace + raw, derive_key_context=_TENANT_CONTEXT).digest() if raw else namespace


def adapter_namespace(namespace: bytes, digest: bytes) -> bytes:
    """The namespace of an engine's prompts that are computed with an adapter, by the 32-byte digest of its files;
    without one (an empty digest) it is the engine's own.
    """
    assert len(namespace) == DIGEST_BYTES and len(digest) in (0, DIGEST_BYTES)
    return blake3(namespace + digest, derive_key_context=_ADAPTER_CONTEXT).digest() if digest else namespace


def group_keys(digests: Sequence[bytes], group_index: int) -> list[bytes]:
    """The 32-byte keys of one group's chunks that have these digests."""
    suffix = _group_suffix(group_index)
    return [digest[:-_GROUP_BYTES] + suffix for digest in digests]


def private_key(namespace: bytes, sequence_id: int, group: int, chunk: int, nonce: bytes) -> bytes:
    """A 32-byte key for state without a content key, such as the spilled partial chunk of a preempted sequence.

    Unique to (namespace, sequence, group, chunk, nonce), and never equal to a content key.
    """
    assert len(namespace) == DIGEST_BYTES
    message = namespace + struct.pack("<QQ", sequence_id, chunk) + nonce
    digest = blake3(message, derive_key_context=_PRIVATE_CONTEXT).digest()
    return digest[:-_GROUP_BYTES] + _group_suffix(group)


class Chain:
    """The digests of one sequence's complete chunks of `chunk_tokens` tokens, as its tokens become known.

    Owns the tokens of the incomplete last chunk. `extend` costs one hash call per completed chunk, and copies its
    tokens once. Groups with the same `chunk_tokens` share a chain.
    """

    __slots__ = ("_chunk_bytes", "_chunks", "_last", "_media", "_namespace", "_tail")

    def __init__(self, namespace: bytes, chunk_tokens: int) -> None:
        if len(namespace) != DIGEST_BYTES:
            raise ValueError(f"a namespace has {DIGEST_BYTES} bytes, not {len(namespace)}")
        if chunk_tokens < 1:
            raise ValueError(f"chunk_tokens is {chunk_tokens}; it must be at least 1")
        self._namespace = namespace
        self._chunk_bytes = chunk_tokens * _TOKEN_BYTES
        self._chunks = 0
        self._last = NO_DIGEST
        self._tail = b""
        self._media: list[tuple[int, bytes]] = []

    def extend(self, tokens: Tokens, media: Media = ()) -> list[bytes]:
        """Append tokens; returns the digests of the chunks that they complete, in order.

        `media` are (position in the sequence of the first token that stands for it, digest of its content); a
        position may lie ahead of the tokens seen, not in a chunk that is complete.
        Raises ValueError for a token outside [0, 2^32) or a position too late; the chain is then unchanged.
        """
        return self.feed(_little_endian_u32(tokens), media)

    def feed(self, data: memoryview, media: Media) -> list[bytes]:
        """As `extend`, of tokens as they are hashed: little-endian u32."""
        if media:
            self._add_media(media)
        if len(self._tail) + len(data) < self._chunk_bytes:
            self._tail += bytes(data)
            return []
        if self._tail:
            data = memoryview(self._tail + data)
        digests = self._digests(data)
        self._tail = bytes(data[len(digests) * self._chunk_bytes :])
        return digests

    def _digests(self, data: memoryview) -> list[bytes]:
        key, size, last = self._namespace, self._chunk_bytes, self._last
        digests: list[bytes] = []
        for start in range(0, len(data) - size + 1, size):
            message = last + data[start : start + size]
            if self._media:
                message += self._take_media(self._chunks + len(digests))
            last = blake3(message, key=key).digest()
            digests.append(last)
        self._last = last
        self._chunks += len(digests)
        return digests

    def _add_media(self, media: Media) -> None:
        earliest = self._chunks * self._chunk_bytes // _TOKEN_BYTES
        for position, _ in media:
            if position < earliest:
                raise ValueError(f"media at token {position} come too late: the chunks before {earliest} have digests")
        self._media = sorted([*self._media, *media])

    def _take_media(self, chunk: int) -> bytes:
        """Encode and forget the media that fall into a chunk; they are the first of the sorted list."""
        chunk_tokens = self._chunk_bytes // _TOKEN_BYTES
        start, end = chunk * chunk_tokens, (chunk + 1) * chunk_tokens
        mine = [(position, digest) for position, digest in self._media if position < end]
        del self._media[: len(mine)]
        return b"".join(struct.pack("<II", position - start, len(digest)) + digest for position, digest in mine)


def _little_endian_u32(tokens: Tokens) -> memoryview:
    if isinstance(tokens, np.ndarray):
        if tokens.ndim != 1 or tokens.dtype.kind not in "iu":
            raise ValueError(f"token ids are a flat array of integers, not {tokens.dtype} of shape {tokens.shape}")
        if tokens.size and not (tokens.min() >= 0 and tokens.max() < 1 << 32):
            raise ValueError("token ids must be in [0, 2^32)")
        return memoryview(np.ascontiguousarray(tokens, dtype="<u4").tobytes())
    return packed_u32(tokens, 0, len(tokens))


def _group_suffix(group_index: int) -> bytes:
    return group_index.to_bytes(_GROUP_BYTES, "little")


def _encode(value: Field) -> bytes:
    """One letter for the type, the length of the rest as u64, the rest. Injective: no two values share an encoding."""
    match value:
        case None:
            tag, body = b"n", b""
        case bool():
            tag, body = b"t", bytes([value])
        case int():
            tag, body = b"i", str(value).encode("ascii")
        case float():
            tag, body = b"f", struct.pack("<d", value)
        case str():
            tag, body = b"s", value.encode("utf-8")
        case bytes() | bytearray() | memoryview():
            tag, body = b"b", bytes(value)
        case Mapping():
            if not all(isinstance(name, str) for name in value):
                raise TypeError("the names of a namespace's fields are strings")
            tag, body = b"m", b"".join(_encode(name) + _encode(value[name]) for name in sorted(value))
        case list() | tuple():
            tag, body = b"l", b"".join(map(_encode, value))
        case _:
            raise TypeError(f"a namespace's field cannot be a {type(value).__name__}")
    return tag + struct.pack("<Q", len(body)) + body


class SequenceKeys:
    """Content keys of a sequence's chunks, one chain per chunk size, extended as tokens become known.

    ``lookahead``: the cache of a token also depends on this many tokens after it, as that of draft layers does. A
    chunk's key then covers this many tokens after the chunk: the chain runs over the tokens from ``lookahead`` on, and
    the first ``lookahead`` tokens enter as media of its first chunk.
    """

    def __init__(self, namespace: bytes, groups: Sequence[Group], lookahead: int = 0) -> None:
        sizes = {group.chunk_tokens for group in groups}
        self._chains = {size: Chain(namespace, size) for size in sizes}
        self._digests: dict[int, list[bytes]] = {size: [] for size in sizes}
        self._digests_of = [self._digests[group.chunk_tokens] for group in groups]
        self._suffixes = [_group_suffix(number) for number in range(len(groups))]
        self._keys: list[list[bytes]] = [[] for _ in groups]
        self._lookahead = lookahead
        self._fed = 0

    def extend(self, tokens: Sequence[int], end: int, media: Media = ()) -> None:
        """Take ``tokens`` up to ``end``, and ``lookahead`` more, into account; ``media`` as in ``Chain.extend``, those
        that are new.
        """
        if end <= self._fed:
            return
        ahead = self._lookahead
        if ahead:
            first = [(0, bytes(_little_endian_u32(tokens[:ahead])))] if not self._fed else []
            media = [*first, *((max(0, position - ahead), digest) for position, digest in media)]
        fresh = packed_u32(tokens, self._fed + ahead, end + ahead)
        for size, chain in self._chains.items():
            self._digests[size] += chain.feed(fresh, media)
        self._fed = end

    def of(self, group: int) -> list[bytes]:
        """Keys of the complete chunks of ``group``, from chunk 0 on."""
        keys, digests = self._keys[group], self._digests_of[group]
        if len(keys) < len(digests):  # made on first use: keys of a generated answer are rarely used
            keys += group_keys(digests[len(keys) :], group)
        return keys

    def one_and_before(self, group: int, chunk: int) -> tuple[bytes, bytes]:
        """The key of one complete chunk and that of the chunk before it, empty for chunk 0."""
        digests, suffix = self._digests_of[group], self._suffixes[group]
        before = digests[chunk - 1][:-_GROUP_BYTES] + suffix if chunk else b""
        return digests[chunk][:-_GROUP_BYTES] + suffix, before
