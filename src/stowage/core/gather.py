"""Reads values of many Python objects in one call: in C where that was built, else in Python.

The tokens of a request and the blocks of its cache are Python objects, made one per step between those of all other
requests, so reading each is a cache miss. The compiled code prefetches the next ones while it reads one.
"""

from __future__ import annotations

import array
import sys
from collections.abc import Iterable, Sequence
from typing import Any

from stowage.native import extension as _native
from stowage.native import is_wanted

_IN_C = is_wanted()


def packed_u32(tokens: Sequence[int], begin: int, end: int) -> memoryview:
    """The little-endian bytes of ``tokens[begin:end]``. Raises ValueError for one outside [0, 2^32)."""
    if _IN_C and isinstance(tokens, list):
        return memoryview(_native.packed_u32(tokens, begin, end))
    try:
        packed = array.array("I", list(tokens[begin:end]))
    except (OverflowError, TypeError) as error:
        raise ValueError(f"token ids must be integers in [0, 2^32): {error}") from error
    assert packed.itemsize == 4
    if sys.byteorder == "big":
        packed.byteswap()
    return memoryview(packed).cast("B")


def attributes(items: Sequence[Any], begin: int, end: int, name: str) -> list[Any]:
    """An attribute of each of ``items[begin:end]``."""
    if _IN_C and isinstance(items, list):
        found: list[Any] = _native.attributes(items, begin, end, name)
        return found
    return [getattr(item, name) for item in items[begin:end]]


def rows(lists: list[list[Any]], begins: list[int], width: int, name: str, without: int) -> tuple[list[int], list[int]]:
    """An integer attribute of ``lists[i][begins[i] : begins[i] + width]``, for all lists one after the other. Lists
    that are too short, or in which a value equals ``without``, are left out; the second result is their indices.
    """
    found = _native.rows(lists, begins, width, name, without) if _IN_C else None
    if found is not None:
        return found
    places = zip(lists, begins, strict=True)
    return joined((attributes(items, begin, begin + width, name) for items, begin in places), width, without)


def joined(lists: Iterable[list[int]], width: int, without: int) -> tuple[list[int], list[int]]:
    """The numbers of all lists of ``width``, one after the other. Lists of fewer, or in which one is ``without``, are
    left out; the second result is their indices.
    """
    numbers: list[int] = []
    missing = []
    for index, row in enumerate(lists):
        if len(row) == width and without not in row:
            numbers += row
        else:
            missing.append(index)
    return numbers, missing
