"""The experts of all layers in a cache: read when a router chooses them, and away when others need their memory.

Owns the frames in which experts lie, and which expert lies in which. A layer's stacked parameters are tensors of their
full size over spans of addresses; an expert that is there shows its frame at its address, and one that is away reads as
NaN. So a module computes as if all were there, with the same kernels at the same addresses modulo 64, and what it
computes with an expert that was not chosen would be seen. Memory is never more than the frames, and the pages that two
neighbours share, which stay.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from stowage.errors import ModelError, UnsupportedModelError
from stowage.weights.checkpoint import PAGE_BYTES
from stowage.weights.experts.eviction import Uses
from stowage.weights.experts.memory_pages import Frames, Span
from stowage.weights.parameter_location import ParameterLocation
from stowage.weights.reader import Read, Readers, Stall, Ticket

__all__ = ["ExpertCache", "Stacks", "chosen"]


def chosen(args: Sequence[Any], kwargs: Mapping[str, Any]) -> Tensor:
    """Which experts each token of a forward has, of its arguments: whole numbers, (tokens, experts per token).

    Raises UnsupportedModelError when that is not one of them.
    """
    tensors = [v for v in (*args, *kwargs.values()) if isinstance(v, Tensor)]
    found = [t for t in tensors if t.dim() == 2 and t.dtype in (torch.int64, torch.int32)]
    if len(found) != 1:
        raise UnsupportedModelError(
            "a layer of experts does not say which of them it computes with, so they cannot be read one by one: stream "
            "whole layers, --weights 'model.layers.*=stream'."
        )
    return found[0]


class _Stack:
    """One parameter, (experts, ...), over a span. Its whole pages come and go, expert by expert."""

    def __init__(self, parameter: nn.Parameter, location: ParameterLocation, experts: int) -> None:
        self._location, self._experts = location, experts
        self._expert_bytes = location.nbytes // experts
        self._begin = location.in_page
        self.shared = self._begin % PAGE_BYTES > 0
        self._first = -self._begin % PAGE_BYTES  # of an expert's bytes: the first of a page of its own
        self.whole_bytes = self._expert_bytes - PAGE_BYTES * self.shared
        assert self.whole_bytes > 0
        assert self.whole_bytes % PAGE_BYTES == 0
        self.span = Span(-(-(self._begin + location.nbytes) // PAGE_BYTES) * PAGE_BYTES)
        count = location.nbytes // location.dtype.itemsize
        values = torch.frombuffer(self.span.memory, dtype=location.dtype, count=count, offset=self._begin)
        parameter.data = values.view(location.shape)

    @property
    def edge_bytes(self) -> int:
        """Of the pages between experts, which stay."""
        return PAGE_BYTES * (self._experts + 1) * self.shared

    def address(self, expert: int) -> int:
        """Where in the span its whole pages begin."""
        return self._begin + expert * self._expert_bytes + self._first

    def reads(self, expert: int) -> list[Read]:
        """What fills them."""
        address = self.address(expert)
        into = memoryview(self.span.memory)[address : address + self.whole_bytes]
        return self._location.reads(expert * self._expert_bytes + self._first, into)

    def edges(self) -> list[Read]:
        """What fills the pages between them."""
        found = []
        for expert in range((self._experts + 1) * self.shared):
            page = expert * self._expert_bytes
            first, last = max(page, self._begin), min(page + PAGE_BYTES, self._begin + self._location.nbytes)
            found += self._location.reads(first - self._begin, memoryview(self.span.memory)[first:last])
        return found


@dataclass(slots=True)
class Stacks:
    """The ``experts`` of one layer: parameters, and where each of them lies while it is away."""

    experts: int
    parameters: Sequence[nn.Parameter]
    locations: Sequence[ParameterLocation]


class ExpertCache:
    """For ``layers``, in the order in which they are computed, in ``cache_bytes``: at least all experts of one layer.

    ``timeout_s``: the longest wait for a read.
    """

    def __init__(self, layers: Sequence[Stacks], cache_bytes: int, readers: Readers, timeout_s: float) -> None:
        self._layers = [
            [_Stack(p, h, layer.experts) for p, h in zip(layer.parameters, layer.locations, strict=True)]
            for layer in layers
        ]
        experts = [layer.experts for layer in layers]
        frame_bytes = max(sum(stack.whole_bytes for stack in stacks) for stacks in self._layers)
        self._edge_bytes = sum(stack.edge_bytes for stacks in self._layers for stack in stacks)
        count = min((cache_bytes - self._edge_bytes) // frame_bytes - 1, sum(experts))
        self._tables(experts, count, readers, Stall(timeout_s))
        self._frames = Frames(count, frame_bytes)
        for layer, stacks in enumerate(self._layers):
            for expert in range(self._experts[layer]):
                self._hide(layer, expert)
            self._finish(self._start([read for stack in stacks for read in stack.edges()]))

    def _tables(self, experts: Sequence[int], count: int, readers: Readers, stall: Stall) -> None:
        """Nothing is in any of ``count`` frames, for layers with so many ``experts``."""
        assert count >= max(experts), "a layer's experts fit at once"
        self._experts, self._readers, self._stall = list(experts), readers, stall
        self._frame = np.full((len(experts), max(experts)), -1)
        self._layer_in, self._expert_in = np.full(count, -1), np.full(count, -1)
        self._free = list(range(count))[::-1]
        self._filling: dict[int, Ticket] = {}
        self._pinned = np.zeros(count, bool)
        self._holder: tuple[int, int] | None = None
        self._changing = False
        """Whether the tables may be half written: an interrupt leaves it so."""
        self._uses = Uses(len(experts), max(experts))
        self.hits = self.misses = self.read_bytes = 0

    @property
    def nbytes(self) -> int:
        """Memory that it takes at most."""
        return (self._frames.count + 1) * self._frames.frame_bytes + self._edge_bytes

    @property
    def stall_s(self) -> float:
        """Time that was waited for experts."""
        return self._stall.seconds

    @property
    def frames(self) -> int:
        """How many experts it holds at most."""
        return self._frames.count

    def take(self, layer: int, choices: Tensor) -> None:
        """The experts in ``choices`` (tokens, experts per token) of ``layer`` are there until `give_back`. Waits for
        them.

        Raises StorageError when they could not be read, ModelError when two threads compute at once.
        """
        self._enter(layer)
        self._changing = True
        self._settle()
        counts = self._counts(layer, choices)
        needed = np.flatnonzero(counts)
        self._uses.note(layer, counts, max(1, len(choices)))
        frames = self._frame[layer, needed]
        missing = needed[frames < 0]
        self._pinned[frames[frames >= 0]] = True
        self.hits += len(needed) - len(missing)
        self.misses += len(missing)
        self._fill_all(layer, missing.tolist(), self._room(layer, len(missing)))
        self._pinned[self._frame[layer, needed]] = True
        for frame in self._frame[layer, needed].tolist():
            self._await(frame)
        self._changing = False

    def give_back(self, layer: int) -> None:
        """Nobody computes with experts of ``layer`` any more. May be called twice."""
        if self._holder is not None and self._holder == (layer, threading.get_ident()):
            self._holder = None
            self._pinned[:] = False

    def reset(self) -> None:
        """Begin anew, whatever a forward left behind that did not end. Nobody reads into a frame any more, and nobody
        computes from one. The experts stay, unless the forward ended while they came or went.
        """
        if not self._changing:
            self._settle()
        else:
            for layer, experts in enumerate(self._experts):
                for expert in range(experts):
                    self._hide(layer, expert)
            self._frame[:] = self._layer_in[:] = self._expert_in[:] = -1
            self._filling.clear()
            self._free = list(range(len(self._layer_in)))[::-1]
        self._holder, self._changing = None, False
        self._pinned[:] = False

    def forked(self) -> None:
        """This is another process than the one that made it: frames of its own, and nothing in them."""
        self._frames = Frames(self._frames.count, self._frames.frame_bytes)
        self._changing = True
        self.reset()

    def close(self, ended: bool) -> None:
        """Gives the memory back, once no parameter shows it; ``ended``: whether all readers have."""
        if ended:
            for frame in np.flatnonzero(self._layer_in >= 0).tolist():
                self._evict(frame)
        self._frames.close()

    def check(self) -> None:
        """Invariants, between forwards."""
        self._check_tables()
        assert self._frames.used_bytes <= self._frames.count * self._frames.frame_bytes

    def _check_tables(self) -> None:
        there = np.flatnonzero(self._layer_in >= 0)
        assert (self._frame[self._layer_in[there], self._expert_in[there]] == there).all()
        assert np.count_nonzero(self._frame >= 0) == len(there)
        assert sorted([*self._free, *there.tolist()]) == list(range(len(self._layer_in)))
        assert self._filling.keys() <= set(there.tolist())

    def _counts(self, layer: int, choices: Tensor) -> NDArray[np.int64]:
        """How often each expert of ``layer`` was chosen. From there on some models number choices that are none."""
        ids = choices.detach().reshape(-1).numpy().astype(np.int64)
        real = ids[(ids >= 0) & (ids < self._experts[layer])]
        return np.bincount(real, minlength=self._frame.shape[1])

    def _settle(self) -> None:
        """What was read for a forward that failed is there, or away again."""
        for frame, ticket in list(self._filling.items()):
            if ticket.done and ticket.error is not None:
                self._evict(frame)
            elif ticket.done:
                del self._filling[frame]

    def _enter(self, layer: int) -> None:
        if self._holder is not None:
            raise ModelError(
                "two forwards of this model ran at the same time, and its experts are delivered for one: let one "
                "thread compute at a time, or load the model twice."
            )
        self._holder = layer, threading.get_ident()

    def _room(self, layer: int, count: int) -> list[int]:
        """``count`` frames that are free now: of those that nobody computes with, the ones expected back last left."""
        while len(self._free) < count:
            away = [frame for frame, ticket in self._filling.items() if not ticket.done]
            leaving = ~self._pinned & (self._layer_in >= 0)
            leaving[away] = False
            frames = np.flatnonzero(leaving)
            if not len(frames):  # the rest is on its way for somebody who failed meanwhile
                self._await(away[0])
                continue
            distances = self._uses.distances(self._layer_in[frames], self._expert_in[frames], layer)
            for frame in frames[np.argsort(-distances, kind="stable")[: count - len(self._free)]].tolist():
                self._evict(frame)
        return [self._free[-1 - at] for at in range(count)]

    def _fill_all(self, layer: int, missing: Sequence[int], frames: Sequence[int]) -> None:
        """Begin to fill ``frames``, which are free, with ``missing`` of ``layer``; nobody else is given them."""
        for expert, frame in zip(missing, frames, strict=True):
            self._fill(layer, expert, frame)
            self._pinned[frame] = True

    def _fill(self, layer: int, expert: int, frame: int) -> None:
        """Begin to read ``expert`` into ``frame``, which is free."""
        within = 0
        try:
            for stack in self._layers[layer]:
                self._frames.show(stack.span, stack.address(expert), stack.whole_bytes, frame, within)
                within += stack.whole_bytes
            ticket = self._start([read for stack in self._layers[layer] for read in stack.reads(expert)])
        except BaseException:
            self._hide(layer, expert)
            raise
        self._seat(layer, expert, frame)
        self._filling[frame] = ticket

    def _seat(self, layer: int, expert: int, frame: int) -> None:
        """``frame``, which is free, is that expert's."""
        self._free.remove(frame)
        self._frame[layer, expert] = frame
        self._layer_in[frame], self._expert_in[frame] = layer, expert

    def _await(self, frame: int) -> None:
        """Until ``frame`` is full. Raises StorageError when it will not be: its expert is away again."""
        ticket = self._filling.get(frame)
        if ticket is None:
            return
        try:
            self._finish(ticket)
        finally:
            if ticket.done and ticket.error is not None:
                self._evict(frame)
            elif ticket.done:
                del self._filling[frame]

    def _evict(self, frame: int) -> None:
        layer, expert = int(self._layer_in[frame]), int(self._expert_in[frame])
        self._hide(layer, expert)
        self._filling.pop(frame, None)
        self._frame[layer, expert] = self._layer_in[frame] = self._expert_in[frame] = -1
        self._pinned[frame] = False
        self._free.append(frame)

    def _hide(self, layer: int, expert: int) -> None:
        for stack in self._layers[layer]:
            self._frames.hide(stack.span, stack.address(expert), stack.whole_bytes)

    def _start(self, reads: Sequence[Read]) -> Ticket:
        self.read_bytes += sum(read.into.nbytes for read in reads)
        return self._readers.start(reads)

    def _finish(self, ticket: Ticket) -> None:
        self._stall.wait(ticket)
        ticket.raise_error()
