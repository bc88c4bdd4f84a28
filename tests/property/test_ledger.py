"""Ledger and LRU together against a model of one page: an OrderedDict in order of use."""

from __future__ import annotations

from collections import OrderedDict

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from stowage.core.ledger import Ledger

SLOTS = 6
KEYS = [number.to_bytes(32, "big") for number in range(10)]
some_keys = st.lists(st.sampled_from(KEYS), max_size=5, unique=True)
some_masks = st.sampled_from([0b11, 0b11, 0b01, 0b10])


class LedgerModel(RuleBasedStateMachine):
    """`ready`: key -> mask, least recently used first. Pins and chunks on their way are kept beside it."""

    def __init__(self) -> None:
        super().__init__()
        self.ledger = Ledger([SLOTS])
        self.ready: OrderedDict[bytes, int] = OrderedDict()
        self.pins: list[tuple[list[bytes], np.ndarray]] = []
        self.coming: dict[bytes, tuple[int, int]] = {}

    def pinned(self, key: bytes) -> bool:
        return any(key in keys for keys, _ in self.pins)

    def use(self, keys: list[bytes]) -> None:
        for key in reversed(keys):
            if key in self.ready and not self.pinned(key):
                self.ready.move_to_end(key)

    def room(self) -> int:
        """Evict for one slot if need be; whether there is one."""
        if len(self.ready) + len(self.coming) < SLOTS:
            return True
        victim = next((key for key in self.ready if not self.pinned(key)), None)
        if victim is None:
            return False
        del self.ready[victim]
        return True

    @rule(keys=some_keys, mask=some_masks)
    def reserve(self, keys: list[bytes], mask: int) -> None:
        # Replacement is left to the unit tests: here a mask that would replace is made the one that is held.
        wanted = [self.ready.get(key, mask) for key in keys]
        slots = self.ledger.reserve(0, keys, np.array(wanted, np.uint64)).tolist()
        self.use(keys)
        new = [key for key in keys if key not in self.ready and key not in self.coming]
        expected = []
        for key in new:
            if not self.room():
                break
            expected.append(key)
            self.coming[key] = (-1, mask)
        assert [key for key, slot in zip(keys, slots, strict=True) if slot >= 0] == expected
        for key, slot in zip(keys, slots, strict=True):
            if slot >= 0:
                self.coming[key] = (slot, mask)

    @precondition(lambda self: self.coming)
    @rule(data=st.data(), commit=st.booleans())
    def settle(self, data: st.DataObject, commit: bool) -> None:
        keys = data.draw(st.lists(st.sampled_from(sorted(self.coming)), min_size=1, unique=True))
        slots = np.array([self.coming[key][0] for key in keys])
        (self.ledger.commit if commit else self.ledger.abort)(slots)
        for key in reversed(keys):
            _, mask = self.coming.pop(key)
            if commit:
                self.ready[key] = mask

    @rule(keys=some_keys)
    def pin(self, keys: list[bytes]) -> None:
        held = [key for key in keys if key in self.ready]
        slots = self.ledger.find(held)
        assert (slots >= 0).all()
        self.ledger.pin(slots)
        self.pins.append((held, slots))

    @precondition(lambda self: self.pins)
    @rule(data=st.data())
    def unpin(self, data: st.DataObject) -> None:
        keys, slots = self.pins.pop(data.draw(st.integers(0, len(self.pins) - 1)))
        self.ledger.unpin(slots)
        self.use(keys)

    @rule()
    def drop(self) -> None:
        idle = [key for key in self.ready if not self.pinned(key)]
        assert self.ledger.drop() == len(idle)
        for key in idle:
            del self.ready[key]

    @invariant()
    def agrees(self) -> None:
        self.ledger.check()
        for order in (KEYS, KEYS[::-1], sorted(KEYS, key=lambda key: key in self.ready)):
            assert self.ledger.lookup(order).tolist() == [self.ready.get(key, 0) for key in order]
        slots = [slot for slot in self.ledger.find(KEYS).tolist() if slot >= 0]
        assert len(set(slots)) == len(slots)
        assert self.ledger.used(0) == len(self.ready) + len(self.coming) <= SLOTS


class ShortTrails(LedgerModel):
    """The same, with look-ups that follow trails of two keys."""

    def __init__(self) -> None:
        super().__init__()
        self.ledger = ledger_with_short_trails()


def ledger_with_short_trails() -> Ledger:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("stowage.core.trails.KEYS_MIN", 2)
        return Ledger([SLOTS])


TestLedger = LedgerModel.TestCase
TestLedger.settings = settings(max_examples=100, stateful_step_count=40, deadline=None)
TestShortTrails = ShortTrails.TestCase
TestShortTrails.settings = settings(max_examples=100, stateful_step_count=40, deadline=None)
