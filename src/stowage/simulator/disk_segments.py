"""A simulated disk: the bookkeeping of `storage.disk` in numbers, for chunks of one size.

    positions   0 1 2 3 4 5 6 7 8 9 ...       one for each chunk that was ever written, in the order of writing
    segments    [ gone ][     ][    ][ active
                        oldest                what lies before is not there any more

A table maps each key to the position of its newest record. A segment is its first position, the end of its bytes, and
the length of its file. Reclaimed chunks are absent because their positions precede the oldest segment; their rows are
removed from the table later, many at once. So no Python code runs per chunk. A prompt's blocks fill several segments,
so the work per segment is most of the cost of `put`.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Iterable
from functools import cache
from itertools import islice
from typing import Final

import numpy as np

from stowage.core.geometry import PAGE_BYTES, MaskArray, round_up
from stowage.core.table import EXTENT, make_rows
from stowage.storage.disk.allocator import metadata_bytes, segment_bytes_for
from stowage.storage.disk.compaction import REWRITE_SHARE
from stowage.storage.disk.read_plan import RUN_BYTES_MAX
from stowage.storage.disk.tier import segment_bytes_within
from stowage.storage.disk.writer import BATCH_BYTES_MAX
from stowage.storage.format.segment import BATCH_CHUNKS_MAX, ENTRIES_MAX, footer_room

_DIRECTORY_BYTES: Final = 4096
_POSITION_BYTES: Final = 8
_OWNER: Final = 0
_EXTENTS_AT_ONCE: Final = 8
"""At least this many are released together."""

_footer_room = cache(footer_room)


class Segments:
    """Which chunks of `chunk_bytes` a directory of `limit_bytes` holds, and what it writes.

    The field of a row is its position plus 1, so that 0 means absent.
    """

    def __init__(self, limit_bytes: int, chunk_bytes: int) -> None:
        self._limit_bytes = limit_bytes
        self._chunk_bytes = round_up(chunk_bytes)
        self._least_bytes = segment_bytes_for(chunk_bytes)
        self.segment_bytes = segment_bytes_within(limit_bytes, chunk_bytes)
        self._batch_chunks = max(1, min(BATCH_CHUNKS_MAX, BATCH_BYTES_MAX // self._chunk_bytes))
        self._rewrite_chunks = max(1, min(BATCH_CHUNKS_MAX, RUN_BYTES_MAX // self._chunk_bytes))
        self._rows = make_rows(_POSITION_BYTES)
        self._extents: list[int] = []
        self._extents_gone = 0
        self._hit: set[int] = set()
        """Positions of chunks that were read; some of the chunks may have been written again since."""
        self._hit_first: list[int] = []
        """The same as a heap, with some positions that are gone."""
        self._sealed: deque[tuple[int, int, int]] = deque()
        """First position, end in bytes, length of the file; the oldest first."""
        self._first = self._end = self._file_bytes = 0
        """The same of the active segment. At first nothing fits, so the first chunk creates one."""
        self._full: tuple[int, int, int] | None = None
        """The same of the one before it, until that is sealed."""
        self._oldest = 0
        self._behind = 0
        """The first position after the oldest segment."""
        self._next_position = 0
        self._next_row = 0
        """The position of the next row: `_next_position`, except during `put`."""
        self._file_bytes_new = self.segment_bytes - metadata_bytes(self.segment_bytes)
        self._fits_in_new = self._fitting_behind(PAGE_BYTES, 0, self._file_bytes_new)
        self.held_bytes = _DIRECTORY_BYTES
        """On disk now, the unwritten rest of the active segment included."""
        self.rewritten = 0

    def masks(self, keys: list[bytes]) -> MaskArray:
        """1 for each key that is present, else 0."""
        there: MaskArray = (self._positions(keys) > self._oldest).astype(np.uint64)
        return there

    def put(self, keys: list[bytes]) -> int:
        """Write the chunks. Returns the bytes written, with those of rewritten chunks."""
        written, begin, added, left = 0, 0, 0, len(keys)
        while left:
            wanted = min(left, self._batch_chunks)
            count = self._fitting(wanted)
            if count:
                written += self._append(count)
                begin, left = begin + count, left - count
            if count < wanted:  # full
                written += self._next()
                if self._hit_first and self._hit_first[0] < self._behind and self._is_victim_hit():
                    self._add(keys[added:begin])
                    added = begin
                    written += self._rewrite()
                self._seal()
        self._add(keys[added:])
        self._release()
        return written

    def hit(self, keys: Iterable[bytes]) -> None:
        """The chunks were read."""
        names = list(keys)
        self._rows.mark(names)
        for position in (self._positions(names) - 1).tolist():
            if position >= self._oldest and position not in self._hit:
                self._hit.add(position)
                heapq.heappush(self._hit_first, position)

    def drop(self, keys: Iterable[bytes]) -> None:
        """Forget the chunks."""
        self._rows.drop(list(keys))

    def _positions(self, keys: list[bytes]) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
        """One more than the position of each key; smaller than the oldest segment's where the chunk is gone."""
        positions = np.empty(len(keys), np.int64)
        self._rows.find(keys, np.empty(len(keys), np.int64), positions)
        return positions

    def _fitting(self, count: int) -> int:
        """How many chunks fit into the active segment as one batch, up to `count`."""
        held = self._next_position - self._first
        if not held and self._file_bytes:
            return min(count, self._fits_in_new)
        return min(count, self._fitting_behind(self._end, held, self._file_bytes))

    def _fitting_behind(self, end: int, held: int, file_bytes: int) -> int:
        """How many chunks fit as one batch after ``held`` chunks that end at ``end``."""
        room = file_bytes - end - PAGE_BYTES
        count = min(self._batch_chunks, ENTRIES_MAX - held, room // self._chunk_bytes)
        while count > 0 and room - count * self._chunk_bytes < _footer_room(held + count):
            count -= 1
        return max(count, 0)

    def _append(self, count: int) -> int:
        """Append a batch of ``count`` chunks, whose rows are added later. Returns its bytes."""
        batch_bytes = PAGE_BYTES + count * self._chunk_bytes
        self._end += batch_bytes
        self._next_position += count
        return batch_bytes

    def _add(self, keys: list[bytes]) -> None:
        """Add the rows of the appended chunks."""
        if not keys:
            return
        first = self._next_row + 1
        self._next_row += len(keys)
        joined = np.frombuffer(b"".join(keys), np.uint8)
        self._rows.insert(_OWNER, self._extents, joined, np.arange(first, first + len(keys)))

    def _next(self) -> int:
        """Make room and begin a new segment, beside the one before if possible. Returns the bytes written."""
        if self._file_bytes:
            self._full = self._first, self._end, self._file_bytes
            if _DIRECTORY_BYTES + self._file_bytes + self.segment_bytes > self._limit_bytes:
                self._seal()
        while self.held_bytes + self.segment_bytes > self._limit_bytes:
            self.held_bytes -= self._sealed.popleft()[2]
        self._first, self._end, self._file_bytes = self._next_position, PAGE_BYTES, self._file_bytes_new
        firsts = [one[0] for one in islice(self._sealed, 2)]
        firsts += [self._full[0]] if self._full else []
        self._oldest, self._behind = [*firsts, self._first, self._first][:2]
        self.held_bytes += self._file_bytes
        return PAGE_BYTES

    def _seal(self) -> None:
        """Seal the full segment: cut its file to what is written."""
        if self._full:
            first, end, file_bytes = self._full
            behind = self._next_position if self._first == first else self._first
            sealed_bytes = end + _footer_room(behind - first)
            self.held_bytes -= file_bytes - sealed_bytes
            self._sealed.append((first, end, sealed_bytes))
            self._full = None

    def _is_victim_hit(self) -> bool:
        """Whether there is a segment to reclaim next, some chunk of which was read."""
        hit = self._hit_first
        while hit and hit[0] < self._oldest:
            self._hit.remove(heapq.heappop(hit))
        full = self.held_bytes + self.segment_bytes > self._limit_bytes
        return bool(hit and full and self._sealed) and hit[0] < self._behind

    def _rewrite(self) -> int:
        """Rewrite the chunks that were hit in the segment to reclaim next, up to a share of the new segment."""
        first, behind = self._oldest, self._behind
        begin, end = first // EXTENT - self._extents_gone, -(-behind // EXTENT) - self._extents_gone
        names, fields = self._rows.marked(_OWNER, self._extents[begin:end])
        positions = np.frombuffer(fields, np.int64).tolist()
        keys = [key for key, position in zip(names, positions, strict=True) if first < position <= behind]
        room = self._file_bytes - self._end - self._least_bytes
        budget = min(self._file_bytes // REWRITE_SHARE, room)
        written = 0
        for at in range(0, len(keys), self._rewrite_chunks):
            some = keys[at : at + self._rewrite_chunks]
            budget -= len(some) * self._chunk_bytes + 2 * PAGE_BYTES
            if budget < 0:
                break
            if self._fitting(len(some)) == len(some):
                written += self._append(len(some))
                self._add(some)
                self.rewritten += len(some)
        return written

    def _release(self) -> None:
        """Remove the rows of reclaimed chunks, once there are enough of them."""
        gone = self._oldest // EXTENT - self._extents_gone
        if gone >= _EXTENTS_AT_ONCE + len(self._extents) // 8:
            self._rows.release(_OWNER, self._extents[:gone])
            del self._extents[:gone]
            self._extents_gone += gone

    def check(self) -> None:
        """Assert the invariants: the limit holds, every segment has room for its footer, and a row for each chunk."""
        self._rows.check()
        assert self._full is None, "a segment that is full and not sealed"
        assert self.held_bytes == _DIRECTORY_BYTES + self._file_bytes + sum(one[2] for one in self._sealed)
        assert self.held_bytes <= self._limit_bytes, "more than the limit"
        firsts = [*(one[0] for one in self._sealed), self._first, self._next_position]
        assert firsts == sorted(firsts) and firsts[0] == self._oldest, "segments out of order"
        for (first, end, file_bytes), after in zip(self._sealed, firsts[1:], strict=False):
            assert end + footer_room(after - first) == file_bytes, "a sealed segment that does not end with its footer"
        held = self._next_position - self._first
        assert not held or self._end + footer_room(held) <= self._file_bytes, "a segment without room for its footer"
        assert sorted(self._hit) == sorted(self._hit_first), "two lists of what was read"
        assert self._next_row == self._next_position, "a chunk without a row"
        rows = -(-self._next_position // EXTENT) - self._extents_gone
        assert len(self._extents) == rows == self._rows.extents_used(), "another number of extents"
        assert self._extents_gone * EXTENT <= self._oldest, "an extent was released that is needed"
