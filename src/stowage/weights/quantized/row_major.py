"""Rearranges matrices of GPTQ and AWQ that stay in a CPU's memory: their codes lie by inputs, and the quickest kernels
read a matrix output by output.

    gptq  codes (inputs / 8, outputs)         int4  codes  (outputs, inputs / 8)
    awq   codes (inputs, outputs / 8)    ->         scales (outputs, groups)
          scales, zeros (groups, ...)               zeros  (outputs / 8, groups)

That is compressed-tensors' layout: the same weights to the bit, as many bytes, in the same memory. It is done once, in
three times the time of a copy; the other way, each step rearranges all that it multiplies with. Weights that are read
from a disk at every step, or stay in mapped files, are multiplied as they lie.
"""

from __future__ import annotations

from collections.abc import Mapping
from concurrent.futures import Executor, ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from typing import TypeGuard

import torch
from torch import Tensor, nn

from stowage.native import extension, is_wanted
from stowage.weights.quantized.blocks import BlockLinear, BlockMatrix
from stowage.weights.quantized.formats import OUTPUTS_TOGETHER, Spec, zeros_by_outputs
from stowage.weights.quantized.stacks import put_other_stacks, stackings

_WORDS_FEW = 1 << 14
"""Fewer are not worth another thread."""


def rearrange(model: nn.Module) -> None:
    """Lay out, row by row, those matrices of ``model`` whose bytes are in memory. Modules that share one still do. It
    takes as much memory as the largest matrix. Nothing is done without compiled kernels: torch unpacks one layout as
    quickly as the other.
    """
    if not is_wanted():
        return
    with ThreadPoolExecutor(torch.get_num_threads(), "stowage-row-major") as pool:
        work = _Work(pool)
        for module in model.modules():
            if isinstance(module, BlockLinear):
                work.linear(module)
            else:
                work.stacks(module)


def is_by_inputs(spec: object) -> TypeGuard[Spec]:
    """Whether a matrix lies by inputs, and may be rearranged."""
    return isinstance(spec, Spec) and spec.name in ("gptq", "awq")


def by_outputs(spec: Spec) -> Spec:
    """What a matrix of ``spec``, which lies by inputs, becomes."""
    return replace(spec, name="int4", zeros=True)


@dataclass(frozen=True, slots=True)
class _Work:
    pool: Executor
    done: dict[int, tuple[Tensor, dict[str, Tensor]]] = field(default_factory=dict)
    """By the ``id`` of the codes: these, and what they have become."""

    def linear(self, layer: BlockLinear) -> None:
        spec, matrix = layer.spec, layer.matrix
        if is_by_inputs(spec) and isinstance(matrix, BlockMatrix) and matrix.is_here:
            layer.become(by_outputs(spec), self._once(spec, matrix.parts))

    def stacks(self, module: nn.Module) -> None:
        made: dict[str, tuple[Spec, list[dict[str, Tensor]]]] = {}
        for own, how in stackings(module).items():
            spec, stack = how.spec, getattr(module, own)
            if is_by_inputs(spec) and stack.is_here:
                made[own] = by_outputs(spec), [self._once(spec, parts) for parts in stack.pieces]
        if made:
            put_other_stacks(module, made)

    def _once(self, spec: Spec, parts: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """``parts``, which may have a first dimension of experts, rearranged where they are."""
        codes = parts["codes"]
        if id(codes) not in self.done:
            each = [parts] if codes.dim() == 2 else [{p: v[e] for p, v in parts.items()} for e in range(len(codes))]
            for one in each:
                self._matrix(spec, {part: values.detach() for part, values in one.items()})
            before = codes.shape[:-2]
            made = {
                part: parts[part].detach().view(*before, *shape)
                for part, (shape, _) in by_outputs(spec).tensors().items()
            }
            self.done[id(codes)] = codes, made
        return self.done[id(codes)][1]

    def _matrix(self, spec: Spec, parts: Mapping[str, Tensor]) -> None:
        codes = parts["codes"]
        words = torch.empty_like(codes)

        def lay(begin: int, end: int) -> None:
            sizes = spec.inputs, spec.outputs, spec.name == "awq", begin, end
            extension.words_by_outputs(codes.data_ptr(), words.data_ptr(), *sizes)

        share = -(-spec.outputs // torch.get_num_threads() // OUTPUTS_TOGETHER) * OUTPUTS_TOGETHER
        if codes.numel() < _WORDS_FEW:
            share = spec.outputs
        begins = range(0, spec.outputs, share)
        list(self.pool.map(lay, begins, [min(begin + share, spec.outputs) for begin in begins]))
        codes.view(-1).copy_(words.view(-1))
        zeros, scales = zeros_by_outputs(spec, parts["zeros"]), parts["scales"].t().contiguous()
        parts["zeros"].view(-1).copy_(zeros.view(-1))
        parts["scales"].view(-1).copy_(scales.view(-1))
