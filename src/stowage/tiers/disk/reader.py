"""Reads chunks: neighbours in a segment together, straight into their buffers, each verified before it counts."""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import Final

import numpy as np

from stowage.errors import FormatError
from stowage.format.envelope import DIGEST_BYTES, pack_fields
from stowage.format.protection import Cipher, Guard
from stowage.format.segment import PAGE_BYTES, SegmentName, round_up
from stowage.tiers.disk.directory import Directory, SegmentFile
from stowage.tiers.disk.files import CALL_BYTES_MAX, is_aligned, pages
from stowage.tiers.disk.index import Found

__all__ = ["GAP_BYTES_MAX", "RUN_BYTES_MAX", "Reader", "Result", "Run", "plan_runs"]

GAP_BYTES_MAX: Final = 64 << 10
"""Neighbours with at most that much between them are read in one go."""
RUN_BYTES_MIN: Final = 1 << 20
RUN_BYTES_MAX: Final = CALL_BYTES_MAX


class Result(enum.Enum):
    """CORRUPT: other bytes than were stored, or too few. GONE: the segment was reclaimed. FAILED: the disk said no."""

    OK = enum.auto()
    CORRUPT = enum.auto()
    GONE = enum.auto()
    FAILED = enum.auto()


@dataclass(slots=True)
class Run:
    """Chunks of one segment in ascending order, read as one stretch of the file. Parallel columns.

    `positions`: where the chunks stand in the transfer.
    """

    name: SegmentName
    guard: Guard
    segment: int
    positions: list[int]
    keys: list[bytes]
    offsets: list[int]
    masks: list[int]
    digests: list[bytes]
    buffers: list[memoryview]

    def __len__(self) -> int:
        return len(self.keys)

    @property
    def end(self) -> int:
        return self.offsets[-1] + round_up(self.buffers[-1].nbytes)

    def alone(self, at: int) -> Run:
        """A run of one of the chunks."""
        one = slice(at, at + 1)
        columns = (self.positions, self.keys, self.offsets, self.masks, self.digests, self.buffers)
        return Run(self.name, self.guard, self.segment, *(column[one] for column in columns))  # type: ignore[arg-type]


