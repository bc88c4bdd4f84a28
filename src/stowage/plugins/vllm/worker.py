"""A worker's side: copies between its KV cache and the arena, as the scheduler's side says.

Owns one thread, which fills the blocks of waiting requests while the model computes for others. Stores are made between
two forwards, in the order of the device, so that a block is never overwritten before it is copied. A copy that fails
fails one store or one load; it never ends the engine.
"""

from __future__ import annotations

import logging
import os
import queue
import socket
import threading
from collections.abc import Mapping, Sequence, Set
from pathlib import Path

from torch import Tensor

from stowage import openmp
from stowage.core.copy_plan import CopyPlan
from stowage.errors import ConfigError, StowageError
from stowage.log import Trouble
from stowage.plugins.vllm.division import Naming, Rank
from stowage.plugins.vllm.memory import Copies, GroupBytes, SharedArena, group_bytes
from stowage.plugins.vllm.messages import Load, Part, Report, Step
from stowage.plugins.vllm.weight_updates import Changes
from stowage.storage.host import map_arena
from stowage.storage.lease import hold

_IDLE_WAIT_S = 0.001
"""A step that computes nothing waits so long for a load, instead of coming back at once."""
_COMPARED_FIRST, _COMPARED_EVERY = 8, 256
"""Of the stores, those in which ranks that hold the same bytes show that they do."""


