"""One process of a simulated world: an engine's store and disk tier, the requests that it serves, and its promises."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np

from stowage.cache.store import TieredStore
from stowage.core.geometry import Geometry
from stowage.errors import DirectoryError
from stowage.storage.disk import DiskTier
from stowage.storage.disk.system import System, Turn, one_by_one
from stowage.storage.format.protection import Protection
from stowage.storage.protocol import Outcome, Transfer
from stowage.testing.sim.client import Client, Prompts
from stowage.testing.sim.content import Device, Violation
from stowage.testing.sim.disk import SimDisk
from stowage.testing.sim.fault_profile import FaultProfile
from stowage.testing.sim.files import SimFiles
from stowage.testing.sim.job_runner import SimJobRunner
from stowage.testing.sim.loop import Loop, Process, SimSignal, SimWorkerPool

DEVICE_ROWS: Final = 512
SETTLE_S: Final = 30.0
"""Within this time the tier reports its next transfer, counted from when its disk last let go of an operation."""


class _WatchedTier(DiskTier):
    """A disk tier, and which of the store's memory is lent to it: from a load until its report is taken."""

    def __init__(self, *options: Any, **more: Any) -> None:
        super().__init__(*options, **more)
        self.arena = range(0)
        self._lent: dict[int, list[range]] = {}

    def load(self, transfer: Transfer) -> None:
        self._lent[transfer.id] = [_addresses(buffer) for buffer in transfer.buffers]
        super().load(transfer)

    def poll(self) -> list[Outcome]:
        outcomes = super().poll()
        for outcome in outcomes:
            self._lent.pop(outcome.id, None)
        return outcomes

    def may_fill(self, buffer: memoryview) -> bool:
        """Whether a read may write there."""
        begin = _addresses(buffer).start
        return begin not in self.arena or any(begin in lent for spans in self._lent.values() for lent in spans)


def _addresses(buffer: memoryview) -> range:
    begin: int = np.frombuffer(buffer, np.uint8).__array_interface__["data"][0]
    return range(begin, begin + buffer.nbytes)


@dataclass(frozen=True, slots=True)
class Shape:
    """What all processes of a world have in common."""

    geometry: Geometry
    host_bytes: int
    segment_bytes: int
    chunk_bytes_max: int
    protection: Protection
    compressions: tuple[str, ...]
    """One of them is each process's."""
    policy: str


