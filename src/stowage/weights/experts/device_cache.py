"""A cache on a device for the experts of all layers: copied there when a router chooses them.

Owns the cache's frames, which are a layer's stacked parameters while it computes, and the staging buffers for experts
on disk. While its layer computes, an expert is numbered by its frame: the router's choices are renumbered, and other
per-expert tensors of the module are put in the same order. Transformers' grouped and batched kernels add up a token's
experts in the order of its choices, whatever their numbers, so answers do not change; other modules are refused
(``renumbers``).

Reading the choices synchronizes with the device once per layer of experts. Copies are on the carrier's stream: after
the work that reads a frame, and before the work that will.
"""

from __future__ import annotations

import contextlib
import mmap
import threading
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import torch
from torch import Tensor, nn

from stowage.core.geometry import ALIGNMENT_BYTES, round_up
from stowage.errors import StorageError, TransferError
from stowage.weights.device_prefetcher import Carrier, PrefetchTicket
from stowage.weights.experts.table import ExpertTable
from stowage.weights.offloaded_parameter import nan_placeholder, offload, restore, set_data
from stowage.weights.parameter_location import ParameterLocation
from stowage.weights.placement import EXPERT_STAGES
from stowage.weights.reader import Readers, Ticket

_LIKELY: Final = 0.5
"""An expert is copied before it is chosen when more than this share of recent tokens chose it: at least one of two
such copies is needed. It evicts no expert that is expected back sooner."""


class LayerExperts:
    """The experts of one layer: ``module``, its stacked ``parameters``, and their ``locations``."""

    def __init__(
        self,
        module: Any,
        parameters: Sequence[nn.Parameter],
        locations: Sequence[ParameterLocation],
        device: torch.device,
    ) -> None:
        self.module, self.parameters, self.locations = module, list(parameters), list(locations)
        self.experts = locations[0].shape[0]
        self.in_host = all(location.host is not None for location in locations)
        own = {id(parameter) for parameter in parameters}
        beside = [*module.parameters(recurse=False), *module.buffers(recurse=False)]
        self.beside = [t for t in beside if id(t) not in own and t.dim() and len(t) == self.experts]
        self._values: list[Tensor] = []
        self._offloaded = [nan_placeholder(location.shape, location.dtype, device) for location in locations]
        self.take_back()

    def show(self, frames: Sequence[Tensor], expert_in: Tensor) -> None:
        """Point the module's parameters at all ``frames``; frame i holds the expert ``expert_in[i]``."""
        self.module.num_experts = len(expert_in)
        for parameter, frame in zip(self.parameters, frames, strict=True):
            restore(parameter, frame)
        self._values = [tensor.data for tensor in self.beside]  # delivered by now, where it is offloaded otherwise
        with torch.inference_mode(False):
            for tensor, values in zip(self.beside, self._values, strict=True):
                set_data(tensor, values.index_select(0, expert_in))

    def take_back(self) -> None:
        """May be called twice."""
        self.module.num_experts = self.experts
        for parameter, offloaded in zip(self.parameters, self._offloaded, strict=True):
            offload(parameter, offloaded)
        for tensor, values in zip(self.beside, self._values, strict=False):
            set_data(tensor, values)
        self._values = []


@dataclass(slots=True)
class _Stage:
    """A staging buffer for one expert from disk, with the reads that fill it and the copies from it."""

    memory: memoryview
    filling: Ticket | None = None
    leaving: PrefetchTicket | None = None


