"""Device and host are both ordinary memory: a transfer is a memory copy.

Owns no memory: it is lent the arena and is handed the device storage. A block is one run of bytes on either side (the
pool keeps all layers of a group together), so a chunk moves in as few copies as it has blocks, and neighbouring blocks
move as one. A plan is one call of C (`native/copies.c`, built with the package where there is a compiler), in which
several threads take pieces off it; else Python copies run by run. Python does it too if `STOWAGE_PURE_PYTHON` is set.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Final

import numpy as np
import torch
from numpy.typing import NDArray

from stowage.core.copy_plan import CopyPlan
from stowage.core.geometry import IntArray, SlabClass
from stowage.native import extension as _native
from stowage.native import is_wanted
from stowage.transfer.runs import columns_of_runs

Memory = tuple[int, int]
"""Its address and its length in bytes."""

SHARED_BYTES_MIN: Final = 8 << 20
"""In Python, longer runs are copied by all of torch's threads. For shorter ones waking them, and torch's own call, cost
as much as the copy: 64 KiB at a time moved at 7 GB/s by torch and at 12 by `memmove`, on a machine whose memory copies
at 13. On one whose cores are taken, torch's threads wait for each other at every run: 1 MiB at a time at 1 GB/s."""


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
        rows, places, lengths = self._runs(plan, storage)
        copy_runs(_memory(storage), _memory(self._arena), rows, places, lengths)

    def load(self, plan: CopyPlan, storage: torch.Tensor) -> None:
        """Host to device; see ``Transfer``."""
        rows, places, lengths = self._runs(plan, storage)
        copy_runs(_memory(self._arena), _memory(storage), places, rows, lengths)

    def _runs(self, plan: CopyPlan, storage: torch.Tensor) -> tuple[IntArray, IntArray, IntArray]:
        """In bytes: where each run lies on the device and in the arena, and how long it is."""
        size = storage.shape[1]
        rows, places, counts = columns_of_runs(plan, self._slab_of[plan.group], size)
        return rows * size, places, counts * size

    def close(self) -> None:
        """Give the arena back."""
        self._arena = torch.empty(0, dtype=torch.uint8)


def copy_runs(source: Memory, target: Memory, begins: IntArray, places: IntArray, lengths: IntArray) -> None:
    """Copies `lengths[i]` bytes from `begins[i]` of the source to `places[i]` of the target. Raises ValueError where a
    run does not lie in its memory; then nothing was copied. Memories and targets do not overlap.
    """
    if is_wanted():
        begins, places, lengths = (np.ascontiguousarray(column, np.int64) for column in (begins, places, lengths))
        _native.copy_runs(source, target, begins, places, lengths, torch.get_num_threads())
    else:
        copy_one_by_one(source, target, begins, places, lengths)


def copy_one_by_one(source: Memory, target: Memory, begins: IntArray, places: IntArray, lengths: IntArray) -> None:
    """As `copy_runs`, in Python."""
    bad = (lengths < 0) | (begins < 0) | (places < 0)
    if (bad | (lengths > source[1] - begins) | (lengths > target[1] - places)).any():
        raise ValueError("runs that do not lie in their memory")
    for begin, place, length in zip(begins.tolist(), places.tolist(), lengths.tolist(), strict=True):
        if length < SHARED_BYTES_MIN:
            ctypes.memmove(target[0] + place, source[0] + begin, length)
        else:
            _tensor(target[0] + place, length).copy_(_tensor(source[0] + begin, length))


def _tensor(address: int, length: int) -> torch.Tensor:
    return torch.frombuffer((ctypes.c_char * length).from_address(address), dtype=torch.uint8)


def _memory(storage: torch.Tensor) -> Memory:
    """Its rows lie one after the other."""
    assert storage.device.type == "cpu" and storage.dtype == torch.uint8 and storage.is_contiguous()
    return storage.data_ptr(), storage.nbytes
