"""Fetches that are open: which slots of host memory each holds, and which it waits for while they are on their way.

A slot in `Fetch.slots` is pinned for that fetch from the moment it is written there until the fetch is released. A
fetch knows the slots that it waits for. A slot that is on its way knows its fetch, or that there is more than one, or
was: then all fetches that wait are asked. A fetch that waits for nothing is done, and what it holds changes no more.

Starts no transfer: somebody else brings the slots, and reports them here as arrived or failed. Every method takes a
batch; none loops over slots in Python.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import numpy as np

from stowage.cache.events import Fetch
from stowage.cache.keymap import holds, taken
from stowage.cache.ledger import Ledger, State
from stowage.core.geometry import BoolArray, IntArray

__all__ = ["Fetches"]

_NOBODY: Final = 0
"""Waits for a slot. Fetches are numbered from 1 on."""
_SEVERAL: Final = -1


class Fetches:
    """The fetches that are not released, over `slots` slots of `ledger`."""

    __slots__ = ("_fetches", "_ledger", "_pending", "_waits")

    def __init__(self, ledger: Ledger, slots: int) -> None:
        self._ledger = ledger
        self._fetches: dict[int, Fetch] = {}
        self._pending: dict[int, Fetch] = {}
        # Zeros that nobody has written take no memory.
        self._waits: IntArray = np.zeros(slots, np.int64)

    def open(self, fetch_id: int, wanted: Sequence[tuple[int, list[bytes]]], deadline_s: float) -> Fetch:
        """Pin what is in host of these (group, keys) pairs. Done, unless it is made to wait."""
        fetch = Fetch(fetch_id, deadline_s, done=True)
        self._fetches[fetch.id] = fetch
        for _, keys in wanted:
            slots, masks = self._ledger.find_masks(keys)
            present = taken(slots)
            self._ledger.pin(present)
            fetch.slots.append(slots)
            fetch.masks.append(masks)
            # -1 where there is no slot, 0 where there is one: the sign.
            fetch.sources.append(
                (slots >> 63).astype(np.int8) if len(present) < len(slots) else np.zeros(len(slots), np.int8)
            )
        return fetch

    def wait(self, fetch: Fetch, pair: int, positions: IntArray, slots: IntArray) -> None:
        """The slots are on their way, and will serve these positions of a pair. Once for each pair."""
        if not len(slots):
            return
        fetch.coming[pair] = positions, slots
        before = self._waits[slots]
        others = (before != _NOBODY) & (before != fetch.id)
        self._waits[slots] = np.where(others, _SEVERAL, fetch.id)
        fetch.done = False
        self._pending[fetch.id] = fetch

    def arrived(self, slots: IntArray, source: int) -> None:
        """Slots became ready: give them to the fetches that wait for them. `source`: 0 host, i + 1 tier i."""
        parts: list[IntArray] = []
        for fetch in self._meet(slots):
            for pair, here in self._met(fetch):
                positions, served = (column[here] for column in fetch.coming[pair])
                fetch.slots[pair][positions] = served
                fetch.masks[pair][positions] = self._ledger.masks(served)
                fetch.sources[pair][positions] = source
                parts.append(served)
                self._drop(fetch, pair, here)
        if parts:
            self._ledger.pin(np.concatenate(parts))

    def failed(self, slots: IntArray) -> None:
        """Slots will not become ready: nobody waits for them any more."""
        for fetch in self._meet(slots):
            for pair, here in self._met(fetch):
                self._drop(fetch, pair, here)

    def _meet(self, slots: IntArray) -> list[Fetch]:
        """The fetches that may wait for slots that are on their way no more, and whom nobody waits for from now on."""
        if not self._pending:  # several may have waited, and all have ended
            self._waits[slots] = _NOBODY
            return []
        waits = self._waits[slots]
        if not waits.any():
            return []
        self._waits[slots] = _NOBODY
        first = int(waits[0])
        numbers = [first] if holds(waits == first) else np.unique(waits).tolist()
        if _SEVERAL in numbers:
            return list(self._pending.values())
        return [self._pending[number] for number in numbers if number != _NOBODY]

    def _met(self, fetch: Fetch) -> list[tuple[int, BoolArray]]:
        """Of each pair that waits, which of its slots are on their way no more, if there are some."""
        found = [(pair, self._waits[slots] == _NOBODY) for pair, (_, slots) in fetch.coming.items()]
        return [(pair, here) for pair, here in found if here.any()]

    def _drop(self, fetch: Fetch, pair: int, here: BoolArray) -> None:
        """The fetch waits no more for these of a pair's slots."""
        if not holds(here):
            positions, slots = fetch.coming[pair]
            fetch.coming[pair] = positions[~here], slots[~here]
            return
        del fetch.coming[pair]
        if not fetch.coming:
            self._end(fetch)

    def end_due(self, now_s: float) -> int:
        """Time passed: fetches that are due end with what has arrived. How many there were."""
        due = [fetch for fetch in self._pending.values() if fetch.deadline_s <= now_s]
        for fetch in due:
            self._end(fetch)
        return len(due)

    def release(self, fetch: Fetch) -> None:
        """Unpin what the fetch holds. One that is not done is cancelled. Releasing twice is the same as once."""
        if self._fetches.pop(fetch.id, None) is None:
            return
        self._end(fetch)
        for slots in fetch.slots:
            self._ledger.unpin(taken(slots))

    def deadlines_s(self) -> list[float]:
        """Those of the fetches that wait."""
        return [fetch.deadline_s for fetch in self._pending.values()]

    def pinned(self) -> list[IntArray]:
        """The slots that fetches hold, as often as they hold them."""
        return [taken(slots) for fetch in self._fetches.values() for slots in fetch.slots]

    def _end(self, fetch: Fetch) -> None:
        """The fetch waits for nothing any more."""
        for _, slots in fetch.coming.values():
            self._waits[slots[self._waits[slots] == fetch.id]] = _NOBODY
        fetch.coming.clear()
        fetch.done = True
        self._pending.pop(fetch.id, None)

    def check(self) -> None:
        """Assert the invariants."""
        waiting: set[tuple[int, int]] = set()
        for fetch in self._fetches.values():
            assert fetch.done == (not fetch.coming) == (fetch.id not in self._pending)
            for _, slots in fetch.coming.values():
                assert len(slots), "a fetch waits for nothing"
                known = (self._waits[slots] == fetch.id) | (self._waits[slots] == _SEVERAL)
                assert known.all(), "a fetch waits for a slot that does not know it"
                waiting.update((slot, fetch.id) for slot in slots.tolist())
        awaited = np.flatnonzero(self._waits)
        alone = awaited[self._waits[awaited] != _SEVERAL]
        known_by = set(zip(alone.tolist(), self._waits[alone].tolist(), strict=True))
        assert known_by <= waiting, "a slot knows a fetch that does not wait for it"
        states = set(self._ledger.states(awaited).tolist())
        assert states <= {State.RESERVED, State.FILLING}, "a fetch waits for what is not on its way"
        assert self._pending.keys() <= self._fetches.keys()
