"""Weights on a device that is a memory of its own: they cross over into buffers there, ahead of what computes.

Owns the device's buffers, used in turn in the order in which the model's units ask. What lies in host memory for good
crosses straight from there, as far ahead as there are buffers; what is read from disk crosses from the ring's slots
when it is asked for, and nothing overtakes it. A buffer is written to only when everything that computes from it has
been computed, and a slot of the ring is filled again only when its bytes have crossed over. What a device does for that
is behind ``Carrier``, so that the order can be tested without one.

    host memory --copy, beside the computing--> buffer --use--> what computes --computed--> the next copy into it

No host thread is between these: on a GPU each arrow is an event that one stream waits for.
"""

from __future__ import annotations

import contextlib
import threading
from collections import deque
from collections.abc import Callable, Collection, Sequence
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from stowage.errors import ModelError, TransferError
from stowage.weights.parameter_location import ParameterLocation
from stowage.weights.turn import TWO_FORWARDS

__all__ = ["Carrier", "DevicePrefetcher", "PlainCarrier"]

_ALIGNED_BYTES = 256
"""Where a parameter may begin in a buffer: what allocators of devices give, and kernels are quickest with."""


class PrefetchTicket(Protocol):
    """Copies that were begun."""

    @property
    def done(self) -> bool: ...

    def wait(self) -> None: ...


class Carrier(Protocol):
    """What a device does. Buffers go by number."""

    @property
    def device(self) -> torch.device: ...

    def pin(self, memory: NDArray[np.uint8]) -> Any:
        """Let copies from ``memory`` go on by themselves, if that is wanted; something to ``close`` that says whether
        it is pinned ``whole``, or ``None``.
        """
        ...

    def view(self, memory: Tensor) -> Tensor:
        """The same bytes of pinned host memory, uint8, one dimension, as the device reads them over the link. Raises
        RuntimeError where it cannot.
        """
        ...

    def copy(self, buffers: Sequence[int], pairs: Sequence[tuple[Tensor, Tensor]]) -> PrefetchTicket | None:
        """Copy into ``buffers``, ``(there, here)`` each, after what was ``computed`` from them. ``None``: it is done.
        Raises RuntimeError or TransferError when that fails.
        """
        ...

    def use(self, buffers: Sequence[int]) -> None:
        """What is computed from now on comes after what was copied into ``buffers``, as far as anything was."""
        ...

    def computed(self, buffers: Sequence[int]) -> None:
        """All that computes from ``buffers`` has been asked for."""
        ...

    def forget(self) -> None:
        """Of ``buffers`` nothing is known any more: what is copied next comes after everything asked for before."""
        ...


class PlainCarrier:
    """Any device of torch: copies are made before the call returns."""

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def pin(self, memory: NDArray[np.uint8]) -> Any:
        """Nothing is pinned."""
        return None

    def view(self, memory: Tensor) -> Tensor:
        """Only the host's own memory is shared for certain."""
        if self.device.type != "cpu":
            raise RuntimeError(f"{self.device} is not known to read host memory")
        return memory

    def copy(self, buffers: Sequence[int], pairs: Sequence[tuple[Tensor, Tensor]]) -> PrefetchTicket | None:
        """See ``Carrier``."""
        for there, here in pairs:
            there.copy_(here)
        return None

    def use(self, buffers: Sequence[int]) -> None:
        """It is there."""

    def computed(self, buffers: Sequence[int]) -> None:
        """Nothing is under way."""

    def forget(self) -> None:
        """There is nothing to forget."""


