"""Row invariance: a torch function mode in which the rows of a forward do not depend on one another.

    linear layers, stacked experts    -> the kernels (``kernels``), which sum every row independently; several layers
                                         with the same input at once (``fused.linear``); many rows only if exact
    embeddings in published formats   -> the kernels
    elementwise functions             -> (exact only) padded to whole vectors for every thread
    other matrix products             -> (exact only) with rows padded to the tile of matrix kernels

torch computes silu, exp and the like with vector instructions, and the remainder at the end of each thread's share one
by one, with other rounding: an element's index decides its last bit. So tensors are padded to whole vectors for every
thread. MKL rounds the rows of small matrices differently unless their number is a multiple of 4 or more than 11 (torch
2.13, float32). Everything else that Transformers' models do to a row (norms, softmax, sums along the row) did not
depend on other rows when observed; ``trial`` checks that with the model itself.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn import Parameter
from torch.overrides import TorchFunctionMode

from stowage.executor import kernels
from stowage.executor.fused import experts
from stowage.executor.fused.linear import FusedLinear
from stowage.weights.quantized.blocks import BlockMatrix, BlockRows, joined
from stowage.weights.quantized.codes import PackedMatrix
from stowage.weights.quantized.stacks import BlockStack, Run, multiply_experts, one_by_one, stacked_linear

_GRAIN = 32768
"""Elements that torch gives a thread at least (``at::internal::GRAIN_SIZE``)."""
_VECTORS = 256
"""A multiple of every instruction set's step: four vectors of 512 bits, with twice as many elements of bfloat16."""

_NAMES = (
    "exp exp2 expm1 log log2 log10 log1p sigmoid tanh sinh cosh sin cos tan erf erfc erfinv rsqrt sqrt softplus silu "
    "gelu mish elu selu celu logsigmoid hardswish softsign reciprocal pow square"
).split()
PRODUCTS = (torch.matmul, torch.bmm, torch.mm, Tensor.matmul, Tensor.bmm, Tensor.mm, Tensor.__matmul__)
_ROWS = 16
_MARK = "is_elementwise"


class RowInvariance(TorchFunctionMode):
    """The torch function mode in which rows do not depend on one another. ``exact``: elementwise functions and other
    products, too. ``int8``: activations are quantized to 8 bits where weights are in an integer format.
    """

    def __init__(self, *, linear: bool, exact: bool, int8: bool = False) -> None:
        super().__init__()
        self.exact, self._int8 = exact, int8
        self._special: dict[Any, Callable[..., Any]] = {}
        self._fused = FusedLinear(self.matrix)
        multiply = kernels.linear if exact else kernels.product
        if linear:
            self._special[F.linear] = self._linear
            self._special[F.embedding] = _embedding
            self._special[stacked_linear] = self.stacked
            for grouped in (getattr(F, "grouped_mm", None), getattr(torch, "_grouped_mm", None)):
                if grouped is not None:
                    self._special[grouped] = partial(_grouped, exact, multiply)
        if exact:
            self._special |= {function: _padded_elementwise(function) for function in _functions()}
            self._special |= {function: _with_padded_rows(function, int8) for function in PRODUCTS}
            self._special |= {function: _times(function) for function in (torch.mul, Tensor.mul, Tensor.__mul__)}
            self._special |= {torch.polar: _polar, torch.addmm: _addmm, Tensor.addmm: _addmm}
        if linear:
            self._special[torch.bmm] = _of_experts(self._special.get(torch.bmm, torch.bmm), multiply, int8)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        special = self._special.get(func)
        if special is not None:
            return special(*args, **(kwargs or {}))
        return func(*args, **kwargs) if kwargs else func(*args)

    def instead_of(self, function: Any) -> Callable[..., Any]:
        """The replacement of ``function`` in this mode, or ``function`` itself."""
        if function is F.linear and F.linear in self._special:
            return self.alone
        found: Callable[..., Any] = self._special.get(function, function)
        return found

    def fused(self, x: Tensor, weight: Any) -> tuple[Tensor, ...]:
        """The weights of the linear layers that are fused with that of ``weight``, the first of them; empty if it is
        not fused or not computed by the kernels.
        """
        ours = F.linear in self._special and type(weight) is Parameter and kernels.supports(x, weight)
        return self._fused.fused(x, weight) if ours else ()

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)  # type: ignore[no-untyped-call]
        self._fused.end()

    def _linear(self, input: Tensor, weight: Any, bias: Tensor | None = None) -> Tensor:
        if bias is None and FusedLinear.takes(weight) and (matrix := self.matrix(input, weight)) is not None:
            return self._fused.linear(input, weight, matrix)
        return self.alone(input, weight, bias)

    def matrix(self, input: Tensor, weight: Any) -> kernels.Matrix | None:
        """``weight`` as the kernels read it, if ``alone`` is a single call of the kernels, which can be replayed."""
        stays = type(weight) in (Parameter, PackedMatrix, BlockMatrix)
        return _matrix(input, weight, self.exact, self._int8) if stays else None

    def alone(self, input: Tensor, weight: Any, bias: Tensor | None = None) -> Tensor:
        """A linear layer without fusion."""
        return _linear(input, weight, bias, exact=self.exact, int8=self._int8)

    def stacked(self, x: Tensor, module: Any, own: str, chosen: Tensor) -> Tensor:
        """``stacked_linear``: by the kernels, or one expert after the other."""
        return stacked_linear(x, module, own, chosen, self._each_run)

    def stacks(self, x: Tensor, module: Any, own: str) -> list[experts.Stack] | None:
        """The stack ``own`` of experts ``module`` as the kernels read it, if ``stacked`` uses them."""
        stack = getattr(module, own)
        return experts.of_stack(x, stack, self._int8) if isinstance(stack, BlockStack) else None

    def _each_run(self, x: Tensor, module: Any, own: str, runs: Iterable[Run]) -> Tensor:
        stacks = self.stacks(x, module, own)
        if stacks is None:
            return one_by_one(x, module, own, runs, self.alone)
        outs = experts.stacked(x, stacks, runs)
        return outs[0] if len(outs) == 1 else joined(outs, -1, getattr(module, own).how.interleaved)


