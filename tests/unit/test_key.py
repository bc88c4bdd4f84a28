"""Keys: golden vectors, independence of how tokens arrive, and that everything named changes the key (case F3)."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from stowage.core import gather
from stowage.core.geometry import Group, Kind
from stowage.core.key import (
    KEY_BYTES,
    Chain,
    Field,
    SequenceKeys,
    adapter_namespace,
    group_keys,
    namespace,
    private_key,
    tenant_namespace,
)
from tests import golden_keys

ROOT = Path(__file__).parents[2]
GOLDEN: dict[str, list[Any]] = json.loads((ROOT / "tests" / "unit" / "golden_keys.json").read_text(encoding="utf-8"))
SPACE = namespace({"model": "test"})


def field_from_json(value: Any) -> Any:
    """Bytes are written as {"hex": ...}."""
    match value:
        case {"hex": str(digits)} if len(value) == 1:
            return bytes.fromhex(digits)
        case dict():
            return {name: field_from_json(inner) for name, inner in value.items()}
        case list():
            return [field_from_json(inner) for inner in value]
    return value


@pytest.mark.parametrize("vector", GOLDEN["namespaces"])
def test_golden_namespaces(vector: dict[str, Any]) -> None:
    fields = field_from_json(vector["fields"])
    assert namespace(fields).hex() == vector["digest"]
    assert namespace(dict(reversed(fields.items()))).hex() == vector["digest"]


@pytest.mark.parametrize("vector", GOLDEN["chains"])
def test_golden_chains(vector: dict[str, Any]) -> None:
    space = bytes.fromhex(vector["namespace"])
    media = [(position, bytes.fromhex(digest)) for position, digest in vector["media"]]
    for tokens in (vector["tokens"], np.array(vector["tokens"]), np.array(vector["tokens"], dtype=">u4")):
        digests = Chain(space, vector["chunk_tokens"]).extend(tokens, media)
        assert [digest.hex() for digest in digests] == vector["digests"]


@pytest.mark.parametrize("vector", GOLDEN["group_keys"])
def test_golden_group_keys(vector: dict[str, Any]) -> None:
    assert group_keys([bytes.fromhex(vector["digest"])], vector["group"]) == [bytes.fromhex(vector["key"])]


@pytest.mark.parametrize("vector", GOLDEN["private_keys"])
def test_golden_private_keys(vector: dict[str, Any]) -> None:
    space, nonce = bytes.fromhex(vector["namespace"]), bytes.fromhex(vector["nonce"])
    key = private_key(space, vector["sequence_id"], vector["group"], vector["chunk"], nonce)
    assert key.hex() == vector["key"]


@pytest.mark.parametrize("vector", GOLDEN["tenants"])
def test_golden_tenants(vector: dict[str, Any]) -> None:
    salt = vector["salt"]["text"] if "text" in vector["salt"] else bytes.fromhex(vector["salt"]["hex"])
    assert tenant_namespace(bytes.fromhex(vector["namespace"]), salt).hex() == vector["digest"]


def test_a_hundred_golden_keys() -> None:
    assert list(golden_keys.hundred()) == GOLDEN["hundred"] and len(set(GOLDEN["hundred"])) == 97  # 3 empty salts


def printed_by(python: str, seed: str) -> list[str]:
    """The hundred keys as another process makes them, on another interpreter and hash seed."""
    environment = {**os.environ, "PYTHONHASHSEED": seed, "PYTHONPATH": str(ROOT / "src")}
    program = [python, str(ROOT / "tests" / "golden_keys.py")]
    return subprocess.run(program, env=environment, check=True, capture_output=True, text=True).stdout.split()


@pytest.mark.parametrize("seed", ["0", "1", "random"])
def test_keys_do_not_depend_on_process_or_hash_seed(seed: str) -> None:
    assert printed_by(sys.executable, seed) == GOLDEN["hundred"]


@pytest.mark.parametrize("version", ["3.11", "3.12", "3.13", "3.14"])
def test_keys_do_not_depend_on_the_python_version(version: str) -> None:
    """Every Python on the PATH, or that pyenv installed. One without numpy and blake3 cannot be asked."""
    own = sys.executable if version == f"{sys.version_info.major}.{sys.version_info.minor}" else None
    found = [
        own,
        shutil.which(f"python{version}"),
        *map(str, Path.home().glob(f".pyenv/versions/{version}.*/bin/python")),
    ]
    able = [
        p for p in found if p and subprocess.run([p, "-c", "import numpy, blake3"], capture_output=True).returncode == 0
    ]
    if not able:
        pytest.skip(f"no Python {version} here that has numpy and blake3")
    for python in able:
        assert printed_by(python, "random") == GOLDEN["hundred"], python


@given(st.binary(max_size=40), st.binary(max_size=40))
def test_tenants_have_no_key_in_common(one: bytes, two: bytes) -> None:
    spaces = [tenant_namespace(SPACE, salt) for salt in (one, two)]
    assert (spaces[0] == spaces[1]) == (one == two)
    digests = [Chain(space, 2).extend([1, 2, 3, 4]) for space in spaces]
    assert one == two or not set(digests[0]) & set(digests[1])


def test_the_empty_salt_is_the_engines_own_and_text_is_utf8() -> None:
    assert tenant_namespace(SPACE, "") == tenant_namespace(SPACE, b"") == SPACE
    assert tenant_namespace(SPACE, "größe") == tenant_namespace(SPACE, "größe".encode()) != SPACE
    assert tenant_namespace(SPACE, "a") != tenant_namespace(namespace({"model": "other"}), "a")
    assert tenant_namespace(tenant_namespace(SPACE, "a"), "b") != tenant_namespace(SPACE, "ab")
    with pytest.raises(ValueError, match="surrogates"):
        tenant_namespace(SPACE, "\ud800")


FIELDS: dict[str, tuple[Field, Field]] = {
    "format": (1, 2),
    "weights": (b"\x01\x02", b"\x01\x03"),
    "dtype": ("bfloat16", "float16"),
    "kv_dtype": ("bfloat16", "float8"),
    "layout": (["full", "sliding"], ["sliding", "full"]),
    "block_tokens": (16, 32),
    "parallel": ({"tp": 1, "rank": 0}, {"tp": 1, "rank": 1}),
    "rope": ({"theta": 10000.0, "scaling": None}, {"theta": 10000.5, "scaling": None}),
    "adapter": ("", "lora"),
    "salt": (b"", b"tenant"),
}


@pytest.mark.parametrize("name", sorted(FIELDS))
def test_changing_any_field_changes_every_key(name: str) -> None:
    """F3: a key names everything that the bytes depend on."""
    base = {other: value for other, (value, _) in FIELDS.items()}
    before, after = namespace(base), namespace(base | {name: FIELDS[name][1]})
    without = namespace({other: value for other, value in base.items() if other != name})
    assert len({before, after, without}) == 3
    keys = [group_keys(Chain(space, 2).extend([1, 2, 3, 4]), 0) for space in (before, after)]
    assert not set(keys[0]) & set(keys[1])


def test_namespace_encoding_is_unambiguous() -> None:
    different: list[dict[str, Field]] = [
        {},
        {"a": "bc"},
        {"ab": "c"},
        {"a": "b", "c": ""},
        {"a": 1},
        {"a": "1"},
        {"a": b"1"},
        {"a": True},
        {"a": 1.0},
        {"a": None},
        {"a": []},
        {"a": {}},
        {"a": ["b", "c"]},
        {"a": ["bc"]},
        {"a": [["b"], "c"]},
        {"a": {"b": "c"}},
    ]
    assert len({namespace(fields) for fields in different}) == len(different)
    assert namespace({"a": [1, 2]}) == namespace({"a": (1, 2)})


@pytest.mark.parametrize("fields", [{"a": {1, 2}}, {"a": object()}, {"a": [np.int64(1)]}, {"a": {1: 2}}])
def test_namespace_refuses_what_has_no_canonical_form(fields: Any) -> None:
    with pytest.raises(TypeError):
        namespace(fields)


tokens_lists = st.lists(st.integers(0, 2**32 - 1), max_size=60)


@given(tokens_lists, st.integers(1, 9), st.data())
def test_digests_do_not_depend_on_how_tokens_arrive(tokens: list[int], chunk_tokens: int, data: st.DataObject) -> None:
    media = data.draw(st.lists(st.tuples(st.integers(0, 70), st.binary(max_size=4)), max_size=4))
    once = Chain(SPACE, chunk_tokens).extend(tokens, media)
    assert len(once) == len(tokens) // chunk_tokens

    chain, twin = Chain(SPACE, chunk_tokens), Chain(SPACE, chunk_tokens)
    piecewise, position = [], 0
    while position < len(tokens):
        end = data.draw(st.integers(position + 1, len(tokens)))
        piece = tokens[position:end]
        due = [(place, digest) for place, digest in media if position <= place < end]
        digests = chain.extend(piece if data.draw(st.booleans()) else np.array(piece, dtype=np.uint32), due)
        assert twin.extend(piece, due) == digests
        piecewise += digests
        position = end
    assert piecewise == once


@given(tokens_lists, st.integers(1, 9), st.data())
def test_a_digest_names_the_whole_prefix(tokens: list[int], chunk_tokens: int, data: st.DataObject) -> None:
    if not tokens:
        return
    place = data.draw(st.integers(0, len(tokens) - 1))
    other = [*tokens]
    other[place] ^= 1 << data.draw(st.integers(0, 31))
    before, after = (Chain(SPACE, chunk_tokens).extend(each) for each in (tokens, other))
    equal = [left == right for left, right in zip(before, after, strict=True)]
    assert equal == [index < place // chunk_tokens for index in range(len(equal))]


def test_media_change_the_chunk_they_fall_into_and_all_after() -> None:
    tokens = list(range(12))
    plain = Chain(SPACE, 4).extend(tokens)
    pictured = Chain(SPACE, 4).extend(tokens, [(7, b"picture")])
    assert [a == b for a, b in zip(plain, pictured, strict=True)] == [True, False, False]
    moved = Chain(SPACE, 4).extend(tokens, [(6, b"picture")])
    another = Chain(SPACE, 4).extend(tokens, [(7, b"picturf")])
    assert len({plain[1], pictured[1], moved[1], another[1]}) == 4
    joined = Chain(SPACE, 4).extend(tokens, [(4, b"ab")])
    split = Chain(SPACE, 4).extend(tokens, [(4, b"a"), (4, b"b")])
    assert joined[1] != split[1]


def test_media_of_a_complete_chunk_are_refused_and_change_nothing() -> None:
    chain = Chain(SPACE, 4)
    chain.extend([1, 2, 3, 4, 5])
    with pytest.raises(ValueError, match="too late"):
        chain.extend([6, 7, 8], [(3, b"picture")])
    assert chain.extend([6, 7, 8]) == Chain(SPACE, 4).extend([1, 2, 3, 4, 5, 6, 7, 8])[1:]


@pytest.mark.parametrize(
    "tokens",
    [
        [1, -1],
        [1 << 32],
        [1 << 70],
        [1.0],
        ["1"],
        np.array([1 << 32]),
        np.array([-1]),
        np.array([1.0]),
        np.array([[1], [2]]),
    ],
)
def test_tokens_out_of_range_are_refused_and_change_nothing(tokens: Any) -> None:
    chain = Chain(SPACE, 2)
    chain.extend([1])
    with pytest.raises(ValueError, match="token ids"):
        chain.extend(tokens)
    assert chain.extend([2]) == Chain(SPACE, 2).extend([1, 2])


def test_array_slices_are_read_in_their_own_order() -> None:
    tokens = np.arange(40)
    assert Chain(SPACE, 4).extend(tokens[::-2]) == Chain(SPACE, 4).extend(list(range(39, 0, -2)))
    assert Chain(SPACE, 4).extend(range(8)) == Chain(SPACE, 4).extend(bytes(range(8)))


def test_group_and_private_keys_are_distinct_and_32_bytes() -> None:
    digests = Chain(SPACE, 1).extend([1, 2, 3])
    keys = [key for group in (0, 1, 256, 65535) for key in group_keys(digests, group)]
    keys += [private_key(SPACE, sequence, group, chunk, nonce)
             for sequence in (0, 1) for group in (0, 1) for chunk in (0, 1) for nonce in (b"", b"a")]  # fmt: skip
    assert len(set(keys)) == len(keys) == 12 + 16
    assert {len(key) for key in keys} == {KEY_BYTES}
    with pytest.raises(OverflowError):
        group_keys(digests, 65536)


def test_a_chain_refuses_a_wrong_namespace_or_chunk() -> None:
    with pytest.raises(ValueError, match="32 bytes"):
        Chain(b"short", 16)
    with pytest.raises(ValueError, match="chunk_tokens"):
        Chain(SPACE, 0)


def test_media_at_the_first_token_of_a_chunk_belong_to_that_chunk() -> None:
    tokens = list(range(12))
    plain, pictured = Chain(SPACE, 4).extend(tokens), Chain(SPACE, 4).extend(tokens, [(4, b"picture")])
    assert [a == b for a, b in zip(plain, pictured, strict=True)] == [True, False, False]


def test_media_that_come_too_late_are_told_where_they_are_and_where_they_could_be() -> None:
    chain = Chain(SPACE, 4)
    chain.extend(range(9))
    with pytest.raises(ValueError, match=r"^media at token 7 come too late: the chunks before 8 have digests$"):
        chain.extend([9], [(8, b"in time"), (7, b"too late")])


@pytest.mark.skipif(sys.byteorder == "big", reason="seen from a little-endian machine")
def test_a_big_endian_machine_turns_its_tokens_round(monkeypatch: pytest.MonkeyPatch) -> None:
    """Seen from here: told that it is one, this machine turns tokens that lie the right way already."""
    tokens = [0x01020304, 0xA0B0C0D0]
    mirrored = [int.from_bytes(token.to_bytes(4, "little"), "big") for token in tokens]
    expected = Chain(SPACE, 2).extend(mirrored)
    monkeypatch.setattr(gather, "_IN_C", False)  # where numbers are taken apart, not turned round
    monkeypatch.setattr(sys, "byteorder", "big")
    assert Chain(SPACE, 2).extend(tokens) == expected
    monkeypatch.undo()
    assert Chain(SPACE, 2).extend(tokens) != expected


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"a": {1: 2}}, "the names of a namespace's fields are strings"),
        ({1: 2}, "the names of a namespace's fields are strings"),
        ({"a": [object()]}, "a namespace's field cannot be a object"),
        ({"a": np.int64(1)}, "a namespace's field cannot be a int64"),
    ],
)
def test_what_cannot_be_named_is_said(fields: Any, says: str) -> None:
    with pytest.raises(TypeError, match=f"^{says}$"):
        namespace(fields)


def test_a_token_out_of_range_is_told_the_range() -> None:
    with pytest.raises(ValueError, match=r"^token ids must be in \[0, 2\^32\)$"):
        Chain(SPACE, 2).extend(np.array([-1]))


def test_a_sequence_has_the_keys_of_each_groups_own_chunks() -> None:
    groups = [Group(0, Kind.FULL, 4, 2, 1), Group(1, Kind.SLIDING, 4, 1, 1, window=4), Group(2, Kind.FULL, 4, 2, 1)]
    keys, tokens = SequenceKeys(bytes(32), groups), list(range(30))
    for end in (3, 10, 10, 7, 26):
        keys.extend(tokens, end)
    for group, size in zip(groups, (8, 4, 8), strict=True):
        assert keys.of(group.index) == group_keys(Chain(bytes(32), size).extend(tokens[:26]), group.index)
        known = keys.of(group.index)
        assert known == keys.of(group.index), "asked for again"
        pairs = [keys.one_and_before(group.index, chunk) for chunk in range(len(known))]
        assert pairs == [*zip(known, [b"", *known], strict=False)]


def test_keys_that_look_ahead_tell_the_tokens_behind_a_chunk() -> None:
    """Each key names the chunk's prefix and ``lookahead`` tokens more, all of them, and the media among them."""
    group = Group(0, Kind.FULL, 4, 2, 1)

    def keys(tokens: list[int], lookahead: int, media: list[tuple[int, bytes]] | None = None) -> list[bytes]:
        found = SequenceKeys(SPACE, [group], lookahead)
        found.extend(tokens, 5, media or [])
        found.extend(tokens, len(tokens) - lookahead)
        return found.of(0)

    tokens = list(range(1, 27))
    for lookahead in (1, 3):
        mine = keys(tokens, lookahead)
        assert len(mine) == (26 - lookahead) // 8
        for position in range(len(tokens)):
            changed = [*tokens[:position], 99, *tokens[position + 1 :]]
            first = max(0, -(-(position + 1 - lookahead) // 8) - 1)
            theirs = keys(changed, lookahead)
            assert theirs[:first] == mine[:first]
            assert all(one != other for one, other in zip(theirs[first:], mine[first:], strict=True))
        assert not set(mine) & set(keys(tokens, 0)) and not set(mine) & set(keys(tokens, lookahead + 1))
        at_start, later = keys(tokens, lookahead, [(0, b"one")]), keys(tokens, lookahead, [(8 + lookahead, b"one")])
        assert at_start[0] != mine[0]
        assert later[0] == mine[0] and later[1] != mine[1]


def test_prompts_with_an_adapter_have_keys_of_their_own() -> None:
    one, two = bytes([1]) * 32, bytes([2]) * 32
    spaces = {adapter_namespace(SPACE, digest) for digest in (b"", one, two)}
    assert len(spaces) == 3 and adapter_namespace(SPACE, b"") == SPACE
    assert adapter_namespace(SPACE, one) != tenant_namespace(SPACE, one), "a tenant's salt makes no adapter's keys"
