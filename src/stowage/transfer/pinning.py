"""Pinned (page-locked) host memory: the only module that decides whether memory is pinned, and pins it (case B).

A device copies from and to pinned pages by itself while the program runs. Where device and host share one memory
(GH200, GB200, Jetson, DGX Spark), pinning only takes memory from the device, so it is never done there.
``STOWAGE_DISABLE_PIN_MEMORY=1`` switches it off everywhere, and so does vLLM's own
``VLLM_WEIGHT_OFFLOADING_DISABLE_PIN_MEMORY``. Memory that cannot be pinned is used unpinned: slower, not less correct.
"""

from __future__ import annotations

import ctypes
import logging
from typing import Any, Final, Protocol

import numpy as np
from numpy.typing import NDArray

from stowage.native.switches import is_on

SWITCHES: Final = ("STOWAGE_DISABLE_PIN_MEMORY", "VLLM_WEIGHT_OFFLOADING_DISABLE_PIN_MEMORY")
PIECE_BYTES: Final = 1 << 30
"""What one call of the driver pins. Between the calls a signal can end the process."""
_INTEGRATED, USES_HOST_PAGE_TABLES = 18, 100
"""CU_DEVICE_ATTRIBUTE_INTEGRATED and _PAGEABLE_MEMORY_ACCESS_USES_HOST_PAGE_TABLES of the CUDA driver's interface."""
_PORTABLE_MAPPED: Final = 1 | 2
"""cudaHostRegisterPortable and -Mapped: pinned for every context of the process, and kernels may read it."""
logger = logging.getLogger("stowage.transfer")


class Driver(Protocol):
    """What is asked of a device's driver."""

    def attribute(self, number: int, device: int) -> int:
        """A device attribute, 0 where the driver does not know it."""

    def register(self, address: int, nbytes: int) -> int:
        """Pin; 0, or an error's number."""

    def unregister(self, address: int) -> int:
        """Unpin; 0, or an error's number."""


def should_pin_memory(device: Any, driver: Driver | None = None) -> bool:
    """Whether host memory that ``device`` (a ``torch.device``) copies from or to is to be pinned."""
    if device.type != "cuda" or is_on(*SWITCHES):
        return False
    return not is_unified(device, driver)


def is_unified(device: Any, driver: Driver | None = None) -> bool:
    """Whether ``device`` computes from the host's own memory, as its properties say."""
    driver = driver or CudaDriver()
    index = device.index or 0
    return any(driver.attribute(number, index) for number in (_INTEGRATED, USES_HOST_PAGE_TABLES))


class Pinned:
    """Host memory that is pinned as a whole, or not at all. ``whole``: it is pinned, so copies may be asynchronous."""

    def __init__(self, driver: Driver, memory: NDArray[np.uint8]) -> None:
        self._driver = driver
        self._memory: NDArray[np.uint8] | None = memory
        self._pieces: list[int] = []
        self.nbytes = 0
        base = memory.ctypes.data
        for begin in range(0, memory.nbytes, PIECE_BYTES):
            size = min(PIECE_BYTES, memory.nbytes - begin)
            error = driver.register(base + begin, size)
            if error:
                logger.warning(
                    "only %d of %d bytes of host memory could be pinned (error %d): copies wait for each other. "
                    "Raise the limit of locked memory (ulimit -l), or take a smaller --host-memory.",
                    self.nbytes,
                    memory.nbytes,
                    error,
                )
                self.close()
                break
            self._pieces.append(base + begin)
            self.nbytes += size
        self.whole = self.nbytes == memory.nbytes > 0

    def close(self) -> None:
        """Unpin, before the memory is unmapped. May be called twice."""
        while self._pieces:
            self._driver.unregister(self._pieces.pop())
        self.whole, self.nbytes, self._memory = False, 0, None


def pin(memory: NDArray[np.uint8], device: Any, driver: Driver | None = None) -> Pinned | None:
    """Pin ``memory`` for ``device``; ``None`` where that is not wanted."""
    if not should_pin_memory(device, driver):
        return None
    return Pinned(driver or CudaDriver(), memory)


class CudaDriver:
    """The CUDA driver and runtime."""

    def attribute(self, number: int, device: int) -> int:
        library, value = _driver(), ctypes.c_int(0)
        if library is None or library.cuInit(0):
            return 0
        return 0 if library.cuDeviceGetAttribute(ctypes.byref(value), number, device) else value.value

    def device_address(self, address: int) -> int:
        """The device's address of pinned memory at ``address``, 0 where the device does not map it."""
        library, there = _driver(), ctypes.c_uint64(0)
        if library is None or library.cuMemHostGetDevicePointer_v2(ctypes.byref(there), ctypes.c_void_p(address), 0):
            return 0
        return there.value

    def register(self, address: int, nbytes: int) -> int:
        return int(_runtime().cudaHostRegister(address, nbytes, _PORTABLE_MAPPED))

    def unregister(self, address: int) -> int:
        return int(_runtime().cudaHostUnregister(address))


def _driver() -> Any:
    """The CUDA driver's library; ``None`` where there is none."""
    try:
        return ctypes.CDLL("libcuda.so.1")
    except OSError:
        return None


def _runtime() -> Any:
    """The CUDA runtime that torch has loaded."""
    import torch

    return torch.cuda.cudart()  # type: ignore[no-untyped-call]
