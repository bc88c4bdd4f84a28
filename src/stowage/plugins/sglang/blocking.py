"""Tiers for a caller that waits: batches of named pages, read and written in one call each, from any thread.

Owns the tiers and one thread that takes their outcomes. The memory of a page is lent to a tier until it reports; who
gives up waiting never touches that memory again, so a late read reaches nobody.
"""

from __future__ import annotations

import itertools
import logging
import threading
import time
from collections.abc import Sequence
from functools import partial

import numpy as np
from numpy.typing import NDArray

from stowage.cache.circuit_breaker import Breaker
from stowage.cache.guard import Guarded
from stowage.log import Trouble
from stowage.storage.protocol import Inquiry, Outcome, Probe, Tier, Transfer, Waitable

Page = NDArray[np.uint8]

_WAIT_S = 0.02
"""Between two looks at tiers that have something under way: deadlines pass, and some cannot announce outcomes."""
_TRANSFER_BYTES = 64 << 20
_WHOLE = 1
"""The mask of a page: one block."""


class BlockingTiers:
    """Tiers with blocking calls, for batches of named pages. ``tiers``: nearest first. ``timeout_s``: the longest wait
    for a batch. ``lookup_timeout_s``: the longest wait for shared stores to say what they have.
    """

    def __init__(self, tiers: Sequence[Tier], timeout_s: float, lookup_timeout_s: float) -> None:
        self._trouble = Trouble("stowage.sglang")
        self._tiers = list(tiers)
        self._breakers = [Breaker() for _ in tiers]
        self._guarded = [Guarded(tier, self._trouble, partial(self._failed, at)) for at, tier in enumerate(tiers)]
        self._timeout_s = timeout_s
        self._lookup_timeout_s = lookup_timeout_s
        self._numbers = itertools.count()
        self._turn = threading.RLock()
        self._arrived = threading.Condition(self._turn)
        self._under_way: dict[int, int] = {}
        self._outcomes: dict[int, Outcome] = {}
        self._abandoned: set[int] = set()
        self._wake = threading.Event()
        self._closed = False
        self.counts = dict.fromkeys(("pages_loaded", "pages_stored", "load_failures", "store_failures", "timeouts"), 0)
        for tier in tiers:
            if isinstance(tier, Waitable):
                tier.wake = self._wake.set
        self._thread = threading.Thread(target=self._run, name="stowage-sglang", daemon=True)
        self._thread.start()

    def present(self, keys: list[bytes]) -> NDArray[np.bool_]:
        """Which pages some tier has, as far as it knows now. Shared stores are asked about the others first."""
        with self._turn:
            found = self._where(keys) >= 0
            missing = [key for key, here in zip(keys, found.tolist(), strict=True) if not here]
            inquiries = [Inquiry(missing, _WHOLE)] if missing else []
            allowed = [tier for at, tier in enumerate(self._guarded) if self._breakers[at].allows(time.monotonic())]
            probes = [probe for tier in allowed if inquiries and (probe := tier.probe(inquiries)) is not None]
        if not probes:
            return found
        self._answered(probes)
        with self._turn:
            return self._where(keys) >= 0

    def _answered(self, probes: Sequence[Probe]) -> None:
        until_s = time.monotonic() + self._lookup_timeout_s
        with self._turn:
            while not all(probe.done for probe in probes) and (left_s := until_s - time.monotonic()) > 0:
                self._wake.set()  # a tier may not say that it was answered
                self._arrived.wait(min(left_s, _WAIT_S))

    def _where(self, keys: list[bytes]) -> NDArray[np.int64]:
        """The first tier that has each page and is not left alone, or -1."""
        found = np.full(len(keys), -1, dtype=np.int64)
        now_s = time.monotonic()
        for at in reversed(range(len(self._guarded))):
            if keys and self._breakers[at].allows(now_s):
                found[self._guarded[at].lookup(keys) != 0] = at
        return found

    def load(self, keys: list[bytes], pages: Sequence[Page]) -> list[bool]:
        """Fill each page from the first tier that has it, and brings it verified; keys are distinct. Pages that were
        not filled hold anything, and may be written to later.
        """
        ok = np.zeros(len(keys), dtype=np.bool_)
        until_s = time.monotonic() + self._timeout_s
        for at in range(len(self._tiers)):
            wanted = np.flatnonzero(~ok & self._has(at, keys)).tolist()
            for some in _parts(wanted, pages):
                ok[some] = self._move(at, [keys[i] for i in some], [pages[i] for i in some], until_s, load=True)
                if not ok[some].all():
                    break  # a prefix with a hole is of no use: the next tier may have what lacks
        self.counts["pages_loaded"] += int(ok.sum())
        return ok.tolist()

    def store(self, keys: list[bytes], pages: Sequence[Page]) -> list[bool]:
        """Write the pages to every tier that lacks them; keys are distinct. True: some tier has it."""
        ok = np.zeros(len(keys), dtype=np.bool_)
        until_s = time.monotonic() + self._timeout_s
        for at in range(len(self._tiers)):
            here = self._has(at, keys)
            ok |= here
            for some in _parts(np.flatnonzero(~here).tolist(), pages):
                stored = self._move(at, [keys[i] for i in some], [pages[i] for i in some], until_s, load=False)
                ok[some] |= stored
                self.counts["pages_stored"] += int(stored.sum())
        return ok.tolist()

    def _has(self, at: int, keys: list[bytes]) -> NDArray[np.bool_]:
        with self._turn:
            here: NDArray[np.bool_] = self._guarded[at].lookup(keys) != 0
        return here

    def _move(
        self, at: int, keys: list[bytes], pages: Sequence[Page], until_s: float, *, load: bool
    ) -> NDArray[np.bool_]:
        """One transfer, waited for."""
        nothing = np.zeros(len(keys), dtype=np.bool_)
        with self._turn:
            breaker, now_s = self._breakers[at], time.monotonic()
            if self._closed or now_s >= until_s or not breaker.allows(now_s):
                return nothing
            number = next(self._numbers)
            masks = np.full(len(keys), _WHOLE, dtype=np.uint64)
            transfer = Transfer(number, keys, [page.data for page in pages], masks, until_s)
            breaker.begin()
            self._under_way[number] = at
            if not self._guarded[at].begin(transfer, load=load):
                del self._under_way[number]
                breaker.failed(now_s)
                return nothing
            self._wake.set()
            while number not in self._outcomes and (left_s := until_s + _WAIT_S - time.monotonic()) > 0:
                self._arrived.wait(left_s)
            outcome = self._outcomes.pop(number, None)
            if outcome is None:
                self._abandoned.add(number)
                self.counts["timeouts"] += 1
                breaker.failed(time.monotonic())
                return nothing
            return self._settle(at, keys, outcome, load, in_time=time.monotonic() < until_s)

    def _settle(self, at: int, keys: list[bytes], outcome: Outcome, load: bool, in_time: bool) -> NDArray[np.bool_]:
        ok = np.zeros(len(keys), dtype=np.bool_)
        if len(outcome.ok) == len(keys) == len(outcome.masks):
            ok = outcome.ok & (outcome.masks == _WHOLE) if load else outcome.ok.copy()
        breaker = self._breakers[at]
        if outcome.refused:
            breaker.untried()
            return ok
        if ok.any():
            breaker.succeeded()
        else:
            breaker.failed(time.monotonic())
        lost = int((~ok).sum())
        self.counts["load_failures" if load else "store_failures"] += lost
        if lost and load and in_time:  # damaged, or gone: not looked for again until it is stored anew
            self._guarded[at].discard([key for key, fine in zip(keys, ok.tolist(), strict=True) if not fine])
        if lost:
            text = "pages could not be read" if load else "pages could not be stored"
            name = self._tiers[at].name
            self._trouble.report(logging.WARNING, "transfer_failed", text, tier=name, count=lost, error=outcome.error)
        return ok

    def _failed(self, at: int) -> None:
        self._breakers[at].failed(time.monotonic())

    # The thread

    def _run(self) -> None:
        while not self._closed:
            self._wake.wait(_WAIT_S if self._under_way else 1.0)
            self._wake.clear()
            with self._turn:
                for tier in self._guarded:
                    for outcome in tier.poll():
                        self._under_way.pop(outcome.id, None)
                        if outcome.id in self._abandoned:
                            self._abandoned.discard(outcome.id)
                        else:
                            self._outcomes[outcome.id] = outcome
                self._arrived.notify_all()

    def stats(self) -> dict[str, int | float | str]:
        """Ours, and those of each tier under ``tier name.``."""
        with self._turn:
            found: dict[str, int | float | str] = dict(self.counts)
            for tier, guarded in zip(self._tiers, self._guarded, strict=True):
                found |= {f"{tier.name}.{name}": value for name, value in guarded.stats().items()}
        return found

    def close(self, timeout_s: float) -> None:
        """Finish what was begun within ``timeout_s``. Closing again does nothing."""
        with self._turn:
            if self._closed:
                return
            self._closed = True
        self._wake.set()
        self._thread.join(timeout_s)
        until_s = time.monotonic() + timeout_s
        for tier in self._guarded:
            tier.close(until_s)


def _parts(indices: Sequence[int], pages: Sequence[Page]) -> list[list[int]]:
    """In runs of at most ``_TRANSFER_BYTES``."""
    parts: list[list[int]] = []
    room = 0
    for index in indices:
        if not parts or room < pages[index].nbytes:
            parts.append([])
            room = _TRANSFER_BYTES
        parts[-1].append(index)
        room -= pages[index].nbytes
    return parts
