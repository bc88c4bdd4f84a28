"""Plans reads: chunks in disk order, neighbours together. No I/O.

    found chunks -> sorted by segment and offset -> stretches (nearly no gaps) -> runs, each cut off when asked for

A run is what one reader reads at a time: up to 4 MiB of one stretch, or several short stretches up to 1 MiB, so that
scattered chunks do not need a thread wake-up each. Runs of packed chunks are shorter: their memory should stay in the
CPU's cache until it is unpacked.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from stowage.core.geometry import PAGE_BYTES, IntArray, round_up
from stowage.storage.disk.files import CALL_BYTES_MAX
from stowage.storage.disk.index import LookupResult
from stowage.storage.format.batch import Digests
from stowage.storage.format.protection import Guard
from stowage.storage.format.segment import SegmentName

GAP_BYTES_MAX: Final = 64 << 10
"""Neighbours with at most that much between them are read in one go."""
RUN_BYTES_MIN: Final = 1 << 20
RUN_BYTES_MAX: Final = CALL_BYTES_MAX
PACKED_RUN_BYTES: Final = 3 << 20

Opened = Callable[[int], "tuple[SegmentName, Guard] | None"]


@dataclass(slots=True)
class Run:
    """Chunks of one segment in ascending order. Parallel columns.

    `bounds`: [0, 4, 6] are two stretches, of the first four chunks and of the next two. `positions`: indices of the
    chunks in the plan's input. `lengths` and `digests` are those of the stored bytes, which may be `packed`.
    """

    name: SegmentName
    guard: Guard
    segment: int
    positions: list[int]
    keys: list[bytes]
    offsets: list[int]
    lengths: list[int]
    masks: list[int]
    digests: Digests
    packed: list[bool]
    buffers: list[memoryview]
    bounds: list[int]

    def __len__(self) -> int:
        return len(self.keys)

    @property
    def last(self) -> int:
        """End of the last payload."""
        return self.offsets[-1] + self.lengths[-1]

    @property
    def end(self) -> int:
        """End of the last page."""
        return self.offsets[-1] + round_up(self.lengths[-1])

    @property
    def form(self) -> bool | None:
        """Whether its chunks are packed. None: some are."""
        return self.packed[0] if len(set(self.packed)) == 1 else None

    @property
    def packed_bytes(self) -> int:
        """Bytes of packed chunks, in whole pages."""
        return sum(round_up(length) for length, is_packed in zip(self.lengths, self.packed, strict=True) if is_packed)

    def part(self, first: int, after: int) -> Run:
        """A run of one stretch: these chunks."""
        some = slice(first, after)
        return Run(
            self.name,
            self.guard,
            self.segment,
            self.positions[some],
            self.keys[some],
            self.offsets[some],
            self.lengths[some],
            self.masks[some],
            self.digests[some],
            self.packed[some],
            self.buffers[some],
            [0, after - first],
        )


class Plan:
    """Chunks to be read. Not thread-safe. `positions`: of all chunks, including those already taken.

    `found` has a row for each position. `opened`: names and guards of all segments, by number. `runs_about`: an
    estimate of its runs, for waking readers. `scattered_bytes`: bytes in stretches too short for sequential speed.
    """

    def __init__(
        self, positions: IntArray, found: LookupResult, opened: Mapping[int, tuple[SegmentName, Guard]], readers: int
    ) -> None:
        order = np.lexsort((found.offsets, found.segments))
        self.positions = positions[order]
        self._found = found = found.part(order)
        self._opened = opened
        sizes = round_up(found.lengths)
        ends = found.offsets + sizes
        gaps = found.offsets[1:] - ends[:-1]
        apart = (found.segments[1:] != found.segments[:-1]) | (gaps < 0) | (gaps > GAP_BYTES_MAX)
        self._bounds = [*((apart.nonzero()[0] + 1).tolist()), len(order)]
        self._segments, self._offsets, self._ends = found.segments.tolist(), found.offsets.tolist(), ends.tolist()
        share = int(found.lengths.sum()) // readers  # so that a short plan is shared by all readers
        self._packed = found.packed.tolist()
        self._run_bytes = min(max(share, RUN_BYTES_MIN), RUN_BYTES_MAX) + PAGE_BYTES
        self._packed_run_bytes = min(self._run_bytes, PACKED_RUN_BYTES)
        self._scattered_bytes = min(share, RUN_BYTES_MIN)
        stretches = np.diff(np.append(0, np.cumsum(sizes))[self._bounds], prepend=0)
        self.scattered_bytes = int(stretches[stretches < RUN_BYTES_MIN].sum())
        runs = len(self._bounds) + int(sizes.sum()) // self._packed_run_bytes
        self.runs_about = min(len(order), runs)
        self._at = 0
        self._bound = 0
        self._next: tuple[int, int, list[int]] | None = None

    def __len__(self) -> int:
        """Chunks not taken yet."""
        return len(self._offsets) - self._at

    def rest(self) -> tuple[IntArray, LookupResult, Mapping[int, tuple[SegmentName, Guard]]]:
        """The inputs of a plan for the chunks not taken yet."""
        left = slice(self._at, None)
        return self.positions[left], self._found.part(left), self._opened

    @property
    def is_packed_next(self) -> bool:
        """Whether the next run has packed chunks; there must be one."""
        return any(self._packed[self._at : self._cut()[0]])

    def _cut(self) -> tuple[int, int, list[int]]:
        """The next run: its end, the stretch after it, and its bounds."""
        if self._next is not None:
            return self._next
        first = at = self._at
        bound = self._bound
        segment = self._segments[first]
        most = self._packed_run_bytes if self._packed[first] else self._run_bytes
        bounds = [0]
        taken = 0
        while True:
            stretch_end = self._bounds[bound]
            fitting = bisect_right(self._ends, self._offsets[at] + most, at, stretch_end)
            after = max(at + 1, fitting)
            taken += self._ends[after - 1] - self._offsets[at]
            bounds.append(after - first)
            at = after
            if at < stretch_end:
                break  # as much as one system call takes
            bound += 1
            if at == len(self._ends) or self._segments[at] != segment:
                break
            if taken + self._ends[self._bounds[bound] - 1] - self._offsets[at] > self._scattered_bytes:
                break
        self._next = at, bound, bounds
        return self._next

    def take(self, keys: Sequence[bytes], buffers: Sequence[memoryview]) -> Run:
        """The next run; there must be one. `keys` and `buffers` are those of all positions."""
        first, segment = self._at, self._segments[self._at]
        at, self._bound, bounds = self._cut()
        self._next = None
        self._at = at
        some = slice(first, at)
        positions = self.positions[some].tolist()
        return Run(
            *self._opened[segment],
            segment,
            positions,
            [keys[position] for position in positions],
            self._offsets[some],
            self._found.lengths[some].tolist(),
            self._found.masks[some].tolist(),
            self._found.digests[some],
            self._found.packed[some].tolist(),
            [buffers[position] for position in positions],
            bounds,
        )


def make_plan(positions: IntArray, found: LookupResult, opened: Opened, readers: int, rest: Plan | None = None) -> Plan:
    """A plan of found chunks and of the rest of another plan, without those whose segments are not `opened`."""
    known: dict[int, tuple[SegmentName, Guard]] = {}
    for segment in np.unique(found.segments).tolist():
        one = opened(segment)
        if one is not None:
            known[segment] = one
        else:
            here = found.segments != segment
            positions, found = positions[here], found.part(here)
    if rest is not None and len(rest):
        others, found_before, known_before = rest.rest()
        positions = np.concatenate((others, positions))
        found = found_before.and_then(found)
        known = {**known_before, **known}
    return Plan(positions, found, known, readers)


def plan_runs(keys: Sequence[bytes], buffers: Sequence[memoryview], found: LookupResult, opened: Opened) -> list[Run]:
    """Runs for one reader, in disk order, of the found chunks whose length is that of their buffers."""
    lengths = np.fromiter((buffer.nbytes for buffer in buffers), np.int64, len(buffers))
    here = np.flatnonzero((found.segments >= 0) & (found.lengths == lengths))
    plan = make_plan(here, found.part(here), opened, readers=1)
    runs = []
    while len(plan):
        runs.append(plan.take(keys, buffers))
    return runs
