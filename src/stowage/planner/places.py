"""The tiers below host memory, simulated: what they hold and how long a transfer takes. No bytes, no files, no clock.

    StartLoad, StartStore ──> Tier.begin ──> Landing(when, which chunks) ──(the caller waits)──> Tier.land

`Segments` does the bookkeeping of `tiers.disk`: a disk is full of segments, the oldest is reclaimed for a new one, and
chunks of the next victim that were hit are written again. `Objects` forgets nothing, and may be seen by many nodes.
A transfer that cannot begin before its deadline fails; one that began ends well, however late.
"""

from __future__ import annotations

import heapq
from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache
from itertools import compress, repeat
from typing import Final, Protocol

import numpy as np

from stowage.core.events import StartLoad, StartStore
from stowage.core.geometry import BoolArray, MaskArray
from stowage.core.table.native import make_rows
from stowage.format.segment import BATCH_CHUNKS_MAX, ENTRIES_MAX, PAGE_BYTES, footer_room, round_up
from stowage.planner.scenario import Link
from stowage.tiers.disk.plan import RUN_BYTES_MAX
from stowage.tiers.disk.room import metadata_bytes
from stowage.tiers.disk.storer import REWRITE_SHARE, segment_bytes_for
from stowage.tiers.disk.tier import OWN_BYTES, SEGMENT_BYTES, SEGMENT_BYTES_SMALL, SEGMENTS

__all__ = ["Content", "Landing", "Objects", "Segments", "Tier"]

TRANSFERS_MAX: Final = 64
"""Loads, and stores, that a tier takes at a time; more are refused, as by the real ones."""
_DIRECTORY_BYTES: Final = 4096
_FIELD_BYTES: Final = 8
"""Of a row: the least that there can be. Nothing is kept there."""
_OWNER: Final = 0

_footer_room = cache(footer_room)


class Content(Protocol):
    """What a place holds. `held_bytes`: how much that is."""

    @property
    def held_bytes(self) -> int: ...

    def masks(self, keys: list[bytes]) -> MaskArray:
        """1 for each key that is there, else 0."""
        ...

    def put(self, keys: list[bytes]) -> int:
        """The chunks were written. How many bytes that were."""
        ...

    def hit(self, keys: Iterable[bytes]) -> None:
        """The chunks were read."""
        ...

    def drop(self, keys: Iterable[bytes]) -> None:
        """Forget the chunks."""
        ...

    def check(self) -> None:
        """Assert the invariants."""
        ...


class Objects:
    """Chunks in a store that forgets nothing: in a table that takes 50 bytes each, because there can be very many."""

    def __init__(self, chunk_bytes: int) -> None:
        self._rows = make_rows(_FIELD_BYTES)
        self._extents: list[int] = []
        self._chunk_bytes = chunk_bytes

    @property
    def held_bytes(self) -> int:
        """What it holds."""
        return len(self._rows) * self._chunk_bytes

    def masks(self, keys: list[bytes]) -> MaskArray:
        return self._known(keys).astype(np.uint64)

    def put(self, keys: list[bytes]) -> int:
        """What somebody else has put there meanwhile is not written again."""
        known = self._known(keys)
        new = keys if not known.any() else list(compress(keys, (~known).tolist()))
        before = len(self._rows)
        joined = np.frombuffer(b"".join(new), np.uint8)
        self._rows.insert(_OWNER, self._extents, joined, np.zeros(len(new) * _FIELD_BYTES, np.uint8))
        return (len(self._rows) - before) * self._chunk_bytes

    def hit(self, keys: Iterable[bytes]) -> None:
        pass

    def drop(self, keys: Iterable[bytes]) -> None:
        self._rows.drop(list(keys))

    def check(self) -> None:
        self._rows.check()

    def _known(self, keys: list[bytes]) -> BoolArray:
        owners = np.empty(len(keys), np.int64)
        self._rows.find(keys, owners, np.empty(len(keys) * _FIELD_BYTES, np.uint8))
        known: BoolArray = owners == _OWNER
        return known


class _Segment:
    """A file of `file_bytes`, written up to `end`."""

    __slots__ = ("end", "file_bytes", "hits", "keys")

    def __init__(self, file_bytes: int) -> None:
        self.file_bytes = file_bytes
        self.end = PAGE_BYTES
        self.keys: list[bytes] = []
        self.hits: set[bytes] = set()


