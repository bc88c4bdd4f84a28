"""A segment that this process writes: batch after batch, payloads before their header page, a footer at the end."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Final

import numpy as np

from stowage.core.geometry import PAGE_BYTES, round_up
from stowage.native.memory import pages
from stowage.storage.disk.directory import SegmentFile
from stowage.storage.disk.files import CALL_BYTES_MAX, all_aligned, is_aligned
from stowage.storage.disk.recovery import seal
from stowage.storage.disk.write_queue import Chunks
from stowage.storage.format import envelope, segment
from stowage.storage.format.batch import DIGEST_BYTES, Digests, Fields
from stowage.storage.format.protection import Cipher, Guard
from stowage.storage.format.segment import Entries, SegmentName

Encrypt = Callable[[memoryview, memoryview], None]

STAGING_BYTES: Final = CALL_BYTES_MAX
BATCH_BYTES_MAX: Final = 16 << 20
"""Of payloads in a batch of more than one chunk. None of them counts before all are written: who waits for the first
ones would wait for all that a disk does in a long time."""


@dataclass(slots=True)
class Batch:
    """Chunks under one header page, which lies at `offset`. `end`: where the next batch begins."""

    offset: int
    end: int
    chunks: Chunks
    lengths: list[int]
    fields: Fields


@dataclass(slots=True)
class Page:
    """The header page of a batch whose payloads are written. `end`: where the batch ends."""

    offset: int
    memory: memoryview
    entries: Entries
    end: int


class ActiveSegment:
    """One locked file of full length. Used by one thread; `write` and `digest` by others too.

    Invariants (`check`): `end` is a whole number of pages, footer and trailer of what is written fit behind it.
    """

    def __init__(
        self, file: SegmentFile, name: SegmentName, namespace: bytes, guard: Guard, staging: memoryview
    ) -> None:
        assert staging.nbytes >= STAGING_BYTES and is_aligned(staging)
        self.file = file
        self.name = name
        self.end = PAGE_BYTES
        self._namespace = namespace
        self._guard = guard
        self._staging = staging
        self._batches: list[Entries] = []
        self._is_sealed = False
        self.chunks = 0
        self._page_memory: list[memoryview] = []  # to be used again: new pages are slow

    def fitting(self, lengths: Sequence[int]) -> int:
        """How many of these payloads fit as one batch, in this order."""
        return self.fitting_at(self.end, self.chunks, lengths)

    def fitting_at(self, end: int, chunks: int, lengths: Sequence[int]) -> int:
        """The same when there are so many chunks, which end there."""
        room = self.file.bytes - end
        limit = min(len(lengths), segment.BATCH_CHUNKS_MAX, segment.ENTRIES_MAX - chunks)
        whole = segment.batch_bytes(lengths[:limit])
        if whole <= PAGE_BYTES + BATCH_BYTES_MAX and room - whole >= segment.footer_room(chunks + limit):
            return limit
        taken = 0
        for count in range(limit):
            taken += round_up(lengths[count])
            if count and taken > BATCH_BYTES_MAX:
                return count
            if room - PAGE_BYTES - taken < segment.footer_room(chunks + count + 1):
                return count
        return limit

    def append(self, chunks: Chunks) -> Entries:
        """Writes one batch that fits. Raises OSError; then nothing was added, and the segment must be abandoned."""
        return self.append_batch(self.batch(chunks, self.end))

    def append_batch(self, batch: Batch) -> Entries:
        """The same for a batch that begins at `end`."""
        *offsets, _ = accumulate(map(round_up, batch.lengths), initial=batch.offset + PAGE_BYTES)
        digests = self._write_payloads(batch.fields, offsets, batch.chunks.payloads)
        page = self.page(batch, digests)
        self.write([page.memory], page.offset)
        return self.finish(page)

    def batch(self, chunks: Chunks, offset: int) -> Batch:
        """Chunks that are to be written there."""
        lengths = chunks.lengths
        fields = envelope.pack_fields_of(
            chunks.keys, self._namespace, chunks.masks, lengths, self._guard.method, chunks.packed
        )
        return Batch(offset, offset + segment.batch_bytes(lengths), chunks, lengths, fields)

    def goes_straight(self, batch: Batch) -> bool:
        """Whether direct I/O can take all payloads from where they are, and nothing has to be done to them."""
        whole_pages = batch.end - batch.offset - PAGE_BYTES == sum(batch.lengths)
        return whole_pages and not isinstance(self._guard, Cipher) and all_aligned(batch.chunks.payloads)

    def write(self, buffers: list[memoryview], offset: int) -> None:
        """Aligned memory, in whole pages. Any number of threads at a time. Raises OSError."""
        self.file.write(buffers, offset)

    def digest(self, fields: Fields, offsets: Sequence[int], payloads: list[memoryview]) -> Digests:
        """Of payloads that lie there as they are. Any number of threads at a time."""
        assert not isinstance(self._guard, Cipher), "a cipher goes forward only"
        return self._guard.digest_all(fields, offsets, payloads)

    def page(self, batch: Batch, digests: Digests) -> Page:
        """The header page of a batch whose payloads are written."""
        headers = np.empty((len(digests), envelope.HEADER_BYTES), np.uint8)
        headers[:, :-DIGEST_BYTES] = batch.fields
        headers[:, -DIGEST_BYTES:] = digests.view(np.uint8)
        page = segment.pack_batch_page(self.name.id, batch.offset, headers, batch.lengths)
        entries = segment.batch_entries(headers, batch.offset, batch.lengths)
        memory = self._page_memory.pop() if self._page_memory else pages(PAGE_BYTES)
        memory[:] = page
        return Page(batch.offset, memory, entries, batch.end)

    def finish(self, page: Page) -> Entries:
        """The batch at `end` is whole: its header page is written."""
        assert page.offset == self.end
        self._page_memory.append(page.memory)
        self._batches.append(page.entries)
        self.chunks += len(page.entries)
        self.end = page.end
        return page.entries

    def _write_payloads(self, fields: Fields, offsets: list[int], payloads: list[memoryview]) -> Digests:
        """Writes what goes to rest of each payload; returns their digests."""
        guard = self._guard
        if isinstance(guard, Cipher):
            lengths = [payload.nbytes for payload in payloads]
            streams = list(map(guard.encrypt, map(bytes, fields), offsets, lengths))
            self._write_any(payloads, offsets[0], [stream.update for stream in streams])
            tags = b"".join([stream.tag() for stream in streams])
            return np.frombuffer(tags, np.uint64).reshape(-1, 2)
        self._write_any(payloads, offsets[0], [None] * len(payloads))
        return self.digest(fields, offsets, payloads)

    def _write_any(self, payloads: Sequence[memoryview], offset: int, encrypt: Sequence[Encrypt | None]) -> None:
        """Whole pages go straight from the buffers; tails, and what is not aligned, through the staging memory.

        What has to be encrypted goes through it whole: the buffers belong to others, who may read them meanwhile.
        """
        buffers: list[memoryview] = []
        start, staged, gathered = offset, 0, 0
        for payload, transform in zip(payloads, encrypt, strict=True):
            straight = transform is None and is_aligned(payload)
            whole = payload.nbytes // PAGE_BYTES * PAGE_BYTES if straight else 0
            if whole:
                buffers.append(payload[:whole])
                gathered += whole
            rest = payload[whole:]
            while rest.nbytes:
                part = rest[: STAGING_BYTES - staged]
                taken = round_up(part.nbytes)
                room = self._staging[staged : staged + taken]
                if transform is None:
                    room[: part.nbytes] = part
                else:
                    transform(part, room[: part.nbytes])
                room[part.nbytes :] = bytes(taken - part.nbytes)
                buffers.append(room)
                gathered += taken
                staged += taken
                rest = rest[part.nbytes :]
                if staged == STAGING_BYTES:
                    self.file.write(buffers, start)
                    start += gathered
                    buffers, staged, gathered = [], 0, 0
        if buffers:
            self.file.write(buffers, start)

    def seal(self) -> bool:
        """Writes the footer, cuts the file to its end and gives the lock back. Whether it could; closes all the same.
        Done once: then it only says how that went. In any thread.

        A segment without chunks gives its space back, and is removed by the next repair.
        """
        if self.file.fd >= 0:
            try:
                if not seal(self.file, self.name, self._batches, self.end):
                    self.file.truncate(PAGE_BYTES)
                self._is_sealed = True
            except OSError:
                pass
            finally:
                self.file.close()
        return self._is_sealed

    def check(self) -> None:
        """Asserts the invariants."""
        assert self.end % PAGE_BYTES == 0 and sum(map(len, self._batches)) == self.chunks
        room = segment.footer_room(self.chunks) if self.chunks else 0
        assert self.file.fd < 0 or self.end + room <= self.file.bytes, "no room for the footer"
