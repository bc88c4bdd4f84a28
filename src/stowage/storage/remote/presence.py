"""A cache of look-ups in a shared store: chunks that are there, and chunks that were not a moment ago.

A key is present (with its valid blocks), absent for a while, or unknown. What is present stays so until somebody says
otherwise: the store may have forgotten it since, then a load fails and the key is discarded. Other machines store what
is absent, so that is forgotten after `absent_s`.

A discarded key is absent until it is stored again here, or found by an inquiry that began later; the mark that its next
store must write, whatever the store has under that name, stays until that store: a value may have a good head and a
damaged payload.

Any thread. Bounded: beyond `KEYS_MAX` of each sort the oldest are forgotten.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

KEYS_MAX: Final = 1 << 18
"""About 200 bytes each."""


class Presence:
    """What is known of which keys."""

    def __init__(self, absent_s: float, clock: Callable[[], float]) -> None:
        assert absent_s >= 0
        self._absent_s = absent_s
        self._clock = clock
        self._lock = threading.Lock()
        self._masks: dict[bytes, int] = {}
        self._absent_until_s: dict[bytes, float] = {}
        self._suspect: dict[bytes, None] = {}
        self._unanswered: dict[bytes, None] = {}
        """Asked for in vain: the network's fault, so that nothing is wrong with what lies there."""
        self._inquiries: dict[int, set[bytes]] = {}
        """Keys that were stored or discarded while an inquiry was under way: its answers about them are too old."""
        self._numbers = itertools.count()

    def __len__(self) -> int:
        """How many are present."""
        return len(self._masks)

    def lookup(self, keys: Sequence[bytes]) -> NDArray[np.uint64]:
        """The valid blocks of each key, 0 where it is absent or unknown."""
        return np.fromiter(map(self._masks.get, keys, itertools.repeat(0)), np.uint64, len(keys))

    def known(self, keys: Sequence[bytes]) -> list[bool | None]:
        """Whether each key is there, as far as that is known."""
        now_s = self._clock()
        absent = self._absent_until_s
        return [True if key in self._masks else False if absent.get(key, 0.0) > now_s else None for key in keys]

    def must_write(self, key: bytes) -> bool:
        """Whether the next store must write, because what lies there may be damaged."""
        return key in self._suspect

    def begin(self) -> int:
        """An inquiry of the store begins: a number to pass to `answer` and `end`."""
        with self._lock:
            number = next(self._numbers)
            self._inquiries[number] = set()
            return number

    def answer(self, inquiry: int, key: bytes, mask: int) -> None:
        """The store has the key with these valid blocks, or not (0). Ignored where something newer is known."""
        with self._lock:
            if key in self._inquiries[inquiry]:
                return
            if mask:
                self._set(key, mask)
            else:
                self._masks.pop(key, None)
                _put(self._absent_until_s, key, self._clock() + self._absent_s)

    def take(self, inquiry: int, keys: Iterable[bytes], mask: int) -> None:
        """Nothing is known of the keys, and they are likely there."""
        with self._lock:
            for key in keys:
                if key not in self._inquiries[inquiry] and key not in self._masks:
                    self._set(key, mask)

    def correct(self, inquiry: int, key: bytes, mask: int) -> None:
        """A key that is taken to be there has these valid blocks."""
        with self._lock:
            if key not in self._inquiries[inquiry] and key in self._masks:
                self._masks[key] = mask

    def end(self, inquiry: int) -> None:
        """The inquiry has no more answers."""
        with self._lock:
            del self._inquiries[inquiry]

    def stored(self, key: bytes, mask: int) -> None:
        """This process has put it there."""
        with self._lock:
            self._suspect.pop(key, None)
            self._set(key, mask)
            self._note(key)

    def unanswered(self, key: bytes) -> None:
        """The store did not say what it has. If the key is discarded therefore, what is there may be good."""
        with self._lock:
            _put(self._unanswered, key, None)

    def discard(self, keys: Iterable[bytes]) -> None:
        """What is there is of no use, or gone, or could not be had."""
        with self._lock:
            until_s = self._clock() + self._absent_s
            for key in keys:
                self._masks.pop(key, None)
                _put(self._absent_until_s, key, until_s)
                if key in self._unanswered:
                    del self._unanswered[key]
                else:
                    _put(self._suspect, key, None)
                self._note(key)

    def _set(self, key: bytes, mask: int) -> None:
        self._absent_until_s.pop(key, None)
        _put(self._masks, key, mask)

    def _note(self, key: bytes) -> None:
        for touched in self._inquiries.values():
            touched.add(key)

    def check(self) -> None:
        """Assert the invariants."""
        with self._lock:
            sorts: tuple[dict[bytes, Any], ...] = (self._masks, self._absent_until_s, self._suspect, self._unanswered)
            assert all(len(one) <= KEYS_MAX for one in sorts)
            assert all(self._masks.values()), "a chunk without blocks is present"
            assert not self._masks.keys() & self._absent_until_s.keys(), "a key is present and absent"


def _put(keys: dict[bytes, Any], key: bytes, value: Any) -> None:
    """As the newest; beyond the limit the oldest goes."""
    keys.pop(key, None)
    keys[key] = value
    if len(keys) > KEYS_MAX:
        del keys[next(iter(keys))]
