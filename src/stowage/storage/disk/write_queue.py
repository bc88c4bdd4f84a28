"""Queued stores as one stream of chunks, so that many short transfers keep the disk as busy as a long one.

    queued transfers --> peek --> take (into a batch) --> written --> pop_finished

Used by one thread, the tier's writer. Does no I/O. Chunks are parallel columns: an object for each would cost more than
the work done with it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import accumulate, chain, islice, takewhile
from typing import Final

import numpy as np
from numpy.typing import NDArray

from stowage.storage.disk.packing import GROUP_BYTES, Packer, Packing
from stowage.storage.disk.write_jobs import PACKING
from stowage.storage.protocol import Transfer

GROUPS_AHEAD: Final = PACKING.in_flight
"""Groups of chunks that are being packed, or are packed and not yet taken, at most."""


@dataclass(slots=True)
class Chunks:
    """Chunks to be written, in their order. Parallel columns."""

    keys: list[bytes] = field(default_factory=list)
    masks: list[int] = field(default_factory=list)
    payloads: list[memoryview] = field(default_factory=list)
    packed: list[bool] = field(default_factory=list)

    def __len__(self) -> int:
        return len(self.keys)

    @property
    def lengths(self) -> list[int]:
        """Lengths of the payloads, in bytes."""
        return [payload.nbytes for payload in self.payloads]

    def part(self, first: int, after: int) -> Chunks:
        """The chunks ``[first, after)``."""
        some = slice(first, after)
        return Chunks(self.keys[some], self.masks[some], self.payloads[some], self.packed[some])

    def add(self, others: Chunks) -> None:
        """Appends other chunks."""
        self.keys += others.keys
        self.masks += others.masks
        self.payloads += others.payloads
        self.packed += others.packed


@dataclass(slots=True, eq=False)
class PendingStore:
    """A transfer, and those of its chunks that can be written, which are at `indices` in it. `taken`, `written`: how
    many of them were. The first `ready` are in their final form; those up to `begun` are being packed.
    """

    transfer: Transfer
    ok: NDArray[np.bool_]
    chunks: Chunks
    indices: list[int]
    taken: int = 0
    payloads_written: int = 0
    written: int = 0
    ready: int = 0
    begun: int = 0
    packing: deque[tuple[int, Packing]] = field(default_factory=deque)
    """Groups being packed, after `ready`, each with the index of its end."""
    buffers: deque[tuple[int, memoryview]] = field(default_factory=deque)
    """Buffers of packed payloads, each with the count of written payloads after which it is free."""


class WriteQueue:
    """The chunks of the transfers that `more` returns (None: there is none now), in order. `fits`: whether a payload of
    that length can be written at all. `packer` packs chunks ahead. `unfinished`: transfers not yet returned by
    `pop_finished`, oldest first. `refused`: chunks that will not be written.
    """

    def __init__(
        self, more: Callable[[], Transfer | None], fits: Callable[[int], bool], packer: Packer | None = None
    ) -> None:
        self._more = more
        self._fits = fits
        self._packer = packer
        self.unfinished: deque[PendingStore] = deque()
        self.refused = 0
        self._dry = False  # `more` returned None last time
        self._groups = 0  # groups being packed

    def peek(self, count: int) -> Chunks:
        """The next chunks, up to `count`, without taking them. Empty: nothing is queued, or nothing can be packed
        before some taken chunks are written.
        """
        found = Chunks()
        for writing in self.unfinished:
            if not self._add_ahead(writing, found, count):
                return found
        while len(found) < count:
            transfer = self._more()
            self._dry = transfer is None
            if transfer is None:
                break
            if not self._add_ahead(self._add(transfer), found, count):
                break
        return found

    def _add_ahead(self, writing: PendingStore, found: Chunks, count: int) -> bool:
        """Adds a transfer's next chunks to `found`, up to `count` in all. False: the rest of it is not ready now."""
        wanted = after = min(writing.taken + count - len(found), len(writing.indices))
        if self._packer is not None and wanted > writing.ready:
            if writing.packing or not self._packer.is_full:
                self._make_ready(writing, self._packer)
            after = min(wanted, writing.ready)
        found.add(writing.chunks.part(writing.taken, after))
        return after == wanted

    def _begin(self, writing: PendingStore, packer: Packer) -> Packing:
        """Starts to pack the next group of chunks."""
        payloads = writing.chunks.payloads
        sizes = accumulate(payload.nbytes for payload in islice(payloads, writing.begun, None))
        count = max(1, sum(1 for _ in takewhile(lambda size: size <= GROUP_BYTES, sizes)))
        some = slice(writing.begun, writing.begun + count)
        writing.begun += count
        packing = packer.begin(payloads[some])
        writing.packing.append((writing.begun, packing))
        self._groups += 1
        return packing

    def _make_ready(self, writing: PendingStore, packer: Packer) -> None:
        """Packs the next group of chunks, or waits until it is packed."""
        if not writing.packing:
            self._begin(writing, packer)
        after, packing = writing.packing.popleft()
        self._groups -= 1
        chunks, some = writing.chunks, slice(writing.ready, after)
        buffer, chunks.payloads[some], chunks.packed[some] = packer.finish(packing)
        if buffer is not None:
            writing.buffers.append((after, buffer))
        writing.ready = after

    def pack_ahead(self) -> list[Packing]:
        """Packing jobs for other threads. Each is returned once; this thread does those that no other has started."""
        begun: list[Packing] = []
        packer = self._packer
        if packer is None:
            return begun
        for writing in chain(self.unfinished, self._others()):
            while _bytes_left(writing) >= packer.worth_a_thread_bytes:
                if self._groups >= GROUPS_AHEAD or packer.is_full:
                    return begun
                begun.append(self._begin(writing, packer))
        return begun

    def give_up(self) -> None:
        """Frees the memory of unfinished transfers, after a failure. No thread may be packing or writing."""
        for writing in self.unfinished:
            lent = [*writing.buffers, *((after, packing.buffer) for after, packing in writing.packing)]
            for _, buffer in lent:
                assert self._packer is not None
                self._packer.give_back(buffer)

    def _others(self) -> Iterator[PendingStore]:
        """Transfers from `more`; each is unfinished from then on."""
        while (transfer := self._more()) is not None:
            yield self._add(transfer)
        self._dry = True

    def awaits(self, count: int) -> bool:
        """Whether nothing more is queued, and writing `count` more chunks would finish the oldest transfer."""
        oldest = self.unfinished[0]
        return self._dry and len(oldest.indices) - oldest.written <= count

    def keys(self) -> set[bytes]:
        """Keys of unfinished transfers."""
        return {key for writing in self.unfinished for key in writing.transfer.keys}

    def _add(self, transfer: Transfer) -> PendingStore:
        lengths = [buffer.nbytes for buffer in transfer.buffers]
        fitting = {length for length in set(lengths) if length and self._fits(length)}
        masks: list[int] = transfer.masks.tolist()
        indices = [
            at for at, (mask, length) in enumerate(zip(masks, lengths, strict=True)) if mask and length in fitting
        ]
        chunks = Chunks(transfer.keys, masks, list(transfer.buffers), [False] * len(masks))
        if len(indices) < len(lengths):
            self.refused += len(lengths) - len(indices)
            chunks = Chunks(
                [transfer.keys[at] for at in indices],
                [masks[at] for at in indices],
                [transfer.buffers[at] for at in indices],
                [False] * len(indices),
            )
        writing = PendingStore(transfer, np.zeros(len(lengths), np.bool_), chunks, indices)
        self.unfinished.append(writing)
        return writing

    def take(self, count: int) -> None:
        """The next `count` chunks are being written."""
        for writing in self.unfinished:
            some = min(count, len(writing.indices) - writing.taken)
            writing.taken += some
            count -= some
        assert count == 0, "more than there is"

    def payloads_written(self, count: int) -> None:
        """The payloads of the oldest `count` taken chunks are on disk and hashed. Reuses their packing buffers now;
        waiting for `written` would stall packing.
        """
        for writing in self.unfinished:
            some = min(count, writing.taken - writing.payloads_written)
            writing.payloads_written += some
            count -= some
            while self._packer is not None and writing.buffers and writing.buffers[0][0] <= writing.payloads_written:
                self._packer.give_back(writing.buffers.popleft()[1])
        assert count == 0, "more than were taken"

    def written(self, count: int) -> None:
        """The oldest `count` taken chunks are on disk, with their header page."""
        for writing in self.unfinished:
            some = min(count, writing.payloads_written - writing.written)
            writing.ok[writing.indices[writing.written : writing.written + some]] = True
            writing.written += some
            count -= some
        assert count == 0, "more than were written"

    def pop_finished(self) -> list[PendingStore]:
        """Removes and returns the transfers that are written completely, in order."""
        done = []
        while self.unfinished and self.unfinished[0].written == len(self.unfinished[0].indices):
            done.append(self.unfinished.popleft())
        return done


def _bytes_left(writing: PendingStore) -> int:
    """An estimate for the chunks that are not being packed: most of a transfer's have one length."""
    left = len(writing.indices) - writing.begun
    return left * writing.chunks.payloads[writing.begun].nbytes if left else 0
