"""One simulated world: processes with real stores and real disk tiers on one fake disk; faults, crashes; its promises.

What is real: `TieredStore`, `core` (flow, ledger, policies, plans, groups), the host arena, the disk tier down to its
system calls, the format. What is played: the disk and its file system, the device, threads, processes and time.

After every step: the byte limit holds, no bug was swallowed, no worker sleeps while work waits, every fetch has ended
by its deadline. Now and then, and at the end: the invariants of every part (`check`). Every byte that a request gets is
compared with the only bytes that its key may have. At the end every request has ended and nothing is held; then the
faults cease, and the directory must be usable and within its limit.
"""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import dataclass, field
from typing import Final

from stowage.cache.policy import POLICIES
from stowage.core.geometry import PAGE_BYTES, round_up
from stowage.storage.disk import least_limit_bytes
from stowage.storage.disk.allocator import segment_bytes_for
from stowage.storage.format.protection import SECRET_BYTES, Method, Protection, SecretKey
from stowage.testing.sim.client import Prompts
from stowage.testing.sim.content import Violation, draw_geometry
from stowage.testing.sim.disk import SimDisk
from stowage.testing.sim.fault_profile import FaultProfile
from stowage.testing.sim.host import Host, Shape
from stowage.testing.sim.loop import Loop

STEPS_MAX: Final = 200_000
CHECK_EVERY: Final = 211
TROUBLE_EVERY: Final = 50
TRACE_SHOWN: Final = 40


class Failure(Exception):
    """A seed that broke a promise. Its text says which one, how to replay it, and what happened last."""

    def __init__(self, seed: int, message: str, trace: list[str], option: str = "") -> None:
        replay = f"python -m stowage.testing.sim {option}--first {seed} --seeds 1"
        super().__init__("\n".join([f"seed {seed}: {message}", f"replay: {replay}", *trace[-TRACE_SHOWN:]]))
        self.seed = seed
        self.message = message

    @classmethod
    def of(cls, seed: int, error: BaseException, loop: Loop, option: str = "") -> Failure:
        """What `error` ended the world of `loop`."""
        message = str(error) if isinstance(error, Violation) else f"{type(error).__name__}: {error}"
        return cls(seed, message, list(loop.trace), option)


@dataclass(slots=True)
class Result:
    """What happened in a world. Equal seeds give equal results, `digest` (of every step) included."""

    seed: int
    steps: int
    simulated_s: float
    digest: int
    happened: Counter[str] = field(default_factory=Counter)
    """Faults that struck, crashes, and how often each branch of the code was taken, by name."""


def draw_protection(chance: random.Random) -> Protection:
    """A checksum in most worlds; in some the chunks are sealed or encrypted."""
    method = chance.choice((Method.CHECKSUM, Method.CHECKSUM, Method.CHECKSUM, Method.BLAKE3, Method.AES_256_GCM))
    return Protection(method, [] if method is Method.CHECKSUM else [SecretKey(chance.randbytes(SECRET_BYTES))])


