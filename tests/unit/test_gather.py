"""Tokens and attributes that are read in one go: in C and in Python alike."""

from __future__ import annotations

import struct
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

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


class Slotted:
    __slots__ = ("before", "number")

    def __init__(self, number: object) -> None:
        self.number = number


@pytest.mark.parametrize("kind", [Slotted, lambda number: SimpleNamespace(number=number)], ids=["slots", "dict"])
def test_rows_are_read_of_several_lists(kind: Callable[[int], Any]) -> None:
    """Those that end in their list, and have no number that is not wanted."""
    numbers = [[1000 * row + at + 1 for at in range(20)] for row in range(40)]
    numbers[7][13] = 0
    lists = [[kind(number) for number in row] for row in numbers]
    begins = [row % 16 for row in range(40)]  # some are behind the 0, and some too far back
    short = [row for row in range(40) if row % 16 > 12]
    found, missing = gather.rows(lists, begins, 8, "number", 0)
    assert missing == [7, *short]
    whole = [row for row in range(40) if row not in missing]
    assert found == [number for row in whole for number in numbers[row][begins[row] : begins[row] + 8]]
    assert gather.rows([[], lists[0]], [0, 19], 1, "number", 0) == ([20], [0])
    assert gather.rows([], [], 8, "number", 0) == ([], [])
    assert gather.rows([[]], [0], 8, "number", 0) == ([], [0])


def test_rows_of_unlike_things_are_read_one_by_one() -> None:
    class Other:
        number = 5

    class Unlike(Slotted):
        def __getattribute__(self, name: str) -> Any:
            return 9 if name == "number" else super().__getattribute__(name)

    assert gather.rows([[Slotted(3), Other()], [Unlike(1), Unlike(2)]], [0, 0], 2, "number", 0) == ([3, 5, 9, 9], [])
    assert gather.rows([[Unlike(1)]], [0], 1, "number", 9) == ([], [0])
    empty = Slotted(1)
    del empty.number
    with pytest.raises(AttributeError):
        gather.rows([[Slotted(3), empty]], [0], 2, "number", 0)
    with pytest.raises(AttributeError):
        gather.rows([[Slotted(3)]], [0], 1, "size", 0)


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
