"""Experts that tokens chose, and their routers, as parts of programs: the very bits of torch and `stacked_linear`."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from stowage.executor import kernels
from stowage.executor.determinism.row_invariance import RowInvariance
from stowage.executor.replay.programs import operations
from stowage.weights.quantized.blocks import parameter_names
from stowage.weights.quantized.formats import Spec
from stowage.weights.quantized.stacks import Stacking, put_stacks, stacked_linear
from tests.block_formats import SPECS, parts_of
from tests.depth import mostly_rare
from tests.engine.test_programs import left, replays, usual
from tests.native import needs_native

pytestmark = needs_native
EXPERTS = 5


class Experts(nn.Module):
    """Takes one expert after the other from a stack in a published format."""

    def __init__(self, spec: Spec, dtype: torch.dtype, pieces: int, interleaved: bool, bias: bool) -> None:
        super().__init__()
        self.num_experts, self.has_bias, self.is_transposed = EXPERTS, bias, False
        self.stack = nn.Parameter(torch.empty(EXPERTS, 1))
        put_stacks(self, {"stack": Stacking(spec, pieces=pieces, interleaved=interleaved)}, dtype)
        for number in range(pieces):
            each = [parts_of(spec, 100 * expert + number) for expert in range(EXPERTS)]
            own = "stack" if pieces == 1 else f"stack_{number}"
            for part, name in parameter_names(spec, own).items():
                setattr(self, name, nn.Parameter(torch.stack([parts[part] for parts in each]), requires_grad=False))
        if bias:
            biases = usual(EXPERTS, pieces * spec.outputs, seed=9, dtype=dtype)
            self.stack_bias = nn.Parameter(biases, requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        return x


@pytest.mark.parametrize("int8", [False, True])
@pytest.mark.parametrize("dtype", mostly_rare(kernels.DTYPES, [torch.bfloat16]))
@pytest.mark.parametrize(
    "spec",
    [pytest.param(spec, marks=pytest.mark.every_family if at % 3 else ()) for at, spec in enumerate(SPECS)],
    ids=lambda spec: f"{spec.name}-{spec.block_rows}-{spec.group}-{spec.zeros}",
)
def test_each_row_by_the_matrices_of_its_expert(
    spec: Spec, dtype: torch.dtype, int8: bool, instructions: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of one stack or of two, one below the other or a row of each in turn, with biases or not. What is no expert's
    number gives zeros, and an expert may be chosen by all.
    """
    monkeypatch.setattr(operations, "_ROWS_OF_EXPERT", 0)
    for pieces, interleaved, bias in ((1, False, True), (2, False, False), (2, True, True)):
        module = Experts(spec, dtype, pieces, interleaved, bias)
        kept = [*module.parameters()]

        def function(x: Tensor, module: Any = module) -> Tensor:
            chosen = (x[:, : EXPERTS + 2].topk(2).indices - 1).reshape(-1)
            rows = (x * 0.5).repeat_interleave(2, dim=0)
            return stacked_linear(rows, module, "stack", chosen) * 2

        for rows in (1, 40):
            x = usual(rows, spec.inputs, seed=5, dtype=dtype)
            mode = RowInvariance(linear=True, exact=True, int8=int8)
            calls = replays(function, x, kept=kept, mode=mode)
            others = [call.__name__ for call in left(calls) if getattr(call, "__name__", "") == "stacked"]
            assert not others, pieces


def test_rows_of_which_several_take_one_expert_are_left_to_the_call_that_reads_it_once() -> None:
    module = Experts(SPECS[0], torch.float32, 1, False, False)
    kept = [*module.parameters()]

    def function(x: Tensor) -> Tensor:
        return stacked_linear(x * 0.5, module, "stack", x[:, :EXPERTS].topk(1).indices.reshape(-1)) * 2

    for rows, called in ((1, False), (2, False), (3, True), (40, True)):
        mode = RowInvariance(linear=True, exact=True)
        calls = replays(function, usual(rows, SPECS[0].inputs, seed=5, dtype=torch.float32), kept=kept, mode=mode)
        assert any(getattr(call, "__name__", "") == "stacked" for call in left(calls)) == called, rows


@pytest.mark.parametrize("dtype", kernels.DTYPES)
def test_sums_over_what_experts_gave(dtype: torch.dtype, instructions: str) -> None:
    """Of up to four in a program; torch has more than one order for others. Of zeros without a sign, and with one."""
    for count in range(1, 7):
        for rows, width in ((1, 64), (3, 100), (1, 2048), (40, 2880)):
            x = usual(rows * count, width, seed=count, dtype=dtype)
            x[:, 0], x[:, 1] = -0.0, torch.inf
            calls = replays(lambda x, c=count: (x * 2).view(-1, c, x.shape[1]).sum(dim=1) * 2, x)
            assert len(left(calls)) == (count > 4), (count, width)


def test_numbers_are_kept_within_limits(instructions: str) -> None:
    every = torch.arange(1 << 16, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)
    assert not left(replays(lambda x: x.clamp(min=None, max=7.0) * (x.clamp(min=-7.0, max=7.0) + 1), every))
    assert not left(replays(lambda x: x.clamp(-7.0, 7.0) * 2, every))
    limit = torch.tensor(3.0).bfloat16()
    assert len(left(replays(lambda x: x.clamp(max=limit) * 2, every, kept=[limit]))) == 1


@pytest.mark.parametrize("rows", [1, 3, 20])
def test_weights_that_are_widened_for_a_layer_are_read_as_they_are(rows: int, instructions: str) -> None:
    """As routers do it; but not where the wide weight is used otherwise too."""
    weight = nn.Parameter(usual(40, 600, seed=1, dtype=torch.bfloat16), requires_grad=False)
    x = usual(rows, 600, seed=2, dtype=torch.bfloat16)
    calls = replays(lambda x: F.linear(x.float(), weight.type(torch.float32)) * 2, x, kept=[weight])
    assert not left(calls)
    calls = replays(lambda x: F.linear(x.float() * 2, weight.float()) * 2, x, kept=[weight])
    assert not left(calls)

    def used(x: Tensor) -> Tensor:
        wide = weight.float()
        return F.linear(x.float(), wide) * wide[:, 0]

    assert len(left(replays(used, x, kept=[weight]))) == 1


@pytest.mark.parametrize("exact", [True, False])
@pytest.mark.parametrize("dtype", kernels.DTYPES)
def test_experts_that_are_given_all_tokens_multiply_those_that_chose_them(
    dtype: torch.dtype, exact: bool, instructions: str
) -> None:
    """As Llama 4's, whose inputs come first: the others are zeros, whatever an expert would make of zeros."""
    x = usual(EXPERTS, 7, 100, seed=1, dtype=dtype)
    weight = usual(EXPERTS, 100, 40, seed=2, dtype=dtype)
    chosen = torch.tensor([0, 2, 2, 0, 3, 2, 0])
    x *= (torch.arange(EXPERTS)[:, None] == chosen)[:, :, None]
    weight[1] = float("nan")
    with RowInvariance(linear=True, exact=exact):
        found = torch.bmm(x, nn.Parameter(weight, requires_grad=False))
        for token, expert in enumerate(chosen.tolist()):
            alone = F.linear(x[expert, token], weight[expert].t().contiguous())
            assert torch.equal(found[expert, token], alone)
    assert not found[torch.arange(EXPERTS)[:, None] != chosen].any()
