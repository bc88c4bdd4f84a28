"""Device and host have separate memories: blocks are gathered on the device and copied in large pieces.

Owns the order of copies and the limit on their memory. A store gathers a plan's blocks into one piece of device memory,
in order with all computing, and copies that piece to the arena while computing continues: the blocks may be given to
other sequences at once. A load copies a piece of the arena to the device, before what is computed next, and scatters it
into blocks. Neighbouring slots are one copy, whatever the blocks' order.

    device blocks --gather--> piece --copy, beside the computing--> arena slots               store
    arena slots   --copy, before what is computed next--> piece --scatter--> device blocks    load

What a device does is behind ``DeviceCopies``, so that the order can be tested without one.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Final, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from stowage.core.copy_plan import CopyPlan
from stowage.core.geometry import SlabClass
from stowage.errors import TransferError
from stowage.transfer.protocol import CopyTicket

__all__ = ["PIECES_BYTES_MAX", "PIECE_BYTES", "DeviceCopies", "PlainCopies", "StagedTransfer"]

PIECE_BYTES: Final = 32 << 20
"""Of device memory that one piece takes, or one block if that is more: long enough for the full rate of a link."""
PIECES_BYTES_MAX: Final = 128 << 20
"""Of device memory that pieces on their way to the host take together; a store waits for the oldest beyond it."""
PiecePart = tuple[int, int, int]
"""``(byte in the piece, byte in the arena, bytes)``."""


class DeviceCopies(Protocol):
    """What a device does for a transfer. ``piece``: uint8, ``[bytes]``, on the device; ``host``: the arena's bytes."""

    def gather(self, storage: Tensor, rows: NDArray[np.int64]) -> Tensor:
        """The blocks ``rows`` as one piece, after everything that was to be computed so far."""
        ...

    def scatter(self, storage: Tensor, rows: NDArray[np.int64], piece: Tensor) -> None:
        """The reverse, before everything that is to be computed from now on."""
        ...

    def out(self, piece: Tensor, host: Tensor, parts: Sequence[PiecePart]) -> CopyTicket | None:
        """Copy ``parts`` of a gathered piece to the host; it is kept until they are there."""
        ...

    def bring(self, nbytes: int, host: Tensor, parts: Sequence[PiecePart]) -> tuple[Tensor, CopyTicket | None]:
        """A piece with ``parts`` of the host's memory, before everything that is to be computed from now on."""
        ...


