"""RemoteTier: chunks in a store that many machines share; what an object store and a key-value server have in common.

A façade: `RemoteTransfers` moves chunks and asks in the loop of `Worker`, `Presence` answers look-ups from memory. No
method blocks except `close`. Another machine's chunks are found by `probe`, which the engine asks for each new prompt.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import threading
import time
from collections.abc import Callable
from functools import partial
from typing import Final

import numpy as np
from numpy.typing import NDArray

from stowage.log import Trouble
from stowage.storage.flight import Flight
from stowage.storage.format.compression import Compression
from stowage.storage.format.protection import Protection
from stowage.storage.protocol import TRANSFERS_MAX, Inquiry, Probe, Reporter, Transfer
from stowage.storage.remote.backend import Backend
from stowage.storage.remote.counters import Counters
from stowage.storage.remote.event_loop import Worker
from stowage.storage.remote.presence import Presence
from stowage.storage.remote.transfers import Identity, RemoteTransfers

TRANSFER_S_MAX: Final = 60.0
"""A transfer ends by then even if its deadline is later."""
PROBE_S_MAX: Final = 2.0
PROBES_MAX: Final = 64
NEWEST_SHARE: Final = 0.25
STOP_S: Final = 2.0


class RemoteTier(Reporter):
    """Implements Tier, Waitable, Probing and Described (stowage.storage.protocol), over a `Backend`.

    `name_of` gives the name of a chunk in the store. `absent_s`: how long what the store does not have is taken not to
    be there. `request_timeout_s`: the longest wait for one answer, after which it is asked again if there is time.
    Memory: `STAGING_BYTES` for each direction, 200 bytes per chunk that is known.
    """

    def __init__(
        self,
        name: str,
        backend: Backend,
        namespace: bytes,
        name_of: Callable[[bytes], str],
        *,
        protection: Protection | None = None,
        absent_s: float,
        request_timeout_s: float,
        transfers_max: int = TRANSFERS_MAX,
        compression: str = Compression.AUTO,
        clock: Callable[[], float] = time.monotonic,
        random_bytes: Callable[[int], bytes] = os.urandom,
    ) -> None:
        assert len(namespace) == 32 and transfers_max > 0
        super().__init__()
        self.name = name
        self._backend = backend
        self._clock = clock
        self._protection = protection or Protection()
        self._presence = Presence(absent_s, clock)
        self._counters = Counters(Trouble(f"stowage.{name}"))
        identity = Identity(namespace, self._protection, name_of, random_bytes, Compression(compression))
        self._transfers = RemoteTransfers(backend, identity, self._presence, self._counters, clock, request_timeout_s)
        self._transfers_max = transfers_max
        self._change = threading.Condition()
        self._loads = self._stores = self._probes = 0
        self._closed = self._is_stopped = False
        self._probe_s = 0.0
        self._worker = Worker(f"stowage-{name}")
        self._worker.run(self._transfers.greet(), lambda: None)

    def lookup(self, keys: list[bytes]) -> NDArray[np.uint64]:
        """The valid-block mask of each key that is known to be there, 0 for the others. See `probe`."""
        return self._presence.lookup(keys)

    def load(self, transfer: Transfer) -> None:
        """Queues the transfer. A chunk need not be known to be there."""
        self._begin(transfer, is_load=True)

    def store(self, transfer: Transfer) -> None:
        """Queues the transfer. What another machine has stored meanwhile is not sent again."""
        self._begin(transfer, is_load=False)

    def _begin(self, transfer: Transfer, is_load: bool) -> None:
        flight = Flight(transfer)
        with self._change:
            taken = not self._closed and (self._loads if is_load else self._stores) < self._transfers_max
            if taken:
                self._count(is_load, 1)
        if not taken:
            self._counters.add("dropped", len(transfer.keys))
            self._report(flight.dropped())
            return
        self._worker.run(self._serve(flight, is_load), partial(self._served, flight, is_load))

    def _count(self, is_load: bool, change: int) -> None:
        if is_load:
            self._loads += change
        else:
            self._stores += change

    async def _serve(self, flight: Flight, is_load: bool) -> None:
        left_s = min(flight.transfer.deadline_s - self._clock(), TRANSFER_S_MAX)
        if left_s <= 0:
            self._timed_out(flight)
            return
        try:
            async with asyncio.timeout(left_s):
                await (self._transfers.load(flight) if is_load else self._transfers.store(flight))
        except TimeoutError:
            if not flight.ok.any():  # else it answers, and was too slow for this deadline
                self._transfers.health.failed()
            self._timed_out(flight)
        except Exception:  # noqa: BLE001 - the task's outermost frame; counted and logged
            self._counters.fault("a transfer failed")
            flight.failures["failed"] = flight.unsettled

    def _timed_out(self, flight: Flight) -> None:
        if late := flight.unsettled:
            flight.failures["timed out"] = late
            self._counters.add("timed_out", late)

    def _served(self, flight: Flight, is_load: bool) -> None:
        """The transfer is over: well, badly, or cancelled by `close`."""
        if is_load:
            flight.masks[~flight.ok] = 0
        else:
            flight.masks[:] = flight.transfer.masks
        if given_up := flight.unsettled:
            flight.failures["given up: closing"] = given_up
            flight.refused = True
        self._report(flight.outcome())
        with self._change:
            self._count(is_load, -1)
            self._change.notify_all()

    def discard(self, keys: list[bytes]) -> None:
        """Forgets the keys in this process, and writes them anew at the next store. The store keeps what it has;
        another process may find it, and so may a later probe here (which is harmless: a key names its content)."""
        self._presence.discard(keys)

    def probe(self, inquiries: list[Inquiry]) -> Probe:
        """Finds out how far the store has these chains. While it does not answer, now and then one probe tries."""
        with self._change:
            if self._closed or not inquiries or self._probes >= PROBES_MAX or not self._transfers.health.allows():
                return Probe(done=True)
            self._probes += 1
        probe = Probe(expected_s=self._probe_s)
        self._worker.run(self._ask(inquiries), partial(self._asked, probe))
        return probe

    async def _ask(self, inquiries: list[Inquiry]) -> None:
        began_s = time.monotonic()
        try:
            async with asyncio.timeout(PROBE_S_MAX):
                await self._transfers.probe(inquiries)
            took_s = time.monotonic() - began_s
            self._probe_s += (took_s - self._probe_s) * (NEWEST_SHARE if self._probe_s else 1)
        except TimeoutError:
            self._transfers.health.failed()
            self._counters.add("probe_errors", error=f"no answer within {PROBE_S_MAX:g} s")
        except Exception:  # noqa: BLE001 - the task's outermost frame; counted and logged
            self._counters.fault("a probe failed")

    def _asked(self, probe: Probe) -> None:
        probe.done = True
        with self._change:
            self._probes -= 1
        self.wake()

    def stats(self) -> dict[str, int | float | str]:
        """Counters since opening (chunks, unless their name says otherwise) and gauges."""
        return {
            "chunks": len(self._presence),
            "healthy": int(not self._transfers.health.failures),
            "protection": self._protection.method.label,
            "loads_under_way": self._loads,
            "stores_under_way": self._stores,
            "probes_under_way": self._probes,
            "probe_s": round(self._probe_s, 6),
            **self._backend.stats(),
            **self._counters.snapshot(),
        }

    def check(self) -> None:
        """Asserts the invariants. For an idle tier."""
        self._presence.check()
        self._transfers.check()

    def close(self, deadline_s: float) -> None:
        """Finishes what was begun until `deadline_s` (of the clock), gives up the rest. Idempotent. Outcomes stay to be
        polled."""
        with self._change:
            if self._is_stopped:
                return
            self._closed = True
            left_s = min(max(0.0, deadline_s - self._clock()), TRANSFER_S_MAX)
            self._change.wait_for(lambda: not self._loads and not self._stores, left_s)
        with contextlib.suppress(RuntimeError):
            self._worker.stop(self._backend.close, STOP_S)
        self._is_stopped = True
