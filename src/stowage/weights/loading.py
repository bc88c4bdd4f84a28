"""Loads a model under a budget: Transformers builds it and converts its weights, one parameter at a time, and each
goes to its hold as soon as it has its final form.

Uses two seams of torch, the global hooks that see modules and parameters being registered, so that whatever
Transformers renames, casts, stacks or fuses is done before a parameter is seen here. The memory for all of it is the
budget and the largest parameter.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules import module as seams

from stowage.errors import UnsupportedModelError
from stowage.weights.checkpoint import Checkpoint
from stowage.weights.holds import Home, as_bytes, copy_of, phase_of
from stowage.weights.image import Image
from stowage.weights.locate import Locator
from stowage.weights.placement import Cargo, Delivery, Placement, Rule, place
from stowage.weights.source import Load, WeightSource, absent
from stowage.weights.units import Unit, arranged, divide, looks_up

__all__ = ["Budget", "adopt", "load"]

_SEQUENTIAL = "HF_DEACTIVATE_ASYNC_LOAD"
"""Transformers' own switch: one parameter after the other, instead of all at once in the background."""
_MADV_DONTNEED = 4
_FORGET_EVERY_BYTES = 16 << 20
_one_at_a_time = threading.Lock()
"""The seams are global: one model at a time is loaded under a budget."""


@dataclass(frozen=True, slots=True)
class Budget:
    """What weights may take. ``device_bytes`` of ``None`` has no limit. ``image``: a directory and a limit in bytes,
    for parameters whose final form the checkpoint does not hold. ``rules`` come before the budgets' own choice.
    """

    device_bytes: int | None = None
    host_bytes: int = 0
    image: tuple[Path, int] | None = None
    rules: Sequence[Rule] = ()


def load(files: Sequence[Path], build: Callable[[], Any], budget: Budget) -> tuple[Any, WeightSource]:
    """``build`` loads the model from ``files``, with Transformers; it is returned with the source of its weights.

    Raises BudgetError, ConfigError, CheckpointError, StorageError,
    UnsupportedModelError, and whatever ``build`` raises.
    """
    checkpoint = Checkpoint(files)
    loading = _Loading(checkpoint, budget)
    try:
        with _one_at_a_time, _sequential(), loading.watching():
            model = build()
        return model, loading.finish(model)
    except BaseException:
        loading.abandon()
        raise


@contextlib.contextmanager
def _sequential() -> Iterator[None]:
    before = os.environ.get(_SEQUENTIAL)
    os.environ[_SEQUENTIAL] = "1"
    try:
        yield
    finally:
        if before is None:
            del os.environ[_SEQUENTIAL]
        else:
            os.environ[_SEQUENTIAL] = before


