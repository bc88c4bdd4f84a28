"""One tier as the store calls it: what it raises, or answers that cannot be, is its failure and nobody else's.

Owns that border, and nothing besides. A tier may be anybody's code, and runs on the engine's thread: what it raises
counts as a failed transfer does (`cache.circuit_breaker`), an answer of the wrong kind as none. The memory of a
transfer that it raised at instead of beginning it is taken from it before it is used again.
"""

from __future__ import annotations

import logging
import traceback
from asyncio import CancelledError
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

import numpy as np
from numpy.typing import NDArray

from stowage.errors import StorageError
from stowage.log import Trouble
from stowage.storage.protocol import Described, Inquiry, Outcome, Probe, Probing, Tier, Transfer

__all__ = ["Guarded"]

_SHOWN_CHARACTERS = 200
_RAISED = (Exception, CancelledError, SystemExit)
"""The tier is anybody's code, and others use the thread. An interrupt is for the thread, not for the tier."""


class Guarded:
    """`failed` is called for each failure that no transfer stands for. No method raises for what the tier does."""

    def __init__(self, tier: Tier, trouble: Trouble, failed: Callable[[], None]) -> None:
        self._tier = tier
        self._name = tier.name
        self._trouble = trouble
        self._failed = failed

    def lookup(self, keys: list[bytes]) -> NDArray[np.uint64]:
        """`Tier.lookup`; nothing is there when it fails."""
        with self._border("lookup"):
            found = self._tier.lookup(keys)
            if isinstance(found, np.ndarray) and found.dtype == np.uint64 and found.shape == (len(keys),):
                return found
            self._wrong("lookup", f"it answered {len(keys)} keys with {_kind(found)}")
        return np.zeros(len(keys), np.uint64)

    def begin(self, transfer: Transfer, *, load: bool) -> bool:
        """`Tier.load` or `Tier.store`. False: it raised, and has nothing of the transfer's memory any more. A tier that
        raised and still has some may report the transfer yet.
        """
        lent = list(transfer.buffers)
        with self._border("load" if load else "store", counts=False), suppress(StorageError, OSError):
            (self._tier.load if load else self._tier.store)(transfer)
            return True
        if _taken_back(lent):
            return False
        self._failed()
        return True

    def poll(self) -> list[Outcome]:
        """`Tier.poll`. A report that says nothing is one of failure."""
        outcomes: list[Outcome] = []
        with self._border("poll"):
            outcomes += [fitting for outcome in self._tier.poll() if (fitting := self._fitting(outcome)) is not None]
        return outcomes

    def discard(self, keys: list[bytes]) -> None:
        """`Tier.discard`."""
        with self._border("discard"):
            self._tier.discard(keys)

    def probe(self, inquiries: list[Inquiry]) -> Probe | None:
        """`Probing.probe`; None where it is not asked, or fails."""
        if not isinstance(self._tier, Probing):
            return None
        with self._border("probe"):
            probe = self._tier.probe(inquiries)
            if isinstance(probe, Probe):
                return probe
            self._wrong("probe", f"it answered with {_kind(probe)}")
        return None

    def stats(self) -> dict[str, int | float | str]:
        """`Described.stats`; empty where it has none, or fails."""
        stats: dict[str, int | float | str] = {}
        if isinstance(self._tier, Described):
            with self._border("stats", counts=False):
                stats |= {str(name): value for name, value in self._tier.stats().items()}
        return stats

    def close(self, deadline_s: float) -> None:
        """`Tier.close`."""
        with self._border("close", counts=False):
            self._tier.close(deadline_s)

    @contextmanager
    def _border(self, method: str, *, counts: bool = True) -> Iterator[None]:
        """What is raised in here goes no further. `counts`: as a failure."""
        try:
            yield
        except _RAISED as error:
            if counts:
                self._failed()
            self._report(method, _told(error))

    def _fitting(self, outcome: Outcome) -> Outcome | None:
        if not isinstance(outcome, Outcome) or not isinstance(outcome.id, int):
            self._wrong("poll", f"it reported {_kind(outcome)}")
            return None
        with suppress(TypeError, ValueError, OverflowError):
            ok, masks = np.asarray(outcome.ok, np.bool_), np.asarray(outcome.masks, np.uint64)
            if ok.ndim == masks.ndim == 1:
                return Outcome(outcome.id, ok, masks, outcome.error, bool(outcome.refused))
        self._report("poll", f"it reported {_kind(outcome.ok)} and {_kind(outcome.masks)}")
        return Outcome(outcome.id, np.zeros(0, np.bool_), np.zeros(0, np.uint64))

    def _wrong(self, method: str, what: str) -> None:
        self._failed()
        self._report(method, what)

    def _report(self, method: str, what: str) -> None:
        text = "a tier does not do what tiers do, which counts as its failure"
        self._trouble.report(logging.WARNING, "tier_broken", text, tier=self._name, method=method, what=what)


def _taken_back(lent: list[memoryview]) -> bool:
    """Whether these views are of no use to anybody any more, and nobody is reading into one just now."""
    for buffer in lent:
        try:
            buffer.release()
        except BufferError:
            return False
    return True


def _told(error: BaseException) -> str:
    return traceback.format_exception_only(error)[-1].strip()[:_SHOWN_CHARACTERS]  # which never raises


def _kind(value: object) -> str:
    if isinstance(value, np.ndarray):
        return f"an array of {value.dtype}, shape {value.shape}"
    return f"a {type(value).__name__}"
