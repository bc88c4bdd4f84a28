"""A carrier of weights whose copies take their time: what may be used when, without a device that has streams.

What is copied is rubbish on the device until it is used, or its ticket is done; host memory that is copied from must
stay as it was until then. Nothing is copied into a buffer from which something computes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from stowage.weights.device_prefetcher import PlainCarrier
from tests.late_copies import Lane, Late

RUBBISH = 0xFF


class LateCarrier(PlainCarrier):
    """``fails(number)``: whether the copy of that number fails, from 0. ``whole``: whether memory can be pinned."""

    def __init__(
        self,
        device: str = "cpu",
        patience: int = 3,
        fails: Callable[[int], bool] = lambda number: False,
        whole: bool = True,
    ) -> None:
        super().__init__(torch.device(device))
        self.lane = Lane(patience)
        self.fails, self.whole = fails, whole
        self.violations: list[str] = []
        self.in_use: set[int] = set()
        self.pending: dict[int, Callable[[], None]] = {}
        self.copies, self.most_ahead = 0, 0
        self.order: list[int] = []
        self.pinned: list[int] = []

    def pin(self, memory: np.ndarray) -> Any:
        self.pinned.append(memory.nbytes)
        return _Pinned(self, memory.nbytes)

    def copy(self, buffers: Sequence[int], pairs: Sequence[tuple[Tensor, Tensor]]) -> Late:
        number, self.copies = self.copies, self.copies + 1
        if self.fails(number):
            raise RuntimeError(f"copy {number} failed")
        if self.in_use & set(buffers):
            self.violations.append(f"{self.in_use & set(buffers)} written to while something computes from them")
        self.order += buffers
        for there, _ in pairs:
            there.view(-1).view(torch.uint8).fill_(RUBBISH)
        was = [(here, here.clone()) for _, here in pairs]
        over = False

        def arrive() -> None:
            nonlocal over
            if not over:
                over = True
                super(LateCarrier, self).copy(buffers, pairs)

        def finish() -> None:
            arrive()
            if not all(torch.equal(_bytes(here), _bytes(before)) for here, before in was):
                self.violations.append("host memory was written to before it had crossed over")

        self.pending.update(dict.fromkeys(buffers, arrive))
        ticket = self.lane.begin(finish)
        self.most_ahead = max(self.most_ahead, len(self.pending))
        return ticket

    def use(self, buffers: Sequence[int]) -> None:
        for buffer in buffers:
            self.pending.pop(buffer, lambda: None)()
        self.in_use |= set(buffers)

    def computed(self, buffers: Sequence[int]) -> None:
        if not set(buffers) <= self.in_use:
            self.violations.append(f"{buffers} were computed from before they were there")
        self.in_use -= set(buffers)

    def forget(self) -> None:
        self.in_use.clear()


class _Pinned:
    def __init__(self, carrier: LateCarrier, nbytes: int) -> None:
        self._carrier, self._nbytes, self.whole = carrier, nbytes, carrier.whole

    def close(self) -> None:
        self._carrier.pinned.remove(self._nbytes)


def _bytes(tensor: Tensor) -> Tensor:
    return tensor.contiguous().view(-1).view(torch.uint8)