def plan_runs(
    keys: Sequence[bytes],
    buffers: Sequence[memoryview],
    found: Found,
    opened: Callable[[int], tuple[SegmentName, Guard] | None],
    readers: int,
) -> list[Run]:
    """The chunks that were found with the length of their buffers, in the order of the disk, cut into runs.

    A small transfer is cut into shorter runs, so that every reader has one. Segments that `opened` does not know are
    gone: left out.
    """
    lengths = np.fromiter((buffer.nbytes for buffer in buffers), np.int64, len(buffers))
    here = np.flatnonzero((found.segments >= 0) & (found.lengths == lengths))
    order = here[np.lexsort((found.offsets[here], found.segments[here]))]
    segments, starts = found.segments[order], found.offsets[order]
    ends = starts + (lengths[order] + PAGE_BYTES - 1) // PAGE_BYTES * PAGE_BYTES
    gaps = starts[1:] - ends[:-1]
    apart = (segments[1:] != segments[:-1]) | (gaps < 0) | (gaps > GAP_BYTES_MAX)
    bounds = [0, *(np.flatnonzero(apart) + 1).tolist(), len(order)] if len(order) else [0]
    length_max = min(max(int(lengths.sum()) // readers, RUN_BYTES_MIN), RUN_BYTES_MAX) + PAGE_BYTES
    positions, offsets, masks = order.tolist(), starts.tolist(), found.masks[order].tolist()
    digests = found.digests[order].tobytes()
    runs = []
    for first, last in pairwise(bounds):
        known = opened(int(segments[first]))
        while known is not None and first < last:
            fitting = int(np.searchsorted(ends[first:last], offsets[first] + length_max, side="right"))
            after = first + max(1, fitting)
            places = positions[first:after]
            run = Run(
                *known,
                int(segments[first]),
                places,
                [keys[at] for at in places],
                offsets[first:after],
                masks[first:after],
                [
                    digests[at : at + DIGEST_BYTES]
                    for at in range(first * DIGEST_BYTES, after * DIGEST_BYTES, DIGEST_BYTES)
                ],
                [buffers[at] for at in places],
            )
            runs.append(run)
            first = after
    return runs


class Reader:
    """Reads runs; one per thread. Owns 4 MiB of staging memory, of which only used pages exist."""

    def __init__(self, directory: Directory, namespace: bytes) -> None:
        self._directory = directory
        self._namespace = namespace
        self._staging = pages(RUN_BYTES_MAX + GAP_BYTES_MAX + PAGE_BYTES)

    def read(self, run: Run) -> list[Result]:
        """What became of each chunk. Never raises for what the disk or the file does."""
        try:
            with self._directory.open_segment(run.name) as file:
                return self._read(file, run)
        except FileNotFoundError:
            return [Result.GONE] * len(run)
        except FormatError:
            return [Result.CORRUPT] * len(run)
        except OSError:
            if len(run) == 1:
                return [Result.FAILED]
            # One bad sector must not cost its neighbours.
            return [self.read(run.alone(at))[0] for at in range(len(run))]

    def _read(self, file: SegmentFile, run: Run) -> list[Result]:
        """Until this has said OK, a buffer holds bytes that may be anything."""
        guard = run.guard
        fields = [
            pack_fields(key, self._namespace, mask, buffer.nbytes, guard.method)
            for key, mask, buffer in zip(run.keys, run.masks, run.buffers, strict=True)
        ]
        if isinstance(guard, Cipher):
            streams = list(map(guard.decrypt, fields, run.offsets, run.digests))
            arrived = self._fill_staged(file, run, [stream.update for stream in streams])
            exact = [stream.verify for stream in streams]
        else:
            arrived = self._fill(file, run)
            columns = zip(fields, run.offsets, run.buffers, run.digests, strict=True)
            exact = [partial(guard.verify, *column) for column in columns]
        results = []
        for offset, buffer, is_exact in zip(run.offsets, run.buffers, exact, strict=True):
            if offset + buffer.nbytes > arrived:
                results.append(Result.GONE if file.is_reclaimed() else Result.CORRUPT)
            else:
                results.append(Result.OK if is_exact() else Result.CORRUPT)
        return results

    def _fill(self, file: SegmentFile, run: Run) -> int:
        """Reads the stretch that holds the run; returns up to which offset of the file it came."""
        if file.direct and not all(map(is_aligned, run.buffers)):
            return self._fill_staged(file, run, [_copy] * len(run))
        start = at = run.offsets[0]
        scattered: list[memoryview] = []
        tails = self._tails()
        copies: list[tuple[memoryview, memoryview]] = []
        for offset, buffer in zip(run.offsets, run.buffers, strict=True):
            if offset > at:
                scattered.append(self._staging[RUN_BYTES_MAX : RUN_BYTES_MAX + offset - at])
            length = buffer.nbytes
            tail = length % PAGE_BYTES
            if tail == 0:
                scattered.append(buffer)
                at = offset + length
                continue
            if length > tail:
                scattered.append(buffer[: length - tail])
            page = next(tails)
            scattered.append(page)
            copies.append((buffer[length - tail :], page[:tail]))
            at = offset + length - tail + PAGE_BYTES
        arrived = start + file.read(scattered, start)
        for target, source in copies:
            target[:] = source
        return arrived

    def _tails(self) -> Iterator[memoryview]:
        """Pages of the staging memory; a run has at most one for each of its own pages."""
        for at in range(0, self._staging.nbytes, PAGE_BYTES):
            yield self._staging[at : at + PAGE_BYTES]

    def _fill_staged(
        self, file: SegmentFile, run: Run, deliver: Sequence[Callable[[memoryview, memoryview], None]]
    ) -> int:
        """The same through staging memory: for what is decrypted, and for buffers that direct I/O cannot reach.

        `deliver` brings each chunk from there to its buffer, in parts from front to back.
        """
        at, end = run.offsets[0], run.end
        while at < end:
            length = min(end - at, RUN_BYTES_MAX)
            done = file.read([self._staging[:length]], at)
            for offset, buffer, bring in zip(run.offsets, run.buffers, deliver, strict=True):
                first, last = max(at, offset), min(at + done, offset + buffer.nbytes)
                if first < last:
                    bring(self._staging[first - at : last - at], buffer[first - offset : last - offset])
            at += done
            if done < length:
                break
        return at


def _copy(source: memoryview, target: memoryview) -> None:
    target[:] = source
