"""The circuit breaker: closed, open, half open, and back. Time is a number."""

import pytest

from stowage.cache.circuit_breaker import FAILURES_MAX, OPEN_S, Breaker

T = 100.0


def opened_at(now_s: float) -> Breaker:
    breaker = Breaker()
    for _ in range(FAILURES_MAX):
        breaker.failed(now_s)
    return breaker


def test_it_opens_at_the_last_failure_in_a_row_and_not_before() -> None:
    breaker = Breaker()
    for _ in range(FAILURES_MAX - 1):
        breaker.failed(T)
        assert breaker.allows(T) and (breaker.state(T), breaker.opened) == ("closed", 0)
    breaker.failed(T)
    assert not breaker.allows(T) and (breaker.state(T), breaker.opened) == ("open", 1)
    breaker.check()


def test_a_success_forgets_every_failure_before_it() -> None:
    breaker = Breaker()
    for _ in range(3):
        for _ in range(FAILURES_MAX - 1):
            breaker.failed(T)
        breaker.succeeded()
    assert breaker.state(T) == "closed" and breaker.opened == 0


def test_it_is_half_open_from_the_end_of_its_time_on() -> None:
    breaker = opened_at(T)
    assert not breaker.allows(T + OPEN_S - 0.001) and breaker.state(T + OPEN_S - 0.001) == "open"
    assert breaker.allows(T + OPEN_S) and breaker.state(T + OPEN_S) == "half-open"


def test_one_probe_at_a_time() -> None:
    breaker = opened_at(T)
    now_s = T + OPEN_S
    breaker.begin()
    breaker.check()
    assert not breaker.allows(now_s) and breaker.state(now_s) == "half-open"
    breaker.succeeded()
    assert breaker.allows(now_s) and breaker.state(now_s) == "closed"
    breaker.begin()
    breaker.begin()
    assert breaker.allows(now_s), "a closed breaker lets any number through"


def test_a_probe_that_fails_opens_it_again_from_then_on() -> None:
    breaker = opened_at(T)
    breaker.begin()
    breaker.failed(T + 7.0)
    assert (breaker.state(T + 7.0 + OPEN_S - 0.001), breaker.opened) == ("open", 2)
    assert breaker.allows(T + 7.0 + OPEN_S), "the next probe"


def test_transfers_that_began_before_it_opened_prolong_it_and_are_not_counted_as_openings() -> None:
    breaker = opened_at(T)
    breaker.failed(T + 1.0)
    breaker.failed(T + 2.0)
    assert breaker.opened == 1
    assert breaker.state(T + OPEN_S) == "open" and breaker.state(T + 2.0 + OPEN_S) == "half-open"


@pytest.mark.parametrize(("name", "value"), [("_failures", -1), ("opened", -1), ("_probing", True)])
def test_the_check_finds_what_cannot_be(name: str, value: int) -> None:
    breaker = Breaker()
    breaker.check()
    setattr(breaker, name, value)
    with pytest.raises(AssertionError):
        breaker.check()
