"""Tokens and attributes that are read in one go: in C and in Python alike."""

from __future__ import annotations

import struct
from types import SimpleNamespace

import pytest

from stowage.core import gather
from stowage.native import is_built


@pytest.fixture(params=["c", "python"], autouse=True)
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.param == "c" and not is_built():
        pytest.skip("nothing was compiled")
    monkeypatch.setattr(gather, "_IN_C", request.param == "c")


@pytest.mark.parametrize(("begin", "end"), [(0, 100), (3, 40), (99, 100), (50, 50), (60, 50), (90, 500), (500, 600)])
def test_tokens_are_packed_as_a_slice_has_them(begin: int, end: int) -> None:
    tokens = [number * 42_949_672 + 7 for number in range(100)]
    expected = struct.pack(f"<{len(tokens[begin:end])}I", *tokens[begin:end])
    assert bytes(gather.packed_u32(tokens, begin, end)) == expected
    assert bytes(gather.packed_u32(tuple(tokens), begin, end)) == expected


@pytest.mark.parametrize("wrong", [-1, 1 << 32, 1 << 80, 1.0, "1", None])
def test_what_is_no_token_is_refused(wrong: object) -> None:
    with pytest.raises(ValueError, match="token ids must be integers"):
        gather.packed_u32([1, wrong], 0, 2)  # type: ignore[list-item]
    assert bytes(gather.packed_u32([1, wrong], 0, 1)) == b"\1\0\0\0"  # type: ignore[list-item]


def test_attributes_are_those_of_a_slice() -> None:
    items = [SimpleNamespace(number=str(at)) for at in range(40)]
    assert gather.attributes(items, 5, 30, "number") == [str(at) for at in range(5, 30)]
    assert gather.attributes(items, 38, 50, "number") == ["38", "39"]
    with pytest.raises(AttributeError):
        gather.attributes([*items, object()], 38, 41, "number")


def test_a_list_that_shrinks_while_it_is_read_is_no_harm() -> None:
    items: list[object] = []

    class Shrinking:
        @property
        def number(self) -> int:
            items.clear()
            return 1

    items += [Shrinking() for _ in range(30)]
    try:
        found = gather.attributes(items, 0, 30, "number")
    except RuntimeError:
        return
    assert found == [1] * 30, "a copy was read"
