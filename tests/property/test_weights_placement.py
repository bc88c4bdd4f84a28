"""Placement of weights: never over a budget, and never short of the least that the error names."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stowage.errors import BudgetError, ConfigError
from stowage.weights.placement import EXPERT_STAGES, Placement, parse_rules, place
from stowage.weights.weight_unit import Delivery, WeightUnit

MIB = 1 << 20


def layer_of(number: int, nbytes: int, pieces: int, experts: int = 0) -> WeightUnit:
    """A layer; with experts, most of it is theirs."""
    name = f"model.layers.{number}"
    if not experts:
        return WeightUnit(name, nbytes, pieces, layer=number)
    apart = WeightUnit(f"{name}.mlp.experts", nbytes // 64 * 60, 2, layer=number, experts=experts)
    return WeightUnit(name, nbytes, pieces + 2, layer=number, apart=(apart,))


@st.composite
def models(draw: st.DrawFn) -> list[WeightUnit]:
    layer_bytes = draw(st.lists(st.integers(1, 40), min_size=1, max_size=3))
    experts = draw(st.sampled_from([0, 0, 2, 8, 64]))
    pieces = draw(st.lists(st.integers(1, 9), min_size=12, max_size=12))
    layers = [
        layer_of(n, layer_bytes[n % len(layer_bytes)] * MIB, pieces[n], experts)
        for n in range(draw(st.integers(1, 12)))
    ]
    ends = [WeightUnit("model.embed_tokens", draw(st.integers(1, 90)) * MIB, 1, rows=True)] * draw(st.integers(0, 1))
    head = [WeightUnit("lm_head", draw(st.integers(1, 90)) * MIB, 1)] * draw(st.integers(0, 1))
    return [*ends, *layers, *head]


def whole_bytes(weight_units: list[WeightUnit]) -> int:
    return sum(c.nbytes for c in weight_units)


def least_of(error: BudgetError) -> int:
    found = re.search(r"at least (\d+) bytes", str(error))
    assert found is not None
    return int(found[1])


@given(models(), st.integers(0, 3 * MIB), st.integers(0, 700 * MIB), st.integers(0, 400 * MIB))
def test_no_budget_is_exceeded_and_the_least_works(
    weight_units: list[WeightUnit], small: int, device: int, host: int
) -> None:
    try:
        found = place(weight_units, small, device, host)
    except BudgetError as error:
        least = least_of(error)
        assert least > device
        found = place(weight_units, small, least, host)
        device = least
        with pytest.raises(BudgetError):
            place(weight_units, small, least - 1, host)
    found.check()
    assert found.device_bytes <= device
    assert found.host_bytes <= host
    assert [c.name for c in found.weight_units if not c.experts] == [c.name for c in weight_units]
    assert whole_bytes(list(found.weight_units)) == whole_bytes(weight_units)


@given(models(), st.integers(0, 600 * MIB), st.integers(0, 300 * MIB), st.integers(0, 100 * MIB))
def test_more_memory_never_reads_more_through_as_deep_a_ring(
    weight_units: list[WeightUnit], device: int, host: int, more: int
) -> None:
    def read(device_bytes: int, host_bytes: int) -> Placement | None:
        try:
            return place(weight_units, 0, device_bytes, host_bytes)
        except BudgetError:
            return None

    before = read(device, host)
    for after in (read(device + more, host), read(device, host + more)):
        if before is not None:
            assert after is not None
            if after.ring_slots == before.ring_slots:
                # Units are not divisible: what is larger may take the place of two that are smaller together.
                largest = max(c.nbytes for c in weight_units)
                assert after.pass_bytes <= before.pass_bytes + largest
            assert place(weight_units, 0, whole_bytes(weight_units)).pass_bytes == 0


@given(models(), st.integers(1, 12), st.integers(1, 12))
def test_last_of_every_takes_the_last_of_every(weight_units: list[WeightUnit], last: int, every: int) -> None:
    if last > every:
        with pytest.raises(ConfigError, match="takes"):
            parse_rules(f"last {last} of {every}=stream")
        return
    layers = [c.layer for c in weight_units if c.layer >= 0]
    wanted = [n for n in layers if n % every >= every - last]
    rules = parse_rules(f"last {last} of {every}=stream")
    if not wanted:
        with pytest.raises(ConfigError, match="matches no module"):
            place(weight_units, 0, None, 0, rules)
        return
    found = place(weight_units, 0, None, 0, rules)
    streamed = [c.layer for c, d in zip(found.weight_units, found.deliveries, strict=True) if d is Delivery.STREAM]
    assert streamed == wanted


def test_equal_layers_that_are_read_lie_evenly_between_those_that_stay() -> None:
    weight_units = [WeightUnit(f"layers.{n}", 10 * MIB, 1, layer=n) for n in range(12)]
    found = place(weight_units, 0, 90 * MIB + 4 * 8192, 0)
    letters = "".join("s" if d is Delivery.STREAM else "." for d in found.deliveries)
    assert letters == ".s.s.s.s.s.s"


def test_experts_get_what_the_rest_of_their_layers_leaves() -> None:
    weight_units = [layer_of(n, 64 * MIB, 4, 16) for n in range(8)]
    found = place(weight_units, 0, 200 * MIB, 0)
    assert {d for c, d in zip(found.weight_units, found.deliveries, strict=True) if not c.experts} == {
        Delivery.RESIDENT
    }
    assert {d for c, d in zip(found.weight_units, found.deliveries, strict=True) if c.experts} == {Delivery.EXPERTS}
    assert found.cache_bytes == 200 * MIB - 8 * 4 * MIB
    with_host = place(weight_units, 0, 200 * MIB, 130 * MIB)
    assert list(with_host.deliveries).count(Delivery.MAPPED) == 2
    assert place(weight_units, 0, 600 * MIB, 0).nbytes(Delivery.RESIDENT) == 512 * MIB, "what fits as a whole stays"


def test_a_rule_takes_experts_apart_where_another_decides_about_their_layer() -> None:
    weight_units = [layer_of(n, 64 * MIB, 4, 16) for n in range(4)]
    whole = place(weight_units, 0, None, 0, parse_rules("model.layers.*=stream"))
    assert [c.name for c in whole.weight_units] == [c.name for c in weight_units]
    mixed = place(weight_units, 0, None, 0, parse_rules("last 1 of 4=stream, *.experts=experts, model.layers.0=stream"))
    wanted = "stream experts resident experts resident experts stream"
    assert " ".join(delivery.value for delivery in mixed.deliveries) == wanted
    assert mixed.cache_bytes >= 60 * MIB
    with pytest.raises(ConfigError, match="matches no module"):
        place([layer_of(0, MIB, 1)], 0, None, 0, parse_rules("*=experts"))


def test_rules_come_first_and_the_rest_is_chosen() -> None:
    weight_units = [WeightUnit(f"model.layers.{n}", 10 * MIB, 1, layer=n) for n in range(4)] + [
        WeightUnit("lm_head", 30 * MIB, 1)
    ]
    found = place(weight_units, 0, 75 * MIB, 40 * MIB, parse_rules("model.layers.0=mapped, lm_head=stream"))
    assert found.of("model.layers.0") is Delivery.MAPPED
    assert found.of("lm_head") is Delivery.STREAM
    assert found.device_bytes <= 75 * MIB
    with pytest.raises(BudgetError, match="host"):
        place(weight_units, 0, None, 9 * MIB, parse_rules("model.layers.0=mapped"))


@pytest.mark.parametrize("text", ["model=", "=stream", "model.layers.*=disk", "last 0 of 2=stream", "a=rows", "a"])
def test_rules_that_mean_nothing_are_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="The rule"):
        parse_rules(text)


def test_a_pattern_that_matches_nothing_says_what_there_is() -> None:
    with pytest.raises(ConfigError, match=r"modle.*It has: model.layers.0"):
        place([WeightUnit("model.layers.0", MIB, 1, layer=0)], 0, None, 0, parse_rules("modle.*=stream"))


@given(models(), st.integers(0, 3 * MIB), st.integers(0, 700 * MIB), st.integers(0, 400 * MIB))
def test_a_device_with_a_memory_of_its_own(weight_units: list[WeightUnit], small: int, device: int, host: int) -> None:
    """Both budgets hold, what comes from disk is staged in host memory, and nothing is computed from where it lies on
    the host. With host memory for the staging the error's least works.
    """
    parts = [part for whole in weight_units for part in whole.apart]
    staging_most = 3 * max((c.ring_bytes for c in weight_units), default=0)
    staging_most += EXPERT_STAGES * max((part.stage_bytes for part in parts), default=0)
    try:
        found = place(weight_units, small, device, host, to_device=True)
    except BudgetError as error:
        if "at least" in str(error):
            device = least_of(error)
            found = place(weight_units, small, device, host + staging_most, to_device=True)
            host += staging_most
        else:
            assert host < staging_most, "host memory was enough for any staging"
            return
    found.check()
    assert found.device_bytes <= device and found.host_bytes <= host
    assert not found.nbytes(Delivery.MAPPED)
    kept = [c for c, d in zip(found.weight_units, found.deliveries, strict=True) if d is Delivery.PREFETCH]
    kept += [c for c in found.cached if c.name in found.held]
    assert found.host_bytes == sum(c.host_buffer_bytes for c in kept) + found.staging_bytes
    fetched = {c.name for c in found.cached} - found.held
    assert (found.staging_bytes > 0) is bool(fetched or found.nbytes(Delivery.STREAM))
    for unit in found.cached:
        more = replace(found, held=found.held | {unit.name})
        assert unit.name in found.held or more.host_bytes > host, "experts lie on disk only where host is full"


def test_rules_about_a_device_with_a_memory_of_its_own() -> None:
    """What is asked for is given, within host memory; experts that no rule sends there leave what they are told to."""
    weight_units = [layer_of(n, 64 * MIB, 4, experts=8) for n in range(2)]
    found = place(weight_units, 0, None, 1 << 40, parse_rules("model.layers.0*=mapped,*=prefetch"), to_device=True)
    assert found.nbytes(Delivery.MAPPED) == found.nbytes(Delivery.PREFETCH) == weight_units[0].nbytes
    assert found.host_bytes == sum(c.host_buffer_bytes for c in weight_units) and not found.staging_bytes
    rules, most = parse_rules("*experts=experts"), 1 << 40
    found = place(weight_units, 0, None, most, rules, to_device=True)
    assert len(found.held) == len(found.cached) == 2 and not found.staging_bytes
    experts = found.cached[0]
    half = experts.host_buffer_bytes + EXPERT_STAGES * experts.stage_bytes
    assert len(place(weight_units, 0, None, most, rules, to_device=True, held_bytes=half).held) == 1
    assert not place(weight_units, 0, None, most, rules, to_device=True, held_bytes=half - 1).held
    with pytest.raises(BudgetError, match="give host_memory a larger size"):
        place(weight_units, 0, None, EXPERT_STAGES * experts.stage_bytes - 1, rules, to_device=True)
    assert not place(weight_units, 0, None, most, rules).held, "a CPU maps them"


def test_all_experts_in_host_memory_need_no_staging() -> None:
    """They are held where all of them fit, also where one and the staging for the other would not."""
    weight_units = [layer_of(n, 64 * MIB, 4, experts=2) for n in range(2)]
    whole = 2 * weight_units[0].apart[0].host_buffer_bytes
    assert EXPERT_STAGES * weight_units[0].apart[0].stage_bytes + whole // 2 > whole
    found = place(weight_units, 0, None, whole, parse_rules("*experts=experts"), to_device=True)
    assert len(found.held) == 2 and not found.staging_bytes
