"""Wraps a tier, so that its exceptions and wrong answers count as its failures and go no further.

A tier may be a user's code, and runs on the engine's thread. An exception counts as a failed transfer
(`cache.circuit_breaker`), an answer of the wrong type as no answer. If starting a transfer raises, its buffers are
revoked before their memory is reused.
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

_SHOWN_CHARACTERS = 200
_RAISED = (Exception, CancelledError, SystemExit)
"""All that a user's tier may raise. KeyboardInterrupt is not among them: it is meant for the thread."""


class Guarded:
    """A tier whose exceptions and wrong answers become failures. `failed` is called for each failure outside a
    transfer. No method raises because of the tier.
    """

    def __init__(self, tier: Tier, trouble: Trouble, failed: Callable[[], None]) -> None:
        self._tier = tier
        self._name = tier.name
        self._trouble = trouble
        self._failed = failed

    def lookup(self, keys: list[bytes]) -> NDArray[np.uint64]:
        """`Tier.lookup`; all absent when it fails."""
        with self._contain_errors("lookup"):
            found = self._tier.lookup(keys)
            if isinstance(found, np.ndarray) and found.dtype == np.uint64 and found.shape == (len(keys),):
                return found
            self._wrong("lookup", f"it answered {len(keys)} keys with {_describe_type(found)}")
        return np.zeros(len(keys), np.uint64)

    def begin(self, transfer: Transfer, *, load: bool) -> bool:
        """`Tier.load` or `Tier.store`. False: it raised, and the transfer's buffers are revoked. If it raised but is
        still using a buffer, the transfer counts as started, and may be reported later.
        """
        lent = list(transfer.buffers)
        with self._contain_errors("load" if load else "store", counts=False), suppress(StorageError, OSError):
            (self._tier.load if load else self._tier.store)(transfer)
            return True
        if _revoke(lent):
            return False
        self._failed()
        return True

    def poll(self) -> list[Outcome]:
        """`Tier.poll`. A malformed outcome counts as failure of its transfer."""
        outcomes: list[Outcome] = []
        with self._contain_errors("poll"):
            outcomes += [fitting for outcome in self._tier.poll() if (fitting := self._fitting(outcome)) is not None]
        return outcomes

    def discard(self, keys: list[bytes]) -> None:
        """`Tier.discard`."""
        with self._contain_errors("discard"):
            self._tier.discard(keys)

    def probe(self, inquiries: list[Inquiry]) -> Probe | None:
        """`Probing.probe`; None if the tier has none, or it fails."""
        if not isinstance(self._tier, Probing):
            return None
        with self._contain_errors("probe"):
            probe = self._tier.probe(inquiries)
            if isinstance(probe, Probe):
                return probe
            self._wrong("probe", f"it answered with {_describe_type(probe)}")
        return None

    def stats(self) -> dict[str, int | float | str]:
        """`Described.stats`; empty if the tier has none, or it fails."""
        stats: dict[str, int | float | str] = {}
        if isinstance(self._tier, Described):
            with self._contain_errors("stats", counts=False):
                stats |= {str(name): value for name, value in self._tier.stats().items()}
        return stats

    def close(self, deadline_s: float) -> None:
        """`Tier.close`."""
        with self._contain_errors("close", counts=False):
            self._tier.close(deadline_s)

    @contextmanager
    def _contain_errors(self, method: str, *, counts: bool = True) -> Iterator[None]:
        """Log what the body raises and go on. `counts`: as a failure of the tier."""
        try:
            yield
        except _RAISED as error:
            if counts:
                self._failed()
            said = traceback.format_exception_only(error)[-1].strip()[:_SHOWN_CHARACTERS]  # which never raises
            self._report(method, said)

    def _fitting(self, outcome: Outcome) -> Outcome | None:
        if not isinstance(outcome, Outcome) or not isinstance(outcome.id, int):
            self._wrong("poll", f"it reported {_describe_type(outcome)}")
            return None
        with suppress(TypeError, ValueError, OverflowError):
            ok, masks = np.asarray(outcome.ok, np.bool_), np.asarray(outcome.masks, np.uint64)
            if ok.ndim == masks.ndim == 1:
                return Outcome(outcome.id, ok, masks, outcome.error, bool(outcome.refused))
        self._report("poll", f"it reported {_describe_type(outcome.ok)} and {_describe_type(outcome.masks)}")
        return Outcome(outcome.id, np.zeros(0, np.bool_), np.zeros(0, np.uint64))

    def _wrong(self, method: str, what: str) -> None:
        self._failed()
        self._report(method, what)

    def _report(self, method: str, what: str) -> None:
        text = "a tier does not do what tiers do, which counts as its failure"
        self._trouble.report(logging.WARNING, "tier_broken", text, tier=self._name, method=method, what=what)


def _revoke(lent: list[memoryview]) -> bool:
    """Release the views, so that the tier cannot use them. False if one is in use just now."""
    for buffer in lent:
        try:
            buffer.release()
        except BufferError:
            return False
    return True


def _describe_type(value: object) -> str:
    if isinstance(value, np.ndarray):
        return f"an array of {value.dtype}, shape {value.shape}"
    return f"a {type(value).__name__}"
