"""The engine of a server, and another in its place when it has failed: at most `most` times.

Owns the engine: it is closed here, and nobody else keeps it, so that the memory of one that failed is free before the
next is opened.
"""

from __future__ import annotations

import gc
import logging
from collections.abc import Callable

from stowage.engine.engine import Engine

__all__ = ["Engines"]

logger = logging.getLogger("stowage.server")
_CLOSE_S = 10.0


class Engines:
    """`engine`: the one that computes; None while another is being opened. `reopened`: how often that was begun.

    `open` makes one; what it raises is raised here.
    """

    def __init__(self, open: Callable[[], Engine], most: int = 0) -> None:
        self._open = open
        self._most = most
        self.reopened = 0
        self.engine: Engine | None = open()
        # What is here now stays: looking at it for cycles again and again would stop every thread for 0.16 s each time.
        gc.freeze()

    @property
    def left(self) -> int:
        """How often another may be opened yet."""
        return self._most - self.reopened

    @property
    def failed(self) -> bool:
        """Whether nothing will be computed unless another engine is opened."""
        return self.engine is None or self.engine.failed

    def renew(self) -> None:
        """Close the engine and open another. Takes as long as that does; raises what opening raises."""
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
        gc.collect()  # its parts know each other

    def __enter__(self) -> Engines:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
