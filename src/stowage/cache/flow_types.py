"""Types that the tiered store and its state machine exchange: actions, fetches, counters.

`Flow` answers an event with actions (`StartLoad`, `StartStore`, `Discard`), which the store carries out. A `Fetch` is a
caller's request for chunks in host memory. `Counters` are the totals that `stats` shows.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from stowage.core.geometry import IntArray, MaskArray

SourceArray = NDArray[np.int8]


@dataclass(slots=True, eq=False)
class _Start:
    """A transfer between slots and one tier: key, slot, size in bytes and valid blocks of each chunk.

    Immutable by convention: constructing a frozen dataclass costs more than all other bookkeeping of a short transfer.
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
    """Delete `keys` from tier `tier`: they could not be read."""

    tier: int
    keys: list[bytes]


Action = StartLoad | StartStore | Discard


@dataclass(slots=True, eq=False)
class Fetch:
    """Chunks that a caller wants in host: one array per requested (group, keys) pair, one entry per key.

    Final once `done`. `slots`: the pinned slot, -1 for a chunk that is missing or failed. `masks`: its valid blocks.
    `sources`: where it came from, 0 host, i + 1 tier i, -1 nowhere.
    """

    id: int
    deadline_s: float
    slots: list[IntArray] = field(default_factory=list)
    masks: list[MaskArray] = field(default_factory=list)
    sources: list[SourceArray] = field(default_factory=list)
    done: bool = False
    awaited: dict[int, tuple[IntArray, IntArray]] = field(default_factory=dict)
    """Pair -> indices of chunks in flight, and the slots that will serve them."""


@dataclass(slots=True)
class Counters:
    """Totals; of chunks, unless the name says otherwise."""

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
