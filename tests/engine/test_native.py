"""The kernels: right, and a row's bits depend on nothing but the row."""

from __future__ import annotations

import itertools
import threading

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from stowage.core.geometry import Kind
from stowage.executor import kernels
from stowage.models.layout import visible
from tests.engine.conftest import INSTRUCTIONS, each_instruction_set
from tests.forked import exit_code_of_a_child
from tests.native import needs_native
from tests.threads import using_threads

pytestmark = needs_native
DTYPES = [torch.float32, torch.bfloat16]


def numbers(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("inputs", "outputs"), [(1, 1), (7, 5), (64, 96), (1030, 33), (2048, 100), (8300, 7)])
def test_linear_is_right(inputs, outputs, dtype, instructions):
    x, weight, bias = numbers(70, inputs, dtype=dtype), numbers(outputs, inputs, seed=1, dtype=dtype), numbers(outputs)
    exact = x.double() @ weight.double().T + bias.to(dtype).double()
    found = kernels.linear(x, weight, bias.to(dtype))
    assert found.dtype is dtype
    bound = 3e-6 if dtype is torch.float32 else 2**-8
    size = x.double().abs() @ weight.double().abs().T + bias.double().abs()
    assert ((found.double() - exact).abs() <= bound * size).all()


@settings(max_examples=60, deadline=None)
@given(
    rows=st.integers(1, 150),
    inputs=st.integers(1, 80) | st.sampled_from([1023, 1024, 1025, 2100, 4097, 8300]),
    outputs=st.integers(1, 40),
    half=st.booleans(),
    threads=st.integers(1, 3),
    data=st.data(),
)
def test_a_row_of_a_linear_layer_is_its_own(rows, inputs, outputs, half, threads, data):
    dtype = torch.bfloat16 if half else torch.float32
    x, weight = numbers(rows, inputs, dtype=dtype), numbers(outputs, inputs, seed=1, dtype=dtype)
    whole = kernels.linear(x, weight)
    begin = data.draw(st.integers(0, rows - 1))
    end = data.draw(st.integers(begin + 1, rows))
    with using_threads(threads):
        assert torch.equal(kernels.linear(x[begin:end], weight), whole[begin:end])
        first = data.draw(st.integers(0, outputs - 1))
        assert torch.equal(kernels.linear(x, weight[first:]), whole[:, first:]), "an output depends on its neighbours"


def test_rows_that_do_not_lie_side_by_side():
    x, weight = numbers(9, 2, 40), numbers(30, 50, seed=1)[:, 5:45]
    assert not weight.is_contiguous() and kernels.supports(x, weight)
    found = kernels.linear(x[:, 1], weight)
    assert torch.equal(found, kernels.linear(x[:, 1].contiguous(), weight.contiguous()))
    assert kernels.linear(x[:0, 1], weight).shape == (0, 30)


@settings(max_examples=60, deadline=None)
@given(
    rows=st.sampled_from([1, 2, 3, 5, 8, 9, 70]),
    inputs=st.integers(1, 80) | st.sampled_from([1023, 1025, 4129, 8300]),
    outputs=st.integers(1, 140),
    dtype=st.sampled_from(DTYPES),
    threads=st.integers(1, 3),
    data=st.data(),
)
def test_a_matrix_whose_inputs_come_first_gives_the_bits_of_others(rows, inputs, outputs, dtype, threads, data):
    """Part of one, too."""
    x, whole = numbers(rows, inputs, dtype=dtype), numbers(inputs + 3, outputs + 9, seed=1, dtype=dtype)
    first = data.draw(st.integers(0, 9))
    weight = whole[2 : 2 + inputs, first : first + outputs].T
    for instructions in each_instruction_set():
        with using_threads(threads):
            assert kernels.supports(x, weight)
            found, expected = kernels.linear(x, weight), kernels.linear(x, weight.contiguous())
        assert torch.equal(found, expected), instructions


