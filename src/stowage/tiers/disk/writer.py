"""The segment that this process writes: batch after batch, payloads before their header page, a footer at the end."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import Final

from stowage.format import envelope, segment
from stowage.format.protection import Cipher, Guard
from stowage.format.segment import PAGE_BYTES, Entries, SegmentName
from stowage.tiers.disk.directory import SegmentFile
from stowage.tiers.disk.files import CALL_BYTES_MAX, in_pages, is_aligned
from stowage.tiers.disk.survey import seal

__all__ = ["ActiveSegment", "Chunk"]

Chunk = tuple[bytes, int, memoryview]
"""Key, mask, payload."""
Encrypt = Callable[[memoryview, memoryview], None]

STAGING_BYTES: Final = CALL_BYTES_MAX


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
        room = self.file.bytes - self.end - PAGE_BYTES
        limit = min(len(lengths), segment.BATCH_CHUNKS_MAX, segment.ENTRIES_MAX - self._chunks)
        for count in range(limit):
            room -= segment.round_up(lengths[count])
            if room < segment.footer_room(self._chunks + count + 1):
                return count
        return limit

    def append(self, chunks: Sequence[Chunk]) -> Entries:
        """Writes one batch that fits. Raises OSError; then nothing was added, and the segment must be abandoned."""
        payloads = [payload for _, _, payload in chunks]
        lengths = [payload.nbytes for payload in payloads]
        *offsets, _ = accumulate(map(segment.round_up, lengths), initial=self.end + PAGE_BYTES)
        fields = [
            envelope.pack_fields(key, self._namespace, mask, payload.nbytes, self._guard.method)
            for key, mask, payload in chunks
        ]
        digests = self._write_payloads(fields, offsets, payloads)
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
