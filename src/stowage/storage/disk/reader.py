"""Reads chunks: neighbours in a segment together, straight into their buffers, each verified before it counts.

What lies packed is read into memory of the reader's own, verified there, and unpacked into its buffer.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Final

from stowage.core import lossless
from stowage.errors import FormatError
from stowage.storage.disk.directory import Directory, SegmentFile
from stowage.storage.disk.files import all_aligned, pages
from stowage.storage.disk.packing import PackingRates
from stowage.storage.disk.read_plan import GAP_BYTES_MAX, RUN_BYTES_MAX, Run
from stowage.storage.format.envelope import pack_fields_of
from stowage.storage.format.protection import Cipher
from stowage.storage.format.segment import PAGE_BYTES, SegmentName, round_up

__all__ = ["Reader", "Result"]


class Result(enum.Enum):
    """CORRUPT: other bytes than were stored, or too few. GONE: the segment was reclaimed. FAILED: the disk said no.
    UNKNOWN: packed in a way that this version does not know.
    """

    OK = enum.auto()
    CORRUPT = enum.auto()
    GONE = enum.auto()
    FAILED = enum.auto()
    UNKNOWN = enum.auto()


_OK: Final = Result.OK


class Reader:
    """Reads runs; one per thread. Owns twice 4 MiB of staging memory, of which only used pages exist.

    Keeps the file of its last run open, because the next one is likely to be in it too, until `rest`.
    """

    def __init__(self, directory: Directory, namespace: bytes) -> None:
        self._directory = directory
        self._namespace = namespace
        self._staging = pages(RUN_BYTES_MAX + GAP_BYTES_MAX + PAGE_BYTES)
        self._kept: tuple[SegmentName, SegmentFile] | None = None
        self._packed: memoryview | None = None

    def rest(self) -> None:
        """There is nothing to read for a while: closes the file."""
        if self._kept is not None:
            self._kept[1].close()
            self._kept = None

    def _open(self, name: SegmentName) -> SegmentFile:
        if self._kept is not None and self._kept[0] == name:
            return self._kept[1]
        self.rest()
        file = self._directory.open_segment(name)
        self._kept = name, file
        return file

    def load(self, run: Run, rates: PackingRates | None = None) -> list[Result]:
        """As `read`, and what lies packed is unpacked: each buffer has the length of what was stored there."""
        stored = self._as_it_lies(run) if any(run.packed) else run
        if rates is None:
            return self._unpacked(run, stored, self.read(stored))
        at_once, began_s = rates.begin_load(), rates.timer()
        try:
            try:
                results = self.read(stored)
            finally:
                rates.read()
            arrived_s = rates.timer()
            results = self._unpacked(run, stored, results)
        finally:
            rates.end_load()
        rates.add_load(run, at_once, arrived_s - began_s, rates.timer() - arrived_s)
        return results

    @staticmethod
    def _unpacked(run: Run, stored: Run, results: list[Result]) -> list[Result]:
        for at, is_packed in enumerate(run.packed):
            if is_packed and results[at] is _OK:
                results[at] = _unpack(stored.buffers[at], run.buffers[at])
        return results

    def _as_it_lies(self, run: Run) -> Run:
        """The run with memory of its own for what is packed."""
        total = sum(round_up(length) for length, is_packed in zip(run.lengths, run.packed, strict=True) if is_packed)
        memory = self._packed
        if memory is None or total > memory.nbytes:
            memory = pages(max(total, RUN_BYTES_MAX + PAGE_BYTES))
            if total <= memory.nbytes == RUN_BYTES_MAX + PAGE_BYTES:
                self._packed = memory  # a longer one is for this run alone
        buffers, at = list(run.buffers), 0
        for index, (length, is_packed) in enumerate(zip(run.lengths, run.packed, strict=True)):
            if is_packed:
                buffers[index] = memory[at : at + length]
                at += round_up(length)
        return replace(run, buffers=buffers)

    def read(self, run: Run) -> list[Result]:
        """What became of each chunk, each read as it lies. Never raises for what the disk or the file does."""
        try:
            return self._read(self._open(run.name), run)
        except FileNotFoundError:
            return [Result.GONE] * len(run)
        except FormatError:
            return [Result.CORRUPT] * len(run)
        except OSError:
            if len(run) == 1:
                return [Result.FAILED]
            # One bad sector must not cost its neighbours.
            return [self.read(run.part(at, at + 1))[0] for at in range(len(run))]

    def _read(self, file: SegmentFile, run: Run) -> list[Result]:
        """Until this has said OK, a buffer holds bytes that may be anything."""
        guard = run.guard
        fields = pack_fields_of(run.keys, self._namespace, run.masks, run.lengths, guard.method, run.packed)
        stretches = [run] if len(run.bounds) == 2 else [run.part(*bounds) for bounds in pairwise(run.bounds)]
        if isinstance(guard, Cipher):
            streams = list(map(guard.decrypt, map(bytes, fields), run.offsets, map(bytes, run.digests)))
            deliver = [stream.update for stream in streams]
            arrived = [
                self._fill_staged(file, stretch, deliver[first:after])
                for stretch, (first, after) in zip(stretches, pairwise(run.bounds), strict=True)
            ]
            exact = [stream.verify() for stream in streams]
        else:
            arrived = [self._fill(file, stretch) for stretch in stretches]
            exact = guard.verify_all(fields, run.offsets, run.buffers, run.digests).tolist()
        if all(exact) and all(end >= stretch.last for end, stretch in zip(arrived, stretches, strict=True)):
            return [_OK] * len(run)
        results = []
        ends = [end for end, stretch in zip(arrived, stretches, strict=True) for _ in range(len(stretch))]
        for offset, length, end, is_exact in zip(run.offsets, run.lengths, ends, exact, strict=True):
            if offset + length > end:
                results.append(Result.GONE if file.is_reclaimed() else Result.CORRUPT)
            else:
                results.append(_OK if is_exact else Result.CORRUPT)
        return results

    def _fill(self, file: SegmentFile, run: Run) -> int:
        """Reads the stretch that the run is; returns up to which offset of the file it came."""
        if file.direct and not all_aligned(run.buffers):
            return self._fill_staged(file, run, [_copy] * len(run))
        if run.end - run.offsets[0] == sum(run.lengths):  # whole pages, and nothing between them
            return run.offsets[0] + file.read(run.buffers, run.offsets[0])
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


def _unpack(packed: memoryview, buffer: memoryview) -> Result:
    try:
        lossless.unpack(packed, buffer)
    except lossless.UnknownCode:
        return Result.UNKNOWN
    except FormatError:
        return Result.CORRUPT
    return _OK


def _copy(source: memoryview, target: memoryview) -> None:
    target[:] = source
