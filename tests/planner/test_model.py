"""What the planner says of a model from its config alone, against the model that Transformers builds of it, and the
engine's own layout."""

import json
import re
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from stowage.core.geometry import Kind
from stowage.errors import StowageError, UnsupportedModelError
from stowage.executor.probe import probe
from stowage.models.multimodal import text_part
from stowage.planner.model import read_model, shape
from stowage.planner.shapes import CacheLayer, Model, seen_pairs
from stowage.testing import tiny_models
from stowage.testing.tiny_models import TABLE, TinySize
from tests.depth import mostly_rare
from tests.families import MOST_UNLIKE, all_of

EXACT = "llama gpt2 gemma4 gpt_oss deepseek_v3 falcon_h1 nemotron_h longcat_flash zamba2 rwkv".split()
_PER_LAYER = re.compile(r"\.(?:layers|h|blocks)\.(\d+)\.")
ODD = TinySize(hidden=96, layers=6, vocab=520, heads=6, kv_heads=3)
"""No size is another's, so that no two can be mixed up."""


def planned(name: str, size: TinySize, **overrides: Any) -> tuple[Model, Any]:
    """The planner's model and Transformers' config of one family."""
    config = tiny_models.config(name, size, **overrides)
    return shape(config, "float32"), config


def read(entries: dict[str, Any], directory: Path) -> Model:
    (directory / "config.json").write_text(json.dumps(entries))
    return read_model(directory)


def stated(name: str, **changed: Any) -> dict[str, Any]:
    """A tiny model's config.json."""
    entries: dict[str, Any] = json.loads(tiny_models.config(name).to_json_string())
    return entries | changed


def parameters(config: Any) -> Counter[int]:
    """Parameters of each layer of the real model; those of no layer under -1."""
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    found: Counter[int] = Counter()
    for name, parameter in model.named_parameters():
        match = _PER_LAYER.search(name)
        found[int(match[1]) if match else -1] += parameter.numel()
    return found


def predicted(model: Model) -> Counter[int]:
    found = Counter({layer.index: layer.total_parameters for layer in model.layers})
    found[-1] = model.embedding + model.rest + model.head
    return found


@pytest.mark.parametrize("name", EXACT)
def test_every_layer_has_the_parameters_of_the_real_model(name: str) -> None:
    model, config = planned(name, ODD)
    assert predicted(model) == parameters(config)


@pytest.mark.parametrize("name", mostly_rare(all_of(TABLE), MOST_UNLIKE))
def test_parameters_and_cached_bytes_are_those_of_the_engine(name: str) -> None:
    """Of all families: every layer's rows and states, windows and kinds; where parameters lie; what chooses experts."""
    model, _ = planned(name, TinySize())
    real = tiny_models.build(name)
    layout = probe(real, dict.fromkeys(Kind, 16), 4)
    kept = {
        CacheLayer(layer.index, layer.kind, layer.nbytes, layer.window, layer.tensors[0].every)
        for block in layout.blocks
        for layer in block.layers
    }
    assert set(model.kept) == kept
    assert len(model.kept) == len(kept)
    assert model.context_tokens == layout.context_tokens
    assert model.total_parameters == sum(p.numel() for p in real.parameters())
    assert model.embedding >= real.get_input_embeddings().weight.numel()
    assert model.head >= (0 if model.tied else real.get_output_embeddings().weight.numel())
    assert all(layer.experts_per_token < layer.experts for layer in model.layers if layer.expert_parameters)
    assert model.attention or all(one.recurrent for one in model.kept)


