"""Parts that the reading and the writing half of the disk tier share."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from stowage.storage.disk.catalog import Catalog
from stowage.storage.disk.counters import Counters
from stowage.storage.disk.directory import Directory
from stowage.storage.disk.index import Index
from stowage.storage.disk.packing_rates import PackingRates
from stowage.storage.disk.system import System
from stowage.storage.protocol import Outcome


@dataclass(frozen=True, slots=True)
class Shared:
    """Parts that both halves use, each with a lock of its own where it needs one.

    `finish` takes each outcome once, from any thread, under no lock. `transfers_max` bounds the transfers of each half
    that were taken and not reported yet.
    """

    directory: Directory
    catalog: Catalog
    index: Index
    counters: Counters
    namespace: bytes
    transfers_max: int
    system: System
    finish: Callable[[Outcome], None]
    rates: PackingRates
