"""The cost-aware policy with its inner loops in C: the same victims and the same state, at a tenth of the time.

    CostAware            arrays of numpy: slots, history, life tables       learning, checks
        └── lent as buffers ──> Kernel (native/policy)                       admit, insert, remove, victims

Measured for prompts of 256 chunks, no single operation of numpy's is what `cost.py` waits for: a batch takes some
two hundred of them, and each costs more to call than its few hundred elements cost to compute. So the loops are in C,
and all that is called rarely stays in Python. The kernel is built with the package where there is a C compiler. Where
it was not built, or `STOWAGE_PURE_PYTHON` is set, `cost.py` does the work; a test drives both and compares them.
"""

from __future__ import annotations

import numpy as np

from stowage.cache.policy.cost import CostAware
from stowage.cache.policy.hazard import Floats
from stowage.core.geometry import IntArray
from stowage.native import extension as _native
from stowage.native import is_wanted


def cost_aware(slots: int, capacity: int | None = None) -> CostAware:
    """The quicker of both, unless it is not there or not wanted."""
    if is_wanted():
        return NativeCostAware(slots, capacity)
    return CostAware(slots, capacity)


def quick_rate(hazard: Floats) -> Floats:
    """As `hazard.best_rate`, up to rounding."""
    rates = np.empty_like(hazard)
    _native.best_rates(hazard, rates)
    return rates


class NativeCostAware(CostAware):
    """`CostAware` with its loops in C: the order, the clock and the epoch are the kernel's, all else is the same."""

    __slots__ = ("_kernel",)

    def __init__(self, slots: int, capacity: int | None = None) -> None:
        super().__init__(slots, capacity, quick_rate)
        self._kernel = _native.Kernel(tuple(self.arrays()), slots, len(self._history.tables[0]), self.hazard.width)

    def admit(self, slots: IntArray, keys: list[bytes], parents: IntArray) -> None:
        """New chunks; those whose keys are remembered go on where they were."""
        self._kernel.admit(slots, keys, parents)

    def insert(self, slots: IntArray, used: bool = True) -> None:
        """Back in the order. Only a use changes what is known of a chunk."""
        self._kernel.insert(slots, used)

    def remove(self, slots: IntArray) -> None:
        """Out of the order; it may come back."""
        self._kernel.remove(slots)

    def victims(self, count: int) -> IntArray:
        """Least index first; of a prompt the last chunk first."""
        kernel = self._kernel
        if self._learning is not None or kernel.clock >= self._learn_at:
            self._clock = kernel.clock
            self.hazard.counted_until(kernel.epoch)
            self._learn()
        taken = np.empty(min(count, len(kernel)), np.int64)
        kernel.victims(taken)
        return taken

    def __len__(self) -> int:
        return len(self._kernel)

    def order(self) -> tuple[list[tuple[int, int, list[int]]], list[int], list[int]]:
        return sorted(self._kernel.runs()), self._kernel.held(), self._kernel.due()

    def _make_order(self, slots: int) -> None:
        """The kernel does."""

    def _check_order(self) -> None:
        """The runs of a class are in order of time, and none is empty."""
        runs = self._kernel.runs()
        assert all(slots for _, _, slots in runs), "a run is empty"
        times = [(of_class, time) for of_class, time, _ in runs]
        assert times == sorted(times), "runs are out of order"
        every = [slot for _, _, slots in runs for slot in slots] + self._kernel.held()
        assert len(set(every)) == len(every), "a slot is in the order twice"
