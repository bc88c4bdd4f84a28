"""What configs of quantised checkpoints say in other words is read or refused by name; codes never count as numbers."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from stowage import CheckpointError, UnsupportedModelError
from stowage.models import loading
from stowage.planner.model import read_model
from stowage.testing import tiny_models
from tests.depth import mostly_rare
from tests.weights import published_files as files
from tests.weights.conftest import answers_of, assert_same_answers, logits, prompt
from tests.weights.test_published import FP8, METHODS, compressed, int4, taken_by, words

FLOAT = "float-quantized"
BLOCKS: Mapping[str, tuple[Mapping[str, Any], Callable[..., Any]]] = {
    "as a text": (
        compressed("float", 8, FLOAT, strategy="block", block_structure="128x128"),
        files.fp8(128, 128, "weight_scale"),
    ),
    "of one row": (compressed("float", 8, FLOAT, strategy="group", group_size=128), files.fp8(1, 128, "weight_scale")),
}


@pytest.mark.parametrize("name", BLOCKS)
def test_blocks_of_fp8_are_read_however_compressed_tensors_says_them(name: str, tmp_path: Path) -> None:
    published, plain = files.write("llama", tmp_path, *BLOCKS[name])
    assert_same_answers(published, plain)
    total = read_model(published).total_bytes
    (published / "model.safetensors").unlink()
    assert read_model(published).total_bytes == pytest.approx(total, rel=1e-2), "by the config alone"


@pytest.mark.parametrize(
    ("stated", "named"),
    [
        ({"load_in_8bit": True, "llm_int8_threshold": 6.0}, "bitsandbytes"),
        ({"bnb_4bit_quant_type": "nf4", "load_in_4bit": True}, "bitsandbytes"),
        ({"group_size": 64, "bits": 4}, "mlx"),
        ({"group_size": 64, "bits": 4, "mode": "affine", "model.embed_tokens": {"bits": 8}}, "mlx"),
        ({"group_size": 128, "bits": 4, "sym": True, "desc_act": False}, "unknown"),
        ({}, "unknown"),
    ],
)
def test_methods_that_a_config_does_not_name_are_refused_by_name(
    stated: dict[str, Any], named: str, tmp_path: Path
) -> None:
    """And said by a plan."""
    published, _ = files.write("llama", tmp_path, stated, files.gptq(32))
    with pytest.raises(UnsupportedModelError, match=f"quantised as '{named}', which is not read: fp8"):
        loading.load(published)
    (note,) = read_model(published).notes
    assert "does not run as it is" in note and f"quantised as '{named}'" in note


def _say_nothing(directory: Path) -> None:
    config = json.loads((directory / "config.json").read_text())
    del config["quantization_config"]
    (directory / "config.json").write_text(json.dumps(config))


def _int8(values: Tensor) -> files.Written:
    scales = values.abs().amax(1) / 127
    codes = (values / scales[:, None]).round().to(torch.int8)
    return {"weight": codes, "SCB": scales * 127}, codes.float() * scales[:, None]


def _mlx(values: Tensor) -> files.Written:
    groups = torch.ones(len(values), values.shape[1] // 64)
    return {"weight": torch.zeros(len(values), values.shape[1] // 8).to(torch.uint32), "scales": groups}, values


@pytest.mark.parametrize("quantiser", [_int8, _mlx, files.fp8(128, 128, "scale")], ids=["int8", "mlx", "fp8"])
def test_codes_are_never_taken_for_numbers(quantiser: Callable[[Tensor], files.Written], tmp_path: Path) -> None:
    """Where a config says nothing of them, and their scales have a name of which nothing is known."""
    published, _ = files.write("llama", tmp_path, {}, quantiser)
    _say_nothing(published)
    with pytest.raises(UnsupportedModelError, match=r"holds quantised weights \(model.layers.0.mlp.down_proj.weight\)"):
        loading.load(published)


def test_numbers_that_were_only_rounded_to_fp8_are_read(tmp_path: Path) -> None:
    published, plain = files.write("llama", tmp_path, {}, None)
    state = load_file(plain / "model.safetensors")
    small = {name: tensor.to(torch.float8_e4m3fn) if "proj" in name else tensor for name, tensor in state.items()}
    files.rewrite(published, small)
    _say_nothing(published)
    files.rewrite(plain, {name: tensor.to(torch.bfloat16) for name, tensor in small.items()})
    assert torch.equal(logits(loading.load(published).model, prompt()), logits(loading.load(plain).model, prompt()))


def test_rules_and_zero_points_that_are_not_read_are_refused_by_name(tmp_path: Path) -> None:
    """Not as if files were damaged."""
    stated, quantiser = words("gptq", 32)
    published, plain = files.write("llama", tmp_path / "gptq", stated, quantiser)
    for rule in ("+:.*down_proj.*", ".*down_proj.*"):
        files.rewrite(published, quantization_config=stated | {"dynamic": {rule: {"bits": 8, "group_size": 64}}})
        with pytest.raises(UnsupportedModelError, match=r"in 8 bits where its rule .*down_proj.* \(dynamic\)"):
            loading.load(published)
    files.rewrite(published, quantization_config=stated | {"dynamic": {"-:lm_head": {}, "+:.*": {"desc_act": False}}})
    assert torch.equal(logits(loading.load(published).model, prompt()), logits(loading.load(plain).model, prompt()))
    family, stated, quantiser = METHODS["int4-64-zeros"]
    published, _ = files.write(family, tmp_path / "int4", stated, quantiser)
    state = load_file(published / "model.safetensors")
    for name in [name for name in state if name.endswith("zero_point")]:
        state[name] = torch.zeros(8 * state[name].shape[0], state[name].shape[1], dtype=torch.int8)
    files.rewrite(published, state)
    with pytest.raises(UnsupportedModelError, match=r"zero points that are not packed .*\(int8\)"):
        loading.load(published)


def test_scales_that_are_powers_of_two_are_read(tmp_path: Path) -> None:
    """``scale_fmt`` ue8m0, as a type of their own."""
    published, plain = files.write("llama", tmp_path, {**FP8, "scale_fmt": "ue8m0"}, METHODS["fp8"][2])
    state, meant = load_file(published / "model.safetensors"), load_file(plain / "model.safetensors")
    for name in [name for name in state if name.endswith("_scale_inv")]:
        base, scales = name.removesuffix("_scale_inv"), torch.exp2(torch.log2(state[name]).ceil())
        state[name] = scales.to(torch.float8_e8m0fnu)
        codes = state[base].float()
        whole = scales.repeat_interleave(128, 0).repeat_interleave(128, 1)[: len(codes), : codes.shape[1]]
        meant[base] = (codes * whole).to(torch.bfloat16)
    files.rewrite(published, state)
    files.rewrite(plain, meant)
    assert json.loads((published / "config.json").read_text())["quantization_config"]["scale_fmt"] == "ue8m0"
    assert_same_answers(published, plain)


@pytest.mark.parametrize("name", mostly_rare(["blocks", "one", "halves"], ["blocks", "halves"]))
def test_experts_stacked_in_fp8_are_read(name: str, tmp_path: Path) -> None:
    """As Transformers writes families whose files stack them. Of gates and what they gate, each may have a scale."""
    side = 32 if name == "blocks" else 0
    stated = {"quant_method": "fp8", "activation_scheme": "static"} | (
        {"weight_block_size": [side] * 2} if side else {}
    )
    quantiser = files.fp8(side, side, "weight_scale_inv")
    published, plain = files.write("mistral4", tmp_path, stated, quantiser, moe_intermediate_size=72)
    state, meant = load_file(published / "model.safetensors"), load_file(plain / "model.safetensors")
    stacks = [name for name, values in state.items() if values.dim() == 3]
    for path in stacks:
        halves = 2 if name == "halves" and "gate_up" in path else 1
        made = [[quantiser(part) for part in expert.float().chunk(halves)] for expert in state[path]]
        codes = torch.stack([torch.cat([parts["weight"] for parts, _ in expert]) for expert in made])
        each = [torch.stack([parts["weight_scale_inv"] for parts, _ in expert]) for expert in made]
        state |= {path: codes, f"{path}_activation_scale": torch.ones(len(codes))}
        state[f"{path}_scale_inv"] = torch.stack(each).view(
            len(codes), *((halves, 1) if not side else each[0].shape[1:])
        )
        meant[path] = torch.stack([torch.cat([values for _, values in expert]) for expert in made]).to(torch.bfloat16)
    assert stacks
    files.rewrite(published, state)
    files.rewrite(plain, meant)
    assert_same_answers(published, plain, "auto", "*=stream")
    assert any("codes" in path for path, _ in loading.load(published).model.named_parameters() if "experts" in path)


def test_groups_of_which_the_last_is_cut_are_refused(tmp_path: Path) -> None:
    """Of 192 inputs in groups of 128 the second has 64, and no scale is shared by 96."""
    stated, whole = int4(128)
    cut = files.int4(96)  # as many scales
    published, _ = files.write(
        "llama", tmp_path, stated, lambda v: (cut if v.shape[1] == 192 else whole)(v), intermediate_size=192
    )
    with pytest.raises(UnsupportedModelError, match="192 inputs in groups of 128, the last of which is cut"):
        loading.load(published)


def test_a_config_that_says_the_type_of_the_codes(tmp_path: Path) -> None:
    """Where it says what is computed in, as `dtype`."""
    published, plain = files.write("llama", tmp_path, *METHODS["fp8"][1:])
    expected = logits(loading.load(plain).model, prompt())
    files.rewrite(published, dtype="float8_e4m3fn")
    assert torch.equal(logits(loading.load(published).model, prompt()), expected)
    assert read_model(published).dtype == "bfloat16"


@pytest.mark.parametrize("key", ["modules_to_not_convert", "ignored_layers"])
def test_layers_that_a_config_leaves_out_are_planned_as_numbers(key: str, tmp_path: Path) -> None:
    """By the config alone."""
    left = ["lm_head", "model.layers.1.self_attn.o_proj", "model.layers.0.mlp.up_proj"]
    without = ("embed", "lm_head", "norm", *left)
    published, _ = files.write("llama", tmp_path, FP8 | {key: left}, METHODS["fp8"][2], without=without)
    total = read_model(published).total_bytes
    (published / "model.safetensors").unlink()
    assert read_model(published).total_bytes == pytest.approx(total, rel=1e-2)


@pytest.mark.parametrize(
    ("name", "entries", "match"),
    [
        ("fp8", {"weight_scale_semantics": "inverse"}, "codes are divided by .*'inverse', as GPTQModel writes them"),
        ("int4-32", {"format": "marlin-24"}, "type int as 'marlin-24', which is not read: pack-quantized and int-quan"),
        ("awq-64", {"checkpoint_format": "gemv"}, "by awq in 4 bits as 'gemv'"),
        ("gptq-32", {"rotation": "hadamard"}, r"weights were rotated \(rotation 'hadamard'\), which would have"),
    ],
)
def test_words_that_give_the_same_tensors_another_meaning_are_refused(
    name: str, entries: dict[str, Any], match: str, tmp_path: Path
) -> None:
    """Scales that codes are divided by have the names, shapes and type of those that they are multiplied by."""
    family, stated, quantiser = METHODS[name]
    published, _ = files.write(family, tmp_path, {**stated, **entries}, quantiser)
    with pytest.raises(UnsupportedModelError, match=match):
        loading.load(published)
    (note,) = read_model(published).notes
    assert "does not run as it is" in note


def test_scales_of_what_is_computed_between_matrices_are_refused(tmp_path: Path) -> None:
    """AutoAWQ writes those of Falcon's and StarCoder2's activations. They are of no matrix, and of no parameter."""
    published, _ = files.write("llama", tmp_path, *METHODS["awq-64"][1:])
    state = load_file(published / "model.safetensors")
    files.rewrite(published, {**state, "model.layers.1.mlp.act.scales": torch.full((512,), 0.5).half()})
    with pytest.raises(UnsupportedModelError, match=r"layers\.1\.mlp\.act\.scales scales what is computed with"):
        loading.load(published)


def test_projections_that_a_tool_has_taken_apart_are_told_as_such(tmp_path: Path) -> None:
    """As GPTQModel does of Phi-3's. The download is whole."""
    published, _ = files.write("phi3", tmp_path, *int4(32))
    state, fused = load_file(published / "model.safetensors"), "gate_up_proj."
    for name in [name for name in state if fused in name and not name.endswith("shape")]:
        gate, up = state.pop(name).chunk(2)
        state |= {name.replace(fused, "gate_proj."): gate, name.replace(fused, "up_proj."): up}
    files.rewrite(published, state)
    with pytest.raises(UnsupportedModelError, match=r"has no .*gate_up_proj.* has .*gate_proj.weight, .* taken apart"):
        loading.load(published)
    files.rewrite(published, {name: tensor for name, tensor in state.items() if "0.mlp" not in name})
    with pytest.raises(CheckpointError, match=r"is incomplete: it has no .*layers.0.mlp.gate_up_proj.weight"):
        loading.load(published)


