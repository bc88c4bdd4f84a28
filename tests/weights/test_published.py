"""Checkpoints that others quantised are computed from as they lie: to the bit the answers of their values in bfloat16,
wherever the bytes lie, and nothing is written for that.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import stowage
from stowage import BudgetError, CheckpointError, UnsupportedModelError
from stowage.evaluation import pack as packing
from stowage.models import loading
from stowage.planner import format_speed
from stowage.planner.machine import INT8, TYPICAL_CPU
from stowage.planner.model import read_model
from stowage.planner.shapes import Model
from stowage.weights.quantized.blocks import BlockLinear
from stowage.weights.quantized.formats import Spec, dequantized_by_torch
from tests.depth import mostly_rare
from tests.families import all_of
from tests.weights import published_files as files
from tests.weights.conftest import assert_cached_one_by_one, assert_same_answers, logits, prompt

FP8 = {"quant_method": "fp8", "weight_block_size": [128, 128], "activation_scheme": "dynamic", "fmt": "e4m3"}
MXFP4 = {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn", "lm_head"]}


def compressed(kind: str, bits: int, form: str, **weights: Any) -> dict[str, Any]:
    group = {"targets": ["Linear"], "weights": {"type": kind, "num_bits": bits, **weights}}
    return {
        "quant_method": "compressed-tensors",
        "format": form,
        "config_groups": {"group_0": group},
        "ignore": ["lm_head"],
    }


def int4(group: int, zeros: bool = False) -> tuple[dict[str, Any], Callable[..., Any]]:
    stated = {"strategy": "group", "group_size": group, "symmetric": not zeros}
    return compressed("int", 4, "pack-quantized", **stated), files.int4(group, zeros)


def nvfp4() -> tuple[dict[str, Any], Callable[..., Any]]:
    """Of compressed-tensors, with activations in 4 bits."""
    stated = compressed("float", 4, "nvfp4-pack-quantized", strategy="tensor_group", group_size=16, symmetric=True)
    stated["config_groups"]["group_0"]["input_activations"] = {"num_bits": 4, "type": "float", "dynamic": "local"}
    return stated, files.nvfp4(True)


def int8(form: str, group: int = 0, bits: int = 8) -> tuple[dict[str, Any], Callable[..., Any]]:
    stated = {"strategy": "group", "group_size": group} if group else {"strategy": "channel"}
    return compressed("int", bits, form, symmetric=True, **stated), files.int8(group, form == "pack-quantized", bits)


PACKED_MXFP4 = compressed("float", 4, "mxfp4-pack-quantized", strategy="group", group_size=32, symmetric=True)
MODELOPT = {
    "quant_method": "modelopt",
    "quant_algo": "NVFP4",
    "ignore": ["lm_head", "*router*", "model.layers.*.mlp.gate"],
    "kv_cache_scheme": {"dynamic": False, "num_bits": 8, "type": "float"},
}


def words(method: str, group: int) -> tuple[dict[str, Any], Callable[..., Any]]:
    stated = {"quant_method": method, "bits": 4, "group_size": group}
    return stated, (files.gptq if method == "gptq" else files.awq)(group)


CHANNELS = compressed("float", 8, "float-quantized", strategy="channel")
METHODS: Mapping[str, tuple[str, Mapping[str, Any], Callable[..., Any]]] = {
    "fp8": ("qwen3", FP8, files.fp8(128, 128, "weight_scale_inv")),
    "fp8-bfloat16-scales": ("llama", FP8, files.fp8(128, 128, "weight_scale_inv", torch.bfloat16)),
    "fp8-channels": ("qwen2", CHANNELS, files.fp8(1, 0, "weight_scale", torch.bfloat16)),
    "fp8-tensor": (
        "llama",
        compressed("float", 8, "naive-quantized", strategy="tensor"),
        files.fp8(0, 0, "weight_scale"),
    ),
    "fbgemm": ("llama", {"quant_method": "fbgemm_fp8"}, files.fp8(1, 0, "weight_scale")),
    "int4-32": ("llama", *int4(32)),
    "int4-64-zeros": ("qwen3", *int4(64, True)),
    "int4-128": ("llama", *int4(128)),
    "int8-channels": ("qwen2", *int8("int-quantized")),
    "int8-words": ("llama", *int8("pack-quantized")),
    "int8-words-64": ("qwen3", *int8("pack-quantized", 64)),
    "int4-bytes": ("llama", *int8("naive-quantized", 128, 4)),
    "mxfp4": ("llama", PACKED_MXFP4, files.mxfp4_packed),
    "nvfp4": ("qwen3", *nvfp4()),
    "nvfp4-modelopt": ("llama", MODELOPT, files.nvfp4(False)),
    "fp8-modelopt": ("llama", MODELOPT | {"quant_algo": "FP8"}, files.fp8(0, 0, "weight_scale")),
    "gptq-128": ("qwen2", *words("gptq", 128)),
    "gptq-32": ("llama", *words("gptq", 32)),
    "awq-64": ("llama", *words("awq", 64)),
}
WITHOUT = ("embed", "lm_head", "norm", "router", ".gate.", "visual", "vision", "multi_modal")
DENSE = {"use_sliding_window": False, "layer_types": ["full_attention"] * 2}


def taken_by(model: Any) -> int:
    return sum(tensor.nbytes for tensor in model.state_dict().values())


@pytest.mark.parametrize(
    "name",
    mostly_rare(
        METHODS,
        [
            "fp8",
            "fp8-channels",
            "int4-64-zeros",
            "int8-channels",
            "int8-words-64",
            "mxfp4",
            "gptq-32",
            "awq-64",
            "nvfp4",
        ],
    ),
)
def test_an_engine_answers_as_on_the_plain_values_to_the_bit(name: str, tmp_path: Path) -> None:
    family, method, quantiser = METHODS[name]
    published, plain = files.write(family, tmp_path, method, quantiser, **(DENSE if family == "qwen2" else {}))
    assert_same_answers(published, plain, "auto", "*=stream", "*=mapped")
    model = loading.load(published).model
    layers = [module for module in model.modules() if isinstance(module, BlockLinear)]
    assert len(layers) == 2 * 7, "computed from as they lie"
    assert model.dtype is torch.bfloat16
    assert torch.equal(layers[0].weight, loading.load(plain).model.model.layers[0].self_attn.q_proj.weight)
    planned = read_model(published)
    assert planned.total_bytes == taken_by(model)
    assert planned.total_parameters == read_model(plain).total_parameters
    (published / "model.safetensors").unlink()
    assert read_model(published).total_bytes == pytest.approx(planned.total_bytes, rel=1e-2), "by the config alone"


EXPERTS: Mapping[str, tuple[str, Mapping[str, Any], Callable[..., Any] | None]] = {
    "deepseek_v3-fp8": ("deepseek_v3", FP8, files.fp8(128, 128, "weight_scale_inv")),
    "qwen3_moe-int4": ("qwen3_moe", *int4(32)),
    "qwen3_moe-tensor": (
        "qwen3_moe",
        compressed("float", 8, "float-quantized", strategy="tensor"),
        files.fp8(0, 0, "weight_scale"),
    ),
    "mixtral-fp8": ("mixtral", FP8, files.fp8(128, 128, "weight_scale_inv")),
    "qwen3_moe-cut": ("qwen3_moe", FP8, files.fp8(128, 128, "weight_scale_inv")),
    "qwen3_moe-gptq": ("qwen3_moe", *words("gptq", 32)),
    "mixtral-awq": ("mixtral", *words("awq", 64)),
    "qwen3_moe-nvfp4": ("qwen3_moe", *nvfp4()),
    "qwen3_moe-mxfp4": ("qwen3_moe", PACKED_MXFP4, files.mxfp4_packed),
    "mixtral-int8": ("mixtral", *int8("int-quantized")),
    "deepseek_v3-modelopt": ("deepseek_v3", MODELOPT, files.nvfp4(False)),
    "gpt_oss-mxfp4": ("gpt_oss", MXFP4, None),
    "hunyuan_moe-gptq": ("hunyuan_moe", *words("gptq", 32)),
}
CHANGED: Mapping[str, Mapping[str, Any]] = {"qwen3_moe-cut": {"moe_intermediate_size": 192}}
"""Of one: the scales of an expert's gate and up projections do not meet."""


