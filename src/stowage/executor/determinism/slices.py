"""A torch function mode that multiplies the rows of each piece of a prompt in the shape of a forward of its own, so
that several pieces share one forward with the bits of separate ones.

    rows of a forward   | piece 0 (256) | piece 1 (256) | piece 2 (256) |
    a linear layer        one product     one product     one product       of 256 rows each

A device's library selects its summation by the shape, so the shape must stay. Elementwise functions, sums along a row
and grouped products of experts do not depend on the number of rows beyond a few; ``trial`` checks that with the model
itself. A model with other products is not computed like this.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

from stowage.executor.determinism.row_invariance import PRODUCTS
from stowage.weights.quantized.codes import PackedMatrix

_PRODUCTS = {*PRODUCTS, torch.addmm, Tensor.addmm, torch.baddbmm, Tensor.baddbmm, torch.einsum}


class RowSlices(TorchFunctionMode):
    """The torch function mode that multiplies rows slice by slice. ``rows``: of one product, at most."""

    def __init__(self, rows: int) -> None:
        super().__init__()
        self._rows = rows
        self.others = False
        """Whether it has seen products that were not cut."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is F.linear:
            return self._linear(*args, **(kwargs or {}))
        if func in _PRODUCTS:
            last = args[-1]  # of an outer product nothing is summed
            self.others |= not isinstance(last, Tensor) or last.dim() < 2 or last.shape[-2] > 1
        return func(*args, **kwargs) if kwargs else func(*args)

    def _linear(self, input: Tensor, weight: Any, bias: Tensor | None = None) -> Tensor:
        if isinstance(weight, PackedMatrix) and not weight.transposed:  # whose values are then made once for all rows
            return weight.multiply(input, bias, self._linear)
        rows = input.reshape(-1, input.shape[-1])
        parts = torch.split(rows, self._rows)
        products = [F.linear(part, weight, bias) for part in parts]
        found = products[0] if len(products) == 1 else torch.cat(products)
        return found.view(*input.shape[:-1], -1)