def mode_of(model: Any, *, exact: bool, int8: bool = False) -> RowInvariance | None:
    """The mode that computes ``model`` with our kernels where they are faster, or (``exact``) everywhere; ``None``:
    torch computes everything. ``int8``: see ``RowInvariance``.
    """
    linear = kernels.wanted(model.device, model.dtype)
    return RowInvariance(linear=linear, exact=exact, int8=int8) if linear else None


def _functions() -> list[Any]:
    found = []
    for name in _NAMES:
        for home in (torch, F, torch.special, Tensor):
            for spelled in (name, name + "_"):
                function = getattr(home, spelled, None)
                if callable(function):
                    found.append(function)
    return [*found, Tensor.__pow__]


def _matrix(input: Tensor, weight: Any, exact: bool, int8: bool) -> kernels.Matrix | None:
    """``weight`` as the kernels read it, if they are used for it: unless ``exact``, only where they are faster."""
    if int8 and isinstance(weight, PackedMatrix) and (found := kernels.int8_product(input, weight)) is not None:
        return found
    if isinstance(weight, BlockMatrix):
        return kernels.of_blocks(weight) if kernels.supports_blocks(input, weight) else None
    if not isinstance(weight, PackedMatrix):
        ours = exact or kernels.has_few_rows(input)
        return kernels.of_plain(weight) if ours and kernels.supports(input, weight) else None
    if not (exact or _quicker_packed(input)) or input.dtype not in kernels.DTYPES:
        return None
    if (parts := weight.int8_parts()) is not None:
        return kernels.of_plain(*parts)
    parts = weight.int4_parts()
    return None if parts is None else kernels.of_int4(input.dtype, *parts, weight.form.group)


def _embedding(input: Tensor, weight: Any, *rest: Any, **options: Any) -> Tensor:
    if kernels.supports_lookup(input, weight):
        return kernels.look_up(input, weight)
    return F.embedding(input, weight, *rest, **options)


def _quicker_packed(input: Tensor) -> bool:
    """Whether the kernels multiply packed weights faster than torch."""
    return kernels.has_few_rows(input) or not kernels.torch_is_faster(input.dtype)


def _linear(
    input: Tensor, weight: Any, bias: Tensor | None = None, *, exact: bool = True, int8: bool = False
) -> Tensor:
    if isinstance(weight, BlockRows):
        out = weight.joined([_linear(input, matrix, int8=int8) for matrix in weight.matrices])
        return out if bias is None else out.add_(bias)
    matrix = _matrix(input, weight, exact, int8)
    if matrix is not None:
        return kernels.linear_of(input, matrix, bias)
    if not isinstance(weight, PackedMatrix):
        return F.linear(input, weight, bias)
    # while this runs the mode is off: for its tiles the kernels are asked by name
    ours = exact or isinstance(weight, BlockMatrix) or _quicker_packed(input)
    return weight.multiply(input, bias, _linear if ours else None)


