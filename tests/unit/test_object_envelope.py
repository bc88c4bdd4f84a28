"""One chunk as a value of a shared store: exactly what was sealed for this key, or an error."""

from __future__ import annotations

from collections.abc import Callable
from itertools import count

import pytest

from stowage.core import lossless_blocks
from stowage.errors import FormatError
from stowage.storage.format import object_envelope
from stowage.storage.format.protection import Method, Protection, SecretKey

KEY, OTHER_KEY = bytes(range(32)), bytes(range(1, 33))
NAMESPACE, OTHER_NAMESPACE = b"n" * 32, b"m" * 32
SECRET, OTHER_SECRET = SecretKey(b"1" * 32), SecretKey(b"2" * 32)
PAYLOAD = bytes(range(200))
ONES = b"\x80\x3f" * 4000
"""Of bfloat16."""
PROTECTIONS = {method: Protection(method, () if method is Method.CHECKSUM else (SECRET,)) for method in Method}


def predictable() -> Callable[[int], bytes]:
    numbers = count(1)
    return lambda length: bytes([next(numbers)]) * length


def seal(method: Method = Method.CHECKSUM, payload: bytes = PAYLOAD, mask: int = 5) -> bytearray:
    random_bytes = predictable()
    return object_envelope.seal(KEY, NAMESPACE, mask, memoryview(payload), PROTECTIONS[method], random_bytes)


def unseal(
    sealed: bytes | bytearray,
    protection: Protection,
    key: bytes = KEY,
    namespace: bytes = NAMESPACE,
    length: int = len(PAYLOAD),
) -> tuple[int, bytes]:
    buffer = bytearray(length)
    mask = object_envelope.unseal(memoryview(sealed), key, namespace, protection, memoryview(buffer))
    return mask, bytes(buffer)


methods = pytest.mark.parametrize("method", list(Method), ids=lambda method: method.label)


@methods
def test_a_parcel_brings_what_was_sealed(method: Method) -> None:
    sealed = seal(method)
    assert (
        len(sealed)
        == object_envelope.sealed_bytes(len(PAYLOAD))
        == object_envelope.HEAD_BYTES + len(PAYLOAD)
        == 192 + len(PAYLOAD)
    )
    assert unseal(sealed, PROTECTIONS[method]) == (5, PAYLOAD)
    head = object_envelope.parse_head(
        memoryview(sealed)[: object_envelope.HEAD_BYTES], KEY, NAMESPACE, PROTECTIONS[method]
    )
    assert (head.mask, head.length) == (5, len(PAYLOAD))
    assert (PAYLOAD in sealed) == (method is not Method.AES_256_GCM)


def test_the_bytes_are_those_of_the_documentation() -> None:
    sealed = bytes(seal())
    assert sealed[:64] == b"STOWPCL1" + b"\x01\x00" + bytes(54)
    assert sealed[64:72] == b"STWC" + b"\x01\x00" + b"\x00\x00"
    assert sealed[72:104] == KEY and sealed[104:136] == NAMESPACE
    assert sealed[136:152] == (5).to_bytes(8, "little") + len(PAYLOAD).to_bytes(8, "little")
    assert sealed[152:176] == bytes(24)
    assert sealed[176:192].hex() == "4c6efdc414b506dccb8dbd6a36c54574"
    assert sealed[192:] == PAYLOAD


def test_a_keyed_preface_names_its_key_and_is_salted() -> None:
    sealed = bytes(seal(Method.BLAKE3))
    assert sealed[8:12] == b"\x01\x00\x01\x00" and sealed[12:16] == bytes(4)
    assert sealed[16:24] == b"\x02" * 8 and sealed[24:32] == SECRET.id
    assert sealed[32:48] == b"\x01" * 16 and sealed[48:64] == bytes(16)


