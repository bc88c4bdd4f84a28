"""Weights that are not resident, on a CUDA device: every delivery answers as all-resident does, to the bit, and a step
with prefetched weights is captured in a CUDA graph.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import stowage
from stowage.config.memory import Memory
from stowage.cuda.mapped import mapped
from stowage.engine.engine import Engine
from stowage.transfer.pinning import pin, should_pin_memory
from stowage.weights.host_buffers import HostBuffers
from tests.answers import bits
from tests.engine.conftest import greedy, random_prompt

pytestmark = pytest.mark.cuda
PROMPTS = [random_prompt(length, seed=length) for length in (90, 33)]


@pytest.fixture(autouse=True)
def _exact(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.backends.cuda.matmul, "allow_tf32", False)


def needs_pinning() -> None:
    if not should_pin_memory(torch.device("cuda", 0)):
        pytest.skip("device and host are one memory here")


def said(path: Path, **memory: Any) -> tuple[list[Any], dict[str, float]]:
    """Tokens and their log-probabilities, and what the weights did."""
    limits = {"kv_cache_memory": "8MiB", "host_memory": "64MiB"} | memory
    with Engine(path, Memory(**limits), device="cuda", dtype="float32") as engine:
        found = [engine.generate([prompt], greedy(6))[0] for prompt in PROMPTS * 2]
        engine.check()
        stats = engine.stats().get("weights", {})
    return bits(found), stats


@pytest.mark.parametrize("family", ["llama", "gemma3", "mixtral", "qwen3_next"])
@pytest.mark.parametrize(
    "rules", ["*=prefetch", "last 1 of 2=stream,*=prefetch", "*=mapped", "last 1 of 2=mapped,*=prefetch"]
)
def test_deliveries_answer_as_resident_weights_do(family: str, rules: str, checkpoints: Callable[..., Path]) -> None:
    if "mapped" in rules:
        needs_pinning()
    path = checkpoints(family, 4096)
    expected, _ = said(path)
    found, stats = said(path, weights=rules)
    assert found == expected and (stats["read_bytes"] > 0 or rules == "*=mapped")


@pytest.mark.parametrize("family", ["mixtral", "qwen3_moe", "gpt_oss", "qwen3_next"])
@pytest.mark.parametrize("host", ["64MiB", "800KB"])
@pytest.mark.parametrize("switch", ["", "1"])
def test_experts_come_as_they_are_chosen(
    family: str, host: str, switch: str, checkpoints: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """From host memory and from disk, pinned and not."""
    monkeypatch.setenv("STOWAGE_DISABLE_PIN_MEMORY", switch)
    path = checkpoints(family, 4096)
    expected, _ = said(path, host_memory=host)
    found, stats = said(path, host_memory=host, weights="*.experts=experts")
    assert found == expected and stats["expert_misses"] > stats["cache_experts"] > 0


def test_host_memory_is_pinned_where_it_is_and_given_back(checkpoints: Callable[..., Path]) -> None:
    needs_pinning()
    model = stowage.offload(checkpoints("llama", 4096), weights="*=prefetch", host_memory="64MiB", device="cuda")
    hosts = [location.host for load in model.stowage._loads for location in load.locations.values()]
    assert hosts and all(host.is_pinned() for host in hosts) and model.stowage.capturable
    model.stowage.close()
    assert not any(host.is_pinned() for host in hosts)


def test_a_device_reads_host_memory_where_it_is() -> None:
    """Large enough for many pages; what the host writes there, the device reads."""
    needs_pinning()
    device, host_buffers = torch.device("cuda", 0), HostBuffers()
    here = host_buffers.keep(torch.randint(0, 256, (5 << 20,), dtype=torch.uint8))
    with pytest.raises(RuntimeError, match="the memory is not pinned"):
        mapped(here, device)
    host_buffers.pin(lambda memory: pin(memory, device))
    there = mapped(here, device)
    assert there.device == device and torch.equal(there.clone().cpu(), here)
    here.random_(0, 256)
    assert torch.equal((there + 0).cpu(), here)
    del there
    torch.cuda.synchronize()
    host_buffers.close()


@pytest.mark.parametrize("family", ["llama", "gemma3"])
@pytest.mark.parametrize("rules", ["*=prefetch", "last 1 of 2=mapped,model.layers.*=prefetch"])
@torch.no_grad()
def test_a_graph_captures_a_forward_with_prefetch(family: str, rules: str, checkpoints: Callable[..., Path]) -> None:
    """Replayed with other inputs, between forwards that are not captured. The mask is given whole: while they are
    captured, models make one where they would else leave it to torch's attention, which rounds otherwise.
    """
    needs_pinning()
    rules += ",*=resident"
    model = stowage.offload(
        checkpoints(family, 4096), weights=rules, host_memory="64MiB", device="cuda", dtype="float32"
    )
    source, graph = model.stowage, torch.cuda.CUDAGraph()
    assert source.capturable

    def ids(seed: int) -> torch.Tensor:
        return torch.tensor([random_prompt(24, seed=seed)], device="cuda")

    static = ids(0)
    mask = torch.full((1, 1, 24, 24), float("-inf"), device="cuda").triu(1)
    with source.apart():
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):  # libraries get their memory before the capture
            for _ in range(2):
                model(input_ids=static, attention_mask=mask, use_cache=False)
        torch.cuda.current_stream().wait_stream(side)
        source.join()
        with torch.cuda.graph(graph):
            out = model(input_ids=static, attention_mask=mask, use_cache=False).logits
    for seed in range(6):
        expected = model(input_ids=ids(seed), attention_mask=mask, use_cache=False).logits.clone()
        static.copy_(ids(seed))
        source.join()
        for buffer in source._device_prefetcher._buffers:
            buffer.fill_(0xFF)
        graph.replay()
        assert torch.equal(out, expected)
    source.check()
