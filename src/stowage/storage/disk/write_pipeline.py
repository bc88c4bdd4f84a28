r"""Writes batches to the disk, several pieces at a time, across the boundaries of batches and segments.

    stream --> batches --> pieces, written ------+--> header pages, written --> entries
               laid out \-> payloads, hashed ----'    of batches that have both

When a segment is full, the next one is created while its last pieces are being written, because creating one takes as
long as writing many megabytes. No header page is written to a segment before all batches of the previous one are whole.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator, Iterator
from contextlib import closing
from dataclasses import dataclass, field
from functools import partial
from itertools import accumulate
from typing import Final

import numpy as np

from stowage.core.geometry import PAGE_BYTES
from stowage.native.memory import pages
from stowage.storage.disk.packing import Packing
from stowage.storage.disk.packing_rates import Meter
from stowage.storage.disk.write_jobs import COMPUTING, PACKING, PAGE, REQUEST, Job, JobRunner
from stowage.storage.disk.write_queue import WriteQueue
from stowage.storage.disk.writer import ActiveSegment, Batch, Page
from stowage.storage.format import segment
from stowage.storage.format.batch import Digests, Fields
from stowage.storage.format.segment import Entries

_HOLE: Final = pages(PAGE_BYTES)
"""Placeholder for a batch's header page."""

Whole = tuple[ActiveSegment, Entries]
"""A batch that is completely written, and its segment."""

Report = Callable[[], list[Whole]]
"""Runs in the pipeline's thread after a job; returns the batches that are whole now."""

Jobs = Iterator[Job[Report] | None]

PIECE_BYTES: Final = 2 << 20
"""Bytes per write request."""
HASHED_BYTES: Final = 4 << 20
"""One call hashes payloads of this many bytes, or one longer payload."""


@dataclass(slots=True)
class _Piece:
    """What one system call writes at `offset`: payloads, parts of them, and header pages in between. `end`: its end."""

    offset: int
    end: int
    buffers: list[memoryview] = field(default_factory=list)

    def add(self, buffer: memoryview) -> None:
        """Appends a buffer."""
        self.buffers.append(buffer)
        self.end += buffer.nbytes


@dataclass(slots=True)
class _Payloads:
    """Payloads that one call hashes, with their envelope fields and offsets."""

    size: int = 0
    fields: list[Fields] = field(default_factory=list)
    offsets: list[int] = field(default_factory=list)
    payloads: list[memoryview] = field(default_factory=list)


class _Part:
    """The batches of one segment. `end` and `chunks`: of the segment, including these batches."""

    def __init__(self, active: ActiveSegment, writing: Meter) -> None:
        self.active = active
        self._writing = writing
        self.end = active.end
        self.chunks = active.chunks
        self._batches: deque[Batch] = deque()  # without a header page yet
        self._written = active.end  # payloads are written up to this offset
        self._digests: Digests = np.empty((0, 2), np.uint64)  # of the chunks of `_batches` that are hashed
        self._pages: deque[Page] = deque()  # made, but not known to be written

    @property
    def is_whole(self) -> bool:
        """Whether all batches are completely written."""
        return not (self._batches or self._pages)

    def add(self, batch: Batch) -> None:
        """Appends a batch."""
        self._batches.append(batch)
        self.end = batch.end
        self.chunks += len(batch.chunks)

    def write(self, piece: _Piece) -> Report:
        """In any thread."""
        nbytes = piece.end - piece.offset
        begun = self._writing.begin(nbytes)
        try:
            self.active.write(piece.buffers, piece.offset)
        finally:
            self._writing.end(begun, nbytes)
        return partial(self._wrote, piece.end)

    def _wrote(self, end: int) -> list[Whole]:
        self._written = end
        return []

    def digest(self, some: _Payloads) -> Report:
        """In any thread."""
        return partial(self._hashed, self.active.digest(np.concatenate(some.fields), some.offsets, some.payloads))

    def _hashed(self, digests: Digests) -> list[Whole]:
        self._digests = np.concatenate((self._digests, digests))
        return []

    def pages(self) -> list[Page]:
        """New header pages: of batches whose payloads are written and hashed."""
        made: list[Page] = []
        while self._batches and self._written >= self._batches[0].end:
            count = len(self._batches[0].chunks)
            if len(self._digests) < count:
                break
            digests, self._digests = self._digests[:count], self._digests[count:]
            made.append(self.active.page(self._batches.popleft(), digests))
        self._pages += made
        return made

    def write_page(self, page: Page) -> Report:
        """In any thread."""
        self.active.write([page.memory], page.offset)
        return self._finish

    def _finish(self) -> list[Whole]:
        return [(self.active, self.active.finish(self._pages.popleft()))]

    def write_left(self) -> Iterator[Whole]:
        """After a failure: writes (again) header pages that were made. Raises OSError; the pages before count."""
        while self._pages:
            yield from self.write_page(self._pages[0])()


