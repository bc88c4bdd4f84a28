"""The segment that this process writes: batch after batch, payloads before their header page, a footer at the end."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from itertools import accumulate
from operator import call
from typing import Final

import numpy as np

from stowage.format import envelope, segment
from stowage.format.batch import Digests, Fields
from stowage.format.protection import Cipher, Guard
from stowage.format.segment import PAGE_BYTES, Entries, SegmentName
from stowage.tiers.disk.directory import SegmentFile
from stowage.tiers.disk.files import CALL_BYTES_MAX, all_aligned, is_aligned, pages
from stowage.tiers.disk.stream import Chunks, Stream
from stowage.tiers.disk.survey import seal
from stowage.tiers.disk.system import Together

__all__ = ["ActiveSegment"]

Encrypt = Callable[[memoryview, memoryview], None]

STAGING_BYTES: Final = CALL_BYTES_MAX
_HOLE: Final = pages(PAGE_BYTES)
"""What lies where the header page of a batch will be."""


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
    page: memoryview
    entries: Entries
    end: int


@dataclass(slots=True)
class Piece:
    """What one system call writes from `offset` on: payloads with their envelopes' fields, where each of them lies, and
    the places of header pages between them.
    """

    offset: int
    buffers: list[memoryview]
    fields: list[Fields]
    offsets: list[int]
    payloads: list[memoryview]

    def add(self, batch: Batch, first: int, after: int, offset: int) -> None:
        """The payloads of a batch from `first` on, before `after`, go to `offset` and behind it."""
        payloads = batch.chunks.payloads[first:after]
        self.buffers += payloads
        self.payloads += payloads
        self.fields.append(batch.fields[first:after])
        self.offsets += accumulate(batch.lengths[first : after - 1], initial=offset)


Job = Callable[[], "Digests | list[Page]"]
"""Writes the payloads of a piece, and says what they hash to; or writes header pages."""


class ActiveSegment:
    """One locked file of full length. Used by one thread.

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
        self._chunks = 0
        self._page_memory: list[memoryview] = []  # to be used again: new pages are slow

    def fitting(self, lengths: Sequence[int]) -> int:
        """How many of these payloads fit as one batch, in this order."""
        return self._fitting(lengths, self.end, self._chunks)

    def _fitting(self, lengths: Sequence[int], end: int, chunks: int) -> int:
        room = self.file.bytes - end - PAGE_BYTES
        limit = min(len(lengths), segment.BATCH_CHUNKS_MAX, segment.ENTRIES_MAX - chunks)
        if room + PAGE_BYTES - segment.batch_bytes(lengths[:limit]) >= segment.footer_room(chunks + limit):
            return limit
        for count in range(limit):
            room -= segment.round_up(lengths[count])
            if room < segment.footer_room(chunks + count + 1):
                return count
        return limit

    def append(self, chunks: Chunks) -> Entries:
        """Writes one batch that fits. Raises OSError; then nothing was added, and the segment must be abandoned."""
        return self._append(self._batch(chunks, self.end))

    def _append(self, batch: Batch) -> Entries:
        *offsets, _ = accumulate(map(segment.round_up, batch.lengths), initial=batch.offset + PAGE_BYTES)
        digests = self._write_payloads(batch.fields, offsets, batch.chunks.payloads)
        return self._finish(self._write_page(self._page(batch, digests)))

    def append_all(self, stream: Stream, together: Together) -> Generator[Entries, None, None]:
        """Takes what fits of the stream, in batches; yields each once it is whole. Errors as of `append`.

        Payloads that can go straight to the disk are written and hashed several pieces at a time, those of later
        batches too, and header pages of earlier ones. What a later batch has on the disk before its turn lies where
        nobody looks until all header pages up to its own are there.
        """
        while (batch := self._next(stream, self.end, self._chunks)) is not None:
            if not self._goes_straight(batch):
                yield self._append(batch)
                continue
            line = _Line(self, batch, stream)
            failure: OSError | None = None
            try:
                with closing(together(call, line.jobs())) as done:
                    for result in done:
                        if isinstance(result, list):
                            for page in result:
                                line.under_way.popleft()
                                yield self._finish(page)
                        else:
                            line.hashed(result)
            except OSError as error:
                failure = error  # it was a later batch's, maybe: those before it are kept
            for page in [*line.under_way, *line.pages()]:
                yield self._finish(self._write_page(page))
            if failure is not None:
                raise failure
            if line.odd is not None:
                yield self._append(line.odd)

    def _next(self, stream: Stream, end: int, chunks: int) -> Batch | None:
        """Takes the next batch of the stream, to be written at `end`. None: there is none, or it does not fit."""
        ahead = stream.ahead(segment.BATCH_CHUNKS_MAX)
        count = self._fitting(ahead.lengths, end, chunks)
        if not count:
            return None
        stream.take(count)
        return self._batch(ahead.part(0, count), end)

    def _batch(self, chunks: Chunks, offset: int) -> Batch:
        lengths = chunks.lengths
        fields = envelope.pack_fields_of(chunks.keys, self._namespace, chunks.masks, lengths, self._guard.method)
        return Batch(offset, offset + segment.batch_bytes(lengths), chunks, lengths, fields)

    def _goes_straight(self, batch: Batch) -> bool:
        """Whether direct I/O can take all payloads from where they are, and nothing has to be done to them."""
        whole_pages = batch.end - batch.offset - PAGE_BYTES == sum(batch.lengths)
        return whole_pages and not isinstance(self._guard, Cipher) and all_aligned(batch.chunks.payloads)

    def _write_piece(self, piece: Piece) -> Digests:
        """In any thread."""
        assert not isinstance(self._guard, Cipher), "a cipher goes forward only"
        self.file.write(piece.buffers, piece.offset)
        return self._guard.digest_all(np.concatenate(piece.fields), piece.offsets, piece.payloads)

    def _write_pages(self, pages: list[Page]) -> list[Page]:
        """In any thread."""
        return list(map(self._write_page, pages))

    def _write_page(self, page: Page) -> Page:
        self.file.write([page.page], page.offset)
        return page

    def _page(self, batch: Batch, digests: Digests) -> Page:
        """The header page of a batch whose payloads are written."""
        headers = np.empty((len(digests), envelope.HEADER_BYTES), np.uint8)
        headers[:, : -envelope.DIGEST_BYTES] = batch.fields
        headers[:, -envelope.DIGEST_BYTES :] = digests.view(np.uint8)
        page = segment.pack_batch_page(self.name.id, batch.offset, headers, batch.lengths)
        entries = segment.batch_entries(headers, batch.offset, batch.lengths)
        memory = self._page_memory.pop() if self._page_memory else pages(PAGE_BYTES)
        memory[:] = page
        return Page(batch.offset, memory, entries, batch.end)

    def _finish(self, page: Page) -> Entries:
        """The batch at `end` is whole."""
        assert page.offset == self.end
        self._page_memory.append(page.page)
        self._batches.append(page.entries)
        self._chunks += len(page.entries)
        self.end = page.end
        return page.entries

    def _write_payloads(self, fields: Fields, offsets: list[int], payloads: list[memoryview]) -> Digests:
        """Writes what goes to rest of each payload; returns their digests."""
        guard = self._guard
        if isinstance(guard, Cipher):
            lengths = [payload.nbytes for payload in payloads]
            streams = list(map(guard.encrypt, map(bytes, fields), offsets, lengths))
            self._write(payloads, offsets[0], [stream.update for stream in streams])
            tags = b"".join([stream.tag() for stream in streams])
            return np.frombuffer(tags, np.uint64).reshape(-1, 2)
        self._write(payloads, offsets[0], [None] * len(payloads))
        return guard.digest_all(fields, offsets, payloads)

    def _write(self, payloads: Sequence[memoryview], offset: int, encrypt: Sequence[Encrypt | None]) -> None:
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
                taken = segment.round_up(part.nbytes)
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

    def seal(self) -> None:
        """Writes the footer, cuts the file to its end and gives the lock back. Raises OSError; closes all the same.

        A segment without chunks gives its space back, and is removed by the next repair.
        """
        try:
            if not seal(self.file, self.name, self._batches, self.end):
                self.file.truncate(PAGE_BYTES)
        finally:
            self.file.close()

    def check(self) -> None:
        """Asserts the invariants."""
        assert self.end % PAGE_BYTES == 0 and sum(map(len, self._batches)) == self._chunks
        room = segment.footer_room(self._chunks) if self._chunks else 0
        assert self.file.fd < 0 or self.end + room <= self.file.bytes, "no room for the footer"