@pytest.mark.parametrize(
    ("name", "entries", "lost"),
    [
        ("int4-64-zeros", {}, "weight_zero_point"),
        ("int4-32", {"actorder": "group"}, "weight_g_idx"),
        ("int8-words-64", {"actorder": "group"}, "weight_g_idx"),
        ("gptq-32", {"desc_act": True}, "g_idx"),
    ],
)
def test_what_a_config_says_that_there_is_must_be_there(
    name: str, entries: dict[str, Any], lost: str, tmp_path: Path
) -> None:
    """Without its zero points or its order a matrix would be another one, of the same shapes."""
    family, stated, quantiser = METHODS[name]
    stated = json.loads(json.dumps(stated))
    (stated["config_groups"]["group_0"]["weights"] if "config_groups" in stated else stated).update(entries)
    published, _ = files.write(family, tmp_path, stated, quantiser)
    state = load_file(published / "model.safetensors")
    tensor = f"model.layers.1.mlp.up_proj.{lost}"
    files.rewrite(published, {name: values for name, values in state.items() if name != tensor})
    with pytest.raises(CheckpointError, match=r"is incomplete: it has no model\.layers\..*" + lost):
        loading.load(published)


def test_scales_that_are_no_numbers_are_told_as_such(tmp_path: Path) -> None:
    published, _ = files.write("llama", tmp_path, *METHODS["int4-32"][1:])
    state, name = load_file(published / "model.safetensors"), "model.layers.1.mlp.up_proj.weight_scale"
    files.rewrite(published, {**state, name: torch.full_like(state[name], float("nan"))})
    with pytest.raises(CheckpointError, match="computes NaN, and no number, in bfloat16"):
        answers_of(published)


