"""The bound on the prefill rate counts what a token meets, and no more: then no deadline is longer than a recompute."""

from __future__ import annotations

import pytest
import torch

from stowage.executor.peak_compute import matmul_operations_per_s, operations_per_token, prefill_tokens_per_s_most
from stowage.testing import tiny_models


def test_operations_of_a_dense_model() -> None:
    size = tiny_models.TinySize(hidden=64, layers=3, vocab=512, heads=4, kv_heads=2)
    attention = 64 * 64 * 2 + 2 * 64 * 32
    mlp = 3 * 64 * 128
    assert operations_per_token(tiny_models.build("llama", size)) == 2 * 3 * (attention + mlp), "no embedding, no head"


@pytest.mark.parametrize("family, met", [("llama4", 1), ("deepseek_v3", 2), ("qwen3_next", 2)])
def test_of_stacked_experts_those_count_that_a_token_meets(family: str, met: int) -> None:
    model = tiny_models.build(family)
    stacked = sum(p.numel() for name, p in model.named_parameters() if ".experts." in name)
    model.config.num_experts_per_tok = 0
    without = operations_per_token(model)
    model.config.num_experts_per_tok = met
    assert operations_per_token(model) - without == 2 * stacked * met // 4 > 0


def test_a_rate_comes_out() -> None:
    model = tiny_models.build("llama")
    assert matmul_operations_per_s(torch.float32, torch.device("cpu")) > 1e6
    assert prefill_tokens_per_s_most(model) > 0
