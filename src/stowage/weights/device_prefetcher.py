"""Prefetches weights to a device with memory of its own: they are copied into device buffers, ahead of computing.

Owns the device's buffers (``prefetcher`` decides which is filled with what). Weights that stay in host memory are
copied as far ahead as there are buffers; weights that are read from disk are copied from the ring's slots when they are
needed, in order. A buffer is overwritten only when everything that reads it has been computed, and a slot of the ring
is filled again only when it has been copied. The device is behind ``Carrier``, so that the order can be tested without
one.

    host memory --copy, while computing continues--> buffer --use--> kernels --computed--> the next copy into it

No host thread waits in between: on a GPU each arrow is an event that one stream waits for.
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

from stowage.core.geometry import round_up
from stowage.errors import TransferError
from stowage.weights.parameter_location import ParameterLocation
from stowage.weights.prefetcher import Prefetcher

_ALIGNED_BYTES = 256
"""Alignment of parameters in a buffer: that of device allocators, with which kernels are fastest."""


class PrefetchTicket(Protocol):
    """Copies in flight."""

    @property
    def done(self) -> bool: ...

    def wait(self) -> None: ...


class Carrier(Protocol):
    """A device's copies of weights. Buffers are named by number."""

    @property
    def device(self) -> torch.device: ...

    def pin(self, memory: NDArray[np.uint8]) -> Any:
        """Pin ``memory`` if that is wanted, so that copies from it are asynchronous. Returns an object to ``close``
        with ``whole``: whether all is pinned; or ``None``.
        """

    def view(self, memory: Tensor) -> Tensor:
        """Pinned host memory (uint8, one dimension) as a tensor that the device reads there. Raises RuntimeError."""

    def copy(self, buffers: Sequence[int], pairs: Sequence[tuple[Tensor, Tensor]]) -> PrefetchTicket | None:
        """Copy the ``(device, host)`` pairs into ``buffers``, after all that was ``computed`` from them. ``None``: the
        copies are done. Raises RuntimeError or TransferError when that fails.
        """

    def use(self, buffers: Sequence[int]) -> None:
        """Work that is issued from now on waits for the copies into ``buffers``."""

    def computed(self, buffers: Sequence[int]) -> None:
        """All work that reads ``buffers`` has been issued."""

    def forget(self) -> None:
        """Forget the state of all buffers: the next copies wait for all work issued before."""


class PlainCarrier:
    """A ``Carrier`` to any torch device: copies are complete when the call returns."""

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def pin(self, memory: NDArray[np.uint8]) -> Any:
        """Nothing is pinned."""
        return None

    def view(self, memory: Tensor) -> Tensor:
        """Supported for the CPU only."""
        if self.device.type != "cpu":
            raise RuntimeError(f"{self.device} is not known to read host memory")
        return memory

    def copy(self, buffers: Sequence[int], pairs: Sequence[tuple[Tensor, Tensor]]) -> PrefetchTicket | None:
        for there, here in pairs:
            there.copy_(here)
        return None

    def use(self, buffers: Sequence[int]) -> None:
        """Does nothing: copies are complete."""

    def computed(self, buffers: Sequence[int]) -> None:
        """Does nothing: copies are complete."""

    def forget(self) -> None:
        """Does nothing: there is no state."""


@dataclass(frozen=True, slots=True)
class RingSlots:
    """The ring's slots of ``units`` read from disk: ``take`` waits for one, ``give_back`` lets it be filled again."""

    units: frozenset[int] = frozenset()
    take: Callable[[int], Sequence[Tensor]] = lambda _unit: ()
    give_back: Callable[[int], None] = lambda _unit: None


class DevicePrefetcher(Prefetcher[PrefetchTicket | None, list[Tensor]]):
    """Copies weights into device buffers ahead of computing: ``buffers`` of ``nbytes`` each, for units whose parameters
    are ``locations``, by the unit's number. ``slots``: of the units that are read from disk.
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
        """Bytes that were copied directly from host memory."""

    @property
    def nbytes(self) -> int:
        """Bytes of device memory."""
        return sum(buffer.numel() for buffer in self._buffers)

    def settle(self) -> None:
        """Wait until all copies from the ring are done."""
        while self._under_way:
            self._first()

    def close(self) -> None:
        """Wait until all copies have ended, failed or not."""
        last, self._last = self._last, None
        with contextlib.suppress(TransferError):  # nobody waits for these any more
            if last is not None:
                last.wait()
        with contextlib.suppress(TransferError):
            self.settle()

    def begin_apart(self) -> None:
        """From now on each pass issues its own copies and leaves none in flight: it waits for nothing that was issued
        outside of it, so it can be captured and replayed. Work that is issued next waits for all copies.
        """
        assert not self._slots.units, "what is read from disk is different work for each pass"
        self.join()
        self._apart = True

    def end_apart(self) -> None:
        """Passes may prefetch for the next ones again."""
        self._carrier.forget()
        self._apart = False

    def join(self) -> None:
        """Work that is issued from now on waits for all copies in flight, abandoned or not; they are forgotten."""
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
        """See ``Prefetcher``. The device is idle."""
        super().reset()
        self._under_way.clear()
        self._last, self._left = None, 0
        self._carrier.forget()

    def check(self) -> None:
        """Between forwards."""
        super().check()
        assert not self._lent and not self._under_way

    def _ahead(self, unit: int) -> bool:
        """Whether the unit may be copied ahead. Units from the ring are copied when they are needed, in order."""
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
        """The ring's slot of ``unit``. Slots that have been copied are released first; of the others, all but the
        newest are waited for, because the ring needs slots to fill, and the newest too where it is ``unit``'s own.
        """
        while self._under_way and (
            self._under_way[0][0].done or len(self._under_way) > 1 or self._under_way[0][1] == unit
        ):
            self._first()
        return self._slots.take(unit)

    def _arrive(self, _filling: PrefetchTicket | None, buffer: int) -> None:
        self._carrier.use([buffer])

    def _raise_error(self, filling: PrefetchTicket | None) -> None:
        """Does nothing: a device's errors are raised when a copy is used."""

    def _abandon(self, filling: PrefetchTicket | None, buffer: int) -> None:
        """Does nothing: later copies into the same buffer wait for this one."""

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
    return sum(round_up(location.nbytes, _ALIGNED_BYTES) for location in locations)


def views(locations: Sequence[ParameterLocation], buffer: Tensor) -> list[Tensor]:
    """Where ``locations`` lie in a buffer, one after the other."""
    found, begin = [], 0
    for location in locations:
        found.append(buffer[begin : begin + location.nbytes].view(location.dtype).view(location.shape))
        begin += round_up(location.nbytes, _ALIGNED_BYTES)
    return found
