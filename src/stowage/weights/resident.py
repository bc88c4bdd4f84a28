"""Memory for weights that stay in a computer's own: huge pages, one tensor after the other.

A step reads every weight once, and in pages of 4 KiB the processor looks up more addresses than it can hide: decoding
took 10 to 20 % longer so. Huge pages are a matter of speed only: where the system has none, memory is as ever.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from itertools import chain
from typing import Any, Final

import torch
from torch import Tensor, nn

from stowage.native.memory import HUGE_BYTES, pages
from stowage.weights.away import plain, point
from stowage.weights.parameter_location import ALIGNED_BYTES, copy_of, phase_of

__all__ = ["ResidentMemory"]

_LEAST_BYTES: Final = 1 << 20


class ResidentMemory:
    """Memory is asked for in pieces, each as large as all before it, of which only what is written takes any. A piece
    is freed with the last tensor in it.

    Args:
        device: what the model computes on. If it has memory of its own, weights only pass through the computer's, and
            each gets a piece of torch's.
    """

    def __init__(self, device: torch.device | None = None) -> None:
        self._passes = device is not None and device.type != "cpu"
        self._piece = memoryview(bytearray())
        self._used = 0
        self._asked_bytes = 0

    def empty(self, shape: Sequence[int], dtype: torch.dtype, phase: int = 0) -> Tensor:
        """A contiguous tensor whose address has the remainder ``phase`` modulo 64, without values."""
        count = math.prod(shape)
        nbytes = count * dtype.itemsize
        if self._passes or not nbytes:
            return torch.empty(tuple(shape), dtype=dtype)
        begin = -(-self._used // ALIGNED_BYTES) * ALIGNED_BYTES + phase
        if begin + nbytes > len(self._piece):
            begin = phase
            self._piece = pages(max(begin + nbytes, self._asked_bytes, _LEAST_BYTES))
            self._asked_bytes += len(self._piece)
        self._used = begin + nbytes
        return torch.frombuffer(self._piece, dtype=dtype, count=count, offset=begin).view(tuple(shape))

    def copy(self, tensor: Tensor) -> Tensor:
        """A contiguous copy, at an address with the same remainder modulo 64."""
        values = tensor.detach().contiguous()
        phase = phase_of(values)
        if self._passes or phase % values.dtype.itemsize:
            return copy_of(values)
        return self.empty(values.shape, values.dtype, phase).copy_(values)

    def settle(self, model: Any) -> None:
        """Move the parameters of ``model`` here, one by one: each that has memory of the computer for itself. If all of
        them are smaller than a huge page, they stay where they are.
        """
        if self._passes:
            return
        found = {id(parameter): parameter for parameter in model.parameters() if _is_movable(parameter)}
        shown = [one for one in chain(found.values(), model.buffers()) if one.device.type == "cpu"]
        shared = Counter(one.untyped_storage().data_ptr() for one in shown)
        alone = [one for one in found.values() if shared[one.untyped_storage().data_ptr()] == 1]
        if sum(one.nbytes for one in alone) >= HUGE_BYTES:
            for parameter in alone:
                point(parameter, self.copy(plain(parameter)))


def _is_movable(parameter: nn.Parameter) -> bool:
    plainly = type(parameter) is nn.Parameter and type(plain(parameter)) is Tensor
    return plainly and parameter.device.type == "cpu" and parameter.is_contiguous()
