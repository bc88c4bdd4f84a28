"""A seeded scheduler over the steps of lock and ring: one thread runs at a time, and who is next after each line of
theirs is drawn. So each order of events can be played again, and races that are planted are found.
"""

from __future__ import annotations

import random
import sys
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

import stowage
from stowage.weights import forward_lock, forward_passes, prefetcher, ring
from stowage.weights.forward_lock import Claim, ForwardLock
from stowage.weights.forward_passes import ForwardPasses
from stowage.weights.reader import Read, Stall, Ticket
from stowage.weights.ring import Ring

UNITS, SLOTS, SLOT_BYTES, PIECES = 4, 2, 4096, 4
SEEDS = range(15)
STEPS_MAX = 60_000
TRACED = frozenset(str(Path(str(module.__file__))) for module in (forward_lock, forward_passes, prefetcher, ring))


class Interrupted(BaseException):
    """Comes between any two lines."""


class Actor:
    """A thread that runs when it is told to, until its next step."""

    def __init__(self, world: World, job: Callable[[Actor], None]) -> None:
        self.world, self.over, self.interrupts, self.ready = world, False, 0, threading.Semaphore(0)
        self.thread = threading.Thread(target=self._run, args=(job,), daemon=True)
        self.thread.start()

    def _run(self, job: Callable[[Actor], None]) -> None:
        self.ready.acquire()
        try:
            job(self)
        except Interrupted:
            pass
        finally:
            sys.settrace(None)
            self.over = True
            self.world.told.release()

    def step(self) -> None:
        """Somebody else may be next."""
        self.world.told.release()
        self.ready.acquire()

    def trace(self, frame: FrameType, event: str, _arg: Any) -> Any:
        if frame.f_code.co_filename not in TRACED:
            return None
        if event == "line" and self.world.chance.random() < 0.3:
            self.step()
            if self.world.interrupting and self.world.chance.random() < self.world.rate[1]:
                self.interrupts += 1
                raise Interrupted
        return self.trace


class World:
    """The scheduler, and the disk, which fills memory piece by piece."""

    def __init__(self, seed: int, interrupting: bool) -> None:
        self.chance, self.interrupting = random.Random(seed), interrupting
        self.told = threading.Semaphore(0)
        self.actors: list[Actor] = []
        self.reads: list[list[Any]] = []
        self.faults: list[str] = []
        self.batch: dict[str, bool] = {}
        self.rate = self.chance.choice([0.04, 0.1, 0.5]), self.chance.choice([0.003, 0.02])
        """How often the disk works, and how often an interrupt comes."""

    def run(self, jobs: Sequence[Callable[[Actor], None]]) -> None:
        self.actors = [Actor(self, job) for job in jobs]
        for _ in range(STEPS_MAX):
            alive = [actor for actor in self.actors if not actor.over]
            if not alive:
                return
            if self.reads and self.chance.random() < self.rate[0]:
                self.fill(self.chance.randrange(len(self.reads)))
            actor = self.chance.choice(alive)
            actor.ready.release()
            self.told.acquire()
        self.faults.append("threads wait for each other")

    def fill(self, number: int) -> None:
        read, ticket, batch, done = self.reads[number]
        if batch.get("given up") and not done:
            del self.reads[number]
            ticket.ended(OSError("given up"))
            return
        size = SLOT_BYTES // PIECES
        read.into[done * size : (done + 1) * size] = read.source[done * size : (done + 1) * size]
        self.reads[number][3] += 1
        if done + 1 == PIECES:
            del self.reads[number]
            ticket.ended()

    def here(self) -> Actor:
        return next(actor for actor in self.actors if actor.thread is threading.current_thread())

    # What waits, by steps

    def start(self, reads: Sequence[Read]) -> Ticket:
        ticket = Waited(self, len(reads))
        self.reads += [[read, ticket, self.batch, 0] for read in reads]
        return ticket

    def drain(self) -> None:
        batch, self.batch = self.batch, {}
        batch["given up"] = True
        while any(done for *_, of, done in self.reads if of is batch):
            self.here().step()


class Waited(Ticket):
    def __init__(self, world: World, count: int) -> None:
        super().__init__(count)
        self._world = world

    def wait(self, timeout_s: float) -> None:
        while not self.done:
            self._world.here().step()


class Called:
    """The lock of a claim."""

    def __init__(self, world: World) -> None:
        self._world, self._held = world, False

    def acquire(self, timeout: float = 0) -> bool:
        for _ in range(5 if self._held else 0):
            self._world.here().step()
        free, self._held = not self._held, True
        return free

    def release(self) -> None:
        if not self._held:
            raise RuntimeError
        self._held = False


