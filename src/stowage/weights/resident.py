"""Memory for weights that are copied into a computer's own, and stay: huge pages, one tensor after the other.

A step reads every weight once, and in pages of 4 KiB the processor looks up more addresses than it can hide: decoding
took 10 to 20 % longer so. Huge pages are a matter of speed only: where the system has none, memory is as ever. What
Transformers shows of a mapped file stays there: other processes have the same memory, and nothing is copied at start.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Final

import torch
from torch import Tensor

from stowage.core.geometry import ALIGNMENT_BYTES, round_up
from stowage.native.memory import pages
from stowage.weights.parameter_location import copy_of, phase_of

_LEAST_BYTES: Final = 1 << 20


class ResidentMemory:
    """Memory is asked for in pieces, each as large as all before it, of which only what is written takes any. A piece
    is freed with the last tensor in it. Where the ``device`` that the model computes on has memory of its own, weights
    only pass through the computer's, and each gets a piece of torch's.
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
        begin = round_up(self._used, ALIGNMENT_BYTES) + phase
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