class _Line:
    """Batches that are being written, several pieces at a time. Pieces are cut off when they are asked for; where a
    batch has all its digests, its header page goes before the next piece.

    `odd`: the batch that ended the line, because its payloads cannot go this way. `under_way`: header pages that were
    asked for and are not known to be written.
    """

    def __init__(self, active: ActiveSegment, first: Batch, stream: Stream) -> None:
        self._active = active
        self._stream = stream
        self._first = first
        self._batches: deque[Batch] = deque()
        self._digests: Digests = np.empty((0, 2), np.uint64)
        self._piece = Piece(0, [], [], [], [])
        self._size = 0  # of the piece, its holes too
        self._chunks, self._end = active._chunks, first.offset  # of all batches up to the last one
        self.odd: Batch | None = None
        self.under_way: deque[Page] = deque()

    def jobs(self) -> Iterator[Job | None]:
        """What is to be written. None while the stream has nothing more and something is being written: what is
        reported then may bring more.
        """
        batch: Batch | None = self._first
        while True:
            while batch is not None:
                self._batches.append(batch)
                self._chunks += len(batch.chunks)
                self._end = batch.end
                yield from self._cut(batch)
                batch = self._following()
            yield from self._written()
            if self.odd is not None or not (self._batches or self.under_way):
                return
            yield None
            yield from self._pages_to_write()  # whoever waits for their report may be who brings more
            batch = self._following()

    def _following(self) -> Batch | None:
        """The next batch of the stream, if it can be written this way."""
        batch = self._active._next(self._stream, self._end, self._chunks)
        if batch is not None and not self._active._goes_straight(batch):
            self.odd, batch = batch, None
        return batch

    def _cut(self, batch: Batch) -> Iterator[Job]:
        """Puts the batch into pieces of as many payloads as one system call takes, over the bounds of batches. Writes
        those that are full.
        """
        lengths, offset, at = batch.lengths, batch.offset + PAGE_BYTES, 0
        while at < len(lengths):
            hole = PAGE_BYTES if at == 0 and self._size else 0
            if self._size and self._size + hole + lengths[at] > CALL_BYTES_MAX:
                yield from self._written()
                hole = 0
            if not self._size:
                self._piece = Piece(offset, [], [], [], [])
            if hole:
                self._piece.buffers.append(_HOLE)
            first, length = at, lengths[at]
            at += 1
            while at < len(lengths) and self._size + hole + length + lengths[at] <= CALL_BYTES_MAX:
                length += lengths[at]
                at += 1
            self._piece.add(batch, first, at, offset)
            self._size += hole + length
            offset += length

    def _written(self) -> Iterator[Job]:
        """Writes the piece, if there is one, and the header pages that can be written."""
        if self._size:
            self._size = 0
            yield partial(self._active._write_piece, self._piece)
        yield from self._pages_to_write()

    def _pages_to_write(self) -> Iterator[Job]:
        """All of them at once: one by one they would stand in the way of payloads."""
        pages = list(self.pages())
        if pages:
            self.under_way += pages
            yield partial(self._active._write_pages, pages)

    def hashed(self, digests: Digests) -> None:
        """The digests of the next chunks, whose payloads are written."""
        self._digests = np.concatenate((self._digests, digests))

    def pages(self) -> Iterator[Page]:
        """The header pages of batches that have all their digests, each once."""
        while self._batches and len(self._digests) >= len(self._batches[0].chunks):
            batch = self._batches.popleft()
            digests, self._digests = np.split(self._digests, [len(batch.chunks)])
            yield self._active._page(batch, digests)
