"""Checkpoints in NVFP4 as compressed-tensors and NVIDIA's Model Optimizer publish them: what their configs say, in
config.json or beside it, and what is refused.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

import stowage
from stowage import CheckpointError, UnsupportedModelError
from stowage.evaluation import pack as packing
from stowage.models import loading
from stowage.planner.model import read_model
from tests.weights import published_files as files
from tests.weights.conftest import answers_of, assert_same_answers
from tests.weights.test_published import MODELOPT, compressed, nvfp4

LAYER = "model.layers.0.mlp.down_proj"
LEFT = ["lm_head", "model.layers.1.self_attn*", "model.layers.*.mlp.up_proj"]
"""As Model Optimizer writes it: with wildcards."""
WITHOUT = ("embed", "lm_head", "norm", "layers.1.self_attn", "up_proj")


def _says(directory: Path, beside: Any) -> Path:
    """The checkpoint, whose config.json says nothing, with another file that does."""
    config = json.loads((directory / "config.json").read_text())
    config.pop("quantization_config", None)
    (directory / "config.json").write_text(json.dumps(config))
    text = beside if isinstance(beside, str) else json.dumps(beside)
    (directory / "hf_quant_config.json").write_text(text)
    return directory


def _beside(algorithm: Any, **entries: Any) -> dict[str, Any]:
    stated = {"quant_algo": algorithm, "kv_cache_quant_algo": "FP8", "group_size": 16, "exclude_modules": LEFT}
    return {"producer": {"name": "modelopt", "version": "0.37.0"}, "quantization": stated | entries}


@pytest.mark.parametrize("where", ["config.json", "hf_quant_config.json"])
def test_what_model_optimizer_left_out_is_numbers_wherever_it_says_so(where: str, tmp_path: Path) -> None:
    stated = MODELOPT | {"ignore": LEFT}
    published, plain = files.write("llama", tmp_path, stated, files.nvfp4(False), without=WITHOUT)
    if where != "config.json":
        _says(published, _beside("NVFP4"))
    assert_same_answers(published, plain)
    total = read_model(published).total_bytes
    assert total == sum(tensor.nbytes for tensor in loading.load(published).model.state_dict().values())
    (published / "model.safetensors").unlink()
    assert read_model(published).total_bytes == pytest.approx(total, rel=1e-3), "by the config alone"


def test_layers_of_several_algorithms_are_read(tmp_path: Path) -> None:
    """MIXED_PRECISION: of each layer its own."""
    fp8, fp4 = files.fp8(0, 0, "weight_scale"), files.nvfp4(False)
    layers = {
        f"model.layers.{i}.self_attn.{name}_proj": {"quant_algo": "FP8" if name in "qk" else "NVFP4", "group_size": 16}
        for i in range(2)
        for name in "qkvo"
    }
    stated = {"quant_method": "modelopt", "quant_algo": "MIXED_PRECISION", "quantized_layers": layers}
    source = files.write("llama", tmp_path, stated, None)[1]
    state, published, meant = load_file(source / "model.safetensors"), dict[str, Tensor](), dict[str, Tensor]()
    for name, values in state.items():
        base = name.removesuffix(".weight")
        how = layers.get(base, {}).get("quant_algo")
        parts, own = {"FP8": fp8, "NVFP4": fp4}[how](values.float()) if how else ({"weight": values}, values)
        published |= {f"{base}.{part}": tensor for part, tensor in parts.items()}
        meant[name] = own.to(torch.bfloat16)
    files.rewrite(tmp_path / "published", published)
    files.rewrite(source, meant)
    assert_same_answers(tmp_path / "published", source)
    total = read_model(tmp_path / "published").total_bytes
    (tmp_path / "published" / "model.safetensors").unlink()
    assert read_model(tmp_path / "published").total_bytes == pytest.approx(total, rel=1e-3), "by the config alone"


def test_global_scales_are_few_reads_and_lie_in_memory(tmp_path: Path) -> None:
    """Whatever is streamed or cached: they are some bytes of each matrix."""
    published, _ = files.write("qwen3_moe", tmp_path, *nvfp4())
    model = stowage.offload(published, weights="*=experts")
    named = dict(model.named_parameters())
    experts = next(one for name, one in named.items() if name.endswith("gate_up_proj_nvfp4_globals"))
    assert experts.dim() == 2 and experts.shape[1] == 2 and experts.dtype is torch.float32
    made = [name for name in named if name.endswith("nvfp4_globals")]
    assert made and set(made) <= set(model.made_parameters)
    model.stowage.close()


def test_what_is_not_read_is_refused_by_name(tmp_path: Path) -> None:
    published, _ = files.write("llama", tmp_path, MODELOPT, files.nvfp4(False))
    state = load_file(published / "model.safetensors")

    def refused(match: str, changed: Mapping[str, Tensor | None] | None = None, **entries: Any) -> None:
        found = {name: tensor for name, tensor in (state | (changed or {})).items() if tensor is not None}
        files.rewrite(published, found, quantization_config=MODELOPT | entries)
        with pytest.raises((UnsupportedModelError, CheckpointError), match=match):
            loading.load(published)

    for algorithm in ("NVFP4_AWQ", "W4A8_NVFP4_FP8", "MXFP8", "MIXED_PRECISION", None, 7):
        refused(r"by modelopt as '.*', which is not computed with here: NVFP4, W4A16", quant_algo=algorithm)
    layers = {"a": {"quant_algo": "NVFP4"}, LAYER: {"quant_algo": "W4A8_AWQ"}, "b": 3}
    refused(f"as 'W4A8_AWQ' in {LAYER}", quant_algo="MIXED_PRECISION", quantized_layers=layers)
    codes, scales = state[f"{LAYER}.weight"], state[f"{LAYER}.weight_scale"]
    for smoothed in ("pre_quant_scale", "svdquant_lora_a"):
        refused(f"quantised to NVFP4 with a {smoothed}", {f"{LAYER}.{smoothed}": torch.ones(256)})
    refused("is incomplete: it has no .*down_proj.weight_scale", {f"{LAYER}.weight_scale": None})
    refused("is of the type torch.uint8", {f"{LAYER}.weight_scale_2": None})
    refused("different checkpoints", {f"{LAYER}.weight": codes[:, :64]})
    refused("different checkpoints", {f"{LAYER}.weight": codes[:100]})
    refused("different checkpoints", {f"{LAYER}.weight_scale": scales[:, :8]})
    refused("different checkpoints", {f"{LAYER}.weight_scale": scales.view(torch.uint8)})
    refused("different checkpoints", {f"{LAYER}.weight_scale_2": torch.ones(256)})
    refused("different checkpoints", {f"{LAYER}.weight_scale_2": torch.ones(1).bfloat16()})
    refused("different checkpoints", {f"{LAYER}.weight_scale_2": torch.ones(0)})


def test_what_compressed_tensors_has_besides_is_refused_by_name(tmp_path: Path) -> None:
    stated, quantiser = nvfp4()
    published, plain = files.write("llama", tmp_path, stated, quantiser)
    state, expected = load_file(published / "model.safetensors"), answers_of(plain)
    assert answers_of(published) == expected
    files.rewrite(published, quantization_config=compressed("float", 4, "nvfp4-pack-quantized", group_size=64))
    with pytest.raises(UnsupportedModelError, match=r"in 4 bits of the type float in groups of 64, .*\(NVFP4\)"):
        loading.load(published)
    changes: tuple[tuple[str, str, Tensor | None], ...] = (
        ("weight_zero_point", "with a weight_zero_point", torch.zeros(8, 16)),
        ("weight_global_scale", "has no .*weight_global_scale", None),
        ("weight_packed", "with groups of 16 is not read", torch.zeros(256, 64, dtype=torch.int32)),
    )
    for part, match, tensor in changes:
        found = {name: value for name, value in (state | {f"{LAYER}.{part}": tensor}).items() if value is not None}
        files.rewrite(published, found, quantization_config=stated)
        with pytest.raises((UnsupportedModelError, CheckpointError), match=match):
            loading.load(published)
    whole = {name: t.view(()) if name.endswith("global_scale") else t for name, t in state.items()}
    files.rewrite(published, whole)
    assert answers_of(published) == expected, "a global scale may be of no dimension"


def test_a_file_beside_config_json_that_says_nothing_of_use(tmp_path: Path) -> None:
    published, plain = files.write("llama", tmp_path, MODELOPT, files.nvfp4(False))
    for beside in ("{", "\xff\xfe", "[" * 100_000):
        _says(published, beside)
        for load in (loading.load, read_model):
            with pytest.raises(CheckpointError, match=r"hf_quant_config.json cannot be read as JSON"):
                load(published)
    for beside in ("[]", "7", '{"quantization": [1]}', '{"quantization": {"quant_algo": null}}'):
        _says(published, beside)
        with pytest.raises(UnsupportedModelError, match=r"holds quantised weights .*does not say how"):
            loading.load(published)
        assert_same_answers(_says(plain, beside), plain)
    for algorithm, match in (
        ("FP4_ODD", "by modelopt as 'FP4_ODD'"),
        ({"a": 1}, "by modelopt as "),
        (["NVFP4"], "as "),
    ):
        _says(published, _beside(algorithm))
        with pytest.raises(UnsupportedModelError, match=match):
            loading.load(published)
        (note,) = read_model(published).notes
        assert "does not run as it is" in note
        with pytest.raises(UnsupportedModelError, match=r"quantised already|does not say how"):
            packing.pack(str(published), tmp_path / "packed", "int8")
