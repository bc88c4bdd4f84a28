"""Where each of a sequence's blocks lies: on the device, or away from it in host memory.

Owns the numbers only. Never allocates or frees blocks.
"""

from __future__ import annotations

from collections.abc import Sequence as Items

import numpy as np
from numpy.typing import NDArray

from stowage.core.geometry import NULL_BLOCK

AWAY = -2
"""What stands in ``BlockTable.addresses`` for offset 0 of host memory; the kernels have it too."""


class BlockTable:
    """Where each of a sequence's blocks lies: on the device, or away from it in host memory; grows in place.

    ``blocks`` has the device blocks, ``NULL_BLOCK`` where there is none; ``away`` the offset in host memory of those
    that the device does not have, in units of ``TENSOR_ALIGNMENT_BYTES``, ``NULL_BLOCK`` where there is none.
    """

    __slots__ = ("_away", "_blocks", "_length", "is_away")

    def __init__(self) -> None:
        self._blocks = np.full(16, NULL_BLOCK, dtype=np.int64)
        self._away = np.full(16, NULL_BLOCK, dtype=np.int64)
        self._length = 0
        self.is_away = False
        """Whether some block is away."""

    def __len__(self) -> int:
        return self._length

    @property
    def blocks(self) -> NDArray[np.int64]:
        """A view, valid until the table grows."""
        return self._blocks[: self._length]

    @property
    def away(self) -> NDArray[np.int64]:
        """A view, valid until the table grows."""
        return self._away[: self._length]

    @property
    def addresses(self) -> NDArray[np.int64]:
        """Where each block is read: a device block, ``AWAY`` minus the offset of one that is away, or
        ``NULL_BLOCK``.
        """
        if not self.is_away:
            return self.blocks
        return np.where(self.away != NULL_BLOCK, AWAY - self.away, self.blocks)

    def append(self, blocks: Items[int]) -> None:
        end = self._length + len(blocks)
        if end > len(self._blocks):
            self._blocks = self._grown(self._blocks, end)
            self._away = self._grown(self._away, end)
        self._blocks[self._length : end] = blocks
        self._length = end

    def _grown(self, array: NDArray[np.int64], least: int) -> NDArray[np.int64]:
        grown = np.full(max(least, 2 * len(array)), NULL_BLOCK, dtype=np.int64)
        grown[: self._length] = array[: self._length]
        return grown

    def take(self, first: int, end: int) -> list[int]:
        """Make the blocks ``[first, end)`` holes on the device and return those that were held."""
        part = self.blocks[first:end]
        held: list[int] = part[part != NULL_BLOCK].tolist()
        part[:] = NULL_BLOCK
        return held

    def send_away(self, indices: NDArray[np.int64], offsets: NDArray[np.int64]) -> list[int]:
        """The blocks ``indices`` are read at ``offsets`` of host memory from now on. Returns the blocks that were
        held on the device.
        """
        assert (self.away[indices] == NULL_BLOCK).all(), "a block is sent away twice"
        part = self.blocks[indices]
        self._blocks[indices] = NULL_BLOCK
        self._away[indices] = offsets
        self.is_away |= len(indices) > 0
        return [block for block in part.tolist() if block != NULL_BLOCK]

    def clear(self) -> list[int]:
        """Empty the table and return the device blocks that it held."""
        held = self.take(0, self._length)
        self._away[: self._length] = NULL_BLOCK
        self._length = 0
        self.is_away = False
        return held
