"""A parameter that is not in memory: only its shape, dtype and device can be read.

While a parameter is offloaded it is an `OffloadedParameter`, and reading its values raises `OffloadedError`. Code below
Python cannot be stopped (``torch.tensor(p)`` copies there): it reads NaN in every element (`nan_placeholder`), so a
wrong result is seen. A parameter has this class before its bytes are freed and until they are back, so that an
interrupt in between leaves nothing to read.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

import torch
from torch import Tensor, nn

from stowage.errors import ModelError, UnsupportedModelError

_HOST: Final = torch.device("cpu")
_NAME: Final = "stowage_name"
_FORM: Final = frozenset({
    "shape", "dtype", "device", "layout", "ndim", "requires_grad", "grad", "grad_fn", "is_leaf", "is_meta", "is_cuda",
    "is_cpu", "is_sparse", "is_quantized", "is_nested", "is_mkldnn", "is_xla", "is_mps", "is_xpu", "is_mtia",
    "is_sparse_csr", "itemsize", "nbytes", "names", "output_nr", "_version", "_backward_hooks",
})  # fmt: skip
"""Attributes that say nothing of its values."""
_FORM_CALLS: Final = frozenset({
    "dim", "size", "numel", "nelement", "ndimension", "element_size", "is_floating_point", "is_complex",
    "is_contiguous", "stride", "__len__", "is_inference", "is_signed", "get_device", "_is_view", "is_same_size",
    "__hash__", "type", "has_names", "requires_grad_",
})  # fmt: skip

_MOVES: Final[Mapping[str, torch.dtype | None]] = {
    "to": None,
    "cpu": None,
    "float": torch.float32,
    "half": torch.float16,
    "bfloat16": torch.bfloat16,
    "double": torch.float64,
}


class OffloadedError(ModelError):
    """A weight was read while it was not in memory: the one called ``weight``, where that is known."""

    weight = ""


class OffloadedParameter(nn.Parameter):
    """A parameter while it is offloaded."""

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Answer what asks for shape, dtype and the like; refuse the rest."""
        given = kwargs or {}
        name = getattr(func, "__name__", "")
        owner = getattr(func, "__self__", None)
        with torch._C.DisableTorchFunctionSubclass():
            attribute = getattr(owner, "__name__", "")
            if (name == "__get__" and attribute in _FORM) or (name == "__set__" and attribute == "requires_grad"):
                return func(*args, **given)
            if name in _FORM_CALLS and not (name == "type" and (len(args) > 1 or given)):
                return func(*args, **given)
            if name in _MOVES and _stays(args, given, name):
                return args[0]
        read = next((a for a in args if isinstance(a, cls)), None)
        error = OffloadedError(_offloaded_message(read))
        error.weight = getattr(read, "__dict__", {}).get(_NAME, "")
        raise error

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        with torch._C.DisableTorchFunctionSubclass():
            return f"Parameter(offloaded, shape={tuple(self.shape)}, dtype={self.dtype})"

    def __deepcopy__(self, memo: Any) -> Any:
        raise OffloadedError(_offloaded_message(self))

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise OffloadedError(_offloaded_message(self))


def offload(parameter: nn.Parameter, stand_in: Tensor, name: str = "") -> None:
    """Make ``parameter`` offloaded, called ``name`` in errors. ``stand_in``: from `nan_placeholder`. Idempotent."""
    parameter.__class__ = OffloadedParameter
    if name:
        parameter.__dict__[_NAME] = name
    set_data(parameter, stand_in)


def restore(parameter: nn.Parameter, values: Tensor) -> None:
    """Make ``parameter`` an ordinary one again, with ``values``. Idempotent."""
    set_data(parameter, values)
    parameter.__class__ = nn.Parameter


def nan_placeholder(shape: Sequence[int], dtype: torch.dtype, device: torch.device = _HOST) -> Tensor:
    """A tensor on ``device`` that takes no memory, for a parameter that is offloaded: NaN, or bytes of ones, which as
    scales of packed weights are NaN. Raises UnsupportedModelError for other whole numbers.
    """
    if dtype is torch.uint8 or dtype is torch.int32:  # bytes, or words of codes whose scales are offloaded too
        return torch.full((), 0xFF if dtype is torch.uint8 else -1, dtype=dtype, device=device).expand(tuple(shape))
    if not dtype.is_floating_point:
        raise UnsupportedModelError(
            f"a weight of type {dtype} has no value that marks it as absent, so it cannot be offloaded: keep its "
            "module resident."
        )
    # Not every type has NaN as a Python scalar fill (8-bit floats have): so it is made in float32 and cast.
    return torch.full((), float("nan"), device=_HOST).to(dtype).to(device).expand(tuple(shape))


def set_data(parameter: Tensor, values: Tensor) -> None:
    """Give ``parameter``, of any class, the memory of ``values``. Torch's function modes do not see it: a mode that
    records calls may refuse, and this is also how weights are put back after a forward.
    """
    with torch._C.DisableTorchFunction():
        parameter.data = values


def _stays(args: Sequence[Any], kwargs: Mapping[str, Any], name: str) -> bool:
    """Whether ``to`` would return the parameter itself."""
    parameter, dtype = args[0], _MOVES[name]
    if name == "cpu":
        return bool(parameter.device.type == "cpu")
    if dtype is not None:
        return bool(parameter.dtype is dtype)
    if any(isinstance(a, Tensor) for a in args[1:]) or kwargs.get("copy") or "other" in kwargs:
        return False
    try:
        device, dtype, _, memory_format = torch._C._nn._parse_to(*args[1:], **kwargs)
    except (TypeError, RuntimeError):
        return False
    same_device = device is None or torch.empty(0, device=device).device == parameter.device
    return same_device and dtype in (None, parameter.dtype) and memory_format is None


def _offloaded_message(parameter: Any) -> str:
    name = getattr(parameter, "__dict__", {}).get(_NAME, "a weight")
    return (
        f"{name} is offloaded: it is in memory only while its module computes. Read a copy of it with "
        f"model.stowage.read({name!r}), all of them one by one with model.stowage.tensors(), or write the model with "
        "model.save_pretrained(DIR). What changes weights, copies or differentiates a model needs one that was loaded "
        "without a budget."
    )
