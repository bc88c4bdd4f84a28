"""A model without weights: built by Transformers on the meta device, and what its cache keeps, from a forward there.

Owns the device mode under which such a forward goes through: tensors there have shapes and no values, and a model that
asks for one (how many tokens an expert got) is told zero. So what is found is what the same forward finds with weights,
in a second for any size of model: 671 billion parameters take no memory.

Never compares answers or masks, which have no values either; who runs the model looks again (``probing``).
"""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from stowage.models import fallback_layout, paged_layout, probing
from stowage.models.families import ALONE
from stowage.models.layout import Layer
from stowage.models.probing import Read

_ATEN = torch.ops.aten


@dataclass(frozen=True, slots=True)
class Described:
    """What a forward on the meta device shows of a model. ``model``: on the meta device; ``layers``: what its cache
    keeps for the executor that runs it; ``reads``: the calls of its attention, none where it computes attention by
    itself (the fallback).
    """

    model: Any
    layers: tuple[Layer, ...]
    reads: tuple[Read, ...]


class _NoValues(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Answers what needs values: numbers are zero, nothing is found, a split gives all to its first part."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._whole: set[Any] = set()
        """Operators that are not made of others."""
        self._made: dict[Any, tuple[torch.Size, tuple[int, ...], torch.dtype]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        of = args[0] if args else None
        if not isinstance(of, torch.Tensor) or not of.is_meta:
            return func(*args, **kwargs)
        if func is _ATEN._local_scalar_dense.default:
            return torch.zeros((), dtype=of.dtype).item()
        if func is _ATEN.nonzero.default:
            return of.new_empty((0, of.dim()), dtype=torch.long)
        if func is _ATEN._grouped_mm.default:  # there for bfloat16 only
            return of.new_empty((of.shape[0], args[1].shape[-1]))
        if func is _ATEN._to_copy.default and kwargs.get("device") == torch.device("cpu"):
            return torch.zeros(of.shape, dtype=kwargs.get("dtype") or of.dtype)
        if func is _ATEN.split_with_sizes.default:
            rest = of.shape[args[2] if len(args) > 2 else 0] - sum(args[1])
            args = (of, [args[1][0] + rest, *args[1][1:]], *args[2:])
        if func not in self._whole:
            with self:
                parts = func.decompose(*args, **kwargs)
            if parts is not NotImplemented:
                return parts
            self._whole.add(func)
        return self._computed(func, args, kwargs)

    def _computed(self, func: Any, args: Any, kwargs: Any) -> Any:
        """What ``func`` returns. torch finds it in Python, which takes most of a forward's time, and most layers ask
        for what an earlier one has asked for: a new tensor is made as the last time. Views and what is written in place
        share memory with an argument, and are asked for anew.
        """
        if any(one.alias_info is not None for one in (*func._schema.arguments, *func._schema.returns)):
            return func(*args, **kwargs)
        asked = (func, _signature(args), _signature(kwargs))
        made = self._made.get(asked)
        if made is None:
            out = func(*args, **kwargs)
            if isinstance(out, torch.Tensor) and out.is_meta:
                self._made[asked] = (out.shape, out.stride(), out.dtype)
            return out
        shape, stride, dtype = made
        return torch.empty_strided(shape, stride, dtype=dtype, device="meta")


def _signature(given: Any) -> Any:
    """All of an operator's arguments that its result's shape and type depend on, to be looked up by."""
    if isinstance(given, torch.Tensor):
        return given.shape, given.stride(), given.dtype, given.device
    if isinstance(given, (tuple, list)):
        return tuple(map(_signature, given))
    if isinstance(given, dict):
        return tuple((name, _signature(value)) for name, value in given.items())
    return type(given), given  # 1, 1.0 and True are equal, and promote differently


def describe(config: Any, dtype: torch.dtype) -> Described:
    """The model of ``config``, a text model's, as it is when it is run in ``dtype``. Raises ``UnsupportedModelError``.
    Whether it is one that is run at all, the caller asks ``layout.refuse_unsupported``.
    """
    from transformers import AutoModelForCausalLM

    config = copy.deepcopy(config)
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    with probing.refusing(config), _NoValues():
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config, dtype=dtype).eval()
        if config.model_type in ALONE:
            return Described(model, tuple(fallback_layout.cache_layers_of(model)), ())
        seen = probing.probe_once(model)
    return Described(model, tuple(paged_layout.layers_read(config, seen)), tuple(seen.reads))
