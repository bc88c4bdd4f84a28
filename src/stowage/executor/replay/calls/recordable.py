"""Which torch functions, by name, a recorded list of calls may contain: their results depend on nothing but their
arguments, and have the same shape for arguments of the same shape.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

READS = frozenset(
    "__get__ __len__ size dim stride numel nelement ndimension element_size is_contiguous is_floating_point is_complex "
    "storage_offset get_device _set_grad_enabled".split()
)
"""Functions that return a tensor's metadata, or matter for gradients only. ``__get__``: its properties."""

MAKERS = frozenset("arange ones zeros full eye tensor".split())
MAKERS_LIKE = frozenset(
    "ones_like zeros_like full_like empty_like new_zeros new_ones new_full new_empty "
    "repeat repeat_interleave one_hot".split()
)
"""Functions whose arguments, or those after the first, are the result's shape: these must be numbers, not tensors."""

ALLOWED = (
    MAKERS
    | MAKERS_LIKE
    | frozenset(
        """
    __get__ __getitem__ view reshape transpose permute contiguous unsqueeze squeeze expand expand_as view_as reshape_as
    flatten unflatten split chunk unbind narrow select movedim swapaxes t roll flip view_as_complex view_as_real
    cat concat concatenate stack hstack pad tril triu
    to type type_as float half bfloat16 bool long int clone detach
    add sub subtract mul multiply div divide true_divide floor_divide remainder neg negative reciprocal abs
    pow square sqrt rsqrt exp exp2 expm1 log log2 log1p sin cos tanh sigmoid erf floor ceil round polar
    clamp clamp_min clamp_max minimum maximum lerp addcmul diff outer
    __add__ __radd__ __sub__ __rsub__ __mul__ __rmul__ __truediv__ __rtruediv__ __rdiv__ __floordiv__ __rfloordiv__
    __mod__ __pow__ __rpow__ __neg__
    eq ne gt ge lt le greater greater_equal less less_equal logical_not logical_and logical_or
    __and__ __or__ __invert__ where masked_fill
    mean sum prod var amax amin max min cumsum norm histc topk sort argsort gather scatter index_select
    matmul mm bmm addmm baddbmm __matmul__ linear stacked_linear einsum conv1d _grouped_mm grouped_mm
    scaled_dot_product_attention
    softmax log_softmax silu gelu relu relu6 softplus leaky_relu hardtanh elu mish logsigmoid glu
    embedding layer_norm rms_norm group_norm dropout
    """.split()
    )
)
"""None of these changes its arguments, or has a result whose shape depends on their values."""

IN_PLACE = frozenset(
    "add_ sub_ mul_ div_ pow_ clamp_ exp_ neg_ sigmoid_ masked_fill_ copy_ zero_ fill_ scatter_ scatter_add_ "
    "index_add_ __setitem__ __iadd__ __isub__ __imul__ __itruediv__".split()
)
"""Functions that change their first argument, which must be made in the step."""


def has_tensor(value: Any) -> bool:
    """Whether the value is a tensor, or contains one."""
    return any(isinstance(part, Tensor) for part in flat([value]))


def flat(values: Any) -> Iterator[Any]:
    """All leaves of nested containers."""
    for value in values:
        if isinstance(value, (tuple, list)):
            yield from flat(value)
        elif isinstance(value, dict):
            yield from flat(value.values())
        elif isinstance(value, slice):
            yield from (value.start, value.stop, value.step)
        else:
            yield value


def is_mask(part: Any) -> bool:
    """Whether an index is a boolean mask."""
    return isinstance(part, bool) or (isinstance(part, Tensor) and part.dtype in (torch.bool, torch.uint8))
