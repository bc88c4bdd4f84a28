"""The prefetcher of weights: a few buffers that are filled ahead, in the order in which a model's modules run.

Owns the state of each buffer: free, being filled with a unit, or lent to the module that computes from it. A lent
buffer is never written to. Modules that run in another order than expected cost time, never exactness. Subclasses own
the memory and fill it: reads from disk into host memory (``ring``), copies to a device (``device_prefetcher``).

    free --fill--> being filled with a unit --take--> lent to its module --give back--> free
"""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from stowage.errors import ModelError, TransferError
from stowage.weights.forward_lock import TWO_FORWARDS

_Filling = TypeVar("_Filling")
_Lent = TypeVar("_Lent")


@dataclass(slots=True)
class _Begun:
    """A buffer that is being filled with the unit at ``index`` of the order."""

    index: int
    buffer: int
    filling: Any


class Prefetcher(ABC, Generic[_Filling, _Lent]):
    """Fills ``buffers``, by number, for ``units``, by number."""

    def __init__(self, units: int, buffers: int) -> None:
        assert units > 0 and buffers > 1
        self._units, self._count = units, buffers
        self._order, self._next = list(range(units)), 0
        self._free = deque(range(buffers))
        self._begun: deque[_Begun] = deque()
        self._lent: dict[int, tuple[int, int]] = {}

    # For subclasses: where the buffers are, and what fills them

    @abstractmethod
    def _fill(self, unit: int, buffer: int) -> _Filling:
        """Begin to fill ``buffer`` with ``unit``. Raises TransferError where a retry may succeed."""

    @abstractmethod
    def _arrive(self, filling: _Filling, buffer: int) -> None:
        """Wait until ``buffer`` may be computed from, or, after an error, is not written to any more."""

    @abstractmethod
    def _raise_error(self, filling: _Filling) -> None:
        """Raise the error with which filling ended, if any."""

    @abstractmethod
    def _show(self, unit: int, buffer: int) -> _Lent:
        """What a module that computes from ``buffer``, which holds ``unit``, gets."""

    def _ahead(self, _unit: int) -> bool:
        """Whether filling may begin before the unit is asked for."""
        return True

    def _abandon(self, filling: _Filling, buffer: int) -> None:
        """Wait until ``buffer`` may be filled with something else."""
        self._arrive(filling, buffer)

    def _computed(self, buffer: int) -> None:
        """All computations from ``buffer`` have been started."""

    # For callers

    def follow(self, order: Sequence[int]) -> None:
        """Expect units in this order, again and again. A unit may occur more than once. `take` of a unit that is not in
        the order returns to the order of numbers.
        """
        assert order and set(order) <= set(range(self._units))
        if self._order != list(order):
            self._drop()
            self._order, self._next = list(order), 0

    def start(self) -> None:
        """Begin to fill the free buffers. What fails is tried again by `take`."""
        while self._free and self._ahead(self._order[self._next]):
            try:
                self._begin()
            except TransferError:
                return

    def take(self, unit: int) -> _Lent:
        """The buffer with ``unit``, lent until `give_back`.

        Raises StorageError or TransferError when it could not be filled, ModelError when two threads take units at
        once.
        """
        thread = threading.get_ident()
        if unit in self._lent or any(holder != thread for _, holder in self._lent.values()):
            raise ModelError(TWO_FORWARDS)
        self._seek(unit)
        self.start()
        begun = self._begun[0]
        self._arrive(begun.filling, begun.buffer)
        self._begun.popleft()
        try:
            self._raise_error(begun.filling)
        except BaseException:
            self._free.append(begun.buffer)
            self._next = begun.index
            raise
        self._lent[unit] = begun.buffer, thread
        return self._show(unit, begun.buffer)

    def give_back(self, unit: int) -> None:
        """End the loan of ``unit``'s buffer, and fill it with what comes next. All computations from it have been
        started. May be called twice.
        """
        lent = self._lent.pop(unit, None)
        if lent is not None:
            self._computed(lent[0])
            self._free.append(lent[0])
            self.start()

    def reset(self) -> None:
        """Forget what a failed forward left behind. Call it when nothing writes into a buffer or computes from one."""
        self._lent.clear()
        self._begun.clear()
        self._free, self._next = deque(range(self._count)), 0

    def check(self) -> None:
        """Every buffer is in one state."""
        lent = [buffer for buffer, _ in self._lent.values()]
        assert sorted([*self._free, *(begun.buffer for begun in self._begun), *lent]) == list(range(self._count))

    def _seek(self, unit: int) -> None:
        """Give up what was begun before ``unit``, so that it is the first being filled."""
        while self._begun and self._order[self._begun[0].index] != unit:
            self._give_up(0)
        if self._begun:
            return
        if unit not in self._order:
            self._order, self._next = list(range(self._units)), 0
        ahead = ((self._next + step) % len(self._order) for step in range(len(self._order)))
        self._next = next(at for at in ahead if self._order[at] == unit)
        self._begin()

    def _begin(self) -> None:
        """Begin to fill a free buffer with what comes next."""
        assert self._free, "more units compute at once than there are buffers"
        index, buffer = self._next, self._free.popleft()
        self._next = (index + 1) % len(self._order)
        try:
            filling = self._fill(self._order[index], buffer)
        except BaseException:
            self._free.appendleft(buffer)
            self._next = index
            raise
        self._begun.append(_Begun(index, buffer, filling))

    def _drop(self) -> None:
        """Give up what was begun, the last first, so that the buffers are used in the same order again."""
        while self._begun:
            self._give_up(-1)

    def _give_up(self, at: int) -> None:
        begun = self._begun[at]
        self._abandon(begun.filling, begun.buffer)
        del self._begun[at]
        if at:
            self._free.appendleft(begun.buffer)
        else:
            self._free.append(begun.buffer)
