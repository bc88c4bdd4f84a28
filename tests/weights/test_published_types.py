"""The type that a checkpoint which others quantised is run in: as it says, as is asked, and where there are kernels for
it; and what lies in its files in another one.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

import stowage
from stowage import Engine, Memory
from stowage.executor.determinism.pieces import no_kernels_reason
from stowage.models import loading
from stowage.planner.model import read_model
from stowage.weights.quantized.blocks import BlockLinear
from tests.answers import bits
from tests.depth import mostly_rare
from tests.weights import published_files as files
from tests.weights.conftest import GREEDY, assert_same_answers, logits, prompt
from tests.weights.test_published import METHODS, int4, taken_by


@pytest.mark.parametrize("name", mostly_rare(["fp8", "int4-32"], ["int4-32"]))
def test_it_is_run_in_another_type_which_the_model_says_it_has(name: str, tmp_path: Path) -> None:
    """Transformers says the type of the first parameter: a code of 8 bits, or a scale."""
    published, plain = files.write("llama", tmp_path, *METHODS[name][1:])
    model, values = loading.load(published, "float32").model, loading.load(plain, "float32").model
    assert model.dtype is model.model.dtype is torch.float32
    assert type(model).__name__ == "LlamaForCausalLM"
    for path, layer in model.named_modules():
        if isinstance(layer, BlockLinear):
            values.get_submodule(path).weight.data = layer.weight
    values.save_pretrained(tmp_path / "values")
    asked = [prompt(length, length)[0].tolist() for length in (70, 3, 40)]
    answers = []
    for source in (tmp_path / "values", published):
        with Engine(source, Memory(kv_cache_memory="8MiB"), dtype="float32") as engine:
            answers.append(bits(engine.generate(list(asked), GREEDY)))
    assert answers[0] == answers[1]
    offloaded = stowage.offload(published, weights="*=stream", torch_dtype=torch.float32)
    assert torch.equal(logits(offloaded, prompt()), logits(model, prompt()))
    offloaded.stowage.close()


def test_other_types_are_run_in_too(tmp_path: Path) -> None:
    published, plain = files.write("llama", tmp_path, *METHODS["fp8"][1:])
    expected = logits(loading.load(plain, "float32").model, prompt())
    found = logits(loading.load(published, "float32").model, prompt())
    assert torch.allclose(found, expected, rtol=1e-2, atol=0.05 * float(expected.abs().max()))
    (tmp_path / "published" / "generation_config.json").write_text(json.dumps({"eos_token_id": [7, 9]}))
    assert loading.eos_ids(loading.load(published).model) == {7, 9}


def test_one_that_says_float16_is_run_where_there_are_kernels(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """By an engine on a CPU, in float32: most checkpoints of GPTQ and AWQ say float16. A script gets what they say."""
    published, _ = files.write("llama", tmp_path, *METHODS["awq-64"][1:])
    files.rewrite(published, dtype="float16")
    model = loading.load(published).model
    assert model.dtype is torch.float32 and "run in float32: config.json says float16" in caplog.text
    assert read_model(published).dtype == "float32" and read_model(published).total_bytes == taken_by(model)
    with Engine(published, Memory(kv_cache_memory="8MiB")) as engine:
        assert engine.exact and not no_kernels_reason(engine.model)
    offloaded = stowage.offload(published, weights="*=stream")
    assert offloaded.dtype is loading.load(published, "float16").model.dtype is torch.float16
    offloaded.stowage.close()
    assert read_model(published, on_cpu=False).dtype == read_model(published, "float16").dtype == "float16"
    monkeypatch.setenv("STOWAGE_PURE_PYTHON", "1")
    assert read_model(published).dtype == "float16" and loading.load(published).model.dtype is torch.float16


@pytest.mark.parametrize("stored", mostly_rare([torch.bfloat16, torch.float32], [torch.bfloat16]))
@pytest.mark.parametrize(
    ("family", "router"),
    mostly_rare([("hunyuan_moe", "gate.wg.weight"), ("ernie4_5_moe", "gate.weight")], ["ernie4_5_moe"]),
)
def test_routers_of_float32_are_so_whatever_the_rest_is_run_in(
    family: str, router: str, stored: torch.dtype, tmp_path: Path
) -> None:
    """Their classes make them so, in a file that has them in bfloat16 too; one that has float32 is not rounded."""
    without = ("embed", "lm_head", "norm", "mlp.gate.", "statics")
    directories = files.write(family, tmp_path, *int4(32), without=without)
    files.put_routers(directories, router, stored)
    published, plain = directories
    assert_same_answers(published, plain, "auto", "*=stream")
    model = loading.load(published).model
    assert all(p.dtype is torch.float32 for name, p in model.named_parameters() if name.endswith(router))
    assert read_model(published).total_bytes == taken_by(model)


@pytest.mark.parametrize("stored", mostly_rare([torch.float16, torch.float32], [torch.float32]))
def test_routers_of_another_type_than_is_run_are_computed_with(stored: torch.dtype, tmp_path: Path) -> None:
    """DeepSeek's, GLM's and others make them float32 themselves at every step."""
    directories = files.write("deepseek_v3", tmp_path, *int4(32))
    files.put_routers(directories, "gate.weight", stored)
    published, plain = directories
    assert_same_answers(published, plain, "auto", "*=stream")
    assert read_model(published).total_bytes == taken_by(loading.load(published).model)
