"""A device whose copies take their time: the order in which host memory may be used, without a device.

On the device everything is in order, so what comes over is there at once. In host memory it is not: what leaves is
rubbish until its ticket is done, and what is being brought must stay as it was until then. Each ticket is done when it
was asked for the ``patience``-th time, or waited for; those before it in the same direction are done then, too.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from stowage.errors import TransferError
from stowage.transfer.staged import StagedRun, SynchronousCopies

RUBBISH = 0xAB


class Late:
    """A ticket."""

    def __init__(self, lane: Lane, finish: Callable[[], None]) -> None:
        self._lane, self._asked = lane, 0
        self.finish, self.over, self.fails, self.nbytes = finish, False, False, 0

    @property
    def done(self) -> bool:
        self._asked += 1
        if not self.over and self._asked >= self._lane.patience:
            self._lane.finish_up_to(self)
        return self.over

    def wait(self) -> None:
        self._lane.finish_up_to(self)
        if self.fails:
            raise TransferError("a copy failed on the way")


class Lane:
    """The copies of one direction, in order."""

    def __init__(self, patience: int) -> None:
        self.patience = patience
        self.open: deque[Late] = deque()

    def begin(self, finish: Callable[[], None]) -> Late:
        self.open.append(Late(self, finish))
        return self.open[-1]

    def finish_up_to(self, last: Late) -> None:
        while not last.over:
            ticket = self.open.popleft()
            ticket.over = True
            ticket.finish()


class LateCopies(SynchronousCopies):
    """``violations``: what was done to host memory that copies were under way from or to. ``failing``: the numbers of
    the stores that fail, from 0.
    """

    def __init__(self, patience: int = 3, failing: Sequence[int] = ()) -> None:
        super().__init__(torch.device("cpu"))
        self.leaving, self.coming = Lane(patience), Lane(patience)
        self.violations: list[str] = []
        self.failing, self.begun, self.most_bytes = set(failing), 0, 0

    def to_host(self, staging: Tensor, host: Tensor, runs: Sequence[StagedRun]) -> Late:
        for _, place, nbytes in runs:
            host[place : place + nbytes] = RUBBISH

        def finish() -> None:
            for begin, place, nbytes in runs:
                if not bool((host[place : place + nbytes] == RUBBISH).all()):
                    self.violations.append(f"{nbytes} bytes at {place} were written to while a copy was on its way")
                if not ticket.fails:
                    host[place : place + nbytes] = staging[begin : begin + nbytes]

        ticket = self.leaving.begin(finish)
        ticket.fails = self.begun in self.failing
        ticket.nbytes = staging.numel()
        self.begun += 1
        self.most_bytes = max(self.most_bytes, sum(one.nbytes for one in self.leaving.open))
        return ticket

    def to_device(self, nbytes: int, host: Tensor, runs: Sequence[StagedRun]) -> tuple[Tensor, Late]:
        staging, _ = super().to_device(nbytes, host, runs)

        def finish() -> None:
            for begin, place, count in runs:
                if not torch.equal(host[place : place + count], staging[begin : begin + count]):
                    self.violations.append(f"{count} bytes at {place} changed while they were being read")

        return staging, self.coming.begin(finish)
