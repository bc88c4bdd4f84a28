"""`WeightSource`: gives each module its parameters when its forward begins, and takes them back when it ends.

Owns the hooks on a model's units and everything behind them: ring, cache of experts, readers, files. While a parameter
is away, every element of it reads as NaN: what computes with it by mistake is wrong for all to see, and never a little.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from stowage.errors import ModelError, UnsupportedModelError
from stowage.weights.checkpoint import Checkpoint
from stowage.weights.delivery import HOST, TIMEOUT_S, Load, Rows, Streamed, absent, files_of, hide, show
from stowage.weights.device_prefetcher import Carrier, Crossing, nbytes_of
from stowage.weights.experts.cache import ExpertCache, Stacks, chosen
from stowage.weights.experts.device_cache import DeviceExperts, Seated, renumbered
from stowage.weights.host_buffers import Berths
from stowage.weights.placement import Delivery, Placement
from stowage.weights.prefetcher import Ring
from stowage.weights.reader import Read, Readers
from stowage.weights.repacked import Image

__all__ = ["Load", "WeightSource", "absent"]


class WeightSource:
    """Delivers ``loads`` to ``model``. Takes over ``checkpoint``, ``image`` and ``berths``, and closes them.
    ``carrier``: brings weights to the model's device, if that is a memory of its own; ``berths``: the host memory from
    which it does.
    """

    def __init__(
        self,
        model: Any,
        placement: Placement,
        loads: Sequence[Load],
        checkpoint: Checkpoint,
        image: Image | None,
        carrier: Carrier | None = None,
        berths: Berths | None = None,
    ) -> None:
        self.placement = placement
        self.device = carrier.device if carrier is not None else HOST
        self.identity = ""
        """Names the weights, where they have a name."""
        self._model = model
        self._checkpoint, self._image = checkpoint, image
        self._handles: list[Any] = []
        self._readers = Readers()
        self._began_s = 0.0
        self._passes, self._forward_s, self._row_bytes = 0, 0.0, 0
        self._order: list[int] | None = None
        self._gradients: dict[int, bool] = {}
        """By thread, while it is in a forward: whether it had asked for gradients."""
        self._closed = False
        self._loads, self._carrier, self._berths = loads, carrier, berths or Berths()
        ringed = [load for load in loads if load.delivery.rings]
        self._streams = [Streamed(load, self.device) for load in ringed]
        self._in_ring = [n for n, load in enumerate(ringed) if carrier is None or load.delivery is Delivery.STREAM]
        self._ring: Ring | None = self._make_ring() if self._in_ring else None
        self._pinned: Any = None
        self._crossing: Crossing | None = None
        self._experts: ExpertCache | None = None
        cached = [load for load in loads if load.delivery is Delivery.EXPERTS]
        try:
            if carrier is not None:
                self._cross(carrier)
            if cached:
                self._experts = self._cache(cached)
            numbers = {id(load): number for of_kind in (ringed, cached) for number, load in enumerate(of_kind)}
            for load in loads:
                self._hook(load, numbers.get(id(load), -1))
        except BaseException:
            self._let_go()
            raise
        if any(load.delivery is not Delivery.RESIDENT for load in loads):
            model.register_forward_pre_hook(self._begin)
            self._handles.append(model.register_forward_hook(self._end, always_call=True))

    def _make_ring(self) -> Ring:
        nbytes = max(self._streams[number].layout.nbytes for number in self._in_ring)
        units, slots = len(self._in_ring), self.placement.ring_slots
        return Ring(units, slots, nbytes, self._reads, self._readers, TIMEOUT_S)

    def _cross(self, carrier: Carrier) -> None:
        """Pin what crosses over, and make the buffers."""
        self._berths.pin(carrier.pin)
        if self._ring is not None:
            self._pinned = carrier.pin(self._ring.numpy())
        if self._streams:
            homes = [stream.homes for stream in self._streams]
            largest = max(map(nbytes_of, homes))
            slots = self.placement.ring_slots
            self._crossing = Crossing(carrier, slots, largest, homes, self._in_ring, self._give_back)

    def _cache(self, cached: Sequence[Load]) -> ExpertCache:
        most_bytes, carrier = self.placement.cache_bytes, self._carrier
        parts = [(c, [c.unit.parameters[n] for n in c.homes], list(c.homes.values())) for c in cached]
        if carrier is None:
            stacks = [Stacks(load.unit.experts, parameters, homes) for load, parameters, homes in parts]
            return ExpertCache(stacks, most_bytes, self._readers, TIMEOUT_S)
        seated = [Seated(load.unit.module, parameters, homes, carrier.device) for load, parameters, homes in parts]
        first = self.placement.ring_slots
        return DeviceExperts(seated, most_bytes, self._readers, TIMEOUT_S, carrier, first)

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
        direct_bytes = self._crossing.direct_bytes if self._crossing is not None else 0
        return {
            **{f"{delivery.value}_bytes": placement.nbytes(delivery) for delivery in Delivery},
            "small_bytes": placement.small_bytes,
            "ring_bytes": self.ring_bytes,
            "image_bytes": self.image_bytes,
            "pass_bytes": placement.pass_bytes,
            "passes": self._passes,
            "read_bytes": self._row_bytes + direct_bytes + sum(part.read_bytes for part in reading),
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
        self._let_go()

    def _let_go(self) -> None:
        """Give back memory, threads and files."""
        if self._crossing is not None:
            self._crossing.close()
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
        self._berths.close()
        self._checkpoint.close()
        if self._image is not None:
            self._image.close()

    @property
    def capturable(self) -> bool:
        """Whether a whole forward can be captured, as a CUDA graph is, and done again (`apart`, `join`): all weights
        are on the device or in pinned host memory, so each pass makes the same copies between the same addresses.
        """
        still = (Delivery.RESIDENT, Delivery.MAPPED, Delivery.PREFETCH)
        if not all(load.delivery in still for load in self._loads):
            return False
        return True if not self._streams else self._crossing is not None and self._berths.whole

    @contextlib.contextmanager
    def apart(self) -> Iterator[None]:
        """Forwards in here begin and join all of their copies by themselves, so that each can be captured. To be
        entered before capturing, by the stream that will. Raises ModelError when the source is not ``capturable``.
        """
        if not self.capturable:
            raise ModelError("weights that are read as they are asked for cannot be part of a captured step.")
        if self._crossing is not None:
            self._crossing.begin_apart()
        try:
            yield
        finally:
            if self._crossing is not None:
                self._crossing.end_apart()

    def join(self) -> None:
        """Before a captured forward is done again: it comes after all copies that other forwards have begun."""
        if self._crossing is not None:
            self._crossing.join()

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
            rows = Rows(load, self.device)
            self._handles.append(module.register_forward_pre_hook(self._rows_hook(rows)))
            self._handles.append(module.register_forward_hook(rows.take_back, always_call=True))
        elif load.delivery.rings:
            before, after = self._unit_hooks(number)
            self._handles.append(module.register_forward_pre_hook(before))
            self._handles.append(module.register_forward_hook(after, always_call=True))
        elif load.delivery is Delivery.EXPERTS:
            self._hook_experts(load, number)
        elif load.delivery is Delivery.MAPPED:
            show(load, self._carrier)
            files = files_of(load.homes.values())

            def unchanged(_module: nn.Module, _args: Any) -> None:
                for file in files:
                    file.check()

            if files:
                self._handles.append(module.register_forward_pre_hook(unchanged))

    def _unit_hooks(self, number: int) -> tuple[Callable[..., None], Callable[..., None]]:
        stream, ring, crossing = self._streams[number], self._ring, self._crossing
        in_ring = self._in_ring.index(number) if number in self._in_ring else -1

        def slot() -> list[Tensor]:
            assert ring is not None
            found = ring.take(in_ring)
            try:
                stream.check()
            except BaseException:
                ring.give_back(in_ring)
                raise
            return stream.views(found.number, found.memory)

        taker = 0

        def before(_module: nn.Module, _args: Any) -> None:
            nonlocal taker
            _refuse_gradients()
            if self._order is not None:
                self._order.append(number)
            stream.deliver(slot() if crossing is None else crossing.take(number, slot))
            taker = threading.get_ident()

        def after(_module: nn.Module, _args: Any, _output: Any) -> None:
            nonlocal taker
            if taker != threading.get_ident():  # another thread's forward, which was refused
                return
            taker = 0
            stream.take_back()
            if crossing is not None:
                crossing.computed(number)
            elif ring is not None:
                ring.give_back(in_ring)

        return before, after

    def _hook_experts(self, load: Load, number: int) -> None:
        files, cache = files_of(load.homes.values()), self._experts
        assert cache is not None

        def before(_module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            _refuse_gradients()
            for file in files:
                file.check()
            choices = chosen(args, kwargs)
            if isinstance(cache, DeviceExperts):
                return renumbered(args, kwargs, choices, cache.bring(number, choices))
            cache.take(number, choices)
            return None

        def after(_module: nn.Module, _args: Any, _output: Any) -> None:
            cache.give_back(number)

        self._handles.append(load.unit.module.register_forward_pre_hook(before, with_kwargs=True))
        self._handles.append(load.unit.module.register_forward_hook(after, always_call=True))

    def _rows_hook(self, rows: Rows) -> Any:
        def before(_module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
            _refuse_gradients()
            if not args:
                raise UnsupportedModelError("an embedding is called with a name for its ids: keep it resident.")
            ids, read_bytes = rows.deliver(args[0], self._readers)
            self._row_bytes += read_bytes
            return (ids, *args[1:])

        return before

    def _begin(self, _module: nn.Module, _args: Any) -> None:
        if self._closed:
            raise ModelError("the weights of this model were closed: load it again.")
        self._gradients[threading.get_ident()] = torch.is_grad_enabled()
        torch._C._set_grad_enabled(False)
        self._began_s = time.perf_counter()
        if self._crossing is not None:
            self._crossing.begin_pass()

    def _end(self, _module: nn.Module, _args: Any, output: Any) -> None:
        torch._C._set_grad_enabled(self._gradients.pop(threading.get_ident(), torch.is_grad_enabled()))
        self._passes += 1
        self._forward_s += time.perf_counter() - self._began_s
        if self._crossing is not None:
            self._crossing.end_pass()
        order, self._order = self._order, None
        if order and output is not None and set(order) == set(range(len(self._streams))):
            if self._crossing is not None:
                self._crossing.follow(order)
            if self._ring is not None:
                self._ring.follow([self._in_ring.index(number) for number in order if number in self._in_ring])

    def _give_back(self, number: int) -> None:
        assert self._ring is not None
        self._ring.give_back(self._in_ring.index(number))

    def _reads(self, in_ring: int, memory: memoryview) -> list[Read]:
        return self._streams[self._in_ring[in_ring]].layout.reads(memory)


def _refuse_gradients() -> None:
    """Backwards, the weights would be somewhere else. A forward of the whole model never asks for gradients."""
    if torch.is_grad_enabled():
        raise ModelError(
            "weights that come and go have no gradients: call the whole model, or this part of it under "
            "torch.no_grad()."
        )
