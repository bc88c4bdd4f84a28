"""Shuts an engine down: stops its loop, and gives back what that used.

Has no reference to the engine, so that one that was dropped without ``close`` is shut down when it is collected, with a
``ResourceWarning``, as an open file is.
"""

from __future__ import annotations

import os
import threading
import warnings
from collections.abc import Callable

from stowage.engine.assembly import Parts
from stowage.engine.loop import Loop
from stowage.models.adapters import Adapters
from stowage.transfer.async_copies import AsyncCopies
from stowage.weights.source import WeightSource

_DROPPED_S = 5.0
"""The longest that dropping an engine waits for its last step, and for what is being written."""


class Shutdown:
    """Shuts one engine down, once. ``weights``: those that the engine owns, where it owns any."""

    def __init__(
        self,
        loop: Loop,
        parts: Parts,
        copies: AsyncCopies,
        adapters: Adapters | None,
        weights: WeightSource | None,
        clock: Callable[[], float],
    ) -> None:
        self._loop = loop
        self._parts = parts
        self._copies = copies
        self._adapters = adapters
        self._weights = weights
        self._clock = clock
        self._process = os.getpid()

    def close(self, timeout_s: float) -> None:
        """``Engine.close``."""
        until_s = self._clock() + timeout_s
        with self._loop.ended(timeout_s) as has_ended:
            if has_ended:
                self._give_back(until_s)

    def dropped(self) -> None:
        """Nobody refers to the engine any more, nor to a request of it. Garbage is collected anywhere, so this thread
        may hold a lock that closing needs, and cannot do it itself; it waits for the one that does, but not for ever.
        The engine's own thread, for which that one waits, does not.
        """
        if self._loop.is_taken_apart or os.getpid() != self._process:
            return
        what = "an Engine was dropped without close(): close it, or open it in a `with` statement"
        warnings.warn(what, ResourceWarning, stacklevel=3)
        closing = threading.Thread(target=self.close, args=(_DROPPED_S,), name="stowage-engine-end")
        try:
            closing.start()
        except RuntimeError:  # the process ends: no threads are started, and nothing else runs
            self.close(_DROPPED_S)
            return
        if threading.current_thread() is not self._loop.thread:
            closing.join(_DROPPED_S)

    def _give_back(self, until_s: float) -> None:
        parts = self._parts
        parts.runner.close()
        if self._adapters is not None:
            self._adapters.remove()
        for pool in parts.pools:
            pool.offloaded.clear()
        if self._weights is not None:
            self._weights.close()
        if parts.store is not None:
            self._copies.collect(wait=True)
            if parts.link is not None:
                parts.link.close()
            parts.store.close(max(0.0, until_s - self._clock()))
