"""The parts of the policies: what is remembered, what is learned, the order of runs; and that `check` finds damage."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

from stowage.cache.ledger import Ledger
from stowage.cache.policy import ARC, LRU, S3FIFO, CostAware, cost
from stowage.cache.policy.hazard import CLASSES, NEVER, SPANS, Hazard, class_of
from stowage.cache.policy.history import History, fingerprints
from stowage.cache.policy.native import cost_aware
from stowage.cache.policy.runs import HELD, OUT, Runs
from tests.policy_models import array, key

NOBODY = array([-1])


def test_keys_of_any_length_have_fingerprints_of_their_own() -> None:
    keys = [b"a", b"a" * 31, b"a" * 32, *(key(number) for number in range(2000))]
    assert len(set(fingerprints(keys).tolist())) == len(keys) and fingerprints(keys).min() > 0
    assert fingerprints(keys[3:]).tolist() == fingerprints(keys)[3:].tolist()


def test_what_was_put_is_found_once() -> None:
    history = History(100)
    prints = fingerprints([key(number) for number in range(50)])
    places, left = history.put(prints)
    assert len(set(places.tolist())) == 50 and not left.any()
    again, left = history.put(prints[:3])
    assert again.tolist() == places[:3].tolist() and left.all()
    assert history.take(prints).tolist() == places.tolist()
    assert history.take(prints).tolist() == [-1] * 50 and len(history) == 0


def test_a_past_of_sixteen_times_the_slots_has_an_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cost, "_REMEMBERED_MAX", 4096)
    for slots, remembered in ((100, 1600), (256, 4096), (2000, 4096), (30_000, 30_000)):
        assert CostAware(1, slots)._history.capacity == History(remembered).capacity
        assert History(remembered).capacity >= remembered


def test_of_a_full_row_the_entry_that_was_put_first_leaves() -> None:
    history = History(1)
    same_row = [number for number in range(1, 2000) if number % 8 == 5][:10]
    prints = np.array(same_row, np.uint64)
    for one in range(8):
        history.put(prints[one : one + 1])
    history.put(prints[:1])  # put again: now it is the youngest
    _, left = history.put(prints[8:10])
    assert left.all()
    assert (history.take(prints) >= 0).tolist() == [True, False, False, True, True, True, True, True, True, True]
    places, _ = history.put(prints)
    assert np.count_nonzero(places < 0) == 2, "a batch of ten has no room in a row of eight"


def test_classes_tell_how_often_and_how_quickly() -> None:
    uses, gaps = array([0, 1, 1, 1, 4, 7, 8, 10**6]), array([NEVER, 3, 15, NEVER, 3, 3, 3, 3])
    levels, spans = np.divmod(class_of(uses, gaps), SPANS)
    assert levels.tolist() == [0, 1, 1, 1, 4, 4, 5, 8]
    assert spans.tolist() == [0, 2, 3, SPANS - 1, 2, 2, 2, 2]


def learn(hazard: Hazard, now: int) -> None:
    """All steps at once."""
    for _ in hazard.learning(now):
        pass


def taught(life: Callable[[Hazard, int], None], rounds: int = 2000) -> Hazard:
    hazard = Hazard(1000)
    for now in range(1, rounds):
        life(hazard, now)
    learn(hazard, rounds)
    return hazard


def test_a_class_that_comes_back_sooner_is_worth_more() -> None:
    """Class 1 comes back after ten uses, class 2 after a thousand; class 0 never."""

    def life(hazard: Hazard, now: int) -> None:
        hazard.wait(array([0, SPANS + 3, SPANS + 7]), now)
        for of_class, gap in ((SPANS + 3, 10), (SPANS + 7, 1000)):
            if now > gap:
                hazard.reused(array([of_class]), array([now - gap]), now)

    hazard = taught(life)
    stranger, quick, slow = hazard.index[[0, SPANS + 3, SPANS + 7], 0].tolist()
    assert quick > slow > stranger
    ages = hazard.index[SPANS + 3]
    assert ages[6] >= ages[0] and ages[12] < ages[6], "past the age at which it comes back, it does not"


def life_of_many_classes(hazard: Hazard, now: int) -> None:
    hazard.wait(array([0, *range(SPANS + 2, SPANS + 60)]), now)
    gaps = np.arange(2, max(2, min(60, now)))
    hazard.reused(SPANS + gaps, now - gaps, now)


def test_learning_in_steps_is_learning_at_once_and_changes_the_index_as_a_whole() -> None:
    at_once, in_steps = (taught(life_of_many_classes, 300) for _ in range(2))
    before = in_steps.index.copy()
    for hazard in (at_once, in_steps):
        for now in range(300, 600):
            life_of_many_classes(hazard, now)
    steps = 0
    for _ in in_steps.learning(600):
        steps += 1
        assert np.array_equal(in_steps.index, before), "half of an index"
        life_of_many_classes(in_steps, 600 + steps)  # too late for this time
        in_steps.fade()
    learn(at_once, 600)
    assert steps > 2 and np.array_equal(in_steps.index, at_once.index) and not np.array_equal(in_steps.index, before)


@pytest.mark.parametrize("make", [CostAware, cost_aware])
def test_a_batch_of_victims_waits_for_one_step_of_what_is_learned(
    make: Callable[[int], CostAware], monkeypatch: pytest.MonkeyPatch
) -> None:
    steps: list[str] = []
    learning = Hazard.learning

    def counted(hazard: Hazard, now: int) -> Iterator[None]:
        for _ in learning(hazard, now):
            steps.append("step")
            yield
        steps.append("done")

    monkeypatch.setattr(Hazard, "learning", counted)
    monkeypatch.setattr("stowage.cache.policy.hazard._ROWS_AT_ONCE", 1)
    policy = make(64)
    busy = 0
    for number in range(60):
        slots = np.arange(number % 2 * 32, number % 2 * 32 + 32)
        policy.admit(slots, [key(32 * number + at) for at in range(32)], np.full(32, -1))
        policy.insert(slots)
        before = len(steps)
        policy.victims(32)
        assert len(steps) <= before + 1
        busy += len(steps) > before
        policy.check()
        if "done" in steps:
            break
    assert steps.count("step") > 2 and steps[-1] == "done" and policy.hazard.index.any()
    assert busy == len(steps) == number - 6, "what was begun was left alone for a while"


def test_before_anything_was_learned_all_are_equal_and_what_was_not_seen_is_average() -> None:
    assert not Hazard(10).index.any()
    hazard = taught(lambda hazard, now: hazard.wait(array([0]), now), rounds=50)
    assert len(set(hazard.index[1:, 5].tolist())) == 1 and len(hazard.index) == CLASSES


def test_who_waits_is_counted_when_time_jumps_far() -> None:
    hazard = Hazard(256)
    hazard.wait(array([0, 0, 5]), 1)
    hazard.wait(array([5]), 300)
    hazard.wait(array([5]), 10_000_000)
    hazard.check(5)
    hazard.reused(array([5]), array([1]), 10_000_001)
    hazard.forgotten(array([0, 5]), array([1, 300]), 10_000_001)
    hazard.check(2)
    with pytest.raises(AssertionError, match="not as counted"):
        hazard.check(3)
    hazard.fade()
    hazard._used += 5
    with pytest.raises(AssertionError, match="more uses than waits"):
        hazard.check(2)


def test_runs_keep_the_oldest_and_the_youngest_of_each_class() -> None:
    runs = Runs(10)
    runs.append(array([1, 2, 3]), array([0, 7, 0]), 5)
    runs.append(array([4]), array([0]), 6)
    runs.append(array([5]), array([0]), 7)
    ends = [(run.of_class, run.time, run.slots[runs.live(run)].tolist()) for run in runs.ends()]
    assert ends == [(0, 5, [1, 3]), (0, 7, [5]), (7, 5, [2])]
    runs.append(array([1, 5, 2]), array([0, 0, 0]), 8)
    assert [run.slots[runs.live(run)].tolist() for run in runs.ends()] == [[3], [1, 5, 2]]
    runs.check()


def test_runs_forget_dead_entries() -> None:
    runs = Runs(4)
    for time in range(500):
        runs.append(array([time % 4, (time + 1) % 4]), array([time % 3, 0]), time)
        assert sum(len(run.slots) for run in runs) <= 2 * 4 + 64
    runs.check()
    runs.stamp[:] = OUT
    runs.append(array([0] * 90), array([1] * 90), 500)
    runs.check()
    assert [run.slots[runs.live(run)].tolist() for run in runs.ends()] == [[0]]


def test_tails_leave_before_heads_and_a_head_goes_when_its_tails_have_gone() -> None:
    """Chunk 0 is used again, its children are not: it stays. A stranger's chunk without children goes before it."""
    policy = CostAware(8)
    policy.admit(array([2, 1, 0]), [key(2), key(1), key(0)], array([1, 0, -1]))
    policy.admit(array([4, 3]), [key(4), key(3)], array([0, 0]))
    assert policy.victims(1).tolist() == [2]
    assert policy.victims(2).tolist() == [1, 4]
    policy.check()
    assert policy.victims(9).tolist() == [3, 0]


