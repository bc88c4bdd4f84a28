"""The methods of protection: what was sealed opens, and nothing else does; the bytes at rest are as documented."""

from __future__ import annotations

import hashlib
import subprocess
import sys

import pytest
from blake3 import blake3
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from hypothesis import given
from hypothesis import strategies as st

from stowage.config.memory import DISK_PROTECTIONS
from stowage.errors import ConfigError
from stowage.storage.format import envelope
from stowage.storage.format.protection import NO_MARK, Cipher, Guard, Mark, Method, Protection, SecretKey

SECRET = bytes(range(100, 132))
SEGMENT = b"\1\2\3\4\5\6\7\0"
SALT = bytes(range(16))
CHUNK, NAMESPACE = bytes(range(32)), bytes(range(32, 64))
KEYED = [Method.BLAKE3, Method.AES_256_GCM]


def guard_of(method: Method, secret: bytes = SECRET, segment: bytes = SEGMENT, salt: bytes = SALT) -> Guard:
    keys = [] if method is Method.CHECKSUM else [SecretKey(secret)]
    protection = Protection(method, keys)
    guard = protection.guard(segment, protection.new_mark(lambda _: salt))
    assert guard is not None and guard.method is method
    return guard


def fields_of(method: Method, payload: bytes, mask: int = 5) -> bytes:
    return envelope.pack_fields(CHUNK, NAMESPACE, mask, len(payload), method)


def seal(guard: Guard, fields: bytes, offset: int, payload: bytes) -> tuple[bytes, bytes]:
    """What goes to rest, and its digest."""
    if isinstance(guard, Cipher):
        at_rest = bytearray(len(payload))
        stream = guard.encrypt(fields, offset, len(payload))
        stream.update(memoryview(payload), memoryview(at_rest))
        return bytes(at_rest), stream.tag()
    return payload, guard.digest(fields, offset, memoryview(payload))


def unseal(
    guard: Guard, fields: bytes, offset: int, at_rest: bytes, digest: bytes, step: int = 1 << 30
) -> bytes | None:
    """The payload; None where it is refused. `step`: bytes that a cipher is given at once."""
    if isinstance(guard, Cipher):
        payload = bytearray(len(at_rest))
        stream = guard.decrypt(fields, offset, digest)
        for at in range(0, len(at_rest), step):
            stream.update(memoryview(at_rest)[at : at + step], memoryview(payload)[at : at + step])
        return bytes(payload) if stream.verify() else None
    return at_rest if guard.verify(fields, offset, memoryview(at_rest), digest) else None


