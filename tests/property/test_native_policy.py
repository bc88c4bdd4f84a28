"""The cost-aware policy in C and the one with arrays: the same operations, the same victims, the same state.

And what the kernel refuses: nothing that it is given may crash it, and what it refuses changes nothing.
"""

from __future__ import annotations

import gc
import random
import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stowage.cache.policy import POLICIES, CostAware, cost
from stowage.cache.policy.hazard import AGES, best_rate
from stowage.cache.policy.native import NativeCostAware, cost_aware, quick_rate
from stowage.native import extension, is_built
from tests.native import needs_native
from tests.policy_models import Arena, array, key


def state(policy: CostAware) -> dict[str, object]:
    """All that decides what a policy does next. What a slot without a chunk says is nobody's business."""
    slots = np.flatnonzero(policy._here)
    prints, order = policy._history.tables
    used, ended, waiting, index = policy.hazard.tables
    columns = (policy._print, policy._uses, policy._gap, policy._last, policy._class, policy._kids)
    return {
        "slots": slots.tolist(),
        "chunks": [column[slots].tolist() for column in columns],
        "parents": policy._parents(slots).tolist(),
        "order": policy.order(),
        "evictable": len(policy),
        "remembered": prints.tobytes(),
        # Which entry of a row is older counts, not by how much.
        "age": np.where(prints, order, -1).argsort(axis=1, kind="stable")[prints.all(axis=1)].tolist(),
        "past": policy._past[prints.reshape(-1) != 0].tolist(),
        "tables": [table.tobytes() for table in (used, ended, waiting, index)],
    }


class Life(Arena):
    """An arena whose slots are also used twice in one batch, now and then."""

    def step(self) -> None:
        super().step()
        idle = [slot for slot in self.slot_of.values() if slot not in self.pinned]
        if idle and self.chance.random() < 0.2:
            self.policy.insert(
                array(self.chance.choices(idle, k=self.chance.randint(1, 6))), self.chance.random() < 0.5
            )


