"""A program: many calls of the kernels as one, and the memory that it works in.

Owns where results lie: in an ``Arena``, at the same addresses in each replay, so that calls of Python find there what
they need. ``writer`` makes programs.
"""

from __future__ import annotations

from array import array
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from stowage.native import extension as _kernel

__all__ = ["Arena", "Program"]


class Arena:
    """What programs of one model work in, one after the other, and tables that they look into.

    It is as large as the largest recorded step needs for what it computes, without its logits: less than that step
    takes when the model computes it.
    """

    def __init__(self) -> None:
        self._buffers = torch.empty(0, dtype=torch.uint8)
        self.tables: dict[Any, Tensor] = {}
        """All results of functions of single bfloat16 numbers, 128 KiB each."""

    def room(self, nbytes: int) -> Tensor:
        """At least so many bytes. It grows by doubling; who has been given less before keeps that."""
        if nbytes > self._buffers.numel():
            self._buffers = torch.empty(max(nbytes, 2 * self._buffers.numel()), dtype=torch.uint8)
        return self._buffers


@dataclass(frozen=True, slots=True, eq=False)
class Program:
    """Called with the tensors of which ``inputs`` has slots and strides; gives ``result`` (slot, shape, strides, type),
    if it has one. ``kept``: what has addresses that do not change.
    """

    code: array[int]
    addresses: array[int]
    kept: tuple[Tensor, ...]
    inputs: tuple[tuple[int, tuple[int, ...]], ...]
    result: tuple[int, tuple[int, ...], tuple[int, ...], torch.dtype] | None

    def __call__(self, *given: Tensor) -> Tensor | None:
        kept = []
        for (slot, strides), tensor in zip(self.inputs, given, strict=True):
            if tensor.stride() != strides:  # it was made in another way than when it was written down
                tensor = tensor.new_empty_strided(tensor.shape, strides).copy_(tensor)
                kept.append(tensor)
            self.addresses[slot] = tensor.data_ptr()
        out = None
        if self.result is not None:
            slot, shape, strides, dtype = self.result
            out = torch.empty_strided(shape, strides, dtype=dtype)
            self.addresses[slot] = out.data_ptr()
        _kernel.run_program(self.code, self.addresses, torch.get_num_threads())
        return out
