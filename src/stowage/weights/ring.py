"""The prefetcher's buffers in host memory, filled by reads from disk or from other host memory."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from stowage.native.memory import anonymous, in_huge_pages
from stowage.weights.prefetcher import Prefetcher
from stowage.weights.reader import Read, Readers, Stall, Ticket


@dataclass(slots=True)
class Slot:
    """A page-aligned buffer."""

    number: int
    memory: memoryview


class Ring(Prefetcher[Ticket, Slot]):
    """A ring of buffers that are filled ahead: ``slots`` buffers of ``slot_bytes``. ``reads(unit, memory)`` says how a
    slot is filled with a unit's bytes.

    ``timeout_s``: the longest wait for a slot to be filled. One that may still be written to is given to nobody.
    """

    def __init__(
        self,
        units: int,
        slots: int,
        slot_bytes: int,
        reads: Callable[[int, memoryview], Sequence[Read]],
        readers: Readers,
        timeout_s: float,
    ) -> None:
        super().__init__(units, slots)
        self._memory = anonymous(slots * slot_bytes)
        in_huge_pages(self._memory)
        whole = memoryview(self._memory)
        self._slots = tuple(Slot(n, whole[n * slot_bytes : (n + 1) * slot_bytes]) for n in range(slots))
        self._reads = reads
        self._readers = readers
        self._stall = Stall(timeout_s)
        self.read_bytes = 0

    @property
    def nbytes(self) -> int:
        """Bytes of memory."""
        return len(self._memory)

    def numpy(self) -> NDArray[np.uint8]:
        """All of it."""
        return np.frombuffer(self._memory, np.uint8)

    @property
    def stall_s(self) -> float:
        """Time that was waited for slots to be filled."""
        return self._stall.seconds

    def close(self) -> None:
        """The readers must have ended."""
        self._begun.clear()
        self._free.clear()
        self._slots = ()

    def _fill(self, unit: int, buffer: int) -> Ticket:
        reads = self._reads(unit, self._slots[buffer].memory)
        ticket = self._readers.start(reads)
        self.read_bytes += sum(read.into.nbytes for read in reads)
        return ticket

    def _arrive(self, filling: Ticket, _buffer: int) -> None:
        self._stall.wait(filling)

    def _raise_error(self, filling: Ticket) -> None:
        filling.raise_error()

    def _show(self, _unit: int, buffer: int) -> Slot:
        return self._slots[buffer]
