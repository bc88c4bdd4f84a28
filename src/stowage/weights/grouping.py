"""Divides a model into units of weights, each delivered when its module's forward begins: layers, large single modules.

Every parameter belongs to one unit, or is small and stays in memory. The stacked experts of a layer can be a unit of
their own.
"""

from __future__ import annotations

import copy
import inspect
from collections import Counter
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from stowage.core.geometry import PAGE_BYTES
from stowage.weights.experts import memory_pages

SMALL_BYTES = 16 << 10
"""Up to this size a parameter stays in memory (norms, biases): reading it costs more than keeping it."""
LEAF_BYTES = 64 << 10
"""From this size a module outside of layers is a unit."""


@dataclass(slots=True)
class Unit:
    """Parameters that are delivered together. ``parameters``: those of ``module`` that are not small, by their name in
    the model. ``rows``: it is an embedding whose forward reads the rows of its tokens only. ``experts``: how many are
    stacked in each parameter; 0 for other units. ``apart``: units for the experts inside this one, which also has their
    parameters.
    """

    name: str
    module: nn.Module
    parameters: dict[str, nn.Parameter] = field(default_factory=dict)
    rows: bool = False
    experts: int = 0
    apart: list[Unit] = field(default_factory=list)

    @property
    def nbytes(self) -> int:
        return sum(p.numel() * p.element_size() for p in self.parameters.values())


def divide(model: Any) -> list[Unit]:
    """The units of ``model`` in the order of its modules. Layers that share a parameter each have it; an embedding
    whose table belongs to another unit is no unit. Names in ``model.made_parameters``, if the model has it, stay in
    memory: no file holds them in this form (norms and biases of a quantized checkpoint, routers in float32).
    """
    units, made = list(_units("", model)), getattr(model, "made_parameters", ())
    for unit in units:
        unit.parameters = {name: p for name, p in unit.parameters.items() if name not in made}
    units = [unit for unit in units if unit.parameters]
    tied = getattr(model, "all_tied_weights_keys", None) or {}
    whole = {id(_named(model, tied.get(name, name))) for unit in units if not unit.rows for name in unit.parameters}
    for unit in units:
        if unit.rows:
            names = [name for name in unit.parameters if id(_named(model, tied.get(name, name))) not in whole]
            unit.parameters = {name: unit.parameters[name] for name in names}
    owners = Counter(id(p) for unit in units for p in unit.parameters.values())
    mappings = sum(part.experts * len(part.parameters) for unit in units for part in unit.apart)
    possible = memory_pages.supported() and mappings <= memory_pages.mappings_most()
    for unit in units:
        unit.apart = [
            part for part in unit.apart if possible and all(owners[id(p)] == 1 for p in part.parameters.values())
        ]
    return [unit for unit in units if unit.parameters]


def with_experts_apart(units: list[Unit], names: Collection[str]) -> list[Unit]:
    """``units``, with those experts whose unit is in ``names`` apart, each behind its layer's unit."""
    found = []
    for unit in units:
        parts = [part for part in unit.apart if part.name in names]
        offloaded = {name for part in parts for name in part.parameters}
        left = {name: parameter for name, parameter in unit.parameters.items() if name not in offloaded}
        found += [Unit(unit.name, unit.module, left, unit.rows, unit.experts), *parts] if parts else [unit]
    return found


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
                if isinstance(layer, nn.ModuleList | nn.ModuleDict):  # it has no forward; its children have
                    yield from _units(f"{path}.{index}", layer)
                else:
                    yield _unit(f"{path}.{index}", layer)
        elif isinstance(child, nn.Embedding | nn.MultiheadAttention) or not any(True for _ in child.children()):
            if sum(p.numel() * p.element_size() for p in child.parameters()) >= LEAF_BYTES:
                yield _unit(path, child)
        else:
            yield from _units(path, child)


def _unit(name: str, module: nn.Module) -> Unit:
    unit = Unit(name, module, rows=isinstance(module, nn.Embedding) and is_plain_lookup(module))
    for own, parameter in module.named_parameters():
        if parameter.numel() * parameter.element_size() > SMALL_BYTES:
            unit.parameters[f"{name}.{own}"] = parameter
    for own, part in module.named_modules():
        experts = _experts(f"{name}.{own}", part, unit) if own else None
        if experts is not None:
            unit.apart.append(experts)
    return unit


def _experts(name: str, module: nn.Module, unit: Unit) -> Unit | None:
    """``module`` as a unit if it is experts: parameters (experts, ...) of three dimensions or more, and a forward that
    takes hidden states, chosen experts and their weights. ``WeightSource.prove`` tests whether it uses the chosen ones
    only.
    """
    own = {f"{name}.{own}": p for own, p in module.named_parameters(recurse=False) if p.dim() >= 3 and len(p) > 1}
    gaps = bool(getattr(type(module), "bears_gaps", False))
    stacked = {name: p for name, p in own.items() if name in unit.parameters and _in_pages(p, gaps)}
    taken = [p for p in inspect.signature(module.forward).parameters.values() if p.kind is p.POSITIONAL_OR_KEYWORD]
    if not stacked or len(taken) < 3 or len({len(p) for p in stacked.values()}) > 1:
        return None
    return Unit(name, module, stacked, experts=len(next(iter(stacked.values()))))


def _in_pages(stack: nn.Parameter, gaps: bool) -> bool:
    """Whether each expert takes whole pages; with ``gaps``, over one page, so that padding doubles it at most."""
    expert_bytes = stack[0].numel() * stack.element_size()
    return expert_bytes > PAGE_BYTES and (gaps or expert_bytes % PAGE_BYTES == 0)


def renumbers(module: nn.Module) -> bool:
    """Whether the output of a module of experts does not depend on how they are numbered. True for Transformers'
    grouped and batched kernels, which add a token's experts in the order of choice; its plain loop adds them by number.
    """
    implementation = getattr(getattr(module, "config", None), "_experts_implementation", None)
    own = all(hasattr(module, name) for name in ("num_experts", "has_bias", "is_transposed"))
    return own and implementation in ("grouped_mm", "batched_mm")


def is_plain_lookup(module: nn.Embedding) -> bool:
    """Whether an embedding's forward only looks up the rows of its ids, so that a table of these rows is enough. A
    subclass may scale the rows. One that changes the ids is found by a trial with a small table.
    """
    if module.max_norm is not None:
        return False
    if (known := getattr(type(module), "looks_up", None)) is not None:  # a packed table: decided when it was made
        return bool(known)
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