class WorkerSide:
    """The worker's side of one rank. ``layers``: the names of each group's layers. ``rank``: this worker's, and
    ``naming`` of its pieces. ``report_part``: its part of a block goes to the scheduler with the first report, since
    the handshake is another connector's.
    """

    def __init__(
        self,
        layers: Sequence[Sequence[str]],
        num_blocks: int,
        rank: Rank,
        naming: Naming | None = None,
        *,
        report_part: bool = False,
    ) -> None:
        self._layers = layers
        self._num_blocks = num_blocks
        self._rank = rank
        self._naming = naming or Naming(rank[1])
        self._report_part = report_part
        self._groups: list[GroupBytes] = []
        self._copies: Copies | None = None
        self._lease = -1
        self._loads: queue.SimpleQueue[Load | None] = queue.SimpleQueue()
        self._turn = threading.Lock()
        self._arrived = threading.Event()
        self._loaded: set[str] = set()
        self._failed: set[str] = set()
        self._under_way = 0
        self._report = Report()
        self._stored_step = 0
        self._changes: Changes | None = None
        self._changes_known = 0
        self._stale = False
        self._trouble = Trouble("stowage.vllm")
        self._thread: threading.Thread | None = None

    def register(self, caches: Mapping[str, Tensor | Sequence[Tensor]], changes: Changes | None = None) -> None:
        """The KV cache has been allocated. ``changes``: of this worker's weights, from now on. Raises
        ``UnsupportedModelError`` for a layout that is not known.
        """
        self._changes = changes
        self._groups = [group_bytes(caches, names, self._num_blocks, self._naming) for names in self._layers]
        if self._report_part:
            self._report.parts[self._rank] = self.part()

    def part(self) -> Part:
        """What this rank holds of a block."""
        return Part(machine(), self._num_blocks, tuple(group.pieces for group in self._groups))

    # A step

    def begin_loads(self, step: Step) -> None:
        """Start the loads of this step; they end some step later."""
        self._report.step = step.number
        self._look_at_weights(step)
        if step.arena is not None and self._copies is None:
            self._open(step.arena)
        for load in step.loads:
            with self._turn:
                self._under_way += 1
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="stowage-vllm-loads", daemon=True)
                self._thread.start()
            self._loads.put(load)

    def _look_at_weights(self, step: Step) -> None:
        """Until what is stored is forgotten, nothing is copied that was computed with others than its name says."""
        count = self._changes.count if self._changes is not None else 0
        if step.fresh:
            self._stale, self._changes_known = False, count
        elif count != self._changes_known:
            self._stale = True
        self._report.changed = self._stale

    def store(self, step: Step) -> None:
        """Copy out what this step has computed. Done when it returns; asking again does nothing."""
        if step.number == self._stored_step:
            return
        self._stored_step = step.number
        for store in step.stores:
            report = self._report
            try:
                self._refuse_stale()
                copies, plans = self._open_copies(), store.copies()
                report.stored_bytes += sum(copies.store(plan) for plan in plans)
                if store.number <= _COMPARED_FIRST or store.number % _COMPARED_EVERY == 0:
                    self._digest(store.number, plans, copies, report)
            except Exception as error:  # noqa: BLE001 a failed copy costs a hit, whatever it was
                report.failed.add(store.number)
                self._complain("store_failed", "blocks could not be copied to host memory; they are not stored", error)
            report.ended[store.number] = 1

    def _refuse_stale(self) -> None:
        if self._stale:
            raise StowageError("the weights were changed in place")

    def _digest(self, store: int, plans: Sequence[CopyPlan], copies: Copies, report: Report) -> None:
        """For the scheduler's side to compare: what ranks are said to hold alike."""
        for plan in plans:
            for number, digest in copies.digests(plan).items():
                report.digests.setdefault((store, plan.group, number), set()).add(digest)

    def results(self, busy: bool) -> tuple[set[str], set[str]]:
        """Requests whose loads have ended since the last call, and which of them failed."""
        if not busy and self._under_way and not self._loaded:
            self._arrived.wait(_IDLE_WAIT_S)
        with self._turn:
            self._arrived.clear()
            ended, failed = self._loaded, self._failed
            self._loaded, self._failed = set(), set()
            failed |= ended if self._stale else set()
            self._under_way -= len(ended)
        return ended, failed

    def report(self) -> Report:
        """What has ended since the last call; at the least the step itself."""
        with self._turn:
            report, self._report = self._report, Report(self._report.step)
        return report

    def close(self) -> None:
        """End the thread and let go of the arena."""
        if self._thread is not None:
            self._loads.put(None)
            self._thread.join(10.0)
        self._copies = None
        if self._lease >= 0:
            os.close(self._lease)
            self._lease = -1

    # The thread

    def _run(self) -> None:
        while (load := self._loads.get()) is not None:
            nbytes, failed = 0, load.plans is None
            try:
                self._refuse_stale()
                for plan in load.plans or ():
                    nbytes += self._open_copies().load(plan)
            except Exception as error:  # noqa: BLE001 a failed copy costs a recompute, whatever it was
                failed = True
                self._complain("load_failed", "blocks could not be filled from host memory; they are computed", error)
            openmp.release_team()  # large copies had one; vLLM computes with its own
            with self._turn:
                self._report.loaded_bytes += nbytes
                self._loaded.add(load.request)
                if failed:
                    self._failed.add(load.request)
                self._arrived.set()

    def _open(self, shared: SharedArena) -> None:
        try:
            if shared.lease and self._lease < 0:
                self._lease = hold(shared.lease)  # before the memory is mapped here
            self._copies = Copies(
                self._groups, map_arena(shared.path, shared.nbytes), shared, shared.shares[self._rank]
            )
        except (StowageError, KeyError, OSError) as error:
            self._complain("arena_unreachable", "host memory cannot be reached: nothing is stored or loaded", error)

    def _open_copies(self) -> Copies:
        if self._copies is None:
            raise StowageError("this worker has not mapped the arena")
        return self._copies

    def _complain(self, event: str, text: str, error: Exception) -> None:
        self._trouble.report(logging.WARNING, event, text, count=1, error=f"{type(error).__name__}: {error}")


def machine() -> str:
    """A name that two processes have in common when they run on the same machine since the same start."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    except OSError:
        boot = ""
    return f"{socket.gethostname()} {boot}"


def check_one_machine(machines: Set[str]) -> None:
    """Raises ``ConfigError`` when a worker runs on another machine than this process."""
    if machines - {machine()}:
        raise ConfigError(
            "The workers run on several machines, and StowageConnector's host memory is one machine's. Run one engine "
            "per machine (--data-parallel-size, or a router before them) and share chunks through an object store or a "
            "Valkey server."
        )