@pytest.mark.parametrize(
    "name", mostly_rare(EXPERTS, ["deepseek_v3-fp8", "gpt_oss-mxfp4", "mixtral-awq", "qwen3_moe-nvfp4"])
)
def test_experts_stay_as_published_and_are_cached_one_by_one(name: str, tmp_path: Path) -> None:
    family, method, quantiser = EXPERTS[name]
    published, plain = files.write(family, tmp_path, method, quantiser, **CHANGED.get(name, {}))
    assert_same_answers(published, plain)
    whole = loading.load(published)
    model = stowage.offload(published, weights="*=experts")
    assert_cached_one_by_one(model, whole.model)
    kinds = {kind for layer in whole.model.modules() for kind, _ in layer.named_parameters(recurse=False)}
    assert any("gate_up_proj_" in kind for kind in kinds)
    assert read_model(published).total_bytes == taken_by(whole.model)
    (published / "model.safetensors").unlink()
    assert read_model(published).total_bytes == pytest.approx(taken_by(whole.model), rel=1e-3), "by the config alone"


@pytest.mark.parametrize(
    ("family", "name"),
    mostly_rare(
        [("llama4", "fp8"), ("llama4", "gptq-32"), ("llama4_vision", "int4-32"), ("qwen3_vl_moe", "fp8-channels")],
        [("llama4", "gptq-32")],
    ),
)
def test_experts_that_a_tool_has_taken_apart_are_read_where_they_lie(family: str, name: str, tmp_path: Path) -> None:
    """Their family has them stacked, with inputs first; llm-compressor quantises linear layers."""
    _, method, quantiser = METHODS[name]
    published, plain = files.write(family, tmp_path, method, quantiser, without=WITHOUT)
    files.apart(published, plain, quantiser)
    assert_same_answers(published, plain, "auto", "model.layers.*=stream")
    model = loading.load(published).model
    assert any("down_proj_" in kind for layer in model.modules() for kind, _ in layer.named_parameters(recurse=False))
    assert read_model(published).total_bytes == taken_by(model)


