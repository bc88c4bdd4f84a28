"""Who waits for which slots, against plain dictionaries: whatever arrives, fails, ends or is released, in any order."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stowage.cache.fetches import Fetches
from stowage.cache.flow_types import Fetch
from stowage.cache.ledger import Ledger
from tests.flow_setup import FULL, keys, masks

SLOTS, PAIRS = 12, 2
WAITS, SOURCE = -2, 3


class World:
    """Fetches of two groups over slots that are all on their way. `expected`: the slot at each place of each fetch,
    WAITS while it is on its way, -1 where it will not come. `sources`: where a slot that is there came from.
    """

    def __init__(self) -> None:
        self.ledger = Ledger([SLOTS])
        self.fetches = Fetches(self.ledger, SLOTS)
        self.on_the_way = {name: int(slot) for name, slot in enumerate(self.ledger.fill(0, keys(*range(SLOTS))))}
        self.wanted: dict[int, list[list[int]]] = {}
        self.expected: dict[int, list[list[int]]] = {}
        self.sources: dict[int, list[list[int]]] = {}
        self.opened: dict[int, Fetch] = {}

    def open(self, wanted: list[list[int]]) -> None:
        number = len(self.wanted) + 1
        fetch = self.fetches.open(number, [(pair, keys(*names)) for pair, names in enumerate(wanted)], float(number))
        self.opened[number], self.wanted[number] = fetch, wanted
        self.expected[number], self.sources[number] = [], []
        for pair, names in enumerate(wanted):
            found = self.ledger.find(keys(*names))
            coming = np.array([name in self.on_the_way for name in names], bool)
            found[coming] = WAITS
            self.expected[number].append(found.tolist())
            self.sources[number].append(np.where(coming, SOURCE, 0).tolist())
            places = np.flatnonzero(coming)
            slots = np.array([self.on_the_way[names[place]] for place in places.tolist()], np.int64)
            self.fetches.wait(fetch, pair, places, slots)

    def land(self, names: list[int], good: bool) -> None:
        slots = np.array([self.on_the_way.pop(name) for name in names], np.int64)
        if good:
            self.ledger.commit_filled(slots, masks([FULL] * len(slots)))
            self.fetches.arrived(slots, SOURCE)
        else:
            self.ledger.abort(slots)
            self.fetches.failed(slots)
        of = dict(zip(names, slots.tolist() if good else [-1] * len(names), strict=True))
        for number, pairs in self.expected.items():
            for pair, names_of in enumerate(self.wanted[number]):
                for place, name in enumerate(names_of):
                    if pairs[pair][place] == WAITS and name in of:
                        pairs[pair][place] = of[name]

    def end(self, number: int) -> None:
        """Its deadline has passed, and those of all before it."""
        due = [fetch for fetch in self.opened.values() if fetch.id <= number and not fetch.done]
        assert self.fetches.end_due(float(number)) == len(due)
        for fetch in due:
            self.expected[fetch.id] = [
                [-1 if slot == WAITS else slot for slot in pair] for pair in self.expected[fetch.id]
            ]

    def release(self, number: int) -> None:
        self.fetches.release(self.opened.pop(number))
        del self.expected[number]

    def check(self) -> None:
        self.ledger.check()
        self.fetches.check()
        self.ledger.check_pins(self.fetches.pinned())
        for number, pairs in self.expected.items():
            fetch = self.opened[number]
            assert fetch.done == all(slot != WAITS for pair in pairs for slot in pair)
            for pair, slots in enumerate(pairs):
                seen = [-1 if slot == WAITS else slot for slot in slots]
                assert fetch.slots[pair].tolist() == seen
                assert fetch.masks[pair].tolist() == [FULL if slot >= 0 else 0 for slot in seen]
                came_from = zip(seen, self.sources[number][pair], strict=True)
                assert fetch.sources[pair].tolist() == [source if slot >= 0 else -1 for slot, source in came_from]


@pytest.mark.slow
@settings(max_examples=200, deadline=None)
@given(st.data())
def test_fetches_get_what_they_wait_for(data: st.DataObject) -> None:
    world = World()
    names = st.lists(st.integers(0, SLOTS - 1), max_size=8)  # some twice
    for _ in range(data.draw(st.integers(1, 12))):
        step = data.draw(st.sampled_from(["open", "arrive", "fail", "end", "release"]))
        if step == "open":
            world.open([data.draw(names) for _ in range(PAIRS)])
        elif step in ("arrive", "fail") and world.on_the_way:
            landing = data.draw(st.lists(st.sampled_from(sorted(world.on_the_way)), unique=True))
            world.land(landing, good=step == "arrive")
        elif step == "end" and world.opened:
            world.end(data.draw(st.sampled_from(sorted(world.opened))))
        elif step == "release" and world.opened:
            world.release(data.draw(st.sampled_from(sorted(world.opened))))
        world.check()
