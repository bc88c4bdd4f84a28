"""A sequence's block table: where each block is, on the device or offloaded to host memory.

Owns the addresses only. Never allocates or frees blocks.
"""

from __future__ import annotations

from collections.abc import Sequence as Items

import numpy as np
from numpy.typing import NDArray

from stowage.core.geometry import NULL_BLOCK

OFFLOADED = -2
"""Stands in ``BlockTable.addresses`` for offset 0 of host memory; the C kernels use the same value."""


class BlockTable:
    """Grows in place. ``blocks``: device block ids. ``offloaded``: offsets in host memory of blocks that the device
    does not have, in units of ``ALIGNMENT_BYTES``. ``NULL_BLOCK`` stands in either where there is none.
    """

    __slots__ = ("_blocks", "_length", "_offloaded", "has_offloaded")

    def __init__(self) -> None:
        self._blocks = np.full(16, NULL_BLOCK, dtype=np.int64)
        self._offloaded = np.full(16, NULL_BLOCK, dtype=np.int64)
        self._length = 0
        self.has_offloaded = False
        """Whether some block is offloaded."""

    def __len__(self) -> int:
        return self._length

    @property
    def blocks(self) -> NDArray[np.int64]:
        """A view, valid until the table grows."""
        return self._blocks[: self._length]

    @property
    def offloaded(self) -> NDArray[np.int64]:
        """A view, valid until the table grows."""
        return self._offloaded[: self._length]

    @property
    def addresses(self) -> NDArray[np.int64]:
        """Where each block is read: a device block, ``OFFLOADED`` minus the host offset, or ``NULL_BLOCK``."""
        if not self.has_offloaded:
            return self.blocks
        return np.where(self.offloaded != NULL_BLOCK, OFFLOADED - self.offloaded, self.blocks)

    def append(self, blocks: Items[int]) -> None:
        end = self._length + len(blocks)
        if end > len(self._blocks):
            self._blocks = self._grown(self._blocks, end)
            self._offloaded = self._grown(self._offloaded, end)
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

    def offload(self, indices: NDArray[np.int64], offsets: NDArray[np.int64]) -> list[int]:
        """Read blocks ``indices`` at ``offsets`` of host memory from now on. Returns device blocks that this frees."""
        assert (self.offloaded[indices] == NULL_BLOCK).all(), "a block is offloaded twice"
        part = self.blocks[indices]
        self._blocks[indices] = NULL_BLOCK
        self._offloaded[indices] = offsets
        self.has_offloaded |= len(indices) > 0
        return [block for block in part.tolist() if block != NULL_BLOCK]

    def clear(self) -> list[int]:
        """Empty the table and return the device blocks that it held."""
        held = self.take(0, self._length)
        self._offloaded[: self._length] = NULL_BLOCK
        self._length = 0
        self.has_offloaded = False
        return held