class DevicePrefetcher:
    """``buffers`` of ``nbytes`` each, for units whose parameters are ``locations``, by the unit's number. ``streamed``:
    those that come through the ring; ``give_back(unit)`` says that its slot may be filled again.
    """

    def __init__(
        self,
        carrier: Carrier,
        buffers: int,
        nbytes: int,
        locations: Sequence[Sequence[ParameterLocation]],
        streamed: Collection[int],
        give_back: Callable[[int], None],
    ) -> None:
        self._carrier = carrier
        self._buffers = [torch.empty(nbytes, dtype=torch.uint8, device=carrier.device) for _ in range(buffers)]
        self._locations, self._streamed, self._give_back = locations, frozenset(streamed), give_back
        self._order, self._next = list(range(len(locations))), 0
        self._free = deque(range(buffers))
        self._begun: deque[tuple[int, int]] = deque()
        self._lent: dict[int, int] = {}
        self._thread = 0
        self._under_way: deque[tuple[PrefetchTicket, int]] = deque()
        self._views: dict[tuple[int, int], list[Tensor]] = {}
        self._apart, self._left = False, 0
        self._last: PrefetchTicket | None = None
        self.direct_bytes = 0
        """That crossed over straight from host memory."""

    @property
    def nbytes(self) -> int:
        """Bytes of device memory."""
        return sum(buffer.numel() for buffer in self._buffers)

    def follow(self, order: Sequence[int]) -> None:
        """Units will be asked for in this order, again and again; some may come more than once."""
        assert set(order) == set(range(len(self._locations))), "an order names every unit"
        self._drop()
        self._order, self._next = list(order), 0

    def take(self, unit: int, slot: Callable[[], Sequence[Tensor]]) -> list[Tensor]:
        """The parameters of ``unit`` on the device, lent until ``computed``; of a streamed one ``slot`` fetches the
        ring's slot, and waits for it.

        Raises TransferError when a copy cannot be begun, ModelError when two threads compute at once.
        """
        if unit in self._lent or (self._lent and self._thread != threading.get_ident()):
            raise ModelError(TWO_FORWARDS)
        self._thread = threading.get_ident()
        self._seek(unit)
        if not self._begun:
            self._begin(self._slot(unit, slot) if unit in self._streamed else None)
        number = self._begun[0][1]
        self._carrier.use([number])
        self._begun.popleft()
        self._lent[unit] = number
        self._go_ahead()
        return self._shown(unit, number)

    def computed(self, unit: int) -> None:
        """What computes from the parameters of ``unit`` has been asked for. May be called twice."""
        number = self._lent.pop(unit, None)
        if number is not None:
            self._carrier.computed([number])
            self._free.append(number)
            self._go_ahead()

    def settle(self) -> None:
        """Wait until everything has left the ring."""
        while self._under_way:
            self._first()

    def close(self) -> None:
        """Wait until nothing is copied any more, whatever became of it."""
        last, self._last = self._last, None
        with contextlib.suppress(TransferError):  # nobody waits for these any more
            if last is not None:
                last.wait()
        with contextlib.suppress(TransferError):
            self.settle()

    def begin_apart(self) -> None:
        """From here on each pass begins its own copies and leaves none begun: nothing that it waits for was asked for
        outside of it, so that it can be captured and done again. What is computed next comes after all copies.
        """
        assert not self._streamed, "what is read from disk is different work for each pass"
        self.join()
        self._apart = True

    def end_apart(self) -> None:
        """Passes follow one another again."""
        self._carrier.forget()
        self._apart = False

    def join(self) -> None:
        """What is computed from now on comes after all copies that were begun, given up or not; they are forgotten."""
        self._carrier.use(range(len(self._buffers)))
        self._drop()
        self._next = 0
        self._carrier.forget()

    def begin_pass(self) -> None:
        """The model's forward begins."""
        if self._apart:
            self._left = len(self._order)
            self._go_ahead()

    def end_pass(self) -> None:
        """It has ended, well or not."""
        self.settle()
        if self._apart:
            self.join()

    def reset(self) -> None:
        """Begin anew, whatever a forward left behind that did not end. The device has done all it was asked for."""
        self._begun.clear()
        self._lent.clear()
        self._under_way.clear()
        self._last = None
        self._free, self._next, self._left = deque(range(len(self._buffers))), 0, 0
        self._carrier.forget()

    def check(self) -> None:
        assert not self._lent and not self._under_way
        assert sorted([*self._free, *(number for _, number in self._begun)]) == list(range(len(self._buffers)))

    def _seek(self, unit: int) -> None:
        """Make ``unit`` the first that is begun, or the next to begin."""
        if self._begun and self._begun[0][0] == unit:
            return
        self._drop()
        ahead = ((self._next + step) % len(self._order) for step in range(len(self._order)))
        self._next = next(at for at in ahead if self._order[at] == unit)

    def _drop(self) -> None:
        """Give up what was begun: the copies go on, and whatever is copied into the same buffers comes after them."""
        while self._begun:
            self._free.appendleft(self._begun.pop()[1])

    def _go_ahead(self) -> None:
        """Begin what comes next, while there are buffers. What is streamed waits until it is asked for, and what fails
        here is tried again then.
        """
        while self._free and self._order[self._next] not in self._streamed and not (self._apart and not self._left):
            try:
                self._begin(None)
            except TransferError:
                return

    def _slot(self, unit: int, slot: Callable[[], Sequence[Tensor]]) -> Sequence[Tensor]:
        """Slots are given back whose bytes are over. Of those that are not only the newest is left, because the ring
        must have some to fill, and not even that when it is ``unit``'s own.
        """
        while self._under_way and (
            self._under_way[0][0].done or len(self._under_way) > 1 or self._under_way[0][1] == unit
        ):
            self._first()
        return slot()

    def _begin(self, slot: Sequence[Tensor] | None) -> None:
        """Begin to copy the next unit, from the ring's ``slot`` or from host memory."""
        unit = self._order[self._next]
        assert self._free, "more units compute at once than there are buffers"
        number = self._free.popleft()
        locations = self._locations[unit]
        here = slot if slot is not None else [location.host for location in locations if location.host is not None]
        try:
            prefetched = self._carrier.copy([number], list(zip(self._shown(unit, number), here, strict=True)))
        except (RuntimeError, TransferError) as error:  # torch's, for whatever went wrong on a device
            self._free.appendleft(number)
            if slot is not None:
                self._give_back(unit)
            raise TransferError(f"weights could not be copied to the device: {error}") from error
        self._last = prefetched
        self._begun.append((unit, number))
        self._next = (self._next + 1) % len(self._order)
        self._left = max(0, self._left - 1)
        if slot is None:
            self.direct_bytes += sum(location.nbytes for location in locations)
        elif prefetched is None:
            self._give_back(unit)
        else:
            self._under_way.append((prefetched, unit))

    def _shown(self, unit: int, number: int) -> list[Tensor]:
        there = self._views.get((unit, number))
        if there is None:
            with torch.inference_mode(False):  # parameters take no tensors of that mode
                there = self._views[unit, number] = views(self._locations[unit], self._buffers[number])
        return there

    def _first(self) -> None:
        prefetched, unit = self._under_way.popleft()
        try:
            prefetched.wait()
        finally:
            self._give_back(unit)


def nbytes_of(locations: Sequence[ParameterLocation]) -> int:
    """Bytes of a buffer for these parameters."""
    return sum(-(-location.nbytes // _ALIGNED_BYTES) * _ALIGNED_BYTES for location in locations)


def views(locations: Sequence[ParameterLocation], buffer: Tensor) -> list[Tensor]:
    """Where ``locations`` lie in a buffer, one after the other."""
    found, begin = [], 0
    for location in locations:
        found.append(buffer[begin : begin + location.nbytes].view(location.dtype).view(location.shape))
        begin += -(-location.nbytes // _ALIGNED_BYTES) * _ALIGNED_BYTES
    return found
