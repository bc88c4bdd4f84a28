"""Open fetches: the host slots that each has pinned, and the slots in flight that it waits for.

A slot in `Fetch.slots` is pinned from the moment it is written there until the fetch is released. `_waits[slot]` is the
id of the one fetch that waits for a slot, or `_SEVERAL`: then all waiting fetches are checked. A fetch that waits for
nothing is done, and no longer changes.

Starts no transfers: the flow does, and reports slots here as arrived or failed. Every method takes a batch; none loops
over slots in Python.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import numpy as np

from stowage.cache.flow_types import Fetch
from stowage.cache.keymap import all_true, present_slots
from stowage.cache.ledger import Ledger
from stowage.cache.slot_states import State
from stowage.core.geometry import BoolArray, IntArray

_NOBODY: Final = 0
"""No fetch waits for the slot. Fetch ids start at 1."""
_SEVERAL: Final = -1


class Fetches:
    """All fetches that are not released. `slots`: how many `ledger` has."""

    __slots__ = ("_fetches", "_ledger", "_pending", "_waits")

    def __init__(self, ledger: Ledger, slots: int) -> None:
        self._ledger = ledger
        self._fetches: dict[int, Fetch] = {}
        self._pending: dict[int, Fetch] = {}
        # Zero pages that were never written take no memory.
        self._waits: IntArray = np.zeros(slots, np.int64)

    def open(self, fetch_id: int, wanted: Sequence[tuple[int, list[bytes]]], deadline_s: float) -> Fetch:
        """Pin those chunks of the (group, keys) pairs that are in host. Done, unless `wait` is called."""
        fetch = Fetch(fetch_id, deadline_s, done=True)
        self._fetches[fetch.id] = fetch
        for _, keys in wanted:
            slots, masks = self._ledger.find_masks(keys)
            present = present_slots(slots)
            self._ledger.pin(present)
            fetch.slots.append(slots)
            fetch.masks.append(masks)
            # -1 where there is no slot, 0 where there is one: the sign.
            fetch.sources.append(
                (slots >> 63).astype(np.int8) if len(present) < len(slots) else np.zeros(len(slots), np.int8)
            )
        return fetch

    def wait(self, fetch: Fetch, pair: int, positions: IntArray, slots: IntArray) -> None:
        """Let the fetch wait for slots in flight, which serve these positions of a pair. Once for each pair."""
        if not len(slots):
            return
        fetch.awaited[pair] = positions, slots
        before = self._waits[slots]
        others = (before != _NOBODY) & (before != fetch.id)
        self._waits[slots] = np.where(others, _SEVERAL, fetch.id)
        fetch.done = False
        self._pending[fetch.id] = fetch

    def arrived(self, slots: IntArray, source: int) -> None:
        """Slots became ready: pin them for the fetches that wait for them. `source`: 0 host, i + 1 tier i."""
        parts: list[IntArray] = []
        for fetch in self._fetches_awaiting(slots):
            for pair, here in self._arrived_of(fetch):
                positions, served = (column[here] for column in fetch.awaited[pair])
                fetch.slots[pair][positions] = served
                fetch.masks[pair][positions] = self._ledger.masks(served)
                fetch.sources[pair][positions] = source
                parts.append(served)
                self._stop_waiting(fetch, pair, here)
        if parts:
            self._ledger.pin(np.concatenate(parts))

    def failed(self, slots: IntArray) -> None:
        """Slots will not become ready: no fetch waits for them any more."""
        for fetch in self._fetches_awaiting(slots):
            for pair, here in self._arrived_of(fetch):
                self._stop_waiting(fetch, pair, here)

    def _fetches_awaiting(self, slots: IntArray) -> list[Fetch]:
        """The fetches that may wait for these slots, which are no longer in flight. Clears `_waits` of the slots."""
        if not self._pending:  # all that waited have ended
            self._waits[slots] = _NOBODY
            return []
        waits = self._waits[slots]
        if not waits.any():
            return []
        self._waits[slots] = _NOBODY
        first = int(waits[0])
        numbers = [first] if all_true(waits == first) else np.unique(waits).tolist()
        if _SEVERAL in numbers:
            return list(self._pending.values())
        return [self._pending[number] for number in numbers if number != _NOBODY]

    def _arrived_of(self, fetch: Fetch) -> list[tuple[int, BoolArray]]:
        """By waiting pair of the fetch, which of its slots are no longer in flight; pairs without any are left out."""
        found = [(pair, self._waits[slots] == _NOBODY) for pair, (_, slots) in fetch.awaited.items()]
        return [(pair, here) for pair, here in found if here.any()]

    def _stop_waiting(self, fetch: Fetch, pair: int, here: BoolArray) -> None:
        """Stop waiting for the slots `here` of a pair."""
        if not all_true(here):
            positions, slots = fetch.awaited[pair]
            fetch.awaited[pair] = positions[~here], slots[~here]
            return
        del fetch.awaited[pair]
        if not fetch.awaited:
            self._end(fetch)

    def end_due(self, now_s: float) -> int:
        """End fetches past their deadline with what has arrived. Returns how many there were."""
        due = [fetch for fetch in self._pending.values() if fetch.deadline_s <= now_s]
        for fetch in due:
            self._end(fetch)
        return len(due)

    def release(self, fetch: Fetch) -> None:
        """Unpin the fetch's slots. One that is not done is cancelled. Idempotent."""
        if self._fetches.pop(fetch.id, None) is None:
            return
        self._end(fetch)
        for slots in fetch.slots:
            self._ledger.unpin(present_slots(slots))

    def deadlines_s(self) -> list[float]:
        """Deadlines of the waiting fetches."""
        return [fetch.deadline_s for fetch in self._pending.values()]

    def pinned(self) -> list[IntArray]:
        """The slots that fetches have pinned, once per pin."""
        return [present_slots(slots) for fetch in self._fetches.values() for slots in fetch.slots]

    def _end(self, fetch: Fetch) -> None:
        """End the fetch: it waits for nothing any more."""
        for _, slots in fetch.awaited.values():
            self._waits[slots[self._waits[slots] == fetch.id]] = _NOBODY
        fetch.awaited.clear()
        fetch.done = True
        self._pending.pop(fetch.id, None)

    def check(self) -> None:
        """Assert the invariants."""
        waiting: set[tuple[int, int]] = set()
        for fetch in self._fetches.values():
            assert fetch.done == (not fetch.awaited) == (fetch.id not in self._pending)
            for _, slots in fetch.awaited.values():
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