_LLAMA_3_70B = {"hidden_size": 8192, "intermediate_size": 28672, "num_hidden_layers": 80, "num_attention_heads": 64}
_QWEN3_235B = {"hidden_size": 4096, "num_hidden_layers": 94, "num_attention_heads": 64, "num_key_value_heads": 4}
_QWEN3_EXPERTS = {"num_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 1536, "vocab_size": 151936}
_KIMI_K2 = {"num_attention_heads": 64, "n_routed_experts": 384, "first_k_dense_replace": 1, "vocab_size": 163840}
PUBLISHED = {
    "Llama-3-70B": ("llama", _LLAMA_3_70B | {"num_key_value_heads": 8, "vocab_size": 128256}, 70.55, 327_680),
    "Qwen3-235B": ("qwen3_moe", _QWEN3_235B | _QWEN3_EXPERTS | {"head_dim": 128}, 235.09, 192_512),
    "DeepSeek-V3": ("deepseek_v3", {}, 671.03, 70_272),
    "gpt-oss-120b": ("gpt_oss", {}, 116.83, 36_864),
    "Kimi-K2": ("kimi_k2", _KIMI_K2 | {"num_key_value_heads": 64}, 1026.41, 70_272),
    "Mixtral-8x7B": ("mixtral", {}, 46.70, 131_072),
}
"""Type, what its config says that its class does not, billions of parameters, bytes of one more token in bfloat16."""


@pytest.mark.parametrize("name", mostly_rare(PUBLISHED, ["Llama-3-70B", "Mixtral-8x7B", "gpt-oss-120b"]))
def test_sizes_of_published_models(name: str, tmp_path: Path) -> None:
    """Kimi-K2 is of a type that Transformers does not know; its architecture is DeepSeek-V3's."""
    family, fields, billions, token_bytes = PUBLISHED[name]
    entries = {"model_type": family, "dtype": "bfloat16", **fields, "tie_word_embeddings": False}
    if family == "kimi_k2":
        entries |= {"architectures": ["DeepseekV3ForCausalLM"], "auto_map": {"AutoConfig": "its.Own"}}
    model = read(entries, tmp_path)
    assert round(model.total_parameters / 1e9, 2) == billions
    assert model.token_bytes() == token_bytes
    assert model.total_bytes == 2 * model.total_parameters


@pytest.mark.parametrize("name", ["llama", "gemma3", "gpt2", "phi", "lfm2_moe", "falcon_h1"])
def test_a_tied_output_layer_is_counted_once_and_read_in_every_step(name: str) -> None:
    model, config = planned(name, TinySize(), tie_word_embeddings=True)
    apart, _ = planned(name, TinySize(), tie_word_embeddings=False)
    assert predicted(model) == parameters(config)
    assert model.total_parameters == apart.total_parameters - 512 * 64
    assert model.active_parameters == apart.active_parameters


@pytest.mark.parametrize(("said", "window"), [({}, 4096), ({"sliding_window": None}, 0), ({"sliding_window": 9}, 9)])
def test_a_window_that_is_null_is_none(said: dict[str, Any], window: int, tmp_path: Path) -> None:
    entries = stated("mistral")
    del entries["sliding_window"]
    assert {one.window for one in read(entries | said, tmp_path).kept} == {window}


def test_a_sparse_config_of_gemma_3_inside_of_a_larger_one(tmp_path: Path) -> None:
    """As it is published: kinds of layers and several sizes are left to the class."""
    text = {"hidden_size": 2560, "intermediate_size": 10240, "model_type": "gemma3_text", "num_hidden_layers": 34}
    outer = {"model_type": "gemma3", "torch_dtype": "bfloat16", "text_config": text | {"sliding_window": 1024}}
    model = read(outer, tmp_path)
    assert [one.index for one in model.kept if not one.window] == [5, 11, 17, 23, 29]
    assert (model.item_bytes, model.vocab, model.tied) == (2, 262208, True)
    assert model.kept[0].nbytes == 2 * 2 * 4 * 256


@pytest.mark.parametrize(
    "name", mostly_rare(tiny_models.OUTER, ["llava", "gemma3_vision", "qwen3_vl", "llama4_vision"])
)
def test_the_text_part_of_a_larger_model(name: str, tmp_path: Path) -> None:
    """From the config of the whole."""
    config = tiny_models.config(name, ODD)
    model = read(json.loads(config.to_json_string()), tmp_path)
    assert model.total_parameters == sum(parameters(text_part(config).config).values())


def test_a_text_config_that_does_not_say_what_it_is(tmp_path: Path) -> None:
    entries = stated("mistral")
    del entries["model_type"]
    outer = {"model_type": "mistral3", "tie_word_embeddings": False, "dtype": "bfloat16", "text_config": entries}
    model = read(outer, tmp_path)
    assert (model.family, model.dtype) == ("mistral", "bfloat16")


def test_the_letters_of_an_older_nemotron_h(tmp_path: Path) -> None:
    entries = stated("nemotron_h", hybrid_override_pattern="M-*ME")
    del entries["layers_block_type"]
    model = read(entries, tmp_path)
    kinds = [set(layer.parameters) - {"norms"} for layer in model.layers]
    assert kinds == [{"recurrent"}, {"mlp"}, {"attention"}, {"recurrent"}, {"router", "shared experts"}]
    assert [one.recurrent for one in model.kept] == [True, False, True]


def test_layers_that_read_what_others_keep() -> None:
    """Gemma 4's last layers: nothing is kept for them, and attention reads it all the same."""
    model, _ = planned("gemma4", TinySize())
    assert (len(model.kept), len(model.attention)) == (2, 4)
    read_bytes = {one.window: one.nbytes for one in model.kept}
    assert all(one.read_bytes == read_bytes[one.window] for one in model.attention)


def test_latents_are_read_as_they_are_kept() -> None:
    model, config = planned("deepseek_v3", TinySize())
    row = config.kv_lora_rank + config.qk_rope_head_dim
    assert {one.read_bytes for one in model.attention} == {4 * row}
    assert model.attention[0].pair_operations == 2 * config.num_attention_heads * (row + config.kv_lora_rank)


def test_experts_that_a_batch_meets() -> None:
    layer = planned("mixtral", TinySize())[0].layers[0]
    assert (layer.experts, layer.experts_per_token) == (4, 2)
    assert layer.distinct_experts(1) == pytest.approx(2)
    assert layer.distinct_experts(2) == pytest.approx(3)
    assert layer.distinct_experts(1000) == pytest.approx(4)


@pytest.mark.parametrize("tokens", [1, 3, 17])
@pytest.mark.parametrize("window", [0, 1, 5, 40])
def test_pairs_of_attention_are_counted(tokens: int, window: int) -> None:
    assert seen_pairs(tokens, window) == sum(min(window or tokens, query + 1) for query in range(tokens))


def test_whole_blocks_of_a_sequence_and_no_more_than_a_window() -> None:
    model, _ = planned("mistral", TinySize())
    per_token = 4 * 2 * 2 * 16 * 4
    assert model.sequence_bytes(40) == 40 * per_token
    assert model.sequence_bytes(40, 16) == 48 * per_token
    assert model.sequence_bytes(4000, 16) == 96 * per_token  # a window of 72 may begin within a block


def test_stored_prefixes_hold_windows_whole_and_states_now_and_then() -> None:
    """As docs/planning.md#sizing counts them."""
    gemma, _ = planned("gemma3", TinySize())
    assert gemma.stored_bytes_per_token(512) == 4 * 2 * 2 * 16 * 4
    hybrid, _ = planned("nemotron_h", TinySize())
    assert hybrid.stored_bytes_per_token(512) == 256 + 12_288 / 512


# -- headers ---------------------------------------------------------------------------------------------------------


def test_a_family_that_the_engine_refuses_is_refused_with_its_reason(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedModelError, match=r"(?s)'xlm-roberta'.*generate.*safetensors"):
        read({"model_type": "xlm-roberta"}, tmp_path)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("{", "cannot be read as JSON"),
        ("[1]", "holds a list"),
        ("{}", "model_type"),
        ('{"model_type": "llama", "hidden_size": "wide"}', "hidden_size"),
        ('{"model_type": "llama", "hidden_size": -1}', "hidden size"),
    ],
)
def test_bad_configs_are_refused(text: str, said: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(StowageError, match=said):
        read_model(tmp_path)


def test_a_quantised_checkpoint_is_planned_in_published_bytes(tmp_path: Path) -> None:
    entries = stated("gpt_oss", quantization_config={"quant_method": "mxfp4"})
    (tmp_path / "config.json").write_text(json.dumps(entries))
    model = read_model(tmp_path, "bfloat16")
    experts = sum(layer.experts * layer.expert_bytes for layer in model.layers)
    assert experts < 0.3 * 2 * sum(layer.experts * layer.expert_parameters for layer in model.layers)
    assert "as they are published (mxfp4)" in model.notes[0]
    assert model.format_names == ("mxfp4",)
    assert model.format_shares("experts") == {"mxfp4": pytest.approx(1.0, abs=0.02)}, "biases are plain numbers"
    assert model.format_shares("dense") == {}
    (tmp_path / "config.json").write_text(json.dumps(entries | {"quantization_config": {"quant_method": "hqq"}}))
    model = read_model(tmp_path, "bfloat16")
    assert model.total_bytes == 2 * model.total_parameters
    assert (
        "does not run as it is: it is planned as expanded to bfloat16: the checkpoint is quantised as 'hqq'"
        in model.notes[0]
    )


FP8 = {"quant_method": "fp8", "weight_block_size": [128, 128]}
KIMI = {
    "quant_method": "compressed-tensors",
    "config_groups": {"group_0": {"targets": ["Linear"], "weights": {"type": "int", "num_bits": 4, "group_size": 32}}},
    "ignore": ["lm_head", "re:.*self_attn.*", "re:.*shared_experts.*", r"re:.*mlp\\.(gate|up|gate_up|down)_proj.*"],
}


@pytest.mark.parametrize(
    ("name", "method", "gib"),
    mostly_rare(
        [
            ("DeepSeek-V3", FP8, 628),
            ("Kimi-K2", FP8, 959),
            ("Kimi-K2", KIMI, 553),
            ("gpt-oss-120b", {"quant_method": "mxfp4"}, 61),
        ],
        ["gpt-oss-120b"],
    ),
)
def test_published_bytes_of_large_models(name: str, method: dict[str, Any], gib: int, tmp_path: Path) -> None:
    """What their files take, without DeepSeek's layer for predicting several tokens."""
    family, fields, _, _ = PUBLISHED[name]
    entries = {"model_type": family, "dtype": "bfloat16", **fields, "tie_word_embeddings": False}
    if family == "kimi_k2":
        entries |= {"architectures": ["DeepseekV3ForCausalLM"], "auto_map": {"AutoConfig": "its.Own"}}
    model = read(entries | {"quantization_config": method}, tmp_path)
    assert round(model.total_bytes / 2**30) == gib
