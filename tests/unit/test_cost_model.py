"""Loading is not slower than computing, and a tier that was slow once gets another chance."""

from __future__ import annotations

import pytest

from stowage.cache.cost_model import CostModel


def test_what_was_never_measured_is_tried() -> None:
    cost_model = CostModel(load_timeout_s=30)
    assert cost_model.worth_loading(1000, {1: 10**12})
    cost_model.computed(1000, 1.0)
    assert cost_model.worth_loading(1000, {1: 10**12})


def test_slow_tier_is_refused_and_fast_one_is_not() -> None:
    cost_model = CostModel(load_timeout_s=30)
    cost_model.computed(1000, 1.0)
    cost_model.loaded(1, 10**6, 1.0)
    cost_model.loaded(2, 10**9, 1.0)
    assert not cost_model.worth_loading(100, {1: 10**6})
    assert cost_model.worth_loading(100, {2: 10**6})
    assert not cost_model.worth_loading(100, {1: 10**6, 2: 10**6})


def test_only_the_slowest_tier_is_taken_to_be_faster_after_a_refusal() -> None:
    cost_model = CostModel(load_timeout_s=30)
    cost_model.computed(1000, 1.0)
    cost_model.loaded(1, 10**6, 1.0)
    cost_model.loaded(2, 10**6, 0.01)
    assert not cost_model.worth_loading(100, {1: 10**6, 2: 10**6})
    assert cost_model.bytes_per_s[1] > 10**6 and cost_model.bytes_per_s[2] == 10**8


def test_refused_tier_is_tried_again() -> None:
    cost_model = CostModel(load_timeout_s=30)
    cost_model.computed(1000, 1.0)
    cost_model.loaded(1, 10**6, 1.0)
    tries = next(n for n in range(100) if cost_model.worth_loading(100, {1: 10**6}))
    assert 5 < tries < 20


def test_deadline_is_the_recompute_within_bounds() -> None:
    cost_model = CostModel(load_timeout_s=30)
    assert cost_model.load_limit_s(10) == 30
    cost_model.computed(1000, 1.0)
    assert cost_model.load_limit_s(2000) == pytest.approx(2.0)
    assert cost_model.load_limit_s(10**6) == 30
    assert 0 < cost_model.load_limit_s(1) < 0.1


def test_deadline_before_anything_was_measured_is_the_machines_best() -> None:
    """A disk that hangs right after a start costs no more than the recompute either."""
    cost_model = CostModel(load_timeout_s=30, tokens_per_s_most=1000)
    assert cost_model.load_limit_s(2000) == pytest.approx(2.0)
    assert cost_model.load_limit_s(10**6) == 30
    assert cost_model.worth_loading(2000, {1: 10**12}), "a bound is no measurement"
    cost_model.computed(1000, 2.0)
    assert cost_model.load_limit_s(1000) == pytest.approx(2.0, rel=0.01), "what was measured counts"
    cost_model.forget()
    assert cost_model.load_limit_s(2000) == 30, "nothing is known any more, and everything is tried"


def test_short_pieces_after_long_hits_do_not_make_a_long_prefill_slow() -> None:
    """A forward reads every weight, however few its tokens: here for 0.8 s, and 0.005 s per token."""
    cost_model = CostModel(load_timeout_s=300)
    cost_model.computed(1000, 5.8)
    for _ in range(50):
        cost_model.computed(60, 1.1)
        cost_model.computed(1, 0.805)
    assert cost_model.recompute_s(1000) == pytest.approx(5.0, rel=0.01)
    assert cost_model.recompute_s(64) == pytest.approx(0.32, rel=0.05)
    assert cost_model.recompute_s(16) < 0.1, "the forward itself has to be paid in any case"


def test_a_long_prefill_is_reckoned_from_short_ones() -> None:
    cost_model = CostModel(load_timeout_s=300, tokens_per_s_most=400)
    cost_model.computed(60, 1.1)
    cost_model.computed(1, 0.805)
    assert cost_model.recompute_s(1000) == pytest.approx(5.0, rel=0.01)
    cost_model = CostModel(load_timeout_s=300, tokens_per_s_most=400)
    cost_model.computed(1, 0.805)
    assert cost_model.recompute_s(1000) == pytest.approx(2.5, rel=0.01), "one size tells no slope: the machine's best"


