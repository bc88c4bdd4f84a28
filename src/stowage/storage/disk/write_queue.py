"""Transfers on their way to the disk, as one stream of chunks: many short ones keep it as busy as a long one.

    transfers that wait --> ahead (looked at) --> taken (into a batch) --> written, and then settled

Used by one thread, the tier's writer. Knows nothing of files. Chunks are columns: an object for each would cost more
than what is done with it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import accumulate

import numpy as np
from numpy.typing import NDArray

from stowage.storage.disk.packing import BUFFER_BYTES, Packer
from stowage.storage.protocol import Transfer

__all__ = ["Chunks", "PendingStore", "WriteQueue"]


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
    `taken`, and so many `written`. The first `ready` are in the form in which they are written.
    """

    transfer: Transfer
    ok: NDArray[np.bool_]
    chunks: Chunks
    indices: list[int]
    taken: int = 0
    written: int = 0
    ready: int = 0
    buffers: deque[tuple[int, memoryview]] = field(default_factory=deque)
    """What packed payloads lie in: each until so many chunks are written."""


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

    def ahead(self, count: int) -> Chunks:
        """The chunks that come next, up to so many; they stay there. Empty: there is nothing to write."""
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
            self._make_ready(writing, wanted, self._packer)
            after = min(wanted, writing.ready)
        found.add(writing.chunks.part(writing.taken, after))
        return after == wanted

    def _make_ready(self, writing: PendingStore, after: int, packer: Packer) -> None:
        """Packs the chunks before `after` that are not ready; only some of them where they are long."""
        chunks = writing.chunks
        sizes = accumulate(payload.nbytes for payload in chunks.payloads[writing.ready : after])
        after = writing.ready + max(1, sum(size <= BUFFER_BYTES for size in sizes))
        some = slice(writing.ready, after)
        buffer, chunks.payloads[some], chunks.packed[some] = packer.pack(chunks.payloads[some])
        if buffer is not None:
            writing.buffers.append((after, buffer))
        writing.ready = after

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

    def written(self, count: int) -> None:
        """The oldest so many of those are there."""
        for writing in self.unfinished:
            some = min(count, writing.taken - writing.written)
            writing.ok[writing.indices[writing.written : writing.written + some]] = True
            writing.written += some
            count -= some
            while self._packer is not None and writing.buffers and writing.buffers[0][0] <= writing.written:
                self._packer.give_back(writing.buffers.popleft()[1])
        assert count == 0, "more than were taken"

    def settled(self) -> list[PendingStore]:
        """Transfers of which nothing is left to be written, in their order. Each comes out once."""
        done = []
        while self.unfinished and self.unfinished[0].written == len(self.unfinished[0].indices):
            done.append(self.unfinished.popleft())
        return done
