"""A unit of weights, which is placed as a whole: its size wherever it lies, and how it can be delivered."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import StrEnum

from stowage.core.geometry import PAGE_BYTES


class Delivery(StrEnum):
    """How a module gets its parameters.

    resident: they lie in device memory. mapped: a view over the checkpoint's file, mapped into memory; it counts as
    host memory. prefetch: copied from host memory into a ring of device buffers, ahead of time. stream: read from
    disk into that ring. rows: an embedding, of which the rows of a forward's tokens are read from disk. experts: each
    expert is read when the router chooses it, into a cache in device memory.

    On a device that is a memory of its own what is mapped lies in host memory, which kernels read over the link, and
    experts lie in host memory as far as it goes.
    """

    RESIDENT = "resident"
    MAPPED = "mapped"
    PREFETCH = "prefetch"
    STREAM = "stream"
    ROWS = "rows"
    EXPERTS = "experts"

    @property
    def rings(self) -> bool:
        """Whether weights come through the ring of buffers."""
        return self in (Delivery.PREFETCH, Delivery.STREAM)

    @property
    def on_host(self) -> bool:
        """Whether weights lie in host memory between forwards."""
        return self in (Delivery.PREFETCH, Delivery.MAPPED)


@dataclass(frozen=True, slots=True)
class WeightUnit:
    """One unit. ``nbytes`` of its parameters, ``pieces``: how many. ``rows``: an embedding. ``layer``: its number among
    the model's repeated layers, -1 for another module. ``experts``: how many are stacked in it, 0 for what is not a
    layer's experts. ``apart``: the experts that are part of this unit, and can be units of their own. ``gap_bytes``: of
    the pages that each of its experts begins and ends at, what it does not fill.
    """

    name: str
    nbytes: int
    pieces: int
    rows: bool = False
    layer: int = -1
    experts: int = 0
    apart: tuple[WeightUnit, ...] = ()
    gap_bytes: int = 0

    @property
    def ring_bytes(self) -> int:
        """Of a slot that takes it, at most: each parameter may begin and end inside of a page."""
        return self.nbytes + 2 * PAGE_BYTES * self.pieces

    @property
    def host_buffer_bytes(self) -> int:
        """Of host memory from which it crosses over, at most: each parameter begins at a page."""
        return self.nbytes + PAGE_BYTES * self.pieces

    @property
    def stage_bytes(self) -> int:
        """Of host memory for one of its experts on its way, at most."""
        return self.expert_bytes + PAGE_BYTES * (1 + self.pieces)

    @property
    def expert_bytes(self) -> int:
        """Of one of its experts in a cache."""
        return self.nbytes // self.experts + self.gap_bytes if self.experts else 0

    @property
    def edge_bytes(self) -> int:
        """Pages that two neighbouring experts may share, at most; they stay."""
        return self.pieces * (self.experts + 1) * PAGE_BYTES if self.experts else 0

    def without(self, apart: Sequence[WeightUnit]) -> WeightUnit:
        """What is left when those experts are units of their own."""
        left_bytes = self.nbytes - sum(part.nbytes for part in apart)
        left = tuple(part for part in self.apart if part not in apart)
        return replace(self, nbytes=left_bytes, pieces=self.pieces - sum(p.pieces for p in apart), apart=left)


def cache_least_bytes(cached: Sequence[WeightUnit]) -> int:
    """The smallest cache that works: a prompt may choose all experts of a layer at once. One frame more is what an
    expert that is offloaded reads as.
    """
    return _cache_bytes(cached, max((unit.experts for unit in cached), default=-1) + 1)


def cache_most_bytes(cached: Sequence[WeightUnit]) -> int:
    """The cache with all experts in it."""
    return _cache_bytes(cached, sum(unit.experts for unit in cached) + bool(cached))


def _cache_bytes(cached: Sequence[WeightUnit], frames: int) -> int:
    """Frames are as large as the largest expert."""
    most = max((unit.expert_bytes for unit in cached), default=0)
    return frames * most + sum(unit.edge_bytes for unit in cached)
