"""Slow models of the policies: plain lists, one chunk at a time. And a random life for the slots of a policy."""

from __future__ import annotations

import random
from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np

from stowage.cache.policy import Policy


def array(slots: list[int]) -> np.ndarray:
    return np.array(slots, np.int64)


def key(number: int) -> bytes:
    return number.to_bytes(32, "big")


@dataclass
class Arena:
    """The slots of a policy as a ledger keeps them: free, evictable or pinned; prompts are paths in a tree of keys."""

    policy: Policy
    slots: int
    chance: random.Random
    keys: int = 60
    slot_of: dict[int, int] = field(default_factory=dict)
    pinned: OrderedDict[int, None] = field(default_factory=OrderedDict)
    free: list[int] = field(default_factory=list)
    evicted: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.free = list(range(self.slots))[::-1]

    def parent(self, number: int) -> int | None:
        """Keys are numbered like a heap of three children each."""
        return (number - 1) // 3 if number else None

    def path(self, number: int) -> list[int]:
        """The prompt that ends with this chunk, first chunk first."""
        above = self.parent(number)
        return [*(self.path(above) if above is not None else []), number]

    def evict(self, count: int) -> list[int]:
        """Ask for so many victims, and check what must be true of any policy's."""
        evictable = {slot for slot in self.slot_of.values() if slot not in self.pinned}
        gone = self.policy.victims(count).tolist()
        assert len(gone) == min(count, len(evictable)), "not as many as could leave"
        assert len(set(gone)) == len(gone) and set(gone) <= evictable, "a victim that was in use, or nothing at all"
        number_in = {slot: number for number, slot in self.slot_of.items()}
        for slot in gone:
            del self.slot_of[number_in[slot]]
        self.evicted += gone
        self.free += gone
        return [number_in[slot] for slot in gone]

    def request(self) -> None:
        """One prompt: its head is used, the rest is stored."""
        prompt = self.path(self.chance.randrange(self.keys))
        there = [number for number in prompt if number in self.slot_of]
        new = [number for number in prompt if number not in self.slot_of]
        held = [slot for number in there if (slot := self.slot_of[number]) not in self.pinned]
        self.policy.remove(array(held))
        self.pinned |= dict.fromkeys(held)
        if len(new) > len(self.free):
            self.evict(len(new) - len(self.free))
        new = new[: len(self.free)]
        slots = [self.free.pop() for _ in new]
        self.slot_of |= dict(zip(new, slots, strict=True))
        parents = [self.slot_of.get(above, -1) if (above := self.parent(n)) is not None else -1 for n in new]
        self.policy.admit(array(slots[::-1]), [key(n) for n in new[::-1]], array(parents[::-1]))
        self.unpin(held, used=True)

    def unpin(self, slots: list[int], used: bool) -> None:
        for slot in slots:
            del self.pinned[slot]
        self.policy.insert(array(slots[::-1]), used)

    def step(self) -> None:
        """A request, or something rarer: a pin for a while, an eviction, a chunk that is dropped by its owner."""
        deed = self.chance.random()
        idle = [slot for slot in self.slot_of.values() if slot not in self.pinned]
        if deed < 0.6 or not idle:
            self.request()
        elif deed < 0.75:
            held = self.chance.sample(idle, self.chance.randint(1, len(idle)))
            self.policy.remove(array(held))
            self.pinned |= dict.fromkeys(held)
        elif deed < 0.9 and self.pinned:
            some = self.chance.sample(list(self.pinned), self.chance.randint(1, len(self.pinned)))
            self.unpin(some, self.chance.random() < 0.7)
        elif deed < 0.95:
            self.evict(self.chance.randint(0, 3))
        else:
            slot = self.chance.choice(idle)
            self.policy.remove(array([slot]))
            self.slot_of = {number: other for number, other in self.slot_of.items() if other != slot}
            self.free.append(slot)

    def check(self) -> None:
        self.policy.check()
        assert len(self.policy) == len(self.slot_of) - len(self.pinned)


