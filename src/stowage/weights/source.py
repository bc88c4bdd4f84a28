"""`WeightSource`: gives each module its parameters when its forward begins, and takes them back when it ends.

Owns the hooks on a model's units and everything behind them: ring, cache of experts, readers, files. While a parameter
is away, every element of it reads as NaN: what computes with it by mistake is wrong for all to see, and never a little.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from stowage.errors import ModelError, UnsupportedModelError
from stowage.weights.checkpoint import Checkpoint, File
from stowage.weights.crossing import Carrier, Crossing, nbytes_of
from stowage.weights.experts import ExpertCache, Stacks, chosen
from stowage.weights.holds import Home, SlotLayout, layout, memory_of
from stowage.weights.image import Image
from stowage.weights.placement import Delivery, Placement
from stowage.weights.reading import Read, Readers
from stowage.weights.ring import Ring
from stowage.weights.units import Unit

__all__ = ["Load", "WeightSource", "absent"]

HOST = torch.device("cpu")
TIMEOUT_S = 120.0
"""The longest wait for one module's bytes."""


def absent(shape: Sequence[int], dtype: torch.dtype, device: torch.device = HOST) -> Tensor:
    """A tensor on ``device`` that takes no memory, for a parameter that is away: NaN, or bytes of ones, which as scales
    of packed weights are NaN. Raises UnsupportedModelError for other whole numbers.
    """
    if dtype is torch.uint8:
        return torch.full((1,), 0xFF, dtype=dtype, device=device).expand(tuple(shape))
    if not dtype.is_floating_point:
        raise UnsupportedModelError(
            f"a weight of type {dtype} has no value that says it is away, so it cannot be offloaded: keep its module "
            "resident."
        )
    # Not every type has NaN as a Python scalar fill (8-bit floats have): so it is made in float32 and cast.
    return torch.full((1,), float("nan")).to(dtype).to(device).expand(tuple(shape))


@dataclass(slots=True)
class Load:
    """A unit, how it is delivered, and where its parameters are while they are away: ``homes`` by their names."""

    unit: Unit
    delivery: Delivery
    homes: Mapping[str, Home]