@dataclass(slots=True)
class _Loading:
    checkpoint: Checkpoint
    budget: Budget
    image: Image | None = None
    placement: Placement | None = None
    thread: int = field(default_factory=threading.get_ident)
    parents: dict[int, tuple[nn.Module, str]] = field(default_factory=dict)
    names: dict[int, str] = field(default_factory=dict)
    deliveries: dict[str, Delivery] = field(default_factory=dict)
    homes: dict[int, tuple[nn.Parameter, Home]] = field(default_factory=dict)
    locator: Locator | None = None
    unforgotten_bytes: int = 0

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        self.locator = Locator(self.checkpoint)
        adopted: Any = (
            self._adopted
        )  # torch's annotations say that these return nothing; its documentation knows better
        registered: Any = self._registered
        buffered: Any = self._buffered
        handles = [
            seams.register_module_module_registration_hook(adopted),
            seams.register_module_parameter_registration_hook(registered),
            seams.register_module_buffer_registration_hook(buffered),
        ]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def _adopted(self, parent: nn.Module, name: str, child: nn.Module | None) -> None:
        if child is not None and threading.get_ident() == self.thread:
            self.parents[id(child)] = (parent, name)

    def _buffered(self, _module: nn.Module, _name: str, buffer: Tensor | None) -> Tensor | None:
        """A buffer that was loaded must not stay a view of the mapped file, whose pages are given back meanwhile."""
        if buffer is None or buffer.device.type == "meta" or threading.get_ident() != self.thread:
            return None
        return buffer.detach().clone()

    def _registered(self, module: nn.Module, name: str, parameter: nn.Parameter | None) -> nn.Parameter | None:
        if parameter is None or threading.get_ident() != self.thread or parameter.device.type == "meta":
            return None
        if id(parameter) in self.homes:  # tied to another module: it was placed already
            return None
        if self.placement is None:
            self._place(module)
        path = f"{self.names[id(module)]}.{name}".lstrip(".") if id(module) in self.names else name
        placed = self._placed(path, parameter)
        self._forget_pages(parameter.numel() * parameter.element_size())
        return placed

    def _place(self, module: nn.Module) -> None:
        """With the first parameter the model's parts are known, by name, shape and type, and none of their bytes."""
        root = module
        while id(root) in self.parents:
            root = self.parents[id(root)][0]
        units = divide(root)
        self.placement = place_units(units, root, self.budget)
        self.names = {id(part): name for name, part in root.named_modules()}
        for unit, delivery in zip(_units_of(units, self.placement), self.placement.deliveries, strict=True):
            self.deliveries.update(dict.fromkeys(unit.parameters, delivery))
        tied = getattr(root, "all_tied_weights_keys", None) or {}
        for name, source in tied.items():
            decisive = self.deliveries.get(name), self.deliveries.get(source)
            known = [delivery for delivery in decisive if delivery is not None]
            ranked = [delivery for delivery in known if delivery is not Delivery.ROWS] or known
            if ranked:
                self.deliveries[name] = self.deliveries[source] = ranked[0]

    def _placed(self, path: str, parameter: nn.Parameter) -> nn.Parameter:
        """What the module gets: the values, in memory of their own, or a stand-in."""
        delivery = self.deliveries.get(path, Delivery.RESIDENT)
        values = parameter.detach()
        _refuse_wrapped(path, values)
        if delivery is Delivery.RESIDENT:
            stand_in = nn.Parameter(copy_of(values), requires_grad=False)
        else:
            values = values.contiguous()
            home = self._home(path, values, delivery)
            stand_in = nn.Parameter(absent(home.shape, home.dtype), requires_grad=False)
            self.homes[id(stand_in)] = (stand_in, home)
        stand_in._is_hf_initialized = True  # type: ignore[attr-defined]  # Transformers would fill it with random numbers
        return stand_in

    def _home(self, path: str, values: Tensor, delivery: Delivery) -> Home:
        assert self.locator is not None
        shape, dtype, phase = tuple(values.shape), values.dtype, phase_of(values)
        if delivery is Delivery.PREFETCH:
            return Home(shape, dtype, host=copy_of(values), phase=phase)
        home = Home(shape, dtype, tuple(self.locator.find(path, as_bytes(values)) or ()), phase=phase)
        if delivery is Delivery.MAPPED:
            return home if home.mappable else Home(shape, dtype, host=copy_of(values), phase=phase)
        if not home.segments or (delivery is Delivery.ROWS and len(home.segments) > 1):
            self.image = self.image or _new_image(path, home.nbytes, self.budget)
            return Home(shape, dtype, (self.image.add(as_bytes(values)),))
        return home

    def _forget_pages(self, nbytes: int) -> None:
        """Give back what loading parameters took besides: pages of the files that Transformers has mapped, and
        memory of its conversions. Neither is in a budget.

        Nothing that is kept lies in those pages, and nothing writes to them, so they can be had again.
        """
        self.unforgotten_bytes += nbytes
        if self.unforgotten_bytes < _FORGET_EVERY_BYTES:
            return
        self.unforgotten_bytes = 0
        libc = ctypes.CDLL(None, use_errno=True)
        libc.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
        for begin, end, _, _ in self.checkpoint.mappings():
            libc.madvise(begin, end - begin, _MADV_DONTNEED)  # a failure costs memory that is not ours
        if hasattr(libc, "malloc_trim"):
            libc.malloc_trim(0)  # what was stacked and cast on the way was freed, and glibc keeps it otherwise

    def finish(self, model: Any) -> WeightSource:
        """Hook the model's units as loading left them: parameters that became one are one."""
        assert self.placement is not None, "a model with parameters was loaded"
        homes = {key: home for key, (_, home) in self.homes.items()}
        return deliver(model, self.placement, homes, self.checkpoint, self.image)

    def abandon(self) -> None:
        self.checkpoint.close()
        if self.image is not None:
            self.image.close()


def deliver(
    model: Any, placement: Placement, homes: Mapping[int, Home], checkpoint: Checkpoint, image: Image | None
) -> WeightSource:
    """The source of ``model``'s weights, whose parameters lie in ``homes`` (by the parameter's ``id``) or in memory.

    Raises UnsupportedModelError when a parameter that is away belongs to a module that cannot be given it.
    """
    loads = []
    for unit in _units_of(divide(model), placement):
        unit.parameters = {name: p for name, p in unit.parameters.items() if id(p) in homes}
        if unit.parameters:
            loads.append(Load(unit, placement.of(unit.name), {n: homes[id(p)] for n, p in unit.parameters.items()}))
    loads += _tied_tables(model, loads)
    given = {(id(module), own) for load in loads for module, own in _holders(load.unit)}
    for name, module in model.named_modules():
        for own, parameter in module.named_parameters(recurse=False):
            if id(parameter) in homes and (id(module), own) not in given:
                raise UnsupportedModelError(
                    f"{name}.{own} is shared with a module that weights cannot be delivered to: keep it resident."
                )
    return WeightSource(model, placement, loads, checkpoint, image)