def test_a_head_that_is_older_than_its_tail_waits_for_it() -> None:
    policy = CostAware(8)
    policy.admit(array([0]), [key(0)], NOBODY)
    policy.admit(array([1]), [key(1)], array([0]))
    policy.admit(array([2]), [key(2)], array([1]))
    policy.check()
    assert policy.victims(1).tolist() == [2], "the tail, although it is the youngest"
    policy.check()
    assert policy.victims(1).tolist() == [1] and policy.victims(1).tolist() == [0]


def test_a_head_goes_when_its_tails_are_all_in_use() -> None:
    policy = CostAware(4)
    policy.admit(array([0]), [key(0)], NOBODY)
    policy.admit(array([1]), [key(1)], array([0]))
    policy.remove(array([1]))
    assert policy.victims(2).tolist() == [0] and len(policy) == 0
    policy.insert(array([1]))
    policy.check()
    policy.admit(array([0]), [key(9)], NOBODY)
    assert sorted(policy.victims(2).tolist()) == [0, 1], "what is in the slot now is nobody's parent"


def test_a_chunk_that_was_held_back_and_is_used_again_is_not_due() -> None:
    policy = CostAware(4)
    policy.admit(array([0]), [key(0)], NOBODY)
    policy.admit(array([1]), [key(1)], array([0]))
    policy.admit(array([2]), [key(2)], NOBODY)
    assert policy.victims(0).tolist() == []
    assert policy.victims(1).tolist() == [1], "0 was older, and held back for 1"
    policy.insert(array([0]))
    assert policy.victims(2).tolist() == [2, 0]


