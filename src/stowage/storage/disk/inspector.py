"""Reads the chunks of one segment after the other and says which verify; under any protection whose keys are given.

For looking at a directory from outside, without a tier. Changes nothing.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final

import numpy as np
from numpy.typing import NDArray

from stowage.core.geometry import round_up
from stowage.errors import DirectoryError
from stowage.native.memory import pages
from stowage.storage.disk.counters import Counters
from stowage.storage.disk.directory import Directory
from stowage.storage.disk.index import LookupResult
from stowage.storage.disk.private_directory import LOCK_NAME
from stowage.storage.disk.read_plan import RUN_BYTES_MAX, plan_runs
from stowage.storage.disk.reader import Reader, Result
from stowage.storage.disk.system import System
from stowage.storage.format import segment
from stowage.storage.format.protection import Guard, Method, Protection, SecretKey
from stowage.storage.format.segment import Entries, SegmentHeader, SegmentName

FILE_BYTES_MAX: Final = 1 << 62
"""The limit belongs to whoever writes; a reader takes files as they are."""
CHUNK_BYTES_MAX: Final = 1 << 30
"""A longer one is not read: nothing bounds the memory that it would take."""


def open_existing(path: Path, system: System, *, direct: bool) -> Directory:
    """A directory that is a cache already. Raises DirectoryError for any other, and for one that cannot be trusted."""
    if not path.is_dir():
        raise DirectoryError(f"{path} is not a directory: no cache has been stored there yet. Give the one of --disk.")
    if not (path / LOCK_NAME).exists():
        raise DirectoryError(f"{path} is not a Stowage cache. Give the directory that --disk was given.")
    return Directory(path, FILE_BYTES_MAX, system, Counters(), direct)


class Inspector:
    """Used by one thread. `secrets`: for segments under a key. Reads at most `bytes_per_s_max`."""

    def __init__(self, directory: Directory, secrets: Sequence[SecretKey], bytes_per_s_max: float) -> None:
        self._directory = directory
        self._secrets = secrets
        self._protections: dict[int, Protection] = {Method.CHECKSUM: Protection()}
        self._bytes_per_s_max = bytes_per_s_max
        self._memory = pages(RUN_BYTES_MAX)
        self._began_s = directory.system.timer()

    def guard(self, name: SegmentName, header: SegmentHeader) -> Guard | None:
        """None: protected by a key that was not given, or by a method that this version does not know."""
        method = header.mark.method
        if method not in self._protections:
            if not self._secrets or method not in list(Method):
                return None
            self._protections[method] = Protection(Method(method), self._secrets)
        return self._protections[method].guard(name.id, header.mark)

    def read(
        self, name: SegmentName, header: SegmentHeader, guard: Guard, entries: Entries
    ) -> Iterator[tuple[int, int, Result | None]]:
        """Offset and length of each chunk, and what became of it; None: too long to be read.

        Entries that no reader would take are left out. Raises FileNotFoundError for a segment that was reclaimed.
        """
        records = segment.select(entries, header.namespace, guard.method)
        reader = Reader(self._directory, header.namespace)
        segments = np.zeros(len(records), np.int64)
        found = LookupResult(segments, records.offsets, records.lengths, records.masks, records.digests, records.packed)
        for part in _windows(records.lengths):
            lengths = records.lengths[part].tolist()
            if lengths[0] > CHUNK_BYTES_MAX:
                yield int(records.offsets[part.start]), lengths[0], None
                continue
            buffers = self._buffers(lengths)
            for run in plan_runs(records.keys[part], buffers, found.part(part), lambda _: (name, guard)):
                results = reader.read(run)
                reader.close_file()
                if Result.GONE in results:
                    raise FileNotFoundError
                for offset, buffer, result in zip(run.offsets, run.buffers, results, strict=True):
                    yield offset, buffer.nbytes, result
                self._slow_down(run.end - run.offsets[0])

    def _buffers(self, lengths: list[int]) -> list[memoryview]:
        total = sum(map(round_up, lengths))
        memory = self._memory if total <= self._memory.nbytes else pages(total)
        starts = np.cumsum([0, *map(round_up, lengths)]).tolist()
        return [memory[start : start + length] for start, length in zip(starts, lengths, strict=False)]

    def _slow_down(self, length: int) -> None:
        """Sleeps until that many bytes more may have been read."""
        system = self._directory.system
        self._began_s = max(self._began_s, system.timer() - 1.0) + length / self._bytes_per_s_max
        ahead_s = self._began_s - system.timer()
        if ahead_s > 0:
            system.sleep(ahead_s)


def _windows(lengths: NDArray[np.int64]) -> Iterator[slice]:
    """Chunks that are read together: as many as fit one read, or a longer one alone."""
    start, total = 0, 0
    for at, length in enumerate(lengths.tolist()):
        if at > start and total + round_up(length) > RUN_BYTES_MAX:
            yield slice(start, at)
            start, total = at, 0
        total += round_up(length)
    if start < len(lengths):
        yield slice(start, len(lengths))