def _with_padded_rows(function: Any, int8: bool = False) -> Callable[..., Any]:
    """A product with rows and columns padded to a multiple of the tile of matrix kernels; tokens may be either."""

    def apply(a: Tensor, b: Tensor, **kwargs: Any) -> Any:
        if isinstance(b, BlockMatrix | BlockRows):  # experts whose inputs come first
            return _linear(a, b.as_linear_weight(), int8=int8)
        if a.dim() < 2 or b.dim() < 2:
            return function(a, b, **kwargs)
        rows, columns = -a.shape[-2] % _ROWS, -b.shape[-1] % _ROWS
        if not rows and not columns:
            return function(a, b, **kwargs)
        a_filled = F.pad(a, (0, 0, 0, rows)) if rows else a
        b_filled = F.pad(b, (0, columns)) if columns else b
        return function(a_filled, b_filled, **kwargs)[..., : a.shape[-2], : b.shape[-1]].contiguous()

    return apply


_pad_rows = _with_padded_rows(torch.mm)


def _addmm(bias: Tensor, a: Tensor, b: Tensor, *, beta: float = 1, alpha: float = 1) -> Tensor:
    out: Tensor = bias * beta + _pad_rows(a, b) * alpha
    return out


def _grouped(
    exact: bool,
    multiply: Callable[..., Tensor],
    input: Tensor,
    weight: Tensor,
    *,
    offs: Tensor | None = None,
    bias: Any = None,
    out_dtype: Any = None,
) -> Tensor:
    """``input [rows, in]``, sorted by expert, times ``weight [experts, in, out]``; ``offs``: ends of experts' rows."""
    transposed = weight.transpose(-2, -1)
    ours = offs is not None and bias is None and out_dtype is None and kernels.supports(input, transposed[0])
    if not ours and not exact:
        return torch._grouped_mm(input, weight, offs=offs, bias=bias, out_dtype=out_dtype)
    assert offs is not None and bias is None and out_dtype is None, "experts are called otherwise than they were"
    out = input.new_zeros((input.shape[0], weight.shape[2]))
    begin = 0
    for expert, end in enumerate(offs.tolist()):
        if end > begin:
            rows = input[begin:end]
            out[begin:end] = multiply(rows, transposed[expert]) if ours else _pad_rows(rows, weight[expert])
            begin = end
    return out


def _of_experts(function: Any, multiply: Callable[..., Tensor], int8: bool) -> Callable[..., Any]:
    """A batched product: by the kernels if ``b`` is a stack of experts, each of which gets all tokens."""

    def apply(a: Tensor, b: Any, **kwargs: Any) -> Any:
        if isinstance(b, BlockStack):
            return b.multiply_each(a, partial(_linear, int8=int8))
        if type(b) is Parameter and not kwargs and kernels.supports(a[0], b[0].t()):
            return multiply_experts(a, b.shape[2], lambda rows, expert: multiply(rows, b[expert].t()))
        return function(a, b, **kwargs)

    return apply


def _padded_elementwise(function: Any) -> Callable[..., Any]:
    def apply(*args: Any, **kwargs: Any) -> Any:
        x = args[0] if args else None
        more = [*args[1:], *kwargs.values()]
        if not isinstance(x, Tensor) or not x.dtype.is_floating_point or any(isinstance(m, Tensor) for m in more):
            return function(*args, **kwargs)
        count = x.numel()
        padded = _padded(count)
        if padded == count and x.is_contiguous():
            return function(*args, **kwargs)
        flat = x.new_ones(padded)
        flat[:count] = x.reshape(-1)
        out = function(flat, *args[1:], **kwargs)[:count].view(x.shape)
        return x.copy_(out) if function.__name__.endswith("_") and not function.__name__.endswith("__") else out

    apply.__dict__[_MARK] = True
    return apply


def is_elementwise(function: Any) -> bool:
    """Whether the mode computes it as an elementwise function, so that results do not depend on other elements."""
    return _MARK in getattr(function, "__dict__", ())


def _times(function: Any) -> Callable[..., Any]:
    """Complex products, real and imaginary part separately: torch has several code paths, which round differently."""
    real = torch.mul

    def apply(a: Any, b: Any, **kwargs: Any) -> Any:
        if not (isinstance(a, Tensor) and isinstance(b, Tensor) and a.is_complex() and b.is_complex()) or kwargs:
            return function(a, b, **kwargs)
        return torch.complex(real(a.real, b.real) - real(a.imag, b.imag), real(a.real, b.imag) + real(a.imag, b.real))

    return apply


_cos, _sin = _padded_elementwise(torch.cos), _padded_elementwise(torch.sin)


def _polar(size: Tensor, angle: Tensor) -> Tensor:
    return torch.complex(size * _cos(angle), size * _sin(angle))


def _padded(count: int) -> int:
    """``count`` rounded up so that every torch thread gets whole vectors."""
    while True:
        threads = max(1, min(torch.get_num_threads(), -(-count // _GRAIN)))
        whole = -(-count // (threads * _VECTORS)) * threads * _VECTORS
        if whole == count:
            return count
        count = whole