class Case:
    """Keys and values of one sequence, scattered over a pool; and attention over them as its definition has it."""

    def __init__(self, length: int, kind: Kind, window: int, block_tokens: int, *, heads=(4, 2), width=20, value=12,
                 dtype=torch.float32, softcap=0.0, sinks=False, rounded_from=kernels.NEVER) -> None:  # fmt: skip
        self.length, self.kind, self.window, self.block_tokens = length, kind, window, block_tokens
        self.heads, self.kv_heads = heads
        self.softcap, self.rounded_from = softcap, rounded_from
        self.sinks = numbers(self.heads, seed=5) if sinks else None
        blocks = -(-length // block_tokens)
        self.table = torch.randperm(blocks + 2, generator=torch.Generator().manual_seed(3))[:blocks]
        self.keys = numbers(blocks + 2, block_tokens, self.kv_heads, width, seed=1, dtype=dtype)
        self.values = numbers(blocks + 2, block_tokens, self.kv_heads, value, seed=2, dtype=dtype)
        self.query = numbers(length, self.heads, width, seed=4, dtype=dtype)

    def first_block(self, start: int) -> int:
        if self.kind is Kind.SLIDING:
            return max(0, start + 1 - self.window) // self.block_tokens
        return start // self.window * self.window // self.block_tokens if self.kind is Kind.CHUNKED else 0

    def attend(self, *pieces: tuple[int, int]) -> Tensor:
        """Of the tokens ``[begin, end)`` of each piece, all in one step."""
        tables, runs, queries, at, tokens = [], [], [], 0, 0
        for begin, end in pieces:
            first = self.first_block(begin)
            tables.append(self.table[first : (end - 1) // self.block_tokens + 1])
            runs.append([tokens, end - begin, begin, at, first * self.block_tokens])
            queries.append(self.query[begin:end])
            at, tokens = at + len(tables[-1]), tokens + end - begin
        steps = kernels.AttentionRuns(torch.cat(tables), torch.tensor(runs), self.kind, self.window, self.block_tokens)
        return kernels.attend(
            *(torch.cat(queries), self.keys, self.values, steps, 0.3),
            softcap=self.softcap,
            sinks=self.sinks,
            rounded_from=self.rounded_from,
        )

    def definition(self) -> Tensor:
        fold = self.heads // self.kv_heads
        keys, values = (t[self.table].flatten(0, 1)[: self.length].double() for t in (self.keys, self.values))
        keys, values = keys.repeat_interleave(fold, 1), values.repeat_interleave(fold, 1)
        scores = torch.einsum("qhd,khd->hqk", self.query.double(), keys) * 0.3
        if self.softcap:
            scores = self.softcap * torch.tanh(scores / self.softcap)
        places = np.arange(self.length)
        seen = torch.from_numpy(visible(self.kind, self.window, places[:, None], places[None]))
        scores = scores.masked_fill(~seen, -torch.inf)
        if self.sinks is not None:
            scores = torch.cat((scores, self.sinks.double()[:, None, None].expand(-1, self.length, 1)), -1)
        return torch.einsum("hqk,khd->qhd", scores.softmax(-1)[..., : self.length], values)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("kind", "window", "more"),
    [
        (Kind.FULL, 0, {}),
        (Kind.FULL, 0, {"softcap": 15.0}),
        (Kind.FULL, 0, {"heads": (6, 1), "width": 72, "value": 64}),
        (Kind.SLIDING, 50, {"sinks": True}),
        (Kind.SLIDING, 128, {"heads": (2, 2)}),
        (Kind.CHUNKED, 64, {"softcap": 15.0, "sinks": True}),
    ],
)
def test_attention_is_right(kind, window, more, dtype, instructions):
    case = Case(210, kind, window, 16, dtype=dtype, **more)
    bound = 2e-6 if dtype is torch.float32 else 2e-2
    exact, defined = case.attend((0, 210)), case.definition()
    assert (exact.double() - defined).abs().max() < bound
    case.rounded_from = 100
    found = case.attend((0, 210))
    assert torch.equal(found[:100], exact[:100])
    case.rounded_from = 0
    found = case.attend((0, 210))
    assert torch.equal(found, exact) == (dtype is torch.float32)
    assert (found.double() - defined).square().mean().sqrt() < 1.5 * (exact.double() - defined).square().mean().sqrt()


def test_rounded_weights_are_those_of_bfloat16():
    """One key in reach of another: e to the power of what their scores differ by, rounded, is what values weigh."""
    case = Case(2, Kind.FULL, 0, 16, heads=(1, 1), width=16, value=16, dtype=torch.bfloat16, rounded_from=0)
    differ = torch.linspace(0, 24, 300, dtype=torch.float64).bfloat16()
    case.keys.zero_()
    case.values[case.table[0], :2] = torch.tensor([0.0, 1.0])[:, None, None].bfloat16()
    case.keys[case.table[0], 0, 0, 0] = 1.0
    for one in differ:
        case.query[1].zero_()[0, 0] = one
        low = (-one.float() * 0.3).exp().item()
        expected = low / (1 + low) if low > 2.0**-30 else 0.0
        assert case.attend((1, 2))[0, 0, 0].item() == pytest.approx(expected, rel=2**-7)


@settings(max_examples=60, deadline=None)
@given(
    kind=st.sampled_from([(Kind.FULL, 0), (Kind.SLIDING, 40), (Kind.SLIDING, 64), (Kind.CHUNKED, 48)]),
    block_tokens=st.sampled_from([16, 32, 48]),
    half=st.booleans(),
    rounded_from=st.integers(0, 150),
    cuts=st.lists(st.integers(1, 149), min_size=1, max_size=5, unique=True),
)
def test_a_row_of_attention_is_its_own(kind, block_tokens, half, rounded_from, cuts):
    """Cut anywhere, the pieces in any number of steps: the same bits."""
    case = Case(
        150, *kind, block_tokens, value=32, dtype=torch.bfloat16 if half else torch.float32, rounded_from=rounded_from
    )
    whole = case.attend((0, 150))
    places = [0, *sorted(cuts), 150]
    pieces = list(itertools.pairwise(places))
    assert torch.equal(case.attend(*pieces), whole)
    for begin, end in pieces:
        assert torch.equal(case.attend((begin, end)), whole[begin:end])
    begin = pieces[-1][0]
    assert torch.equal(case.attend((begin, begin + 1), pieces[0])[0], whole[begin])


ODD = (torch.inf, -torch.inf, torch.nan, -0.0, 1e-40, -1e-40, 3e38, -3e38, 1e20)
"""What rounds, overflows and compares in its own way."""


@pytest.mark.parametrize(
    ("dtype", "rounded_from"),
    [(torch.float32, 0), (torch.bfloat16, kernels.NEVER), (torch.bfloat16, 0), (torch.bfloat16, 70)],
)
@pytest.mark.parametrize("heads", [(1, 1), (6, 2), (16, 1)])
@pytest.mark.parametrize("width", [4, 20, 64, 72])
def test_many_queries_give_the_bits_of_each_alone(width, heads, dtype, rounded_from, instructions):
    """Many go with keys turned, few with keys as they lie; one at a time is what decoding does."""
    case = Case(
        140, Kind.SLIDING, 100, 16, heads=heads, width=width, value=width + 8, dtype=dtype, rounded_from=rounded_from
    )
    for odd in (False, True):
        if odd:
            places = torch.Generator().manual_seed(9)
            for numbers_there in (case.keys, case.values, case.query):
                flat = numbers_there.flatten()
                at = torch.randperm(len(flat), generator=places)[: len(flat) // 2000 + 9]
                flat[at] = torch.tensor(ODD, dtype=dtype).repeat(len(at) // len(ODD) + 1)[: len(at)]
                numbers_there.copy_(flat.view_as(numbers_there))
        whole = case.attend((0, 140)).float()
        alone = torch.cat([case.attend((at, at + 1)) for at in range(140)]).float()
        assert torch.equal(whole.isnan(), alone.isnan()) and bool(whole.isnan().any()) == odd
        there = ~whole.isnan()
        assert there.any() and torch.equal(whole[there].view(torch.int32), alone[there].view(torch.int32))


def test_latents_are_keys_and_values_at_once():
    case = Case(100, Kind.FULL, 0, 16, heads=(8, 1), width=24)
    case.values = case.keys[..., :16]
    assert (case.attend((0, 100)).double() - case.definition()).abs().max() < 2e-6


def test_what_no_query_sees_is_not_read():
    """Not a number in a block of the pool that is beyond a window or after the last token changes nothing."""
    case = Case(100, Kind.SLIDING, 20, 16)
    expected = case.attend((60, 90))
    case.keys[case.table[:2]] = torch.nan
    case.values[case.table[:2]] = torch.nan
    case.keys[case.table[5], 90 - 80 :] = torch.nan
    case.values[case.table[5], 90 - 80 :] = torch.nan
    assert torch.equal(case.attend((60, 90)), expected)


def test_unknown_instructions_are_refused():
    with pytest.raises(ValueError, match="does not have"):
        kernels._kernel.use_instructions("sse9")
    assert kernels.instructions() in INSTRUCTIONS


def test_switched_off(monkeypatch):
    assert kernels.wanted(torch.device("cpu"), torch.float32)
    assert not kernels.wanted(torch.device("cpu"), torch.float16)
    assert not kernels.wanted(torch.device("meta"), torch.float32)
    monkeypatch.setenv("STOWAGE_PURE_PYTHON", "1")
    assert not kernels.wanted(torch.device("cpu"), torch.float32)


@settings(max_examples=40, deadline=None)
@given(
    rows=st.integers(1, 80),
    inputs=st.integers(1, 70) | st.sampled_from([1050, 4200]),
    outputs=st.integers(1, 30),
    half=st.booleans(),
    data=st.data(),
)
def test_codes_of_one_byte(rows, inputs, outputs, half, data):
    """The same to the bit as what they stand for, scaled afterwards; a row is its own. Where pairs of bfloat16 are
    multiplied, the sums have another order.
    """
    x = numbers(rows, inputs, dtype=torch.bfloat16 if half else torch.float32)
    generator = torch.Generator().manual_seed(2)
    codes = torch.randint(-127, 128, (outputs, inputs), generator=generator, dtype=torch.int8)
    scales = torch.rand(outputs, generator=generator)
    matrix = kernels.of_plain(codes, scales)
    found = kernels.linear_of(x, matrix)
    begin = data.draw(st.integers(0, rows - 1))
    assert torch.equal(kernels.linear_of(x[begin:], matrix), found[begin:])
    expected = kernels.linear(x.float(), codes.float()) * scales
    for bias, computed in ((torch.zeros(outputs), found), (scales, kernels.linear_of(x, matrix, scales))):
        if half and kernels._kernel.multiplies_halves():
            size = (x.double().abs() @ codes.double().abs().T) * scales + bias
            rounded = 2**-8 * (expected + bias).double().abs()
            assert ((computed.double() - (expected + bias).double()).abs() <= 3e-6 * size + rounded).all()
        else:
            assert torch.equal(computed, (expected + bias).to(x.dtype))


@pytest.mark.parametrize("group", [32, 64, 128])
@pytest.mark.parametrize("groups", [1, 3, 8, 9, 17, 40])
def test_codes_of_four_bits(group, groups, instructions):
    """The same to the bit as what they stand for; halves of every size are read, also those below the normal ones. A
    group may lie in both halves of the bytes, and inputs may be more than are summed at a time.
    """
    inputs, outputs = group * groups, 11
    generator = torch.Generator().manual_seed(groups)
    codes = torch.randint(0, 256, (outputs, inputs // 2), generator=generator, dtype=torch.uint8)
    exponents = torch.randint(-26, 4, (2, outputs, groups), generator=generator)
    scales = (torch.randn(2, outputs, groups, generator=generator) * 2.0**exponents).half()
    scales[:, 0, 0] = 0
    whole = torch.cat((codes & 15, codes >> 4), dim=1).float().view(outputs, groups, group)
    values = (whole * scales[0].float()[..., None] + scales[1].float()[..., None]).view(outputs, inputs)
    for dtype in DTYPES:
        x = numbers(9, inputs, dtype=dtype)
        matrix = kernels.of_int4(dtype, codes, scales, group)
        found = kernels.linear_of(x, matrix)
        rounded = dtype is torch.bfloat16
        expected = kernels.linear(x, values.bfloat16()) if rounded else kernels.linear(x.float(), values)
        assert torch.equal(found, expected.to(dtype))
        for row in (1, 5, 7, 8):
            assert torch.equal(kernels.linear_of(x[row:], matrix), found[row:])
        bias = numbers(outputs)
        summed = kernels.linear(x, values.bfloat16(), bias) if rounded else (expected + bias).to(dtype)
        assert torch.equal(kernels.linear_of(x, matrix, bias), summed)


def test_scales_of_bytes_that_are_away():
    """Bytes of ones: whatever is computed with them is not a number."""
    scales = torch.full((2, 4, 2), -1, dtype=torch.int16).view(torch.float16)
    matrix = kernels.of_int4(torch.float32, torch.full((4, 32), 255, dtype=torch.uint8), scales, 32)
    found = kernels.linear_of(numbers(3, 64), matrix)
    assert bool(found.isnan().all())


def test_several_callers_and_a_child_process():
    """The helping threads have one job at a time, and a child process has none of its parent's."""
    x, weight = numbers(2, 700, dtype=torch.bfloat16), numbers(900, 700, seed=1, dtype=torch.bfloat16)
    expected = kernels.linear(x, weight)
    found: list[bool] = []

    def ask() -> None:
        found.append(all(torch.equal(kernels.linear(x, weight), expected) for _ in range(100)))

    with using_threads(3):
        callers = [threading.Thread(target=ask) for _ in range(3)]
        for caller in callers:
            caller.start()
        for caller in callers:
            caller.join()
        assert found == [True] * 3
        assert exit_code_of_a_child(lambda: torch.equal(kernels.linear(x, weight), expected)) == 0


def test_layers_in_one_call_are_the_layers():
    for dtype in DTYPES:
        x = numbers(2, 5, 70, dtype=dtype)
        weights = [numbers(outputs, 70, seed=outputs, dtype=dtype) for outputs in (1, 300, 13, 120, 2, 5, 6, 7)]
        found = kernels.linears(x, list(map(kernels.of_plain, weights)))
        for out, weight in zip(found, weights, strict=True):
            assert out.dtype is dtype and torch.equal(out, kernels.linear(x, weight))


def test_numbers_of_bfloat16_are_rounded_as_torch_rounds(instructions):
    """Ties, the largest ones and those that are none included."""
    x = torch.tensor([[1.0, 2**-8, 2**-16, 0], [1.0, 3 * 2**-8, 0, 0], [3e38, 3e38, 0, 0], [torch.nan, 1, 1, 1]])
    x, weight = x.bfloat16(), torch.ones(40, 4, dtype=torch.bfloat16)
    expected = (x.float() @ weight.float().T).bfloat16()
    found = kernels.linear(x, weight)
    assert torch.equal(found.view(torch.int16)[:3], expected.view(torch.int16)[:3]) and bool(found[3].isnan().all())
