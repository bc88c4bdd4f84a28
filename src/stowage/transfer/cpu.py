"""Transfers on a machine without a device: both sides are ordinary memory, so a transfer is a memory copy.

Owns no memory: it borrows the arena and gets the device storage with each call. A block is contiguous on both sides
(the pool keeps all layers of a group together), so a chunk needs at most one copy per block, and neighbouring blocks
are copied as one run. A plan is one call of C (`native/copies.c`), in which several threads share the work. Where
nothing was compiled, or with `STOWAGE_PURE_PYTHON` set, Python copies run by run.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Final

import numpy as np
import torch
from numpy.typing import NDArray

from stowage.core.copy_plan import CopyPlan
from stowage.core.geometry import IntArray, SlabClass, slab_of_groups
from stowage.native import extension as _native
from stowage.native import is_wanted
from stowage.transfer.runs import columns_of_runs

Memory = tuple[int, int]
"""Address and length in bytes."""

PARALLEL_BYTES_MIN: Final = 8 << 20
"""In Python, runs from this length on are copied by torch's threads. For shorter ones waking them costs as much as the
copy: 64 KiB at a time moved at 7 GB/s by torch and at 12 by `memmove`, on a machine whose memory copies at 13. On one
whose cores are busy, torch's threads wait for each other at every run: 1 MiB at a time at 1 GB/s."""


class CpuTransfer:
    """Copies between a pool in ordinary memory and the host ``arena`` (uint8). ``slabs``: one for each group."""

    def __init__(self, arena: NDArray[np.uint8], slabs: Sequence[SlabClass]) -> None:
        self._arena = torch.from_numpy(arena)
        self._slab_of = slab_of_groups(slabs)

    def store(self, plan: CopyPlan, storage: torch.Tensor) -> None:
        """Device to host; see ``BlockTransfer``."""
        rows, offsets, lengths = self._runs(plan, storage)
        copy_runs(_memory(storage), _memory(self._arena), rows, offsets, lengths)

    def load(self, plan: CopyPlan, storage: torch.Tensor) -> None:
        """Host to device; see ``BlockTransfer``."""
        rows, offsets, lengths = self._runs(plan, storage)
        copy_runs(_memory(self._arena), _memory(storage), offsets, rows, lengths)

    def _runs(self, plan: CopyPlan, storage: torch.Tensor) -> tuple[IntArray, IntArray, IntArray]:
        """Of each run: its offset on the device, its offset in the arena and its length, in bytes."""
        size = storage.shape[1]
        rows, offsets, counts = columns_of_runs(plan, self._slab_of[plan.group], size)
        return rows * size, offsets, counts * size

    def close(self) -> None:
        """Give the arena back."""
        self._arena = torch.empty(0, dtype=torch.uint8)


def copy_runs(
    source: Memory, target: Memory, source_offsets: IntArray, target_offsets: IntArray, lengths: IntArray
) -> None:
    """Copies `lengths[i]` bytes from `source_offsets[i]` of the source to `target_offsets[i]` of the target. The two
    memories must not overlap, nor the targets. Raises ValueError, before anything is copied, for a run outside them.
    """
    if is_wanted():
        source_offsets, target_offsets, lengths = (
            np.ascontiguousarray(column, np.int64) for column in (source_offsets, target_offsets, lengths)
        )
        _native.copy_runs(source, target, source_offsets, target_offsets, lengths, torch.get_num_threads())
    else:
        copy_one_by_one(source, target, source_offsets, target_offsets, lengths)


def copy_one_by_one(
    source: Memory, target: Memory, source_offsets: IntArray, target_offsets: IntArray, lengths: IntArray
) -> None:
    """As `copy_runs`, in Python."""
    bad = (lengths < 0) | (source_offsets < 0) | (target_offsets < 0)
    if (bad | (lengths > source[1] - source_offsets) | (lengths > target[1] - target_offsets)).any():
        raise ValueError("runs that do not lie in their memory")
    for start, to, length in zip(source_offsets.tolist(), target_offsets.tolist(), lengths.tolist(), strict=True):
        if length < PARALLEL_BYTES_MIN:
            ctypes.memmove(target[0] + to, source[0] + start, length)
        else:
            _tensor(target[0] + to, length).copy_(_tensor(source[0] + start, length))


def _tensor(address: int, length: int) -> torch.Tensor:
    return torch.frombuffer((ctypes.c_char * length).from_address(address), dtype=torch.uint8)


def _memory(storage: torch.Tensor) -> Memory:
    """Of rows that are contiguous."""
    assert storage.device.type == "cpu" and storage.dtype == torch.uint8 and storage.is_contiguous()
    return storage.data_ptr(), storage.nbytes
