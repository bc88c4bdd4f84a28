"""Speeds of a machine: what follows from what was measured, and the file that they are kept in."""

import json
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stowage.errors import ConfigError
from stowage.planner.machine import TYPICAL, TYPICAL_CPU, TYPICAL_GPU, Machine, from_json

MEASURED = replace(
    TYPICAL_CPU,
    products={"float32": {1: 4e9, 8: 2e9, 32: 1e9}},
    attention={},
    overlap_loss={128: 0.2, 8: 0.8},
    formats={"float32": {"q4_0": {1: 0.25, 9: 1.25}, "q8_0": {1: 0.5}}},
    narrow={"float32": {"q4_0": {1: 0.5, 9: 1.25}, "q8_0": {1: 0.4}, "float32": {1: 1.125}}},
    attention_steps={1: 2e9, 9: 1e9},
)


@pytest.mark.parametrize(("rows", "per_second"), [(1, 4e9), (8, 2e9), (32, 1e9), (64, 0.5e9), (0.5, 4e9)])
def test_products_at_and_beyond_the_sizes_that_were_measured(rows: float, per_second: float) -> None:
    assert MEASURED.multiply_s("float32", 1e9, rows) == pytest.approx(1e9 / per_second)


def test_products_between_two_sizes_lie_on_the_line() -> None:
    assert MEASURED.multiply_s("float32", 1e9, 20) == pytest.approx((0.5 + 1.0) / 2)


rates = st.dictionaries(st.integers(1, 600), st.floats(1e6, 1e12), min_size=1, max_size=6)


@given(rates, st.floats(1, 2000), st.floats(1, 2000))
def test_more_rows_never_take_less_time(measured: dict[int, float], one: float, other: float) -> None:
    made = replace(TYPICAL_CPU, products={"float32": measured})
    fewer, more = (made.multiply_s("float32", 1e9, rows) for rows in sorted((one, other)))
    assert fewer <= more * (1 + 1e-9)


def test_a_type_that_was_not_measured_takes_as_much_longer_as_it_is_wider() -> None:
    only = replace(TYPICAL_CPU, products={"bfloat16": {1: 4e9}})
    assert only.multiply_s("float32", 4e9, 1) == pytest.approx(2.0)
    assert only.multiply_s("float16", 4e9, 1) == pytest.approx(1.0)
    assert only.cache_bytes_per_s("float32") == pytest.approx(8e9)


@pytest.mark.parametrize(
    ("shares", "rows", "times"),
    [
        ({}, 1, 1.0),
        ({"q4_0": 1.0}, 1, 0.25),
        ({"q4_0": 1.0}, 5, 0.75),
        ({"q4_0": 1.0}, 100, 1.25),
        ({"q4_0": 0.5, "q8_0": 0.25}, 1, 0.5),
        ({"q4_0": 0.5, "never measured": 0.5}, 1, 0.625),
    ],
)
def test_products_in_formats_take_their_shares_of_what_was_measured(
    shares: dict[str, float], rows: float, times: float
) -> None:
    assert MEASURED.format_times("float32", shares, rows) == pytest.approx(times)
    assert MEASURED.format_times("bfloat16", shares, rows) == 1.0


@pytest.mark.parametrize(
    ("outputs", "rows", "times"),
    [
        ({}, 1, 0.0),
        ({"q4_0": 1 / 512 - 1 / 2048}, 1, 0.25),
        ({"q4_0": 1 / 1024 - 1 / 2048}, 1, 0.25 / 3),
        ({"q4_0": 1 / 512 - 1 / 2048}, 5, 0.125),
        ({"q4_0": 1 / 4096 - 1 / 2048}, 1, -0.25 / 6),
        ({"": 1 / 512 - 1 / 2048}, 1, 0.125),
        ({"q8_0": 1 / 512 - 1 / 2048, "never measured": 1.0}, 1, 0.0),
    ],
)
def test_outputs_take_a_time_besides_their_parameters(outputs: dict[str, float], rows: float, times: float) -> None:
    """As much longer as narrow matrices took: in proportion to how many outputs there are for each parameter."""
    assert MEASURED.narrow_times("float32", outputs, rows) == pytest.approx(times)
    assert MEASURED.narrow_times("bfloat16", outputs, rows) == 0.0


def test_attention_of_steps_between_the_batches_that_were_measured() -> None:
    assert [MEASURED.attend_step_s(1e9, batch) for batch in (1, 5, 9, 20)] == pytest.approx([0.5, 0.75, 1.0, 1.0])
    assert TYPICAL_CPU.attend_step_s(1e9, 1) == 0.0


@pytest.mark.parametrize(("rows", "loss"), [(1, 0.8), (8, 0.8), (68, 0.5), (128, 0.2), (1000, 0.2)])
def test_what_reading_costs_between_the_sizes_that_were_measured(rows: int, loss: float) -> None:
    assert MEASURED.overlap_loss_of(rows) == pytest.approx(loss)
    assert TYPICAL_CPU.overlap_loss_of(rows) == 0.0


def test_attention_that_was_not_measured_is_as_fast_as_large_products() -> None:
    assert MEASURED.attend_s("float32", 64e9) == pytest.approx(1.0)
    assert TYPICAL_CPU.attend_s("float16", 1.5e11) == pytest.approx(1.0)


@pytest.mark.parametrize("machine", [*TYPICAL.values(), MEASURED], ids=lambda machine: machine.name[:30])
def test_the_file_holds_everything(machine: Machine) -> None:
    assert from_json(json.dumps(machine.to_json())) == machine


def changed(**fields: Any) -> str:
    return json.dumps(TYPICAL_GPU.to_json() | fields)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "is not what"),
        ("[]", "is not what"),
        ("{}", "is not what"),
        (changed(version=99), "another version"),
        (changed(version=5), "another version"),
        (changed(kind="abacus"), "kind is 'abacus'"),
        (changed(products={}), "nothing of matrix products"),
        (changed(products={"bfloat16": {"1": 0}}), "not above 0"),
        (changed(disk_read={"1": -1.0}), "not above 0"),
        (changed(formats={"bfloat16": {"q4_0": {"1": 0.0}}}), "not above 0"),
        (changed(narrow={"bfloat16": {"q4_0": {"1": 0.0}}}), "not above 0"),
        (changed(attention_steps={"8": 0.0}), "not above 0"),
        (changed(formats={"bfloat16": ["q4_0"]}), "is not what"),
        (changed(memcpy_one=float("nan")), "not above 0"),
        (changed(link_in=0), "link_in must be above 0"),
        (changed(surprise=1), "is not what"),
    ],
)
def test_a_file_that_is_none_is_refused(text: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        from_json(text)
