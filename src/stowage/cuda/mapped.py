"""Pinned host memory as a tensor of the device: kernels read it over the link, and nothing is copied (case B).

The driver gives the device's address for both ends of the memory, and torch makes a tensor there that does not own it.
The memory's owner unpins it when no such tensor is used any more. Where a device reads pageable memory through the
host's own page tables, as its attributes say, the host's address is the device's.
"""

from __future__ import annotations

from typing import Any, Protocol

import torch
from torch import Tensor

from stowage.transfer.pinning import USES_HOST_PAGE_TABLES, CudaDriver


class Addresses(Protocol):
    """What is asked of a device's driver."""

    def attribute(self, number: int, device: int) -> int:
        """A device attribute, 0 where the driver does not know it."""

    def device_address(self, address: int) -> int:
        """Where the device sees pinned host memory, 0 where it does not."""


def mapped(memory: Tensor, device: torch.device, driver: Addresses | None = None) -> Tensor:
    """``memory`` (uint8, one dimension, on the host) as a tensor on ``device``. Raises RuntimeError if it cannot."""
    driver = driver or CudaDriver()
    first = memory.data_ptr()
    empty = torch.empty(0, dtype=torch.uint8, device=device)  # the driver has a context of this thread from here on
    if not driver.attribute(USES_HOST_PAGE_TABLES, device.index or 0):
        there = driver.device_address(first)
        if not there:
            raise RuntimeError("the memory is not pinned")
        if driver.device_address(first + memory.numel() - 1) != there + memory.numel() - 1:
            raise RuntimeError("the device does not see it in one piece")
        first = there
    make: Any = torch._C._construct_storage_from_data_pointer
    return empty.set_(make(first, device, memory.numel()), 0, (memory.numel(),), (1,))