class StagedTransfer:
    """Copies between a device pool and the host arena in pieces.

    Args:
        arena: all bytes of the arena, uint8.
        slabs: its slab classes; each group belongs to one.
        copies: what the device does.
        piece_bytes: instead of ``PIECE_BYTES``.
    """

    def __init__(
        self,
        arena: NDArray[np.uint8],
        slabs: Sequence[SlabClass],
        copies: DeviceCopies,
        *,
        piece_bytes: int = PIECE_BYTES,
    ) -> None:
        self._arena = torch.from_numpy(arena)
        self._slab_of = {group: slab for slab in slabs for group in slab.groups}
        self._copies = copies
        self._piece_bytes = piece_bytes
        self._leaving: deque[tuple[CopyTicket, int]] = deque()
        self._brought: CopyTicket | None = None

    def store(self, plan: CopyPlan, storage: Tensor) -> CopyTicket | None:
        """Device to host; see ``BlockTransfer``."""
        tickets: list[CopyTicket] = []
        try:
            for rows, parts in self._pieces(plan, storage.shape[1]):
                self._make_room(len(rows) * storage.shape[1])
                ticket = self._copies.out(self._copies.gather(storage, rows), self._arena, parts)
                if ticket is not None:
                    tickets.append(ticket)
                    self._leaving.append((ticket, len(rows) * storage.shape[1]))
        except (RuntimeError, TransferError) as error:  # torch's, for whatever went wrong on a device
            self._settle()
            raise TransferError(f"blocks could not be copied to the host: {error}") from error
        return _Together(tickets) if tickets else None

    def load(self, plan: CopyPlan, storage: Tensor) -> CopyTicket | None:
        """Host to device; see ``BlockTransfer``."""
        tickets: list[CopyTicket] = []
        try:
            for rows, parts in self._pieces(plan, storage.shape[1]):
                piece, ticket = self._copies.bring(len(rows) * storage.shape[1], self._arena, parts)
                if ticket is not None:
                    tickets.append(ticket)
                    self._brought = ticket
                self._copies.scatter(storage, rows, piece)
        except RuntimeError as error:
            self._settle()
            raise TransferError(f"blocks could not be copied to the device: {error}") from error
        return _Together(tickets) if tickets else None

    def close(self) -> None:
        """Wait for copies in flight, failed or not, and give the arena back."""
        self._settle()
        self._arena = torch.empty(0, dtype=torch.uint8)

    def _pieces(self, plan: CopyPlan, size: int) -> Iterator[tuple[NDArray[np.int64], list[PiecePart]]]:
        """Rows of the device's storage that fit into one piece, and where each run of them lies in the arena."""
        slab = self._slab_of[plan.group]
        offsets = slab.offset_bytes + (plan.slots - slab.first_slot) * slab.slot_bytes + plan.offsets * size
        each = max(1, self._piece_bytes // size)
        for begin in range(0, plan.copies, each):
            there = offsets[begin : begin + each]
            breaks = [0, *(np.flatnonzero(np.diff(there) != size) + 1).tolist(), len(there)]
            runs = pairwise(breaks)
            yield (
                plan.blocks[begin : begin + each],
                [(first * size, int(there[first]), (end - first) * size) for first, end in runs],
            )

    def _make_room(self, nbytes: int) -> None:
        while self._leaving and self._leaving[0][0].done:
            self._leaving.popleft()
        while self._leaving and sum(size for _, size in self._leaving) + nbytes > PIECES_BYTES_MAX:
            self._leaving.popleft()[0].wait()

    def _settle(self) -> None:
        """Nothing reads or writes the arena any more when this returns."""
        tickets = [ticket for ticket, _ in self._leaving] + ([self._brought] if self._brought is not None else [])
        self._leaving.clear()
        self._brought = None
        for ticket in tickets:
            try:
                ticket.wait()
            except TransferError:
                continue  # the ticket's owner gets the error


class _Together:
    """The tickets of one plan, at least one."""

    def __init__(self, tickets: Sequence[CopyTicket]) -> None:
        self._tickets = tickets

    @property
    def done(self) -> bool:
        return self._tickets[-1].done

    def wait(self) -> None:
        failed: TransferError | None = None
        for ticket in self._tickets:
            try:
                ticket.wait()
            except TransferError as error:
                failed = error  # the others go on writing until they are waited for, too
        if failed is not None:
            raise failed


class PlainCopies:
    """Any device of torch: every copy is made before the call returns."""

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def gather(self, storage: Tensor, rows: NDArray[np.int64]) -> Tensor:
        """See ``DeviceCopies``."""
        return storage.index_select(0, self._on_device(rows)).view(-1)

    def scatter(self, storage: Tensor, rows: NDArray[np.int64], piece: Tensor) -> None:
        """See ``DeviceCopies``."""
        storage.index_copy_(0, self._on_device(rows), piece.view(len(rows), -1))

    def out(self, piece: Tensor, host: Tensor, parts: Sequence[PiecePart]) -> CopyTicket | None:
        """See ``DeviceCopies``."""
        for begin, offset, nbytes in parts:
            host[offset : offset + nbytes].copy_(piece[begin : begin + nbytes])
        return None

    def bring(self, nbytes: int, host: Tensor, parts: Sequence[PiecePart]) -> tuple[Tensor, CopyTicket | None]:
        """See ``DeviceCopies``."""
        piece = torch.empty(nbytes, dtype=torch.uint8, device=self.device)
        for begin, offset, count in parts:
            piece[begin : begin + count].copy_(host[offset : offset + count])
        return piece, None

    def _on_device(self, rows: NDArray[np.int64]) -> Tensor:
        return torch.from_numpy(np.ascontiguousarray(rows)).to(self.device)
