"""A program: many operations of the kernels in one call, and the memory that it works in.

Results lie in an ``Arena``, at the same addresses in each replay, where Python calls find them. ``writer`` makes
programs.
"""

from __future__ import annotations

from array import array
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from stowage.native import extension as _kernel


class Arena:
    """The working memory of one model's programs, which run one after the other, and their look-up tables.

    It is as large as the largest recorded step needs for its results, without the logits: less than the model's own
    code takes for that step.
    """

    def __init__(self) -> None:
        self._buffers = torch.empty(0, dtype=torch.uint8)
        self.tables: dict[Any, Tensor] = {}
        """Tables of elementwise functions: the results for all bfloat16 numbers, 128 KiB each."""

    def room(self, nbytes: int) -> Tensor:
        """At least ``nbytes`` bytes. The memory grows by doubling; what was handed out before stays valid."""
        if nbytes > self._buffers.numel():
            self._buffers = torch.empty(max(nbytes, 2 * self._buffers.numel()), dtype=torch.uint8)
        return self._buffers


@dataclass(frozen=True, slots=True, eq=False)
class Program:
    """Called with the tensors of which ``inputs`` has slots and strides; returns ``result`` (slot, shape, strides,
    type), if it has one. ``kept``: keeps the tensors alive whose addresses are in the program.
    """

    code: array[int]
    addresses: array[int]
    kept: tuple[Tensor, ...]
    inputs: tuple[tuple[int, tuple[int, ...]], ...]
    result: tuple[int, tuple[int, ...], tuple[int, ...], torch.dtype] | None

    def __call__(self, *given: Tensor) -> Tensor | None:
        kept = []
        for (slot, strides), tensor in zip(self.inputs, given, strict=True):
            if tensor.stride() != strides:  # laid out in another way than in the trace
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