@pytest.mark.parametrize("stated", [["fp8"], "fp8", 8, True, []])
def test_a_quantization_that_is_no_object_is_told_as_such(stated: Any, tmp_path: Path) -> None:
    model = tiny_models.write("llama", tmp_path / "model", files.SIZE)
    for entries in ({"quantization_config": stated}, {"text_config": {"quantization_config": stated}}):
        config = json.loads((model / "config.json").read_text()) | entries
        (tmp_path / "config.json").write_text(json.dumps(config))
        (tmp_path / "config.json").replace(model / "config.json")
        for read in (loading.load, read_model):
            with pytest.raises(CheckpointError, match=r"config\.json has .* as quantization_config\. It must be"):
                read(model)


def test_a_plan_of_a_checkpoint_that_lacks_a_file_says_so(tmp_path: Path) -> None:
    published, _ = files.write("llama", tmp_path, *METHODS["int4-32"][1:])
    state = load_file(published / "model.safetensors")
    index = {"weight_map": dict.fromkeys(state, "model-00001-of-00001.safetensors")}
    (published / "model.safetensors.index.json").write_text(json.dumps(index))
    (published / "model.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"model-00001-of-00001\.safetensors is missing; download"):
        read_model(published)


@pytest.mark.parametrize("name", ["gptq-32", "awq-64"])
def test_auto_round_writes_layouts_of_others(name: str, tmp_path: Path) -> None:
    family, stated, quantiser = METHODS[name]
    packing = f"auto_round:auto_{stated['quant_method']}"
    said_by_it = {**stated, "quant_method": "auto-round", "packing_format": packing, "data_type": "int", "sym": False}
    published, plain = files.write(family, tmp_path, said_by_it, quantiser)
    assert_same_answers(published, plain)
    total = read_model(published).total_bytes
    files.rewrite(published, quantization_config=said_by_it | {"packing_format": "auto_round:fp8"})
    with pytest.raises(UnsupportedModelError, match=r"by auto-round and packed as 'auto_round:fp8', which is not read"):
        loading.load(published)
    layer = "model.layers.1.mlp.up_proj"
    files.rewrite(published, quantization_config=said_by_it | {"extra_config": {layer: {"bits": 8}}})
    with pytest.raises(UnsupportedModelError, match=rf"in 8 bits in {layer} \(extra_config\)"):
        loading.load(published)
    files.rewrite(published, quantization_config=said_by_it | {"extra_config": {layer: {"bits": 4}}})
    assert_same_answers(published, plain)
    files.rewrite(published, quantization_config=said_by_it)
    (published / "model.safetensors").unlink()
    assert read_model(published).total_bytes == pytest.approx(total, rel=1e-2), "by the config alone"


@pytest.mark.parametrize("name", ["fp8-channels", "gptq-32"])
def test_a_head_that_is_quantised_too_is_planned_as_such(name: str, tmp_path: Path) -> None:
    _, stated, quantiser = METHODS[name]
    method = stated | {"ignore": []} if name == "fp8-channels" else stated | {"lm_head": True}
    published, plain = files.write(
        "llama", tmp_path, method, quantiser, ("embed", "norm"), vocab_size=4096, tie_word_embeddings=False
    )
    model = loading.load(published).model
    assert torch.equal(logits(model, prompt()), logits(loading.load(plain).model, prompt()))
    total = read_model(published).total_bytes
    assert total == taken_by(model)
    (published / "model.safetensors").unlink()
    assert read_model(published).total_bytes == pytest.approx(total, rel=1e-2), "by the config alone"


def test_groups_of_single_layers_are_planned_and_read_each_as_it_is(tmp_path: Path) -> None:
    """All were planned as the first one is. An order that was never filled was refused as another order."""
    channels = {"type": "float", "num_bits": 8, "strategy": "channel"}
    fours = {
        "type": "int",
        "num_bits": 4,
        "strategy": "group",
        "group_size": 32,
        "symmetric": True,
        "actorder": "group",
    }
    stated = {
        "quant_method": "compressed-tensors",
        "format": "mixed-precision",
        "config_groups": {
            "group_0": {"targets": ["re:.*self_attn.*"], "weights": channels, "format": "float-quantized"},
            "group_1": {"targets": ["Linear"], "weights": fours, "format": "pack-quantized"},
        },
        "ignore": ["lm_head", "re:.*layers.0.mlp.up_proj"],
    }
    left = ("embed", "lm_head", "norm", "layers.0.mlp.up_proj")
    published, plain = files.write("llama", tmp_path / "4", stated, files.int4(32), (*left, "self_attn"))
    fp8 = files.fp8(1, 0, "weight_scale", torch.bfloat16)
    state, meant = load_file(published / "model.safetensors"), load_file(plain / "model.safetensors")
    for name in [name for name in state if "self_attn" in name]:
        parts, values = fp8(state.pop(name).float())
        state |= {name.replace("weight", part): tensor for part, tensor in parts.items()}
        meant[name] = values.to(torch.bfloat16)
    for name in [name for name in state if name.endswith("weight_packed")]:
        state[name.replace("packed", "g_idx")] = torch.full((8 * state[name].shape[1],), -1, dtype=torch.int32)
    files.rewrite(published, state)
    files.rewrite(plain, meant)
    assert_same_answers(published, plain)
    total = read_model(published).total_bytes
    (published / "model.safetensors").unlink()
    assert read_model(published).total_bytes == pytest.approx(total, rel=1e-2), "by the config alone"
