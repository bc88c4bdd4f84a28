"""Counters of the disk tier, raised by several threads and read by `stats`.

Chunks that were read and verified (`reads`, `read_bytes`, in `read_calls` stretches) or written (`writes`,
`write_bytes`). Chunks that were misses although indexed: `corrupt`, `mismatched` (another length), `vanished`
(reclaimed by another process), `read_errors`. Chunks not begun: `dropped` (queue full), `timed_out`, `refused` (longer
than the limit allows, or empty), `backed_off` (the disk failed lately). Failures of writing: `no_room` (live writers
or other files take the rest, or the directory's lock was not to be had), `enospc`, `write_errors`. Segments: `sealed`,
`repaired` (torn, then sealed), `reclaimed`, `damaged` (no valid header), `removed_leftovers`. `rewritten`: hot chunks
that outlived their segment. `faults`: bugs.
"""

from __future__ import annotations

import threading
from typing import Final

__all__ = ["Counters"]

NAMES: Final = (
    "reads read_bytes read_calls writes write_bytes corrupt mismatched vanished dropped timed_out refused no_room "
    "enospc read_errors write_errors backed_off direct_fallbacks sealed_segments repaired_segments reclaimed_segments "
    "removed_leftovers damaged_segments rewritten faults"
).split()


class Counters:
    """Named counters. An unknown name is a bug (KeyError)."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._counts = dict.fromkeys(NAMES, 0)

    def add(self, name: str, amount: int = 1) -> None:
        with self._lock:
            self._counts[name] += amount

    def snapshot(self) -> dict[str, int]:
        with self._lock:
            return dict(self._counts)
