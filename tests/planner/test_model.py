"""What the planner says of a model from its config alone, against the model that Transformers builds of it."""

import json
import re
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from stowage.core.geometry import Kind
from stowage.errors import CheckpointError, ConfigError, ModelError, UnsupportedModelError
from stowage.executor.probe import probe
from stowage.models.multimodal import text_part
from stowage.planner.families import FAMILIES
from stowage.planner.model import read_model, shape
from stowage.planner.model_config import CLASS_SIZES, Fields, fields_of, read_config
from stowage.planner.shapes import Model, seen_pairs
from stowage.testing import tiny_models
from stowage.testing.tiny_models import TABLE, TinySize

KNOWN = [name for name, row in TABLE.items() if row.model_type in FAMILIES]
GEOMETRIES = ["llama", "qwen2", "gpt_bigcode", "gemma3", "gemma4", "gpt_oss", "llama4", "deepseek_v3"]
RECURRENT = ["qwen3_next", "nemotron_h", "bamba", "falcon_h1", "lfm2"]
_PER_LAYER = re.compile(r"\.(?:layers|h)\.(\d+)\.")
ODD = TinySize(hidden=96, layers=6, vocab=520, heads=6, kv_heads=3)
"""No size is another's, so that no two can be mixed up."""


def planned(name: str, size: TinySize, **overrides: Any) -> tuple[Model, Any]:
    """The planner's model and Transformers' config of one family."""
    config = tiny_models.config(name, size, **overrides)
    return shape(fields_of(json.loads(config.to_json_string()))), config


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


@pytest.mark.parametrize("name", KNOWN)
def test_every_layer_has_the_parameters_of_the_real_model(name: str) -> None:
    model, config = planned(name, ODD)
    assert predicted(model) == parameters(config)
    assert model.total_parameters == sum(parameters(config).values())


def test_every_family_of_the_table_is_held_against_a_real_model() -> None:
    assert {TABLE[name].model_type for name in KNOWN} == set(FAMILIES)


@pytest.mark.parametrize("name", ["llama", "gemma3", "gpt2", "phi", "lfm2_moe", "falcon_h1"])
def test_a_tied_output_layer_is_counted_once_and_read_in_every_step(name: str) -> None:
    model, config = planned(name, TinySize(), tie_word_embeddings=True)
    apart, _ = planned(name, TinySize(), tie_word_embeddings=False)
    assert predicted(model) == parameters(config)
    assert model.total_parameters == apart.total_parameters - 512 * 64
    assert model.active_parameters == apart.active_parameters


@pytest.mark.parametrize("name", [*GEOMETRIES, *RECURRENT])
def test_cached_bytes_are_those_of_the_engine(name: str) -> None:
    """Per token of each attention layer, per sequence of each recurrent one; windows and kinds too."""
    size = TinySize(layers=max(4, TABLE[name].layers))
    planner, _ = planned(name, size)
    layout = probe(tiny_models.build(name, size), dict.fromkeys(Kind, 16), 4)
    kept: dict[tuple[int, str], tuple[int, int]] = {}
    for block in layout.blocks:
        for layer in block.layers:
            kept[layer.index, layer.kind.value] = (sum(t.nbytes for t in layer.tensors), layer.window)
    ours: dict[tuple[int, str], tuple[int, int]] = {}
    for planned_layer in planner.layers:
        cache = planned_layer.cache
        if cache.token_elements:
            ours[planned_layer.index, cache.keeps.value] = (cache.token_bytes(4), cache.window)
        if cache.state_bytes(4):
            ours[planned_layer.index, "recurrent"] = (cache.state_bytes(4), 0)
    assert ours == kept


DEFAULTS = [name for name, family in FAMILIES.items() if family.defaults]


@pytest.mark.parametrize("name", DEFAULTS)
def test_what_a_config_leaves_out_is_what_its_class_fills_in(name: str) -> None:
    from transformers import AutoConfig

    config = AutoConfig.for_model(name)
    for field, value in FAMILIES[name].defaults.items():
        stated = Fields(json.loads(config.to_json_string()), name).get(field)
        assert stated == value, field


@pytest.mark.parametrize(("stated", "window"), [({}, 4096), ({"sliding_window": None}, 0), ({"sliding_window": 9}, 9)])
def test_a_window_that_is_null_is_none(stated: dict[str, Any], window: int) -> None:
    entries = json.loads(tiny_models.config("mistral").to_json_string())
    del entries["sliding_window"]
    assert {layer.cache.window for layer in shape(fields_of(entries | stated)).layers} == {window}


