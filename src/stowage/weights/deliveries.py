"""Delivers a model's offloaded weights to its modules, each by its placement, and releases them after use.

Owns the hooks on a model's units and what is behind them: ring, device buffers, expert cache, readers, files; and the
order in which all of that is reset after a forward that failed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from stowage.errors import ModelError, UnsupportedModelError
from stowage.weights.checkpoint import Checkpoint
from stowage.weights.delivery import HOST, TIMEOUT_S, Delivered, Load, Rows, Stacked, Streamed, files_of, hide, show
from stowage.weights.device_prefetcher import Carrier, DevicePrefetcher, RingSlots, nbytes_of
from stowage.weights.experts.cache import ExpertCache, Stacks, chosen
from stowage.weights.experts.device_cache import DeviceExperts, LayerExperts, renumbered
from stowage.weights.experts.table import ExpertTable
from stowage.weights.file import File
from stowage.weights.forward_passes import ForwardPasses
from stowage.weights.gradients import Gradients
from stowage.weights.host_buffers import HostBuffers
from stowage.weights.placement import Placement
from stowage.weights.quantized.stacks import computes_one_by_one
from stowage.weights.reader import Read, Readers
from stowage.weights.refusals import refuse_transforms
from stowage.weights.ring import Ring
from stowage.weights.scratch_file import ScratchFile
from stowage.weights.weight_unit import Delivery

_Hooks = tuple[Callable[[Any, Any], Any], Callable[[], None]]


class Deliveries:
    """Delivers ``loads`` to ``model``. Takes over the files and ``host_buffers``. See `WeightSource`."""

    def __init__(
        self,
        model: Any,
        placement: Placement,
        loads: Sequence[Load],
        checkpoint: Checkpoint,
        scratch: ScratchFile | None,
        carrier: Carrier | None,
        host_buffers: HostBuffers | None,
    ) -> None:
        self.placement = placement
        self.device = carrier.device if carrier is not None else HOST
        self._model = model
        self._checkpoint, self._scratch = checkpoint, scratch
        self._handles: list[Any] = []
        self._readers = Readers()
        self._passes = ForwardPasses(self, self._unfrozen)
        self._gradients = Gradients(self._slot, self._give_back, self._passes.begin_backward, self._follow_training)
        self._row_bytes = 0
        self._asked: list[int] = []
        self._before: list[int] = []
        self._learned = False
        self._gone = False
        self._mapped: list[File] = []
        self._locations = {
            id(load.unit.parameters[name]): location for load in loads for name, location in load.locations.items()
        }
        self._loads, self._carrier, self._host_buffers = loads, carrier, host_buffers or HostBuffers()
        ringed = [load for load in loads if load.delivery.rings]
        self._streams = [Streamed(load, self.device) for load in ringed]
        self._delivered: list[Delivered] = list(self._streams)
        self._in_ring = [n for n, load in enumerate(ringed) if carrier is None or load.delivery is Delivery.STREAM]
        self._ring: Ring | None = self._make_ring() if self._in_ring else None
        self._pinned: Any = None
        self._device_prefetcher: DevicePrefetcher | None = None
        self._experts: ExpertTable | None = None
        cached = [load for load in loads if load.delivery is Delivery.EXPERTS]
        try:
            if carrier is not None:
                self._prepare_device(carrier)
            if cached:
                self._experts = self._cache(cached)
            numbers = {id(load): number for of_kind in (ringed, cached) for number, load in enumerate(of_kind)}
            for load in loads:
                self._hook(load, numbers.get(id(load), -1))
        except BaseException:
            self._gone = True
            self._let_go()
            raise

    def _make_ring(self) -> Ring:
        nbytes = max(self._streams[number].layout.nbytes for number in self._in_ring)
        units, slots = len(self._in_ring), self.placement.ring_slots
        return Ring(units, slots, nbytes, self._reads, self._readers, TIMEOUT_S)

    def _prepare_device(self, carrier: Carrier) -> None:
        """Pin the host memory that is copied to the device, and make the device buffers."""
        self._host_buffers.pin(carrier.pin)
        if self._ring is not None:
            self._pinned = carrier.pin(self._ring.numpy())
        if self._streams:
            locations = [stream.locations for stream in self._streams]
            largest = max(map(nbytes_of, locations))
            slots = RingSlots(frozenset(self._in_ring), self._slot, self._give_back)
            buffers = self.placement.ring_slots
            self._device_prefetcher = DevicePrefetcher(carrier, buffers, largest, locations, slots)

    def _cache(self, cached: Sequence[Load]) -> ExpertTable:
        most_bytes, carrier = self.placement.cache_bytes, self._carrier
        parts = [
            (load, [load.unit.parameters[name] for name in load.locations], list(load.locations.values()))
            for load in cached
        ]
        if carrier is None:
            stacks = [Stacks(load.unit.experts, parameters, locations) for load, parameters, locations in parts]
            return ExpertCache(stacks, most_bytes, self._readers, TIMEOUT_S)
        seated = [
            LayerExperts(load.unit.module, parameters, locations, carrier.device)
            for load, parameters, locations in parts
        ]
        first = self.placement.ring_slots
        return DeviceExperts(seated, most_bytes, self._readers, TIMEOUT_S, carrier, first)

    def _let_go(self) -> None:
        """Release memory, threads and files."""
        if self._device_prefetcher is not None:
            self._device_prefetcher.close()
        if isinstance(self._experts, DeviceExperts):
            self._experts.settle()
        ended = self._readers.close()
        if self._carrier is not None:
            hide(self._loads, self._carrier)
        if self._pinned is not None:
            self._pinned.close()
        if self._ring is not None and ended:
            self._ring.close()
        if self._experts is not None:
            self._experts.close(ended)
        self._host_buffers.close()
        self._checkpoint.close()
        if self._scratch is not None:
            self._scratch.close()

    def _unfrozen(self) -> bool:
        """Whether any parameter of the model requires gradients."""
        return any(p.requires_grad for p in self._model.parameters())

    # Around forwards (``forward_passes.PassCallbacks``)

    def recover(self, *, forked: bool) -> None:
        if forked and self._carrier is not None:
            raise ModelError(
                f"this process was forked after the model was loaded, and {self.device} belongs to the one that loaded "
                "it: load the model in this one."
            )
        if forked:
            self._readers.forked()
        if isinstance(self._experts, DeviceExperts):
            for seated in self._experts.layers:
                seated.take_back()
        self.hide()
        self._readers.drain(TIMEOUT_S)
        if self._device_prefetcher is not None or self._carrier is not None:
            torch.zeros(1, device=self.device).cpu()
            if self.device.type == "cuda":
                torch.cuda.synchronize(self.device)
        if self._device_prefetcher is not None:
            self._device_prefetcher.reset()
        if self._ring is not None:
            self._ring.reset()
        self._gradients.reset()
        if self._experts is not None and forked:
            self._experts.forked()
        elif self._experts is not None:
            self._experts.reset()

    def hide(self) -> None:
        for part in self._delivered:
            part.take_back()

    def begin_pass(self) -> None:
        refuse_transforms(bool(self._delivered))
        self._asked = []
        self._gradients.saved = False
        if self._device_prefetcher is not None:
            self._device_prefetcher.begin_pass()

    def end_pass(self, whole: bool) -> None:
        order, self._asked = self._asked, []
        if self._device_prefetcher is not None:
            self._device_prefetcher.end_pass()
        if whole and self._gradients.saved:
            self._gradients.forwards(order)
        elif whole and order and (order == self._before or not self._before):
            self._follow(order)
        self._before = order

    def _follow(self, order: list[int]) -> None:
        """Expect the next forwards to use units in this order, without those that this forward did not use."""
        in_ring = [self._in_ring.index(number) for number in order if number in self._in_ring]
        if self._device_prefetcher is not None:
            if self._learned or set(order) != set(range(len(self._streams))):
                return
            self._device_prefetcher.follow(order)
        self._learned = True
        if self._ring is not None and in_ring:
            self._ring.follow(in_ring)

    # Hooks

    def _hook(self, load: Load, number: int) -> None:
        module = load.unit.module
        if load.delivery is Delivery.MAPPED:
            show(load, self._carrier)
            files = files_of(load.locations.values())

            def unchanged(_module: nn.Module, _args: Any) -> None:
                for file in files:
                    file.check()

            if files:
                self._mapped += [file for file in files if file not in self._mapped]
                self._handles.append(module.register_forward_pre_hook(unchanged))
            return
        if load.delivery is Delivery.ROWS:
            bring, take_back = self._rows_hooks(Rows(load, self.device))
        elif load.delivery is Delivery.EXPERTS:
            bring, take_back = self._expert_hooks(load, number)
        elif load.delivery.rings:
            bring, take_back = self._unit_hooks(number)
        else:
            return
        weights = [load.unit.parameters[name] for name in load.locations]
        before, after = self._passes.hooks(bring, take_back, weights, asks=not load.delivery.rings)
        self._handles.append(module.register_forward_pre_hook(before, with_kwargs=True))
        self._handles.append(module.register_forward_hook(after, with_kwargs=True, always_call=True))

    def _unit_hooks(self, number: int) -> _Hooks:
        stream, device_prefetcher = self._streams[number], self._device_prefetcher
        passes, gradients = self._passes, self._gradients
        shown: list[Tensor] = []

        def bring(_args: Any, _kwargs: Any) -> None:
            nonlocal shown
            if passes.backward is not None:
                stream.deliver(gradients.lend(number))
                return
            self._asked.append(number)
            shown = self._slot(number) if device_prefetcher is None else device_prefetcher.take(number)
            if passes.differentiates:
                gradients.know(number, shown)
            stream.deliver(shown)

        def take_back() -> None:
            stream.take_back()
            if passes.backward is not None:
                return
            if passes.differentiates:
                gradients.check(number, shown)
            if device_prefetcher is not None:
                device_prefetcher.give_back(number)
            else:
                self._give_back(number)

        return bring, take_back

    def _expert_hooks(self, load: Load, number: int) -> _Hooks:
        files, cache = files_of(load.locations.values()), self._experts
        module: Any = load.unit.module
        assert cache is not None
        stacked = None if isinstance(cache, DeviceExperts) else Stacked(load)
        if stacked is not None:
            self._delivered.append(stacked)

        def bring(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            for file in files:
                file.check()
            choices = chosen(args, kwargs)
            if isinstance(cache, DeviceExperts):
                return renumbered(args, kwargs, choices, cache.bring(number, choices))
            one_by_one = computes_one_by_one(module)
            cache.take(number, choices, waits=not one_by_one)
            if one_by_one:
                module.arriving = partial(cache.arriving, number)
            if stacked is not None:
                stacked.show()
            return None

        def take_back() -> None:
            if stacked is not None:
                stacked.take_back()
            vars(module).pop("arriving", None)
            cache.give_back(number)

        return bring, take_back

    def _rows_hooks(self, rows: Rows) -> _Hooks:
        self._delivered.append(rows)

        def bring(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            if rows.replaced:  # with another table, by ``torch.func.functional_call``
                return None
            if not args:
                raise UnsupportedModelError("an embedding is called with a name for its ids: keep it resident.")
            ids, read_bytes = rows.read(args[0], self._readers)
            self._row_bytes += read_bytes
            return (ids, *args[1:]), kwargs

        return bring, rows.take_back

    def _slot(self, number: int) -> list[Tensor]:
        """The parameters of a unit in the ring, valid until ``_give_back``."""
        assert self._ring is not None
        stream, in_ring = self._streams[number], self._in_ring.index(number)
        found = self._ring.take(in_ring)
        try:
            stream.check()
        except BaseException:
            self._ring.give_back(in_ring)
            raise
        return stream.views(found.number, found.memory)

    def _follow_training(self, order: list[int]) -> None:
        """Expect this order of units from training: forward, then backward."""
        self._before = []
        if self._ring is not None and order:
            self._ring.follow([self._in_ring.index(number) for number in order])

    def _give_back(self, number: int) -> None:
        assert self._ring is not None
        self._ring.give_back(self._in_ring.index(number))

    def _reads(self, in_ring: int, memory: memoryview) -> list[Read]:
        return self._streams[self._in_ring[in_ring]].layout.reads(memory)
