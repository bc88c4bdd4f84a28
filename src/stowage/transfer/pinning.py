"""Pinned memory: whether host memory is pinned is decided here and nowhere else, and nobody else pins (case B).

Pinned pages stay where they are, so a device copies from and to them by itself while the program runs. Where device and
host share one memory (GH200, GB200, Jetson, DGX Spark), pinning only takes memory from the device, so it is never done
there. ``STOWAGE_DISABLE_PIN_MEMORY=1`` switches it off everywhere, and so does vLLM's own
``VLLM_WEIGHT_OFFLOADING_DISABLE_PIN_MEMORY``. Memory that could not be pinned is used unpinned: slower, and
just as right.
"""

from __future__ import annotations

import ctypes
import logging
from typing import Any, Final, Protocol

import numpy as np
from numpy.typing import NDArray

from stowage.native.switches import is_on

__all__ = ["USES_HOST_PAGE_TABLES", "CudaDriver", "Pinned", "is_unified", "pin", "should_pin_memory"]

SWITCHES: Final = ("STOWAGE_DISABLE_PIN_MEMORY", "VLLM_WEIGHT_OFFLOADING_DISABLE_PIN_MEMORY")
PIECE_BYTES: Final = 1 << 30
"""At a time: a driver that runs out of what it may pin then keeps what it has, and a process stays killable."""
_INTEGRATED, USES_HOST_PAGE_TABLES = 18, 100
"""CU_DEVICE_ATTRIBUTE_INTEGRATED and _PAGEABLE_MEMORY_ACCESS_USES_HOST_PAGE_TABLES of the CUDA driver's interface."""
_PORTABLE_MAPPED: Final = 1 | 2
"""cudaHostRegisterPortable and -Mapped: pinned for every context of the process, and kernels may read it."""
logger = logging.getLogger("stowage.transfer")


class Driver(Protocol):
    """What is asked of a device's driver."""

    def attribute(self, number: int, device: int) -> int:
        """A device attribute, 0 where the driver does not know it."""
        ...

    def register(self, address: int, nbytes: int) -> int:
        """Pin; 0, or an error's number."""
        ...

    def unregister(self, address: int) -> int:
        """Unpin; 0, or an error's number."""
        ...


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
    """Host memory that was offered for pinning. ``whole``: all of it is pinned; only then may copies go on by
    themselves.
    """

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
        """Unpin. Before the memory is unmapped; doing it twice is the same as once."""
        while self._pieces:
            self._driver.unregister(self._pieces.pop())
        self.whole, self.nbytes, self._memory = False, 0, None


def pin(memory: NDArray[np.uint8], device: Any, driver: Driver | None = None) -> Pinned | None:
    """Pin ``memory`` for ``device``; ``None`` where that is not wanted. Asked anew for every memory: what was right for
    one that is gone need not be for the next.
    """
    if not should_pin_memory(device, driver):
        return None
    return Pinned(driver or CudaDriver(), memory)


class CudaDriver:
    """CUDA's own."""

    def attribute(self, number: int, device: int) -> int:
        try:
            library = ctypes.CDLL("libcuda.so.1")
        except OSError:
            return 0
        value = ctypes.c_int(0)
        if library.cuInit(0) or library.cuDeviceGetAttribute(ctypes.byref(value), number, device):
            return 0
        return value.value

    def device_address(self, address: int) -> int:
        """Where the device sees pinned memory at ``address``, 0 where it does not."""
        try:
            library = ctypes.CDLL("libcuda.so.1")
        except OSError:
            return 0
        there = ctypes.c_uint64(0)
        if library.cuMemHostGetDevicePointer_v2(ctypes.byref(there), ctypes.c_void_p(address), 0):
            return 0
        return there.value

    def register(self, address: int, nbytes: int) -> int:
        return int(_runtime().cudaHostRegister(address, nbytes, _PORTABLE_MAPPED))

    def unregister(self, address: int) -> int:
        return int(_runtime().cudaHostUnregister(address))


def _runtime() -> Any:
    """The CUDA runtime that torch has loaded."""
    import torch

    return torch.cuda.cudart()  # type: ignore[no-untyped-call]
