"""A few buffers that are filled ahead, in the order in which a model's modules ask: the one prefetcher of weights.

Owns which buffer is free, is being filled with which unit, or is lent to the module that computes from it. A buffer
that is lent is never written to. Asking in another order than expected costs time, never exactness. Where the buffers
are and what fills them is a subclass's: reads from disk into host memory (``ring``), copies to a device
(``device_prefetcher``).

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
from stowage.weights.turn import TWO_FORWARDS

__all__ = ["Prefetcher"]

_Filling = TypeVar("_Filling")
_Lent = TypeVar("_Lent")


@dataclass(slots=True)
class _Begun:
    """A buffer that is being filled with the unit at ``index`` of the order."""

    index: int
    buffer: int
    filling: Any


class Prefetcher(ABC, Generic[_Filling, _Lent]):
    """``buffers``, by number, for ``units``, by number."""

    def __init__(self, units: int, buffers: int) -> None:
        assert units > 0 and buffers > 1
        self._units, self._count = units, buffers
        self._order, self._next = list(range(units)), 0
        self._free = deque(range(buffers))
        self._begun: deque[_Begun] = deque()
        self._lent: dict[int, tuple[int, int]] = {}

    # Where the buffers are

    @abstractmethod
    def _fill(self, unit: int, buffer: int) -> _Filling:
        """Begin to fill ``buffer`` with ``unit``. Raises TransferError where that may go well another time."""

    @abstractmethod
    def _arrive(self, filling: _Filling, buffer: int) -> None:
        """Return when ``buffer`` may be computed from, or is not written to any more."""

    @abstractmethod
    def _raise_error(self, filling: _Filling) -> None:
        """Raise what went wrong while it was filled."""

    @abstractmethod
    def _show(self, unit: int, buffer: int) -> _Lent:
        """``buffer``, which is full of ``unit``, for who computes from it."""

    def _ahead(self, _unit: int) -> bool:
        """Whether filling may begin before the unit is asked for."""
        return True

    def _abandon(self, filling: _Filling, buffer: int) -> None:
        """Return when ``buffer`` may be filled with something else."""
        self._arrive(filling, buffer)

    def _computed(self, buffer: int) -> None:
        """All that computes from ``buffer`` has been asked for."""

    # What is asked of it

    def follow(self, order: Sequence[int]) -> None:
        """Units will be asked for in this order, again and again; some may come more than once. One that it does not
        name ends it (`take`).
        """
        assert order and set(order) <= set(range(self._units))
        if self._order != list(order):
            self._drop()
            self._order, self._next = list(order), 0

    def start(self) -> None:
        """Begin to fill what is free. What fails is tried again when it is asked for."""
        while self._free and self._ahead(self._order[self._next]):
            try:
                self._begin()
            except TransferError:
                return

    def take(self, unit: int) -> _Lent:
        """The buffer with ``unit``, lent until `give_back`.

        Raises what filling it raises (StorageError, TransferError), ModelError when a unit is taken by two threads at
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
        """What computes from the buffer of ``unit`` has been asked for: it is filled with what comes next. May be
        called twice.
        """
        lent = self._lent.pop(unit, None)
        if lent is not None:
            self._computed(lent[0])
            self._free.append(lent[0])
            self.start()

    def reset(self) -> None:
        """Begin anew, whatever a forward left behind that did not end. Nothing writes into a buffer any more, and
        nobody computes from one.
        """
        self._lent.clear()
        self._begun.clear()
        self._free, self._next = deque(range(self._count)), 0

    def check(self) -> None:
        """Every buffer is in one state."""
        lent = [buffer for buffer, _ in self._lent.values()]
        assert sorted([*self._free, *(begun.buffer for begun in self._begun), *lent]) == list(range(self._count))

    def _seek(self, unit: int) -> None:
        """Make ``unit`` the first that is being filled."""
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
        """Give up what was begun, the last first, so that buffers are used in the same order again."""
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
