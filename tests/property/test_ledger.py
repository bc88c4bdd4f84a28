"""Ledger, key map and LRU together against a model of one page: an OrderedDict in order of use."""

from __future__ import annotations

from collections import Counter, OrderedDict

import numpy as np
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from stowage.cache.ledger import Ledger
from stowage.cache.slot_states import State

SLOTS = 6
KEYS = [number.to_bytes(32, "big") for number in range(10)]
some_keys = st.lists(st.sampled_from(KEYS), max_size=5, unique=True)
some_masks = st.sampled_from([0b001, 0b010, 0b011, 0b111, 0b1111, 0])


class LedgerModel(RuleBasedStateMachine):
    """`ready`: key -> slot and mask, least recently used first; `coming`: key -> slot and mask that it will have."""

    def __init__(self) -> None:
        super().__init__()
        self.ledger = Ledger([SLOTS])
        self.ready: OrderedDict[bytes, tuple[int, int]] = OrderedDict()
        self.coming: dict[bytes, tuple[int, int]] = {}
        self.pins: list[tuple[list[bytes], list[int]]] = []
        self.stale: set[int] = set()
        self.private: list[int] = []

    def pinned(self) -> Counter[int]:
        return Counter(slot for _, slots in self.pins for slot in slots)

    def idle(self) -> list[bytes]:
        pinned = self.pinned()
        return [key for key, (slot, _) in self.ready.items() if slot not in pinned]

    def use(self, keys: list[bytes]) -> None:
        idle = self.idle()
        for key in reversed(keys):
            if key in idle:
                self.ready.move_to_end(key)

    def used(self) -> int:
        return len(self.ready) + len(self.coming) + len(self.stale) + len(self.private)

    def make_room(self, wanted: int) -> int:
        """How many of so many slots there are, after evictions."""
        idle = self.idle()
        short = max(0, wanted - (SLOTS - self.used()))
        for key in idle[:short]:
            del self.ready[key]
        return wanted - max(0, short - len(idle))

    def give(self, keys: list[bytes], slots: list[int]) -> dict[bytes, int]:
        """The first of the keys have room, and nobody else has a slot."""
        room = self.make_room(len(keys))
        given = dict(zip(keys, slots, strict=True))
        assert [key for key, slot in given.items() if slot >= 0] == keys[:room]
        return {key: given[key] for key in keys[:room]}

    @rule(keys=some_keys, data=st.data())
    def reserve(self, keys: list[bytes], data: st.DataObject) -> None:
        masks = [data.draw(some_masks) for _ in keys]
        slots = self.ledger.reserve(0, keys, np.array(masks, np.uint64)).tolist()
        self.use(keys)
        held = {key: mask for key, (_, mask) in self.ready.items()}
        gains = {
            key: mask for key, mask in zip(keys, masks, strict=True)
            if key not in self.coming and held.get(key, 0) | mask == mask != held.get(key, 0)
        }  # fmt: skip
        assert all(slot < 0 for key, slot in zip(keys, slots, strict=True) if key not in gains)
        given = self.give(list(gains), [slot for key, slot in zip(keys, slots, strict=True) if key in gains])
        self.coming |= {key: (slot, gains[key]) for key, slot in given.items()}

    @rule(keys=some_keys, mask=some_masks.filter(bool))
    def fill(self, keys: list[bytes], mask: int) -> None:
        keys = [key for key in keys if key not in self.ready and key not in self.coming]
        given = self.give(keys, self.ledger.fill(0, keys).tolist())
        slots = list(given.values())
        assert (self.ledger.states(np.array(slots, np.int64)) == State.FILLING).all()
        self.ledger.commit_filled(np.array(slots, np.int64), np.array([mask] * len(slots), np.uint64))
        self.ready |= {key: (slot, mask) for key, slot in reversed(given.items())}

    @precondition(lambda self: self.coming)
    @rule(data=st.data(), commit=st.booleans())
    def settle(self, data: st.DataObject, commit: bool) -> None:
        keys = data.draw(st.lists(st.sampled_from(sorted(self.coming)), min_size=1, unique=True))
        slots = np.array([self.coming[key][0] for key in keys])
        (self.ledger.commit if commit else self.ledger.abort)(slots)
        pinned = self.pinned()
        for key in reversed(keys):
            new = self.coming.pop(key)
            if commit:
                older = self.ready.pop(key, None)
                self.stale |= {older[0]} if older and older[0] in pinned else set()
                self.ready[key] = new

    @precondition(lambda self: self.ready)
    @rule(data=st.data())
    def grow(self, data: st.DataObject) -> None:
        """Chunks that are ready are stored anew with one block more, as a window does that moved on."""
        keys = data.draw(st.lists(st.sampled_from(sorted(self.ready)), min_size=1, unique=True))
        keys = [key for key in keys if key not in self.coming]
        masks = [self.ready[key][1] | 1 << self.ready[key][1].bit_length() for key in keys]
        slots = self.ledger.reserve(0, keys, np.array(masks, np.uint64)).tolist()
        self.use(keys)
        given = self.give(keys, slots)
        self.coming |= {key: (slot, mask) for (key, slot), mask in zip(given.items(), masks, strict=False)}

    @precondition(lambda self: self.ready)
    @rule(data=st.data())
    def pin(self, data: st.DataObject) -> None:
        keys = data.draw(st.lists(st.sampled_from(sorted(self.ready)), min_size=1, unique=True))
        slots = self.ledger.find(keys)
        assert (slots >= 0).all()
        self.ledger.pin(slots)
        self.pins.append((keys, slots.tolist()))

    @precondition(lambda self: self.pins)
    @rule(data=st.data())
    def unpin(self, data: st.DataObject) -> None:
        keys, slots = self.pins.pop(data.draw(st.integers(0, len(self.pins) - 1)))
        self.ledger.unpin(np.array(slots, np.int64))
        self.use([key for key in keys if key in self.ready and self.ready[key][0] in slots])
        self.stale -= set(slots) - self.pinned().keys()

    @rule(count=st.integers(0, 4))
    def take_private(self, count: int) -> None:
        slots = self.ledger.take_private(0, [bytes(32)] * count).tolist()
        if count > SLOTS - self.used() + len(self.idle()):
            assert slots == [-1] * count
            return
        assert self.make_room(count) == count
        assert all(slot >= 0 for slot in slots)
        self.private += slots

    @precondition(lambda self: self.private)
    @rule()
    def drop_private(self) -> None:
        self.ledger.drop_private(np.array([self.private.pop()]))

    @precondition(lambda self: len(self.ready) > 4)
    @rule()
    def drop(self) -> None:
        idle = self.idle()
        assert self.ledger.drop() == len(idle)
        for key in idle:
            del self.ready[key]

    @invariant()
    def agrees(self) -> None:
        self.ledger.check()
        for order in (KEYS, sorted(KEYS, key=lambda key: key not in self.ready)):
            assert self.ledger.lookup(order).tolist() == [self.ready.get(key, (-1, 0))[1] for key in order]
            assert self.ledger.find(order).tolist() == [self.ready.get(key, (-1, 0))[0] for key in order]
            assert self.ledger.find_in_flight(order).tolist() == [self.coming.get(key, (-1, 0))[0] for key in order]
        places = [place for places in (self.ready, self.coming) for place, _ in places.values()]
        assert len({*places, *self.stale, *self.private}) == self.ledger.used(0) == self.used() <= SLOTS
        self.ledger.check_pins([np.array(slots, np.int64) for _, slots in self.pins])


TestLedger = LedgerModel.TestCase
TestLedger.settings = settings(stateful_step_count=30, deadline=None)
