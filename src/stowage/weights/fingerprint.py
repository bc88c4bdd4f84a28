"""A model's fingerprint: shows whether weights, layers or config were changed after the weights got their identity.

A changed model computes other values, so what it stores must have other keys. Owns what was seen of each tensor when it
was named. In a large one, an operation in place shows in its version, a replacement in its address, and a write through
``.data``, which leaves both, in some of its values.
"""

from __future__ import annotations

import json
from typing import Any, Final

import torch
from blake3 import blake3
from torch import Tensor, nn

from stowage.weights.module_code import settings
from stowage.weights.offloaded_parameter import OffloadedParameter

_WHOLE_BYTES: Final = 64 << 10
"""Tensors of at most so many bytes are compared whole."""
_VALUES: Final = 64
"""Of a larger one so many values are, at equal distances."""
_NOT_CONTENT: Final = ("transformers_version", "_name_or_path")
"""Config entries that say where a model comes from, and nothing about what it computes."""


def config_bytes(model: Any) -> bytes:
    """What a model's config says of what it computes; empty without one."""
    config = getattr(model, "config", None)
    if config is None:
        return b""
    fields = {name: value for name, value in config.to_dict().items() if name not in _NOT_CONTENT}
    return json.dumps(fields, sort_keys=True, default=str).encode() + b"\0"


class Fingerprint:
    """The fingerprint of ``model`` as it is when its weights are named, between forwards."""

    def __init__(self, model: nn.Module) -> None:
        found = _tensors(model)
        self._offloaded = {id(t): (name, t) for name, t in found.items() if isinstance(t, OffloadedParameter)}
        self._marks = {name: _mark(t) for name, t in found.items() if id(t) not in self._offloaded}
        self._names = frozenset(found)
        self._config = config_bytes(model) + settings(model)

    def identity_of(self, model: nn.Module, identity: str) -> str:
        """``identity`` of a model in which nothing was changed; of another one a digest of it and of what was."""
        found, changed = _tensors(model), blake3(bytes.fromhex(identity))
        config = config_bytes(model) + settings(model)
        same = found.keys() == self._names and config == self._config
        if not same:
            changed.update(json.dumps(sorted(self._names - found.keys())).encode() + config)
        for name, tensor in sorted(found.items()):
            was = self._offloaded.get(id(tensor))
            if was is not None:
                if was[0] != name:  # its layer stands somewhere else, say
                    changed.update(f"{name}={was[0]}\0".encode())
                    same = False
            elif self._marks.get(name) != _mark(tensor):
                changed.update(f"{name}|{tensor.dtype}|{tuple(tensor.shape)}\0".encode())
                changed.update(_bytes(tensor))
                same = False
        return identity if same else changed.hexdigest()


def _tensors(model: nn.Module) -> dict[str, Tensor]:
    """All parameters and buffers, tied ones under each of their names."""
    # Not by the model's own method: on that who trains adapters relies (``refusals``).
    parameters = nn.Module.named_parameters(model, remove_duplicate=False)
    return {**dict(parameters), **dict(model.named_buffers(remove_duplicate=False))}


def _mark(tensor: Tensor) -> tuple[Any, ...]:
    form = (tensor.dtype, tuple(tensor.shape), tensor.device)
    if tensor.nbytes <= _WHOLE_BYTES:
        return (*form, _bytes(tensor))
    version = 0 if tensor.is_inference() else tensor._version
    step = tensor.numel() // _VALUES
    inside = tensor.storage_offset() + step * (_VALUES - 1) < tensor.untyped_storage().nbytes() // tensor.itemsize
    values = _bytes(torch.as_strided(tensor.detach(), (_VALUES,), (step,))) if inside else b""
    return (*form, tensor.data_ptr(), version, values)


def _bytes(tensor: Tensor) -> bytes:
    raw: bytes = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
    return raw
