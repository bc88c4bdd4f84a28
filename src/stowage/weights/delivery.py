"""The parameters of one unit: they point at delivered bytes while it computes, and are offloaded otherwise."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import torch
from torch import Tensor

from stowage.errors import ConfigError
from stowage.weights.device_prefetcher import Carrier
from stowage.weights.file import File
from stowage.weights.grouping import Unit
from stowage.weights.offloaded_parameter import nan_placeholder, offload, restore
from stowage.weights.parameter_location import ParameterLocation, SlotLayout, layout, memory_of
from stowage.weights.reader import Read, Readers
from stowage.weights.weight_unit import Delivery

HOST: Final = torch.device("cpu")
TIMEOUT_S: Final = 120.0
"""The longest wait for one module's bytes."""
_TRIED_BYTES: Final = 4096
"""Bytes at each end of a parameter that are compared to see whether the device can read it in host memory."""


@dataclass(slots=True)
class Load:
    """A unit, its delivery, and by name the locations of its parameters while they are offloaded."""

    unit: Unit
    delivery: Delivery
    locations: Mapping[str, ParameterLocation]


def files_of(locations: Iterable[ParameterLocation]) -> list[File]:
    """The files in which ``locations`` lie, each once."""
    return list({id(s.file): s.file for location in locations for s in location.segments}.values())


def show(load: Load, carrier: Carrier | None) -> None:
    """Point the parameters of ``load`` permanently at host memory, or at the checkpoint's mapped file. Raises
    ConfigError when the device cannot read them there, which is tested.
    """
    for name, location in load.locations.items():
        if carrier is None:
            restore(load.unit.parameters[name], location.mapped() if location.host is None else location.host)
            continue
        assert location.host is not None, "what a device reads lies in host memory"
        here = location.host.reshape(-1).view(torch.uint8)
        try:
            with torch.inference_mode(False):
                there = carrier.view(here)
            why = "" if _same(there, here) else "the device reads other bytes than the host"
        except (RuntimeError, AttributeError) as error:
            why = str(error).strip().partition("\n")[0]
        if why:
            raise ConfigError(
                f"{name} is to be delivered as mapped, and {carrier.device} cannot read it in host memory: {why}. Say "
                "prefetch, stream or resident instead."
            )
        restore(load.unit.parameters[name], there.view(location.dtype).view(location.shape))


def hide(loads: Iterable[Load], carrier: Carrier) -> None:
    """Offload the parameters that point at host memory, and wait until nothing reads them. Called before unpinning."""
    shown = [load for load in loads if load.delivery is Delivery.MAPPED]
    for load in shown:
        for name, location in load.locations.items():
            offload(load.unit.parameters[name], nan_placeholder(location.shape, location.dtype, carrier.device), name)
    if shown:
        torch.zeros(1, device=carrier.device).cpu()  # after all that was asked for


def _same(there: Tensor, here: Tensor) -> bool:
    """Whether the bytes at both ends are equal. An addition reads them, so that a kernel does it and not a copy."""
    for part in (slice(0, _TRIED_BYTES), slice(max(0, len(here) - _TRIED_BYTES), len(here))):
        if not torch.equal((there[part] + 0).cpu(), here[part]):
            return False
    return True


def copied(location: ParameterLocation, readers: Readers) -> Tensor:
    """What lies at ``location``, in host memory of its own. Raises CheckpointError and StorageError."""
    files = files_of([location])
    raw = np.empty(location.nbytes, np.uint8)
    for file in files:
        file.check()
    ticket = readers.start(location.reads(0, raw.data))
    ticket.wait(TIMEOUT_S)
    ticket.raise_error()
    for file in files:
        file.check()
    return torch.from_numpy(raw).view(location.dtype).view(location.shape)


class Delivered:
    """The parameters of a unit: at what is delivered while it computes, offloaded otherwise, and from now on."""

    def __init__(self, load: Load, device: torch.device = HOST) -> None:
        self.locations = list(load.locations.values())
        self.parameters = [load.unit.parameters[name] for name in load.locations]
        self._names = list(load.locations)
        self._offloaded = [nan_placeholder(location.shape, location.dtype, device) for location in self.locations]
        self._files = files_of(self.locations)
        self.take_back()

    def check(self) -> None:
        """Raises CheckpointError when a file that they lie in has changed."""
        for file in self._files:
            file.check()

    def deliver(self, values: Sequence[Tensor]) -> None:
        for parameter, view in zip(self.parameters, values, strict=True):
            restore(parameter, view)

    def take_back(self) -> None:
        """May be called twice."""
        for parameter, offloaded, name in zip(self.parameters, self._offloaded, self._names, strict=True):
            offload(parameter, offloaded, name)


class Streamed(Delivered):
    """A unit that computes from a slot of the ring, or from a buffer of the device."""

    def __init__(self, load: Load, device: torch.device) -> None:
        super().__init__(load, device)
        self.layout: SlotLayout = layout(self.locations)
        self._views: dict[int, list[Tensor]] = {}

    def views(self, slot: int, memory: memoryview) -> list[Tensor]:
        """The parameters in a slot of the ring."""
        found = self._views.get(slot)
        if found is None:
            with torch.inference_mode(False):  # weights of that mode are multiplied otherwise (loading.put)
                found = self._views[slot] = self.layout.tensors(self.locations, memory)
        return found


class Stacked(Delivered):
    """The experts of a layer, in the memory of the expert cache; parameters point there while the layer computes."""

    def __init__(self, load: Load) -> None:
        self._there = [load.unit.parameters[name].data for name in load.locations]
        super().__init__(load)

    def show(self) -> None:
        self.deliver(self._there)


class Rows(Delivered):
    """An embedding whose rows are read from disk on demand."""

    def __init__(self, load: Load, device: torch.device) -> None:
        self._module: Any = load.unit.module
        self._padding_idx = self._module.padding_idx
        super().__init__(load, device)
        ((name, location),) = load.locations.items()
        self._location, self._own = location, name.rpartition(".")[2]
        self._table: File | memoryview
        self._table, self._begin = (
            (location.segments[0].file, location.segments[0].offset)
            if location.host is None
            else (memory_of(location.host), 0)
        )

    @property
    def replaced(self) -> bool:
        """Whether the module computes from another table, as ``torch.func.functional_call`` gives it one."""
        return self._module._parameters.get(self._own) is not self.parameters[0]

    def deliver(self, values: Sequence[Tensor]) -> None:
        self._module.padding_idx = None  # it may lie outside of the rows
        super().deliver(values)

    def take_back(self) -> None:
        super().take_back()
        self._module.padding_idx = self._padding_idx  # adapters around the module leave that token without gradients

    def read(self, ids: Tensor, readers: Readers) -> tuple[Tensor, int]:
        """Read rows of ``ids`` (any shape) into the weight. Returns their indices there, alike, and the bytes read."""
        self.check()
        rows, numbers = torch.unique(ids, return_inverse=True)
        wanted = rows.tolist()
        if wanted and not 0 <= wanted[0] <= wanted[-1] < self._location.shape[0]:
            raise IndexError(f"a token id lies outside of the embedding's {self._location.shape[0]} rows")
        row_bytes = self._location.nbytes // self._location.shape[0]
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
            table = torch.from_numpy(raw).view(self._location.dtype).view(-1, *self._location.shape[1:])
            self.deliver([table.to(self._offloaded[0].device)])
        return numbers, len(wanted) * row_bytes
