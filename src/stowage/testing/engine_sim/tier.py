"""Simulated copies that take time or fail, and simulated tiers that are slow, wrong, or raise at anything.

What a tier says is there may be missing, and what it does may fail; but it never reports other bytes than were stored
under a key: that is what a tier must promise (`storage.protocol`), and the disk's own simulator holds it to that.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from stowage.core.copy_plan import CopyPlan
from stowage.core.geometry import SlabClass
from stowage.errors import TransferError
from stowage.storage.protocol import Inquiry, Outcome, Probe, Reporter, Transfer
from stowage.testing.engine_sim.profile import EngineFaults
from stowage.testing.sim.loop import Process
from stowage.transfer.cpu import CpuTransfer

JUNK_BYTE: Final = 0xA5
QUICK_S, SLOW_S, COPIES_S = 0.02, 30.0, (0.001, 0.02, 0.2)


class _Ticket:
    """Copies that are done at `due_s`; `then` carries them out, or checks them."""

    def __init__(self, copies: PlayedCopies, due_s: float, then: Callable[[], None], fails: bool) -> None:
        self._copies, self._due_s, self._then, self._fails = copies, due_s, then, fails
        self._over = False

    @property
    def done(self) -> bool:
        if self._copies.loop.now_s >= self._due_s:
            self.end()
        return self._over

    def end(self) -> None:
        """They are over. Again: nothing."""
        if not self._over:
            self._over = True
            self._then()

    def wait(self) -> None:
        while not self.done:
            self._copies.loop.sleep(max(1e-6, self._due_s - self._copies.loop.now_s))
        if self._fails:
            raise TransferError("a copy failed")


class PlayedCopies:
    """A `BlockTransfer`. `late`: copies are asynchronous: what is stored arrives in the end, and what is loaded from
    must stay as it is until then.
    """

    def __init__(
        self, process: Process, faults: EngineFaults, arena: NDArray[np.uint8], slabs: tuple[SlabClass, ...], late: bool
    ) -> None:
        self.loop = process.loop
        self._process = process
        self._faults = faults
        self._real = CpuTransfer(arena, slabs)
        self._late = late
        self._copy_s = process.loop.chance.choice(COPIES_S)
        self._stored_s = self._loaded_s = 0.0
        self._closed = False

    def store(self, plan: CopyPlan, storage: Tensor) -> _Ticket | None:
        fails = self._faults.strikes("copy_out_fails")
        blocks = storage.clone()
        self._real.store(plan, blocks.new_full(blocks.shape, JUNK_BYTE))
        if self._late:
            self._stored_s = max(self._stored_s, self.loop.now_s) + self.loop.chance.random() * self._copy_s
            carry_out = (lambda: None) if fails else (lambda: self._real.store(plan, blocks))
            return _Ticket(self, self._stored_s, carry_out, fails)
        if fails:
            raise TransferError("a copy failed")
        self._real.store(plan, storage)
        return None

    def load(self, plan: CopyPlan, storage: Tensor) -> _Ticket | None:
        fails = self._faults.strikes("copy_in_fails")
        if fails:
            storage[plan.blocks] = JUNK_BYTE
            raise TransferError("a copy failed")
        self._real.load(plan, storage)
        if not self._late:
            return None
        came = storage[plan.blocks].clone()

        def check() -> None:
            if self._closed:
                return
            again = storage.clone()
            self._real.load(plan, again)
            if not bool((again[plan.blocks] == came).all()):
                self._faults.violations.append("host memory was changed while it was read")

        self._loaded_s = max(self._loaded_s, self.loop.now_s) + self.loop.chance.random() * self._copy_s
        ticket = _Ticket(self, self._loaded_s, check, fails)
        self._process.spawn("copies", ticket.end, self._loaded_s - self.loop.now_s)  # also where nobody asks
        return ticket

    def close(self) -> None:
        """Give the arena back."""
        self._closed = True
        self._real.close()


class Shelf:
    """What a tier keeps: outlives the engine. The oldest goes when there are too many."""

    def __init__(self, most: int) -> None:
        self.most = most
        self.chunks: dict[bytes, tuple[bytes, int]] = {}

    def put(self, key: bytes, content: bytes, mask: int) -> None:
        self.chunks.pop(key, None)
        self.chunks[key] = (content, mask)
        while len(self.chunks) > self.most:
            del self.chunks[next(iter(self.chunks))]


class PlayedTier(Reporter):
    """A `Tier` and `Waitable` over a shelf."""

    def __init__(self, process: Process, faults: EngineFaults, shelf: Shelf, name: str) -> None:
        super().__init__()
        self.name = name
        self._process = process
        self._faults = faults
        self._shelf = shelf
        self._hung: list[Transfer] = []

    def lookup(self, keys: list[bytes]) -> NDArray[np.uint64]:
        self._may_raise("lookup_raises")
        lies = self._faults.strikes("lookup_lies")
        found = [1 if lies else self._shelf.chunks.get(key, (b"", 0))[1] for key in keys]
        return np.array(found, np.uint64)

    def load(self, transfer: Transfer) -> None:
        self._may_raise("load_raises")
        for buffer in transfer.buffers:
            buffer[:] = bytes([JUNK_BYTE]) * len(buffer)
        if self._faults.strikes("load_hung"):
            self._hung.append(transfer)
            return
        self._later(self._faults.strikes("load_slow"), lambda: self._loaded(transfer))

    def _loaded(self, transfer: Transfer) -> None:
        count = len(transfer.keys)
        ok, masks = np.zeros(count, np.bool_), np.zeros(count, np.uint64)
        for at, (key, buffer) in enumerate(zip(transfer.keys, transfer.buffers, strict=True)):
            content, mask = self._shelf.chunks.get(key, (b"", 0))
            if len(content) == len(buffer) and not self._faults.strikes("load_fails"):
                buffer[:] = content
                ok[at], masks[at] = True, mask
        self._report(Outcome(transfer.id, ok, masks))

    def store(self, transfer: Transfer) -> None:
        self._may_raise("store_raises")
        self._later(self._faults.strikes("store_slow"), lambda: self._stored(transfer))

    def _stored(self, transfer: Transfer) -> None:
        count = len(transfer.keys)
        if self._faults.strikes("store_refused"):
            self._report(Outcome(transfer.id, np.zeros(count, np.bool_), transfer.masks, refused=True))
            return
        ok = np.array([not self._faults.strikes("store_fails") for _ in range(count)], np.bool_)
        for key, buffer, mask, came in zip(
            transfer.keys, transfer.buffers, transfer.masks.tolist(), ok.tolist(), strict=True
        ):
            if came:
                self._shelf.put(key, bytes(buffer), mask)
        self._report(Outcome(transfer.id, ok, transfer.masks))

    def poll(self) -> list[Any]:
        self._may_raise("poll_raises")
        outcomes = super().poll()
        lie: list[Any] = ["done"] if self._faults.strikes("poll_lies") else []
        return [*lie, *outcomes]

    def discard(self, keys: list[bytes]) -> None:
        for key in keys:
            self._shelf.chunks.pop(key, None)
        self._may_raise("discard_raises")

    def close(self, deadline_s: float) -> None:
        hung, self._hung = self._hung, []
        for transfer in hung:
            count = len(transfer.keys)
            self._report(Outcome(transfer.id, np.zeros(count, np.bool_), np.zeros(count, np.uint64), refused=True))

    def _later(self, slow: bool, work: Callable[[], None]) -> None:
        chance = self._process.loop.chance
        after_s = chance.random() * (SLOW_S if slow else QUICK_S)
        if self._process.alive:
            self._process.spawn(f"{self.name}-worker", work, after_s)

    def _may_raise(self, fault: str) -> None:
        if self._faults.strikes(fault):
            kinds: tuple[type[Exception], ...] = (RuntimeError, OSError, KeyError, ValueError, MemoryError)
            raise self._process.loop.chance.choice(kinds)(f"{self.name}: {fault}")


class SharedTier(PlayedTier):
    """A tier that must be asked what others put there (`Probing`)."""

    def __init__(self, process: Process, faults: EngineFaults, shelf: Shelf, name: str) -> None:
        super().__init__(process, faults, shelf, name)
        self._known: set[bytes] = set()

    def lookup(self, keys: list[bytes]) -> NDArray[np.uint64]:
        known = np.array([key in self._known for key in keys], np.bool_)
        found: NDArray[np.uint64] = np.where(known, super().lookup(keys), np.uint64(0))
        return found

    def _stored(self, transfer: Transfer) -> None:
        super()._stored(transfer)
        self._known.update(transfer.keys)

    def probe(self, inquiries: list[Inquiry]) -> Probe:
        self._may_raise("probe_raises")
        probe = Probe(expected_s=self._process.loop.chance.choice((0.0, 0.001, 1.0)))

        def found() -> None:
            for inquiry in inquiries:
                self._known.update(inquiry.keys)
            probe.done = True
            self.wake()

        self._later(self._faults.strikes("probe_slow"), found)
        return probe