def test_experts_taken_apart_whose_rows_alternate_are_refused(tmp_path: Path) -> None:
    _, method, quantiser = METHODS["int4-32"]
    published, plain = files.write("gpt_oss", tmp_path, method, quantiser, without=WITHOUT)
    files.apart(published, plain, quantiser)
    with pytest.raises(UnsupportedModelError, match="a row of a gate and of what it gates in turn"):
        loading.load(published)


def test_experts_of_no_whole_pages_are_cached_with_gaps_between(tmp_path: Path) -> None:
    published, _ = files.write("gpt_oss", tmp_path, *EXPERTS["gpt_oss-mxfp4"][1:], intermediate_size=288)
    whole = loading.load(published).model
    model = stowage.offload(published, weights="*=experts")
    (unit,) = (one for one in model.stowage.placement.cached if one.layer == 0)
    assert unit.gap_bytes == -(576 * 8) % 4096, "of the scales of gate and up; the blocks take whole pages"
    assert_cached_one_by_one(model, whole)


@pytest.mark.parametrize("name", mostly_rare(["fp8", "mixtral-fp8", "gpt_oss-mxfp4"], ["fp8"]))
def test_transformers_makes_the_same_numbers_of_it(name: str, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    published, _ = files.write(*({**METHODS, **EXPERTS}[name][:1]), tmp_path, *({**METHODS, **EXPERTS}[name][1:]))
    theirs = AutoModelForCausalLM.from_pretrained(published, dtype=torch.bfloat16).eval()
    found = logits(loading.load(published).model, prompt()).float()
    expected = logits(theirs, prompt()).float()
    assert (found - expected).abs().max() < 0.05 * expected.abs().max()
    assert torch.equal(found.argmax(-1), expected.argmax(-1)) or (found - expected).abs().mean() < 0.01 * expected.std()


def test_a_small_budget_streams_published_bytes(tmp_path: Path) -> None:
    published, plain = files.write("llama", tmp_path, *METHODS["int4-32"][1:], num_hidden_layers=8)
    packed = read_model(published)
    assert packed.total_bytes < 0.4 * read_model(plain).total_bytes, "embeddings are in bfloat16"
    layers = sum(layer.total_bytes for layer in packed.layers)
    unpacking_bytes = 16 * 512 * 256  # of its largest matrix, where no kernel multiplies
    room = packed.total_bytes + unpacking_bytes - layers // 4
    with pytest.raises(BudgetError, match="of device memory"):
        stowage.offload(published, device_memory=unpacking_bytes, host_memory=0)
    model = stowage.offload(published, device_memory=room, host_memory=0)
    assert 0 < model.stowage.stats()["stream_bytes"] <= layers
    assert torch.equal(logits(model, prompt()), logits(loading.load(published).model, prompt()))
    model.stowage.close()


def test_the_planner_says_which_formats_are_slower() -> None:
    known = {"fp8": {1: 2.0, 128: 1.0}, "int4": {1: 0.4}, "int4" + INT8: {1: 1.25}}
    machine = replace(TYPICAL_CPU, formats={"bfloat16": known}, measured=True)
    (said,) = format_speed.notes(["fp8", "int4"], "bfloat16", machine)
    assert said.startswith("fp8 is computed at 0.50 of the speed of bfloat16")
    (said,) = format_speed.notes(["fp8", "int4"], "float16", machine)
    assert said.startswith("fp8, int4: predicted as if they were as quick as float16; it has no kernels for them")
    assert said.endswith("In bfloat16 it has: --dtype bfloat16."), "GPTQ and AWQ are published in float16"
    (said,) = format_speed.notes(["awq"], "bfloat16", machine)
    assert said.startswith("awq: predicted as if they were as quick as bfloat16; that was not measured")
    made = Model("made", (), (), (), True, vocab=8, hidden=8, dtype="bfloat16", item_bytes=2, context_tokens=8)
    made = replace(made, formats={"dense": {"fp8": 5, "int4": 6}}, outputs={"dense": {"fp8": 1, "int4": 2, "": 3}})
    rounded = format_speed.with_int8(made, machine)
    assert rounded.formats == {"dense": {"fp8": 5, "int4" + INT8: 6}}
    assert rounded.outputs == {"dense": {"fp8": 1, "int4" + INT8: 2, "": 3}}
    (_, said) = format_speed.notes(rounded.format_names, "bfloat16", machine)
    assert said.startswith("int4 with --int8-activations is computed at 0.80 of the speed")


@pytest.mark.parametrize("family", mostly_rare(all_of(["llama", "qwen3_moe", "mixtral", "deepseek_v3"]), ["llama"]))
@pytest.mark.parametrize("says", [True, False])
def test_the_second_format_of_gptq_is_read_also_where_a_config_says_the_first(
    says: bool, family: str, tmp_path: Path
) -> None:
    """It stores zero points as they are: of a symmetric checkpoint 8, where the first has 7. Codes, scales and experts
    lie in the files all the same.
    """
    published, plain = files.write(family, tmp_path, *words("gptq", 32))
    state, meant = load_file(published / "model.safetensors"), load_file(plain / "model.safetensors")
    for name in [name for name in state if name.endswith(".qzeros")]:
        base = name.removesuffix(".qzeros")
        first = state[name]
        if not says:
            state[name] = torch.full_like(first, 0x88888888 - (1 << 32))
            first = torch.full_like(first, 0x77777777)
        else:
            state[name] = first + 0x11111111
        spec = Spec("gptq", meant[f"{base}.weight"].shape[0], meant[f"{base}.weight"].shape[1], 32, zeros=True)
        parts = {"codes": state[f"{base}.qweight"], "scales": state[f"{base}.scales"], "zeros": first}
        meant[f"{base}.weight"] = dequantized_by_torch(spec, parts, torch.bfloat16)
    stated = words("gptq", 32)[0] | ({"checkpoint_format": "gptq_v2", "sym": False} if says else {"sym": True})
    files.rewrite(published, state, quantization_config=stated)
    files.rewrite(plain, meant)
    assert_same_answers(published, plain, "auto", "*=stream", "*=mapped", *(["*=experts"] if family != "llama" else []))
    model = loading.load(published).model
    assert any("codes" in name for layer in model.modules() for name, _ in layer.named_parameters(recurse=False))
    planned = read_model(published)
    assert planned.total_bytes == taken_by(model)
    assert planned.total_parameters == read_model(plain).total_parameters


def test_what_is_not_read_is_refused_by_name(tmp_path: Path) -> None:
    published, _ = files.write("llama", tmp_path, *METHODS["gptq-32"][1:])
    state = load_file(published / "model.safetensors")
    stated = dict(METHODS["gptq-32"][1])

    def refused(match: str, changed: Mapping[str, Any] | None = None, **entries: Any) -> None:
        files.rewrite(published, {**state, **(changed or {})}, quantization_config=stated | entries)
        with pytest.raises((UnsupportedModelError, CheckpointError), match=match):
            loading.load(published)

    refused("quantised as 'bitsandbytes', which is not read: fp8, .*gptq, awq are", quant_method="bitsandbytes")
    refused("by gptq in 8 bits as 'gptq'", bits=8)
    refused("in 4 bits as 'marlin'", checkpoint_format="marlin")
    first = "model.layers.0.mlp.down_proj"
    eights = {f"{first}.qzeros": torch.full_like(state[f"{first}.qzeros"], 0x88888888 - (1 << 32))}
    refused("stores zero points in another format of gptq than others do", eights)
    refused("puts inputs into groups in another order", {f"{first}.g_idx": state[f"{first}.g_idx"].flip(0)})
    refused("which fit into no groups", {f"{first}.scales": state[f"{first}.scales"][:5]})
    refused("would be .*different checkpoints", {f"{first}.qweight": state[f"{first}.qweight"][:, :8]})
    refused("would be .*different checkpoints", {f"{first}.qzeros": state[f"{first}.qzeros"].float()})
    refused("has no place for it", {f"{first}.bias": torch.ones(256).half()})
    for weights, match in (
        ({"type": "int", "num_bits": 2}, "by compressed-tensors in 2 bits of the type int, which is not computed with"),
        ({"type": "float", "num_bits": 4, "group_size": 64}, "in 4 bits of the type float in groups of 64"),
        ({"type": "int", "num_bits": 8, "symmetric": False}, "to bytes with zero points"),
    ):
        refused(match, quant_method="compressed-tensors", config_groups={"g": {"weights": weights}})
    group = {"weights": {"type": "int", "num_bits": 8}, "format": "marlin-24"}
    refused("in 8 bits of the type int as 'marlin-24'", quant_method="compressed-tensors", config_groups={"g": group})
    refused("is sparse as", quant_method="compressed-tensors", sparsity_config={"format": "sparse-24-bitmask"})
    del state[f"{first}.qzeros"]
    refused("is incomplete: it has no model.layers.0.mlp.down_proj.qzeros")
    state = {name: tensor for name, tensor in state.items() if "layers.1.mlp.up_proj" not in name}
    refused("is incomplete: it has no model.layers.")


def test_what_cannot_be_computed_as_it_lies_is_expanded(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    published, plain = files.write("qwen3", tmp_path, *METHODS["fp8"][1:])
    loaded = loading.load(published, whole=True, model_class="AutoModel")
    assert "expanded to bfloat16, because they cannot be computed from as they lie" in caplog.text
    expected = load_file(plain / "model.safetensors")
    assert all(torch.equal(t, expected[f"model.{name}"]) for name, t in loaded.model.state_dict().items())


@pytest.mark.parametrize(
    ("name", "tied"), mostly_rare([("fp8", False), ("int4-32", False), ("awq-64", True)], ["awq-64"])
)
def test_embeddings_that_are_quantised_too_are_numbers_in_memory(name: str, tied: bool, tmp_path: Path) -> None:
    _, method, quantiser = METHODS[name]
    published, plain = files.write("llama", tmp_path, method, quantiser, without=("norm",), tie_word_embeddings=tied)
    assert_same_answers(published, plain, "auto", "*=stream")
    model = loading.load(published).model
    assert model.get_input_embeddings().weight.dtype is torch.bfloat16
    assert read_model(published).total_bytes == taken_by(model) - tied * model.lm_head.weight.nbytes


@pytest.mark.parametrize("name", ["fp8-tensor", "gptq-32", "int4-32", "gpt_oss"])
def test_quantised_weights_of_which_a_config_says_nothing_are_refused(name: str, tmp_path: Path) -> None:
    """Older tools say it in a file of their own (quantize_config.json); Transformers takes FP8's codes for numbers."""
    family, method, quantiser = METHODS[name] if name in METHODS else EXPERTS["gpt_oss-mxfp4"]
    published, _ = files.write(family, tmp_path, method, quantiser)
    config = json.loads((published / "config.json").read_text())
    del config["quantization_config"]
    (published / "config.json").write_text(json.dumps(config))
    packed = tmp_path / "packed"
    for load in (
        loading.load,
        lambda path: stowage.offload(path, weights="*=stream"),
        lambda path: packing.pack(str(path), packed, "int8"),
    ):
        with pytest.raises(UnsupportedModelError, match=r"holds quantised weights .*does not say how"):
            load(published)
