r"""Batches on their way to the disk, several pieces at a time, over the bounds of batches and of segments.

    stream --> batches --> pieces, written ------+--> header pages, written --> entries
               laid out \-> payloads, hashed ----'    of batches that have both

A segment that is full is followed by another one while its last pieces are being written: making one takes as long as
the disk needs for many megabytes. Until all batches of a segment are whole, no header page goes into the next one.
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

from stowage.storage.disk.files import pages
from stowage.storage.disk.packing import Packing
from stowage.storage.disk.packing_rates import Meter
from stowage.storage.disk.write_jobs import COMPUTING, PACKING, PAGE, REQUEST, Job, JobRunner
from stowage.storage.disk.write_queue import WriteQueue
from stowage.storage.disk.writer import ActiveSegment, Batch, Page
from stowage.storage.format import segment
from stowage.storage.format.batch import Digests, Fields
from stowage.storage.format.segment import PAGE_BYTES, Entries

__all__ = ["WritePipeline"]

_HOLE: Final = pages(PAGE_BYTES)
"""What lies where the header page of a batch will be."""

Whole = tuple[ActiveSegment, Entries]
"""A batch that can be found, and its segment."""

Report = Callable[[], list[Whole]]
"""What is left to be done for a job when it has been done, in the line's thread. Says which batches are whole."""

Jobs = Iterator[Job[Report] | None]

PIECE_BYTES: Final = 2 << 20
"""Of one request."""
HASHED_BYTES: Final = 4 << 20
"""Payloads of so many bytes, or a longer one, are hashed by one call."""


@dataclass(slots=True)
class _Piece:
    """What one system call writes from `offset` on: payloads, parts of them, and the header pages between
    them. `end`: where it ends.
    """

    offset: int
    end: int
    buffers: list[memoryview] = field(default_factory=list)

    def add(self, buffer: memoryview) -> None:
        """It comes next."""
        self.buffers.append(buffer)
        self.end += buffer.nbytes


@dataclass(slots=True)
class _Payloads:
    """Payloads that are hashed by one call, with their envelopes' fields, and where each of them lies."""

    size: int = 0
    fields: list[Fields] = field(default_factory=list)
    offsets: list[int] = field(default_factory=list)
    payloads: list[memoryview] = field(default_factory=list)


class _Part:
    """The batches that go into one segment. `end` and `chunks`: of the segment, with all of them."""

    def __init__(self, active: ActiveSegment, writing: Meter) -> None:
        self.active = active
        self._writing = writing
        self.end = active.end
        self.chunks = active.chunks
        self._batches: deque[Batch] = deque()  # whose header page was not made
        self._written = active.end  # payloads are, up to there
        self._digests: Digests = np.empty((0, 2), np.uint64)  # of the chunks of those batches, as far as they are known
        self._pages: deque[Page] = deque()  # that are not known to be written

    @property
    def is_whole(self) -> bool:
        """Whether nothing is left to be done."""
        return not (self._batches or self._pages)

    def add(self, batch: Batch) -> None:
        """Another batch."""
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
        """The header pages of batches that are written and have all their digests, each once."""
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
        """Writes header pages that were made; where the disk fails, those before count. Pages that were being written
        when something else failed are written again. Raises OSError.
        """
        while self._pages:
            yield from self.write_page(self._pages[0])()


def _packed(packing: Packing) -> Report:
    """In any thread."""
    packing.work()
    return list


class WritePipeline:
    """Takes what `stream` has into `active`, and into those that `another` gives for a payload of some length when that
    is full. Where it gives none, the line ends when all that it took is written. Those that are full are sealed, which
    is told to `sealed`; the last one is not. Used by one thread.
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
        self._another = another
        self._sealed = sealed
        self._writing = writing
        self._parts = deque([_Part(active, writing)])
        self._piece = _Piece(0, 0)
        self._payloads = _Payloads()
        self._odd: Batch | None = None  # it ended the pieces, because its payloads cannot go this way
        self._is_stuck = False

    def write(self, run_jobs: JobRunner) -> Generator[Whole, None, None]:
        """Yields each batch once it is whole, in their order. Raises OSError: then nothing more is added, and the
        segments must be abandoned.

        What a later batch has on the disk before its turn lies where nobody looks until all header pages up to its own
        are there.
        """
        while True:
            failure: OSError | None = None
            try:
                with closing(run_jobs(self._jobs())) as done:
                    for report in done:
                        yield from report()
            except OSError as error:
                failure = error  # it was a later batch's, maybe: those before it are kept
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
        """What is to be written. None while the stream has nothing more and something is being written: what is
        reported then may bring more.

        The first batch is written before more is packed, which takes all cores. From then on packing comes first, and
        whenever there may be memory for it again: this thread would have to pack what no other one has begun.
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
            if self._goes_on():
                continue
            if self._odd is not None or self._parts[0].is_whole:
                return
            yield None
            yield from self._pages()  # whoever waits for their report may be who brings more

    def _pack(self) -> Jobs:
        """Packs ahead."""
        for packing in self._stream.pack_ahead():
            yield Job(PACKING, partial(_packed, packing))

    def _next(self) -> Batch | None:
        """Takes the next batch of the stream, if it fits and can be written this way."""
        part = self._parts[-1]
        ahead = self._stream.ahead(segment.BATCH_CHUNKS_MAX)
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

    def _goes_on(self) -> bool:
        """Whether there is more, and another segment to take it. One after the other: when this one is full, too, those
        before it have to be whole.
        """
        if self._is_stuck or self._odd is not None or len(self._parts) > 1:
            return False
        ahead = self._stream.ahead(1)
        if not ahead:
            return False
        active = self._another(ahead.payloads[0].nbytes)
        if active is None:
            self._is_stuck = True
            return False
        self._parts.append(_Part(active, self._writing))
        return True

    def _cut(self, batch: Batch) -> Jobs:
        """Hashes the batch, and cuts it into pieces, over the bounds of batches. Writes those that are full."""
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
        """Hashes payloads in groups, over the bounds of batches."""
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
        """Writes the piece, if there is one, and the pages that can be written."""
        piece, self._piece = self._piece, _Piece(0, 0)
        if piece.buffers:
            yield Job(REQUEST, partial(self._parts[-1].write, piece))
        yield from self._pages()

    def _pages(self) -> Jobs:
        """Writes header pages of the oldest segment that is not whole, and footers of those before it."""
        while len(self._parts) > 1 and self._parts[0].is_whole:
            yield Job(PAGE, partial(self._seal, self._parts.popleft().active))
        part = self._parts[0]
        for page in self._make_pages(part):
            yield Job(PAGE, partial(part.write_page, page))

    def _make_pages(self, part: _Part) -> list[Page]:
        """What they stand for may be overwritten in memory."""
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
