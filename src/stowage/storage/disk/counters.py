"""Counters of the disk tier.

Chunks that were read and verified (`reads`, `read_bytes`, in `read_calls` stretches) or written (`writes`,
`write_bytes`). Chunks that were misses although indexed: `corrupt`, `mismatched` (another length), `vanished`
(reclaimed by another process), `read_errors`. Chunks not begun: `dropped` (queue full), `timed_out`, `refused` (longer
than the limit allows, or empty), `backed_off` (the disk failed lately). Failures of writing: `no_room` (live writers
or other files take the rest, or the directory's lock was not to be had), `enospc`, `write_errors`. Segments: `sealed`,
`repaired` (torn, then sealed), `reclaimed`, `damaged` (no valid header or footer), `unreadable` (under another
protection, or a key that is not in the key file), `removed_leftovers`. `rewritten`: hot chunks that outlived their
segment; `evicted`: chunks that did not. `packed`: chunks that were packed before they were written, which left
`packed_bytes_saved` of them out; `unknown_codes`: chunks that a later version had packed. `removed_directories`: times
somebody removed the directory. `faults`: bugs.
"""

from __future__ import annotations

import logging
from typing import Final

from stowage.log import Trouble
from stowage.storage.counters import TierCounters, Words

NAMES: Final = (
    "reads read_bytes read_calls writes write_bytes corrupt mismatched vanished dropped timed_out refused no_room "
    "enospc read_errors write_errors backed_off direct_fallbacks unknown_codes packed packed_bytes_saved "
    "sealed_segments repaired_segments reclaimed_segments "
    "removed_leftovers damaged_segments unreadable_segments removed_directories rewritten "
    "evicted faults"
).split()


LOGGED: Final[Words] = {
    "corrupt": (logging.WARNING, "a stored chunk did not verify; it is absent until it is stored again"),
    "mismatched": (logging.WARNING, "a stored chunk has another length than asked for"),
    "read_errors": (logging.WARNING, "the disk refused a read"),
    "write_errors": (logging.WARNING, "the disk refused a write"),
    "enospc": (logging.WARNING, "the file system is full: free some room there, or give `disk` a smaller size"),
    "no_room": (logging.WARNING, "the limit is reached, and nothing in the directory can be removed"),
    "dropped": (logging.WARNING, "chunks were not begun because the queue is full"),
    "timed_out": (logging.WARNING, "chunks were given up because their deadline passed in the queue"),
    "refused": (logging.WARNING, "chunks are too long for the limit, or empty"),
    "unknown_codes": (logging.WARNING, "a stored chunk is packed in a way that this version does not know"),
    "damaged_segments": (logging.WARNING, "a segment has no valid header or footer"),
    "unreadable_segments": (logging.WARNING, "a segment is under another protection, or a key that is not there"),
    "removed_directories": (logging.WARNING, "somebody removed the cache directory; it is begun anew"),
    "repaired_segments": (logging.INFO, "a torn segment of a killed writer was finished"),
    "removed_leftovers": (logging.INFO, "an empty file of a killed writer was removed"),
    "direct_fallbacks": (logging.INFO, "the file system does not take direct I/O"),
    "reclaimed_segments": (logging.DEBUG, "the oldest segment was removed to keep the limit"),
    "vanished": (logging.DEBUG, "another process had reclaimed a chunk"),
}
"""At which level, in which words."""


class Counters(TierCounters):
    """The counters that the module describes."""

    def __init__(self, trouble: Trouble | None = None) -> None:
        super().__init__(NAMES, LOGGED, trouble)