def _packed(packing: Packing) -> Report:
    """In any thread."""
    packing.work()
    return list


class WritePipeline:
    """Writes the chunks of `stream` to the segment `active`, and when that is full to those that `another` returns for
    a payload length; if it returns None, the pipeline ends when everything taken is written. Full segments are sealed
    (`sealed` is called), the last one is not. Used by one thread.
    """

    def __init__(
        self,
        stream: WriteQueue,
        active: ActiveSegment,
        writing: Meter,
        another: Callable[[int], ActiveSegment | None],
        sealed: Callable[[ActiveSegment], None],
    ) -> None:
        self._stream = stream
        self._next_segment = another
        self._sealed = sealed
        self._writing = writing
        self._parts = deque([_Part(active, writing)])
        self._piece = _Piece(0, 0)
        self._payloads = _Payloads()
        self._odd: Batch | None = None  # a batch whose payloads cannot be written in pieces
        self._is_stuck = False

    def write(self, run_jobs: JobRunner) -> Generator[Whole, None, None]:
        """Yields each batch once it is whole, in order. Raises OSError: then nothing more is written, and the segments
        must be abandoned.

        Payloads of a later batch may be on disk early: no scan reaches them before all header pages up to its own are
        written.
        """
        while True:
            failure: OSError | None = None
            try:
                with closing(run_jobs(self._jobs())) as done:
                    for report in done:
                        yield from report()
            except OSError as error:
                failure = error  # maybe of a later batch: earlier ones are kept
            for part in self._parts:
                self._make_pages(part)
                yield from part.write_left()
            if failure is not None:
                raise failure
            *left, last = self._parts
            for part in left:
                self._seal(part.active)()
            odd, self._odd = self._odd, None
            if odd is None:
                return
            entries = last.active.append_batch(odd)
            self._stream.payloads_written(len(entries))
            yield last.active, entries
            self._parts = deque([_Part(last.active, self._writing)])

    def _jobs(self) -> Jobs:
        """The jobs to run. None while the stream is empty and something is being written: reporting it may add more.

        The first batch is written before more is packed, since packing uses all cores. After that packing jobs come
        first, whenever there may be memory for them; otherwise this thread would have to pack.
        """
        batch = self._next()
        if batch is not None:
            yield from self._cut(batch)
        while True:
            yield from self._pack()
            while (batch := self._next()) is not None:
                yield from self._pack()
                yield from self._cut(batch)
                yield from self._pack()
            yield from self._hash()
            yield from self._write()
            if self._has_next():
                continue
            if self._odd is not None or self._parts[0].is_whole:
                return
            yield None
            yield from self._pages()  # the caller waiting for their report may submit more

    def _pack(self) -> Jobs:
        """Packing jobs for the next chunks."""
        for packing in self._stream.pack_ahead():
            yield Job(PACKING, partial(_packed, packing))

    def _next(self) -> Batch | None:
        """Takes the next batch of the stream, if it fits into the segment and can be written in pieces."""
        part = self._parts[-1]
        ahead = self._stream.peek(segment.BATCH_CHUNKS_MAX)
        count = part.active.fitting_at(part.end, part.chunks, ahead.lengths)
        if not count or self._odd is not None:
            return None
        self._stream.take(count)
        batch = part.active.batch(ahead.part(0, count), part.end)
        if not part.active.goes_straight(batch):
            self._odd = batch
            return None
        part.add(batch)
        return batch

    def _has_next(self) -> bool:
        """Whether there is more, and a segment for it. At most two are open: the one before must be whole first."""
        if self._is_stuck or self._odd is not None or len(self._parts) > 1:
            return False
        ahead = self._stream.peek(1)
        if not ahead:
            return False
        active = self._next_segment(ahead.payloads[0].nbytes)
        if active is None:
            self._is_stuck = True
            return False
        self._parts.append(_Part(active, self._writing))
        return True

    def _cut(self, batch: Batch) -> Jobs:
        """Jobs that hash the batch and write it in pieces, across batch boundaries. Only full pieces are written."""
        yield from self._gather(batch)
        offset = batch.offset + PAGE_BYTES
        if self._piece.buffers and self._piece.end + PAGE_BYTES < self._piece.offset + PIECE_BYTES:
            self._piece.add(_HOLE)
        else:
            yield from self._write()
            self._piece = _Piece(offset, offset)
        for payload in batch.chunks.payloads:
            rest = payload
            while (room := self._piece.offset + PIECE_BYTES - self._piece.end) < rest.nbytes:
                if room:
                    self._piece.add(rest[:room])
                    rest = rest[room:]
                end = self._piece.end
                yield from self._write()
                self._piece = _Piece(end, end)
            self._piece.add(rest)

    def _gather(self, batch: Batch) -> Jobs:
        """Jobs that hash payloads in groups, across batch boundaries."""
        some, first, offset = self._payloads, 0, batch.offset + PAGE_BYTES
        offsets = list(accumulate(batch.lengths[:-1], initial=offset))
        for at, length in enumerate(batch.lengths):
            some.size += length
            if some.size >= HASHED_BYTES or at + 1 == len(offsets):
                some.fields.append(batch.fields[first : at + 1])
                some.offsets += offsets[first : at + 1]
                some.payloads += batch.chunks.payloads[first : at + 1]
                first = at + 1
            if some.size >= HASHED_BYTES:
                yield from self._hash()
                some = self._payloads

    def _hash(self) -> Jobs:
        some, self._payloads = self._payloads, _Payloads()
        if some.size:
            yield Job(COMPUTING, partial(self._parts[-1].digest, some))

    def _write(self) -> Jobs:
        """Jobs that write the current piece, if there is one, and header pages that are ready."""
        piece, self._piece = self._piece, _Piece(0, 0)
        if piece.buffers:
            yield Job(REQUEST, partial(self._parts[-1].write, piece))
        yield from self._pages()

    def _pages(self) -> Jobs:
        """Jobs that write header pages of the oldest segment that is not whole, and footers of those before it."""
        while len(self._parts) > 1 and self._parts[0].is_whole:
            yield Job(PAGE, partial(self._seal, self._parts.popleft().active))
        part = self._parts[0]
        for page in self._make_pages(part):
            yield Job(PAGE, partial(part.write_page, page))

    def _make_pages(self, part: _Part) -> list[Page]:
        """The new header pages. Their payloads' memory may be reused from now on."""
        made = part.pages()
        self._stream.payloads_written(sum(len(page.entries) for page in made))
        return made

    def _seal(self, active: ActiveSegment) -> Report:
        """In any thread."""
        active.seal()
        return partial(self._left, active)

    def _left(self, active: ActiveSegment) -> list[Whole]:
        self._sealed(active)
        return []
