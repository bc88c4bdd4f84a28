"""Programs of the kernels in the place of calls of torch: the very bits, whatever torch was to compute."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import replace
from itertools import permutations
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given as drawn
from hypothesis import settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import Parameter

from stowage.executor import kernels
from stowage.executor.determinism.row_invariance import RowInvariance
from stowage.executor.replay.calls.call_list import RecordedCalls
from stowage.executor.replay.calls.recording import one_call, recorded
from stowage.executor.replay.programs import encoding as encoding_of
from stowage.executor.replay.programs import writer
from stowage.executor.replay.programs.fusion import fused
from stowage.executor.replay.programs.program import Arena, Program
from stowage.executor.replay.programs.writer import with_programs
from stowage.weights.quantized.blocks import BlockMatrix
from stowage.weights.quantized.codes import Form, PackedMatrix
from stowage.weights.quantized.formats import Spec
from tests.block_formats import SPECS, parts_of
from tests.depth import EXHAUSTIVE
from tests.native import needs_native
from tests.threads import using_threads

pytestmark = needs_native
Function = Callable[..., Tensor]
VIEWS = ("view", "reshape", "transpose", "t", "__getitem__", "flatten", "permute", "split")
EXACT = RowInvariance(linear=True, exact=True)


def numbers(*shape: int, seed: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Of all sizes, also those that torch rounds to nothing or to infinity."""
    generator = torch.Generator().manual_seed(seed)
    sizes = torch.tensor([0.0, 1e-42, 1e-30, 1e-3, 1.0, 1.0, 1.0, 50.0, 1e30, 3e38])
    wide = torch.randn(shape, generator=generator) * sizes[torch.randint(10, shape, generator=generator)]
    return wide.to(dtype)


def usual(*shape: int, seed: int, dtype: torch.dtype) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def same(found: Tensor, expected: Tensor) -> bool:
    """To the bit; one that is no number is like another."""
    bits = [torch.where(x.isnan(), torch.ones_like(x), x).contiguous().view(torch.uint8) for x in (found, expected)]
    return found.dtype is expected.dtype and found.shape == expected.shape and torch.equal(*bits)


@torch.inference_mode()
def replays(function: Function, *given: Tensor, kept: Sequence[Tensor] = (), mode: Any = EXACT) -> RecordedCalls:
    """What ``function`` is made of, with programs, after it gave the same for other numbers than those it was recorded
    with.
    """
    with mode or nullcontext():
        other = tuple(x.flip(0) for x in given)
        expected = function(*other), function(*given)
    _, step = recorded(lambda: function(*given), given, (), kept, mode)
    calls = with_programs(step, Arena())
    found = calls.replay(other), calls.replay(given)
    assert all(map(same, found, expected))
    return calls


def left(calls: RecordedCalls) -> list[Any]:
    """The calls that compute something and are not made by programs."""
    functions = [call.function for call in calls.calls if not isinstance(call.function, Program)]
    assert len(functions) < len(calls.calls), "nothing is made by a program"
    return [function for function in functions if getattr(function, "__name__", "") not in VIEWS]


