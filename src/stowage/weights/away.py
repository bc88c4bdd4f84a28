"""A parameter whose bytes are somewhere else: it has a shape, a type and a device, and whoever reads it is told.

While a parameter is away it is an `AwayParameter`, and anything but a look at its form raises `AwayError`, as it does
for torch's own parameters without values. Below Python, where nothing can be told (``torch.tensor(p)`` copies there),
every element of it reads as NaN (`absent`): what computes with it by mistake is wrong for all to see, and never a
little. A parameter is of this class
before its bytes go, and until they have come, so an interrupt between leaves nothing to read.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

import torch
from torch import Tensor, nn

from stowage.errors import ModelError, UnsupportedModelError

__all__ = ["AwayError", "AwayParameter", "absent", "come", "go", "plain", "point"]

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


class AwayError(ModelError):
    """A weight was read while it was not in memory: the one called ``weight``, where that is known."""

    weight = ""


class AwayParameter(nn.Parameter):
    """A parameter while it is away."""

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """What asks for the form of a parameter gets it."""
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
        error = AwayError(_told(read))
        error.weight = getattr(read, "__dict__", {}).get(_NAME, "")
        raise error

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        with torch._C.DisableTorchFunctionSubclass():
            return f"Parameter(away, shape={tuple(self.shape)}, dtype={self.dtype})"

    def __deepcopy__(self, memo: Any) -> Any:
        raise AwayError(_told(self))

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise AwayError(_told(self))


def go(parameter: nn.Parameter, stand_in: Tensor, name: str = "") -> None:
    """``parameter`` is away from now on, and called ``name``; ``stand_in`` is what `absent` made. May be done twice."""
    parameter.__class__ = AwayParameter
    if name:
        parameter.__dict__[_NAME] = name
    point(parameter, stand_in)


def come(parameter: nn.Parameter, values: Tensor) -> None:
    """``parameter`` shows ``values``. May be done twice."""
    point(parameter, values)
    parameter.__class__ = nn.Parameter


def plain(parameter: nn.Parameter) -> Tensor:
    """What it shows at the moment, away or not."""
    with torch._C.DisableTorchFunctionSubclass():
        return parameter.data


def absent(shape: Sequence[int], dtype: torch.dtype, device: torch.device = _HOST) -> Tensor:
    """A tensor on ``device`` that takes no memory, for a parameter that is away: NaN, or bytes of ones, which as scales
    of packed weights are NaN. Raises UnsupportedModelError for other whole numbers.
    """
    if dtype is torch.uint8 or dtype is torch.int32:  # bytes, or words of codes whose scales are away too
        return torch.full((), 0xFF if dtype is torch.uint8 else -1, dtype=dtype, device=device).expand(tuple(shape))
    if not dtype.is_floating_point:
        raise UnsupportedModelError(
            f"a weight of type {dtype} has no value that says it is away, so it cannot be offloaded: keep its module "
            "resident."
        )
    # Not every type has NaN as a Python scalar fill (8-bit floats have): so it is made in float32 and cast.
    return torch.full((), float("nan"), device=_HOST).to(dtype).to(device).expand(tuple(shape))


def point(parameter: Tensor, values: Tensor) -> None:
    """``parameter`` has the memory of ``values``, of whatever class it is. Modes of torch do not see it: one that
    writes down what a model calls may refuse, and this also puts back what a forward left behind.
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


def _told(parameter: Any) -> str:
    name = getattr(parameter, "__dict__", {}).get(_NAME, "a weight")
    return (
        f"{name} is away: it is in memory only while its module computes. Read a copy of it with "
        f"model.stowage.read({name!r}), all of them one by one with model.stowage.tensors(), or write the model with "
        "model.save_pretrained(DIR). What changes weights, copies or differentiates a model needs one that was loaded "
        "without a budget."
    )
