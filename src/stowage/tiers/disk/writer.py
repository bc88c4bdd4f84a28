"""The segment that this process writes: batch after batch, payloads before their header page, a footer at the end."""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from contextlib import closing
from dataclasses import dataclass
from itertools import accumulate, islice
from typing import Final

from stowage.format import envelope, segment
from stowage.format.protection import Cipher, Guard
from stowage.format.segment import PAGE_BYTES, Entries, SegmentName
from stowage.tiers.disk.directory import SegmentFile
from stowage.tiers.disk.files import CALL_BYTES_MAX, in_pages, is_aligned
from stowage.tiers.disk.survey import seal
from stowage.tiers.disk.system import Together

__all__ = ["ActiveSegment", "Chunk"]

Chunk = tuple[bytes, int, memoryview]
"""Key, mask, payload."""
Encrypt = Callable[[memoryview, memoryview], None]

STAGING_BYTES: Final = CALL_BYTES_MAX


@dataclass(slots=True)
class Piece:
    """Payloads that lie one after the other from `offset` on, and their envelopes' fields."""

    offset: int
    fields: list[bytes]
    payloads: list[memoryview]


def _goes_straight(payload: memoryview) -> bool:
    """Whether direct I/O can take it from where it is."""
    return payload.nbytes % PAGE_BYTES == 0 and is_aligned(payload)


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

    def fitting(self, lengths: Sequence[int]) -> int:
        """How many of these payloads fit as one batch, in this order."""
        return self._fitting(lengths, self.end, self._chunks)

    def _fitting(self, lengths: Sequence[int], end: int, chunks: int) -> int:
        room = self.file.bytes - end - PAGE_BYTES
        limit = min(len(lengths), segment.BATCH_CHUNKS_MAX, segment.ENTRIES_MAX - chunks)
        for count in range(limit):
            room -= segment.round_up(lengths[count])
            if room < segment.footer_room(chunks + count + 1):
                return count
        return limit

    def append(self, chunks: Sequence[Chunk]) -> Entries:
        """Writes one batch that fits. Raises OSError; then nothing was added, and the segment must be abandoned."""
        payloads = [payload for _, _, payload in chunks]
        lengths = [payload.nbytes for payload in payloads]
        *offsets, _ = accumulate(map(segment.round_up, lengths), initial=self.end + PAGE_BYTES)
        fields = self._fields(chunks)
        return self._finish(chunks, fields, self._write_payloads(fields, offsets, payloads))

    def append_all(self, chunks: Sequence[Chunk], together: Together) -> Generator[Entries, None, None]:
        """Writes as many of the chunks as fit, in batches; yields each once it is whole. Errors as of `append`.

        Payloads that can go straight to the disk are written and hashed several at a time, those of later batches too.
        What a later batch has on the disk before its turn lies where nobody looks until its header page is there.
        """
        batches = self._cut(chunks)
        payloads = [payload for _, _, payload in chunks]
        if isinstance(self._guard, Cipher) or not all(map(_goes_straight, payloads)):
            for batch in batches:
                yield self.append(batch)
            return
        end = self.end
        pieces: list[Piece] = []
        counts = []
        for batch in batches:
            cut = self._pieces(batch, end + PAGE_BYTES)
            end += segment.batch_bytes([payload.nbytes for _, _, payload in batch])
            pieces += cut
            counts.append(len(cut))
        with closing(together(self._write_piece, pieces)) as written:
            for batch, count in zip(batches, counts, strict=True):
                done = list(islice(written, count))
                fields = [field for piece, _ in done for field in piece.fields]
                yield self._finish(batch, fields, [digest for _, digests in done for digest in digests])

    def _cut(self, chunks: Sequence[Chunk]) -> list[Sequence[Chunk]]:
        """The chunks that fit, from the first one on, cut into batches."""
        lengths = [payload.nbytes for _, _, payload in chunks]
        batches: list[Sequence[Chunk]] = []
        end, at = self.end, 0
        while at < len(chunks) and (
            count := self._fitting(lengths[at : at + segment.BATCH_CHUNKS_MAX], end, self._chunks + at)
        ):
            batches.append(chunks[at : at + count])
            end += segment.batch_bytes(lengths[at : at + count])
            at += count
        return batches

    def _pieces(self, batch: Sequence[Chunk], offset: int) -> list[Piece]:
        """Neighbouring chunks of a batch whose payloads begin at `offset`, as many as one system call takes."""
        pieces: list[Piece] = []
        size = CALL_BYTES_MAX
        for (_, _, payload), field in zip(batch, self._fields(batch), strict=True):
            if size + payload.nbytes > CALL_BYTES_MAX:
                pieces.append(Piece(offset, [], []))
                size = 0
            pieces[-1].fields.append(field)
            pieces[-1].payloads.append(payload)
            size += payload.nbytes
            offset += payload.nbytes
        return pieces

    def _write_piece(self, piece: Piece) -> tuple[Piece, list[bytes]]:
        """In any thread. With the digests."""
        assert not isinstance(self._guard, Cipher), "a cipher goes forward only"
        self.file.write(list(piece.payloads), piece.offset)
        offsets = accumulate((payload.nbytes for payload in piece.payloads), initial=piece.offset)
        return piece, list(map(self._guard.digest, piece.fields, offsets, piece.payloads))

    def _fields(self, chunks: Sequence[Chunk]) -> list[bytes]:
        return [
            envelope.pack_fields(key, self._namespace, mask, payload.nbytes, self._guard.method)
            for key, mask, payload in chunks
        ]

    def _finish(self, chunks: Sequence[Chunk], fields: Sequence[bytes], digests: Sequence[bytes]) -> Entries:
        """Writes the header page of the batch at `end`, whose payloads are written."""
        lengths = [payload.nbytes for _, _, payload in chunks]
        headers = [field + digest for field, digest in zip(fields, digests, strict=True)]
        page = segment.pack_batch_page(self.name.id, self.end, headers, lengths)
        entries, end = segment.parse_batch_page(page, self.name.id, self.end, self.file.bytes)
        self.file.write([in_pages(page)], self.end)
        self._batches.append(entries)
        self._chunks += len(chunks)
        self.end = end
        return entries

    def _write_payloads(
        self, fields: Sequence[bytes], offsets: Sequence[int], payloads: Sequence[memoryview]
    ) -> list[bytes]:
        """Writes what goes to rest of each payload; returns their digests."""
        guard = self._guard
        if isinstance(guard, Cipher):
            lengths = [payload.nbytes for payload in payloads]
            streams = list(map(guard.encrypt, fields, offsets, lengths))
            self._write(payloads, offsets[0], [stream.update for stream in streams])
            return [stream.tag() for stream in streams]
        self._write(payloads, offsets[0], [None] * len(payloads))
        return list(map(guard.digest, fields, offsets, payloads))

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