class World:
    """See the module."""

    def __init__(self, seed: int) -> None:
        self.loop = Loop(seed)
        self.happened: Counter[str] = Counter()
        chance = self.loop.chance
        geometry = draw_geometry(chance)
        chunk_bytes_max = max(group.bytes_per_chunk for group in geometry.groups)
        segment_bytes = round_up(segment_bytes_for(chunk_bytes_max) * chance.choice((1, 1, 2, 5)), PAGE_BYTES)
        host_bytes = chance.choice((2, 6, 24)) * sum(round_up(g.bytes_per_chunk) for g in geometry.groups)
        protection = draw_protection(chance)
        policy = list(POLICIES)[seed % len(POLICIES)]
        compressions = chance.choice((("off",), ("off",), ("on",), ("on", "off")))
        self.shape = Shape(geometry, host_bytes, segment_bytes, chunk_bytes_max, protection, compressions, policy)
        self.fault_profile = FaultProfile.draw(chance)
        self.limit_least = least_limit_bytes(chunk_bytes_max)
        limit = self.limit_least + chance.choice((0, 1, 3, 10)) * segment_bytes
        capacity = chance.choice((1 << 40, 1 << 40, limit, limit * 3 // 4))
        self.disk = SimDisk(self.loop, self.fault_profile, limit, capacity)
        self.prompts = Prompts(chance)
        self.namespaces = [chance.randbytes(32) for _ in range(chance.choice((1, 1, 2)))]
        self.requests = chance.choice((2, 4, 8))
        self.hosts = [self._start() for _ in range(chance.choice((1, 1, 2, 3)))]
        self.trouble = chance.choice((0.0, 0.0, 0.02, 0.1))
        self.restarts_left = 4

    def _start(self) -> Host:
        self.happened["processes"] += 1
        namespace = self.loop.chance.choice(self.namespaces)
        return Host(self.loop, self.disk, self.fault_profile, self.shape, self.prompts, namespace, self.requests)

    # Running

    def run(self) -> None:
        """Until all processes have ended. Raises Violation, or whatever a broken part raises."""
        self._until_done()
        self.fault_profile.rates.clear()
        self.disk.capacity_bytes = 1 << 40
        self.requests = 2
        for _ in range(2):  # the first repairs what the storm left; the second opens what the first left
            self.hosts = [self._start()]
            self._until_done()
            if self.hosts[0].refused:
                raise Violation("a healthy disk, and the directory cannot be opened")
        if self.disk.used_bytes() > self.disk.limit_bytes:
            raise Violation("a healthy disk, and the directory is still above its limit")

    def _until_done(self) -> None:
        while not all(host.done for host in self.hosts):
            if not self.loop.step():
                raise Violation("everybody sleeps for ever, and not every request has ended")
            if self.loop.steps > STEPS_MAX:
                raise Violation("requests do not end")
            self._promises()
            if self.loop.steps % CHECK_EVERY == 0:
                for host in self.hosts:
                    host.check()
            if (
                self.fault_profile.rates
                and self.loop.steps % TROUBLE_EVERY == 0
                and self.loop.chance.random() < self.trouble
            ):
                self._trouble()
        for host in self.hosts:
            host.check()
            self._sum_up(host)
            host.kill()

    def _promises(self) -> None:
        if self.disk.violation:
            raise Violation(self.disk.violation)
        if self.disk.grace and all(host.knows_limit() for host in self.hosts):
            self.disk.grace = self.disk.used_bytes() > self.disk.limit_bytes
        for host in self.hosts:
            fault = host.faults()
            if fault:
                raise Violation(fault)

    # Trouble of the world's own

    def _trouble(self) -> None:
        action: str = self.loop.chance.choice(("kill", "kill", "power_cut", "limit"))
        if action == "limit":
            self._change_limit()
        elif self.restarts_left:
            self.restarts_left -= 1
            victims = list(self.hosts) if action == "power_cut" else [self.loop.chance.choice(self.hosts)]
            for host in victims:
                self._sum_up(host)
                host.kill()
                self.hosts.remove(host)
            if action == "power_cut":
                self.disk.grace = True  # what comes back may be too much, until somebody opens the directory
                self.disk.power_cut()
            self.hosts += [self._start() for _ in victims]
        else:
            return
        self.happened[action] += 1
        self.loop.log(action)

    def _change_limit(self) -> None:
        limit = self.limit_least + self.loop.chance.choice((0, 1, 3, 10)) * self.shape.segment_bytes
        self.disk.grace = True
        self.disk.limit_bytes = limit
        for host in self.hosts:
            if host.tier is not None:
                host.tier.set_limit(limit)

    def _sum_up(self, host: Host) -> None:
        """Add up what this process went through."""
        if host.refused:
            self.happened["open refused"] += 1
        if host.tier is None or host.store is None or host.client is None:
            return
        stats = host.store.stats()
        for name, value in stats.items():
            if isinstance(value, int) and value and name not in GAUGES and not name.startswith("slab"):
                self.happened[name] += value
        self.happened["requests"] += host.client.ended
        self.happened["tokens_reused"] += host.client.tokens_reused
        self.happened["tokens_computed"] += host.client.tokens_computed


GAUGES: Final = frozenset(
    "host_bytes spills_waiting transfers_under_way chunks_pinned disk.bytes_used disk.bytes_limit disk.segment_bytes "
    "disk.segments disk.chunks disk.direct disk.loads_under_way disk.stores_under_way disk.strangers".split()
)


def simulate(seed: int) -> Result:
    """Run one world. Raises Failure."""
    world = World(seed)
    loop = world.loop
    try:
        world.run()
    except Exception as error:
        raise Failure.of(seed, error, loop) from error
    finally:
        for host in world.hosts:
            host.kill()
    world.happened.update({f"fault {name}": count for name, count in world.fault_profile.struck.items()})
    return Result(seed, loop.steps, loop.now_s - 1000.0, loop.digest, world.happened)
