"""Where each chunk lies: key -> segment, offset, length, mask, checksum. In memory, batched, for any number of threads.

A dict gives a key its row, columns hold the rest, so that a look-up of many keys is one pass in C and one numpy gather.
The newest record of a key is the one in the dict; rows of older ones stay with their segment until it is dropped.

Invariants (`check`): a key's row holds that key and belongs to a segment; a row is free, or in exactly one segment.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import repeat

import numpy as np
from numpy.typing import NDArray

from stowage.format.segment import PAGE_BYTES, Records

__all__ = ["Found", "Index"]


@dataclass(frozen=True, slots=True)
class Found:
    """A look-up's answer as parallel columns; `segments[i]` is -1 where the key is absent."""

    segments: NDArray[np.int64]
    offsets: NDArray[np.int64]
    lengths: NDArray[np.int64]
    masks: NDArray[np.uint64]
    digests: NDArray[np.uint64]

    def part(self, rows: slice) -> Found:
        """Some of the rows."""
        return Found(self.segments[rows], self.offsets[rows], self.lengths[rows], self.masks[rows], self.digests[rows])


class Index:
    """Row 0 is the absent chunk: segment -1, mask 0. Memory: about 250 bytes per chunk."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._row_of: dict[bytes, int] = {}
        self._key_of: list[bytes] = [b""]
        self._free: list[int] = []
        self._rows_of: dict[int, list[NDArray[np.int64]]] = {}
        self._allocate(1024)
        self._segment[0] = -1

    def _allocate(self, rows: int) -> None:
        self._segment = np.zeros(rows, np.int64)
        self._offset = np.zeros(rows, np.int64)
        self._length = np.zeros(rows, np.int64)
        self._mask = np.zeros(rows, np.uint64)
        self._digest = np.zeros((rows, 2), np.uint64)
        self._hit = np.zeros(rows, np.bool_)

    def _grow(self, rows: int) -> None:
        """Room for that many rows more."""
        used, need = len(self._key_of), len(self._key_of) + rows
        if need <= len(self._mask):
            return
        old = (self._segment, self._offset, self._length, self._mask, self._digest, self._hit)
        self._allocate(max(need, 2 * len(self._mask)))
        new = (self._segment, self._offset, self._length, self._mask, self._digest, self._hit)
        for column, before in zip(new, old, strict=True):
            column[:used] = before[:used]

    def _rows(self, keys: Sequence[bytes]) -> NDArray[np.int64]:
        return np.fromiter(map(self._row_of.get, keys, repeat(0)), np.int64, len(keys))

    def __len__(self) -> int:
        return len(self._row_of)

    def masks(self, keys: Sequence[bytes]) -> NDArray[np.uint64]:
        """The valid-block mask of each key, 0 where absent."""
        with self._lock:
            return self._mask[self._rows(keys)]

    def find(self, keys: Sequence[bytes]) -> Found:
        """Where each key's newest record lies."""
        with self._lock:
            return self._found(self._rows(keys))

    def _found(self, rows: NDArray[np.int64]) -> Found:
        return Found(self._segment[rows], self._offset[rows], self._length[rows], self._mask[rows], self._digest[rows])

    def insert(self, segment: int, records: Records) -> None:
        """Adds records of a segment, in the order of writing. They replace older ones of the same keys."""
        count = len(records)
        if not count:
            return
        with self._lock:
            cut = max(0, len(self._free) - count)
            reused = self._free[cut:]
            del self._free[cut:]
            fresh = count - len(reused)
            self._grow(fresh)
            first = len(self._key_of)
            self._key_of.extend(records.keys[len(reused) :])
            for row, key in zip(reused, records.keys, strict=False):
                self._key_of[row] = key
            numbers = reused + list(range(first, first + fresh))
            rows = np.array(numbers, np.int64)
            self._segment[rows] = segment
            self._offset[rows] = records.offsets
            self._length[rows] = records.lengths
            self._mask[rows] = records.masks
            self._digest[rows] = records.digests
            self._hit[rows] = False
            self._row_of.update(zip(records.keys, numbers, strict=True))
            self._rows_of.setdefault(segment, []).append(rows)

    def mark_hits(self, keys: Sequence[bytes]) -> None:
        """These chunks were read and verified: they are worth keeping when their segment goes."""
        with self._lock:
            rows = self._rows(keys)
            self._hit[rows[rows > 0]] = True

    def hits(self, segment: int) -> tuple[list[bytes], Found]:
        """The chunks of a segment that were hit since they were written, in the order of writing."""
        with self._lock:
            parts = self._rows_of.get(segment, [])
            rows = np.concatenate(parts) if parts else np.zeros(0, np.int64)
            newest = [row for row in rows[self._hit[rows]].tolist() if self._row_of.get(self._key_of[row]) == row]
            return [self._key_of[row] for row in newest], self._found(np.array(newest, np.int64))

    def segments(self) -> set[int]:
        """The segments that have rows."""
        with self._lock:
            return set(self._rows_of)

    def drop(self, keys: Sequence[bytes]) -> None:
        """Forgets the keys. Their rows stay with their segments."""
        with self._lock:
            for key in keys:
                self._row_of.pop(key, None)

    def drop_record(self, key: bytes, segment: int, offset: int) -> None:
        """Forgets the key unless a newer record than the one at `offset` has come in the meantime."""
        with self._lock:
            row = self._row_of.get(key, 0)
            if row and self._segment[row] == segment and self._offset[row] == offset:
                del self._row_of[key]

    def drop_segment(self, segment: int) -> int:
        """Forgets all records of a segment that is gone. How many chunks are absent now that were not before."""
        lost = 0
        with self._lock:
            for rows in self._rows_of.pop(segment, []):
                numbers = rows.tolist()
                for row in numbers:
                    key = self._key_of[row]
                    if self._row_of.get(key) == row:
                        del self._row_of[key]
                        lost += 1
                    self._key_of[row] = b""
                self._segment[rows] = -1
                self._mask[rows] = 0
                self._hit[rows] = False
                self._free.extend(numbers)
        return lost

    def check(self) -> None:
        """Asserts the invariants."""
        with self._lock:
            owners = np.zeros(len(self._key_of), np.int64)
            for segment, parts in self._rows_of.items():
                for rows in parts:
                    np.add.at(owners, rows, 1)
                    assert (self._segment[rows] == segment).all(), "a row in another segment's list"
            owners[np.array(self._free, np.int64)] += 1
            assert (owners[1:] == 1).all(), "a row that is lost, or owned twice"
            assert self._segment[0] == -1 and not self._mask[0], "the absent row was written to"
            live = np.fromiter(self._row_of.values(), np.int64, len(self._row_of))
            assert all(self._key_of[row] == key for key, row in self._row_of.items()), "a row of another key"
            assert (self._segment[live] >= 0).all() and (self._mask[live] != 0).all(), "a key without a chunk"
            assert (self._offset[live] % PAGE_BYTES == 0).all() and (self._length[live] > 0).all(), (
                "an impossible place"
            )
