"""Transfers on their way to the disk, as one stream of chunks: many short ones keep it as busy as a long one.

    transfers that wait --> ahead (looked at) --> taken (into a batch) --> written, and then settled

Used by one thread, the tier's writer. Knows nothing of files. Chunks are columns: an object for each would cost more
than what is done with it.
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

__all__ = ["Chunks", "PendingStore", "WriteQueue"]

GROUPS_AHEAD: Final = PACKING.in_flight
"""So many groups of chunks are being packed, or are packed and not taken."""


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
        """Of the payloads, in bytes."""
        return [payload.nbytes for payload in self.payloads]

    def part(self, first: int, after: int) -> Chunks:
        """Those from `first` on, before `after`."""
        some = slice(first, after)
        return Chunks(self.keys[some], self.masks[some], self.payloads[some], self.packed[some])

    def add(self, others: Chunks) -> None:
        """Others come after these."""
        self.keys += others.keys
        self.masks += others.masks
        self.payloads += others.payloads
        self.packed += others.packed


@dataclass(slots=True, eq=False)
class PendingStore:
    """A transfer, and those of its chunks that can be written: they stand at `indices` in it. So many of them were
    `taken`, and so many `written`, payloads before the rest. The first `ready` are in the form in which they are
    written; up to `begun` they are being packed.
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
    """Groups of chunks after `ready`: each up to so many chunks."""
    buffers: deque[tuple[int, memoryview]] = field(default_factory=deque)
    """What packed payloads are in: each until so many payloads are written."""


class WriteQueue:
    """Chunks of one transfer after the other, in the order of `more`, which gives the next one or says that none is
    there now. `fits`: whether a payload of that length can be written at all. `packer` packs what comes next.
    `unfinished`: transfers that did not come out of `settled` yet, oldest first. `refused`: chunks that will not be
    written.
    """

    def __init__(
        self, more: Callable[[], Transfer | None], fits: Callable[[int], bool], packer: Packer | None = None
    ) -> None:
        self._more = more
        self._fits = fits
        self._packer = packer
        self.unfinished: deque[PendingStore] = deque()
        self.refused = 0
        self._dry = False  # nothing waited when it was last asked for
        self._groups = 0  # that are begun and not ready

    def ahead(self, count: int) -> Chunks:
        """The chunks that come next, up to so many; they stay there. Empty: there is nothing to write, or not before
        some of what was taken is written.
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
        """The next ones of a transfer, until there are `count`. False: the rest of it is not ready now."""
        wanted = after = min(writing.taken + count - len(found), len(writing.indices))
        if self._packer is not None and wanted > writing.ready:
            if writing.packing or not self._packer.is_full:
                self._make_ready(writing, self._packer)
            after = min(wanted, writing.ready)
        found.add(writing.chunks.part(writing.taken, after))
        return after == wanted

    def _begin(self, writing: PendingStore, packer: Packer) -> Packing:
        """Some of the chunks that are not begun are to be packed."""
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
        """The next group of chunks is packed now, or waited for."""
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
        """What other threads may pack while this one goes on: each comes once, and is packed in any case."""
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
        """What is unfinished is not written, and nobody packs or writes now: memory goes back."""
        for writing in self.unfinished:
            lent = [*writing.buffers, *((after, packing.buffer) for after, packing in writing.packing)]
            for _, buffer in lent:
                assert self._packer is not None
                self._packer.give_back(buffer)

    def _others(self) -> Iterator[PendingStore]:
        """Transfers that wait; each is unfinished from then on."""
        while (transfer := self._more()) is not None:
            yield self._add(transfer)
        self._dry = True

    def awaits(self, count: int) -> bool:
        """Whether nothing more waits, and so many chunks that were written now would settle the oldest transfer."""
        oldest = self.unfinished[0]
        return self._dry and len(oldest.indices) - oldest.written <= count

    def keys(self) -> set[bytes]:
        """Of transfers that are not settled."""
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
        """The next so many chunks are being written."""
        for writing in self.unfinished:
            some = min(count, len(writing.indices) - writing.taken)
            writing.taken += some
            count -= some
        assert count == 0, "more than there is"

    def payloads_written(self, count: int) -> None:
        """Nobody needs the payloads of the oldest so many of those: they are on the disk, and hashed. What they were
        packed into is used again, sooner than they are `written`: packing would have to wait for it.
        """
        for writing in self.unfinished:
            some = min(count, writing.taken - writing.payloads_written)
            writing.payloads_written += some
            count -= some
            while self._packer is not None and writing.buffers and writing.buffers[0][0] <= writing.payloads_written:
                self._packer.give_back(writing.buffers.popleft()[1])
        assert count == 0, "more than were taken"

    def written(self, count: int) -> None:
        """The oldest so many of those can be found."""
        for writing in self.unfinished:
            some = min(count, writing.payloads_written - writing.written)
            writing.ok[writing.indices[writing.written : writing.written + some]] = True
            writing.written += some
            count -= some
        assert count == 0, "more than were written"

    def settled(self) -> list[PendingStore]:
        """Transfers of which nothing is left to be written, in their order. Each comes out once."""
        done = []
        while self.unfinished and self.unfinished[0].written == len(self.unfinished[0].indices):
            done.append(self.unfinished.popleft())
        return done


def _bytes_left(writing: PendingStore) -> int:
    """About, of the chunks that are not being packed: most of a transfer's are of one length."""
    left = len(writing.indices) - writing.begun
    return left * writing.chunks.payloads[writing.begun].nbytes if left else 0
