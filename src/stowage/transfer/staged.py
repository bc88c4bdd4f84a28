"""Transfers for a device with memory of its own: blocks go through large staging buffers on the device.

Owns the order of copies and the limit on their memory. A store gathers a plan's blocks into staging buffers, in order
with all computing, and copies these to the arena while computing continues: the blocks may be given to other sequences
at once. A load copies arena slots to a staging buffer and scatters it into blocks, before what is computed next.
Neighbouring slots are one copy, whatever the blocks' order.

    device blocks --gather--> staging --copy, while computing continues--> arena slots          store
    arena slots   --copy, before what is computed next--> staging --scatter--> device blocks    load

The device is behind ``DeviceCopies``, so that the order can be tested without one.
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
from stowage.core.geometry import SlabClass, slab_of_groups
from stowage.errors import TransferError
from stowage.transfer.protocol import CopyTicket

STAGING_BYTES: Final = 32 << 20
"""Size of one staging buffer, or one block if that is more: long enough for the full rate of a link."""
IN_FLIGHT_BYTES_MAX: Final = 128 << 20
"""Device memory of all staging buffers that are being copied to the host; beyond it a store waits for the oldest."""
StagedRun = tuple[int, int, int]
"""``(offset in the staging buffer, offset in the arena, length)``, in bytes."""


class DeviceCopies(Protocol):
    """A device's copies. ``staging``: uint8, ``[bytes]``, on the device; ``host``: the arena, uint8, ``[bytes]``."""

    def gather(self, storage: Tensor, rows: NDArray[np.int64]) -> Tensor:
        """The blocks ``rows`` in a new staging buffer, in order with all computing."""

    def scatter(self, storage: Tensor, rows: NDArray[np.int64], staging: Tensor) -> None:
        """Copy a staging buffer into the blocks ``rows``, in order with all computing."""

    def to_host(self, staging: Tensor, host: Tensor, runs: Sequence[StagedRun]) -> CopyTicket | None:
        """Copy ``runs`` of a gathered staging buffer to the host; the buffer is kept until they have arrived."""

    def to_device(self, nbytes: int, host: Tensor, runs: Sequence[StagedRun]) -> tuple[Tensor, CopyTicket | None]:
        """Copy ``runs`` of the host's memory to a new staging buffer, before what is computed next."""


class StagedTransfer:
    """Copies between a device pool and the host ``arena`` (uint8) through staging buffers. ``slabs``: the arena's slab
    classes; each group belongs to one. ``copies``: the device's.
    """

    def __init__(self, arena: NDArray[np.uint8], slabs: Sequence[SlabClass], copies: DeviceCopies) -> None:
        self._arena = torch.from_numpy(arena)
        self._slab_of = slab_of_groups(slabs)
        self._copies = copies
        self._stores: deque[tuple[CopyTicket, int]] = deque()
        self._last_load: CopyTicket | None = None

    def store(self, plan: CopyPlan, storage: Tensor) -> CopyTicket | None:
        """Device to host; see ``BlockTransfer``."""
        tickets: list[CopyTicket] = []
        try:
            for rows, runs in self._batches(plan, storage.shape[1]):
                self._make_room(len(rows) * storage.shape[1])
                ticket = self._copies.to_host(self._copies.gather(storage, rows), self._arena, runs)
                if ticket is not None:
                    tickets.append(ticket)
                    self._stores.append((ticket, len(rows) * storage.shape[1]))
        except (RuntimeError, TransferError) as error:  # torch raises RuntimeError for any failure of a device
            self._wait_for_all()
            raise TransferError(f"blocks could not be copied to the host: {error}") from error
        return _PlanTicket(tickets) if tickets else None

    def load(self, plan: CopyPlan, storage: Tensor) -> CopyTicket | None:
        """Host to device; see ``BlockTransfer``."""
        tickets: list[CopyTicket] = []
        try:
            for rows, runs in self._batches(plan, storage.shape[1]):
                staging, ticket = self._copies.to_device(len(rows) * storage.shape[1], self._arena, runs)
                if ticket is not None:
                    tickets.append(ticket)
                    self._last_load = ticket
                self._copies.scatter(storage, rows, staging)
        except RuntimeError as error:
            self._wait_for_all()
            raise TransferError(f"blocks could not be copied to the device: {error}") from error
        return _PlanTicket(tickets) if tickets else None

    def close(self) -> None:
        """Wait for copies in flight, failed or not, and give the arena back."""
        self._wait_for_all()
        self._arena = torch.empty(0, dtype=torch.uint8)

    def _batches(self, plan: CopyPlan, size: int) -> Iterator[tuple[NDArray[np.int64], list[StagedRun]]]:
        """For each staging buffer: the rows of device storage that it holds, and their runs in the arena."""
        offsets = plan.addresses(self._slab_of[plan.group], size)
        each = max(1, STAGING_BYTES // size)
        for begin in range(0, plan.copies, each):
            there = offsets[begin : begin + each]
            breaks = [0, *(np.flatnonzero(np.diff(there) != size) + 1).tolist(), len(there)]
            runs = pairwise(breaks)
            yield (
                plan.blocks[begin : begin + each],
                [(first * size, int(there[first]), (end - first) * size) for first, end in runs],
            )

    def _make_room(self, nbytes: int) -> None:
        while self._stores and self._stores[0][0].done:
            self._stores.popleft()
        while self._stores and sum(size for _, size in self._stores) + nbytes > IN_FLIGHT_BYTES_MAX:
            self._stores.popleft()[0].wait()

    def _wait_for_all(self) -> None:
        """Nothing reads or writes the arena any more when this returns."""
        tickets = [ticket for ticket, _ in self._stores] + ([self._last_load] if self._last_load is not None else [])
        self._stores.clear()
        self._last_load = None
        for ticket in tickets:
            try:
                ticket.wait()
            except TransferError:
                continue  # the ticket's owner gets the error


class _PlanTicket:
    """All tickets of one plan as one; there is at least one."""

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
                failed = error  # the others may still be writing: wait for them too
        if failed is not None:
            raise failed


class SynchronousCopies:
    """``DeviceCopies`` of any torch device: every copy is complete when the call returns."""

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def gather(self, storage: Tensor, rows: NDArray[np.int64]) -> Tensor:
        return storage.index_select(0, self._on_device(rows)).view(-1)

    def scatter(self, storage: Tensor, rows: NDArray[np.int64], staging: Tensor) -> None:
        storage.index_copy_(0, self._on_device(rows), staging.view(len(rows), -1))

    def to_host(self, staging: Tensor, host: Tensor, runs: Sequence[StagedRun]) -> CopyTicket | None:
        for begin, offset, nbytes in runs:
            host[offset : offset + nbytes].copy_(staging[begin : begin + nbytes])
        return None

    def to_device(self, nbytes: int, host: Tensor, runs: Sequence[StagedRun]) -> tuple[Tensor, CopyTicket | None]:
        staging = torch.empty(nbytes, dtype=torch.uint8, device=self.device)
        for begin, offset, count in runs:
            staging[begin : begin + count].copy_(host[offset : offset + count])
        return staging, None

    def _on_device(self, rows: NDArray[np.int64]) -> Tensor:
        return torch.from_numpy(np.ascontiguousarray(rows)).to(self.device)