@methods
def test_every_bit_counts(method: Method) -> None:
    sealed = seal(method)
    for bit in range(8 * len(sealed)):
        sealed[bit // 8] ^= 1 << bit % 8
        with pytest.raises(FormatError):
            unseal(sealed, PROTECTIONS[method])
        sealed[bit // 8] ^= 1 << bit % 8
    assert unseal(sealed, PROTECTIONS[method]) == (5, PAYLOAD)


@methods
def test_every_length_counts(method: Method) -> None:
    sealed = seal(method)
    for length in range(len(sealed)):
        with pytest.raises(FormatError):
            unseal(sealed[:length], PROTECTIONS[method])
    for more in (b"\0", b"x" * 4096):
        with pytest.raises(FormatError, match="payload of"):
            unseal(sealed + more, PROTECTIONS[method])


@methods
def test_another_key_namespace_or_length_is_refused(method: Method) -> None:
    sealed = seal(method)
    for asked in ({"key": OTHER_KEY}, {"namespace": OTHER_NAMESPACE}):
        with pytest.raises(FormatError, match="another key or namespace"):
            unseal(sealed, PROTECTIONS[method], **asked)  # type: ignore[arg-type]
    for length in (0, len(PAYLOAD) - 1, len(PAYLOAD) + 1):
        with pytest.raises(FormatError, match=f"for {length}"):
            unseal(sealed, PROTECTIONS[method], length=length)


@methods
def test_two_payloads_that_were_swapped_are_refused(method: Method) -> None:
    one, two = seal(method), seal(method, PAYLOAD[::-1])
    with pytest.raises(FormatError, match="not stored under this key"):
        unseal(one[: object_envelope.HEAD_BYTES] + two[object_envelope.HEAD_BYTES :], PROTECTIONS[method])


@methods
@pytest.mark.parametrize("reader", list(Method), ids=lambda method: method.label)
def test_only_the_readers_own_protection_is_read(method: Method, reader: Method) -> None:
    sealed = seal(method)
    if method is reader:
        return
    with pytest.raises(object_envelope.Unreadable, match="another protection"):
        unseal(sealed, PROTECTIONS[reader])


@pytest.mark.parametrize("method", [Method.BLAKE3, Method.AES_256_GCM], ids=lambda method: method.label)
def test_keys_are_rotated(method: Method) -> None:
    sealed = seal(method)
    assert unseal(sealed, Protection(method, (OTHER_SECRET, SECRET))) == (5, PAYLOAD)
    with pytest.raises(object_envelope.Unreadable, match="a key that is not there"):
        unseal(sealed, Protection(method, (OTHER_SECRET,)))


@pytest.mark.parametrize("method", [Method.BLAKE3, Method.AES_256_GCM], ids=lambda method: method.label)
def test_two_parcels_of_one_chunk_share_no_key(method: Method) -> None:
    """Id and salt are drawn anew each time, so no nonce meets a key twice."""
    random_bytes = predictable()
    first, second = (
        object_envelope.seal(KEY, NAMESPACE, 5, memoryview(PAYLOAD), PROTECTIONS[method], random_bytes)
        for _ in range(2)
    )
    assert first[16:48] != second[16:48] and first[176:192] != second[176:192]
    if method is Method.AES_256_GCM:
        assert first[192:] != second[192:]
    assert unseal(first, PROTECTIONS[method]) == unseal(second, PROTECTIONS[method])


def test_another_version_is_told_from_damage() -> None:
    sealed = seal()
    sealed[8] = 2
    with pytest.raises(object_envelope.Unreadable, match="version 2: this reads version 1"):
        unseal(sealed, PROTECTIONS[Method.CHECKSUM])
    with pytest.raises(FormatError, match="not an object envelope"):
        unseal(b"x" * 300, PROTECTIONS[Method.CHECKSUM])
    with pytest.raises(FormatError, match="192 bytes, not 3"):
        unseal(b"abc", PROTECTIONS[Method.CHECKSUM])


@pytest.mark.parametrize("offset", [136, 144], ids=["mask", "length"])
def test_a_head_without_blocks_or_payload_is_refused(offset: int) -> None:
    sealed = seal()
    sealed[offset : offset + 8] = bytes(8)
    with pytest.raises(FormatError, match="without blocks or payload"):
        unseal(sealed, PROTECTIONS[Method.CHECKSUM])


def test_an_unencrypted_buffer_is_untouched_by_a_bad_payload() -> None:
    sealed = seal()
    sealed[-1] ^= 1
    buffer = bytearray(b"\xee" * len(PAYLOAD))
    with pytest.raises(FormatError):
        object_envelope.unseal(memoryview(sealed), KEY, NAMESPACE, PROTECTIONS[Method.CHECKSUM], memoryview(buffer))
    assert buffer == b"\xee" * len(PAYLOAD)


@methods
def test_packed_payloads_are_verified_before_they_are_unpacked(method: Method) -> None:
    packed = lossless_blocks.pack(ONES)
    random_bytes = predictable()
    sealed = object_envelope.seal(KEY, NAMESPACE, 5, memoryview(packed), PROTECTIONS[method], random_bytes, packed=True)
    assert unseal(sealed, PROTECTIONS[method], length=8000) == (5, ONES)
    sealed[-1] ^= 1
    with pytest.raises(FormatError, match="not stored under this key"):
        unseal(sealed, PROTECTIONS[method], length=8000)


@methods
def test_a_payload_that_a_later_version_packed(method: Method) -> None:
    later = bytearray(lossless_blocks.pack(ONES))
    later[4] += 1  # the number of the code
    random_bytes = predictable()
    sealed = object_envelope.seal(KEY, NAMESPACE, 5, memoryview(later), PROTECTIONS[method], random_bytes, packed=True)
    with pytest.raises(object_envelope.Unreadable, match="does not know"):
        unseal(sealed, PROTECTIONS[method], length=8000)
