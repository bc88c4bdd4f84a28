"""When chunks are used again: learned from every use, with no clock but the count of uses.

A chunk belongs to a class by what is known of its past: how often it was used (a level) and the shortest time between
two uses (a span). For each class and age since the last use the model estimates the hazard: the chance to be used again
before the age has grown by another bucket (two buckets per doubling).

    hazard(class, age) = base(span, age) x factor(level)

Few numbers are learned, because chunks of one prompt are used together and so say little more than one of them: the
base of a span leans on that of all spans, and a factor on 1, until there is evidence. What has not been used yet, or
was forgotten before it was, counts too, up to the age that it reached (a life table: exposed and used, per age).

From the hazards follows an index, the most uses that can be expected per unit of time that a chunk is kept, over all
ages at which one could give it up (Gittins' index of a job with this hazard): keeping the chunks with the highest index
is the best use of a fixed number of slots. It is rounded to steps of a quarter power of two, so that what is not known
to differ is equal.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from math import isqrt
from typing import Final

import numpy as np
from numpy.typing import NDArray

from stowage.core.geometry import IntArray

Floats = NDArray[np.float64]

AGES: Final = 64
"""Buckets of age: two per doubling, so the last begins at 2^31 uses."""
LEVELS: Final = 9
"""Uses after the first: none, 1, 2, 3, 4 to 7, 8 to 15, ..., 64 and more."""
SPANS: Final = 14
"""No gap known, then gaps below 4, 16, 64, ..."""
CLASSES: Final = LEVELS * SPANS
NEVER: Final = np.int64(1) << np.int64(62)
"""The gap of a chunk that was used once."""

_EVIDENCE: Final = 300.0
"""Uses that outweigh what is assumed without them: as many as some ten prompts bring."""
_STEPS: Final = 4.0
EPOCHS: Final = 256
_HAZARD_MAX: Final = 0.95
_ROWS_AT_ONCE: Final = 32
"""Classes of which the index is made in one step."""
_STARTS: Final[Floats] = np.exp2(np.arange(AGES + 1) / 2) - 1
_WIDTHS: Final[Floats] = np.diff(_STARTS)
_SMOOTH: Final[Floats] = np.maximum(3 - np.abs(np.subtract.outer(np.arange(AGES), np.arange(AGES))), 0) / 9
"""Times this, a row of ages is smoothed over its neighbours."""
_FIRST_AGES: Final[IntArray] = np.array([isqrt((1 << bucket) - 1) for bucket in range(1, AGES)], np.int64)
"""The least age of every bucket but the first, in whole numbers: a logarithm may round to a neighbour's."""


def age_bucket(ages: IntArray) -> IntArray:
    """The bucket of each age in uses, 0 or more."""
    return np.searchsorted(_FIRST_AGES, ages, side="right")


def class_of(uses: IntArray, gaps: IntArray) -> IntArray:
    """The class of chunks used so often after the first time, with these shortest gaps (`NEVER`: none)."""
    powers = np.log2(np.maximum(uses, 1)).astype(np.int64)
    levels = np.where(uses < 4, uses, np.minimum(powers + 2, LEVELS - 1))
    spans = np.where(uses == 0, 0, np.minimum(1 + (np.log2(gaps + 1.0) / 2).astype(np.int64), SPANS - 1))
    return levels * SPANS + spans


def best_rate(hazard: Floats) -> Floats:
    """Per class (a row) and age: the most uses per unit of time, over all later ages at which to give up."""
    # Transposed. In every round each age looks one bucket further ahead, as far as there are buckets.
    ahead = np.ascontiguousarray(hazard.T)
    spent = _WIDTHS[:, np.newaxis] * (1 - ahead / 2)
    survival, uses, time, rates = np.ones_like(ahead), np.zeros_like(ahead), np.zeros_like(ahead), np.zeros_like(ahead)
    for first in range(AGES):
        ages = slice(AGES - first)
        uses[ages] += survival[ages] * ahead[first:]
        time[ages] += survival[ages] * spent[first:]
        survival[ages] *= 1 - ahead[first:]
        np.maximum(rates[ages], uses[ages] / time[ages], out=rates[ages])
    return rates.T


