"""Loads a model under a budget: Transformers builds it and converts its weights, one parameter at a time, and each is
placed as soon as it has its final form. Peak memory is the budget and the largest parameter.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from stowage.core.geometry import ALIGNMENT_BYTES, PAGE_BYTES
from stowage.errors import UnsupportedModelError
from stowage.weights.building import Building
from stowage.weights.checkpoint import Checkpoint, Segment, Span, read_segments
from stowage.weights.delivery import HOST, Load
from stowage.weights.device_prefetcher import Carrier
from stowage.weights.grouping import Unit, divide, is_plain_lookup, renumbers, with_experts_apart
from stowage.weights.host_buffers import HostBuffers
from stowage.weights.locate import Locator
from stowage.weights.offloaded_parameter import nan_placeholder
from stowage.weights.parameter_location import ParameterLocation, as_bytes, phase_of
from stowage.weights.placement import Placement, Rule, more_for, place
from stowage.weights.quantized.blocks import unpacking_bytes
from stowage.weights.quantized.codes import form_of, workspace_bytes
from stowage.weights.quantized.modules import packed_forms
from stowage.weights.resident import ResidentMemory
from stowage.weights.scratch_file import ScratchFile
from stowage.weights.source import WeightSource
from stowage.weights.tied import resolve_tied
from stowage.weights.weight_unit import Delivery, WeightUnit

_MADE_BYTES_MOST = 16 << 20
"""The largest parameter that is taken for a router, and kept."""


@dataclass(frozen=True, slots=True)
class Budget:
    """The memory that weights may take. ``device_bytes`` of ``None``: no limit. ``scratch``: a directory and a limit in
    bytes, for a ``ScratchFile``. ``rules``, ``held_bytes``, ``more``: see ``placement.place``. ``carrier``: copies to a
    device with memory of its own; ``None`` on a CPU.
    """

    device_bytes: int | None = None
    host_bytes: int = 0
    scratch: tuple[Path, int] | None = None
    rules: Sequence[Rule] = ()
    carrier: Carrier | None = None
    held_bytes: int | None = None
    more: Callable[[int], str] = more_for

    @property
    def device(self) -> torch.device:
        """The device that the model computes on."""
        return self.carrier.device if self.carrier is not None else HOST


def load(
    files: Sequence[Path], build: Callable[[], Any], budget: Budget, spans: Mapping[str, Sequence[Span]] | None
) -> tuple[Any, WeightSource]:
    """Call ``build``, which has Transformers load the model from ``files``. Returns the model and the source of its
    weights. ``spans``: where parameters lie whose bytes are used as they are in ``files``, by name; ``build`` need not
    give them values.

    Raises BudgetError, ConfigError, CheckpointError, StorageError, UnsupportedModelError, and what ``build`` raises.
    """
    checkpoint = Checkpoint(files)
    loading = _Loading(checkpoint, budget, checkpoint.segments(spans or {}))
    try:
        model = loading.build(build)
        return model, loading.finish(model)
    except BaseException:
        loading.abandon()
        raise


class _Loading(Building):
    def __init__(self, checkpoint: Checkpoint, budget: Budget, segments: Mapping[str, tuple[Segment, ...]]) -> None:
        super().__init__(checkpoint)
        self.budget, self.segments = budget, segments
        self.scratch: ScratchFile | None = None
        self.host_buffers = HostBuffers()
        self.resident = ResidentMemory(budget.device)
        self.held: set[str] = set()
        self.placement: Placement | None = None
        self.deliveries: dict[str, Delivery] = {}
        self.locations: dict[int, ParameterLocation] = {}
        self.locator = Locator(checkpoint)
        self.both: dict[str, str] = {}
        """Of tied parameters of which the files hold both, the name of the one that both become."""
        self.ones: dict[str, nn.Parameter] = {}

    def begin(self, root: nn.Module) -> None:
        pairs = {} if self.segments else resolve_tied(root, self.checkpoint)
        self.both = pairs | {source: source for source in pairs.values()}
        made = frozenset[str](getattr(root, "made_parameters", ()))
        root.__dict__["made_parameters"] = made.union(_made_in_float32(root, self.checkpoint, self.segments))
        units = divide(root)
        self.placement = place_units(units, root, self.budget)
        for unit, delivery in zip(_units_of(units, self.placement), self.placement.deliveries, strict=True):
            self.deliveries.update(dict.fromkeys(unit.parameters, delivery))
            if unit.name in self.placement.held:
                self.held.update(unit.parameters)
        tied: dict[str, str] = getattr(root, "all_tied_weights_keys", None) or {}
        for name, source in tied.items():
            decisive = self.deliveries.get(name), self.deliveries.get(source)
            known = [delivery for delivery in decisive if delivery is not None]
            ranked = [delivery for delivery in known if delivery is not Delivery.ROWS] or known
            if ranked:
                self.deliveries[name] = self.deliveries[source] = ranked[0]

    def put(self, path: str, parameter: nn.Parameter) -> nn.Parameter:
        """The parameter with its values, in memory of their own, or a placeholder for an offloaded one.

        Both require gradients if the model's own parameter does, although offloaded ones never get any (``source``):
        with a weight that does not, torch multiplies a slice of a batch as a batched product, each with a copy of the
        weight. That took half as long as the rest of a prefill, and rounds differently.
        """
        one = self.both.get(path)
        if one is None:
            return self._placed(path, parameter)
        if one not in self.ones:
            self.ones[one] = self._placed(path, parameter)
        return self.ones[one]

    def _placed(self, path: str, parameter: nn.Parameter) -> nn.Parameter:
        delivery = self.deliveries.get(path, Delivery.RESIDENT)
        values = parameter.detach()
        segments = self.segments.get(path, ())
        if not segments:
            _refuse_wrapped(path, values)
        lies = ParameterLocation(tuple(values.shape), values.dtype, segments)
        stays = bool(segments) and not self._held_in_memory(path, delivery, lies)
        if segments and not stays:
            values = read_segments(segments, self.resident.empty(values.shape, values.dtype))
        if delivery is Delivery.RESIDENT:
            values = values if segments else self.resident.copy(values)
            return nn.Parameter(values.to(self.budget.device), parameter.requires_grad)
        if stays:
            location = replace(lies, phase=segments[0].offset % ALIGNMENT_BYTES if lies.mappable else 0)
        else:
            location = self._location(path, values.contiguous(), delivery, read=bool(segments))
        stand_in = nn.Parameter(
            nan_placeholder(location.shape, location.dtype, self.budget.device), parameter.requires_grad
        )
        self.locations[id(stand_in)] = location
        return stand_in

    def _held_in_memory(self, path: str, delivery: Delivery, lies: ParameterLocation) -> bool:
        """Whether a parameter that ``lies`` in files is read now, once."""
        mapped = delivery is Delivery.MAPPED and lies.mappable
        return (
            self._copied_to_device(path, delivery) or delivery is Delivery.RESIDENT or (delivery.on_host and not mapped)
        )

    def _copied_to_device(self, path: str, delivery: Delivery) -> bool:
        """Whether a device computes with it from host memory, which it gets for that."""
        return self.budget.carrier is not None and (delivery.on_host or path in self.held)

    def _location(self, path: str, values: Tensor, delivery: Delivery, *, read: bool) -> ParameterLocation:
        """Where ``values`` are kept while they are offloaded. ``read``: they have memory of their own already."""
        shape, dtype, phase = tuple(values.shape), values.dtype, phase_of(values)
        if self._copied_to_device(path, delivery):
            return ParameterLocation(shape, dtype, host=self.host_buffers.keep(values))
        if read:
            return ParameterLocation(shape, dtype, host=values, phase=phase)
        if delivery is Delivery.PREFETCH:
            return ParameterLocation(shape, dtype, host=self.resident.copy(values), phase=phase)
        location = ParameterLocation(shape, dtype, tuple(self.locator.find(path, as_bytes(values)) or ()), phase=phase)
        if delivery is Delivery.MAPPED and not location.mappable:
            return ParameterLocation(shape, dtype, host=self.resident.copy(values), phase=phase)
        if delivery is Delivery.MAPPED:
            return location
        if not location.segments or (delivery is Delivery.ROWS and len(location.segments) > 1):
            self.scratch = self.scratch or _new_scratch(path, location.nbytes, self.budget)
            return ParameterLocation(shape, dtype, (self.scratch.add(as_bytes(values)),))
        return location

    def finish(self, model: Any) -> WeightSource:
        """Hook the units of the loaded model; parameters that loading has tied are one."""
        assert self.placement is not None, "a model with parameters was loaded"
        for module in model.modules():
            for name, buffer in module.named_buffers(recurse=False):
                setattr(module, name, buffer.to(self.budget.device))
        carrier = self.budget.carrier
        return deliver(model, self.placement, self.locations, self.checkpoint, self.scratch, carrier, self.host_buffers)

    def abandon(self) -> None:
        self.host_buffers.close()
        self.checkpoint.close()
        if self.scratch is not None:
            self.scratch.close()


def deliver(
    model: Any,
    placement: Placement,
    locations: Mapping[int, ParameterLocation],
    checkpoint: Checkpoint,
    scratch: ScratchFile | None,
    carrier: Carrier | None = None,
    host_buffers: HostBuffers | None = None,
) -> WeightSource:
    """The source of ``model``'s weights: parameters in ``locations`` (by their ``id``) are offloaded, others in memory.

    Raises UnsupportedModelError when an offloaded parameter is shared with a module that weights are not delivered to.
    """
    loads = []
    for unit in _units_of(divide(model), placement):
        unit.parameters = {name: p for name, p in unit.parameters.items() if id(p) in locations}
        if unit.parameters:
            loads.append(Load(unit, placement.of(unit.name), {n: locations[id(p)] for n, p in unit.parameters.items()}))
    loads += _tied_tables(model, loads)
    given = {(id(module), own) for load in loads for module, own in _holders(load.unit)}
    for name, module in model.named_modules():
        for own, parameter in module.named_parameters(recurse=False):
            if id(parameter) in locations and (id(module), own) not in given:
                raise UnsupportedModelError(
                    f"{name}.{own} is shared with a module that weights cannot be delivered to: keep it resident."
                )
    return WeightSource(model, placement, loads, checkpoint, scratch, carrier, host_buffers)


def _tied_tables(model: Any, loads: Sequence[Load]) -> Iterator[Load]:
    """Loads for embeddings whose table belongs to another unit, which need rows of it only."""
    owners = {id(p): (load, name) for load in loads for name, p in load.unit.parameters.items()}
    own = {id(load.unit.module) for load in loads}
    for name, module in model.named_modules():
        if not isinstance(module, nn.Embedding) or id(module) in own:
            continue
        for kind, table in module.named_parameters(recurse=False):
            if id(table) not in owners:
                continue
            load, parameter_name = owners[id(table)]
            location = load.locations[parameter_name]
            delivery = load.delivery
            if delivery.rings and is_plain_lookup(module) and len(location.segments) <= 1:
                delivery = Delivery.ROWS
            path = f"{name}.{kind}"
            yield Load(Unit(name, module, {path: table}, rows=True), delivery, {path: location})


def _holders(unit: Unit) -> Iterator[tuple[nn.Module, str]]:
    for module in unit.module.modules():
        for own, _ in module.named_parameters(recurse=False):
            yield module, own


def offload_loaded(model: Any, budget: Budget) -> WeightSource:
    """Place the weights of ``model``, which is in memory already: what does not fit is written to the budget's scratch
    file, and its memory is freed. Raises like `load`.
    """
    units = divide(model)
    placement = place_units(units, model, budget)
    placed = zip(_units_of(units, placement), placement.deliveries, strict=True)
    moved = [(name, p, delivery) for unit, delivery in placed for name, p in unit.parameters.items()]
    moved = [(name, parameter, delivery) for name, parameter, delivery in moved if delivery is not Delivery.RESIDENT]
    for name, parameter, _ in moved:
        _refuse_wrapped(name, parameter.detach())
    scratch: ScratchFile | None = None
    locations: dict[int, ParameterLocation] = {}
    try:
        for name, parameter, delivery in moved:
            values = parameter.detach().contiguous()
            if id(parameter) in locations:
                continue
            if delivery.on_host:
                locations[id(parameter)] = ParameterLocation(
                    tuple(values.shape), values.dtype, host=values, phase=phase_of(values)
                )
            else:
                if budget.scratch is None:
                    raise UnsupportedModelError(
                        f"{name} ({values.nbytes} bytes) is in memory, and in no file in the form that it has there, "
                        f"so it cannot be read again. Give {_origin(model)} instead of the model, or disk=DIR:SIZE for "
                        "a copy of it, or host_memory=SIZE."
                    )
                scratch = scratch or ScratchFile(*budget.scratch)
                locations[id(parameter)] = ParameterLocation(
                    tuple(values.shape), values.dtype, (scratch.add(as_bytes(values)),)
                )
        return deliver(model, placement, locations, Checkpoint([]), scratch)
    except BaseException:
        if scratch is not None:
            scratch.close()
        raise


def _made_in_float32(root: Any, checkpoint: Checkpoint, lie_there: Collection[str]) -> Iterator[str]:
    """Names of parameters that are float32 in a model of 16 bits but not in its files, such as routers, so that there
    are no bytes to read later. Large ones go to the scratch file. Casts those that Transformers would cast while it
    loads.
    """
    dtype = getattr(root, "dtype", None)
    if dtype not in (torch.float16, torch.bfloat16):
        return
    named = list(getattr(root, "_keep_in_fp32_modules_strict", None) or ())
    if dtype is torch.float16:
        named += getattr(root, "_keep_in_fp32_modules", None) or ()
    for path, parameter in root.named_parameters():
        if parameter.dtype is dtype and any(part in path for part in named):
            parameter.data = parameter.data.float()
        nbytes = parameter.numel() * parameter.element_size()
        lies_there = path in lie_there or nbytes in checkpoint.float32_lengths
        if parameter.dtype is torch.float32 and nbytes <= _MADE_BYTES_MOST and not lies_there:
            yield path


def _origin(model: Any) -> str:
    """What to give instead of ``model``, which is in memory: the directory or file that it was loaded from."""
    name = str(getattr(model, "name_or_path", "") or "")
    stated: Any = getattr(model.config, "quantization_config", None)
    method = stated.get("quant_method") if isinstance(stated, Mapping) else getattr(stated, "quant_method", "")
    if getattr(method, "value", method) != "gguf":
        return f"its checkpoint, {name!r}," if name else "its checkpoint's directory"
    files = sorted(Path(name).glob("*.gguf")) if name else []
    if len(files) == 1:
        return f"its file, {str(files[0])!r},"
    return f"the GGUF file that it was loaded from, {name or 'DIR'}{'/' if files or not name else ':'}FILE.gguf,"


def _new_scratch(name: str, nbytes: int, budget: Budget) -> ScratchFile:
    if budget.scratch is None:
        raise UnsupportedModelError(
            f"{name} ({nbytes} bytes) has another form in memory than in a checkpoint's files, most often another "
            "dtype, so it cannot be read from there: give disk=DIR:SIZE for its final form, keep the checkpoint's "
            "dtype (dtype=auto), or give the model more memory."
        )
    return ScratchFile(*budget.scratch)


def _refuse_wrapped(name: str, values: Tensor) -> None:
    if type(values) is not Tensor or values.layout is not torch.strided:
        raise UnsupportedModelError(
            f"{name} is a {type(values).__name__}, no plain tensor: quantised weights cannot be placed under a budget "
            "yet. Load the model without a budget."
        )
    if values.dtype is torch.uint8 and not form_of(name):
        raise UnsupportedModelError(
            f"{name} is bytes in a form that Stowage does not know: reading them offloaded would not be noticed. "
            "Load the model without a budget, or pack its original: stowage pack MODEL DIR"
        )


def place_units(units: list[Unit], model: Any, budget: Budget) -> Placement:
    """The placement of ``units`` of ``model`` within ``budget``. The model may be on the meta device."""
    layers = [unit.name for unit in units if unit.name.rpartition(".")[2].isdigit()]
    to_device = budget.carrier is not None
    if to_device:
        _keep_equal_experts(units)

    def described(unit: Unit, layer: int) -> WeightUnit:
        apart = tuple(described(part, layer) for part in unit.apart)
        stacks = [p for p in unit.parameters.values() if unit.experts]
        gaps = sum(-(p[0].numel() * p.element_size()) % PAGE_BYTES for p in stacks)
        return WeightUnit(unit.name, unit.nbytes, len(unit.parameters), unit.rows, layer, unit.experts, apart, gaps)

    weight_units = [described(unit, layers.index(unit.name) if unit.name in layers else -1) for unit in units]
    tied = getattr(model, "all_tied_weights_keys", None) or {}
    own = {name for unit in units for name in unit.parameters}
    small = [
        tensor.numel() * tensor.element_size()
        for name, tensor in [*model.named_parameters(), *model.named_buffers()]
        if name not in own and tied.get(name, name) not in own and name not in {tied.get(n) for n in own}
    ]
    unpacked = max(workspace_bytes(packed_forms(model), to_device), unpacking_bytes(model, model.dtype, to_device))
    small_bytes = sum(small) + unpacked
    limits = budget.device_bytes, budget.host_bytes, budget.rules
    held_bytes, more = budget.held_bytes, budget.more
    return place(weight_units, small_bytes, *limits, to_device=to_device, held_bytes=held_bytes, more=more)


def _keep_equal_experts(units: list[Unit]) -> None:
    """On a device, only experts of one shape (that of the first) that may be renumbered are units of their own."""
    alike: list[tuple[torch.Size, torch.dtype]] = []
    for unit in units:
        parts = [part for part in unit.apart if renumbers(part.module)]
        shapes = [[(p.shape[1:], p.dtype) for p in part.parameters.values()] for part in parts]
        alike = alike or (shapes[0] if shapes else [])
        unit.apart = [part for part, shape in zip(parts, shapes, strict=True) if shape == alike]


def _units_of(units: list[Unit], placement: Placement) -> list[Unit]:
    """``units`` divided as ``placement`` divides them: experts apart from their layer or not."""
    return with_experts_apart(units, {one.name for one in placement.weight_units})
