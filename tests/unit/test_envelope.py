"""The envelope of one chunk, as it lies at rest. That every bit of it counts is in `test_protection`."""

from __future__ import annotations

import hashlib

import pytest

from stowage.storage.format import envelope
from tests.segment_surgery import header_of

KEY, NAMESPACE = bytes(range(32)), bytes(range(32, 64))


def test_the_bytes_at_rest_do_not_change_between_versions() -> None:
    header = header_of(KEY, NAMESPACE, 0b1011, b"stowage" * 100)
    assert header[:8] == b"STWC\x01\x00\x00\x00" and len(header) == envelope.HEADER_BYTES
    assert hashlib.sha256(header).hexdigest() == "773b75478f85c54646f014d70b077913d60274df3782e454ba50457c495eb43a"


def test_a_payload_belongs_to_its_key_namespace_and_mask() -> None:
    payload = b"the same bytes"
    headers = [
        header_of(KEY, NAMESPACE, 1, payload),
        header_of(NAMESPACE, NAMESPACE, 1, payload),
        header_of(KEY, KEY, 1, payload),
        header_of(KEY, NAMESPACE, 2, payload),
    ]
    assert len({header[-envelope.DIGEST_BYTES :] for header in headers}) == 4


@pytest.mark.parametrize(
    ("key", "namespace", "mask", "length"),
    [(KEY[1:], NAMESPACE, 1, 1), (KEY, NAMESPACE + b"x", 1, 1), (KEY, NAMESPACE, 0, 1), (KEY, NAMESPACE, 1, 0)],
)
def test_what_could_not_be_read_back_is_not_packed(key: bytes, namespace: bytes, mask: int, length: int) -> None:
    with pytest.raises(AssertionError):
        envelope.pack_fields(key, namespace, mask, length)