def test_a_sparse_config_of_gemma_3_inside_of_a_larger_one() -> None:
    """As it is published: kinds of layers and several sizes are left to the class."""
    text = {"hidden_size": 2560, "intermediate_size": 10240, "model_type": "gemma3_text", "num_hidden_layers": 34}
    outer = {"model_type": "gemma3", "torch_dtype": "bfloat16", "text_config": text | {"sliding_window": 1024}}
    model = shape(fields_of(outer))
    full = [layer.index for layer in model.layers if not layer.cache.window]
    assert full == [5, 11, 17, 23, 29]
    assert (model.item_bytes, model.vocab, model.tied) == (2, 262208, True)
    assert model.layers[0].cache.token_elements == 2 * 4 * 256


PARTS = [(name, False) for name, row in tiny_models.OUTER.items() if TABLE[row.text].model_type in FAMILIES]


@pytest.mark.parametrize(("name", "tied"), [*PARTS, ("gemma3_vision", True), ("mistral3_vision", True)])
def test_the_text_part_of_a_larger_model(name: str, tied: bool) -> None:
    """Layer by layer, from the config of the whole, where the table has its text."""
    model, config = planned(name, ODD, tie_word_embeddings=tied)
    assert predicted(model) == parameters(text_part(config).config)


@pytest.mark.parametrize(("outer", "text"), [("llava", "llama"), ("mistral3", "mistral"), ("gemma3", "gemma3_text")])
def test_a_text_config_that_does_not_say_what_it_is(outer: str, text: str) -> None:
    entries = json.loads(tiny_models.config(text.removesuffix("_text")).to_json_string())
    del entries["model_type"]
    around = {"model_type": outer, "tie_word_embeddings": False, "dtype": None}
    assert fields_of({**around, "text_config": entries}).family == text
    assert fields_of({**around, "text_config": entries | {"dtype": "bfloat16"}}).dtype == "bfloat16"


@pytest.mark.parametrize("family", CLASS_SIZES)
def test_a_sparse_text_config_is_what_its_class_fills_in(family: str) -> None:
    from transformers import AutoConfig

    config = AutoConfig.for_model(family, dtype="bfloat16")
    stated = {"model_type": family, "vocab_size": 32064, "sliding_window": None}
    sparse = fields_of({"model_type": "llava", "dtype": "bfloat16", "text_config": stated})
    whole = fields_of({**json.loads(config.to_json_string()), **stated})
    assert shape(sparse) == shape(whole)


def test_kimi_k2_is_a_deepseek_v3() -> None:
    entries = json.loads(tiny_models.config("deepseek_v3").to_json_string())
    assert shape(fields_of(entries | {"model_type": "kimi_k2"})) == shape(fields_of(entries))


def test_the_letters_of_an_older_nemotron_h() -> None:
    entries = json.loads(tiny_models.config("nemotron_h").to_json_string())
    del entries["layers_block_type"]
    kinds = [
        set(layer.parameters) - {"norms"}
        for layer in shape(fields_of(entries | {"hybrid_override_pattern": "M-*ME"})).layers
    ]
    assert kinds == [{"recurrent"}, {"mlp"}, {"attention"}, {"recurrent"}, {"router", "shared experts"}]


def test_experts_that_a_batch_meets() -> None:
    layer = planned("mixtral", TinySize())[0].layers[0]
    assert (layer.experts, layer.experts_per_token) == (4, 2)
    assert layer.distinct_experts(1) == pytest.approx(2)
    assert layer.distinct_experts(2) == pytest.approx(3)
    assert layer.distinct_experts(1000) == pytest.approx(4)


@pytest.mark.parametrize("tokens", [1, 3, 17])
@pytest.mark.parametrize("window", [0, 1, 5, 40])
@pytest.mark.parametrize("before", [0, 2, 50])
def test_pairs_of_attention_are_counted(tokens: int, window: int, before: int) -> None:
    counted = sum(min(window or before + tokens, query + 1) for query in range(before, before + tokens))
    assert seen_pairs(tokens, window, before) == counted


def test_operations_of_a_prompt_and_of_a_token() -> None:
    model, _ = planned("llama", TinySize())
    layers = sum(layer.multiplied for layer in model.layers)
    head = 512 * 64
    assert model.decode_operations(100) == 2 * (layers + head) + 4 * 64 * 100 * 4
    assert model.prefill_operations(10) == 10 * 2 * layers + 4 * 64 * 55 * 4 + 2 * head


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


