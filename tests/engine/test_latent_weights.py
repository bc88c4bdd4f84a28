"""Weights of latent attention as the kernels take them: kept only while they are what the model has."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from stowage.executor import kernels
from stowage.executor.latent_weights import LatentWeights
from tests.native import needs_native

HEADS, NOPE, VALUE, RANK = 5, 8, 6, 32


def attention(weight: Any = None) -> Any:
    own = nn.Parameter(torch.randn(HEADS * (NOPE + VALUE), RANK), requires_grad=False) if weight is None else weight
    return SimpleNamespace(
        kv_lora_rank=RANK, qk_nope_head_dim=NOPE, v_head_dim=VALUE, kv_b_proj=SimpleNamespace(weight=own)
    )


def expected(module: Any) -> tuple[Tensor, Tensor]:
    whole = module.kv_b_proj.weight.view(HEADS, NOPE + VALUE, RANK)
    return whole[:, :NOPE].transpose(1, 2), whole[:, NOPE:]


def right(found: tuple[Tensor, Tensor], module: Any) -> bool:
    return found[0].is_contiguous() and all(map(torch.equal, found, expected(module)))


def test_what_is_kept_is_made_anew_for_other_numbers() -> None:
    weights, module = LatentWeights(keeps=True), attention()
    first = weights.of(module, HEADS)
    assert right(first, module)
    assert weights.of(module, HEADS)[0] is first[0]
    module.kv_b_proj.weight[3, 7] = 5.0
    assert right(weights.of(module, HEADS), module)
    module.kv_b_proj.weight.data = torch.randn(HEADS * (NOPE + VALUE), RANK)
    assert right(weights.of(module, HEADS), module)
    other = attention()
    assert right(weights.of(other, HEADS), other)
    assert right(weights.of(module, HEADS), module)


def test_nothing_is_kept_of_weights_that_move_or_are_made_in_each_step() -> None:
    module = attention()
    moving = LatentWeights()
    assert right(moving.of(module, HEADS), module)
    assert moving.of(module, HEADS)[0] is not moving.of(module, HEADS)[0]
    weights = LatentWeights(keeps=True)
    for _ in range(2):
        made = attention(torch.randn(HEADS * (NOPE + VALUE), RANK))
        assert right(weights.of(made, HEADS), made)
    assert not weights._turned


@needs_native
@pytest.mark.parametrize("dtype", kernels.DTYPES)
@pytest.mark.parametrize("rows", [1, 3])
def test_heads_are_multiplied_each_by_its_own_wherever_they_lie(dtype: torch.dtype, rows: int) -> None:
    module = attention(nn.Parameter(torch.randn(HEADS * (NOPE + VALUE), RANK).to(dtype), requires_grad=False))
    for_queries, for_values = LatentWeights().of(module, HEADS)
    assert not for_values.is_contiguous(), "they lie between others"
    for weight in (for_queries, for_values):
        x = torch.randn(rows, HEADS, weight.shape[-1]).to(dtype)
        found = kernels.per_head(x, weight)
        for head in range(HEADS):
            assert torch.equal(found[:, head], kernels.linear(x[:, head].contiguous(), weight[head]).to(dtype))
