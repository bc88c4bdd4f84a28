"""Loading is not slower than computing, and a tier that was slow once gets another chance."""

from __future__ import annotations

import pytest

from stowage.engine.pace import Pace


def test_what_was_never_measured_is_tried() -> None:
    pace = Pace(load_timeout_s=30)
    assert pace.worth_loading(1000, {1: 10**12})
    pace.computed(1000, 1.0)
    assert pace.worth_loading(1000, {1: 10**12})


def test_slow_tier_is_refused_and_fast_one_is_not() -> None:
    pace = Pace(load_timeout_s=30)
    pace.computed(1000, 1.0)
    pace.loaded(1, 10**6, 1.0)
    pace.loaded(2, 10**9, 1.0)
    assert not pace.worth_loading(100, {1: 10**6})
    assert pace.worth_loading(100, {2: 10**6})
    assert not pace.worth_loading(100, {1: 10**6, 2: 10**6})


def test_refused_tier_is_tried_again() -> None:
    pace = Pace(load_timeout_s=30)
    pace.computed(1000, 1.0)
    pace.loaded(1, 10**6, 1.0)
    tries = next(n for n in range(100) if pace.worth_loading(100, {1: 10**6}))
    assert 5 < tries < 20


def test_deadline_is_the_recompute_within_bounds() -> None:
    pace = Pace(load_timeout_s=30)
    assert pace.load_limit_s(10) == 30
    pace.computed(1000, 1.0)
    assert pace.load_limit_s(2000) == pytest.approx(2.0)
    assert pace.load_limit_s(10**6) == 30
    assert 0 < pace.load_limit_s(1) < 0.1


def test_measurements_are_averaged() -> None:
    pace = Pace(load_timeout_s=30)
    pace.computed(1000, 1.0)
    for _ in range(40):
        pace.computed(500, 1.0)
    assert pace.prefill_tokens_per_s == pytest.approx(500, rel=0.01)
