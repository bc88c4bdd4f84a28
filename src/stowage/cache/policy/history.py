"""A record of evicted chunks (ghost entries): a table of fixed size, looked up by fingerprint of the key.

    key ── 64-bit fingerprint ── set (a row of WAYS slots) ── index with that fingerprint, or none

An index is its row and way, flattened. The owner keeps what it wants to know in arrays of its own, by that index:
best in one array, because every index is another cache miss.
When a row is full the entry that was put there first is forgotten. So memory never grows, every operation is a few
array operations, and no Python object is kept per key. Two keys with one fingerprint (2^-64 each) share what is known.
"""

from __future__ import annotations

from typing import Final

import numpy as np
from numpy.typing import NDArray

from stowage.core.geometry import BoolArray, IntArray
from stowage.core.key import KEY_BYTES

Prints = NDArray[np.uint64]

WAYS: Final = 8
# Odd constants without structure: keys are digests, but a caller's may be counters.
_MIX: Final = tuple(
    np.uint64(x) for x in (0x9E3779B97F4A7C15, 0xC2B2AE3D27D4EB4F, 0x165667B19E3779F9, 0xD6E8FEB86659FD93)
)
_FOLD: Final = np.uint64(32)


def fingerprints(keys: list[bytes]) -> Prints:
    """A number for each key; 0 is none's."""
    joined = b"".join(keys)
    if len(joined) != len(keys) * KEY_BYTES:
        joined = b"".join(key[:KEY_BYTES].ljust(KEY_BYTES, b"\0") for key in keys)
    words = np.frombuffer(joined, np.uint64).reshape(-1, 4)
    mixed: Prints = words[:, 0] * _MIX[0]
    for column in range(1, 4):
        mixed = (mixed ^ (mixed >> _FOLD)) * _MIX[0] + words[:, column] * _MIX[column]
    mixed = (mixed ^ (mixed >> _FOLD)) * _MIX[1]
    return np.maximum(mixed ^ (mixed >> _FOLD), np.uint64(1))


class History:
    """Remembers at least `entries` fingerprints when they are spread evenly, and never more than `capacity`."""

    __slots__ = ("_order", "_prints", "_puts", "_row_mask", "capacity")

    def __init__(self, entries: int) -> None:
        rows = 1 << max(3, (max(1, entries) * 5 // (4 * WAYS)).bit_length())
        self.capacity = rows * WAYS
        self._row_mask = np.uint64(rows - 1)
        # Written now, not when the first chunks leave: getting new pages then would take milliseconds, now and again.
        self._prints: Prints = np.full((rows, WAYS), 0, np.uint64)
        self._order: IntArray = np.full((rows, WAYS), 0, np.int64)
        self._puts = 0

    @property
    def tables(self) -> tuple[Prints, IntArray]:
        """Fingerprints and when they were put, by row and way: for one who remembers in C."""
        return self._prints, self._order

    def take(self, prints: Prints) -> IntArray:
        """The index of each fingerprint, -1 where it is not known. Those that were found are forgotten now."""
        indices = self._find(prints)
        self._prints.reshape(-1)[indices[indices >= 0]] = 0
        return indices

    def put(self, prints: Prints) -> tuple[IntArray, BoolArray]:
        """An index for each fingerprint, and whether an older entry, or its own, was there.

        -1: repeated, or one of more than `WAYS` of this batch for a row, and not remembered. Indices are distinct.
        The owner reads what it knew of those that left before it writes at their indices.
        """
        indices = np.full(len(prints), -1, np.int64)
        left = np.zeros(len(prints), np.bool_)
        once = np.sort(np.unique(prints, return_index=True)[1])  # in the order of the batch
        known = self._find(prints[once])
        before = self._puts
        self._puts += len(once)
        self._order.reshape(-1)[known[known >= 0]] = self._puts
        left[once] = known >= 0
        indices[once] = known
        waiting = once[known < 0]
        rows = (prints & self._row_mask).astype(np.int64)
        while len(waiting):  # one of each row at a time; few share a row
            _, firsts = np.unique(rows[waiting], return_index=True)
            some = waiting[firsts]
            ages = np.where(self._prints[rows[some]] == 0, -1, self._order[rows[some]])
            some = some[ages.min(axis=1) <= before]
            ways = ages[ages.min(axis=1) <= before].argmin(axis=1)
            row = rows[some]
            left[some] = self._prints[row, ways] != 0
            self._prints[row, ways] = prints[some]
            self._order[row, ways] = self._puts + np.arange(1, len(some) + 1)
            self._puts += len(some)
            indices[some] = row * WAYS + ways
            waiting = np.delete(waiting, firsts)
        return indices, left

    def _find(self, prints: Prints) -> IntArray:
        rows = (prints & self._row_mask).astype(np.int64)
        same = self._prints[rows] == prints[:, np.newaxis]
        ways = same.argmax(axis=1)
        return np.where(same[np.arange(len(prints)), ways], rows * WAYS + ways, -1)

    def __len__(self) -> int:
        return int(np.count_nonzero(self._prints))

    def check(self) -> None:
        """Assert that every entry is in its row, once."""
        held = self._prints[self._prints != 0]
        assert len(np.unique(held)) == len(held), "a fingerprint is remembered twice"
        rows = np.repeat(np.arange(len(self._prints), dtype=np.uint64), (self._prints != 0).sum(axis=1))
        assert np.array_equal(held & self._row_mask, rows), "a fingerprint is in another's row"