class Host:
    """A process. `main` is its engine thread; the disk tier's workers are its other threads."""

    def __init__(
        self,
        loop: Loop,
        disk: SimDisk,
        fault_profile: FaultProfile,
        shape: Shape,
        prompts: Prompts,
        namespace: bytes,
        requests: int,
    ) -> None:
        self.process = Process(loop)
        self.files = SimFiles(disk, self.process)
        self.signal = SimSignal(self.process)
        self.worker_pools: dict[str, SimWorkerPool] = {}
        self.tier: _WatchedTier | None = None
        self.store: TieredStore | None = None
        self.client: Client | None = None
        self.device: Device | None = None
        self.done = False
        self.refused = False
        """The disk failed while the tier was opened: a clear error at start-up, and no process."""
        self._loop, self._disk, self._fault_profile, self._shape = loop, disk, fault_profile, shape
        self._prompts, self._namespace, self._requests = prompts, namespace, requests
        self.process.spawn("main", self._main, loop.chance.random() * 0.2)

    # The process itself

    def _main(self) -> None:
        chance = self._loop.chance
        try:
            self.tier = self._open_tier()
        except DirectoryError:
            self.refused = self.done = True
            return
        if self.tier.stats()["bytes_limit"] != self._disk.limit_bytes:  # it was changed meanwhile
            self.tier.set_limit(self._disk.limit_bytes)
        self.store = TieredStore(
            self._shape.geometry,
            self._shape.host_bytes,
            [self.tier],
            snapshot_tokens=16,
            clock=self._loop.clock,
            spill_bytes_max=chance.choice((1, 20_000, None)),
            wake=self.signal,
            policy=self._shape.policy,
        )
        geometry, arena = self._shape.geometry, self.store.arena
        self.tier.arena = _addresses(arena.numpy().data)
        self.files.may_fill = self.tier.may_fill
        self.device = Device(geometry, self.store.slabs, arena.numpy(), self._fault_profile, DEVICE_ROWS)
        self.client = Client(self._loop, self.store, self.device, geometry, self._namespace, self._prompts)
        self.client.run(self._requests, chance.choice((1, 2, 4)))
        if chance.random() < 0.7:
            self._end()
        self.done = True

    def _open_tier(self) -> _WatchedTier:
        chance, loop = self._loop.chance, self._loop
        system = System(
            files=self.files,
            descriptors=self.files,
            clock=loop.clock,
            timer=loop.clock,
            sleep=loop.sleep,
            random_bytes=chance.randbytes,
            worker_pool=self._worker_pool,
            ahead=one_by_one,
            job_runner=lambda: SimJobRunner(self.process),
            worth_a_thread_bytes=1,
        )
        return _WatchedTier(
            Path("/simulated"),
            self._disk.limit_bytes,
            self._namespace,
            segment_bytes=self._shape.segment_bytes,
            chunk_bytes_max=self._shape.chunk_bytes_max,
            readers=chance.choice((1, 1, 2, 4)),
            transfers_max=chance.choice((2, 8, 64)),
            refresh_s=chance.choice((0.2, 1.0)),
            patience_s=chance.choice((lambda _: 0.0, lambda scattered: 0.004 * (scattered > 0))),
            protection=self._shape.protection,
            compression=chance.choice(self._shape.compressions),
            system=system,
        )

    def _worker_pool(self, name: str, turns: Sequence[Turn]) -> SimWorkerPool:
        kind = name.rpartition("-")[2]
        self.worker_pools[kind] = SimWorkerPool(self.process, kind, turns)
        return self.worker_pools[kind]

    def _end(self) -> None:
        """An orderly end: wait for what is under way, then close. Nothing may be left."""
        assert self.store is not None and self.device is not None and self.tier is not None
        before, since_s = (0, 0), self._loop.now_s
        while (stats := self.store.stats())["transfers_under_way"]:
            waiting = int(stats["transfers_under_way"]), int(stats["spills_waiting"])
            if waiting != before:
                before, since_s = waiting, self._loop.now_s
            if self._loop.now_s > max(since_s, self.process.stalled_until_s) + SETTLE_S:
                break
            self.store.poll()
            self.store.wait(1.0)
        if not self.process.hangs:
            stats = self.store.stats()
            if stats["transfers_under_way"]:
                raise Violation("a transfer was never reported")
            if stats["chunks_pinned"]:
                raise Violation("slots stayed pinned although nobody holds them")
            if self.device.rows_taken():
                raise Violation("the client lost device blocks")  # a bug of the simulator itself
        self.store.close(self._loop.chance.choice((0.0, 1.0, 60.0)))
        if (
            all(task.ended for worker_pool in self.worker_pools.values() for task in worker_pool.tasks)
            and self.files.open_files()
        ):
            raise Violation("closed, and descriptors are still open")

    # What the world does to it, and asks of it

    def kill(self) -> None:
        """SIGKILL, or the end of a process that has ended."""
        self.process.kill()
        self.files.release_all()
        if self.client is not None:
            self.client.abandon()

    def faults(self) -> str:
        """A promise that is broken at this moment; empty while all hold. Cheap."""
        if self.tier is None or not self.process.alive:
            return ""
        loader, storer = self.tier._loader, self.tier._storer  # the simulator looks behind the façade
        if self.files.overwritten:
            return "memory was filled by a read whose transfer had been reported"
        if self.tier._counters.snapshot()["faults"]:
            return "an exception reached the outermost frame of a worker"
        if loader.waiting and self.worker_pools["read"].all_asleep_for_good():
            return "a load waits, and every reader sleeps: a lost wake-up"
        if storer._queue and self.worker_pools["write"].all_asleep():
            return "a store waits, and the writer sleeps: a lost wake-up"
        if self.tier._outcomes and self.signal.sleeper is not None and not self.signal.is_set:
            return "an outcome waits, and the engine sleeps: a lost wake-up"
        if self.client is not None:
            late = [number for number, until_s in self.client.awaiting.items() if self._loop.now_s > until_s]
            if late:
                return f"the fetch of request {late[0]} did not end by its deadline"
        return ""

    def knows_limit(self) -> bool:
        """Whether it works with the directory's limit as it is now: one that was changed takes effect at the next turn
        of the writer."""
        return self.done or (self.tier is not None and not self.tier._storer._limit_changed)

    def check(self) -> None:
        """Assert the invariants of every part."""
        if self.store is not None and self.process.alive:
            self.store.check()
            assert self.tier is not None
            self.tier._catalog.check()
