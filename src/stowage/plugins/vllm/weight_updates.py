"""Weights that are updated in place while vLLM runs, as in reinforcement learning: stored chunks do not fit them.

Nor do later chunks fit the checkpoint that their keys name. vLLM tells no connector of an update. So a worker counts
the calls that change weights, on its own objects, and says so with its next report. Until what is stored is forgotten
(``reset_prefix_cache`` with ``reset_connector``), no worker copies anything. A change right after such a reset, as when
an engine is paused for it, stops nothing.

    worker     | step 7 | load_weights | step 8: copies nothing, reports the change | ...
    scheduler                                        offers and stores nothing | reset | step 12, ``fresh``: all is well
"""

from __future__ import annotations

import functools
import sys
from types import FrameType
from typing import Any

CHANGED = (
    "Stowage: the weights were changed in place, and what is stored was computed with others. Nothing is loaded or "
    "stored until reset_prefix_cache(reset_connector=True) is called (HTTP: /reset_prefix_cache?reset_external=true)."
)
_OF_WORKER = ("reload_weights", "update_weights")
_OF_MODEL = ("load_weights",)


def callers() -> list[dict[str, Any]]:
    """The local names of the functions that are being called, from the innermost."""
    frame: FrameType | None = sys._getframe(1)
    found = []
    while frame is not None:
        found.append(frame.f_locals)
        frame = frame.f_back
    return found


def worker_around() -> Any:
    """vLLM's worker that is making a connector or its caches; ``None`` where there is none, as in tests."""
    return next((own for local in callers() if hasattr(own := local.get("self"), "model_runner")), None)


class Changes:
    """In one worker. ``count``: calls that may have changed the model's weights, or those of its draft model."""

    def __init__(self, worker: Any) -> None:
        self.count = 0
        for owner, names in ((worker, _OF_WORKER), (worker.model_runner, _OF_WORKER)):
            self._watch(owner, names)
        for name in ("get_model", "get_draft_model"):
            self._watch(getattr(worker, name, lambda: None)(), _OF_MODEL)

    def _watch(self, owner: Any, names: tuple[str, ...]) -> None:
        for name in names:
            if (real := getattr(owner, name, None)) is not None:
                setattr(owner, name, self._counted(real))

    def _counted(self, real: Any) -> Any:
        @functools.wraps(real)
        def changing(*args: Any, **kwargs: Any) -> Any:
            self.count += 1  # a call that fails half-way has changed some
            return real(*args, **kwargs)

        return changing


class Validity:
    """The scheduler's side: whether chunks have the names of the weights that are computed with (not ``stale``)."""

    def __init__(self) -> None:
        self.stale = False
        self._fresh = False
        self._reset_at = -1

    @property
    def was_reset(self) -> bool:
        """Whether weights may have been changed since the start."""
        return self._reset_at >= 0

    def reset(self, step: int) -> None:
        """What is stored was forgotten, when ``step`` was the last that had been built."""
        self.stale, self._fresh, self._reset_at = False, True, step

    def fresh(self, *, busy: bool) -> bool:
        """Of the step that is built: whether nothing was computed since a reset, so that no change matters."""
        fresh, self._fresh = self._fresh, self._fresh and not busy
        return fresh

    def changed(self, step: int) -> bool:
        """A worker found changed weights in ``step``. True: since the last reset, for the first time."""
        if self.stale or step <= self._reset_at:
            return False
        self.stale = True
        return True