@needs_native
@given(seed=st.integers(0, 1 << 30), slots=st.integers(1, 30), keys=st.sampled_from((20, 200, 5000)))
@settings(max_examples=12, deadline=None)
def test_both_do_the_same(seed: int, slots: int, keys: int) -> None:
    """Lives that are long enough to learn, to fade, and to forget what left first."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cost, "_LEARN_MIN", 8)
        patch.setattr(cost, "_MEMORY", 1)
        one = Life(CostAware(slots), slots, random.Random(seed), keys=keys)
        other = Life(NativeCostAware(slots), slots, random.Random(seed), keys=keys)
        for step in range(120):
            one.step()
            other.step()
            assert one.evicted == other.evicted
            if step % 20 == 0:
                assert state(one.policy) == state(other.policy)
                other.check()
        assert state(one.policy) == state(other.policy)


def with_three_chunks() -> NativeCostAware:
    policy = NativeCostAware(8)
    policy.admit(array([2, 1, 0]), [key(2), key(1), key(0)], array([1, 0, -1]))
    policy.remove(array([1]))
    return policy


NAMES = [key(7), key(8)]
REFUSED: list[tuple[str, type[Exception], Callable[[Any], object]]] = [
    ("a slot that is too large", IndexError, lambda k: k.insert(array([0, 8]), True)),
    ("a slot below 0", IndexError, lambda k: k.insert(array([0, -1]), True)),
    ("a slot that is far too large", IndexError, lambda k: k.remove(array([0, 1 << 40]))),
    ("slots of 32 bits", TypeError, lambda k: k.insert(np.zeros(4, np.int32), True)),
    ("slots that are floats", TypeError, lambda k: k.remove(np.zeros(4))),
    ("slots in two dimensions", TypeError, lambda k: k.remove(np.zeros((2, 2), np.int64))),
    ("slots in no dimension", TypeError, lambda k: k.remove(np.zeros((), np.int64))),
    ("slots that are no array", TypeError, lambda k: k.remove([0, 1])),
    ("a key too many", ValueError, lambda k: k.admit(array([3]), NAMES, array([-1]))),
    ("a parent too many", ValueError, lambda k: k.admit(array([3]), NAMES[:1], array([-1, 0]))),
    ("a parent that is no slot", IndexError, lambda k: k.admit(array([3, 4]), NAMES, array([-1, 8]))),
    ("a parent below -1", IndexError, lambda k: k.admit(array([3, 4]), NAMES, array([-1, -2]))),
    ("parents that are no array", TypeError, lambda k: k.admit(array([3, 4]), NAMES, [0, 1])),
    ("a key that is text", TypeError, lambda k: k.admit(array([3, 4]), [NAMES[0], "text"], array([-1, -1]))),
    ("keys in a tuple", TypeError, lambda k: k.admit(array([3, 4]), tuple(NAMES), array([-1, -1]))),
    ("too few arguments", TypeError, lambda k: k.admit(array([3]), NAMES[:1])),
    ("no word about use", TypeError, lambda k: k.insert(array([0]))),
    ("room that cannot be written", (ValueError, BufferError), lambda k: k.victims(b"12345678")),
    ("room for floats", TypeError, lambda k: k.victims(np.zeros(3))),
    ("room with holes", (ValueError, BufferError), lambda k: k.victims(np.zeros(6, np.int64)[::2])),
]


@needs_native
@pytest.mark.parametrize(("what", "error", "call"), REFUSED, ids=[what for what, _, _ in REFUSED])
def test_the_kernel_refuses_and_nothing_has_changed(
    what: str, error: type[Exception], call: Callable[[Any], object]
) -> None:
    policy, untouched = with_three_chunks(), with_three_chunks()
    with pytest.raises(error):
        call(policy._kernel)
    assert state(policy) == state(untouched)
    policy.check()


@needs_native
@pytest.mark.parametrize("place", range(17))
def test_a_kernel_takes_no_array_of_another_size(place: int) -> None:
    policy = CostAware(8)
    lent = [*policy.arrays()]
    assert len(lent) == 17
    numbers = (8, len(policy._history.tables[0]), policy.hazard.width)
    assert len(extension.Kernel(tuple(lent), *numbers)) == 0
    lent[place] = np.concatenate((lent[place].ravel(), lent[place].ravel()))
    with pytest.raises(ValueError, match="not as long, or as wide"):
        extension.Kernel(tuple(lent), *numbers)
    lent[place] = lent[place][::2]
    with pytest.raises((ValueError, BufferError)):
        extension.Kernel(tuple(lent), *numbers)


@needs_native
def test_a_kernel_takes_no_numbers_out_of_range() -> None:
    policy = CostAware(8)
    lent, rows, width = tuple(policy.arrays()), len(policy._history.tables[0]), policy.hazard.width
    for numbers in ((-1, rows, width), (8, 0, width), (8, rows + 1, width), (8, rows, 0), (1 << 40, rows, width)):
        with pytest.raises(ValueError, match=r"not as long|out of range"):
            extension.Kernel(lent, *numbers)
    with pytest.raises(ValueError, match="other arrays"):
        extension.Kernel(lent[:-1], 8, rows, width)


@needs_native
def test_arrays_that_somebody_scribbles_into_crash_nothing() -> None:
    """What is read from them is confined to its range: victims may be wrong, slots stay slots."""
    chance = np.random.default_rng(3)
    for _ in range(60):
        policy = NativeCostAware(8)
        arena = Life(policy, 8, random.Random(int(chance.integers(1 << 30))), keys=40)
        for _ in range(10):
            arena.step()
        for lent in policy.arrays():
            lent.view(np.uint8).reshape(-1)[:] = chance.integers(0, 256, lent.nbytes, np.uint8)
        for _ in range(20):
            slots = array(chance.permutation(8)[:4].tolist())
            policy._kernel.insert(slots, bool(chance.integers(2)))
            policy._kernel.admit(slots, [key(int(slot)) for slot in slots], slots - 1)
            taken = np.full(3, -1, np.int64)
            count = policy._kernel.victims(taken)
            assert count == 3 and set(taken.tolist()) <= set(range(8))


@needs_native
def test_what_the_kernel_was_lent_is_free_again_when_it_ends() -> None:
    """Held buffers are exports: an array of bytes that is exported cannot grow. And nothing that it is given leaks."""
    policy = CostAware(4)
    lent = [*policy.arrays()]
    raw = bytearray(lent[0].tobytes())
    lent[0] = np.frombuffer(raw, np.bool_)
    kernel = extension.Kernel(tuple(lent), 4, len(policy._history.tables[0]), policy.hazard.width)
    slots, parents, names = array([0, 1]), array([-1, 0]), [key(3), key(4)]
    before = [sys.getrefcount(one) for one in (slots, parents, names, names[0])]
    for _ in range(100):
        kernel.admit(slots, names, parents)
        kernel.insert(slots, True)
        kernel.remove(slots)
        kernel.runs(), kernel.held(), kernel.due()
    assert [sys.getrefcount(one) for one in (slots, parents, names, names[0])] == before
    lent.clear()
    with pytest.raises(BufferError):
        raw.append(0)
    del kernel
    gc.collect()
    raw.append(0)


def test_the_kernel_is_chosen_unless_it_is_not_wanted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("STOWAGE_PURE_PYTHON", raising=False)
    assert type(cost_aware(4)) is (NativeCostAware if is_built() else CostAware)
    assert type(POLICIES["cost"](4, 4)) is type(cost_aware(4))
    monkeypatch.setenv("STOWAGE_PURE_PYTHON", "0")
    assert type(cost_aware(4)) is (NativeCostAware if is_built() else CostAware)
    monkeypatch.setenv("STOWAGE_PURE_PYTHON", "1")
    assert type(cost_aware(4)) is CostAware
    monkeypatch.delenv("STOWAGE_PURE_PYTHON")
    monkeypatch.setattr("stowage.native.extension", None)
    assert type(cost_aware(4)) is CostAware


@needs_native
@given(seed=st.integers(0, 1 << 30))
@settings(max_examples=30, deadline=None)
def test_the_best_rates_are_the_same(seed: int) -> None:
    """Found by merging stretches, and by trying all of them. Hazards of many sizes, and none at all."""
    chance = np.random.default_rng(seed)
    hazard = np.minimum(chance.random((5, AGES)) ** chance.integers(1, 30), 0.95)
    hazard[0, chance.integers(0, AGES) :] = 1e-9
    plain, quick = best_rate(hazard), quick_rate(hazard)
    assert np.allclose(plain, quick, rtol=1e-12, atol=0)


@needs_native
def test_rates_are_refused_for_what_is_no_table_of_ages() -> None:
    for hazard, rates in (
        (np.zeros(AGES, np.int64), np.zeros(AGES)),
        (np.zeros(AGES), np.zeros(AGES, np.int64)),
        (np.zeros(AGES), np.zeros(2 * AGES)),
        (np.zeros(AGES - 1), np.zeros(AGES - 1)),
    ):
        with pytest.raises(ValueError, match="must be float64, and alike"):
            extension.best_rates(hazard, rates)
    with pytest.raises(TypeError, match="takes 2 arguments"):
        extension.best_rates(np.zeros(AGES))


class Both:
    """The two policies side by side: every call to both, and the same victims."""

    def __init__(self, slots: int) -> None:
        self.pair = (CostAware(slots), NativeCostAware(slots))

    def admit(self, slots: list[int], numbers: list[int], parents: list[int]) -> None:
        for policy in self.pair:
            policy.admit(array(slots), [key(number) for number in numbers], array(parents))

    def insert(self, slots: list[int]) -> None:
        for policy in self.pair:
            policy.insert(array(slots))

    def victims(self, count: int) -> list[int]:
        one, other = (policy.victims(count).tolist() for policy in self.pair)
        assert one == other
        return one

    def check(self) -> None:
        one, other = self.pair
        assert state(one) == state(other)
        one.check()
        other.check()


@needs_native
def test_both_forget_what_left_first_when_rows_are_full() -> None:
    """Far more keys than are remembered, in large batches, some of them back again."""
    both, chance = Both(40), random.Random(5)
    for turn in range(60):
        numbers = chance.sample(range(40 * turn + 40), 40)
        both.admit(list(range(40)), numbers, [-1] * 40)
        both.victims(40)
        both.check()
    assert len(both.pair[1]._history) > 900, "rows were full"


@needs_native
def test_both_count_what_waited_longer_than_the_ring_of_epochs() -> None:
    both = Both(3)
    both.admit([0, 1, 2], [0, 1, 2], [-1, -1, -1])
    assert both.victims(1) == [0]
    for _ in range(40):
        both.insert([1] * 9)
    both.admit([0], [0], [-1])
    both.insert([2])
    both.check()
    both.insert([1] * 5000)
    both.insert([0, 2])
    both.check()


@needs_native
def test_both_hold_a_chunk_that_was_due_and_is_continued_again() -> None:
    both = Both(4)
    both.admit([0], [0], [-1])
    both.admit([1], [1], [0])
    assert both.victims(1) == [1], "0 was older, and held back for 1: it is due now"
    both.check()
    both.admit([2], [2], [0])
    both.check()
    assert both.victims(2) == [2, 0]


@needs_native
def test_a_chunk_that_is_due_again_and_again_is_listed_once() -> None:
    """Its owner replaces the only child of a chunk that is held back, and asks for no victims meanwhile."""
    both = Both(4)
    both.admit([0], [0], [-1])
    both.admit([1], [1], [0])
    assert both.victims(1) == [1]
    for number in range(2, 100):
        both.admit([1], [number], [0])
        assert len(both.pair[0]._due) <= 2 * 4 + 64
    both.check()
    assert both.victims(2) == [1, 0]
