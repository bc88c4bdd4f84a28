"""A table of rows (key and opaque fields) that belong to owners: many owners, millions of keys, no pause to grow.

    owner 7   extents 0, 3       64 rows each: key, fields, whether the row is live, whether it is marked
    owner 9   extents 1, 2

A look-up finds the row that was inserted last for a key: the live one. Rows that were replaced, or whose key was
dropped, stay with their owner until the owner's extents are released, all at once or some at a time. The caller keeps
the list of an owner's extents.

`Rows` is for machines without a C compiler: many small dicts instead of one, because a dict stops everything while it
is resized. It takes 220 bytes per key beside the fields; `native.Rows` has the same in C in less than half of that. A
test drives both.

Invariants (`check`): the index leads from each key to its live row; an extent is free or has one owner.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from stowage.core.geometry import IntArray
from stowage.core.key import KEY_BYTES

EXTENT: Final = 64
"""Rows of an extent."""
_SHARDS: Final = 1024
_BLOCK: Final = 1 << 16
_EXTENTS: Final = _BLOCK // EXTENT
_FREE: Final = -1


class _Block:
    """The columns of 64 Ki rows."""

    __slots__ = ("fields", "keys", "live", "marked", "owner", "used")

    def __init__(self, width: int) -> None:
        self.keys = np.zeros(_BLOCK, f"V{KEY_BYTES}")
        self.fields = np.zeros((_BLOCK, width), np.uint8)
        self.live = np.zeros(_BLOCK, np.bool_)
        self.marked = np.zeros(_BLOCK, np.bool_)
        self.owner = np.full(_EXTENTS, _FREE, np.int64)
        self.used = np.zeros(_EXTENTS, np.int64)


class Rows:
    """A table of rows by key. `width`: bytes of a key's fields. Not for several threads at once."""

    __slots__ = ("_blocks", "_extents", "_free", "_row_of", "_width")

    def __init__(self, width: int) -> None:
        self._width = width
        self._row_of: list[dict[bytes, int]] = [{} for _ in range(_SHARDS)]
        self._blocks: list[_Block] = []
        self._extents = 0
        self._free: list[int] = []

    def __len__(self) -> int:
        """Number of keys that a look-up finds."""
        return sum(map(len, self._row_of))

    def extents_used(self) -> int:
        """Number of extents that have an owner."""
        return self._extents - len(self._free)

    def insert(self, owner: int, extents: list[int], keys: NDArray[Any], fields: NDArray[Any]) -> None:
        """Append rows of an owner, in order; they replace older rows of the same keys. `keys`: contiguous, 32 bytes
        each. `extents` are the owner's so far; new ones are appended to the list.
        """
        self._require(owner, extents[-1:])
        raw, given = keys.tobytes(), fields.view(np.uint8).reshape(-1, self._width)
        if len(raw) != KEY_BYTES * len(given):
            raise ValueError("as many keys as fields")
        begin = 0
        while begin < len(given):
            if not extents or self._used(extents[-1]) == EXTENT:
                extents.append(self._take(owner))
            begin += self._fill(extents[-1], raw, given, begin)

    def _used(self, extent: int) -> int:
        return int(self._blocks[extent // _EXTENTS].used[extent % _EXTENTS])

    def _take(self, owner: int) -> int:
        """A free extent for the owner."""
        if self._free:
            extent = self._free.pop()
        else:
            extent = self._extents
            self._extents += 1
            if extent // _EXTENTS == len(self._blocks):
                self._blocks.append(_Block(self._width))
        self._blocks[extent // _EXTENTS].owner[extent % _EXTENTS] = owner
        return extent

    def _fill(self, extent: int, raw: bytes, fields: NDArray[np.uint8], begin: int) -> int:
        """Write rows from `begin` on into the extent, as many as it has room for; returns how many."""
        block, used = self._blocks[extent // _EXTENTS], self._used(extent)
        count = min(EXTENT - used, len(fields) - begin)
        some = raw[begin * KEY_BYTES : (begin + count) * KEY_BYTES]
        first = extent * EXTENT + used
        here = slice(first % _BLOCK, first % _BLOCK + count)
        block.keys[here] = np.frombuffer(some, block.keys.dtype)
        block.fields[here] = fields[begin : begin + count]
        block.live[here] = True
        block.marked[here] = False
        block.used[extent % _EXTENTS] += count
        for row in range(first, first + count):
            key = some[(row - first) * KEY_BYTES : (row - first + 1) * KEY_BYTES]
            shard = self._row_of[hash(key) % _SHARDS]
            before = shard.get(key)
            shard[key] = row
            if before is not None:
                self._blocks[before // _BLOCK].live[before % _BLOCK] = False
        return count

    def _rows(self, keys: list[bytes]) -> IntArray:
        """The row of each key, -1 where it is absent."""
        shards = self._row_of
        return np.fromiter((shards[hash(key) % _SHARDS].get(key, -1) for key in keys), np.int64, len(keys))

    def find(self, keys: list[bytes], owners: IntArray, fields: NDArray[Any]) -> None:
        """Fill the arrays: each key's owner and fields; -1 and zeros where it is absent."""
        rows, found = self._rows(keys), fields.view(np.uint8).reshape(-1, self._width)
        if len(owners) != len(rows) or len(found) != len(rows):
            raise ValueError("as many owners and fields as keys")
        owners[:] = _FREE
        found[:] = 0
        for number in set((rows[rows >= 0] // _BLOCK).tolist()):
            here = rows // _BLOCK == number
            offsets = rows[here] % _BLOCK
            owners[here] = self._blocks[number].owner[offsets // EXTENT]
            found[here] = self._blocks[number].fields[offsets]

    def drop(self, keys: list[bytes]) -> int:
        """Make the keys absent; returns how many were present."""
        dropped = 0
        for key in keys:
            row = self._row_of[hash(key) % _SHARDS].pop(key, None)
            if row is not None:
                self._blocks[row // _BLOCK].live[row % _BLOCK] = False
                dropped += 1
        return dropped

    def mark(self, keys: list[bytes]) -> None:
        """Mark the rows of the keys that are present."""
        for row in self._rows(keys).tolist():
            if row >= 0:
                self._blocks[row // _BLOCK].marked[row % _BLOCK] = True

    def marked(self, owner: int, extents: list[int]) -> tuple[list[bytes], bytearray]:
        """Keys and fields of the marked live rows in some of an owner's extents, in order."""
        self._require(owner, extents)
        keys: list[bytes] = []
        fields = bytearray()
        for block, here in map(self._offsets, extents):
            rows = here.start + np.flatnonzero(block.live[here] & block.marked[here])
            keys += (block.keys[row].tobytes() for row in rows.tolist())
            fields += block.fields[rows].tobytes()
        return keys, fields

    def release(self, owner: int, extents: list[int]) -> int:
        """Free some of an owner's extents and make their keys absent; returns how many keys were present."""
        self._require(owner, extents)
        dropped = 0
        for extent in reversed(extents):  # so that the first is reused first
            self._require(owner, [extent])
            block, here = self._offsets(extent)
            rows = here.start + np.flatnonzero(block.live[here])
            dropped += self.drop([block.keys[row].tobytes() for row in rows.tolist()])
            block.owner[extent % _EXTENTS] = _FREE
            block.used[extent % _EXTENTS] = 0
            self._free.append(extent)
        return dropped

    def _offsets(self, extent: int) -> tuple[_Block, slice]:
        first = extent % _EXTENTS * EXTENT
        return self._blocks[extent // _EXTENTS], slice(first, first + EXTENT)

    def _require(self, owner: int, extents: Sequence[int]) -> None:
        for extent in extents:
            known = 0 <= extent < self._extents
            if not known or self._blocks[extent // _EXTENTS].owner[extent % _EXTENTS] != owner:
                raise ValueError("not an extent of this owner")

    def check(self) -> None:
        """Assert the invariants. Linear in the rows."""
        live = 0
        for extent in range(self._extents):
            block, here = self._offsets(extent)
            rows = np.flatnonzero(block.live[here])
            assert (rows < self._used(extent)).all(), "a live row that was never written"
            keys = [block.keys[here.start + row].tobytes() for row in rows.tolist()]
            assert self._rows(keys).tolist() == (extent * EXTENT + rows).tolist(), "a live row that no key leads to"
            live += len(rows)
        assert live == len(self), "a key whose row is not live"
        free = [
            extent for extent in range(self._extents) if self._blocks[extent // _EXTENTS].owner[extent % _EXTENTS] < 0
        ]
        assert sorted(self._free) == free, "a free extent that is in use, or lost"
