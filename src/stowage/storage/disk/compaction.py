"""Compaction: chunks that were hit are copied from the segment that is reclaimed next into the new one."""

from __future__ import annotations

from collections.abc import Iterator, Set
from itertools import compress
from typing import Final

import numpy as np

from stowage.core.geometry import PAGE_BYTES, round_up
from stowage.native.memory import pages
from stowage.storage.disk.allocator import segment_bytes_for
from stowage.storage.disk.catalog import Segment
from stowage.storage.disk.index import LookupResult
from stowage.storage.disk.read_plan import RUN_BYTES_MAX, plan_runs
from stowage.storage.disk.reader import Reader, Result
from stowage.storage.disk.shared import Shared
from stowage.storage.disk.write_queue import Chunks
from stowage.storage.disk.writer import ActiveSegment
from stowage.storage.format import segment
from stowage.storage.format.segment import Entries, SegmentName

REWRITE_SHARE: Final = 4
"""Still-hot chunks of the next victim may take one part in this many of a new segment."""


class Compactor:
    """Not for several threads at once (the tier's writer owns it)."""

    def __init__(self, shared: Shared) -> None:
        self._catalog = shared.catalog
        self._index = shared.index
        self._counters = shared.counters
        self._reader = Reader(shared.directory, shared.namespace)

    def copy(
        self, victim: SegmentName, active: ActiveSegment, known: Segment, *, keep_bytes: int, except_for: Set[bytes]
    ) -> Iterator[Entries]:
        """Copies chunks that were hit from the next victim to the new segment `active` (`known` in the catalog). Yields
        each batch when it is indexed. Leaves room for a chunk of `keep_bytes`. Raises OSError.

        `except_for`: keys that are being written, maybe to the previous segment. A copy written after them would count
        as the newest record, although it has fewer blocks.
        """
        number = self._catalog.number_of(victim)
        if number is None:
            return
        keys, found = self._index.hits(number)
        if not except_for.isdisjoint(keys):
            others = np.array([key not in except_for for key in keys])
            keys, found = list(compress(keys, others.tolist())), found.part(others)
        padded = [round_up(length) for length in found.lengths.tolist()]
        room = active.file.bytes - active.end - segment_bytes_for(keep_bytes)
        budget = min(active.file.bytes // REWRITE_SHARE, room)
        at = 0
        while at < len(keys):
            start = at
            while at < len(keys) and at - start < segment.BATCH_CHUNKS_MAX:
                if at > start and sum(padded[start : at + 1]) > RUN_BYTES_MAX:
                    break
                at += 1
            budget -= sum(padded[start:at]) + 2 * PAGE_BYTES
            if budget < 0:
                return
            chunks = self._read(keys[start:at], found.part(slice(start, at)))
            if chunks and active.fitting(chunks.lengths) == len(chunks):
                entries = active.append(chunks)
                self._catalog.index_batch(known, entries, copied_from=number)
                self._counters.add("rewritten", len(chunks))
                yield entries

    def _read(self, keys: list[bytes], found: LookupResult) -> Chunks:
        """The chunks that verify, as stored."""
        lengths = found.lengths.tolist()
        memory = pages(sum(map(round_up, lengths)))
        buffers = []
        at = 0
        for length in lengths:
            buffers.append(memory[at : at + length])
            at += round_up(length)
        chunks = Chunks()
        for run in plan_runs(keys, buffers, found, self._catalog.opened):
            for n, result in enumerate(self._reader.read(run)):
                if result is Result.OK:
                    chunks.add(Chunks([run.keys[n]], [run.masks[n]], [run.buffers[n]], [run.packed[n]]))
        self._reader.close_file()
        return chunks
