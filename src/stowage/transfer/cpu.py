"""Device and host are both ordinary memory: a transfer is a memory copy.

Owns no memory: it is lent the arena and is handed the device storage. A block is one run of bytes on either side (the
pool keeps all layers of a group together), so a chunk moves in as few copies as it has blocks, and neighbouring blocks
move as one.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Final

import numpy as np
import torch
from numpy.typing import NDArray

from stowage.core.geometry import SlabClass
from stowage.core.plan import CopyPlan
from stowage.transfer.runs import runs

SHARED_BYTES_MIN: Final = 8 << 20
"""Longer runs are copied by all of torch's threads. For shorter ones waking them, and torch's own call, cost as much as
the copy: 64 KiB at a time moved at 7 GB/s by torch and at 12 by `memmove`, on a machine whose memory copies at 13. On
one whose cores are taken, torch's threads wait for each other at every run: 1 MiB at a time moved at 1 GB/s."""


class CpuTransfer:
    """Copies between a device pool in ordinary memory and the host arena.

    Args:
        arena: all bytes of the arena, uint8.
        slabs: its slab classes; each group belongs to one.
    """

    def __init__(self, arena: NDArray[np.uint8], slabs: Sequence[SlabClass]) -> None:
        self._arena = torch.from_numpy(arena)
        self._slab_of = {group: slab for slab in slabs for group in slab.groups}

    def store(self, plan: CopyPlan, storage: torch.Tensor) -> None:
        """Device to host; see ``Transfer``."""
        size = storage.shape[1]
        host, device = self._arena.data_ptr(), _address(storage)
        for row, place, count in runs(plan, self._slab_of[plan.group], size):
            nbytes = count * size
            if nbytes < SHARED_BYTES_MIN:
                assert 0 <= row <= len(storage) - count and 0 <= place <= len(self._arena) - nbytes
                ctypes.memmove(host + place, device + row * size, nbytes)
            else:
                self._arena[place : place + nbytes].copy_(storage[row : row + count].view(-1))

    def load(self, plan: CopyPlan, storage: torch.Tensor) -> None:
        """Host to device; see ``Transfer``."""
        size = storage.shape[1]
        host, device = self._arena.data_ptr(), _address(storage)
        for row, place, count in runs(plan, self._slab_of[plan.group], size):
            nbytes = count * size
            if nbytes < SHARED_BYTES_MIN:
                assert 0 <= row <= len(storage) - count and 0 <= place <= len(self._arena) - nbytes
                ctypes.memmove(device + row * size, host + place, nbytes)
            else:
                storage[row : row + count].view(-1).copy_(self._arena[place : place + nbytes])

    def close(self) -> None:
        """Give the arena back."""
        self._arena = torch.empty(0, dtype=torch.uint8)


def _address(storage: torch.Tensor) -> int:
    """Where the rows begin; they lie one after the other."""
    assert storage.device.type == "cpu" and storage.dtype == torch.uint8 and storage.is_contiguous()
    return storage.data_ptr()
