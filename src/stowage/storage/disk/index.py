"""Where each chunk lies: key -> segment, offset, length, mask, checksum. In memory, batched, for any number of threads.

Chunks are rows of `core.table`, owned by their segments; the newest record of a key is the one that is found. Nobody
waits for long, however many chunks there are: the table has no pauses, and what concerns a whole segment is done in
parts, between which others have their turn. A segment that is being dropped is found in part meanwhile.

Invariants (`check`): those of the table; every segment with chunks has its extents, and no other has them.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from stowage.core.geometry import PAGE_BYTES
from stowage.core.table import EXTENT, make_rows
from stowage.storage.format.segment import Entries, are_packed

LENGTH_MAX: Final = (1 << 31) - 1
"""Of a payload: 31 bits are kept, and one that says whether it is packed."""
PAGE_MAX: Final = (1 << 32) - 1
_PACKED: Final = np.uint32(1 << 31)
ROWS_AT_ONCE: Final = 256
_EXTENTS_AT_ONCE: Final = 512 // EXTENT
_FIELDS: Final = np.dtype([("digest", "<u8", 2), ("mask", "<u8"), ("page", "<u4"), ("length", "<u4")])


@dataclass(frozen=True, slots=True)
class LookupResult:
    """A look-up's answer as parallel columns; `segments[i]` is -1 where the key is absent.

    Lengths and digests are those of what lies there, which may be `packed`.
    """

    segments: NDArray[np.int64]
    offsets: NDArray[np.int64]
    lengths: NDArray[np.int64]
    masks: NDArray[np.uint64]
    digests: NDArray[np.uint64]
    packed: NDArray[np.bool_]

    def part(self, rows: slice | NDArray[np.int64] | NDArray[np.bool_]) -> LookupResult:
        """Some of the rows, in the order of `rows` where these are numbers."""
        return LookupResult(
            self.segments[rows],
            self.offsets[rows],
            self.lengths[rows],
            self.masks[rows],
            self.digests[rows],
            self.packed[rows],
        )

    def and_then(self, other: LookupResult) -> LookupResult:
        """These rows, and those of another one."""
        return LookupResult(
            np.concatenate((self.segments, other.segments)),
            np.concatenate((self.offsets, other.offsets)),
            np.concatenate((self.lengths, other.lengths)),
            np.concatenate((self.masks, other.masks)),
            np.concatenate((self.digests, other.digests)),
            np.concatenate((self.packed, other.packed)),
        )


def _found(segments: NDArray[np.int64], fields: NDArray[np.void]) -> LookupResult:
    offsets = fields["page"].astype(np.int64) * PAGE_BYTES
    packed = (fields["length"] & _PACKED) != 0
    lengths = (fields["length"] & ~_PACKED).astype(np.int64)
    return LookupResult(segments, offsets, lengths, fields["mask"].copy(), fields["digest"].copy(), packed)


@dataclass(frozen=True, slots=True)
class Columns:
    """Chunks of a segment as the index keeps them."""

    keys: NDArray[np.void]
    fields: NDArray[np.void]

    @classmethod
    def of(cls, entries: Entries) -> Columns:
        """What lies too far back in a file, or is too long, is left out."""
        fits = (entries["length"] <= LENGTH_MAX) & (entries["offset"] <= PAGE_MAX * PAGE_BYTES)
        if not fits.all():
            entries = entries[fits]
        fields = np.empty(len(entries), _FIELDS)
        fields["digest"], fields["mask"], fields["length"] = entries["digest"], entries["mask"], entries["length"]
        fields["length"][are_packed(entries)] |= _PACKED
        fields["page"] = entries["offset"] // np.uint64(PAGE_BYTES)
        return cls(np.ascontiguousarray(entries["key"]), fields)


class Index:
    """Memory: 70 to 90 bytes per chunk, 250 where the table is not in C. What is dropped is kept for chunks to come."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._rows = make_rows(_FIELDS.itemsize)
        self._extents_of: dict[int, list[int]] = {}
        self._ends: dict[int, int] = {}

    def __len__(self) -> int:
        return len(self._rows)

    def _find(self, keys: list[bytes]) -> tuple[NDArray[np.int64], NDArray[Any]]:
        segments, fields = np.empty(len(keys), np.int64), np.empty(len(keys), _FIELDS)
        with self._lock:
            self._rows.find(keys, segments, fields)
        return segments, fields

    def masks(self, keys: list[bytes]) -> NDArray[np.uint64]:
        """The valid-block mask of each key, 0 where absent."""
        masks: NDArray[np.uint64] = self._find(keys)[1]["mask"].copy()
        return masks

    def find(self, keys: list[bytes]) -> LookupResult:
        """Where each key's newest record lies."""
        return _found(*self._find(keys))

    def insert(self, segment: int, columns: Columns, at_once: int = ROWS_AT_ONCE, copied_from: int = -1) -> None:
        """Adds chunks of a segment, in the order of writing. They replace older ones of the same keys.

        `at_once`: after so many others have their turn. `copied_from`: they are copies of what lay there; where that is
        not a key's newest record any more, because it was dropped or replaced meanwhile, its copy is not added.
        """
        for begin in range(0, len(columns.keys), at_once):
            keys, fields = (column[begin : begin + at_once] for column in (columns.keys, columns.fields))
            with self._lock:
                if copied_from >= 0:
                    found = np.empty(len(keys), np.int64)
                    self._rows.find(keys.tolist(), found, np.empty(len(keys), _FIELDS))
                    keys, fields = keys[found == copied_from], fields[found == copied_from]
                if len(keys):
                    self._rows.insert(segment, self._extents_of.setdefault(segment, []), keys, fields)
                    there = _found(np.full(len(fields), segment, np.int64), fields)
                    end = int((there.offsets + there.lengths).max())
                    self._ends[segment] = max(end, self._ends.get(segment, 0))

    def mark_hits(self, keys: list[bytes]) -> None:
        """These chunks were read and verified: they are worth keeping when their segment goes."""
        with self._lock:
            self._rows.mark(keys)

    def hits(self, segment: int) -> tuple[list[bytes], LookupResult]:
        """The chunks of a segment that were hit since they were written, in the order of writing."""
        keys: list[bytes] = []
        fields = bytearray()
        begin = 0
        while True:
            with self._lock:
                some = self._extents_of.get(segment, [])[begin : begin + _EXTENTS_AT_ONCE]
                more_keys, more_fields = self._rows.marked(segment, some)
            if not some:
                break
            keys += more_keys
            fields += more_fields
            begin += len(some)
        return keys, _found(np.full(len(keys), segment, np.int64), np.frombuffer(fields, _FIELDS))

    @property
    def filled_bytes(self) -> int:
        """Of all segments, up to the end of the last chunk of each; what is behind it is set aside."""
        with self._lock:
            return sum(self._ends.values())

    def segments(self) -> set[int]:
        """The segments that have rows."""
        with self._lock:
            return set(self._extents_of)

    def drop(self, keys: list[bytes]) -> None:
        """Forgets the keys. Their rows stay with their segments."""
        with self._lock:
            self._rows.drop(keys)

    def drop_record(self, key: bytes, segment: int, offset: int) -> None:
        """Forgets the key unless a newer record than the one at `offset` has come in the meantime."""
        found, fields = np.empty(1, np.int64), np.empty(1, _FIELDS)
        with self._lock:
            self._rows.find([key], found, fields)
            if found[0] == segment and int(fields["page"][0]) * PAGE_BYTES == offset:
                self._rows.drop([key])

    def drop_segment(self, segment: int) -> int:
        """Forgets all records of a segment that is gone. How many chunks are absent now that were not before."""
        lost = 0
        while True:
            with self._lock:
                extents = self._extents_of.get(segment, [])
                some = extents[-_EXTENTS_AT_ONCE:]
                lost += self._rows.release(segment, some)
                del extents[len(extents) - len(some) :]
                if not extents:
                    self._extents_of.pop(segment, None)
                    self._ends.pop(segment, None)
                    return lost

    def check(self) -> None:
        """Asserts the invariants."""
        with self._lock:
            self._rows.check()
            count = 0
            for segment, extents in self._extents_of.items():
                assert extents and len(set(extents)) == len(extents), "a segment without chunks, or an extent twice"
                keys, fields = self._rows.marked(segment, extents)  # raises for another segment's extents
                assert len(fields) == len(keys) * _FIELDS.itemsize
                count += len(extents)
            assert count == self._rows.extents_used(), "an extent that no segment has"
