"""Device and host are both ordinary memory: a transfer is a memory copy.

Owns no memory: it is lent the arena and is handed the device storage. A block is one run of bytes on either side (the
pool keeps all layers of a group together), so a chunk moves in as few copies as it has blocks, and neighbouring blocks
move as one.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from stowage.core.geometry import SlabClass
from stowage.core.plan import CopyPlan
from stowage.transfer.runs import runs


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
        for row, place, count in runs(plan, self._slab_of[plan.group], size):
            self._arena[place : place + count * size].copy_(storage[row : row + count].view(-1))

    def load(self, plan: CopyPlan, storage: torch.Tensor) -> None:
        """Host to device; see ``Transfer``."""
        size = storage.shape[1]
        for row, place, count in runs(plan, self._slab_of[plan.group], size):
            storage[row : row + count].view(-1).copy_(self._arena[place : place + count * size])

    def close(self) -> None:
        """Give the arena back."""
        self._arena = torch.empty(0, dtype=torch.uint8)