class WeightSource:
    """Delivers ``loads`` to ``model``. Takes over ``checkpoint`` and ``image``, and closes them. ``carrier``: brings
    weights to the model's device, if that is a memory of its own.
    """

    def __init__(
        self,
        model: Any,
        placement: Placement,
        loads: Sequence[Load],
        checkpoint: Checkpoint,
        image: Image | None,
        carrier: Carrier | None = None,
    ) -> None:
        self.placement = placement
        self.device = carrier.device if carrier is not None else HOST
        self.identity = ""
        """Names the weights, where they have a name."""
        self._model = model
        self._checkpoint, self._image = checkpoint, image
        self._handles: list[Any] = []
        self._readers = Readers()
        self._ring: Ring | None = None
        self._began_s = 0.0
        self._passes, self._forward_s, self._row_bytes = 0, 0.0, 0
        self._order: list[int] | None = None
        self._closed = False
        ringed = [load for load in loads if load.delivery.rings]
        self._streams = [_Streamed(load, self.device) for load in ringed]
        self._crossing: Crossing | None = None
        self._pinned: Any = None
        if ringed:
            self._ring = Ring(
                len(ringed),
                placement.ring_slots,
                max(stream.layout.nbytes for stream in self._streams),
                self._reads,
                self._readers,
                TIMEOUT_S,
            )
            if carrier is not None:
                largest = max(nbytes_of(stream.homes) for stream in self._streams)
                self._crossing = Crossing(carrier, placement.ring_slots, largest, self._ring.give_back)
                self._pinned = carrier.pin(self._ring.numpy())
        self._experts: ExpertCache | None = None
        cached = [load for load in loads if load.delivery is Delivery.EXPERTS]
        if cached:
            stacks = [
                Stacks(c.unit.experts, [c.unit.parameters[n] for n in c.homes], list(c.homes.values())) for c in cached
            ]
            try:
                self._experts = ExpertCache(stacks, placement.cache_bytes, self._readers, TIMEOUT_S)
            except BaseException:
                self._readers.close()
                raise
        numbers = {id(load): number for of_kind in (ringed, cached) for number, load in enumerate(of_kind)}
        for load in loads:
            self._hook(load, numbers.get(id(load), -1))
        if any(load.delivery is not Delivery.RESIDENT for load in loads):
            model.register_forward_pre_hook(self._begin)
            self._handles.append(model.register_forward_hook(self._end, always_call=True))

    @property
    def ring_bytes(self) -> int:
        """Device memory that the ring takes."""
        if self._crossing is not None:
            return self._crossing.nbytes
        return self._ring.nbytes if self._ring is not None else 0

    @property
    def cache_bytes(self) -> int:
        """Device memory that the cache of experts takes."""
        return self._experts.nbytes if self._experts is not None else 0

    @property
    def image_bytes(self) -> int:
        """Disk that weights take in another form than the checkpoint's."""
        return self._image.nbytes if self._image is not None else 0

    def stats(self) -> dict[str, float]:
        """Bytes by delivery, and what was done since the start: ``passes`` of the whole model in ``forward_s``, of
        which they waited ``stall_s`` for weights; ``read_bytes`` from disk or host memory; how often an expert was in
        the cache, or not. Cheap.
        """
        ring, experts, placement = self._ring, self._experts, self.placement
        reading = [part for part in (ring, experts) if part is not None]
        return {
            **{f"{delivery.value}_bytes": placement.nbytes(delivery) for delivery in Delivery},
            "small_bytes": placement.small_bytes,
            "ring_bytes": self.ring_bytes,
            "image_bytes": self.image_bytes,
            "pass_bytes": placement.pass_bytes,
            "passes": self._passes,
            "read_bytes": self._row_bytes + sum(part.read_bytes for part in reading),
            "stall_s": sum(part.stall_s for part in reading),
            "cache_bytes": self.cache_bytes,
            "cache_experts": experts.frames if experts is not None else 0,
            "expert_hits": experts.hits if experts is not None else 0,
            "expert_misses": experts.misses if experts is not None else 0,
            "expert_read_bytes": experts.read_bytes if experts is not None else 0,
            "forward_s": self._forward_s,
        }

    @torch.no_grad()
    def prove(self) -> None:
        """Compute one token, and some more where experts are cached: every module must have got its weights, and the
        order in which they ask is learned.

        Raises UnsupportedModelError when a weight was used that was away.
        """
        for tokens in (1, 5) if self._experts is not None else (1,):
            self._order = []
            out = self._model(input_ids=torch.arange(tokens, device=self.device)[None], use_cache=False)
            if bool(torch.isnan(out.logits).any()):
                raise UnsupportedModelError(
                    f"a model of type {getattr(self._model.config, 'model_type', '?')!r} uses weights outside of the "
                    "modules that they belong to (or experts that its router did not choose, or computes NaN by "
                    "itself), so they cannot be delivered: give it more memory."
                )

    def close(self) -> None:
        """Stop delivering. The model cannot be used any more, unless everything was resident. May be called twice."""
        if self._closed:
            return
        self._closed = True
        for handle in self._handles:
            handle.remove()  # but not the one that refuses forwards from now on
        if self._crossing is not None:
            self._crossing.settle()
        ended = self._readers.close()
        if self._pinned is not None:
            self._pinned.close()
        if self._ring is not None and ended:
            self._ring.close()
        if self._experts is not None:
            self._experts.close(ended)
        self._checkpoint.close()
        if self._image is not None:
            self._image.close()

    def check(self) -> None:
        """Invariants, between forwards."""
        if self._ring is not None:
            self._ring.check()
        if self._crossing is not None:
            self._crossing.check()
        if self._experts is not None:
            self._experts.check()
        for stream in self._streams:
            assert all(p.data_ptr() == a.data_ptr() for p, a in zip(stream.parameters, stream.away, strict=True))

    # Hooks

    def _hook(self, load: Load, number: int) -> None:
        module = load.unit.module
        if load.delivery is Delivery.ROWS:
            rows = _Rows(load, self.device)
            self._handles.append(module.register_forward_pre_hook(self._rows_hook(rows)))
            self._handles.append(module.register_forward_hook(rows.take_back, always_call=True))
        elif load.delivery.rings:
            stream, ring, crossing = self._streams[number], self._ring, self._crossing
            assert ring is not None

            def before(_module: nn.Module, _args: Any) -> None:
                if self._order is not None:
                    self._order.append(number)
                if crossing is not None:
                    crossing.make_way(number)
                slot = ring.take(number)
                stream.check()
                views = stream.views(slot.number, slot.memory)
                stream.deliver(views if crossing is None else crossing.bring(number, stream.homes, views))

            def after(_module: nn.Module, _args: Any, _output: Any) -> None:
                stream.take_back()
                if crossing is None:
                    ring.give_back(number)
                else:
                    crossing.computed(number)

            self._handles.append(module.register_forward_pre_hook(before))
            self._handles.append(module.register_forward_hook(after, always_call=True))
        elif load.delivery is Delivery.EXPERTS:
            self._hook_experts(load, number)
        elif load.delivery is Delivery.MAPPED:
            files = _files(load.homes.values())
            for name, home in load.homes.items():
                load.unit.parameters[name].data = home.mapped() if home.host is None else home.host

            def unchanged(_module: nn.Module, _args: Any) -> None:
                for file in files:
                    file.check()

            self._handles.append(module.register_forward_pre_hook(unchanged))

    def _hook_experts(self, load: Load, number: int) -> None:
        files, cache = _files(load.homes.values()), self._experts
        assert cache is not None

        def before(_module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            for file in files:
                file.check()
            cache.take(number, chosen(args, kwargs))

        def after(_module: nn.Module, _args: Any, _output: Any) -> None:
            cache.give_back(number)

        self._handles.append(load.unit.module.register_forward_pre_hook(before, with_kwargs=True))
        self._handles.append(load.unit.module.register_forward_hook(after, always_call=True))

    def _rows_hook(self, rows: _Rows) -> Any:
        def before(_module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
            if not args:
                raise UnsupportedModelError("an embedding is called with a name for its ids: keep it resident.")
            ids, read_bytes = rows.deliver(args[0], self._readers)
            self._row_bytes += read_bytes
            return (ids, *args[1:])

        return before

    def _begin(self, _module: nn.Module, _args: Any) -> None:
        if self._closed:
            raise ModelError("the weights of this model were closed: load it again.")
        self._began_s = time.perf_counter()

    def _end(self, _module: nn.Module, _args: Any, output: Any) -> None:
        self._passes += 1
        self._forward_s += time.perf_counter() - self._began_s
        if self._crossing is not None:
            self._crossing.settle()
        order, self._order = self._order, None
        if self._ring is not None and order and output is not None and set(order) == set(range(len(self._streams))):
            self._ring.follow(order)

    def _reads(self, number: int, memory: memoryview) -> list[Read]:
        return self._streams[number].layout.reads(memory)


def _files(homes: Any) -> list[File]:
    return list({id(s.file): s.file for home in homes for s in home.segments}.values())


class _Streamed:
    """A unit that computes from slots of the ring."""

    def __init__(self, load: Load, device: torch.device) -> None:
        self.homes = list(load.homes.values())
        self.parameters = [load.unit.parameters[name] for name in load.homes]
        self.away = [absent(home.shape, home.dtype, device) for home in self.homes]
        self.layout: SlotLayout = layout(self.homes)
        self._files = _files(self.homes)
        self._views: dict[int, list[Tensor]] = {}
        self.take_back()

    def check(self) -> None:
        for file in self._files:
            file.check()

    def views(self, slot: int, memory: memoryview) -> list[Tensor]:
        """The parameters in a slot of the ring."""
        found = self._views.get(slot)
        if found is None:
            found = self._views[slot] = self.layout.tensors(self.homes, memory)
        return found

    def deliver(self, views: Sequence[Tensor]) -> None:
        for parameter, view in zip(self.parameters, views, strict=True):
            parameter.data = view

    def take_back(self) -> None:
        for parameter, away in zip(self.parameters, self.away, strict=True):
            parameter.data = away


class _Rows:
    """An embedding whose rows are read as they are asked for."""

    def __init__(self, load: Load, device: torch.device) -> None:
        ((name, home),) = load.homes.items()
        self._parameter = load.unit.parameters[name]
        self._home = home
        self._files = _files([home])
        self._table: File | memoryview
        self._table, self._begin = (
            (home.segments[0].file, home.segments[0].offset) if home.host is None else (memory_of(home.host), 0)
        )
        self._away = absent(home.shape, home.dtype, device)
        self._parameter.data = self._away
        module: Any = load.unit.module
        module.padding_idx = None  # only gradients want it, and it may lie outside of the rows

    def deliver(self, ids: Tensor, readers: Readers) -> tuple[Tensor, int]:
        """Rows of ``ids`` (any shape) into the module's weight; the numbers they have there, and how many bytes they
        are.
        """
        for file in self._files:
            file.check()
        rows, numbers = torch.unique(ids, return_inverse=True)
        wanted = rows.tolist()
        if wanted and not 0 <= wanted[0] <= wanted[-1] < self._home.shape[0]:
            raise IndexError(f"a token id lies outside of the embedding's {self._home.shape[0]} rows")
        row_bytes = self._home.nbytes // self._home.shape[0]
        raw = np.empty(max(1, len(wanted)) * row_bytes, np.uint8)
        memory = raw.data
        ticket = readers.start(
            [
                Read(self._table, self._begin + row * row_bytes, memory[at * row_bytes : (at + 1) * row_bytes])
                for at, row in enumerate(wanted)
            ]
        )
        ticket.wait(TIMEOUT_S)
        ticket.raise_error()
        with torch.inference_mode(False):  # parameters of other devices take no tensors of that mode
            table = torch.from_numpy(raw).view(self._home.dtype).view(-1, *self._home.shape[1:])
            self._parameter.data = table.to(self._away.device)
        return numbers, len(wanted) * row_bytes

    def take_back(self, _module: nn.Module, _args: Any, _output: Any) -> None:
        self._parameter.data = self._away
