"""Owns the engine of a server, and opens another one when it has failed.

Only the supervisor keeps a reference to the engine, so that a failed one's memory is free before the next is opened.
"""

from __future__ import annotations

import gc
import logging
from collections.abc import Callable

from stowage.engine.engine import Engine

logger = logging.getLogger("stowage.server")
_CLOSE_S = 10.0


class EngineSupervisor:
    """Keeps an engine open for the server. `engine`: the current one; None while another is being opened. `reopened`:
    how often that was begun; at most `most` times. `open` makes an engine; what it raises is raised here.
    """

    def __init__(self, open: Callable[[], Engine], most: int = 0) -> None:
        self._open = open
        self._most = most
        self.reopened = 0
        self.engine: Engine | None = open()
        # The objects made so far are permanent. Scanning them in each collection would stop every thread for 0.16 s.
        gc.freeze()

    @property
    def left(self) -> int:
        """How often another engine may still be opened."""
        return self._most - self.reopened

    @property
    def failed(self) -> bool:
        """Whether there is no working engine."""
        return self.engine is None or self.engine.failed

    def reopen(self) -> None:
        """Close the engine and open another; blocks until then. Raises what opening raises."""
        assert self.left > 0
        self.reopened += 1
        logger.error(
            "the engine has failed and is opened again (%d of at most %d times)", self.reopened, self._most,
            extra={"stowage_event": "reopened"},
        )  # fmt: skip
        self.close()
        self.engine = self._open()
        gc.freeze()

    def close(self) -> None:
        """Closing again does nothing."""
        engine, self.engine = self.engine, None
        gc.unfreeze()
        if engine is not None:
            engine.close(_CLOSE_S if engine.failed else 30.0)
        del engine
        gc.collect()  # its parts refer to each other

    def __enter__(self) -> EngineSupervisor:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
