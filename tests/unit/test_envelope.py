"""The envelope of one chunk: every bit of header and payload counts."""

from __future__ import annotations

import hashlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stowage.errors import FormatError
from stowage.storage.format import envelope

KEY, NAMESPACE = bytes(range(32)), bytes(range(32, 64))


@given(
    payload=st.binary(min_size=1, max_size=300), mask=st.integers(1, 2**64 - 1), key=st.binary(min_size=32, max_size=32)
)
def test_a_header_says_what_was_packed(payload: bytes, mask: int, key: bytes) -> None:
    header = envelope.pack_header(key, NAMESPACE, mask, memoryview(payload))
    parsed = envelope.parse_header(header)
    assert (parsed.key, parsed.namespace, parsed.mask, parsed.length) == (key, NAMESPACE, mask, len(payload))
    assert envelope.verify(parsed, memoryview(payload))


def test_the_bytes_at_rest_do_not_change_between_versions() -> None:
    header = envelope.pack_header(KEY, NAMESPACE, 0b1011, memoryview(b"stowage" * 100))
    assert header[:8] == b"STWC\x01\x00\x00\x00"
    assert hashlib.sha256(header).hexdigest() == "773b75478f85c54646f014d70b077913d60274df3782e454ba50457c495eb43a"


def test_every_flipped_bit_of_a_header_is_noticed() -> None:
    payload = memoryview(b"some bytes")
    header = envelope.pack_header(KEY, NAMESPACE, 3, payload)
    for bit in range(8 * len(header)):
        damaged = bytearray(header)
        damaged[bit // 8] ^= 1 << bit % 8
        try:
            parsed = envelope.parse_header(bytes(damaged))
        except FormatError:
            continue
        if 88 * 8 <= bit < 112 * 8:
            # Reserved bytes say nothing yet; the checksum is taken as if they were 0.
            assert parsed == envelope.parse_header(header)
        else:
            assert not envelope.verify(parsed, payload), f"bit {bit}"


def test_every_flipped_bit_of_a_payload_is_noticed() -> None:
    payload = bytearray(b"payload of a chunk")
    parsed = envelope.parse_header(envelope.pack_header(KEY, NAMESPACE, 3, memoryview(payload)))
    for bit in range(8 * len(payload)):
        payload[bit // 8] ^= 1 << bit % 8
        assert not envelope.verify(parsed, memoryview(payload))
        payload[bit // 8] ^= 1 << bit % 8
    assert envelope.verify(parsed, memoryview(payload))


def test_a_shorter_or_longer_payload_does_not_verify() -> None:
    parsed = envelope.parse_header(envelope.pack_header(KEY, NAMESPACE, 1, memoryview(b"12345")))
    assert not envelope.verify(parsed, memoryview(b"1234"))
    assert not envelope.verify(parsed, memoryview(b"123450"))


def test_a_payload_belongs_to_its_key_namespace_and_mask() -> None:
    payload = memoryview(b"the same bytes")
    digests = {
        envelope.checksum(KEY, NAMESPACE, 1, payload),
        envelope.checksum(NAMESPACE, NAMESPACE, 1, payload),
        envelope.checksum(KEY, KEY, 1, payload),
        envelope.checksum(KEY, NAMESPACE, 2, payload),
    }
    assert len(digests) == 4


@pytest.mark.parametrize(
    ("place", "value", "complaint"),
    [
        (0, b"XXXX", "not an envelope"),
        (4, b"\x02\x00", "version 2"),
        (6, b"\x01\x00", "flags 1"),
        (72, bytes(8), "blocks"),
    ],
)
def test_what_this_version_cannot_read_is_refused(place: int, value: bytes, complaint: str) -> None:
    header = bytearray(envelope.pack_header(KEY, NAMESPACE, 1, memoryview(b"x")))
    header[place : place + len(value)] = value
    with pytest.raises(FormatError, match=complaint):
        envelope.parse_header(bytes(header))


def test_a_header_of_another_length_is_refused() -> None:
    with pytest.raises(FormatError, match="128 bytes"):
        envelope.parse_header(bytes(127))


@pytest.mark.parametrize(
    ("place", "value", "says"),
    [
        (0, b"stwc", "not an envelope"),
        (4, b"\x02\x00", "envelope version 2, flags 0: this reads version 1, flags 0"),
        (6, b"\x02\x00", "envelope version 1, flags 2: this reads version 1, flags 0"),
        (72, bytes(8), "an envelope without blocks or payload"),
        (80, bytes(8), "an envelope without blocks or payload"),
    ],
)
def test_a_refusal_says_why(place: int, value: bytes, says: str) -> None:
    header = bytearray(envelope.pack_header(KEY, NAMESPACE, 1, memoryview(b"x")))
    header[place : place + len(value)] = value
    with pytest.raises(FormatError, match=f"^{says}$"):
        envelope.parse_header(bytes(header))


@pytest.mark.parametrize(
    ("key", "namespace", "mask", "payload"),
    [
        (KEY[1:], NAMESPACE, 1, b"x"),
        (KEY, NAMESPACE + b"x", 1, b"x"),
        (KEY, NAMESPACE, 0, b"x"),
        (KEY, NAMESPACE, 1, b""),
    ],
)
def test_what_could_not_be_read_back_is_not_packed(key: bytes, namespace: bytes, mask: int, payload: bytes) -> None:
    with pytest.raises(AssertionError):
        envelope.pack_header(key, namespace, mask, memoryview(payload))
