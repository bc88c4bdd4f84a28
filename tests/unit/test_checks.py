"""`check()` of the host's bookkeeping finds damage: each invariant is broken once, alone, and is named.

Tests, the simulator and the idle engine rely on these checks. A check that cannot fail would make them all worthless.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from stowage.cache.ledger import Ledger
from stowage.cache.policy import LRU
from stowage.cache.slot_states import State
from stowage.core.table.slots import Slots
from tests.flow_setup import FULL, Setup, keys, masks


class Books(Ledger):
    """A ledger with slots in every state, and their numbers by name. Its map is in Python, to be damaged."""

    def __init__(self) -> None:
        super().__init__([12, 3])
        self._map._slots = Slots(15)
        self.ready = self._store(1, 2)
        self.pinned_ready = self._store(3)
        self.pin(self.pinned_ready)
        self.stale = self._store(4, mask=1)
        self.pin(self.stale)
        self._store(4)
        self.reserved = self.reserve(0, keys(5), masks([FULL]))
        self._store(6, mask=1)
        self.replacement = self.reserve(0, keys(6), masks([FULL]))
        self.filled = self.fill(0, keys(7))
        self.private = self.take_private(1, keys(8))
        self.check()

    def _store(self, *names: int, mask: int = FULL) -> np.ndarray:
        slots = self.reserve(0, keys(*names), masks([mask] * len(names)))
        self.commit(slots)
        return slots


def set_mask(books: Books, slots: np.ndarray, mask: int) -> None:
    books._masks[slots] = mask


def set_pins(books: Books, slots: np.ndarray, pins: int) -> None:
    books._pins[slots] = pins


def set_state(books: Books, slots: np.ndarray, state: State) -> None:
    books._state[slots] = state


def free_one_twice(books: Books) -> None:
    books._free[0][0] = books._free[0][1]


def swap_free_slots_of_two_classes(books: Books) -> None:
    books._free[0][0], books._free[1][0] = books._free[1][0], books._free[0][0]


def lead_two_keys_to_one_slot(books: Books) -> None:
    books._map._slots._slot_of[keys(1)[0]] = books._map._slots._slot_of[keys(2)[0]]


def swap_two_keys(books: Books) -> None:
    slots = books._map._slots._slot_of
    slots[keys(1)[0]], slots[keys(2)[0]] = slots[keys(2)[0]], slots[keys(1)[0]]


def let_a_replacement_be_ready(books: Books) -> None:
    """The map leads to the replacement, and the older chunk, which is ready, is kept as one."""
    key = keys(6)[0]
    on_its_way, ready = books._map.replacements[key], books._map._slots._slot_of[key]
    books._map.replacements[key], books._map._slots._slot_of[key] = ready, on_its_way


def first_free(books: Books) -> np.ndarray:
    return books._free[0][:1].copy()


LEDGER_DAMAGE: list[tuple[str, Callable[[Books], object]]] = [
    ("", lambda books: set_pins(books, first_free(books), -1)),
    ("", lambda books: books._masks.__setitem__(-1, 1)),
    ("a slot is free twice", free_one_twice),
    ("free slots and states disagree", lambda books: set_state(books, first_free(books), State.READY)),
    ("a free slot is in another class", swap_free_slots_of_two_classes),
    ("", lambda books: set_pins(books, first_free(books), 1)),
    ("", lambda books: set_pins(books, books.reserved, 1)),
    ("", lambda books: set_pins(books, books.filled, 1)),
    ("", lambda books: set_pins(books, books.stale, 0)),
    ("", lambda books: set_pins(books, books.private, 0)),
    ("", lambda books: set_mask(books, first_free(books), 1)),
    ("", lambda books: set_mask(books, books.ready[:1], 0)),
    ("", lambda books: setattr(books, "_stale", 2)),
    ("a chunk on its way can be looked up", lambda books: set_mask(books, books.reserved, 1)),
    ("a chunk on its way can be looked up", lambda books: set_mask(books, books.filled, 1)),
    ("two keys lead to one slot", lead_two_keys_to_one_slot),
    ("map and states disagree", lambda books: books._map._slots._slot_of.pop(keys(1)[0])),
    ("a replacement is not on its way", let_a_replacement_be_ready),
    ("map and keys disagree", swap_two_keys),
    ("the policy does not know exactly the evictable slots", lambda books: books._policies[0].remove(books.ready)),
    (
        "the policy does not know exactly the evictable slots",
        lambda books: books._policies[0].insert(books.pinned_ready),
    ),
    ("a stamped slot has no live entry in the ring", lambda books: books._policies[1]._stamp.__setitem__(0, 0)),
]


@pytest.mark.parametrize(("says", "damage"), LEDGER_DAMAGE)
def test_the_ledger_finds(says: str, damage: Callable[[Books], object]) -> None:
    books = Books()
    damage(books)
    with pytest.raises(AssertionError, match=f"^{says}$"):
        books.check()


def test_the_ledger_finds_pins_that_nobody_holds_and_holders_without_a_pin() -> None:
    books = Books()
    held = [books.pinned_ready, books.stale]
    books.check_pins(held)
    books.check_pins(held[::-1])
    for wrong in (held[:1], [*held, books.ready[:1]], [*held, books.stale], []):
        with pytest.raises(AssertionError, match=r"^a pin is held by nobody, or a holder has no pin$"):
            books.check_pins(wrong)


@pytest.mark.parametrize(
    ("says", "damage"),
    [
        ("", lambda lru: setattr(lru, "_head", -1)),
        ("", lambda lru: setattr(lru, "_head", 4)),
        ("", lambda lru: setattr(lru, "_tail", 10_000)),
        ("", lambda lru: setattr(lru, "_positions", lru._positions[:-1])),
        ("a stamped slot has no live entry in the ring", lambda lru: lru._stamp.__setitem__(0, 50)),
        ("a stamped slot has no live entry in the ring", lambda lru: setattr(lru, "_head", 1)),
    ],
)
def test_the_policy_finds(says: str, damage: Callable[[LRU], object]) -> None:
    lru = LRU(8)
    lru.insert(np.array([5, 6, 7]))
    lru.check()
    damage(lru)
    with pytest.raises(AssertionError, match=f"^{says}$"):
        lru.check()


def test_the_policy_finds_a_slot_that_is_live_twice() -> None:
    lru = LRU(8)
    lru.insert(np.array([5, 6]))
    lru._positions[1] = 0
    lru._ring[1] = 5
    with pytest.raises(AssertionError, match=r"^a slot is live twice$"):
        lru.check()


class Busy(Setup):
    """A flow with a fetch that holds a chunk and waits for two, a load, a spill, and a chunk that is being stored."""

    def __init__(self) -> None:
        super().__init__()
        self.held[0] = dict.fromkeys(keys(1), FULL)
        self.store(2)
        self.coming = self.flow.reserve(0, keys(3), masks([FULL]))
        self.fetch = self.flow.fetch([(0, keys(1, 2, 3))], 10.0, 0.0)
        self.load, self.spill = self.flow._flights.loads()[0], self.flow._flights.stores()[0]
        self.flow.check()

    def end_the_fetch_by_half(self) -> None:
        self.fetch.awaited.clear()
        self.flow._fetches._waits[:] = 0


FLOW_DAMAGE: list[tuple[str, Callable[[Busy], object]]] = [
    ("a slot is free twice", lambda busy: free_one_twice(busy.flow.ledger)),
    ("a fetch waits for a slot that does not know it", lambda busy: busy.flow._fetches._waits.fill(0)),
    ("a fetch waits for nothing", lambda busy: busy.fetch.awaited.update({1: (busy.coming[:0],) * 2})),
    (
        "a slot knows a fetch that does not wait for it",
        lambda busy: busy.fetch.awaited.update({0: tuple(column[:1] for column in busy.fetch.awaited[0])}),
    ),
    ("", lambda busy: busy.fetch.awaited.clear()),
    ("a fetch waits for what is not on its way", lambda busy: busy.flow.ledger.commit(busy.coming)),
    ("", lambda busy: setattr(busy.fetch, "done", True)),
    ("", lambda busy: busy.flow._fetches._pending.clear()),
    ("", Busy.end_the_fetch_by_half),
    ("", lambda busy: busy.flow._fetches._pending.update({99: busy.fetch})),
    (
        "the overdue keys are not those of the overdue flights",
        lambda busy: busy.flow._flights.late_keys.update(keys(1)),
    ),
    ("the overdue keys are not those of the overdue flights", lambda busy: setattr(busy.load, "late", True)),
    ("a slot is filled by no flight, or by two", lambda busy: setattr(busy.load, "is_load", False)),
    (
        "a slot is filled by no flight, or by two",
        lambda busy: setattr(busy.load, "slots", np.repeat(busy.load.slots, 2)),
    ),
    ("a pin is held by nobody, or a holder has no pin", lambda busy: busy.flow.ledger.unpin(busy.spill.slots)),
    (
        "too much is in flight",
        lambda busy: (setattr(busy.flow.spills[0], "_bytes_max", 1), busy.flow.spills[0].begin(1)),
    ),
    ("a closed breaker has a probe", lambda busy: setattr(busy.flow.breakers[0], "_probing", True)),
    ("spills under way do not add up", lambda busy: busy.flow.spills[0].begin(1)),
    ("spills under way do not add up", lambda busy: setattr(busy.spill, "payload_bytes", 1)),
]


@pytest.mark.parametrize(("says", "damage"), FLOW_DAMAGE)
def test_the_flow_finds(says: str, damage: Callable[[Busy], object]) -> None:
    busy = Busy()
    damage(busy)
    with pytest.raises(AssertionError, match=f"^{says}$"):
        busy.flow.check()
