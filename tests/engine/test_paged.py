"""When single tokens are attended to by a paged kernel, and that the engine hands it what it needs. The kernel itself
needs Triton: tests/second_device.
"""

from __future__ import annotations

import importlib.util

import pytest
import torch

from stowage.config.memory import Memory
from stowage.cuda.paged_attention import launch
from stowage.engine.engine import Engine
from stowage.executor import decode_attention, kernels, paged_trial
from stowage.testing import tiny_models
from tests.engine.conftest import greedy, random_prompt

CUDA, CPU = torch.device("cuda", 0), torch.device("cpu")


def test_wanted(monkeypatch: pytest.MonkeyPatch) -> None:
    there = True
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object() if there and name == "triton" else None)
    for switch in (launch.SWITCH, "STOWAGE_PURE_PYTHON"):
        monkeypatch.delenv(switch, raising=False)
    assert all(launch.wanted(CUDA, dtype) for dtype in (torch.float32, torch.bfloat16, torch.float16))
    assert not launch.wanted(CUDA, torch.float64) and not launch.wanted(CPU, torch.float32)
    for switch in ("STOWAGE_TORCH_ATTENTION", "STOWAGE_PURE_PYTHON"):
        monkeypatch.setenv(switch, "1")
        assert not launch.wanted(CUDA, torch.float32)
        monkeypatch.setenv(switch, "0")
        assert launch.wanted(CUDA, torch.float32)
    there = False
    assert not launch.wanted(CUDA, torch.float32)


@pytest.mark.parametrize("family", ["gemma3", "llama4", "deepseek_v3"])
def test_single_tokens_beside_prompts(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Sliding, chunked, latent. Another prompt's pieces are computed in the same steps; torch stands for the kernel."""
    asked = []

    def attend(query, *rest):  # type: ignore[no-untyped-def]
        asked.append(len(query))
        return decode_attention.attend(query, *rest)

    monkeypatch.setattr(kernels, "wanted", lambda *_: False)
    model = tiny_models.build(family).eval()
    prompts = [random_prompt(length, seed=length) for length in (20, 150, 99)]
    found = []
    for kernel in (None, decode_attention.PagedKernel(attend, 1)):
        monkeypatch.setattr(paged_trial, "trusted", lambda wanted, model, pools, kernel=kernel: kernel)
        with Engine(model, Memory(kv_cache_memory="4MiB", max_num_batched_tokens=32)) as engine:
            found.append(engine.generate(prompts, greedy(12)))
    assert {1, 2} <= set(asked)
    for gathered, in_place in zip(*found, strict=True):
        assert gathered.token_ids == in_place.token_ids
        for one, other in zip(gathered.logprobs, in_place.logprobs, strict=True):
            assert abs(one.logprob - other.logprob) < 1e-4
