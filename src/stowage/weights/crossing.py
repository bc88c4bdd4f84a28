"""Weights on a device that is a memory of its own: they cross over from the ring's slots into buffers there.

Owns the device's buffers, one for each slot of the ring, used in turn. A buffer is written to only when everything that
computes from it has been computed, and a slot of the ring is filled again only when its bytes have crossed over. What a
device does for that is behind ``Carrier``, so that the order can be tested without one.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from stowage.weights.holds import Home

__all__ = ["Carrier", "Crossing", "PlainCarrier"]

_ALIGNED_BYTES = 256
"""Where a parameter may begin in a buffer: what allocators of devices give, and kernels are quickest with."""


class Crossed(Protocol):
    """Copies that were begun."""

    @property
    def done(self) -> bool: ...

    def wait(self) -> None: ...


class Carrier(Protocol):
    """What a device does. Buffers go by number."""

    @property
    def device(self) -> torch.device: ...

    def pin(self, memory: NDArray[np.uint8]) -> Any:
        """Let copies from ``memory`` go on by themselves, if that is wanted; something to ``close``, or ``None``."""
        ...

    def copy(self, buffer: int, pairs: Sequence[tuple[Tensor, Tensor]]) -> Crossed | None:
        """Copy into ``buffer``, ``(there, here)`` each, after what was ``computed`` from it and before what is computed
        from now on. ``None``: it is done.
        """
        ...

    def computed(self, buffer: int) -> None:
        """All that computes from ``buffer`` has been asked for."""
        ...


class PlainCarrier:
    """Any device of torch: copies are made before the call returns."""

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def pin(self, memory: NDArray[np.uint8]) -> None:
        """Nothing is pinned."""

    def copy(self, buffer: int, pairs: Sequence[tuple[Tensor, Tensor]]) -> None:
        """See ``Carrier``."""
        for there, here in pairs:
            there.copy_(here)

    def computed(self, buffer: int) -> None:
        """Nothing is under way."""


class Crossing:
    """``buffers`` of ``nbytes`` each. ``give_back(unit)`` says that a slot of the ring may be filled again."""

    def __init__(self, carrier: Carrier, buffers: int, nbytes: int, give_back: Callable[[int], None]) -> None:
        self._carrier = carrier
        self._buffers = [torch.empty(nbytes, dtype=torch.uint8, device=carrier.device) for _ in range(buffers)]
        self._give_back = give_back
        self._next = 0
        self._under_way: deque[tuple[Crossed, int]] = deque()
        self._lent: dict[int, int] = {}
        self._views: dict[tuple[int, int], list[Tensor]] = {}

    @property
    def nbytes(self) -> int:
        """Bytes of device memory."""
        return sum(buffer.numel() for buffer in self._buffers)

    def make_way(self, unit: int) -> None:
        """Before ``unit`` is taken from the ring: give slots back whose bytes are over. Of those that are not only the
        newest is left, because the ring must have some to fill, and not even that when it is ``unit``'s own.
        """
        while self._under_way and (
            self._under_way[0][0].done or len(self._under_way) > 1 or self._under_way[0][1] == unit
        ):
            self._first()

    def bring(self, unit: int, homes: Sequence[Home], slot: Sequence[Tensor]) -> list[Tensor]:
        """The parameters of ``unit``, which lie in the ring's ``slot``, on the device. ``make_way`` was called."""
        number, self._next = self._next, (self._next + 1) % len(self._buffers)
        assert number not in self._lent.values(), "more units compute at once than there are buffers"
        there = self._views.get((unit, number))
        if there is None:
            with torch.inference_mode(False):  # parameters take no tensors of that mode
                there = self._views[unit, number] = views(homes, self._buffers[number])
        crossed = self._carrier.copy(number, list(zip(there, slot, strict=True)))
        self._lent[unit] = number
        if crossed is None:
            self._give_back(unit)
        else:
            self._under_way.append((crossed, unit))
        return there

    def computed(self, unit: int) -> None:
        """What computes from the parameters of ``unit`` has been asked for. May be called twice."""
        number = self._lent.pop(unit, None)
        if number is not None:
            self._carrier.computed(number)

    def settle(self) -> None:
        """Wait until everything has crossed over."""
        while self._under_way:
            self._first()

    def check(self) -> None:
        assert not self._lent and not self._under_way

    def _first(self) -> None:
        crossed, unit = self._under_way.popleft()
        try:
            crossed.wait()
        finally:
            self._give_back(unit)


def nbytes_of(homes: Sequence[Home]) -> int:
    """Bytes of a buffer for these parameters."""
    return sum(-(-home.nbytes // _ALIGNED_BYTES) * _ALIGNED_BYTES for home in homes)


def views(homes: Sequence[Home], buffer: Tensor) -> list[Tensor]:
    """Where ``homes`` lie in a buffer, one after the other."""
    found, begin = [], 0
    for home in homes:
        found.append(buffer[begin : begin + home.nbytes].view(home.dtype).view(home.shape))
        begin += -(-home.nbytes // _ALIGNED_BYTES) * _ALIGNED_BYTES
    return found