def _half(x: Tensor) -> Tensor:
    return torch.cat((-x[..., x.shape[-1] // 2 :], x[..., : x.shape[-1] // 2]), dim=-1)


def _pairs(x: Tensor) -> Tensor:
    return torch.stack((-x[..., 1::2], x[..., ::2]), dim=-1).flatten(-2)


def _llama(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> list[Tensor]:
    return [x * cos.unsqueeze(1) + _half(x) * sin.unsqueeze(1) for x in (q, k)]


def _interleaved(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> list[Tensor]:
    cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
    return [(x.float() * cos + _pairs(x).float() * sin).to(x.dtype) for x in (q, k)]


def _partial(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> list[Tensor]:
    width = cos.shape[-1]
    cos, sin = cos[:, None], sin[:, None]
    turned = [x[..., :width] * cos + _half(x[..., :width]) * sin for x in (q, k)]
    return [torch.cat([part, x[..., width:]], dim=-1) for part, x in zip(turned, (q, k), strict=True)]


def _halves_apart(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> list[Tensor]:
    done = []
    for x in (q, k):
        first, second = x.chunk(2, dim=-1)
        cos_, sin_ = cos.unsqueeze(1)[..., : first.shape[-1]], sin.unsqueeze(1)[..., : first.shape[-1]]
        done.append(torch.cat((first * cos_ - second * sin_, second * cos_ + first * sin_), dim=-1))
    return done


@pytest.mark.parametrize("mixed", [False, True])
@pytest.mark.parametrize("dtype", kernels.DTYPES)
@pytest.mark.parametrize("rope", [_llama, _interleaved, _partial, _halves_apart])
def test_rotary_embeddings(rope: Any, dtype: torch.dtype, mixed: bool, instructions: str) -> None:
    """Queries and keys, whatever their heads and widths are, with cosines of their type or of float32."""
    for batch, tokens, heads, width in ((1, 1, 9, 64), (1, 5, 3, 130), (3, 1, 1, 6), (2, 7, 4, 20)):
        turned = width if rope is not _partial else width // 2

        def function(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, heads: int = heads, width: int = width) -> Tensor:
            q, k = (x.view(*x.shape[:2], -1, width).transpose(1, 2) for x in (q, k))
            q, k = rope(q, k, cos, sin)
            return torch.cat((q, k), dim=1).transpose(1, 2).reshape(-1, (heads + 2) * width)

        angles = torch.float32 if mixed else dtype
        q, k = (numbers(batch, tokens, n * width, seed=n, dtype=dtype) for n in (heads, 2))
        cos, sin = (usual(batch, tokens, turned, seed=at, dtype=angles) for at in (7, 8))
        assert not left(replays(function, q, k, cos, sin))


POINTWISE: dict[str, Function] = {
    "add": lambda a, b: a + b,
    "sub": lambda a, b: a.sub(b),
    "mul": torch.mul,
    "neg": lambda a, b: -a,
    "number times": lambda a, b: 0.22 * a,
    "times number": lambda a, b: a * 3,
    "plus number": lambda a, b: a + 0.1,
    "minus number": lambda a, b: a - 0.1,
    "wide": lambda a, b: a.float() * 1.5,
    "narrow": lambda a, b: (a * 1.5).bfloat16().to(a.dtype) + b,
    "turned": lambda a, b: a.transpose(0, 1).contiguous().t() + b,
    "column": lambda a, b: a * b[:, :1],
    "row": lambda a, b: b[-1] + a,
    "each second": lambda a, b: a[:, ::2] * b[:, ::2],
    "joined": lambda a, b: torch.cat([a, b[:1], a * b], 0),
    "joined with nothing": lambda a, b: torch.cat([a[:, :0], a * a[:1], a[:, :0]], -1),
    "picked": lambda a, b: a.gather(1, torch.zeros(len(a), 1, dtype=torch.long)) + b,
    "stacked": lambda a, b: torch.stack([a, b], 1).reshape(-1, a.shape[1]),
}


MIXED = [
    (what, types)
    for at, what in enumerate(POINTWISE)
    for number, types in enumerate(permutations(kernels.DTYPES, 2))
    if EXHAUSTIVE or (at + number) % 3 == 0
]
"""Two of the six mixtures of types for each function, and six functions for each mixture; or all."""


@pytest.mark.exhaustive
@pytest.mark.parametrize(("what", "types"), [*((what, (a, a)) for what in POINTWISE for a in kernels.DTYPES), *MIXED])
def test_numbers_one_by_one(what: str, types: tuple[torch.dtype, torch.dtype], instructions: str) -> None:
    more = ((1, 1), (3, 5), (9, 64)) if EXHAUSTIVE or types[0] is types[1] else ()
    for rows, width in ((2, 257), (70, 600), *more):
        a, b = numbers(rows, width, seed=1, dtype=types[0]), numbers(rows, width, seed=2, dtype=types[1])
        with using_threads(2):
            calls = replays(POINTWISE[what], a, b)
        mixed = types[0] is not types[1] and what in ("joined", "stacked")  # torch makes them of one type first
        assert mixed or len(left(calls)) == (what == "picked") * 2  # and zeros


@pytest.mark.parametrize(
    "function", [F.silu, F.gelu, lambda x: F.gelu(x, approximate="tanh"), torch.sigmoid, torch.exp]
)
def test_functions_of_single_numbers(function: Function, instructions: str) -> None:
    """All of bfloat16; those of float32 are torch's."""
    every = torch.arange(1 << 16, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)
    assert not left(replays(lambda x: function(x) * 1.0, every))
    assert not left(replays(lambda x: function(x[:, 1:].t()), every[:6000].view(60, 100)))
    assert len(left(replays(lambda x: function(x) * 1.0, usual(3, 50, seed=1, dtype=torch.float32)))) == 1


def test_functions_whose_results_depend_on_their_neighbours_are_torchs() -> None:
    x = usual(3, 50, seed=1, dtype=torch.bfloat16)
    assert len(left(replays(lambda x: F.silu(x) * 1.0, x, mode=RowInvariance(linear=True, exact=False)))) == 1
    assert len(left(replays(lambda x: F.silu(x) * 1.0, x, mode=None))) == 1


@pytest.mark.parametrize("dtype", kernels.DTYPES)
@pytest.mark.parametrize("rows", [1, 3, 20])
def test_linear_layers(rows: int, dtype: torch.dtype, instructions: str) -> None:
    first, second = (Parameter(usual(40, 24, seed=at, dtype=dtype), requires_grad=False) for at in (1, 2))
    bias = Parameter(usual(40, seed=3, dtype=dtype), requires_grad=False)

    def function(x: Tensor) -> Tensor:
        once = F.linear(x, first) * F.linear(x, second, bias)
        return once + F.linear(once[..., 3:27], first) + F.linear(once.t()[:rows].t()[:, :1].expand(rows, 24), second)

    calls = replays(function, usual(rows, 24, seed=5, dtype=dtype), kept=[first, second, bias])
    ours = dtype is torch.float32 or kernels.form_of(first, kernels.of_plain(first))[1]
    assert bool(left(calls)) != ours


@pytest.mark.parametrize("dtype", kernels.DTYPES)
@pytest.mark.parametrize("spec", SPECS, ids=lambda spec: f"{spec.name}-{spec.block_rows}-{spec.group}-{spec.zeros}")
def test_matrices_as_they_were_published(spec: Spec, dtype: torch.dtype, instructions: str) -> None:
    spec = replace(spec, outputs=40, inputs=512)
    _packed_layers(BlockMatrix(spec, parts_of(spec, seed=3), dtype), dtype)


@pytest.mark.parametrize("dtype", kernels.DTYPES)
@pytest.mark.parametrize("form", [Form("int8", 40, 512), Form("int4_32", 40, 512)], ids=lambda form: form.name)
def test_packed_matrices(form: Form, dtype: torch.dtype, instructions: str) -> None:
    packed = form.pack(usual(40, 512, seed=4, dtype=torch.float32))
    _packed_layers(PackedMatrix(form, packed, dtype), dtype)


def _packed_layers(matrix: PackedMatrix, dtype: torch.dtype) -> None:
    """Layers of a matrix in some format are programs, but where bfloat16 is not multiplied in pairs."""
    bias = Parameter(usual(40, seed=3, dtype=dtype), requires_grad=False)

    def function(x: Tensor) -> Tensor:
        return F.linear(x, matrix, bias) * F.linear(x * 2, matrix) + F.linear(x.t().contiguous().t(), matrix)

    calls = replays(function, usual(3, 512, seed=5, dtype=dtype), kept=[bias])
    plain = Parameter(usual(40, 512, seed=6, dtype=dtype), requires_grad=False)
    ours = dtype is torch.float32 or kernels.form_of(plain, kernels.of_plain(plain))[1]
    assert bool(left(calls)) != ours


@pytest.mark.parametrize("int8", [False, True])
@pytest.mark.parametrize("dtype", kernels.DTYPES)
def test_layers_of_the_same_rows_are_one_call(
    dtype: torch.dtype, int8: bool, monkeypatch: pytest.MonkeyPatch, instructions: str
) -> None:
    """Whatever their formats are and is computed between them; but not across what Python does to the rows."""
    specs = [Spec(name, 40 + at, 512) for at, name in enumerate("q4_k q6_k q8_0 q4_0 q4_k".split())]
    a, b, c, d, e = (BlockMatrix(spec, parts_of(spec, seed=spec.outputs), dtype) for spec in specs)
    bias = Parameter(usual(41, seed=3, dtype=dtype), requires_grad=False)

    def function(x: Tensor) -> Tensor:
        x = x * 2
        first, second = F.linear(x, a)[:, :40], F.linear(x, b)[:, :40]
        once = first * second + F.linear(x, c)[:, :40] * F.linear(x[1:], d)[:1, :40]
        biased = F.linear(x, b, bias)[:, :40] + F.linear(x, d)[:, :40]
        x += 1
        return once + biased * F.linear(x, e)[:, :40] * F.linear(x, c)[:, :40]

    found: list[int] = []

    def counting(taken: Any) -> Any:
        done = fused(taken)
        each = [operation.words for calls in done if calls for operation in calls]
        found.extend(words[1] for words in each if words[0] == encoding_of.LINEAR)
        return done

    monkeypatch.setattr(writer, "fused", counting)
    for rows in (2, 9):
        replays(
            function,
            usual(rows, 512, seed=5, dtype=dtype),
            kept=[bias],
            mode=RowInvariance(linear=True, exact=True, int8=int8),
        )
        biased = dtype is torch.bfloat16  # its sums are in float32, and those of the others are not
        assert sorted(found) == ([1, 1, 2, 4] if biased else [1, 2, 5])
        found.clear()


def test_parameters_are_read_where_they_lay_and_kept() -> None:
    weight = Parameter(usual(8, 8, seed=1, dtype=torch.float32), requires_grad=False)
    calls = replays(lambda x: F.linear(x, weight) * 2, usual(2, 8, seed=2, dtype=torch.float32), kept=[weight])
    x = usual(2, 8, seed=3, dtype=torch.float32)
    weight.mul_(3.0)
    expected = kernels.linear(x, weight) * 2
    assert torch.equal(calls.replay((x,)), expected)
    weight.data = torch.zeros(8, 8)
    assert torch.equal(calls.replay((x,)), expected)


def test_calls_of_python_see_and_change_what_programs_compute() -> None:
    seen: list[Tensor] = []

    @one_call
    def look(x: Tensor, parts: Any) -> Tensor:
        seen.append(x.clone())
        return x.t().contiguous().t() if len(seen) % 2 else x + parts[0]  # numbers lie otherwise every second time

    def function(x: Tensor) -> Tensor:
        y = x * 3
        y.add_(1.0)
        z = look((y - x)[:, 1:], x.split([1, 4], dim=1))
        return (z[:, :2] + y[:, :2]) * 2

    x = numbers(4, 5, seed=1)
    with torch.inference_mode():
        _, step = recorded(lambda: function(x), (x,), (), (), None)
        calls = with_programs(step, Arena())
        assert len(left(calls)) in (3, 4, 5, 6)
        for seed in range(4):
            x = numbers(4, 5, seed=seed)
            before = len(seen)
            found = calls.replay((x,))
            seen[before:] = seen[before + 1 :]
            assert same(found, function(x))
            seen.append(x)


def test_logits_are_the_caller_s_and_the_rest_makes_room() -> None:
    sizes: list[int] = []
    put = writer.put

    def measured(buffers: Any, of: Any) -> Any:
        total = put(buffers, of)
        sizes.append(total.nbytes)
        for a, b in permutations(zip(buffers, of, strict=True), 2):
            beside = a[0].first <= b[0].last and b[0].first <= a[0].last
            ends = [one.offset.plus(size) for one, size in (a, b)]
            assert not beside or ends[0].within(b[0].offset) or ends[1].within(a[0].offset)
            assert ends[0].within(total)
        return total

    def function(x: Tensor) -> Tensor:
        for at in range(50):
            x = (x + at) * x.flip(0) if at % 10 == 0 else x - 0.5
        return x.view(-1)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(writer, "put", measured)
        calls = replays(function, usual(16, 64, seed=1, dtype=torch.float32))
    assert sizes and sizes[0] <= 5 * 16 * 64 * 4
    first = calls.replay((torch.ones(16, 64),))
    before = first.clone()
    calls.replay((torch.zeros(16, 64),))
    assert torch.equal(first, before)


def test_an_arena_serves_lists_of_all_sizes() -> None:
    arena = Arena()
    sizes = (3, 1, 40, 9)
    made = []
    for size in sizes:
        x = usual(size, 7, seed=size, dtype=torch.float32)
        _, step = recorded(lambda x=x: (x * 2 + 1).flip(0) * 3, (x,), (), (), None)
        made.append(with_programs(step, arena))
    for size, calls in zip(sizes, made, strict=True):
        x = usual(size, 7, seed=99, dtype=torch.float32)
        assert torch.equal(calls.replay((x,)), (x * 2 + 1).flip(0) * 3)


@settings(max_examples=60, deadline=None)
@drawn(data=st.data())
def test_any_views_of_anything(data: st.DataObject) -> None:
    shape = data.draw(st.lists(st.integers(1, 4), min_size=3, max_size=3))
    a, b = numbers(*shape, seed=1), numbers(*shape, seed=2)
    order = data.draw(st.permutations(range(3)))
    cut = [data.draw(st.integers(0, size - 1)) for size in shape]
    step = data.draw(st.integers(1, 2))
    back = [order.index(at) for at in range(3)]

    def function(a: Tensor, b: Tensor) -> Tensor:
        x = (a.permute(order) * b.permute(order).contiguous()).permute(back)
        x = x[cut[0] :, cut[1] :: step, cut[2] :]
        y = torch.cat((x, -x), dim=data.draw(st.just(order[0])))
        return (y.reshape(-1) + y.permute(order).reshape(-1)).view(-1, 2 if y.numel() % 2 == 0 else 1)

    assert not left(replays(function, a, b))


def test_what_is_no_program_is_refused() -> None:
    buffers = array("q", [0])
    for code in (
        [9],
        [1],
        [1, 9],
        [2, 0, 0],
        [3, 1, 1, 1, 1, 1, 5, 0],
        [4, 0, 0, 1],
        [5, 0, 0, 0, 0],
        [1, 1, 7, 0, 1, 1, 1, 0, 0, 0, 0, 0, 0, 0],
    ):
        with pytest.raises(ValueError, match="no program"):
            kernels._kernel.run_program(array("q", code), buffers, 1)
    kernels._kernel.run_program(array("q"), buffers, 1)


def test_more_dimensions_than_the_kernels_have_are_torchs() -> None:
    x = usual(3, 3, 3, 3, 3, 3, seed=1, dtype=torch.float32)
    calls = replays(lambda x: x[:, ::2, ::2, ::2, ::2, ::2] * 2 + 1, x)
    assert len(left(calls)) == 1
    assert encoding_of._DIMS == 4
