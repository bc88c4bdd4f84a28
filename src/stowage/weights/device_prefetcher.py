"""Weights on a device that is a memory of its own: they cross over into buffers there, ahead of what computes.

Owns the device's buffers (``prefetcher`` says which is filled with what). What lies in host memory for good
crosses straight from there, as far ahead as there are buffers; what is read from disk crosses from the ring's slots
when it is asked for, and nothing overtakes it. A buffer is written to only when everything that computes from it has
been computed, and a slot of the ring is filled again only when its bytes have crossed over. What a device does for that
is behind ``Carrier``, so that the order can be tested without one.

    host memory --copy, beside the computing--> buffer --use--> what computes --computed--> the next copy into it

No host thread is between these: on a GPU each arrow is an event that one stream waits for.
"""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from stowage.errors import TransferError
from stowage.weights.parameter_location import ParameterLocation
from stowage.weights.prefetcher import Prefetcher

__all__ = ["Carrier", "DevicePrefetcher", "PlainCarrier", "RingSlots"]

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


@dataclass(frozen=True, slots=True)
class RingSlots:
    """Where the parameters of ``units`` come from that are read from disk: ``take`` waits for a unit's slot, which
    ``give_back`` says may be filled again.
    """

    units: frozenset[int] = frozenset()
    take: Callable[[int], Sequence[Tensor]] = lambda _unit: ()
    give_back: Callable[[int], None] = lambda _unit: None


class DevicePrefetcher(Prefetcher[PrefetchTicket | None, list[Tensor]]):
    """``buffers`` of ``nbytes`` each, for units whose parameters are ``locations``, by the unit's number. ``slots``
    has those that come through the ring.
    """

    def __init__(
        self,
        carrier: Carrier,
        buffers: int,
        nbytes: int,
        locations: Sequence[Sequence[ParameterLocation]],
        slots: RingSlots,
    ) -> None:
        super().__init__(len(locations), buffers)
        self._carrier = carrier
        self._buffers = [torch.empty(nbytes, dtype=torch.uint8, device=carrier.device) for _ in range(buffers)]
        self._locations, self._slots = locations, slots
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
        assert not self._slots.units, "what is read from disk is different work for each pass"
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
            self.start()

    def end_pass(self) -> None:
        """It has ended, well or not."""
        self.settle()
        if self._apart:
            self.join()

    def reset(self) -> None:
        """See ``Prefetcher``. The device has done all it was asked for."""
        super().reset()
        self._under_way.clear()
        self._last, self._left = None, 0
        self._carrier.forget()

    def check(self) -> None:
        """Between forwards."""
        super().check()
        assert not self._lent and not self._under_way

    def _ahead(self, unit: int) -> bool:
        """What comes through the ring waits until it is asked for, because nothing may overtake it."""
        return unit not in self._slots.units and not (self._apart and not self._left)

    def _fill(self, unit: int, buffer: int) -> PrefetchTicket | None:
        """Begin to copy ``unit``, from a slot of the ring or from host memory."""
        streamed, locations = unit in self._slots.units, self._locations[unit]
        here = self._slot(unit) if streamed else [each.host for each in locations if each.host is not None]
        try:
            prefetched = self._carrier.copy([buffer], list(zip(self._show(unit, buffer), here, strict=True)))
        except (RuntimeError, TransferError) as error:  # torch's, for whatever went wrong on a device
            if streamed:
                self._slots.give_back(unit)
            raise TransferError(f"weights could not be copied to the device: {error}") from error
        self._last = prefetched
        self._left = max(0, self._left - 1)
        if not streamed:
            self.direct_bytes += sum(location.nbytes for location in locations)
        elif prefetched is None:
            self._slots.give_back(unit)
        else:
            self._under_way.append((prefetched, unit))
        return prefetched

    def _slot(self, unit: int) -> Sequence[Tensor]:
        """Slots are given back whose bytes are over. Of those that are not only the newest is left, because the ring
        must have some to fill, and not even that when it is ``unit``'s own.
        """
        while self._under_way and (
            self._under_way[0][0].done or len(self._under_way) > 1 or self._under_way[0][1] == unit
        ):
            self._first()
        return self._slots.take(unit)

    def _arrive(self, _filling: PrefetchTicket | None, buffer: int) -> None:
        self._carrier.use([buffer])

    def _raise_error(self, filling: PrefetchTicket | None) -> None:
        """What fails on a device is told when it is asked for."""

    def _abandon(self, filling: PrefetchTicket | None, buffer: int) -> None:
        """The copy goes on, and whatever is copied into the same buffer comes after it."""

    def _computed(self, buffer: int) -> None:
        self._carrier.computed([buffer])

    def _show(self, unit: int, buffer: int) -> list[Tensor]:
        there = self._views.get((unit, buffer))
        if there is None:
            with torch.inference_mode(False):  # parameters take no tensors of that mode
                there = self._views[unit, buffer] = views(self._locations[unit], self._buffers[buffer])
        return there

    def _first(self) -> None:
        prefetched, unit = self._under_way.popleft()
        try:
            prefetched.wait()
        finally:
            self._slots.give_back(unit)


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