class Model:
    """Units that want their own bytes, and whatever else a forward of a model does with lock and ring."""

    def __init__(self, world: World, drains: bool = True, early: bool = False) -> None:
        self.world, self._drains = world, drains
        self.ring = Ring(UNITS, SLOTS, SLOT_BYTES, self._reads, world, 60.0)  # type: ignore[arg-type]
        self.passes = ForwardPasses(self)
        self._slots: dict[int, memoryview] = {}
        self._hooks = [self.passes.hooks(*self._of(unit, early)) for unit in range(UNITS)]
        self.forward = self.passes.wrap(self._forward, lambda _given: None)

    def _of(self, unit: int, early: bool) -> tuple[Callable[[Any, Any], None], Callable[[], None]]:
        def bring(_args: Any, _kwargs: Any) -> None:
            self._slots[unit] = self.ring.take(unit).memory
            if early:
                self.ring.give_back(unit)

        return bring, lambda: self.ring.give_back(unit)

    def _reads(self, unit: int, memory: memoryview) -> list[Read]:
        return [Read(memoryview(bytes([unit + 1]) * SLOT_BYTES), 0, memory[:SLOT_BYTES])]

    def _forward(self) -> bool:
        right = True
        for unit, (before, after) in enumerate(self._hooks):
            output = None
            try:
                before(None, (), {})
                for _ in range(3):
                    seen = set(self._slots[unit][:: SLOT_BYTES // 8])
                    right = right and seen == {unit + 1}
                    self.world.here().step()
                output = right
            finally:
                after(None, (), {}, output)
        return right

    def recover(self, *, forked: bool) -> None:
        if self._drains:
            self.world.drain()
        self.ring.reset()

    def hide(self) -> None:
        pass

    def begin_pass(self) -> None:
        pass

    def end_pass(self, whole: bool) -> None:
        pass

    def job(self, actor: Actor, forwards: int = 3) -> None:
        for _ in range(forwards):
            actor.interrupts = 0
            sys.settrace(actor.trace)
            try:
                if not self.forward():
                    self.world.faults.append("other bytes")
            except Interrupted:
                continue
            except stowage.ModelError as error:
                if not actor.interrupts:
                    self.world.faults.append(str(error))
            except Exception as error:  # noqa: BLE001  # none is right here
                self.world.faults.append(repr(error))
            finally:
                sys.settrace(None)


def played(seed: int, interrupting: bool, **planted: bool) -> list[str]:
    """What went wrong when three threads computed, and then one of them by itself."""
    world = World(seed, interrupting)
    with pytest.MonkeyPatch.context() as patched:
        own = Claim.__init__

        def claim(self: Claim, frame: FrameType) -> None:
            own(self, frame)
            self.wakeup = Called(world)  # type: ignore[assignment]
            self.wakeup.acquire()

        patched.setattr(Claim, "__init__", claim)
        model = Model(world, **planted)
        world.run([model.job] * 3)
        if not world.faults:
            world.interrupting = False
            world.run([lambda actor: model.job(actor, 1)])
        if not world.faults:
            try:
                model.ring.check()
            except AssertionError:
                world.faults.append("the ring's slots do not add up")
    return world.faults


@pytest.mark.parametrize("interrupting", [False, True])
def test_no_order_of_events_gives_other_bytes(interrupting: bool) -> None:
    for seed in SEEDS:
        assert not (faults := played(seed, interrupting)), (seed, faults)


def nothing(*_args: Any, **_kwargs: Any) -> None:
    pass


def first_in_line(own: Any) -> Any:
    def release(self: ForwardLock, claim: Claim) -> None:
        """Releases the lock of whichever claim holds it."""
        for first in list(self._line)[:1]:
            own(self, first)

    return release


def kept(self: Ring, unit: int) -> None:
    if (lent := self._lent.get(unit)) is not None:
        self._free.append(lent[0])
        self.start()


def needs_recovery(own: Any) -> Any:
    def enter(self: ForwardPasses, frame: FrameType) -> Any:
        self._needs_recovery = self._changing = False
        self._shown = 0
        return own(self, frame)

    return enter


PLANTED: dict[str, tuple[bool, dict[str, bool], Callable[[pytest.MonkeyPatch], None]]] = {
    "no forward waits for the lock": (False, {}, lambda p: p.setattr(ForwardLock, "_wait", nothing)),
    "a slot is given back while a module computes": (False, {"early": True}, nothing),
    "a slot is taken before it is full": (False, {}, lambda p: p.setattr(Stall, "wait", nothing)),
    "a slot is free and lent": (False, {}, lambda p: p.setattr(Ring, "give_back", kept)),
    "who was reading goes on after a reset": (True, {"drains": False}, nothing),
    "nothing recovers after an interrupt": (
        True, {}, lambda p: p.setattr(ForwardPasses, "_enter", needs_recovery(ForwardPasses._enter))
    ),
    "the lock is released by another": (
        True, {}, lambda p: p.setattr(ForwardLock, "release", first_in_line(ForwardLock.release))
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", PLANTED)
def test_a_planted_race_is_found(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    interrupting, planted, plant = PLANTED[name]
    plant(monkeypatch)
    assert any(played(seed, interrupting, **planted) for seed in range(200))


def test_a_seed_plays_the_same_again() -> None:
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(Stall, "wait", nothing)
        assert [played(seed, False) for seed in range(5)] == [played(seed, False) for seed in range(5)]
