"""Every policy over random lives of its slots: against a slow model, and against what any policy must do."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stowage.cache.ledger import Ledger
from stowage.cache.policy import ARC, POLICIES, POLICY_DEFAULT, S3FIFO, CostAware, Policy
from stowage.cache.policy.history import History, fingerprints
from tests.depth import mostly_rare
from tests.policy_models import Arena, SlowARC, SlowS3FIFO, array, key, lives

SLOTS = 12
IN_PYTHON = {**POLICIES, "cost": CostAware}
"""With arrays that a test can look into; `test_native_policy` says that the default, in C, does the same."""
seeds = st.integers(0, 1 << 30)


@pytest.mark.parametrize("name", POLICIES)
@given(seed=seeds)
@settings(max_examples=10, deadline=None)
def test_victims_are_evictable_and_as_many_as_there_are(name: str, seed: int) -> None:
    """A pinned slot is never a victim, no victim comes twice, and nothing evictable is kept back."""
    for arena in lives(POLICIES[name](SLOTS, SLOTS), SLOTS, seed, 80):
        arena.check()
    arena.evict(SLOTS)
    assert len(arena.policy) == 0 and set(arena.slot_of.values()) == set(arena.pinned)


@pytest.mark.parametrize(("fast", "slow"), [(S3FIFO, SlowS3FIFO), (ARC, SlowARC)])
@given(seed=seeds, slots=st.integers(1, 30))
@settings(max_examples=15, deadline=None)
def test_batches_do_what_one_by_one_does(
    fast: Callable[[int], Policy], slow: Callable[[int], Policy], seed: int, slots: int
) -> None:
    """So few keys that the memory forgets none."""
    one = Arena(fast(slots), slots, random.Random(seed), keys=20)
    other = Arena(slow(slots), slots, random.Random(seed), keys=20)
    for _ in range(80):
        one.step()
        other.step()
        assert one.evicted == other.evicted


@given(seed=seeds)
@settings(max_examples=15, deadline=None)
def test_the_cost_aware_policy_never_leaves_a_chunk_without_its_prefix(seed: int) -> None:
    """While nothing is pinned. With pins, a prefix may only go when all that continues it is in use."""
    arena = Arena(CostAware(SLOTS), SLOTS, random.Random(seed))
    for _ in range(60):
        arena.request()
        gone = arena.evict(arena.chance.randint(0, 2))
        orphans = [number for number in arena.slot_of if arena.parent(number) in gone]
        assert not orphans
        arena.check()
    assert all(arena.parent(number) in {None, *arena.slot_of} for number in arena.slot_of)


@given(seed=seeds, entries=st.integers(0, 40), batches=st.lists(st.integers(0, 60), max_size=30))
@settings(deadline=None)
def test_the_memory_of_what_left_is_bounded_and_right(seed: int, entries: int, batches: list[int]) -> None:
    chance = np.random.default_rng(seed)
    history = History(entries)
    known: dict[int, int] = {}
    for size in batches:
        numbers = chance.integers(0, 500, size)
        prints = fingerprints([key(int(number)) for number in numbers])
        if chance.random() < 0.5:
            found = history.take(prints)
            for number, place in zip(numbers.tolist(), found.tolist(), strict=True):
                assert place in (-1, known.pop(number, place))
                known.pop(number, None)
        else:
            places, _ = history.put(prints)
            for number, place in zip(numbers.tolist(), places.tolist(), strict=True):
                if place >= 0:
                    known = {other: where for other, where in known.items() if where != place} | {number: place}
        history.check()
        assert len(history) == len(known) <= history.capacity
    assert entries <= history.capacity <= max(64, 5 * entries)


@pytest.mark.parametrize("name", mostly_rare(IN_PYTHON, ["cost", "lru"]))
def test_what_a_policy_keeps_does_not_grow(name: str) -> None:
    """A thousand times as many prompts as there are slots: its arrays stay as they were, its lists stay short."""

    def sizes(policy: object) -> int:
        total = 0
        for slot in type(policy).__slots__:  # type: ignore[attr-defined]
            value = getattr(policy, slot)
            if isinstance(value, np.ndarray):
                total += value.size
            elif hasattr(type(value), "__slots__") and type(value).__module__.startswith("stowage"):
                total += sizes(value)
            elif isinstance(value, dict):
                total += sum(len(run.slots) for runs in value.values() for run in runs)
            elif isinstance(value, tuple) and value and not isinstance(value[0], int):
                total += sum(sizes(part) for part in value)
            elif isinstance(value, list):
                total += len(value)
        return total

    arena = Arena(IN_PYTHON[name](8, 8), 8, random.Random(0), keys=3000)
    start = sizes(arena.policy)
    for _ in range(2500):
        arena.step()
    assert sizes(arena.policy) <= start + 3 * (2 * 8 + 64)
    arena.check()


@pytest.mark.slow
@pytest.mark.parametrize("name", mostly_rare(IN_PYTHON, ["cost", "lru"]))
def test_the_work_per_prompt_does_not_grow_with_the_slots(name: str) -> None:
    """Counted, not timed: how many elements are touched that came out of the policy's arrays, with 200 and 3,200."""

    class Counted(np.ndarray):
        """An array that counts the elements that are read from it by index or compared whole."""

        touched = 0

        def __array_ufunc__(self, ufunc: np.ufunc, method: str, *inputs: object, **options: object) -> object:
            plain = [np.asarray(one) if isinstance(one, Counted) else one for one in inputs]
            Counted.touched += max((one.size for one in plain if isinstance(one, np.ndarray)), default=0)
            if "out" in options:
                options["out"] = tuple(np.asarray(one) for one in options["out"])  # type: ignore[attr-defined]
            return getattr(ufunc, method)(*plain, **options)

    def work(slots: int) -> float:
        policy = IN_PYTHON[name](slots, slots)

        def count(owner: object) -> None:
            for slot in type(owner).__slots__:  # type: ignore[attr-defined]
                value = getattr(owner, slot)
                if isinstance(value, np.ndarray):
                    setattr(owner, slot, value.view(Counted))
                elif isinstance(value, tuple) and value and not isinstance(value[0], int):
                    for part in value:
                        count(part)
                elif hasattr(type(value), "__slots__") and type(value).__module__.startswith("stowage.cache.policy"):
                    count(value)

        count(policy)
        free, number = slots, 0
        begin = 0
        for prompt in range(3 * slots // 8):
            if prompt == slots // 4:
                begin = Counted.touched
            gone = policy.victims(8 - min(8, free))
            new = np.arange(slots - free, slots - free + 8) if free else gone
            free = max(0, free - 8)
            names = [key(number + place) for place in range(8)]
            policy.admit(new, names, np.concatenate(([-1], new[:-1])))
            policy.remove(new[:4])
            policy.insert(new[:4])
            number += 8
        return (Counted.touched - begin) / (slots // 8)

    Counted.touched = 0
    small, large = work(200), work(3200)
    assert large < 3 * small, (small, large)


@given(seed=seeds)
@settings(max_examples=8, deadline=None)
def test_a_ledger_with_any_policy_keeps_its_invariants(seed: int) -> None:
    """Prompts of a tree are fetched, stored and released through two slab classes, some copied elsewhere meanwhile."""
    chance = np.random.default_rng(seed)
    for name, make in POLICIES.items():
        ledger = Ledger([6, 9], make)
        arena = Arena(make(1, 1), 0, random.Random(seed))
        seen: Counter[str] = Counter()
        for _ in range(40):
            slab = int(chance.integers(0, 2))
            keys = [bytes([slab]) + key(number)[1:] for number in arena.path(int(chance.integers(0, 60)))]
            slots = ledger.find(keys)
            found = int(np.argmax(slots < 0)) if (slots < 0).any() else len(keys)
            held = slots[:found]
            ledger.pin(held)
            rest = keys[found:]
            got = ledger.reserve(slab, rest, np.ones(len(rest), np.uint64), keys[found - 1] if found else None)
            got = got[got >= 0]
            (ledger.abort if chance.random() < 0.1 else ledger.commit)(got)
            copied = ledger.find(rest)[:2]
            copied = copied[copied >= 0]
            ledger.pin(copied)
            ledger.unpin(copied, used=False)
            ledger.unpin(held)
            seen["found"] += found
            ledger.check()
        assert ledger.drop() + 0 <= 15 and ledger.used(0) == ledger.used(1) == 0, name


def test_the_default_is_the_cost_aware_policy() -> None:
    assert isinstance(POLICIES[POLICY_DEFAULT](1, 1), CostAware)


def test_a_hot_prefix_outlives_prompts_that_never_come_back() -> None:
    """What least recently used gets wrong: a scan of strangers between two uses of a prompt."""
    hits = {}
    for name, make in POLICIES.items():
        policy, slot_of, key_in = make(100, 100), {}, {}
        free, count, strangers = list(range(100)), 0, 1000
        for turn in range(400):
            hot = turn % 4 == 0
            prompt = list(range(20)) if hot else list(range(strangers, strangers + 40))
            strangers += 0 if hot else 40
            there = [slot_of[n] for n in prompt if n in slot_of]
            count += len(there)
            policy.remove(array(there))
            new = [n for n in prompt if n not in slot_of]
            gone = policy.victims(max(0, len(new) - len(free))).tolist()
            for slot in gone:
                del slot_of[key_in[slot]]
            free += gone
            slots = [free.pop() for _ in new]
            slot_of |= dict(zip(new, slots, strict=True))
            key_in |= dict(zip(slots, new, strict=True))
            policy.admit(array(slots[::-1]), [key(n) for n in new[::-1]], array([-1] * len(new)))
            policy.insert(array(there[::-1]))
        hits[name] = count
    assert hits["lru"] == 0
    assert hits["cost"] > 0.8 * 99 * 20 and hits["s3fifo"] > 0.8 * 99 * 20