class Hazard:
    """The life tables of all classes, and the index that follows from them.

    Every chunk that is known waits for its next use: since when is counted per class in epochs of time, `EPOCHS` of
    them in a ring that spans twice `span` uses. What waits longer is counted with the oldest epoch.
    """

    __slots__ = ("_best_rate", "_ended", "_epoch", "_used", "_waiting", "_width", "index")

    def __init__(self, span: int, best_rate: Callable[[Floats], Floats] = best_rate) -> None:
        """`best_rate`: a quicker way to do what that of this module does."""
        self._best_rate = best_rate
        self._used: Floats = np.zeros((CLASSES, AGES))
        self._ended: Floats = np.zeros((CLASSES, AGES))
        self._waiting: Floats = np.zeros((CLASSES, EPOCHS))
        self._width = max(1, 2 * span // EPOCHS)
        self._epoch = 0
        self.index: IntArray = np.zeros((CLASSES, AGES), np.int64)

    @property
    def width(self) -> int:
        """Uses in an epoch."""
        return self._width

    @property
    def tables(self) -> tuple[Floats, Floats, Floats, IntArray]:
        """Used and ended by class and age, waiting by class and epoch, and the index: for one who counts in C."""
        return self._used, self._ended, self._waiting, self.index

    def counted_until(self, epoch: int) -> None:
        """Somebody else counted into the tables, up to this epoch."""
        self._epoch = epoch

    def wait(self, classes: IntArray, now: int) -> None:
        """Chunks of these classes were used now, and wait for their next use."""
        epoch = now // self._width
        for column in (number % EPOCHS for number in range(max(self._epoch + 1, epoch - EPOCHS), epoch + 1)):
            self._waiting[:, (column + 1) % EPOCHS] += self._waiting[:, column]
            self._waiting[:, column] = 0
        self._epoch = epoch
        self._waiting[:, epoch % EPOCHS] += np.bincount(classes, minlength=CLASSES)

    def reused(self, classes: IntArray, since: IntArray, now: int) -> None:
        """Chunks that waited `since` then are used."""
        np.add.at(self._used, (classes, age_bucket(now - since)), 1)
        self.forgotten(classes, since, now)

    def forgotten(self, classes: IntArray, since: IntArray, now: int) -> None:
        """Nobody will know when these are used again: all that is known is that they were not until now."""
        np.add.at(self._ended, (classes, age_bucket(now - since)), 1)
        epochs = np.maximum(since // self._width, self._epoch - EPOCHS + 1) % EPOCHS
        np.subtract.at(self._waiting, (classes, epochs), 1)

    def fade(self) -> None:
        """What was learned so far counts half from now on."""
        self._used /= 2
        self._ended /= 2

    def learning(self, now: int) -> Iterator[None]:
        """Makes the index anew in steps, so that nobody has to wait for all of it at once. What is counted after the
        first step is for the next time; the index changes with the last one, as a whole.
        """
        used, ended, waiting, epoch = self._used.copy(), self._ended.copy(), self._waiting.copy(), self._epoch
        yield
        self._end_waiting(ended, waiting, epoch, now)
        yield
        exposed = np.cumsum(ended[:, ::-1], axis=1)[:, ::-1] - ended / 2
        seen = np.flatnonzero(ended.any(axis=1))
        yield
        hazard = _hazards(used, exposed)[seen]
        hazard = np.concatenate((hazard, hazard.mean(axis=0, keepdims=True)))
        ranks = np.empty(hazard.shape, np.int64)
        for first in range(0, len(ranks), _ROWS_AT_ONCE):
            yield
            some = slice(first, first + _ROWS_AT_ONCE)
            ranks[some] = np.rint(_STEPS * np.log2(self._best_rate(hazard[some])))
        self.index[:] = ranks[-1]
        self.index[seen] = ranks[:-1]

    def _end_waiting(self, ended: Floats, waiting: Floats, epoch: int, now: int) -> None:
        """Count those that wait as if nobody would know more of them."""
        oldest = epoch - EPOCHS + 1
        epochs = np.arange(oldest, epoch + 1)
        buckets = age_bucket(np.maximum(now - epochs * self._width - self._width // 2, 0))
        firsts = np.flatnonzero(np.diff(buckets, prepend=-1))  # epochs of one bucket follow one another
        in_order = np.concatenate((waiting[:, oldest % EPOCHS :], waiting[:, : oldest % EPOCHS]), axis=1)
        ended[:, buckets[firsts]] += np.add.reduceat(in_order, firsts, axis=1)

    def check(self, waiting: int) -> None:
        """Assert that so many chunks wait, and that no use is counted that did not end a wait."""
        assert (self._waiting >= 0).all() and self._waiting.sum() == waiting, "chunks that wait are not as counted"
        assert (self._used >= 0).all() and (self._used <= self._ended + 1e-9).all(), "more uses than waits"


def _hazards(used: Floats, exposed: Floats) -> Floats:
    """The chance of a use within each bucket, per class.

    In turn the bases that fit the factors, and the factors that fit the bases, a few times. All sums over classes are
    products of small matrices: there are many, and each call costs more than its arithmetic.
    """
    events = used.reshape(LEVELS, SPANS, AGES).sum(axis=0) @ _SMOOTH
    at_risk = exposed.reshape(LEVELS, SPANS * AGES)
    observed = used.reshape(LEVELS, SPANS * AGES).sum(axis=1)
    factors = np.ones(LEVELS)
    base = _bases(events, (factors @ at_risk).reshape(SPANS, AGES) @ _SMOOTH)
    for _ in range(3):
        expected = at_risk @ base.ravel()
        factors = (observed + _EVIDENCE) / (expected + _EVIDENCE)
        factors *= expected.sum() / max(expected @ factors, 1e-300)
        base = _bases(events, (factors @ at_risk).reshape(SPANS, AGES) @ _SMOOTH)
    hazard: Floats = np.minimum(factors[:, np.newaxis, np.newaxis] * base, _HAZARD_MAX)
    return hazard.reshape(CLASSES, AGES)


def _bases(events: Floats, at_risk: Floats) -> Floats:
    """The base of each span: uses over exposure, leaning on all spans'."""
    # Without evidence an age is as dangerous as all together: in buckets that double this falls as one over the age.
    mean = (events.sum() + 1e-3) / (at_risk.sum() + 1)
    pooled = (events.sum(axis=0) + 4 * mean) / (at_risk.sum(axis=0) + 4)
    bases: Floats = (events + _EVIDENCE * pooled) / (at_risk + _EVIDENCE)
    return bases
