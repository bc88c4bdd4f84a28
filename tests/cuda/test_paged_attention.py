"""The paged attention kernel on a GPU: against attention in float64, replayed from a CUDA graph, in engines."""

from __future__ import annotations

import importlib.util

import pytest
import torch

from stowage.config.memory import Memory
from stowage.core.geometry import Kind
from stowage.cuda.paged_attention import launch
from stowage.engine.engine import Engine
from stowage.testing import tiny_models
from tests.engine.conftest import greedy, random_prompt
from tests.second_device.paged_cases import BOUND, EDGES, make

pytestmark = [
    pytest.mark.cuda,
    pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not here"),
]
WIDE = {"kv_heads": 2, "share": 4, "width": 128, "value_width": 128}
LARGE = {
    "pieces": WIDE | {"positions": [3000, 17]},
    "a window": WIDE | {"positions": [2000, 700], "kind": Kind.SLIDING, "window": 512, "softcap": 50.0},
    "a chunk": WIDE | {"positions": [2047, 2048], "kind": Kind.CHUNKED, "window": 1024, "block_tokens": 48},
    "sinks": {"positions": [900, 5], "share": 8, "width": 64, "value_width": 64, "sunk": True},
    "a width that is no power of two": {"positions": [900], "width": 80, "value_width": 80},
    "wide heads": {"positions": [700], "width": 256, "value_width": 256},
    "a latent": {"positions": [900, 40], "kv_heads": 1, "share": 40, "width": 576, "value_width": 512, "latent": True},
}


@pytest.mark.parametrize("name", [*EDGES, *LARGE])
@pytest.mark.parametrize("dtype", list(BOUND))
def test_it_is_attention(name: str, dtype: torch.dtype) -> None:
    bound = 1e-4 if dtype is torch.float32 else BOUND[dtype]  # a GPU's exponentials are a little off
    make(**(EDGES | LARGE)[name], dtype=dtype).on("cuda").check(bound)


def test_a_graph_is_replayed_with_other_lengths() -> None:
    """What was captured with padding alone gives the answers to what its tensors hold later."""
    case = make([1500, 3, 700], **WIDE, spare=4, dtype=torch.bfloat16).on("cuda")
    held = [tensor.clone() for tensor in (case.blocks, case.bases, case.positions)]
    for tensor in (case.blocks, case.bases, case.positions):
        tensor.zero_()
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        case.found()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = case.found()
    for tensor, content in zip((case.blocks, case.bases, case.positions), held, strict=True):
        tensor.copy_(content)
    graph.replay()
    torch.testing.assert_close(found.cpu().double(), case.expected, rtol=0, atol=BOUND[torch.bfloat16])


@pytest.mark.parametrize("family", ["llama", "gemma2", "gpt_oss", "llama4", "deepseek_v3", "qwen3_next"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_engines_use_it(family: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """The trial finds it right for every sort of layer; answers in float32 are those with torch's attention."""
    monkeypatch.setattr(torch.backends.cuda.matmul, "allow_tf32", False)
    model = tiny_models.build(family).to("cuda", dtype).eval()
    prompts = [random_prompt(length, seed=length) for length in (150, 33)]
    found = []
    for switch in ("", "1"):
        monkeypatch.setenv(launch.SWITCH, switch)
        with Engine(model, Memory(kv_cache_memory="8MiB"), cuda_graphs=False) as engine:
            assert (engine.parts.runner._paged is launch.attend) is (switch == "")
            found.append(engine.generate(prompts, greedy(12)))
    for in_place, gathered in zip(*found, strict=True):
        for one, other in zip(in_place.logprobs, gathered.logprobs, strict=True):
            if one.token_id != other.token_id:
                assert dtype is not torch.float32, "another token"
                break
            assert abs(one.logprob - other.logprob) < (2e-3 if dtype is torch.float32 else 0.5)
