"""The protocol of tiers below host memory: six methods that never block, and the types that they exchange.

The store calls a tier from one thread (the engine's). A tier does its work in bounded workers of its own, and hands
finished transfers back through `poll`. No call carries bytes: a `Transfer` lends the tier views of arena slots.

Who owns a buffer: from `load` or `store` until the transfer's `Outcome` is returned by `poll`, the tier may touch the
buffers; after that, never again. The store never frees or reuses a slot before that, even if the deadline has passed,
so a hung read costs a slot and never another request's bytes. A tier that cannot give the buffers back (a worker is
stuck in the kernel) simply does not report. A `load` or `store` that raises has not begun, and keeps no buffer.

Exactly one `Outcome` per transfer. The buffers under way at a tier never exceed the arena, and those of stores never
the store's spill bound; a tier that bounds its queue besides reports what it did not try as `refused`. A chunk whose
load fails before its deadline is taken for damaged and discarded; one that was refused, or fails later, is left alone.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from stowage.core.prefix_search import Anchors

TRANSFERS_MAX: Final = 64
"""Loads, and stores, that a tier takes before it refuses more."""


@dataclass(slots=True)
class Transfer:
    """Chunks to move between the arena and one tier, in the order of their prompts.

    The keys are distinct. `buffers[i]` is exactly the payload of `keys[i]` (a chunk's bytes, not the slot's padding);
    writable for a load.
    `masks[i]` are the valid blocks of `keys[i]` for a store, and without meaning for a load.
    `deadline_s` is absolute, of the store's clock (`time.monotonic` unless injected): past it nobody waits for the
    outcome, so a tier may give up, but it must report all the same.
    """

    id: int
    keys: list[bytes]
    buffers: list[memoryview]
    masks: NDArray[np.uint64]
    deadline_s: float


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a transfer ended, per chunk: one failed chunk fails alone.

    `ok[i]`: the bytes of `keys[i]` are complete and verified (load), or will be found by later look-ups (store).
    `masks[i]`: the valid blocks that came with the bytes (load); for a store whatever the transfer said.
    `error`: text for people when anything failed; never parsed.
    `refused`: the tier did not try (busy, closing, full): what failed says nothing about the chunks, so none is
    discarded, nor about the tier, so that it is not left alone.
    """

    id: int
    ok: NDArray[np.bool_]
    masks: NDArray[np.uint64]
    error: str = ""
    refused: bool = False


class Tier(Protocol):
    """A tier for chunks below the host arena. No method blocks, and none raises for an operating error; one that
    raises all the same has failed, as a transfer that brought nothing.

    Operating errors (a read failed, the disk is full, the server is gone) are `ok` False in an outcome.
    """

    name: str

    def lookup(self, keys: list[bytes]) -> NDArray[np.uint64]:
        """The valid-block mask of each key, 0 where absent. From an index in memory: maybe stale, never waiting."""

    def load(self, transfer: Transfer) -> None:
        """Start to fill the buffers. A chunk is ok only if its bytes are those of one completed store of its key."""

    def store(self, transfer: Transfer) -> None:
        """Start to keep the chunks. A key that is kept already is replaced (asked for only when that gains blocks)."""

    def poll(self) -> list[Outcome]:
        """The transfers that finished since the last call. Their buffers are the store's again."""

    def discard(self, keys: list[bytes]) -> None:
        """Forget the keys: look-ups answer absent from now on, and the next store of such a key writes it anew."""

    def close(self, deadline_s: float) -> None:
        """Stop the workers, waiting until `deadline_s` at most; give up transfers that have not begun."""


@runtime_checkable
class Waitable(Protocol):
    """A tier whose workers announce outcomes. The store sets `wake`; a worker calls it after it queued an outcome.

    `wake` may be called from any thread, takes no lock that a tier holds, and never raises.
    """

    wake: Callable[[], None]


class Reporter:
    """What tiers with workers have in common: workers report outcomes, from any thread, and `poll` hands them on."""

    def __init__(self) -> None:
        self.wake: Callable[[], None] = lambda: None
        self._outcomes: deque[Outcome] = deque()

    def _report(self, outcome: Outcome) -> None:
        self._outcomes.append(outcome)
        self.wake()

    def poll(self) -> list[Outcome]:
        """The outcomes since the last call."""
        return [self._outcomes.popleft() for _ in range(len(self._outcomes))]


@runtime_checkable
class ReadOnly(Protocol):
    """A tier that others fill: nothing is spilled to it."""

    read_only: bool


@dataclass(frozen=True, slots=True)
class Inquiry:
    """Keys of one group in prompt order, about which a tier is asked.

    Whoever stored a chunk had stored the `stride`-th before it, and so on: so few questions tell how far a tier has the
    chain. `first`: how many keys of the prompt come before these. `mask`: the valid blocks of a whole chunk. `certain`:
    which of the keys were stored before any later one, where these are not every `stride`-th.
    """

    keys: list[bytes]
    mask: int
    first: int = 0
    stride: int = 1
    certain: Anchors | None = None


@dataclass(slots=True)
class Probe:
    """Questions under way. `done`: look-ups know now what can be known. `expected_s`: what such took lately, or 0."""

    done: bool = False
    expected_s: float = 0.0


@runtime_checkable
class Probing(Protocol):
    """A tier whose look-ups do not know what others put there until it was asked about. It calls `wake` when done."""

    def probe(self, inquiries: list[Inquiry]) -> Probe:
        """Start to find out what the tier has of these chains, in a bounded time. Done at once where it cannot."""


@runtime_checkable
class Described(Protocol):
    """A tier with numbers of its own for `stats`."""

    def stats(self) -> dict[str, int | float | str]:
        """Counters and gauges by name (`bytes_used`, `corrupt`, ...). Cheap."""
