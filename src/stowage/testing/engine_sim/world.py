"""One simulated world of an engine: clients, tiers and copies that fail, and a model that may.

What is real: `Engine` and everything behind it that decides (loop, scheduler, admission, KV manager, swap, prefix
planner, store, sampling, detokenizer). What is played: the model, copies, tiers, threads and time.

After every step in which nobody is at work: blocks, slots and pins add up, and the engine lives unless its model broke.
At the end every waiter was told, the answers were right, nothing is held, and the engine's thread has ended.
"""

from __future__ import annotations

import contextlib
import signal
import sys
import threading
from collections import Counter
from collections.abc import Iterator
from typing import Final

import torch

from stowage.errors import BudgetError
from stowage.testing.engine_sim.clients import Client, Documents
from stowage.testing.engine_sim.engine import Machine, PlayedEngine
from stowage.testing.engine_sim.played import EngineLoop
from stowage.testing.engine_sim.profile import EngineFaults
from stowage.testing.sim.content import Violation
from stowage.testing.sim.loop import Process
from stowage.testing.sim.world import Failure, Result

STEPS_MAX: Final = 200_000
CHECK_EVERY: Final = 5
IDLE_S: Final = 120.0
WORLD_S_MAX: Final = 60
"""Of processor time; a world takes 0.05."""
HAPPENINGS: Final = """
    answers cancelled preemptions preemptions_recomputed blocks_moved_out overlapped_loads tokens_reused copies_failed
    loads_refused restarts NaN:_told culprits:_told errors_that_were_due streams_left event_loops_closed
    nonsense_refused refused:_too_long looked_at engines_stopped
""".split()
"""Of the engine's counters and of what clients saw: what some world must have had."""


_OF_THE_STORE: Final = (
    "hits.host hits.tier_a hits.tier_b promoted joined load_failures timeouts fetch_timeouts stores_without_room"
).split()


class World:
    """See the module."""

    def __init__(self, seed: int) -> None:
        self.loop = EngineLoop(seed)
        self.happened: Counter[str] = Counter()
        self.faults = EngineFaults.draw(self.loop.chance)
        self.process = Process(self.loop)
        self.machine = Machine(self.loop.chance)
        self.engine: PlayedEngine | None = None

    def unraisable(self, what: sys.UnraisableHookArgs) -> None:
        """What is raised where nobody can catch it. Python's own queues do so when their event loop is closed."""
        if "Event loop is closed" not in str(what.exc_value):
            self.faults.violations.append(f"{what.object!r} raised {what.exc_value!r}")

    def run(self) -> None:
        """Until all engines of this world have ended. Raises Violation, or whatever a broken part raises."""
        lives = self.loop.chance.choice((1, 1, 2))
        documents = Documents(self.loop.chance, self.machine.layout.context_tokens)
        for life in range(lives):
            self.process = Process(self.loop)
            try:
                self.engine = PlayedEngine(self.machine, self.process, self.faults)
            except BudgetError:
                self.happened["budgets refused"] += 1
                return
            self.happened["restarts"] += bool(life)
            self._live(self.engine, documents)
            self.process.kill()

    def _live(self, engine: PlayedEngine, documents: Documents) -> None:
        chance = self.loop.chance
        counts = [chance.randrange(1, 8) for _ in range(chance.choice((1, 2, 4, 7)))]
        clients = [Client(self.loop, engine, self.faults, documents, self.happened, count) for count in counts]
        for number, client in enumerate(clients):
            self.process.spawn(f"client{number}", client.run)
        closes_early = chance.random() < 0.15
        until_s = self.loop.now_s + chance.random() * 2
        while not all(client.done for client in clients):
            self._step(engine)
            if closes_early and self.loop.now_s > until_s:
                break
        if not closes_early and not engine.failed:
            self._until_idle(engine)
        self._close(engine)
        while not all(client.done for client in clients):
            self._step(engine)
        self._sum_up(engine)

    def _step(self, engine: PlayedEngine) -> None:
        if not self.loop.step():
            raise Violation("everybody sleeps for ever, and not everything has ended")
        if self.loop.steps > STEPS_MAX:
            raise Violation("requests do not end")
        if self.faults.violations:
            raise Violation(self.faults.violations[0])
        if engine.failed and not engine.computes.broken:
            raise Violation(f"the engine stopped: {engine.why}")
        if self.loop.steps % CHECK_EVERY == 0 and engine.alive and engine.rests:
            engine._loop.check()

    def _until_idle(self, engine: PlayedEngine) -> None:
        until_s = self.loop.now_s + IDLE_S
        while engine.busy and not engine.failed:
            if self.loop.now_s > until_s:
                raise Violation("the engine has no requests, and does not come to rest")
            self._step(engine)
        if not engine.failed and (held := engine.held()):
            raise Violation(held)

    def _close(self, engine: PlayedEngine) -> None:
        closer = self.process.spawn("closer", engine.close)
        while not closer.ended:
            self._step(engine)
        if engine._loop.thread.is_alive():
            raise Violation("the engine's thread goes on after it was closed")
        if engine._loop.open:
            raise Violation("an ended engine has open requests")

    def _sum_up(self, engine: PlayedEngine) -> None:
        self.happened["engines stopped"] += engine.failed
        self.happened["forwards"] += engine.computes.forwards
        self.happened.update({name: count for name, count in engine.counters.items() if count})
        stats = engine.store.stats() if engine.store is not None else {}
        self.happened.update({name: int(stats[name]) for name in _OF_THE_STORE if stats.get(name)})


class _EndlessError(BaseException):
    """A step computes for ever."""


@contextlib.contextmanager
def _watched() -> Iterator[None]:
    """A step that does not end, which no clock of the world can see, raises after `WORLD_S_MAX` of processor time."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def raise_endless(_signal: int, _frame: object) -> None:
        raise _EndlessError(f"a world took {WORLD_S_MAX} s of processor time: a step does not end")

    before = signal.signal(signal.SIGVTALRM, raise_endless)
    signal.setitimer(signal.ITIMER_VIRTUAL, WORLD_S_MAX)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        signal.signal(signal.SIGVTALRM, before)


@contextlib.contextmanager
def one_thread() -> Iterator[None]:
    """torch computes in the caller's thread: its tensors are tiny here, and others would only wait for each other."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def simulate(seed: int) -> Result:
    """Run one world. Raises Failure."""
    world = World(seed)
    loop = world.loop
    before, sys.unraisablehook = sys.unraisablehook, world.unraisable
    try:
        with _watched():
            world.run()
    except (Exception, _EndlessError) as error:
        raise Failure.of(seed, error, loop, "--engine ") from error
    finally:
        world.process.kill()
        sys.unraisablehook = before
    happened = Counter({name.replace(" ", "_"): count for name, count in world.happened.items() if count})
    happened.update({f"fault {name}": count for name, count in world.faults.struck.items()})
    return Result(seed, loop.steps, loop.now_s - 1000.0, loop.digest, happened)
