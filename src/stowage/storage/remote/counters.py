"""Counters of one shared tier.

Chunks that were read and verified (`reads`, `read_bytes`) or written (`writes`, `write_bytes`), in `read_calls` and
`write_calls` batches; `already_there`: not written, because another machine had. Chunks that were asked for and not
there: `vanished` (evicted, or never stored), `corrupt` (other bytes than were stored), `unreadable` (another version or
protection, or a key that is not in the key file), `read_errors` (no answer, or one of trouble). Chunks not begun:
`dropped` (queue full), `timed_out` (or given up at the deadline), `backed_off` (the store had just been full),
`refused` (empty). Chunks not kept: `no_room` (the store is full), `write_errors`. `packed`: chunks that were sent
packed, which left `packed_bytes_saved` of them out. `probes` of prompts asked about `probe_keys` chunks; `probe_errors`
of these got no answer. `retries`: chunks that were asked for, or sent, once more.
`faults`: bugs.
"""

from __future__ import annotations

import logging
from typing import Final

from stowage.log import Trouble
from stowage.storage.counters import TierCounters, Words

NAMES: Final = (
    "reads read_bytes read_calls writes write_bytes write_calls already_there vanished corrupt unreadable read_errors "
    "dropped timed_out backed_off refused no_room write_errors packed packed_bytes_saved probes probe_keys "
    "probe_errors retries faults"
).split()

LOGGED: Final[Words] = {
    "corrupt": (logging.WARNING, "a stored chunk did not verify; it is absent until it is stored again"),
    "unreadable": (logging.WARNING, "a stored chunk is of another version or protection, or its key is not there"),
    "read_errors": (logging.WARNING, "the store did not bring a chunk"),
    "write_errors": (logging.WARNING, "the store did not take a chunk"),
    "probe_errors": (logging.WARNING, "the store did not say which chunks it has"),
    "no_room": (logging.WARNING, "the store is full"),
    "dropped": (logging.WARNING, "chunks were not begun because the queue is full"),
    "timed_out": (logging.WARNING, "chunks were given up because their deadline passed"),
    "vanished": (logging.DEBUG, "the store has a chunk no more"),
}
"""At which level, in which words."""


class Counters(TierCounters):
    """The counters that the module describes."""

    def __init__(self, trouble: Trouble) -> None:
        super().__init__(NAMES, LOGGED, trouble)
