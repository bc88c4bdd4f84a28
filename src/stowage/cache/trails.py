"""Chunks that were stored, or found, one after another: a known prefix is found again without a probe per key.

    trail   keys    k0 k1 k2 ... k255        (their bytes, joined)
            slots   17 18 19 ...  272
    asked   keys    k0 k1 k2 ... k180  x  y      first key -> its slot -> its trail; then one comparison of bytes

A map of all keys costs a hash and several cache misses per key. Prompts begin alike, so one probe for the first key
and one comparison find most of a prompt. A trail is a shortcut only: keys are compared in full, and a trail is cut
where one of its slots loses its key, which the owner of the map reports. Heads outlive tails, so a cut trail is useful.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

import numpy as np

from stowage.core.geometry import IntArray

__all__ = ["KEYS_MIN", "Trails"]

KEYS_MIN: Final = 32
"""Shorter trails are not kept: following one costs about as much as so many probes."""

_KEY_BYTES: Final = 32
_ALL_FOUR_WORDS_EQUAL: Final = np.uint32(0x01010101)
_NONE: IntArray = np.empty(0, np.int64)


class _Trail:
    """Keys and their slots. Valid up to `length`."""

    __slots__ = ("joined", "length", "slots")

    def __init__(self, joined: bytes, slots: IntArray) -> None:
        self.joined = joined
        self.slots = slots
        self.length = len(slots)


class Trails:
    """At most one trail per slot; a trail that is cut below `keys_min` keys is gone."""

    __slots__ = ("_last_number", "_number_of", "_place_of", "_trails", "keys_min")

    def __init__(self, slots: int) -> None:
        self.keys_min = KEYS_MIN
        self._trails: dict[int, _Trail] = {}
        # A slot that was cut off keeps its number and place: they lead nowhere, because the trail is shorter or gone.
        self._number_of: IntArray = np.full(slots, 0, np.int64)
        self._place_of: IntArray = np.full(slots, 0, np.int64)
        self._last_number = 0

    def add(self, keys: list[bytes], slots: IntArray) -> None:
        """These keys are mapped to these slots, in this order. The slots are on no trail: they are new, or were cut."""
        if len(keys) < self.keys_min:
            return
        joined = b"".join(keys)
        if len(joined) != len(keys) * _KEY_BYTES:
            return
        self._last_number += 1
        self._trails[self._last_number] = _Trail(joined, slots.copy())
        self._number_of[slots] = self._last_number
        self._place_of[slots] = np.arange(len(slots))

    def cut(self, slots: IntArray) -> None:
        """The slots lose their keys."""
        if not self._trails or not len(slots):
            return
        numbers = self._number_of.take(slots)
        places = self._place_of.take(slots)
        first = int(numbers[0])
        if 0 not in (numbers == first).tobytes():
            self._shorten(first, places)
            return
        for number in self._trails.keys() & numbers.tolist():
            self._shorten(number, places[numbers == number])

    def _shorten(self, number: int, places: IntArray) -> None:
        """The trail of that number, if there still is one, loses what lies at `places`."""
        trail = self._trails.get(number)
        if trail is not None:
            trail.length = min(trail.length, int(places.min()))
            if trail.length < self.keys_min:
                del self._trails[number]

    def follow(self, first_slot: int, keys: list[bytes], begin: int = 0) -> IntArray:
        """The slots of the keys from `begin` on, as many as lie on the trail of the first one's slot.

        Not to be changed.
        """
        trail = self._trails.get(int(self._number_of[first_slot]))
        if trail is None:
            return _NONE
        place = int(self._place_of[first_slot])
        count = min(len(keys) - begin, trail.length - place)
        if count < self.keys_min:
            return _NONE
        asked = b"".join(keys if count == len(keys) else keys[begin : begin + count])
        if not trail.joined.startswith(asked, place * _KEY_BYTES):
            count = _equal_keys(asked, trail.joined, place)
        return trail.slots[place : place + count]

    def check(self, find: Callable[[list[bytes]], IntArray]) -> None:
        """Assert that every key of every trail is mapped to the trail's slot; `find` asks the map."""
        for number, trail in self._trails.items():
            assert self.keys_min <= trail.length <= len(trail.slots)
            slots = trail.slots[: trail.length]
            assert (self._number_of[slots] == number).all(), "a slot is on two trails"
            assert np.array_equal(self._place_of[slots], np.arange(trail.length))
            ends = range(_KEY_BYTES, (trail.length + 1) * _KEY_BYTES, _KEY_BYTES)
            keys = [trail.joined[end - _KEY_BYTES : end] for end in ends]
            assert find(keys).tolist() == slots.tolist(), "a trail leads astray"


def _equal_keys(asked: bytes, known: bytes, place: int) -> int:
    """How many keys of `asked` are equal to those of `known` from `place` on, before the first that differs."""
    if len(asked) % _KEY_BYTES:
        return 0
    left = np.frombuffer(asked, np.uint64)
    right = np.frombuffer(known, np.uint64, len(left), place * _KEY_BYTES)
    same = (left == right).view(np.uint32) == _ALL_FOUR_WORDS_EQUAL
    return len(same) if same.all() else int(same.argmin())
