"""How much is in each slot: bytes and blocks, by the group that the slot was taken for.

With one group, as most models have, every chunk is as large as the next, and nothing is looked up or kept per slot.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, TypeVar

import numpy as np
from numpy.typing import NDArray

from stowage.core.geometry import Group, IntArray, MaskArray

T = TypeVar("T", np.int64, np.uint64)

_FEW: Final = 1024
"""Chunks whose sizes are at hand where there is one group: more than a transfer has, as a rule."""


class Sizes:
    """The bytes and blocks in each of `slots` slots. The arrays that it gives away must not be changed."""

    __slots__ = ("_bytes", "_few_bytes", "_few_masks", "_group_of", "_is_one", "_masks")

    def __init__(self, groups: Sequence[Group], slots: int) -> None:
        self._bytes: IntArray = np.array([group.bytes_per_chunk for group in groups], np.int64)
        self._masks: MaskArray = np.array([group.full_mask for group in groups], np.uint64)
        self._is_one = len(groups) == 1
        self._group_of: IntArray = np.zeros(0 if self._is_one else slots, np.int64)
        self._few_bytes: IntArray = np.full(_FEW, self._bytes[0], np.int64)
        self._few_masks: MaskArray = np.full(_FEW, self._masks[0], np.uint64)
        self._few_bytes.setflags(write=False)
        self._few_masks.setflags(write=False)

    def assign(self, slots: IntArray, group: int | IntArray) -> None:
        """The slots are for chunks of this group from now on, or each for one of its own; -1 is ignored."""
        if not self._is_one:
            there = slots >= 0
            self._group_of[slots[there]] = group if isinstance(group, int) else group[there]

    @property
    def least(self) -> int:
        """The bytes of a chunk of the group with the smallest ones; at least 1."""
        return max(1, int(self._bytes.min()))

    def of_group(self, group: int) -> int:
        """The bytes of a chunk of this group."""
        return int(self._bytes[group])

    def of(self, slots: IntArray) -> tuple[IntArray, int]:
        """The bytes of the chunk in each slot, and their sum."""
        if self._is_one:
            return _first(self._few_bytes, len(slots)), len(slots) * int(self._bytes[0])
        sizes = self._bytes[self._group_of[slots]]
        return sizes, int(sizes.sum())

    def full_masks(self, slots: IntArray) -> MaskArray:
        """The blocks that the chunk in each slot can have."""
        return _first(self._few_masks, len(slots)) if self._is_one else self._masks[self._group_of[slots]]


def _first(same: NDArray[T], count: int) -> NDArray[T]:
    """So many of values that are all the same."""
    return same[:count] if count <= len(same) else np.full(count, same[0])
