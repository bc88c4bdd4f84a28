"""Fused RMS norms: one kernel call each, where a trial finds that it computes the same.

A norm takes torch seven functions and a tenth of a millisecond for a token; a model has two to six of them per layer.

Owns which modules these are, and their ``forward`` while an engine is open: outside of an engine's forward they compute
as they did. A module is a candidate by its class's name and its one weight. It is taken when its own ``forward`` gives
what one of the kernel's ways gives, for random weights and inputs of every size: the same but for the order of the sum
of squares, so but for rare last bits.

Gated norms that mix sequences up are kept from it, with kernels or without: Falcon-H1's drops the dimension of tokens
where there is one (up to Transformers 5.17), and what comes next is broadcast over the batch.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Sequence
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from stowage.executor import kernels
from stowage.executor.batch import current
from stowage.executor.replay.calls.recording import one_call
from stowage.weights.offloaded_parameter import OffloadedParameter

_WAYS = ((0.0, True), (0.0, False), (1.0, False))
"""What is added to weights, and whether numbers are rounded before they are multiplied: Llama's, a third, Gemma's."""
_EPS = ("variance_epsilon", "eps")
_users: WeakKeyDictionary[Any, int] = WeakKeyDictionary()


def install(model: nn.Module, *, fused: bool) -> None:
    """``fused``: also those that the kernels compute. Several engines may share one model."""
    _users[model] = _users.get(model, 0) + 1
    if _users[model] > 1:
        return
    found: dict[tuple[Any, ...], tuple[float, bool] | None] = {}
    for module in model.modules():
        if _mixes_sequences(module):
            module.forward = _OneSequence(module)
        if not fused or not _is_candidate(module):
            continue
        sort = (type(module), module.weight.shape, module.weight.dtype, _eps(module))
        if sort not in found:
            found[sort] = _way(module)
        if (way := found[sort]) is not None:
            module.forward = _Norm(module, *way)


def uninstall(model: nn.Module) -> None:
    """Take one ``install`` back; after the last one the model is as it was before the first."""
    _users[model] -= 1
    if _users[model]:
        return
    del _users[model]
    for module in model.modules():
        if isinstance(module.__dict__.get("forward"), _Norm | _OneSequence):
            del module.forward


class _OneSequence:
    """The ``forward`` of a gated norm, given tokens of several sequences as of one: each row is normed alone."""

    def __init__(self, module: nn.Module) -> None:
        self._own = module.forward

    def __call__(self, hidden_states: Tensor, gate: Tensor) -> Tensor:
        if hidden_states.shape[0] == 1 or current.get(None) is None:
            own: Tensor = self._own(hidden_states, gate)
            return own
        out: Tensor = self._own(hidden_states.transpose(0, 1), gate.transpose(0, 1))
        return out.transpose(0, 1)


@torch.inference_mode()
def _mixes_sequences(module: nn.Module) -> bool:
    """Whether ``module`` is a gated norm that returns two sequences of one token in another shape than it took them."""
    weight = module._parameters.get("weight")
    if not type(module).__name__.endswith("RMSNormGated") or weight is None or "forward" in module.__dict__:
        return False
    if list(inspect.signature(module.forward).parameters) != ["hidden_states", "gate"]:
        return False
    probe, two = copy.copy(module), torch.ones(2, 1, *weight.shape)
    probe.__dict__["_parameters"] = {"weight": torch.ones(weight.shape)}
    shape: torch.Size = type(module).forward(probe, two, two).shape
    return shape != two.shape


class _Norm:
    """A module's ``forward``."""

    def __init__(self, module: nn.Module, more: float, rounded: bool) -> None:
        self._parameters = module._parameters
        self._own = module.forward
        self._eps, self._more, self._rounded = _eps(module), more, rounded

    @one_call
    def __call__(self, x: Tensor) -> Tensor:
        weight = self._parameters["weight"]
        assert weight is not None
        if x.dtype is not weight.dtype or x.shape[-1] != weight.shape[0] or current.get(None) is None:
            own: Tensor = self._own(x)
            return own
        transposed = not x.is_contiguous() and x.dim() == 4 and x.transpose(1, 2).is_contiguous()  # heads before tokens
        rows = x.transpose(1, 2) if transposed else x.contiguous()
        out = kernels.norm(rows, weight, self._eps, self._more, rounded=self._rounded)
        return out.transpose(1, 2) if transposed else out


def norm_of(function: Any, args: Sequence[Any]) -> tuple[Tensor, Tensor, float, float, bool] | None:
    """What ``kernels.norm`` is given if ``function`` in a list of calls is a norm of ``args`` that it computes."""
    if function is not _Norm.__call__.__wrapped__ or len(args) != 2:  # type: ignore[attr-defined]
        return None
    norm, x = args
    weight = norm._parameters["weight"]
    if x.dtype is not weight.dtype or x.shape[-1] != weight.shape[0]:
        return None
    return x, weight, norm._eps, norm._more, norm._rounded


def _is_candidate(module: nn.Module) -> bool:
    weight = module._parameters.get("weight")
    return (
        type(module).__name__.endswith("RMSNorm")
        and len(module._parameters) == 1
        and not module._buffers
        and not module._modules
        and "forward" not in module.__dict__
        and weight is not None
        and weight.dim() == 1
        and weight.dtype in kernels.DTYPES
        and (
            weight.is_contiguous() or isinstance(weight, OffloadedParameter)
        )  # a long one may be offloaded with its layer
        and list(inspect.signature(module.forward).parameters)[1:] == []
        and _eps(module) is not None
    )


def _eps(module: nn.Module) -> Any:
    return next((getattr(module, name) for name in _EPS if isinstance(getattr(module, name, None), float)), None)


@torch.inference_mode()
def _way(module: nn.Module) -> tuple[float, bool] | None:
    """The way in which the kernel computes what ``module`` does, if there is one."""
    own = module._parameters["weight"]
    assert own is not None
    (width,), dtype = own.shape, own.dtype
    generator = torch.Generator().manual_seed(7)
    probe = copy.copy(module)
    weight = torch.randn(width, generator=generator).to(dtype)
    probe.__dict__["_parameters"] = {"weight": weight}
    sizes = torch.tensor([0.0, 1e-4, 1e-2, 1.0, 30.0, 1e4]).repeat_interleave(8)[:, None]
    x = (torch.randn(len(sizes), width, generator=generator) * sizes).to(dtype)
    expected = type(module).forward(probe, x)
    for more, rounded in _WAYS:
        if _agree(expected, kernels.norm(x, weight, _eps(module), more, rounded=rounded)):
            return more, rounded
    return None


def _agree(expected: Any, found: Tensor) -> bool:
    if not isinstance(expected, Tensor) or expected.dtype is not found.dtype or expected.shape != found.shape:
        return False
    if found.dtype is torch.float32:
        return torch.allclose(found, expected, rtol=1e-6, atol=0)
    off = found != expected  # by a unit in the last place, or two where numbers are rounded twice
    return bool(off.double().mean() < 1e-3) and torch.allclose(found, expected, rtol=2**-6, atol=0)
