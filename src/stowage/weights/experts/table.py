"""The table of an expert cache: which expert is in which frame. Shared by the caches in host memory and on a device.

Owns the state of each frame (free, being filled, full, in use); loads the experts that a router chose and evicts those
expected back last. Subclasses define what a frame is and how it is filled (`cache`, `device_cache`).
"""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from stowage.errors import ModelError
from stowage.weights.experts.eviction import ExpertUsage
from stowage.weights.reader import Read, Readers, Stall, Ticket


class ExpertTable(ABC):
    """Which expert is in which frame. ``experts``: of each layer, in the order in which they are computed. All
    ``frames`` are empty at first. ``timeout_s``: the longest wait for a read.
    """

    def __init__(self, experts: Sequence[int], frames: int, readers: Readers, timeout_s: float) -> None:
        assert frames >= max(experts), "a layer's experts fit at once"
        self.frames = frames
        """How many experts it holds at most."""
        self._experts, self._readers, self._stall = list(experts), readers, Stall(timeout_s)
        self._frame = np.full((len(experts), max(experts)), -1)
        self._layer_in, self._expert_in = np.full(frames, -1), np.full(frames, -1)
        self._free = list(range(frames))[::-1]
        self._filling: dict[int, Ticket] = {}
        self._pinned = np.zeros(frames, bool)
        self._holder: tuple[int, int] | None = None
        self._changing = False
        """Whether the tables are being changed; still set after an interrupt in between."""
        self._uses = ExpertUsage(len(experts), max(experts))
        self.hits = self.misses = self.read_bytes = 0

    @property
    @abstractmethod
    def nbytes(self) -> int:
        """Memory that it takes at most."""

    @abstractmethod
    def close(self, ended: bool) -> None:
        """Gives the memory back, once no parameter shows it; ``ended``: whether all readers have."""

    @abstractmethod
    def check(self) -> None:
        """Invariants, between forwards."""

    @abstractmethod
    def forked(self) -> None:
        """Called in a forked process: all frames are empty there."""

    @abstractmethod
    def _fill(self, layer: int, missing: Sequence[int], frames: Sequence[int]) -> None:
        """Begin to fill the free ``frames`` with the experts ``missing`` of ``layer``, and `_seat` each there. An
        expert whose filling could not begin stays offloaded, and the error is raised.
        """

    @abstractmethod
    def _hide(self, layer: int, expert: int) -> None:
        """Make sure that no parameter points at that expert."""

    @property
    def stall_s(self) -> float:
        """Time that was waited for experts."""
        return self._stall.seconds

    def take(self, layer: int, choices: Tensor, waits: bool = True) -> None:
        """Load the experts in ``choices`` (tokens, experts per token) of ``layer``; they stay until `give_back`. Waits
        for them, or leaves that to `arriving`.

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
        self._fill(layer, missing.tolist(), self._room(layer, len(missing)))
        self._pinned[self._frame[layer, needed]] = True
        for frame in self._frame[layer, needed].tolist() if waits else ():
            self._await(frame)
        self._changing = False

    def arriving(self, layer: int, experts: Iterable[int]) -> Iterator[int]:
        """Yields ``experts`` of ``layer`` that were taken without waiting: those that are ready first, then each when
        it is. Raises StorageError when one could not be read.
        """
        on_their_way = [(self._frame[layer, expert] in self._filling, expert) for expert in experts]
        for _, expert in sorted(on_their_way):
            self._changing = True
            self._await(int(self._frame[layer, expert]))
            self._changing = False
            yield expert

    def give_back(self, layer: int) -> None:
        """Nobody computes with experts of ``layer`` any more. May be called twice."""
        if self._holder is not None and self._holder == (layer, threading.get_ident()):
            self._holder = None
            self._pinned[:] = False

    def reset(self) -> None:
        """Clean up after a forward that failed. No reads into frames are in flight, and nothing computes from one. The
        cached experts stay, unless the forward failed while the tables were being changed.
        """
        if not self._changing:
            self._settle(given_up=True)
        else:
            for layer, experts in enumerate(self._experts):
                for expert in range(experts):
                    self._hide(layer, expert)
            self._frame[:] = self._layer_in[:] = self._expert_in[:] = -1
            self._filling.clear()
            self._free = list(range(len(self._layer_in)))[::-1]
        self._holder, self._changing = None, False
        self._pinned[:] = False

    def _check_tables(self) -> None:
        there = np.flatnonzero(self._layer_in >= 0)
        assert (self._frame[self._layer_in[there], self._expert_in[there]] == there).all()
        assert np.count_nonzero(self._frame >= 0) == len(there)
        assert sorted([*self._free, *there.tolist()]) == list(range(len(self._layer_in)))
        assert self._filling.keys() <= set(there.tolist())

    def _counts(self, layer: int, choices: Tensor) -> NDArray[np.int64]:
        """How often each expert of ``layer`` was chosen, (experts). Larger numbers mean no expert, and are ignored."""
        ids = choices.detach().reshape(-1).numpy().astype(np.int64)
        real = ids[(ids >= 0) & (ids < self._experts[layer])]
        return np.bincount(real, minlength=self._frame.shape[1])

    def _settle(self, given_up: bool = False) -> None:
        """Update the frames that were being filled for a failed forward: full where their reads have ended well, free
        where one failed. ``given_up``: all reads were cancelled, so the others are free too.
        """
        for frame, ticket in list(self._filling.items()):
            if ticket.error is not None if ticket.done else given_up:
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
        """``count`` free frames. Evicts unused experts, those expected back last first."""
        while len(self._free) < count:
            offloaded = [frame for frame, ticket in self._filling.items() if not ticket.done]
            leaving = ~self._pinned & (self._layer_in >= 0)
            leaving[offloaded] = False
            frames = np.flatnonzero(leaving)
            if not len(frames):  # the rest is being filled for a forward that failed
                self._stall.wait(self._filling[offloaded[0]])
                self._settle()  # if its read failed, that was the other forward's error
                continue
            distances = self._uses.distances(self._layer_in[frames], self._expert_in[frames], layer)
            for frame in frames[np.argsort(-distances, kind="stable")[: count - len(self._free)]].tolist():
                self._evict(frame)
        return [self._free[-1 - at] for at in range(count)]

    def _seat(self, layer: int, expert: int, frame: int) -> None:
        """Record that the free ``frame`` belongs to that expert."""
        self._free.remove(frame)
        self._frame[layer, expert] = frame
        self._layer_in[frame], self._expert_in[frame] = layer, expert

    def _await(self, frame: int) -> None:
        """Wait until ``frame`` is full. Raises StorageError when that fails; its expert is offloaded then."""
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

    def _start(self, reads: Sequence[Read]) -> Ticket:
        self.read_bytes += sum(read.into.nbytes for read in reads)
        return self._readers.start(reads)

    def _finish(self, ticket: Ticket) -> None:
        self._stall.wait(ticket)
        ticket.raise_error()