class DeviceExperts(ExpertTable):
    """For ``layers``, in the order in which they are computed. ``cache_bytes`` must hold all experts of one layer.
    ``first``: the carrier's number of the first frame. ``timeout_s``: the longest wait for a read.
    """

    def __init__(
        self,
        layers: Sequence[LayerExperts],
        cache_bytes: int,
        readers: Readers,
        timeout_s: float,
        carrier: Carrier,
        first: int,
    ) -> None:
        shapes = {tuple((location.shape[1:], location.dtype) for location in layer.locations) for layer in layers}
        assert len(shapes) == 1, "all layers' experts are alike"
        self.layers, self._carrier, self._first = list(layers), carrier, first
        self._expert_bytes = sum(location.nbytes // layers[0].experts for location in layers[0].locations)
        count = min(cache_bytes // self._expert_bytes, sum(layer.experts for layer in layers))
        super().__init__([layer.experts for layer in layers], count, readers, timeout_s)
        with torch.inference_mode(False):
            self._there = [
                torch.zeros((count, *location.shape[1:]), dtype=location.dtype, device=carrier.device)
                for location in layers[0].locations
            ]
        self._used: list[int] = []
        self._last: PrefetchTicket | None = None
        self._stages: list[_Stage] = []
        self._pinned_stages: Any = None
        if not all(layer.in_host for layer in layers):
            each = stage_bytes(layers[0].locations, layers[0].experts)
            memory = mmap.mmap(-1, EXPERT_STAGES * each)
            self._stages = [_Stage(memoryview(memory)[n * each : (n + 1) * each]) for n in range(EXPERT_STAGES)]
            self._pinned_stages = carrier.pin(np.frombuffer(memory, np.uint8))

    @property
    def nbytes(self) -> int:
        """Device memory that it takes."""
        return sum(frames.nbytes for frames in self._there)

    def bring(self, layer: int, choices: Tensor) -> Tensor:
        """Copy the experts in ``choices`` (tokens, experts per token) of ``layer`` to the device, where they stay until
        `give_back`, and point the module at them. Returns the choices as frame numbers.

        Raises StorageError (TransferError) when a read or copy fails, ModelError when two threads compute at once.
        """
        here = choices.detach().cpu()
        self.take(layer, here)
        self._changing = True
        ids = here.numpy().astype(np.int64)
        real = (ids >= 0) & (ids < self._experts[layer])
        numbers = np.where(real, self._frame[layer, np.where(real, ids, 0)], self.frames)
        needed = np.unique(numbers[real])
        self._used = (self._first + needed).tolist()
        self._carrier.use(self._used)
        expert_in = torch.from_numpy(np.where(self._layer_in == layer, self._expert_in, 0))
        self.layers[layer].show(self._there, expert_in.to(self._carrier.device))
        self._go_ahead(layer)
        self._changing = False
        return torch.from_numpy(numbers).to(choices.dtype).to(choices.device)

    def give_back(self, layer: int) -> None:
        """All work with experts of ``layer`` has been issued. May be called twice."""
        if self._holder != (layer, threading.get_ident()):
            return
        if self._used:
            self._carrier.computed(self._used)
            self._used = []
        super().give_back(layer)
        self.layers[layer].take_back()

    def settle(self) -> None:
        """Wait until all copies and reads have ended, failed or not."""
        with contextlib.suppress(TransferError):
            if self._last is not None:
                self._last.wait()
        for stage in self._stages:
            with contextlib.suppress(StorageError):
                self._vacate(stage)

    def close(self, ended: bool) -> None:
        """See ``ExpertTable.close``. ``settle`` was called."""
        if self._pinned_stages is not None:
            self._pinned_stages.close()
        self._stages.clear()

    def reset(self) -> None:
        """See ``ExpertTable.reset``. The device is idle."""
        for layer in self.layers:
            layer.take_back()
        self._used, self._last = [], None
        for stage in self._stages:
            stage.filling = stage.leaving = None
        super().reset()

    def forked(self) -> None:
        """Never called: a child process cannot use its parent's device (``Deliveries.recover`` refuses before)."""
        raise AssertionError("a device belongs to one process")

    def check(self) -> None:
        self._check_tables()
        assert all(layer.module.num_experts == layer.experts for layer in self.layers)

    def _fill(self, layer: int, missing: Sequence[int], frames: Sequence[int]) -> None:
        """Begin to copy the experts ``missing`` of ``layer`` into the free ``frames``."""
        if not missing:
            return
        brought = self.layers[layer]
        for expert, frame in zip(missing, frames, strict=True):
            self._seat(layer, expert, frame)
        self.read_bytes += len(missing) * self._expert_bytes
        try:
            if brought.in_host:
                self._copy(frames, self._pairs(brought, missing, frames))
            else:
                self._from_disk(brought, missing, frames)
        except BaseException:
            for frame in frames:
                self._evict(frame)
            raise

    def _pairs(
        self, brought: LayerExperts, experts: Sequence[int], frames: Sequence[int]
    ) -> list[tuple[Tensor, Tensor]]:
        hosts = [location.host for location in brought.locations if location.host is not None]
        stacks = list(zip(self._there, hosts, strict=True))
        return [(there[f], here[e]) for e, f in zip(experts, frames, strict=True) for there, here in stacks]

    def _from_disk(self, brought: LayerExperts, experts: Sequence[int], frames: Sequence[int]) -> None:
        """Copy experts through the staging buffers: the next ones are read while one is copied to the device."""
        reading: deque[tuple[_Stage, int]] = deque()
        for turn, (expert, frame) in enumerate(zip(experts, frames, strict=True)):
            if len(reading) == len(self._stages):
                self._send(brought, *reading.popleft())
            stage = self._stages[turn % len(self._stages)]
            self._vacate(stage)
            reads = [
                read
                for location, into in zip(brought.locations, self._parts(brought, stage), strict=True)
                for read in location.reads(expert * into.nbytes, into)
            ]
            stage.filling = self._readers.start(reads)
            reading.append((stage, frame))
        while reading:
            self._send(brought, *reading.popleft())

    def _parts(self, brought: LayerExperts, stage: _Stage) -> list[memoryview]:
        """The memory of each parameter of an expert in ``stage``."""
        parts, begin = [], 0
        for location in brought.locations:
            parts.append(stage.memory[begin : begin + location.nbytes // brought.experts])
            begin += round_up(parts[-1].nbytes, ALIGNMENT_BYTES)
        return parts

    def _send(self, brought: LayerExperts, stage: _Stage, frame: int) -> None:
        """Wait until the expert in ``stage`` is read, and copy it into ``frame``."""
        assert stage.filling is not None
        self._finish(stage.filling)
        stage.filling = None
        here = [
            torch.frombuffer(part, dtype=location.dtype).view(location.shape[1:])
            for location, part in zip(brought.locations, self._parts(brought, stage), strict=True)
        ]
        stage.leaving = self._copy([frame], list(zip([there[frame] for there in self._there], here, strict=True)))

    def _vacate(self, stage: _Stage) -> None:
        """Wait until nothing reads or writes ``stage``."""
        if stage.filling is not None:  # of a forward that failed
            self._stall.wait(stage.filling)
            stage.filling = None
        leaving, stage.leaving = stage.leaving, None
        if leaving is not None:
            leaving.wait()

    def _copy(self, frames: Sequence[int], pairs: Sequence[tuple[Tensor, Tensor]]) -> PrefetchTicket | None:
        try:
            self._last = self._carrier.copy([self._first + frame for frame in frames], pairs)
        except (RuntimeError, TransferError) as error:
            raise TransferError(f"experts could not be copied to the device: {error}") from error
        return self._last

    def _go_ahead(self, layer: int) -> None:
        """Begin to copy experts of the next layer that are likely to be chosen, in place of less likely ones."""
        following = (layer + 1) % len(self.layers)
        if not self.layers[following].in_host:
            return
        likely = [e for e in self._uses.likely(following, _LIKELY).tolist() if e < self._experts[following]]
        for expert in likely:
            if self._frame[following, expert] >= 0:
                continue
            if not self._free:
                frames = np.flatnonzero(~self._pinned & (self._layer_in >= 0))
                if not len(frames):
                    return
                distances = self._uses.distances(self._layer_in[frames], self._expert_in[frames], layer)
                due = self._uses.distances(np.array([following]), np.array([expert]), layer)
                if distances.max() <= due[0]:
                    return
                self._evict(int(frames[distances.argmax()]))
            try:
                self._fill(following, [expert], [self._free[-1]])
            except TransferError:
                return  # it is tried again when it is chosen

    def _hide(self, layer: int, expert: int) -> None:
        """Does nothing: no parameter points at an evicted expert."""


def stage_bytes(locations: Sequence[ParameterLocation], experts: int) -> int:
    """Size of a staging buffer for one expert."""
    each = [round_up(location.nbytes // experts, ALIGNMENT_BYTES) for location in locations]
    return round_up(sum(each), mmap.PAGESIZE)


def renumbered(
    args: tuple[Any, ...], kwargs: Mapping[str, Any], choices: Tensor, numbers: Tensor
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments of a forward with ``numbers`` instead of ``choices``."""

    def change(value: Any) -> Any:
        return numbers if value is choices else value

    return tuple(change(value) for value in args), {name: change(value) for name, value in kwargs.items()}
