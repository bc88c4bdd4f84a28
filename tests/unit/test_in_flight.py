"""Flights: what a report makes of a transfer, and what being late means."""

from __future__ import annotations

import numpy as np
import pytest

from stowage.cache.circuit_breaker import FAILURES_MAX, OPEN_S, Breaker
from stowage.cache.in_flight import Flight, Flights

FULL = 0b0111


def flight(*names: int, is_load: bool = True, deadline_s: float = 10.0, tier: int = 0) -> Flight:
    full = np.full(len(names), FULL, np.uint64)
    return Flight(tier, is_load, [bytes([name]) * 32 for name in names], np.array(names), full, 100, deadline_s)


def begun(*flights: Flight) -> tuple[Flights, list[Breaker]]:
    breakers = [Breaker(), Breaker()]
    under_way = Flights(breakers)
    for number, one in enumerate(flights):
        under_way.begin(number, one)
    return under_way, breakers


def report(flights: Flights, number: int, ok: list[bool], masks: list[int]) -> tuple[list[bool], list[int]]:
    ended = flights.end(number, np.array(ok, bool), np.array(masks, np.uint64), 0.0)
    assert ended is not None
    return ended[1].tolist(), ended[2].tolist()


def test_a_chunk_arrived_only_if_the_tier_says_so_and_it_has_a_valid_block() -> None:
    flights, _ = begun(flight(1, 2, 3, 4, 5))
    ok, masks = report(flights, 0, [True, True, False, False, True], [FULL, 0, FULL, 0, 0b0001])
    assert ok == [True, False, False, False, True]
    assert masks[0] == FULL and masks[4] == 0b0001


def test_blocks_that_the_group_does_not_have_are_not_valid() -> None:
    flights, _ = begun(flight(1, 2))
    assert report(flights, 0, [True, True], [0b1000, 0b1001]) == ([False, True], [0, 1])


def test_the_mask_of_a_stored_chunk_says_nothing() -> None:
    flights, _ = begun(flight(1, 2, is_load=False))
    assert report(flights, 0, [True, False], [0, FULL]) == ([True, False], [0, FULL])


@pytest.mark.parametrize(("ok", "masks"), [(1, 2), (2, 1), (3, 2), (2, 3), (0, 0)])
def test_a_report_that_does_not_fit_its_transfer_is_one_of_failure(ok: int, masks: int) -> None:
    flights, _ = begun(flight(1, 2))
    assert report(flights, 0, [True] * ok, [FULL] * masks) == ([False, False], [0, 0])


def test_each_tier_is_told_how_its_flights_went() -> None:
    flights, breakers = begun(*[flight(n, tier=1) for n in range(FAILURES_MAX)], flight(99))
    for number in range(FAILURES_MAX):
        report(flights, number, [False], [0])
    assert [breaker.state(0.0) for breaker in breakers] == ["closed", "open"]
    flights.begin(100, flight(1, 2, tier=1))
    report(flights, 100, [False, True], [0, FULL])
    assert breakers[1].state(0.0) == "closed", "one chunk that arrived is a success"


def test_a_refusal_is_no_failure_and_lets_another_be_the_probe() -> None:
    """A tier that is full takes no stores, and brings what it has."""
    flights, breakers = begun(*[flight(n, is_load=False) for n in range(2 * FAILURES_MAX)])
    none = np.zeros(1, bool), np.zeros(1, np.uint64)
    for number in range(FAILURES_MAX - 1):
        flights.end(number, *none, 0.0, refused=False)
    for number in range(FAILURES_MAX - 1, 2 * FAILURES_MAX - 1):
        flights.end(number, *none, 0.0, refused=True)
    assert breakers[0].state(0.0) == "closed"
    flights.end(2 * FAILURES_MAX - 1, *none, 0.0)
    assert breakers[0].state(0.0) == "open" and not breakers[0].allows(0.0)
    flights.begin(50, flight(50, is_load=False))
    assert not breakers[0].allows(OPEN_S)
    flights.end(50, *none, OPEN_S, refused=True)
    assert breakers[0].allows(OPEN_S), "somebody has to find out"
    flights.begin(51, flight(51))
    flights.mark_late(OPEN_S + 5)
    assert breakers[0].state(OPEN_S + 5) == "open"
    flights.begin(52, flight(52))
    flights.end(51, *none, OPEN_S + 11, refused=True)
    assert not breakers[0].allows(OPEN_S + 11), "one that is late is not the probe any more"


def test_late_is_at_the_deadline_and_once() -> None:
    flights, breakers = begun(flight(1, 2), flight(3, is_load=False), flight(4, deadline_s=11.0))
    assert flights.mark_late(9.9) == 0 and sorted(flights.deadlines_s()) == [10.0, 10.0, 11.0]
    assert flights.mark_late(10.0) == 2 and flights.mark_late(10.5) == 0
    assert flights.deadlines_s() == [11.0]
    assert flights.late_keys == {bytes([1]) * 32, bytes([2]) * 32}, "nobody asks for what is being stored"
    flights.check()
    for _ in range(FAILURES_MAX - 3):
        breakers[0].failed(10.0)
    report(flights, 0, [False, False], [0, 0])
    assert flights.late_keys == set() and breakers[0].state(10.0) == "closed", "a late failure counts once"
    breakers[0].failed(10.0)
    assert breakers[0].state(10.0) == "open", "each late flight was a failure of its tier"


def test_loads_and_stores_are_told_apart() -> None:
    load, store = flight(1), flight(2, is_load=False)
    flights, _ = begun(load, store)
    assert (flights.loads(), flights.stores(), len(flights)) == ([load], [store], 2)
    assert flights.end(7, np.zeros(1, bool), np.zeros(1, np.uint64), 0.0) is None


def test_the_check_finds_late_keys_that_belong_to_no_late_flight() -> None:
    flights, _ = begun(flight(1), flight(2, is_load=False))
    flights.mark_late(10.0)
    flights.check()
    flights.late_keys.add(bytes(32))
    with pytest.raises(AssertionError, match=r"^the overdue keys are not those of the overdue flights$"):
        flights.check()
