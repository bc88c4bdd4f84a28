"""A few buffers that are filled ahead, in the order in which a model's modules ask.

Owns the memory and who has it: a slot is being filled, full, or lent to the module that computes from it. A slot that
is lent is never written to. Asking in another order than expected costs time, never exactness.
"""

from __future__ import annotations

import contextlib
import mmap
import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from stowage.errors import ModelError
from stowage.weights.reader import Read, Readers, Stall, Ticket
from stowage.weights.turn import TWO_FORWARDS

__all__ = ["Ring", "Slot"]


@dataclass(slots=True)
class Slot:
    """A page-aligned buffer."""

    number: int
    memory: memoryview


@dataclass(slots=True)
class _Filling:
    index: int
    slot: Slot
    ticket: Ticket


class Ring:
    """``slots`` buffers of ``slot_bytes``. ``reads(unit, memory)`` says how a slot is filled with a unit's bytes.

    ``timeout_s``: the longest wait for a slot to be filled.
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
        assert units > 0 and slots > 1
        self._memory = mmap.mmap(-1, slots * slot_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        with contextlib.suppress(OSError):
            self._memory.madvise(mmap.MADV_HUGEPAGE)
        whole = memoryview(self._memory)
        self._all = tuple(Slot(n, whole[n * slot_bytes : (n + 1) * slot_bytes]) for n in range(slots))
        self._free = list(self._all)
        self._reads = reads
        self._readers = readers
        self._units = units
        self._order = list(range(units))
        self._next = 0
        self._filling: deque[_Filling] = deque()
        self._lent: dict[int, tuple[Slot, int]] = {}
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

    def follow(self, order: Sequence[int]) -> None:
        """Units will be asked for in this order, again and again; some may come more than once. One that it does not
        name ends it (`take`).
        """
        assert order and set(order) <= set(range(self._units))
        if self._order == list(order):
            return
        self._drop()
        self._order, self._next = list(order), 0

    def start(self) -> None:
        """Begin to fill what is free."""
        while self._free:
            slot = self._free.pop()
            index = self._next
            self._next = (index + 1) % len(self._order)
            try:
                reads = self._reads(self._order[index], slot.memory)
                ticket = self._readers.start(reads)
            except BaseException:
                self._free.append(slot)
                raise
            self.read_bytes += sum(read.into.nbytes for read in reads)
            self._filling.append(_Filling(index, slot, ticket))

    def take(self, unit: int) -> Slot:
        """The slot with the bytes of ``unit``, lent until `give_back`. Waits for them.

        Raises StorageError when they could not be read, ModelError when a unit is taken by two threads at once.
        """
        thread = threading.get_ident()
        if unit in self._lent or any(holder != thread for _, holder in self._lent.values()):
            raise ModelError(TWO_FORWARDS)
        self._seek(unit)
        filling = self._filling[0]
        self._stall.wait(filling.ticket)
        self._filling.popleft()
        if filling.ticket.error is not None:
            self._free.append(filling.slot)
            self._next = filling.index
        filling.ticket.raise_error()
        self._lent[unit] = (filling.slot, thread)
        return filling.slot

    def give_back(self, unit: int) -> None:
        """Nobody computes from the slot of ``unit`` any more: it is filled with what comes next. May be called
        twice.
        """
        lent = self._lent.pop(unit, None)
        if lent is not None:
            self._free.append(lent[0])
            self.start()

    def reset(self) -> None:
        """Begin anew, whatever a forward left behind that did not end. Nobody reads into a slot any more, and nobody
        computes from one.
        """
        self._lent.clear()
        self._filling.clear()
        self._free, self._next = list(self._all), 0

    def close(self) -> None:
        """The readers must have ended."""
        self._filling.clear()
        self._free.clear()
        self._all = ()

    def check(self) -> None:
        assert len(self._free) + len(self._filling) + len(self._lent) == len(self._all)
        numbers = [slot.number for slot in self._free] + [f.slot.number for f in self._filling]
        assert len({*numbers, *(slot.number for slot, _ in self._lent.values())}) == len(self._all)

    def _seek(self, unit: int) -> None:
        """Make ``unit`` the first that is being filled."""
        self.start()
        while self._filling and self._order[self._filling[0].index] != unit:
            self._stall.wait(self._filling[0].ticket)
            self._free.append(self._filling.popleft().slot)
        if not self._filling:
            if unit not in self._order:
                self._order, self._next = list(range(self._units)), 0
            ahead = (self._next + step for step in range(len(self._order)))
            self._next = next(at % len(self._order) for at in ahead if self._order[at % len(self._order)] == unit)
            self.start()

    def _drop(self) -> None:
        while self._filling:
            self._stall.wait(self._filling[0].ticket)
            self._free.append(self._filling.popleft().slot)