@pytest.mark.parametrize("name", ["llama", "mixtral", "deepseek_v3", "qwen3_next", "gpt2", "gemma4"])
def test_headers_of_a_real_checkpoint_say_what_the_config_says(name: str, tmp_path: Path) -> None:
    """Names on disk are not those in memory: experts lie one by one, some parts are split or fused."""
    size = TinySize(layers=max(4, TABLE[name].layers))
    tiny_models.write(name, tmp_path / "model", size, dtype="bfloat16")
    by_header = read_model(tmp_path / "model")
    (tmp_path / "config").mkdir()
    (tmp_path / "config" / "config.json").write_bytes((tmp_path / "model" / "config.json").read_bytes())
    by_config = read_model(tmp_path / "config")
    assert (by_header.source, by_config.source) == ("headers", "config")
    buffers = 64  # such as the routers' corrections, which are no parameters
    for ours, theirs in zip(by_header.layers, by_config.layers, strict=True):
        assert 0 <= ours.total_parameters - theirs.total_parameters <= buffers
        assert (ours.experts, ours.expert_parameters) == (theirs.experts, theirs.expert_parameters)
        assert abs(ours.multiplied - theirs.multiplied) <= 300  # norms inside of a part are told apart by name only
    assert by_header.embedding == by_config.embedding
    assert by_header.head == by_config.head
    assert read_model(tmp_path / "model", "float32").total_bytes == pytest.approx(2 * by_header.total_bytes, rel=0.01)


def header(entries: dict[str, Any], data_bytes: int) -> bytes:
    text = json.dumps(entries).encode()
    return len(text).to_bytes(8, "little") + text + bytes(data_bytes)


def foreign(directory: Path) -> dict[str, Any]:
    """A family that no table knows."""
    directory.mkdir(exist_ok=True)
    config = {
        "model_type": "strange",
        "hidden_size": 8,
        "num_attention_heads": 2,
        "num_hidden_layers": 2,
        "vocab_size": 4,
    }
    (directory / "config.json").write_text(json.dumps(config))
    return {
        f"net.blocks.{at}.mixer.weight": {"dtype": "BF16", "shape": [8, 8], "data_offsets": [at * 128, at * 128 + 128]}
        for at in range(2)
    }


def test_a_family_that_is_not_known_is_refused_with_the_way_out(tmp_path: Path) -> None:
    foreign(tmp_path)
    with pytest.raises(UnsupportedModelError, match=r"'strange'.*safetensors"):
        read_model(tmp_path)


def test_headers_make_any_family_known(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes(header(foreign(tmp_path), 256))
    model = read_model(tmp_path)
    assert [layer.total_bytes for layer in model.layers] == [128, 128]
    assert "not in the planner's table" in model.notes[0]


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"\xff" * 20,
        (10**9).to_bytes(8, "little") + b"{}",
        (2).to_bytes(8, "little") + b"[]",
        header({"a": {"dtype": "F32", "shape": [4], "data_offsets": [0, 16]}}, 8),
        header({"a": {"dtype": "F32", "shape": [4], "data_offsets": [0, 8]}}, 8),
        header({"a": {"dtype": "F32", "shape": [-4], "data_offsets": [0, 8]}}, 8),
        header({"a": {"dtype": "F32", "data_offsets": [0, 8]}}, 8),
        header({"a": 3}, 8),
    ],
)
def test_damaged_files_are_refused(content: bytes, tmp_path: Path) -> None:
    foreign(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(content)
    with pytest.raises(CheckpointError, match=r"model\.safetensors is no whole safetensors file"):
        read_model(tmp_path)


def test_weights_of_another_model_are_noticed(tmp_path: Path) -> None:
    entries = foreign(tmp_path)
    del entries["net.blocks.1.mixer.weight"]
    (tmp_path / "model.safetensors").write_bytes(header(entries, 256))
    with pytest.raises(CheckpointError, match=r"1 layers, and config\.json speaks of 2"):
        read_model(tmp_path)


@pytest.mark.parametrize(
    ("text", "error", "said"),
    [
        ("{", CheckpointError, "cannot be read as JSON"),
        ("[1]", CheckpointError, "holds a list"),
        ("{}", UnsupportedModelError, "no model_type"),
        ('{"model_type": "llama"}', ModelError, "states no hidden_size"),
        ('{"model_type": "llama", "hidden_size": "wide"}', ModelError, "hidden_size in config.json is 'wide'"),
        ('{"model_type": "llama", "hidden_size": -1}', ModelError, "hidden_size in config.json is -1"),
    ],
)
def test_bad_configs_are_refused(text: str, error: type[Exception], said: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(error, match=said):
        read_model(tmp_path)


def test_no_config_and_an_unknown_type(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"config\.json does not exist"):
        read_config(tmp_path)
    foreign(tmp_path)
    with pytest.raises(ConfigError, match="dtype 'int3' is unknown"):
        read_model(tmp_path, "int3")


def test_a_packed_checkpoint_is_planned_as_unpacked(tmp_path: Path) -> None:
    entries = json.loads(tiny_models.config("gpt_oss").to_json_string())
    (tmp_path / "config.json").write_text(json.dumps(entries | {"quantization_config": {"quant_method": "mxfp4"}}))
    model = read_model(tmp_path, "bfloat16")
    assert model.total_bytes == 2 * model.total_parameters
    assert "packed (mxfp4)" in model.notes[0]
