"""The ledger in C does what the one in Python does, and leaves alone what is not its case."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest

from stowage.cache import native_ledger
from stowage.cache.keymap import After
from stowage.cache.ledger import Ledger
from stowage.cache.native_ledger import NativeLedger, make_ledger
from stowage.cache.policy import POLICIES
from stowage.native import is_built

pytestmark = pytest.mark.skipif(not is_built(), reason="nothing was compiled")

KEYS = [number.to_bytes(32, "little") for number in range(60)]
SLOTS = [9, 7]


class Both:
    """The same events at both ledgers: the same slots."""

    def __init__(self, policy: str, chance: random.Random) -> None:
        self.chance = chance
        self.ledgers = [make([*SLOTS], POLICIES[policy]) for make in (Ledger, NativeLedger)]
        self.coming: list[list[Any]] = [[], []]

    def reserve(self) -> None:
        chance = self.chance
        slab, count = chance.randrange(2), chance.randrange(6)
        first = 30 * slab + chance.randrange(30 - count)
        keys = KEYS[first : first + count] if chance.random() < 0.7 else chance.choices(KEYS[30 * slab :][:30], k=count)
        masks = np.array([chance.choice((1, 3, 3, 3, 0 if chance.random() < 0.2 else 7)) for _ in keys], np.uint64)
        after: After = chance.choice((None, KEYS[first - 1], [chance.choice((b"", *KEYS)) for _ in keys]))
        found = [ledger.reserve(slab, keys, masks, after) for ledger in self.ledgers]
        assert found[0].tolist() == found[1].tolist()
        for coming, slots in zip(self.coming, found, strict=True):
            coming += [slots[slots >= 0]] if (slots >= 0).any() else []

    def settle(self) -> None:
        if self.coming[0]:
            number, commit = self.chance.randrange(len(self.coming[0])), self.chance.random() < 0.8
            for ledger, coming in zip(self.ledgers, self.coming, strict=True):
                (ledger.commit if commit else ledger.abort)(coming.pop(number))

    def pin(self) -> None:
        keys = [key for key in self.chance.sample(KEYS, 5) if self.ledgers[0].lookup([key])[0]]
        pins = [ledger.find(keys) for ledger in self.ledgers]
        for ledger, slots in zip(self.ledgers, pins, strict=True):
            ledger.pin(slots)
        self.reserve()
        for ledger, slots in zip(self.ledgers, pins, strict=True):
            ledger.unpin(slots)

    def compare(self) -> None:
        plain, compiled = self.ledgers
        for ledger in self.ledgers:
            ledger.check()
        for name in "_state _masks _masks_coming _key_of _parent _parent_serial _serial _free_count".split():
            assert np.array_equal(getattr(plain, name), getattr(compiled, name)), name
        assert sorted(plain._map.items()) == sorted(compiled._map.items())
        assert plain.evictions == compiled.evictions and plain.without_room == compiled.without_room


@pytest.mark.parametrize("policy", sorted(POLICIES))
@pytest.mark.parametrize("seed", range(8))
def test_both_do_the_same(policy: str, seed: int) -> None:
    both = Both(policy, random.Random(seed))
    for _ in range(150):
        both.chance.choice((both.reserve, both.reserve, both.settle, both.settle, both.pin))()
        both.compare()


def test_what_is_not_compiled_is_made_in_python(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native_ledger, "is_wanted", lambda: False)
    assert type(make_ledger([4])) is Ledger


def test_arrays_that_do_not_fit_are_refused() -> None:
    kernel = NativeLedger([4])._kernel
    keys, masks, free = KEYS[:2], np.ones(2, np.uint64), np.arange(4)
    slots = np.empty(2, np.int64)
    with pytest.raises(ValueError, match="another length"):
        kernel.reserve(keys, masks[:1], None, free, 4, slots)
    with pytest.raises(ValueError, match="another length"):
        kernel.reserve(keys, masks, None, free, 4, slots[:1])
    with pytest.raises(ValueError, match="a key before each"):
        kernel.reserve(keys, masks, [b""], free, 4, slots)
    with pytest.raises(IndexError, match="more free slots"):
        kernel.reserve(keys, masks, None, free, 5, slots)
    with pytest.raises(IndexError, match="a free slot that is none"):
        kernel.reserve(keys, masks, None, np.array([0, 4]), 2, slots)
    with pytest.raises(TypeError, match="keys must be bytes"):
        kernel.reserve([1, 2], masks, None, free, 4, slots)  # type: ignore[list-item]
    assert not kernel.reserve([b"short", KEYS[0]], masks, None, free, 4, slots), "no key of a table"
    with pytest.raises(IndexError, match="slot 4 of 4"):
        kernel.commit(np.array([4]), slots[:1], slots[1:])
    with pytest.raises(ValueError, match="another length"):
        kernel.commit(np.array([0]), slots, slots)
    assert kernel.commit(np.array([0]), slots[:1], slots[1:]) is None, "a slot that is not on its way"
    with pytest.raises(IndexError, match="more free slots"):
        kernel.evict(np.array([0]), free, 4)
    with pytest.raises(IndexError, match="slot 4 of 4"):
        kernel.evict(np.array([4]), free, 0)
    with pytest.raises(KeyError):
        kernel.evict(np.array([0]), free, 0)
    with pytest.raises(ValueError, match="another length"):
        kernel.all_new(keys, masks[:1])
    table = NativeLedger([4])._map.table
    with pytest.raises(ValueError, match="other arrays"):
        type(kernel)(table, (free,))  # type: ignore[arg-type]
