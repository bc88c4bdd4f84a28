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

from typing import Final

import numpy as np
from numpy.typing import NDArray

from stowage.core.geometry import IntArray

__all__ = ["AGES", "CLASSES", "NEVER", "Hazard", "age_bucket", "class_of"]

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
_EPOCHS: Final = 256
_HAZARD_MAX: Final = 0.95
_KERNEL: Final = np.array([1.0, 2.0, 3.0, 2.0, 1.0]) / 9
_STARTS: Final[Floats] = np.exp2(np.arange(AGES + 1) / 2) - 1
_WIDTHS: Final[Floats] = np.diff(_STARTS)
_LEVEL_OF: Final[IntArray] = np.repeat(np.arange(LEVELS), SPANS)
_SPAN_OF: Final[IntArray] = np.tile(np.arange(SPANS), LEVELS)


def age_bucket(ages: IntArray) -> IntArray:
    """The bucket of each age in uses, 0 or more."""
    buckets: IntArray = np.minimum((2 * np.log2(ages + 1.0)).astype(np.int64), AGES - 1)
    return buckets


def class_of(uses: IntArray, gaps: IntArray) -> IntArray:
    """The class of chunks used so often after the first time, with these shortest gaps (`NEVER`: none)."""
    powers = np.log2(np.maximum(uses, 1)).astype(np.int64)
    levels = np.where(uses < 4, uses, np.minimum(powers + 2, LEVELS - 1))
    spans = np.where(uses == 0, 0, np.minimum(1 + (np.log2(gaps + 1.0) / 2).astype(np.int64), SPANS - 1))
    return levels * SPANS + spans


class Hazard:
    """The life tables of all classes, and the index that follows from them.

    Every chunk that is known waits for its next use: since when is counted per class in epochs of time, `_EPOCHS` of
    them in a ring that spans twice `span` uses. What waits longer is counted with the oldest epoch.
    """

    __slots__ = ("_ended", "_epoch", "_used", "_waiting", "_width", "index")

    def __init__(self, span: int) -> None:
        self._used: Floats = np.zeros((CLASSES, AGES))
        self._ended: Floats = np.zeros((CLASSES, AGES))
        self._waiting: Floats = np.zeros((CLASSES, _EPOCHS))
        self._width = max(1, 2 * span // _EPOCHS)
        self._epoch = 0
        self.index: IntArray = np.zeros((CLASSES, AGES), np.int64)

    def wait(self, classes: IntArray, now: int) -> None:
        """Chunks of these classes were used now, and wait for their next use."""
        epoch = now // self._width
        for column in (number % _EPOCHS for number in range(max(self._epoch + 1, epoch - _EPOCHS), epoch + 1)):
            self._waiting[:, (column + 1) % _EPOCHS] += self._waiting[:, column]
            self._waiting[:, column] = 0
        self._epoch = epoch
        self._waiting[:, epoch % _EPOCHS] += np.bincount(classes, minlength=CLASSES)

    def reused(self, classes: IntArray, since: IntArray, now: int) -> None:
        """Chunks that waited `since` then are used."""
        np.add.at(self._used, (classes, age_bucket(now - since)), 1)
        self.forgotten(classes, since, now)

    def forgotten(self, classes: IntArray, since: IntArray, now: int) -> None:
        """Nobody will know when these are used again: all that is known is that they were not until now."""
        np.add.at(self._ended, (classes, age_bucket(now - since)), 1)
        epochs = np.maximum(since // self._width, self._epoch - _EPOCHS + 1) % _EPOCHS
        np.subtract.at(self._waiting, (classes, epochs), 1)

    def fade(self) -> None:
        """What was learned so far counts half from now on."""
        self._used /= 2
        self._ended /= 2

    def learn(self, now: int) -> None:
        """Make the index anew."""
        epochs = np.arange(self._epoch - _EPOCHS + 1, self._epoch + 1)
        buckets = age_bucket(np.maximum(now - epochs * self._width - self._width // 2, 0))
        ended: Floats = self._ended + self._waiting[:, epochs % _EPOCHS] @ np.eye(AGES)[buckets]
        exposed = np.cumsum(ended[:, ::-1], axis=1)[:, ::-1] - ended / 2
        seen = ended.any(axis=1)
        hazard = _hazards(self._used[seen], exposed[seen], _LEVEL_OF[seen], _SPAN_OF[seen])
        self.index[seen] = _rank(hazard)
        self.index[~seen] = _rank(hazard.mean(axis=0, keepdims=True))

    def check(self, waiting: int) -> None:
        """Assert that so many chunks wait, and that no use is counted that did not end a wait."""
        assert (self._waiting >= 0).all() and self._waiting.sum() == waiting, "chunks that wait are not as counted"
        assert (self._used >= 0).all() and (self._used <= self._ended + 1e-9).all(), "more uses than waits"


def _hazards(used: Floats, exposed: Floats, levels: IntArray, spans: IntArray) -> Floats:
    """The chance of a use within each bucket, per class; rows are classes."""
    factors = np.ones(len(used))
    base = _bases(used, exposed, spans, factors)
    for _ in range(3):
        observed = np.bincount(levels, used.sum(axis=1), LEVELS)
        expected = np.bincount(levels, (exposed * base).sum(axis=1), LEVELS)
        of_level = (observed + _EVIDENCE) / (expected + _EVIDENCE)
        of_level *= expected.sum() / max((expected * of_level).sum(), 1e-300)
        factors = of_level[levels]
        base = _bases(used, exposed, spans, factors)
    return np.minimum(base * factors[:, np.newaxis], _HAZARD_MAX)


def _bases(used: Floats, exposed: Floats, spans: IntArray, factors: Floats) -> Floats:
    """The base of each class's span: uses over exposure, smoothed over neighbouring ages, leaning on all spans'."""
    events, at_risk = np.zeros((SPANS, AGES)), np.zeros((SPANS, AGES))
    np.add.at(events, spans, used)
    np.add.at(at_risk, spans, exposed * factors[:, np.newaxis])
    events, at_risk = _smooth(events), _smooth(at_risk)
    # Without evidence an age is as dangerous as all together: in buckets that double this falls as one over the age.
    mean = (events.sum() + 1e-3) / (at_risk.sum() + 1)
    pooled = (events.sum(axis=0) + 4 * mean) / (at_risk.sum(axis=0) + 4)
    bases: Floats = ((events + _EVIDENCE * pooled) / (at_risk + _EVIDENCE))[spans]
    return bases


def _smooth(rows: Floats) -> Floats:
    padded = np.pad(rows, ((0, 0), (2, 2)))
    return np.asarray(sum(weight * padded[:, shift : shift + AGES] for shift, weight in enumerate(_KERNEL)))


def _rank(hazard: Floats) -> IntArray:
    ranks: IntArray = np.rint(_STEPS * np.log2(_best_rate(hazard))).astype(np.int64)
    return ranks


def _best_rate(hazard: Floats) -> Floats:
    """Per class and age: the most uses per unit of time, over all later ages at which to give up."""
    rates = np.empty_like(hazard)
    spent = _WIDTHS * (1 - hazard / 2)
    for age in range(AGES):
        later = hazard[:, age:]
        survival = np.cumprod(1 - later, axis=1)
        survival = np.concatenate((np.ones((len(hazard), 1)), survival[:, :-1]), axis=1)
        uses = np.cumsum(survival * later, axis=1)
        time = np.cumsum(survival * spent[:, age:], axis=1)
        rates[:, age] = (uses / time).max(axis=1)
    return rates
