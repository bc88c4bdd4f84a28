"""What the planner says of a model by the headers of its files, and of files that are damaged or another model's."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from stowage.errors import CheckpointError, ConfigError, ModelError
from stowage.models.hub import find_config
from stowage.planner.model import read_model
from stowage.planner.shapes import Model
from stowage.testing import tiny_models
from stowage.testing.tiny_models import TABLE, TinySize
from tests.depth import mostly_rare


@pytest.mark.parametrize(
    "name",
    mostly_rare(["llama", "mixtral", "deepseek_v3", "qwen3_next", "gpt2", "gemma4"], ["llama", "deepseek_v3", "gpt2"]),
)
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


@pytest.mark.parametrize(("said", "stored"), [("bfloat16", "float32"), ("float32", "bfloat16"), ("", "bfloat16")])
def test_files_in_another_type_than_the_config_s(said: str, stored: str, tmp_path: Path) -> None:
    """It is run in what the config says, or else in the files' type."""
    tiny_models.write("llama", tmp_path, TinySize(layers=2), dtype=stored)
    expected = read_model(tmp_path, said or stored)
    config = json.loads((tmp_path / "config.json").read_text())
    del config["dtype"]
    (tmp_path / "config.json").write_text(json.dumps(config | ({"dtype": said} if said else {})))
    assert read_model(tmp_path) == expected


@pytest.mark.parametrize(("name", "prefix"), [("llama", ""), ("gemma3", ""), ("llama", "language_model.")])
def test_an_output_layer_of_its_own_counts_though_the_config_ties_it(name: str, prefix: str, tmp_path: Path) -> None:
    """As the engine loads it: what differs from the embedding is no copy of it."""
    tiny_models.write(name, tmp_path, TinySize(layers=TABLE[name].layers or 2), dtype="bfloat16")
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"tie_word_embeddings": True}))
    tensors = load_file(tmp_path / "model.safetensors")
    embedding = tensors["model.embed_tokens.weight"]
    tensors.pop("lm_head.weight", None)

    def planned(head: dict[str, torch.Tensor]) -> Model:
        named = {prefix + key: value for key, value in (tensors | head).items()}
        save_file(named, tmp_path / "model.safetensors", {"format": "pt"})
        return read_model(tmp_path)

    tied = planned({})
    assert planned({"lm_head.weight": embedding.clone()}) == tied and tied.tied and not tied.head
    other = embedding.clone()
    other[-1, -1] += 1
    own = planned({"lm_head.weight": other})
    assert not own.tied and own.head == embedding.numel() == own.head_reads
    assert own.total_bytes == tied.total_bytes + embedding.nbytes


def header(entries: dict[str, Any], data_bytes: int) -> bytes:
    text = json.dumps(entries).encode()
    return len(text).to_bytes(8, "little") + text + bytes(data_bytes)


def foreign(directory: Path) -> dict[str, Any]:
    """A model that Transformers does not know."""
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
    with pytest.raises(CheckpointError, match=r"(?s)`strange`.*safetensors"):
        read_model(tmp_path)


def test_headers_make_any_family_known(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes(header(foreign(tmp_path), 256))
    model = read_model(tmp_path)
    assert [layer.total_bytes for layer in model.layers] == [128, 128]
    assert "not a family that is run here" in model.notes[0]


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


def test_a_field_that_only_headers_cannot_replace_is_asked_for(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes(header(foreign(tmp_path), 256))
    (tmp_path / "config.json").write_text('{"model_type": "strange", "hidden_size": -1, "vocab_size": 4}')
    with pytest.raises(ModelError, match=r"hidden_size in config\.json is -1"):
        read_model(tmp_path)


def test_no_config_and_an_unknown_type(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"holds no config\.json"):
        find_config(str(tmp_path))
    foreign(tmp_path)
    with pytest.raises(ConfigError, match="dtype 'int3' is unknown"):
        read_model(tmp_path, "int3")