class SlowS3FIFO:
    """One chunk at a time, lists for queues. The memory never forgets: for lives with fewer keys than it holds."""

    def __init__(self, slots: int) -> None:
        self.small: list[int] = []
        self.main: list[int] = []
        self.small_max = int(0.1 * slots)
        self.in_main: dict[int, bool] = {}
        self.uses: dict[int, int] = {}
        self.key_of: dict[int, bytes] = {}
        self.evictable: set[int] = set()
        self.remembered: set[bytes] = set()

    def admit(self, slots: np.ndarray, keys: list[bytes], parents: np.ndarray) -> None:
        known = [name in self.remembered for name in keys]
        self.remembered -= set(keys)
        for slot, name, main in zip(slots.tolist(), keys, known, strict=True):
            self.small = [other for other in self.small if other != slot]
            self.main = [other for other in self.main if other != slot]
            self.key_of[slot], self.in_main[slot], self.uses[slot] = name, main, 0
        self.insert(slots, used=False)

    def insert(self, slots: np.ndarray, used: bool = True) -> None:
        for slot in slots.tolist():
            self.uses[slot] = min(3, self.uses[slot] + used)
            self.evictable.add(slot)
            queue = self.main if self.in_main[slot] else self.small
            if slot not in queue:
                queue.append(slot)

    def remove(self, slots: np.ndarray) -> None:
        self.evictable -= set(slots.tolist())

    def victims(self, count: int) -> np.ndarray:
        gone: list[int] = []
        while len(gone) < count and (self.small or self.main):
            from_small = len(self.small) > self.small_max or not self.main
            slot = (self.small if from_small else self.main).pop(0)
            if slot not in self.evictable:
                continue
            if from_small and self.uses[slot] >= 2:
                self.uses[slot], self.in_main[slot] = 0, True
                self.main.append(slot)
            elif not from_small and self.uses[slot]:
                self.uses[slot] -= 1
                self.main.append(slot)
            else:
                if from_small:
                    self.remembered.add(self.key_of[slot])
                    self.uses[slot] = 0
                self.evictable.discard(slot)
                gone.append(slot)
        return array(gone)

    def __len__(self) -> int:
        return len(self.evictable)

    def check(self) -> None: ...


class SlowARC:
    """One chunk at a time, lists for orders; the memory never forgets."""

    def __init__(self, slots: int) -> None:
        self.slots = slots
        self.orders: tuple[list[int], list[int]] = ([], [])
        self.order_of: dict[int, int] = {}
        self.key_of: dict[int, bytes] = {}
        self.past: dict[bytes, int] = {}
        self.share = 0.0

    def admit(self, slots: np.ndarray, keys: list[bytes], parents: np.ndarray) -> None:
        left = [list(self.past.values()).count(order) for order in (0, 1)]
        came = [[self.past[name] for name in keys if name in self.past].count(order) for order in (0, 1)]
        self.share += came[0] * max(1.0, max(left[1], 1) / max(left[0], 1))
        self.share = min(self.share, self.slots) - came[1] * max(1.0, max(left[0], 1) / max(left[1], 1))
        self.share = max(self.share, 0.0)
        for slot, name in zip(slots.tolist(), keys, strict=True):
            self.order_of[slot] = int(self.past.pop(name, None) is not None)
            self.key_of[slot] = name
        self.insert(slots, used=False)

    def insert(self, slots: np.ndarray, used: bool = True) -> None:
        self.remove(slots)
        for slot in slots.tolist():
            self.order_of[slot] = 1 if used else self.order_of[slot]
            self.orders[self.order_of[slot]].append(slot)

    def remove(self, slots: np.ndarray) -> None:
        for order in self.orders:
            order[:] = [slot for slot in order if slot not in slots.tolist()]

    def victims(self, count: int) -> np.ndarray:
        gone: list[int] = []
        while len(gone) < count and any(self.orders):
            order = 0 if self.orders[0] and (len(self.orders[0]) > int(self.share) or not self.orders[1]) else 1
            slot = self.orders[order].pop(0)
            self.past[self.key_of[slot]] = order
            gone.append(slot)
        return array(gone)

    def __len__(self) -> int:
        return sum(map(len, self.orders))

    def check(self) -> None: ...


def lives(policy: Policy, slots: int, seed: int, steps: int) -> Iterator[Arena]:
    """An arena, after each of so many steps."""
    arena = Arena(policy, slots, random.Random(seed))
    for _ in range(steps):
        arena.step()
        yield arena