def test_copies_say_nothing_about_worth() -> None:
    policy = CostAware(4)
    policy.admit(array([0, 1]), [key(0), key(1)], array([-1, -1]))
    policy.remove(array([0]))
    policy.insert(array([0]), used=False)
    assert policy._uses.tolist()[:2] == [0, 0]
    policy.insert(array([1, 1]))
    assert policy._uses.tolist()[:2] == [0, 1]
    policy.check()


def test_what_left_goes_on_where_it_was_when_it_comes_back() -> None:
    policy = CostAware(4)
    for turn in range(5):
        policy.admit(array([turn % 4]), [key(7)], NOBODY)
        assert policy._uses[turn % 4] == turn
        policy.check()
        assert policy.victims(1).tolist() == [turn % 4]
    policy.admit(array([0, 1]), [key(8), key(8)], array([-1, -1]))
    assert sorted(policy.victims(2).tolist()) == [0, 1]
    policy.check()


def test_learning_fades() -> None:
    """So many uses that what was learned first counts half, again and again."""
    policy = CostAware(2)
    for turn in range(1700):
        policy.admit(array([turn % 2]), [key(turn)], NOBODY)
        policy.victims(1)
    counted = policy.hazard._ended.sum()
    assert counted < 1700 - len(policy._history)
    policy.check()


def test_a_slot_that_its_owner_freed_is_not_remembered() -> None:
    for policy in (CostAware(4), S3FIFO(4), ARC(4), LRU(4)):
        policy.admit(array([0]), [key(0)], NOBODY)
        policy.remove(array([0]))
        policy.admit(array([0]), [key(1)], NOBODY)
        policy.check()
        assert len(policy) == 1 and policy.victims(5).tolist() == [0]


