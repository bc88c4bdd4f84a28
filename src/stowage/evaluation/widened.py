"""Computes a model of 16 bits in float32 without a second copy of it: each layer's weights are widened while it runs.

Widening is exact: the bits are those of a model that is loaded in float32. What lies outside of layers (embeddings, the
output layer) is wide for as long as the context lasts, and of the layers the one that runs.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

_Narrow = list[tuple[Tensor, Tensor]]


@contextmanager
def widened(model: Any) -> Iterator[None]:
    """Parameters and buffers in the dtype of ``model`` are float32 whenever a forward reads them."""
    dtype = model.dtype
    layers = list(_layers(model))
    inside = {id(part) for layer in layers for part in layer.modules()}
    with ExitStack() as after:
        for layer in layers:
            narrow: _Narrow = []
            before = layer.register_forward_pre_hook(partial(_before, narrow, dtype), prepend=True)
            behind = layer.register_forward_hook(partial(_behind, narrow), always_call=True)
            after.callback(before.remove)
            after.callback(behind.remove)
        outside = [part for part in model.modules() if id(part) not in inside]
        kept = _widen((tensor for part in outside for tensor in _tensors(part, recurse=False)), dtype)
        after.callback(_restore, kept)
        yield


def float32_bytes(model: Any, at_once: bool = False) -> int:
    """What ``widened`` takes at most; ``at_once``: what a copy of ``model`` in float32 takes."""
    dtype, width = model.dtype, torch.float32.itemsize

    def wide(tensors: Iterable[Tensor]) -> int:
        return sum(width * tensor.numel() for tensor in tensors if tensor.dtype is dtype)

    if at_once:
        others = sum(tensor.nbytes for tensor in _tensors(model, recurse=True) if tensor.dtype is not dtype)
        return wide(_tensors(model, recurse=True)) + others
    layers = list(_layers(model))
    inside = {id(tensor) for layer in layers for tensor in _tensors(layer, recurse=True)}
    outside = wide(tensor for tensor in _tensors(model, recurse=True) if id(tensor) not in inside)
    return outside + max((wide(_tensors(layer, recurse=True)) for layer in layers), default=0)


def _layers(part: nn.Module) -> Iterator[nn.Module]:
    for child in part.children():
        if isinstance(part, nn.ModuleList) and not isinstance(child, nn.ModuleList | nn.ModuleDict):
            yield child
        else:  # a list has no forward
            yield from _layers(child)


def _before(narrow: _Narrow, dtype: torch.dtype, layer: nn.Module, _inputs: Any) -> None:
    narrow += _widen(_tensors(layer, recurse=True), dtype)


def _behind(narrow: _Narrow, _layer: nn.Module, _inputs: Any, _output: Any) -> None:
    _restore(narrow)
    narrow.clear()


def _tensors(part: nn.Module, *, recurse: bool) -> Iterator[Tensor]:
    yield from part.parameters(recurse)
    yield from part.buffers(recurse)


def _widen(tensors: Iterable[Tensor], dtype: torch.dtype) -> _Narrow:
    narrow = []
    for tensor in tensors:
        if tensor.dtype is dtype:
            narrow.append((tensor, tensor.data))
            tensor.data = tensor.data.float()
    return narrow


def _restore(narrow: _Narrow) -> None:
    for tensor, data in narrow:
        tensor.data = data
