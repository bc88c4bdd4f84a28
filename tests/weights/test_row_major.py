"""Matrices of GPTQ and AWQ that stay in memory are rearranged there, and mean the same to the bit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from stowage.models import loading
from stowage.native import extension as _extension
from stowage.native.switches import PURE_PYTHON
from stowage.weights.quantized.blocks import BlockLinear, BlockMatrix
from stowage.weights.quantized.formats import Spec, dequantized_by_torch
from stowage.weights.quantized.row_major import by_outputs, rearrange
from stowage.weights.quantized.stacks import BlockStack, stackings
from tests.native import needs_native
from tests.weights import published_files as files
from tests.weights.conftest import assert_same_answers, logits, prompt
from tests.weights.test_published import words

extension: Any = _extension
pytestmark = needs_native


def random_parts(spec: Spec, seed: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    found = {}
    for part, (shape, dtype) in spec.tensors().items():
        if dtype is torch.int32:
            found[part] = torch.randint(-(1 << 31), 1 << 31, shape, generator=generator).to(torch.int32)
        else:
            found[part] = torch.randn(shape, generator=generator).to(dtype)
    return found


def layer_of(spec: Spec, parts: dict[str, Tensor]) -> BlockLinear:
    layer = BlockLinear(spec, None, torch.float32)
    for part, values in parts.items():
        layer.register_parameter(layer._names[part], nn.Parameter(values, requires_grad=False))
    return layer


@settings(max_examples=60, deadline=None)
@given(
    name=st.sampled_from(["gptq", "awq"]),
    outputs=st.integers(1, 40).map(lambda eighths: 8 * eighths),
    group=st.sampled_from([0, 32, 64, 128]),
    groups=st.integers(1, 5),
    seed=st.integers(0, 1 << 20),
)
def test_the_same_weights_in_the_same_memory(name: str, outputs: int, group: int, groups: int, seed: int) -> None:
    inputs = (group or 96) * groups
    spec = Spec(name, outputs, inputs, group, zeros=True, scale_dtype=torch.float16)
    parts = random_parts(spec, seed)
    expected = dequantized_by_torch(spec, parts)
    layer = layer_of(spec, parts)
    rearrange(layer)
    assert layer.spec == by_outputs(spec) and set(dict(layer.named_parameters())) == set(layer._names.values())
    assert isinstance(layer.matrix, BlockMatrix)
    assert {part: values.data_ptr() for part, values in layer.matrix.parts.items()} == {
        part: values.data_ptr() for part, values in parts.items()
    }
    assert torch.equal(dequantized_by_torch(layer.spec, layer.matrix.parts), expected)


@pytest.mark.parametrize("name", ["gptq", "awq"])
def test_a_large_matrix_is_shared_between_threads(name: str) -> None:
    spec = Spec(name, 8 * 129, 1024, 128, zeros=True, scale_dtype=torch.bfloat16)
    parts = random_parts(spec, 1)
    expected = dequantized_by_torch(spec, parts)
    layer = layer_of(spec, parts)
    rearrange(layer)
    assert torch.equal(dequantized_by_torch(layer.spec, layer.matrix.parts), expected)  # type: ignore[attr-defined]


def test_what_two_layers_share_is_rearranged_once_and_shared_still() -> None:
    spec = Spec("awq", 64, 128, 32, zeros=True, scale_dtype=torch.float16)
    first, second = layer_of(spec, random_parts(spec, 2)), BlockLinear(spec, None, torch.float32)
    for name, parameter in first.named_parameters():
        second.register_parameter(name, parameter)
    expected = first.weight
    rearrange(nn.ModuleList([first, second]))
    assert torch.equal(first.weight, expected) and torch.equal(second.weight, expected)
    assert [p.data_ptr() for p in first.parameters()] == [p.data_ptr() for p in second.parameters()]


def test_others_and_what_is_not_in_memory_stay_as_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    spec = Spec("gptq", 64, 128, 32, zeros=True, scale_dtype=torch.float16)
    layers = [layer_of(each, random_parts(each, 3)) for each in (spec, Spec("q8_0", 64, 128), by_outputs(spec))]
    offloaded = layer_of(
        spec, {part: torch.zeros(()).to(v.dtype).expand(v.shape) for part, v in random_parts(spec, 4).items()}
    )
    rearrange(nn.ModuleList([*layers[1:], offloaded]))
    assert [layer.spec.name for layer in (*layers[1:], offloaded)] == ["q8_0", "int4", "gptq"]
    monkeypatch.setenv(PURE_PYTHON, "1")
    rearrange(layers[0])
    assert layers[0].spec == spec


@pytest.mark.parametrize(
    "sizes", [(12, 8, 0, 0, 8), (8, 8, 0, 0, 16), (8, 8, 0, -8, 8), (8, 16, 1, 4, 16), (8, 16, 1, 0, 12)]
)
def test_other_sizes_are_refused(sizes: tuple[int, ...]) -> None:
    memory = torch.zeros(64, dtype=torch.int32)
    with pytest.raises(ValueError, match="words of eight"):
        extension.words_by_outputs(memory.data_ptr(), memory.data_ptr(), *sizes)


@pytest.mark.parametrize("method", ["gptq", "awq"])
def test_a_model_in_memory_is_rearranged_and_one_that_is_streamed_or_mapped_is_not(method: str, tmp_path: Path) -> None:
    published, plain = files.write("llama", tmp_path, *words(method, 32))
    assert_same_answers(published, plain, "auto", "*=stream", "*=mapped")

    def formats(model: Any) -> set[str]:
        return {module.spec.name for module in model.modules() if isinstance(module, BlockLinear)}

    model = loading.load(published).model
    assert formats(model) == {"int4"}
    assert torch.equal(logits(model, prompt(9)), logits(loading.load(plain).model, prompt(9)))


@pytest.mark.parametrize(("family", "method"), [("qwen3_moe", "gptq"), ("mixtral", "awq")])
def test_stacks_of_experts_are_rearranged(family: str, method: str, tmp_path: Path) -> None:
    published, plain = files.write(family, tmp_path, *words(method, 32))
    assert_same_answers(published, plain)
    model = loading.load(published).model
    stacks = [(module, own) for module in model.modules() for own in stackings(module)]
    assert stacks
    for module, own in stacks:
        stack = getattr(module, own)
        assert isinstance(stack, BlockStack) and stack.how.spec.name == "int4"
        numbers = getattr(loading.load(plain).model.get_submodule(path_of(model, module)), own)
        assert all(torch.equal(stack[e].dequantized(), numbers[e]) for e in range(len(numbers)))


def path_of(model: nn.Module, wanted: nn.Module) -> str:
    return next(name for name, module in model.named_modules() if module is wanted)