def _tied_tables(model: Any, loads: Sequence[Load]) -> Iterator[Load]:
    """Embeddings whose table is another unit's parameter: of it they need rows, whatever the other one needs."""
    owners = {id(p): (load, name) for load in loads for name, p in load.unit.parameters.items()}
    own = {id(load.unit.module) for load in loads}
    for name, module in model.named_modules():
        if isinstance(module, nn.Embedding) and id(module) not in own and id(module.weight) in owners:
            load, parameter_name = owners[id(module.weight)]
            home = load.homes[parameter_name]
            delivery = load.delivery
            if delivery.rings and looks_up(module) and len(home.segments) <= 1:
                delivery = Delivery.ROWS
            path, (table,) = f"{name}.weight", module.parameters(recurse=False)
            yield Load(Unit(name, module, {path: table}, rows=True), delivery, {path: home})


def _holders(unit: Unit) -> Iterator[tuple[nn.Module, str]]:
    for module in unit.module.modules():
        for own, _ in module.named_parameters(recurse=False):
            yield module, own


def adopt(model: Any, budget: Budget) -> WeightSource:
    """Place the weights of ``model``, which are in memory already, in their present form: what does not stay is
    written to the budget's image, and its memory is given back. Raises like `load`.
    """
    units = divide(model)
    placement = place_units(units, model, budget)
    placed = zip(_units_of(units, placement), placement.deliveries, strict=True)
    moved = [(name, p, delivery) for unit, delivery in placed for name, p in unit.parameters.items()]
    moved = [(name, parameter, delivery) for name, parameter, delivery in moved if delivery is not Delivery.RESIDENT]
    for name, parameter, _ in moved:
        _refuse_wrapped(name, parameter.detach())
    image: Image | None = None
    homes: dict[int, Home] = {}
    try:
        for name, parameter, delivery in moved:
            values = parameter.detach().contiguous()
            if id(parameter) in homes:
                continue
            if delivery.on_host:
                homes[id(parameter)] = Home(tuple(values.shape), values.dtype, host=values, phase=phase_of(values))
            else:
                image = image or _new_image(name, values.nbytes, budget)
                homes[id(parameter)] = Home(tuple(values.shape), values.dtype, (image.add(as_bytes(values)),))
        return deliver(model, placement, homes, Checkpoint([]), image)
    except BaseException:
        if image is not None:
            image.close()
        raise


def _new_image(name: str, nbytes: int, budget: Budget) -> Image:
    if budget.image is None:
        raise UnsupportedModelError(
            f"{name} ({nbytes} bytes) has another form in memory than in a checkpoint's files, most often another "
            "dtype, so "
            "it cannot be read from there: give disk=DIR:SIZE for its final form, keep the checkpoint's dtype "
            "(dtype=auto), or give the model more memory."
        )
    return Image(*budget.image)


def _refuse_wrapped(name: str, values: Tensor) -> None:
    if type(values) is not Tensor or values.layout is not torch.strided:
        raise UnsupportedModelError(
            f"{name} is a {type(values).__name__}, no plain tensor: quantised weights cannot be placed under a budget "
            "yet. Load the model without a budget."
        )


def place_units(units: list[Unit], model: Any, budget: Budget) -> Placement:
    """The placement of ``units`` of ``model`` (which may have no bytes yet) within ``budget``."""
    layers = [unit.name for unit in units if unit.name.rpartition(".")[2].isdigit()]

    def cargo(unit: Unit, layer: int) -> Cargo:
        apart = tuple(cargo(part, layer) for part in unit.apart)
        return Cargo(unit.name, unit.nbytes, len(unit.parameters), unit.rows, layer, unit.experts, apart)

    cargoes = [cargo(unit, layers.index(unit.name) if unit.name in layers else -1) for unit in units]
    tied = getattr(model, "all_tied_weights_keys", None) or {}
    own = {name for unit in units for name in unit.parameters}
    small = [
        tensor.numel() * tensor.element_size()
        for name, tensor in [*model.named_parameters(), *model.named_buffers()]
        if name not in own and tied.get(name, name) not in own and name not in {tied.get(n) for n in own}
    ]
    return place(cargoes, sum(small), budget.device_bytes, budget.host_bytes, budget.rules)


def _units_of(units: list[Unit], placement: Placement) -> list[Unit]:
    """``units`` as they were placed: experts apart from their layer or not."""
    return arranged(units, {cargo.name for cargo in placement.cargo})
