"""The parameters of one unit: pointed at where their bytes are while it computes, and away meanwhile."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import torch
from torch import Tensor

from stowage.errors import ConfigError
from stowage.weights.away import absent, come, go
from stowage.weights.checkpoint import File
from stowage.weights.device_prefetcher import Carrier
from stowage.weights.grouping import Unit
from stowage.weights.parameter_location import Home, SlotLayout, layout, memory_of
from stowage.weights.placement import Delivery
from stowage.weights.reader import Read, Readers

__all__ = ["HOST", "TIMEOUT_S", "Load", "Rows", "Stacked", "Streamed", "copied", "files_of", "hide", "show"]

HOST: Final = torch.device("cpu")
TIMEOUT_S: Final = 120.0
"""The longest wait for one module's bytes."""
_TRIED_BYTES: Final = 4096
"""Of each end of a parameter that a device is to read in host memory."""


@dataclass(slots=True)
class Load:
    """A unit, how it is delivered, and where its parameters are while they are away: ``homes`` by their names."""

    unit: Unit
    delivery: Delivery
    homes: Mapping[str, Home]


def files_of(homes: Iterable[Home]) -> list[File]:
    """The files in which ``homes`` lie, each once."""
    return list({id(s.file): s.file for home in homes for s in home.segments}.values())


def show(load: Load, carrier: Carrier | None) -> None:
    """Point the parameters of ``load`` at host memory, or at the checkpoint's mapped file, for good.

    Raises ConfigError when the device cannot read it there; it is tried.
    """
    for name, home in load.homes.items():
        if carrier is None:
            come(load.unit.parameters[name], home.mapped() if home.host is None else home.host)
            continue
        assert home.host is not None, "what a device reads lies in host memory"
        here = home.host.reshape(-1).view(torch.uint8)
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
        come(load.unit.parameters[name], there.view(home.dtype).view(home.shape))


def hide(loads: Iterable[Load], carrier: Carrier) -> None:
    """Before host memory is unpinned: what ``loads`` show there is away, and nothing computes from it any more."""
    shown = [load for load in loads if load.delivery is Delivery.MAPPED]
    for load in shown:
        for name, home in load.homes.items():
            go(load.unit.parameters[name], absent(home.shape, home.dtype, carrier.device), name)
    if shown:
        torch.zeros(1, device=carrier.device).cpu()  # after all that was asked for


def _same(there: Tensor, here: Tensor) -> bool:
    """Whether both ends of it are the same bytes. They are added to, so that a kernel reads them, and no copy does."""
    for part in (slice(0, _TRIED_BYTES), slice(max(0, len(here) - _TRIED_BYTES), len(here))):
        if not torch.equal((there[part] + 0).cpu(), here[part]):
            return False
    return True


def copied(home: Home, readers: Readers) -> Tensor:
    """What lies at ``home``, in host memory of its own. Raises CheckpointError and StorageError."""
    files = files_of([home])
    raw = np.empty(home.nbytes, np.uint8)
    for file in files:
        file.check()
    ticket = readers.start(home.reads(0, raw.data))
    ticket.wait(TIMEOUT_S)
    ticket.raise_error()
    for file in files:
        file.check()
    return torch.from_numpy(raw).view(home.dtype).view(home.shape)


class Streamed:
    """A unit that computes from a slot of the ring, or from a buffer of the device."""

    def __init__(self, load: Load, device: torch.device) -> None:
        self.homes = list(load.homes.values())
        self.parameters = [load.unit.parameters[name] for name in load.homes]
        self._names = list(load.homes)
        self.away = [absent(home.shape, home.dtype, device) for home in self.homes]
        self.layout: SlotLayout = layout(self.homes)
        self._files = files_of(self.homes)
        self._views: dict[int, list[Tensor]] = {}
        self.take_back()

    def check(self) -> None:
        for file in self._files:
            file.check()

    def views(self, slot: int, memory: memoryview) -> list[Tensor]:
        """The parameters in a slot of the ring."""
        found = self._views.get(slot)
        if found is None:
            with torch.inference_mode(False):  # weights of that mode are multiplied otherwise (loading.put)
                found = self._views[slot] = self.layout.tensors(self.homes, memory)
        return found

    def deliver(self, views: Sequence[Tensor]) -> None:
        for parameter, view in zip(self.parameters, views, strict=True):
            come(parameter, view)

    def take_back(self) -> None:
        """May be called twice."""
        for parameter, away, name in zip(self.parameters, self.away, self._names, strict=True):
            go(parameter, away, name)


class Stacked:
    """The experts of a layer, whose memory is the cache's, and which are shown while the layer computes."""

    def __init__(self, load: Load) -> None:
        self._names = list(load.homes)
        self._parameters = [load.unit.parameters[name] for name in load.homes]
        self._there = [parameter.data for parameter in self._parameters]
        self._away = [absent(home.shape, home.dtype) for home in load.homes.values()]
        self.take_back()

    def show(self) -> None:
        for parameter, there in zip(self._parameters, self._there, strict=True):
            come(parameter, there)

    def take_back(self) -> None:
        """May be called twice."""
        for parameter, away, name in zip(self._parameters, self._away, self._names, strict=True):
            go(parameter, away, name)


class Rows:
    """An embedding whose rows are read as they are asked for."""

    def __init__(self, load: Load, device: torch.device) -> None:
        ((name, home),) = load.homes.items()
        self._parameter = load.unit.parameters[name]
        self._home = home
        self._files = files_of([home])
        self._table: File | memoryview
        self._table, self._begin = (
            (home.segments[0].file, home.segments[0].offset) if home.host is None else (memory_of(home.host), 0)
        )
        self._away = absent(home.shape, home.dtype, device)
        self._name = name
        self.take_back()
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
            come(self._parameter, table.to(self._away.device))
        return numbers, len(wanted) * row_bytes

    def take_back(self) -> None:
        """May be called twice."""
        go(self._parameter, self._away, self._name)
