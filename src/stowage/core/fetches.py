"""Who holds which chunks in host, and who waits for which slots that are on their way.

A slot in `Fetch.slots` is pinned for that fetch from the moment it is written there until the fetch is released. A
fetch knows the slots that it waits for, and each of them its fetches; both sides say the same. A fetch that waits for
nothing is done, and what it holds changes no more.

Starts no transfer: somebody else brings the slots, and reports them here as arrived or failed.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from stowage.core.events import Fetch
from stowage.core.geometry import IntArray
from stowage.core.keymap import taken
from stowage.core.ledger import Ledger, State

__all__ = ["Fetches"]


class Fetches:
    """The fetches that are not released, over the slots of `ledger`."""

    __slots__ = ("_awaited", "_fetches", "_ledger", "_pending")

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger
        self._fetches: dict[int, Fetch] = {}
        self._pending: dict[int, Fetch] = {}
        self._awaited: dict[int, list[Fetch]] = {}

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

    def wait(self, fetch: Fetch, pair: int, places: IntArray, slots: IntArray) -> None:
        """The slots are on their way, and will serve these places of a pair."""
        for place, slot in zip(places.tolist(), slots.tolist(), strict=True):
            if slot not in fetch.waiting:
                fetch.waiting[slot] = []
                self._awaited.setdefault(slot, []).append(fetch)
            fetch.waiting[slot].append((pair, place))
        if fetch.waiting:
            fetch.done = False
            self._pending[fetch.id] = fetch

    def arrived(self, slots: IntArray, source: int) -> None:
        """Slots became ready: give them to the fetches that wait for them. `source`: 0 host, i + 1 tier i."""
        if not self._awaited:
            return
        pins: list[int] = []
        for slot, mask in zip(slots.tolist(), self._ledger.masks(slots), strict=True):
            for fetch in self._awaited.pop(slot, ()):
                for pair, place in fetch.waiting.pop(slot):
                    fetch.slots[pair][place] = slot
                    fetch.masks[pair][place] = mask
                    fetch.sources[pair][place] = source
                    pins.append(slot)
                if not fetch.waiting:
                    self._end(fetch)
        if pins:
            self._ledger.pin(np.array(pins, np.int64))

    def failed(self, slots: IntArray) -> None:
        """Slots will not become ready: nobody waits for them any more."""
        if not self._awaited:
            return
        for slot in slots.tolist():
            for fetch in self._awaited.pop(slot, ()):
                del fetch.waiting[slot]
                if not fetch.waiting:
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
        for slot in fetch.waiting:
            self._awaited[slot].remove(fetch)
            if not self._awaited[slot]:
                del self._awaited[slot]
        fetch.waiting.clear()
        fetch.done = True
        self._pending.pop(fetch.id, None)

    def check(self) -> None:
        """Assert the invariants."""
        awaited = {(slot, fetch.id) for slot, fetches in self._awaited.items() for fetch in fetches}
        waiting = {(slot, fetch.id) for fetch in self._fetches.values() for slot in fetch.waiting}
        assert awaited == waiting, "a fetch waits for a slot that does not know it"
        states = set(self._ledger.states(np.array(list(self._awaited), np.int64)).tolist())
        assert states <= {State.RESERVED, State.FILLING}, "a fetch waits for what is not on its way"
        for fetch in self._fetches.values():
            assert fetch.done == (not fetch.waiting) == (fetch.id not in self._pending)
        assert self._pending.keys() <= self._fetches.keys()