def test_a_prefill_longer_than_a_step_takes_several() -> None:
    cost_model = CostModel(load_timeout_s=300, max_num_batched_tokens=100)
    cost_model.computed(100, 1.0)
    cost_model.computed(1, 0.5)
    assert cost_model.recompute_s(250) == pytest.approx(2 + 0.75 - 0.5, rel=0.02)


def test_measurements_are_averaged() -> None:
    cost_model = CostModel(load_timeout_s=30)
    cost_model.computed(1000, 1.0)
    for _ in range(40):
        cost_model.computed(1000, 2.0)
    assert cost_model.prefill_tokens_per_s == pytest.approx(500, rel=0.01)
    cost_model.computed(1000, 200.0)
    cost_model.computed(1000, 2.0)
    cost_model.computed(1000, 2.0)
    assert cost_model.recompute_s(1000) < 16, "what disturbs a measurement is soon forgotten"


def test_single_tokens_are_no_prefill() -> None:
    cost_model = CostModel(load_timeout_s=30)
    cost_model.computed(1, 0.1)
    assert cost_model.prefill_tokens_per_s == 0


def test_what_missed_its_deadline_is_learned() -> None:
    """Else a slow tier would cost every prompt the time of its recompute, on top of the recompute."""
    cost_model = CostModel(30.0)
    cost_model.computed(1000, 1.0)
    cost_model.missed({1: 4000, 2: 800, 3: 600}, {1: 1000, 2: 800}, 2.0)
    assert cost_model.bytes_per_s == {1: 500.0}  # not of one that was complete, nor of one that was silent
    assert not cost_model.worth_loading(1000, {1: 4000})
    assert cost_model.worth_loading(1000, {2: 4000})


def test_one_disturbed_forward_lets_no_prompt_wait_long() -> None:
    """A process that stood still for minutes: a load that hangs afterwards costs about a recompute all the same."""
    cost_model = CostModel(load_timeout_s=30)
    cost_model.computed(1000, 1.0)
    cost_model.computed(1000, 200.0)
    assert cost_model.load_limit_s(1000) < 2
    for _ in range(12):
        cost_model.computed(1000, 200.0)
    assert cost_model.load_limit_s(1000) == 30, "it is slow indeed"


def test_a_silent_tier_is_waited_for_ever_less_often() -> None:
    """Stores that it takes keep its circuit breaker closed, however few loads it brings in time."""
    cost_model = CostModel(load_timeout_s=30)
    cost_model.computed(1000, 1.0)
    tries = []
    for number in range(200):
        if cost_model.worth_loading(1000, {1: 4000}):
            tries.append(number)
            cost_model.silent(1, 10.0 * number, 10.0 * number + 1)
            cost_model.silent(1, 10.0 * number, 10.0 * number + 1)  # asked at the same time, by another prompt
    assert tries[:2] == [0, 1] and len(tries) < 13 and tries[3] - tries[2] > tries[2] - tries[1] > 2
    assert cost_model.worth_loading(10**6, {1: 4000}), "there is time for it"
    assert not cost_model.worth_loading(1000, {1: 4000})
    cost_model.loaded(1, 4000, 0.1)
    assert cost_model.worth_loading(1000, {1: 4000})


def test_what_is_forgotten_for_good_is_not_measured_again() -> None:
    cost_model = CostModel(30.0, 64, tokens_per_s_most=1e6)
    cost_model.forget(for_good=True)
    for _ in range(3):
        cost_model.computed(64, 1e-6)
        cost_model.delivered({1: 1}, 10.0)
        cost_model.missed({1: 2}, {1: 1}, 10.0)
        cost_model.silent(1, 0.0, 10.0)
        cost_model.bounded(1, 1e-3, 1e-2)
    assert cost_model.worth_loading(64, {1: 1 << 40}) and not cost_model.worth_overlapping(64, {1: 1 << 40})
    assert cost_model.load_limit_s(64) == 30.0 and cost_model.lookup_limit_s(64, 0.5) == 0.5
    cost_model.forget()
    cost_model.computed(64, 1e-6)
    cost_model.delivered({1: 1}, 10.0)
    assert not cost_model.worth_loading(64, {1: 1 << 40})
