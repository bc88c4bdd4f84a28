"""Checkpoints as they are published, on a CUDA device: computed from as they lie, and to the bit the answers of their
values in bfloat16, wherever the bytes lie.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from gguf import GGMLQuantizationType as Kind

from stowage import Engine, Memory
from stowage.cuda.unpacking import launch
from stowage.weights.quantized.blocks import BlockMatrix
from stowage.weights.quantized.formats import Spec, dequantized, dequantized_by_torch, unpacks_at_once
from stowage.weights.quantized.stacks import expert_linear, has_grouped_products
from tests.answers import bits
from tests.block_formats import SPECS, parts_of
from tests.engine.conftest import greedy, random_prompt
from tests.weights import gguf_files, published_files, test_gguf, test_published

pytestmark = pytest.mark.cuda
PROMPTS = [random_prompt(length, seed=length) for length in (70, 3, 300)]
PARAMS = replace(greedy(12), logprobs=3)


def said(source: Path, weights: str = "auto", recorded: bool = False) -> list[Any]:
    """Tokens and logarithms of probabilities of three answers, together and alone; ``recorded``: by graphs."""
    memory = Memory(kv_cache_memory="256MiB", host_memory="64MiB", weights=weights)
    with Engine(source, memory, device="cuda", dtype="bfloat16", deterministic=True) as engine:
        if engine.parts.graphs is not None:  # which is quicker does not matter here
            engine.parts.graphs.clock = lambda: 0.0
        alone = bits(engine.generate([one], PARAMS)[0] for one in PROMPTS)
        assert bits(engine.generate(list(PROMPTS), PARAMS)) == alone, "beside others"
        assert not recorded or engine.stats()["graphs"]["captured_steps"] > 10
        return alone


@pytest.mark.parametrize("name", test_published.METHODS)
def test_published_layers(name: str, tmp_path: Path) -> None:
    family, method, quantiser = test_published.METHODS[name]
    changed = test_published.DENSE if family == "qwen2" else {}
    published, plain = published_files.write(family, tmp_path, method, quantiser, **changed)
    expected = said(plain)
    assert said(published, recorded=True) == expected
    assert said(published, "*=stream") == expected
    assert said(published, "*=prefetch") == expected


@pytest.mark.parametrize("name", test_published.EXPERTS)
def test_published_experts(name: str, tmp_path: Path) -> None:
    family, method, quantiser = test_published.EXPERTS[name]
    changed = test_published.CHANGED.get(name, {})
    published, plain = published_files.write(family, tmp_path, method, quantiser, **changed)
    expected = said(plain)
    assert said(published) == expected
    assert said(published, "*=stream") == expected
    assert said(published, "*=experts") == expected


@pytest.mark.parametrize("kinds", test_gguf.KINDS)
def test_gguf_files(kinds: str, tmp_path: Path) -> None:
    plain = test_gguf.model_of("llama", tmp_path / "model", test_gguf.SIZE)
    path = gguf_files.write(plain, tmp_path / "m.gguf", test_gguf.mixed([Kind[name] for name in kinds.split()]))
    expected = said(test_gguf.dequantised(path, plain, tmp_path / "values"))
    assert said(path, recorded=True) == expected
    assert said(path, "*=stream") == expected
    assert said(path, "*=prefetch") == expected


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("spec", [spec for spec in SPECS if spec.name in launch.FORMATS], ids=str)
def test_kernels_unpack_what_torch_does_to_the_bit(spec: Spec, dtype: torch.dtype) -> None:
    parts = parts_of(spec, 5)
    there = {part: values.cuda() for part, values in parts.items()}
    assert unpacks_at_once(spec, there, dtype)
    found = dequantized(spec, there, dtype)
    assert torch.equal(found.cpu(), dequantized_by_torch(spec, parts, dtype))


@pytest.mark.parametrize("spec", [spec for spec in SPECS if spec.name not in launch.FORMATS], ids=str)
def test_what_kernels_do_not_know_is_unpacked_by_torch_to_the_bit(spec: Spec) -> None:
    parts = parts_of(spec, 5)
    there = {part: values.cuda() for part, values in parts.items()}
    assert not unpacks_at_once(spec, there, torch.bfloat16)
    assert torch.equal(dequantized(spec, there).cpu(), dequantized_by_torch(spec, parts))


@pytest.mark.parametrize("rows", [1, 32, 256])
def test_large_matrices_are_multiplied_in_pieces(rows: int) -> None:
    spec = Spec("q4_0", 18000, 4096)
    parts = {part: values.cuda() for part, values in parts_of(spec).items()}
    parts[""].view(18000, -1, 18)[..., 1] &= 0x23  # small scales
    x = torch.randn(rows, 4096, device="cuda", dtype=torch.bfloat16)
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    found = BlockMatrix(spec, parts, torch.bfloat16).multiply(x)
    assert torch.cuda.max_memory_allocated() - before < (136 << 20) + 3 * found.nbytes
    whole = F.linear(x, dequantized_by_torch(spec, parts, torch.bfloat16))
    assert torch.allclose(found, whole, rtol=2e-2, atol=1e-2 * float(whole.abs().max()))


@pytest.mark.parametrize(("outputs", "inputs"), [(5760, 2880), (4096, 7168), (256, 14336)])
def test_rows_of_an_expert_are_their_own(outputs: int, inputs: int) -> None:
    if not has_grouped_products(torch.device("cuda", 0), torch.bfloat16):
        pytest.skip("torch has no grouped products for this GPU, and the engine says so")
    generator = torch.Generator("cuda").manual_seed(1)
    weight = torch.randn(outputs, inputs, device="cuda", dtype=torch.bfloat16, generator=generator)
    x = torch.randn(300, inputs, device="cuda", dtype=torch.bfloat16, generator=generator)
    whole = expert_linear(x, weight)
    plain = F.linear(x, weight)
    for begin, end in ((0, 1), (7, 9), (5, 40), (0, 129), (17, 300)):
        assert torch.equal(expert_linear(x[begin:end], weight), whole[begin:end])
    assert torch.allclose(whole, plain, rtol=2e-2, atol=1e-2 * float(plain.abs().max()))
