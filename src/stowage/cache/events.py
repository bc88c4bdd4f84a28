"""What goes through the flow: the actions that it asks for, the fetches that it answers, the counters that it keeps."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from stowage.core.geometry import IntArray, MaskArray

__all__ = ["Action", "Counters", "Discard", "Fetch", "SourceArray", "StartLoad", "StartStore"]

SourceArray = NDArray[np.int8]


@dataclass(slots=True, eq=False)
class _Start:
    """A transfer between slots and one tier: key, slot, size in bytes and valid blocks of each chunk.

    Nobody changes it. A frozen class would take longer to make than the rest of a short transfer's bookkeeping.
    """

    tier: int
    id: int
    keys: list[bytes]
    slots: IntArray
    sizes: IntArray
    masks: MaskArray
    deadline_s: float


class StartLoad(_Start):
    """Fill `slots[i]` with the `sizes[i]` bytes of `keys[i]` from tier `tier`."""

    __slots__ = ()


class StartStore(_Start):
    """Write the `sizes[i]` bytes in `slots[i]` to tier `tier` as `keys[i]` with the valid blocks `masks[i]`."""

    __slots__ = ()


@dataclass(frozen=True, slots=True)
class Discard:
    """Forget `keys` in tier `tier`: they could not be read."""

    tier: int
    keys: list[bytes]


Action = StartLoad | StartStore | Discard


@dataclass(slots=True, eq=False)
class Fetch:
    """Chunks that somebody wants in host, one array entry per key, one array per (group, keys) pair that was asked for.

    Final once `done`. `slots`: the pinned slot, -1 for a chunk that is missing or failed. `masks`: its valid blocks.
    `sources`: where it came from, 0 host, i + 1 tier i, -1 nowhere.
    """

    id: int
    deadline_s: float
    slots: list[IntArray] = field(default_factory=list)
    masks: list[MaskArray] = field(default_factory=list)
    sources: list[SourceArray] = field(default_factory=list)
    done: bool = False
    coming: dict[int, tuple[IntArray, IntArray]] = field(default_factory=dict)
    """Pair -> indices of chunks that are on their way, and the slots that will serve them."""


@dataclass(slots=True)
class Counters:
    """What happened so far; chunks unless the name says otherwise."""

    lookups: int = 0
    fetches: int = 0
    joined: int = 0
    promoted: int = 0
    promoted_bytes: int = 0
    stores: int = 0
    spills: int = 0
    spilled_bytes: int = 0
    spill_failures: int = 0
    load_failures: int = 0
    timeouts: int = 0
    fetch_timeouts: int = 0
