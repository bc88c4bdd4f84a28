"""Reads chunks: neighbours in a segment together, directly into their buffers, each verified before use.

Packed chunks are read into other memory, verified there, and unpacked into their buffers. Reading (`fetch`) and
verifying and unpacking (`finish`) are separate steps, which different threads may do.
"""

from __future__ import annotations

import enum
import errno
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Final

from stowage.core import lossless
from stowage.core.geometry import PAGE_BYTES, round_up
from stowage.errors import FormatError
from stowage.native.memory import pages
from stowage.storage.disk.directory import Directory, SegmentFile
from stowage.storage.disk.files import all_aligned
from stowage.storage.disk.read_plan import GAP_BYTES_MAX, RUN_BYTES_MAX, Run
from stowage.storage.format.batch import Fields
from stowage.storage.format.envelope import pack_fields_of
from stowage.storage.format.protection import Cipher
from stowage.storage.format.segment import SegmentName


class Result(enum.Enum):
    """CORRUPT: wrong or missing bytes. GONE: the segment was reclaimed. FAILED: an I/O error. BUSY: no file could be
    opened, which says nothing about the chunk. UNKNOWN: packed in a format that this version does not know.
    """

    OK = enum.auto()
    CORRUPT = enum.auto()
    GONE = enum.auto()
    FAILED = enum.auto()
    BUSY = enum.auto()
    UNKNOWN = enum.auto()


_OK: Final = Result.OK
NO_FILE: Final = frozenset({errno.EMFILE, errno.ENFILE})
"""The process, or the machine, has as many files open as it may."""


@dataclass(slots=True)
class Fetched:
    """A run that was read. `stored`: the same run, with the buffers that have the bytes as stored. `ends`: the file
    offset up to which each stretch was read; `short`: the result of chunks beyond. `results`: of each chunk, if known
    already.
    """

    run: Run
    stored: Run
    ends: list[int]
    short: Result = Result.CORRUPT
    results: list[Result] | None = None


class Reader:
    """Reads runs; one per thread. Owns 4 MiB of staging memory (only touched pages take memory).

    Keeps the file of its last run open, because the next one is likely to be in it too, until `close_file`.
    """

    def __init__(self, directory: Directory, namespace: bytes) -> None:
        self._directory = directory
        self._namespace = namespace
        self._staging = pages(RUN_BYTES_MAX + GAP_BYTES_MAX + PAGE_BYTES)
        self._kept: tuple[SegmentName, SegmentFile] | None = None

    def close_file(self) -> None:
        """Closes the file of the last run."""
        if self._kept is not None:
            self._kept[1].close()
            self._kept = None

    def _open(self, name: SegmentName) -> SegmentFile:
        if self._kept is not None and self._kept[0] == name:
            return self._kept[1]
        self.close_file()
        file = self._directory.open_segment(name)
        self._kept = name, file
        return file

    def fetch(self, run: Run, memory: memoryview | None) -> Fetched:
        """Reads the run; packed chunks go into `memory`, which must be large enough. Never raises because of the disk
        or the file: `finish` returns the results.
        """
        fetched = self._fetch(run if memory is None else _into(memory, run))
        fetched.run = run
        return fetched

    def finish(self, fetched: Fetched) -> list[Result]:
        """The result of each chunk of a run that this or another reader has fetched. Chunks that are OK are in their
        buffers, which have the length of the stored payload.
        """
        results, run = self._verify(fetched), fetched.run
        for at, is_packed in enumerate(run.packed):
            if is_packed and results[at] is _OK:
                results[at] = _unpack(fetched.stored.buffers[at], run.buffers[at])
        return results

    def read(self, run: Run) -> list[Result]:
        """Reads chunks as stored, without unpacking; returns each one's result. Never raises for disk or file."""
        return self._verify(self._fetch(run))

    def _fetch(self, run: Run) -> Fetched:
        fetched = Fetched(run, run, [])
        try:
            self._fill_all(self._open(run.name), fetched)
        except FileNotFoundError:
            fetched.results = [Result.GONE] * len(run)
        except FormatError:
            fetched.results = [Result.CORRUPT] * len(run)
        except OSError as error:
            if error.errno in NO_FILE:
                fetched.results = [Result.BUSY] * len(run)
                return fetched
            # One bad sector must not fail its neighbours.
            parts = [run.part(at, at + 1) for at in range(len(run))] if len(run) > 1 else []
            fetched.results = [self.read(part)[0] for part in parts] or [Result.FAILED]
        return fetched

    def _fill_all(self, file: SegmentFile, fetched: Fetched) -> None:
        """Fills all buffers. Their bytes are not to be trusted before `_verify`."""
        run = fetched.stored
        stretches = [run] if len(run.bounds) == 2 else [run.part(*bounds) for bounds in pairwise(run.bounds)]
        if isinstance(run.guard, Cipher):
            streams = list(map(run.guard.decrypt, map(bytes, self._fields(run)), run.offsets, map(bytes, run.digests)))
            deliver = [stream.update for stream in streams]
            fetched.ends = [
                self._fill_staged(file, stretch, deliver[first:after])
                for stretch, (first, after) in zip(stretches, pairwise(run.bounds), strict=True)
            ]
            exact = [stream.verify() for stream in streams]
        else:
            fetched.ends = [self._fill(file, stretch) for stretch in stretches]
            exact = None
        if any(end < stretch.last for end, stretch in zip(fetched.ends, stretches, strict=True)):
            fetched.short = Result.GONE if file.is_reclaimed() else Result.CORRUPT
        if exact is not None:
            fetched.results = _results(fetched, exact)

    def _verify(self, fetched: Fetched) -> list[Result]:
        run, guard = fetched.stored, fetched.stored.guard
        if fetched.results is not None:
            return fetched.results
        assert not isinstance(guard, Cipher), "it is verified while it is decrypted"
        return _results(fetched, guard.verify_all(self._fields(run), run.offsets, run.buffers, run.digests).tolist())

    def _fields(self, run: Run) -> Fields:
        return pack_fields_of(run.keys, self._namespace, run.masks, run.lengths, run.guard.method, run.packed)

    def _fill(self, file: SegmentFile, run: Run) -> int:
        """Reads a run of one stretch; returns the file offset up to which it was read."""
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
        """As `_fill`, through staging memory: for encrypted chunks, and for buffers that direct I/O cannot use.

        `deliver` copies each chunk to its buffer, in parts from front to back.
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


def _into(memory: memoryview, run: Run) -> Run:
    """The run with buffers in `memory`, for packed chunks."""
    buffers, at = list(run.buffers), 0
    for index, (length, is_packed) in enumerate(zip(run.lengths, run.packed, strict=True)):
        if is_packed:
            buffers[index] = memory[at : at + length]
            at += round_up(length)
    return replace(run, buffers=buffers)


def _results(fetched: Fetched, exact: list[bool]) -> list[Result]:
    run = fetched.stored
    ends = [
        end for end, (first, after) in zip(fetched.ends, pairwise(run.bounds), strict=True) for _ in range(first, after)
    ]
    return [
        fetched.short if offset + length > end else _OK if is_exact else Result.CORRUPT
        for offset, length, end, is_exact in zip(run.offsets, run.lengths, ends, exact, strict=True)
    ]


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