DAMAGE: list[tuple[str, Callable[[int], Any], Callable[[Any], object]]] = [
    ("a slot without a chunk is evictable", CostAware, lambda p: p._here.__setitem__(0, False)),
    ("children are not as counted", CostAware, lambda p: p._kids.__setitem__(0, 9)),
    ("a stamped slot has no entry", CostAware, lambda p: p._runs.stamp.__setitem__(0, 77)),
    ("entries are not as counted", CostAware, lambda p: setattr(p._runs, "_entries", 1)),
    ("runs are out of order", CostAware, lambda p: setattr(p._runs.ends()[0], "time", 99)),
    ("a chunk that is held is not listed", CostAware, lambda p: p._runs.stamp.__setitem__(2, HELD)),
    (
        "a chunk without children is held, and not due",
        CostAware,
        lambda p: (p._runs.stamp.__setitem__(2, HELD), p._held.append(2)),
    ),
    ("a fingerprint is remembered twice", CostAware, lambda p: p._history._prints.__setitem__((0, slice(2)), 8)),
    ("a fingerprint is in another's row", CostAware, lambda p: p._history._prints.__setitem__((0, 0), 1)),
    ("chunks that wait are not as counted", CostAware, lambda p: p._here.__setitem__(3, True)),
    ("a queue is not as long as counted", S3FIFO, lambda p: p._lengths.__setitem__(0, 9)),
    ("a slot is in another's queue", S3FIFO, lambda p: p._queue_of.__setitem__(0, 1)),
    ("an evictable slot is in no queue", S3FIFO, lambda p: p._evictable.__setitem__(3, True)),
    ("", S3FIFO, lambda p: p._uses.__setitem__(0, 9)),
    ("a slot is in another's order", ARC, lambda p: p._where.__setitem__(0, 1)),
    ("an order is not as long as counted", ARC, lambda p: p._lengths.__setitem__(0, 9)),
    ("what left is not as counted", ARC, lambda p: p._left.__setitem__(0, 9)),
    ("the share is out of range", ARC, lambda p: setattr(p, "share", 99.0)),
]


@pytest.mark.parametrize(("says", "make", "damage"), DAMAGE)
def test_check_finds(says: str, make: Callable[[int], Any], damage: Callable[[Any], object]) -> None:
    policy = make(8)
    policy.admit(array([2, 1, 0]), [key(2), key(1), key(0)], array([1, 0, -1]))
    policy.admit(array([5]), [key(5)], NOBODY)
    policy.insert(array([2]))
    policy.check()
    damage(policy)
    with pytest.raises(AssertionError, match=f"^{says}"):
        policy.check()


def test_the_ledger_tells_a_policy_which_chunk_comes_before_which() -> None:
    told: list[tuple[list[bytes], list[int]]] = []

    class Listening(LRU):
        def admit(self, slots: np.ndarray, keys: list[bytes], parents: np.ndarray) -> None:
            told.append((keys, parents.tolist()))
            super().admit(slots, keys, parents)

    ledger = Ledger([8], Listening)
    full = np.ones(8, np.uint64)

    def store(numbers: list[int], after: int | None = None) -> list[int]:
        names = [key(number) for number in numbers]
        slots = ledger.reserve(0, names, full[: len(names)], None if after is None else key(after))
        ledger.commit(slots[slots >= 0])
        return slots.tolist()

    first = store([1, 2, 3])
    assert told.pop() == ([key(3), key(2), key(1)], [first[1], first[0], -1])
    more = store([3, 4, 5], after=2)
    assert more[0] == -1
    assert told.pop() == ([key(5), key(4)], [more[1], first[2]])
    store([6], after=5)
    assert told.pop() == ([key(6)], [more[2]])
    stranger = ledger.reserve(0, [key(7)], full[:1], key(6))
    ledger.drop()
    filled = ledger.fill(0, [key(8 + place) for place in range(7)])
    ledger.commit_filled(filled, full[:7])
    assert told.pop()[1] == [*filled.tolist()[-2::-1], -1]
    ledger.commit(stranger)
    assert told.pop() == ([key(7)], [-1]), "what it came after has left, and its slot has another chunk"
    ledger.check()