class Segments:
    """Which chunks of `chunk_bytes` a directory of `limit_bytes` holds, and what it writes: `tiers.disk` in numbers.

    A prompt's blocks fill several segments, so what is done for each of them is most of what `put` costs.
    """

    def __init__(self, limit_bytes: int, chunk_bytes: int) -> None:
        self._limit_bytes = limit_bytes
        self._chunk_bytes = round_up(chunk_bytes)
        self._least_bytes = segment_bytes_for(chunk_bytes)
        room = limit_bytes - OWN_BYTES
        wanted = min(SEGMENT_BYTES, max(room // SEGMENTS, min(SEGMENT_BYTES_SMALL, room // 4)))
        self.segment_bytes = min(round_up(max(wanted, self._least_bytes)), room // PAGE_BYTES * PAGE_BYTES)
        self._file_bytes = self.segment_bytes - metadata_bytes(self.segment_bytes)
        self._rewrite_chunks = max(1, min(BATCH_CHUNKS_MAX, RUN_BYTES_MAX // self._chunk_bytes))
        self._segments: OrderedDict[int, _Segment] = OrderedDict()
        self._number_of: dict[bytes, int] = {}
        self._active = _Segment(0)  # nothing fits: the first chunk makes a segment
        self._number = 0
        self.held_bytes = _DIRECTORY_BYTES
        """On disk now, the unwritten rest of the active segment included."""
        self.rewritten = 0

    def __len__(self) -> int:
        return len(self._number_of)

    def masks(self, keys: list[bytes]) -> MaskArray:
        numbers = np.fromiter(map(self._number_of.get, keys, repeat(0)), np.int64, len(keys))
        return (numbers > 0).astype(np.uint64)

    def put(self, keys: list[bytes]) -> int:
        written, at, left = 0, 0, len(keys)
        while left:
            wanted = min(left, BATCH_CHUNKS_MAX)
            count = self._fitting(wanted)
            if count:
                written += self._append(keys[at : at + count])
                at += count
                left -= count
            if count < wanted:  # full
                written += self._next()
        return written

    def hit(self, keys: Iterable[bytes]) -> None:
        for key in keys:
            number = self._number_of.get(key)
            if number is not None:
                self._segments[number].hits.add(key)

    def drop(self, keys: Iterable[bytes]) -> None:
        for key in keys:
            self._number_of.pop(key, None)

    def _fitting(self, count: int) -> int:
        """How many chunks fit into the active segment as one batch, up to `count`."""
        active, chunk_bytes = self._active, self._chunk_bytes
        room = active.file_bytes - active.end - PAGE_BYTES
        held = len(active.keys)
        count = min(count, ENTRIES_MAX - held, room // chunk_bytes)
        while count > 0 and room - count * chunk_bytes < _footer_room(held + count):
            count -= 1
        return max(count, 0)

    def _append(self, keys: list[bytes]) -> int:
        active = self._active
        batch_bytes = PAGE_BYTES + len(keys) * self._chunk_bytes
        active.end += batch_bytes
        active.keys += keys
        if active.hits:
            active.hits.difference_update(keys)
        self._number_of.update(dict.fromkeys(keys, self._number))
        return batch_bytes

    def _next(self) -> int:
        """A new segment, room made for it first; what is worth it of the next victim is in it. Bytes written."""
        active = self._active
        if active.file_bytes:  # sealed: only what is written stays
            sealed_bytes = active.end + _footer_room(len(active.keys))
            self.held_bytes -= active.file_bytes - sealed_bytes
            active.file_bytes = sealed_bytes
        while self.held_bytes + self.segment_bytes > self._limit_bytes:
            self._reclaim()
        self._active = _Segment(self._file_bytes)
        self._number += 1
        self._segments[self._number] = self._active
        self.held_bytes += self._file_bytes
        full = self.held_bytes + self.segment_bytes > self._limit_bytes
        return PAGE_BYTES + (self._rewrite() if full and len(self._segments) > 1 else 0)

    def _reclaim(self) -> None:
        number, oldest = self._segments.popitem(last=False)
        self.held_bytes -= oldest.file_bytes
        numbers = self._number_of
        for key in oldest.keys:
            if numbers.get(key) == number:
                del numbers[key]

    def _rewrite(self) -> int:
        """Copy what was hit of the segment that goes next, as far as a share of the new one allows."""
        number, victim = next(iter(self._segments.items()))
        if not victim.hits:
            return 0
        keys = [key for key in victim.keys if key in victim.hits and self._number_of.get(key) == number]
        room = self._active.file_bytes - self._active.end - self._least_bytes
        budget = min(self._active.file_bytes // REWRITE_SHARE, room)
        written = 0
        for at in range(0, len(keys), self._rewrite_chunks):
            some = keys[at : at + self._rewrite_chunks]
            budget -= len(some) * self._chunk_bytes + 2 * PAGE_BYTES
            if budget < 0:
                break
            if self._fitting(len(some)) == len(some):
                written += self._append(some)
                self.rewritten += len(some)
        return written

    def check(self) -> None:
        """Assert the invariants: the limit holds, and a key is in the segment that it is said to be in."""
        assert self.held_bytes == _DIRECTORY_BYTES + sum(one.file_bytes for one in self._segments.values())
        assert self.held_bytes <= self._limit_bytes, "more than the limit"
        for number, one in self._segments.items():
            assert one.end + footer_room(len(one.keys)) <= one.file_bytes, "a segment without room for its footer"
            assert number <= self._number
        written = {(key, number) for number, one in self._segments.items() for key in one.keys}
        assert self._number_of.items() <= written, "a chunk is not where it is said to be"


@dataclass(frozen=True, slots=True)
class Landing:
    """How a transfer will end. `refused`: it was not tried."""

    at_s: float
    ok: BoolArray
    refused: bool = False


class _Pipe:
    """One direction of a link: transfers share its rate, first come first served; so many wait out their latency."""

    def __init__(self, bytes_per_s: float, latency_s: float, parallel: int) -> None:
        self._bytes_per_s = bytes_per_s
        self._latency_s = latency_s
        self._lanes = [0.0] * parallel
        self._free_s = 0.0
        self.under_way = 0

    def begins_s(self, now_s: float) -> float:
        """When a transfer that is asked for now would begin."""
        return max(now_s, self._lanes[0], self._free_s - self._latency_s)

    def end_s(self, payload_bytes: int, now_s: float) -> float:
        """Begin it. When it ends."""
        end_s = max(self._free_s, self.begins_s(now_s) + self._latency_s) + payload_bytes / self._bytes_per_s
        heapq.heapreplace(self._lanes, end_s)
        self._free_s = end_s
        return end_s


class Tier:
    """One node's way to a place, with what went through it."""

    def __init__(self, link: Link, content: Content, chunk_bytes: int) -> None:
        self.content = content
        self.read_bytes = 0
        self.written_bytes = 0
        self._chunk_bytes = chunk_bytes
        self._reads = _Pipe(link.read_bytes_per_s, link.latency_s, link.parallel)
        self._writes = _Pipe(link.write_bytes_per_s, link.latency_s, link.parallel)

    def begin(self, action: StartLoad | StartStore, now_s: float) -> Landing:
        """A transfer is asked for. When and how it ends; then it must `land`."""
        pipe = self._reads if isinstance(action, StartLoad) else self._writes
        count = len(action.keys)
        pipe.under_way += 1
        if pipe.under_way > TRANSFERS_MAX:
            return Landing(now_s, np.zeros(count, np.bool_), refused=True)
        if pipe.begins_s(now_s) > action.deadline_s:
            return Landing(action.deadline_s, np.zeros(count, np.bool_))
        ok = self.content.masks(action.keys) != 0 if isinstance(action, StartLoad) else np.ones(count, np.bool_)
        return Landing(pipe.end_s(int(np.count_nonzero(ok)) * self._chunk_bytes, now_s), ok)

    def land(self, action: StartLoad | StartStore, landing: Landing) -> None:
        """The transfer has ended."""
        moved = int(np.count_nonzero(landing.ok))
        if isinstance(action, StartLoad):
            self._reads.under_way -= 1
            if moved:
                self.read_bytes += moved * self._chunk_bytes
                self.content.hit(key for key, ok in zip(action.keys, landing.ok.tolist(), strict=True) if ok)
        else:
            self._writes.under_way -= 1
            if moved:
                self.written_bytes += self.content.put(action.keys)