def flipped(data: bytes, bit: int) -> bytes:
    copy = bytearray(data)
    copy[bit // 8] ^= 1 << bit % 8
    return bytes(copy)


@given(
    payload=st.binary(min_size=1, max_size=3000),
    page=st.integers(0, 1 << 40),
    secret=st.binary(min_size=32, max_size=32),
    mask=st.integers(1, 2**64 - 1),
    step=st.integers(1, 4000),
    method=st.sampled_from(Method),
)
def test_what_was_sealed_opens(payload: bytes, page: int, secret: bytes, mask: int, step: int, method: Method) -> None:
    fields, offset = fields_of(method, payload, mask), page * 4096
    at_rest, digest = seal(guard_of(method, secret), fields, offset, payload)
    assert len(at_rest) == len(payload) and len(digest) == envelope.DIGEST_BYTES
    assert unseal(guard_of(method, secret), fields, offset, at_rest, digest, step) == payload


@pytest.mark.parametrize("method", Method)
def test_every_flipped_bit_of_fields_payload_and_digest_is_refused(method: Method) -> None:
    payload = b"the payload of a chunk"
    fields, guard = fields_of(method, payload), guard_of(method)
    at_rest, digest = seal(guard, fields, 8192, payload)
    for bit in range(8 * len(fields)):
        assert unseal(guard, flipped(fields, bit), 8192, at_rest, digest) is None
    for bit in range(8 * len(at_rest)):
        assert unseal(guard, fields, 8192, flipped(at_rest, bit), digest) is None
    for bit in range(8 * len(digest)):
        assert unseal(guard, fields, 8192, at_rest, flipped(digest, bit)) is None
    assert unseal(guard, fields, 8192, at_rest[:-1], digest) is None
    assert unseal(guard, fields, 8192, at_rest + b"\0", digest) is None
    assert unseal(guard, fields, 8192, at_rest, digest) == payload


@pytest.mark.parametrize("method", KEYED)
def test_another_place_segment_salt_key_or_method_is_refused(method: Method) -> None:
    payload = bytes(100)
    fields = fields_of(method, payload)
    at_rest, digest = seal(guard_of(method), fields, 8192, payload)
    assert unseal(guard_of(method), fields, 12288, at_rest, digest) is None, "moved within the segment"
    for other in (
        guard_of(method, segment=b"\1\2\3\4\5\6\7\1"),
        guard_of(method, salt=bytes(16)),
        guard_of(method, secret=SECRET[::-1]),
        *(guard_of(another) for another in Method if another is not method),
    ):
        assert unseal(other, fields, 8192, at_rest, digest) is None


def test_a_keyed_hash_is_as_documented() -> None:
    """docs/format.md, "Protection", written out once more."""
    root = blake3(SECRET, derive_key_context="stowage 2026 root of the keys of segments, encoding 1").digest()
    key = blake3(b"\1\0" + SEGMENT + SALT, key=root).digest()
    fields = fields_of(Method.BLAKE3, b"payload")
    expected = blake3(fields + (8192).to_bytes(8, "little") + b"payload", key=key).digest()[:16]
    assert seal(guard_of(Method.BLAKE3), fields, 8192, b"payload") == (b"payload", expected)


def test_encryption_is_as_documented() -> None:
    root = blake3(SECRET, derive_key_context="stowage 2026 root of the keys of segments, encoding 1").digest()
    key = blake3(b"\2\0" + SEGMENT + SALT, key=root).digest()
    fields = fields_of(Method.AES_256_GCM, b"payload")
    expected = AESGCM(key).encrypt((8192).to_bytes(12, "little"), b"payload", fields)
    assert seal(guard_of(Method.AES_256_GCM), fields, 8192, b"payload") == (expected[:-16], expected[-16:])


def test_the_bytes_at_rest_do_not_change_between_versions() -> None:
    assert SecretKey(SECRET).id.hex() == "d979adb8064c75cc"
    sealed = [b"".join(seal(guard_of(method), fields_of(method, b"x" * 99), 4096, b"x" * 99)) for method in Method]
    assert (
        hashlib.sha256(b"".join(sealed)).hexdigest()
        == "0ccaff3d3900ff1a57e5921142d57a0cff547d5cdaff92e200b86e8c63bb2029"
    )


def test_a_place_is_encrypted_once() -> None:
    """The offset is the nonce: two payloads under one would give both away, and the means to forge."""
    guard = guard_of(Method.AES_256_GCM)
    assert isinstance(guard, Cipher)
    fields = fields_of(Method.AES_256_GCM, bytes(5000))
    guard.encrypt(fields, 8192, 5000)
    for offset in (0, 4096, 8192, 12288):
        with pytest.raises(AssertionError, match="once"):
            guard.encrypt(fields, offset, 5000)
    guard.encrypt(fields, 16384, 5000)


def test_a_place_is_encrypted_once_under_optimisation_too() -> None:
    code = (
        "from stowage.storage.format.protection import Cipher\nassert False, 'not optimised'\n"
        "guard = Cipher(bytes(32))\nguard.encrypt(b'', 4096, 1)\nguard.encrypt(b'', 4096, 1)\n"
    )
    ended = subprocess.run([sys.executable, "-O", "-c", code], capture_output=True, text=True, timeout=60)
    assert ended.returncode == 1 and "encrypted once" in ended.stderr


def test_only_segments_of_the_own_method_and_keys_are_opened() -> None:
    old, new, stranger = (SecretKey(bytes([n]) * 32) for n in range(3))
    for method in KEYED:
        protection = Protection(method, [new, old])
        mark = protection.new_mark(bytes)
        assert mark == Mark(method, new.id, bytes(16)), "the first key is the one for writing"
        assert protection.guard(SEGMENT, mark) is not None
        assert protection.guard(SEGMENT, Mark(method, old.id, SALT)) is not None
        assert protection.guard(SEGMENT, Mark(method, stranger.id, SALT)) is None
        assert protection.guard(SEGMENT, NO_MARK) is None, "a downgrade to a checksum"
        for number in range(8):
            if number != method:
                assert protection.guard(SEGMENT, Mark(number, new.id, SALT)) is None
    assert Protection().guard(SEGMENT, NO_MARK) is not None
    for number in (1, 2, 3, 65535):
        assert Protection().guard(SEGMENT, Mark(number, bytes(8), bytes(16))) is None


def test_segments_and_methods_share_no_key() -> None:
    key = SecretKey(SECRET)
    derived = {
        key.segment_key(method, segment, salt)
        for method in KEYED
        for segment in (SEGMENT, bytes(8))
        for salt in (SALT, bytes(16))
    }
    assert len(derived) == 8 and SECRET not in derived


def test_no_representation_shows_a_secret() -> None:
    key = SecretKey(SECRET)
    protection = Protection(Method.AES_256_GCM, [key])
    guards = [guard_of(method) for method in Method]
    stream = guards[2].encrypt(bytes(112), 4096, 1) if isinstance(guards[2], Cipher) else None
    derived = [key.segment_key(method, SEGMENT, SALT) for method in KEYED]
    for thing in (key, protection, *guards, stream):
        shown = f"{thing!r} {thing}"
        for secret in (SECRET, *derived):
            assert secret.hex() not in shown and repr(secret)[2:-1] not in shown


def test_the_labels_are_those_of_the_setting() -> None:
    assert tuple(method.label for method in Method) == DISK_PROTECTIONS
    assert [Method.labelled(label) for label in DISK_PROTECTIONS] == list(Method)


def test_a_missing_package_is_named_with_the_command_that_installs_it(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in sys.modules if name.partition(".")[0] == "cryptography"]:
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(ConfigError, match=r"pip install 'stowage\[encryption\]'"):
        Protection(Method.AES_256_GCM, [SecretKey(SECRET)])
    assert guard_of(Method.CHECKSUM) and guard_of(Method.BLAKE3), "the others do not need it"


def test_without_the_package_only_encryption_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cryptography.exceptions", None)
    assert guard_of(Method.BLAKE3) is not None
    with pytest.raises(ConfigError) as raised:
        Protection(Method.AES_256_GCM, [SecretKey(SECRET)])
    assert str(raised.value) == (
        "Encryption at rest needs the package cryptography, which is not installed. "
        "Install it: pip install 'stowage[encryption]'"
    )


def test_a_key_is_revealed_for_its_file() -> None:
    assert SecretKey(SECRET).reveal() == SECRET.hex()


def test_offsets_may_follow_one_another_without_a_gap() -> None:
    """A payload of whole pages ends where the next one begins."""
    guard = guard_of(Method.AES_256_GCM)
    assert isinstance(guard, Cipher)
    for page in range(3):
        guard.encrypt(b"", page * 4096, 4096)
    with pytest.raises(AssertionError, match=r"^an offset of a segment is encrypted once$"):
        guard.encrypt(b"", 3 * 4096 - 1, 4096)


@pytest.mark.parametrize("method", Method)
def test_a_method_has_keys_exactly_if_it_needs_them(method: Method) -> None:
    keys = [SecretKey(SECRET)] if method is Method.CHECKSUM else []
    with pytest.raises(AssertionError, match=r"^a checksum has no key, the others need one$"):
        Protection(method, keys)
