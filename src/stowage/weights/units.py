"""Which modules of a model get their weights together, when their forward begins: its layers, and large single modules.

Owns the division: every parameter belongs to one unit, or is small and stays in memory.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

__all__ = ["SMALL_BYTES", "Unit", "divide", "looks_up"]

SMALL_BYTES = 16 << 10
"""Norms and biases: reading them by themselves costs more than keeping them."""
LEAF_BYTES = 64 << 10
"""A single module from here on is a unit of its own."""


@dataclass(slots=True)
class Unit:
    """``parameters``: those of ``module`` that are not small, by their name in the model. ``rows``: an embedding, of
    which a forward needs the rows of its tokens and no others.
    """

    name: str
    module: nn.Module
    parameters: dict[str, nn.Parameter] = field(default_factory=dict)
    rows: bool = False

    @property
    def nbytes(self) -> int:
        return sum(p.numel() * p.element_size() for p in self.parameters.values())


def divide(model: Any) -> list[Unit]:
    """The units of ``model`` in the order of its modules. Layers that share a parameter each have it; an embedding
    whose table another unit has is no unit.
    """
    units = [unit for unit in _units("", model) if unit.parameters]
    tied = getattr(model, "all_tied_weights_keys", None) or {}
    whole = {id(_named(model, tied.get(name, name))) for unit in units if not unit.rows for name in unit.parameters}
    for unit in units:
        if unit.rows:
            names = [name for name in unit.parameters if id(_named(model, tied.get(name, name))) not in whole]
            unit.parameters = {name: unit.parameters[name] for name in names}
    return [unit for unit in units if unit.parameters]


def _named(model: Any, name: str) -> Any:
    module, _, own = name.rpartition(".")
    try:
        return getattr(model.get_submodule(module), own)
    except AttributeError:
        return None


def _units(name: str, module: nn.Module) -> Iterator[Unit]:
    for own, child in module.named_children():
        path = f"{name}.{own}" if name else own
        if isinstance(child, nn.ModuleList) and len(child) > 1:
            for index, layer in enumerate(child):
                yield _unit(f"{path}.{index}", layer)
        elif isinstance(child, nn.Embedding) or not any(True for _ in child.children()):
            if sum(p.numel() * p.element_size() for p in child.parameters(recurse=False)) >= LEAF_BYTES:
                yield _unit(path, child)
        else:
            yield from _units(path, child)


def _unit(name: str, module: nn.Module) -> Unit:
    unit = Unit(name, module, rows=isinstance(module, nn.Embedding) and looks_up(module))
    for own, parameter in module.named_parameters():
        if parameter.numel() * parameter.element_size() > SMALL_BYTES:
            unit.parameters[f"{name}.{own}"] = parameter
    return unit


def looks_up(module: nn.Embedding) -> bool:
    """Whether the forward of an embedding takes ids and looks them up: then any table with their rows will do. A
    class of its own may scale what it finds; one that makes ids of something else is found out by trying it with a
    small table.
    """
    if module.max_norm is not None:
        return False
    if type(module).forward is nn.Embedding.forward:
        return True
    trial = copy.copy(module)
    trial.padding_idx = None
    trial.__dict__["_buffers"] = {name: torch.ones(b.shape, dtype=b.dtype) for name, b in module.named_buffers()}
    table = torch.randn(8, module.embedding_dim)
    found = []
    for rows, ids in ((table, [[5, 2, 5, 7]]), (table[[2, 5, 7]], [[1, 0, 1, 2]])):
        trial.__dict__["_parameters"] = {"weight": nn.Parameter(rows)}
        try:
            found.append(nn.Embedding.__call__(trial, torch.tensor(ids)))
        except (TypeError, ValueError, RuntimeError, IndexError, AttributeError):
            return False
    return all(isinstance(f, torch.Tensor) for f in found) and torch.equal(*found)
