"""CUDA's streams and events for copies between device and host: KV blocks (``CudaCopies``), weights (``CudaCarrier``).

Stores run on a stream of their own, after an event of the computing stream. Loads run on the computing stream, before
the work that needs them. A copy is asynchronous only where the host memory is pinned. Copies from and to pageable
memory are waited for, so that nothing relies on how a driver treats them (case B).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from stowage.cuda.mapped import mapped
from stowage.errors import TransferError
from stowage.transfer.pinning import Pinned, pin
from stowage.transfer.protocol import CopyTicket
from stowage.transfer.staged import StagedRun, SynchronousCopies


class _Event:
    """A ticket that is done when the device has passed an event."""

    def __init__(self, stream: Any) -> None:
        self._event: Any = torch.cuda.Event()  # type: ignore[no-untyped-call]
        self._event.record(stream)

    def before(self, stream: Any) -> None:
        """``stream`` waits for the event."""
        stream.wait_event(self._event)

    @property
    def done(self) -> bool:
        try:
            return bool(self._event.query())
        except RuntimeError:  # the device is lost: nothing is copied any more, and ``wait`` says so
            return True

    def wait(self) -> None:
        try:
            self._event.synchronize()
        except RuntimeError as error:
            raise TransferError(f"a copy between device and host failed: {error}") from error


class CudaCopies(SynchronousCopies):
    """``DeviceCopies`` of KV blocks. ``pinned``: the arena; its owner unpins it. One thread calls."""

    def __init__(self, device: torch.device, pinned: Pinned | None) -> None:
        super().__init__(device)
        self._pinned = pinned
        self._store_stream: Any = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    @property
    def asynchronous(self) -> bool:
        """Whether copies are asynchronous."""
        return self._pinned is not None and self._pinned.whole

    def to_host(self, staging: Tensor, host: Tensor, runs: Sequence[StagedRun]) -> CopyTicket | None:
        self._store_stream.wait_stream(torch.cuda.current_stream(self.device))
        staging.record_stream(self._store_stream)  # its memory is not reused before it was copied
        with torch.cuda.stream(self._store_stream):
            for begin, offset, nbytes in runs:
                host[offset : offset + nbytes].copy_(staging[begin : begin + nbytes], non_blocking=self.asynchronous)
        return self._ticket(self._store_stream)

    def to_device(self, nbytes: int, host: Tensor, runs: Sequence[StagedRun]) -> tuple[Tensor, CopyTicket | None]:
        staging = torch.empty(nbytes, dtype=torch.uint8, device=self.device)
        for begin, offset, count in runs:
            staging[begin : begin + count].copy_(host[offset : offset + count], non_blocking=self.asynchronous)
        return staging, self._ticket(torch.cuda.current_stream(self.device))

    def _ticket(self, stream: Any) -> CopyTicket | None:
        event = _Event(stream)
        if self.asynchronous:
            return event
        event.wait()
        return None


class CudaCarrier:
    """A ``Carrier``: copies weights on a stream of its own, while the device computes from earlier ones."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._load_stream: Any = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._computed: dict[int, Any] = {}
        self._copied: dict[int, _Event] = {}
        self._pinned: list[Pinned | None] = []

    @property
    def asynchronous(self) -> bool:
        """Whether copies are asynchronous: all memory that they come from is pinned."""
        return bool(self._pinned) and all(pinned is not None and pinned.whole for pinned in self._pinned)

    def pin(self, memory: NDArray[np.uint8]) -> Pinned | None:
        self._pinned.append(pin(memory, self.device))
        return self._pinned[-1]

    def view(self, memory: Tensor) -> Tensor:
        return mapped(memory, self.device)

    def copy(self, buffers: Sequence[int], pairs: Sequence[tuple[Tensor, Tensor]]) -> CopyTicket | None:
        computed = {self._computed.pop(buffer, None) for buffer in buffers}
        if None in computed:  # never used: work on the earlier owner of its memory may not be over
            self._load_stream.wait_stream(torch.cuda.current_stream(self.device))
        for event in computed - {None}:
            self._load_stream.wait_event(event)
        asynchronous = self.asynchronous
        with torch.cuda.stream(self._load_stream):
            for there, here in pairs:
                there.copy_(here, non_blocking=asynchronous)
        event = _Event(self._load_stream)
        self._copied.update(dict.fromkeys(buffers, event))
        if asynchronous:
            return event
        event.wait()
        return None

    def use(self, buffers: Sequence[int]) -> None:
        for event in {self._copied[buffer] for buffer in buffers if buffer in self._copied}:
            event.before(torch.cuda.current_stream(self.device))

    def computed(self, buffers: Sequence[int]) -> None:
        event: Any = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record(torch.cuda.current_stream(self.device))
        self._computed.update(dict.fromkeys(buffers, event))

    def forget(self) -> None:
        self._computed.clear()
        self._copied.clear()
