"""The tables of keys against the obvious model, for any order of events.

In Python, in C, and in C with buckets so small that every kind of growth happens.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stowage.core.table import rows, slots
from stowage.core.table.rows import EXTENT
from stowage.native import extension
from tests.native import needs_native

WIDTH = 16
KEYS = [number.to_bytes(32, "little") for number in range(300)]
STRANGERS = [b"", b"short", bytes(33), (1 << 200).to_bytes(32, "little")]
SIZES = ((12, 20), (3, 20), (1, 20), (1, 3), (2, 0))
"""Bits of a bucket, and of the directory: splits, splits of the smallest buckets, and buckets that cannot be split."""


def kernels(name: str) -> list[Any]:
    """The ways to make a table in C."""
    kernel = getattr(extension, name, None)

    def made_with(bits: int, depth: int) -> Callable[[int], Any]:
        return lambda size: kernel(size, bucket_bits=bits, depth_max=depth)

    return [pytest.param(made_with(*sizes), id=f"C-{sizes}", marks=needs_native) for sizes in SIZES]


class RowsLife:
    """Random events, at the table and at the model: owner -> its rows, key -> its newest row."""

    def __init__(self, table: Any, chance: random.Random) -> None:
        self.table = table
        self.chance = chance
        self.extents: dict[int, list[int]] = {}
        self.rows_of: dict[int, list[int]] = {}
        self.newest: dict[bytes, int] = {}
        self.key_of: dict[int, bytes] = {}
        self.marked: set[int] = set()
        self.last = 0

    def step(self) -> None:
        count = self.chance.choice((0, 1, 5, EXTENT, 150))
        if self.chance.random() < 0.5:  # a prompt: keys that follow one another
            first = self.chance.randrange(len(KEYS) - count)
            some = KEYS[first : first + count]
        else:
            some = self.chance.choices(KEYS, k=count)
        self.chance.choice((self.insert, self.insert, self.drop, self.mark, self.release))(some)

    def insert(self, some: list[bytes]) -> None:
        owner = self.chance.randrange(5)
        numbers = range(self.last + 1, self.last + 1 + len(some))
        fields = np.array([[number, ~number] for number in numbers], np.int64).reshape(-1, 2)
        self.table.insert(owner, self.extents.setdefault(owner, []), np.frombuffer(b"".join(some), "V32"), fields)
        self.rows_of.setdefault(owner, []).extend(numbers)
        self.newest.update(zip(some, numbers, strict=True))
        self.key_of.update(zip(numbers, some, strict=True))
        self.last += len(some)

    def drop(self, some: list[bytes]) -> None:
        some = [*some[:20], *STRANGERS]
        gone = {key for key in some if self.newest.pop(key, None) is not None}
        assert self.table.drop(some) == len(gone)

    def mark(self, some: list[bytes]) -> None:
        self.table.mark([*some, *STRANGERS])
        self.marked |= {self.newest[key] for key in some if key in self.newest}

    def release(self, _: list[bytes]) -> None:
        """An owner's last extents, or all."""
        owner = self.chance.randrange(5)
        extents, known = self.extents.get(owner, []), self.rows_of.get(owner, [])
        kept = self.chance.choice((0, len(extents) // 2))
        gone = set(known[kept * EXTENT :])
        lost = [key for key, number in self.newest.items() if number in gone]
        assert self.table.release(owner, extents[kept:]) == len(lost)
        for key in lost:
            del self.newest[key]
        del extents[kept:], known[kept * EXTENT :]

    def check(self) -> None:
        self.table.check()
        assert len(self.table) == len(self.newest)
        assert self.table.extents_used() == sum(map(len, self.extents.values()))
        first = self.chance.randrange(len(KEYS))
        asked = [*KEYS[first:], *STRANGERS, *KEYS[:first]]
        owners, fields = np.full(len(asked), 7, np.int64), np.full((len(asked), 2), 7, np.int64)
        self.table.find(asked, owners, fields)
        owner_of = {number: owner for owner, numbers in self.rows_of.items() for number in numbers}
        expected = [self.newest.get(key, 0) for key in asked]
        assert fields.tolist() == [[number, ~number if number else 0] for number in expected]
        assert owners.tolist() == [owner_of.get(number, -1) for number in expected]
        for owner, extents in self.extents.items():
            keys, raw = self.table.marked(owner, extents)
            live = [n for n in self.rows_of[owner] if n in self.marked and self.newest.get(self.key_of[n]) == n]
            assert keys == [self.key_of[number] for number in live]
            assert np.frombuffer(raw, np.int64).reshape(-1, 2)[:, 0].tolist() == live


@pytest.mark.parametrize("make", [pytest.param(rows.Rows, id="Python"), *kernels("Rows")])
@given(seed=st.integers(0, 1 << 30))
@settings(max_examples=25, deadline=None)
def test_rows_are_those_of_the_model(make: Callable[[int], Any], seed: int) -> None:
    life = RowsLife(make(WIDTH), random.Random(seed))
    for _ in range(40):
        life.step()
        life.check()


class SlotsLife:
    """Random events, at the table and at a dict."""

    def __init__(self, table: Any, chance: random.Random) -> None:
        self.table = table
        self.chance = chance
        self.slot_of: dict[bytes, int] = {}
        self.free = list(range(len(KEYS)))

    def step(self) -> None:
        count = self.chance.choice((0, 1, 5, 100))
        if self.chance.random() < 0.6:
            some = self.chance.choices(KEYS, k=min(count, len(self.free)))
            taken = [self.free.pop(self.chance.randrange(len(self.free))) for _ in some]
            self.table.set(some, np.array(taken, np.int64))
            for key, slot in zip(some, taken, strict=True):
                if key in self.slot_of:
                    self.free.append(self.slot_of[key])
                self.slot_of[key] = slot
        else:
            some = self.chance.sample(sorted(self.slot_of), min(count, len(self.slot_of)))
            self.table.drop(some)
            self.free += [self.slot_of.pop(key) for key in some]

    def check(self) -> None:
        self.table.check()
        assert len(self.table) == len(self.slot_of) and sorted(self.table.items()) == sorted(self.slot_of.items())
        asked = [*KEYS, *STRANGERS]
        found = np.full(len(asked), 7, np.int64)
        self.table.find(asked, found)
        expected = [self.slot_of.get(key, -1) for key in asked]
        assert found.tolist() == expected == list(map(self.table.slot_of, asked))
        for key in (*KEYS[::40], *STRANGERS):
            assert self.table.has_none([*STRANGERS, key]) == (key not in self.slot_of)


@pytest.mark.parametrize("make", [pytest.param(slots.Slots, id="Python"), *kernels("Slots")])
@given(seed=st.integers(0, 1 << 30))
@settings(max_examples=25, deadline=None)
def test_slots_are_those_of_the_model(make: Callable[[int], Any], seed: int) -> None:
    life = SlotsLife(make(len(KEYS)), random.Random(seed))
    for _ in range(40):
        life.step()
        life.check()
