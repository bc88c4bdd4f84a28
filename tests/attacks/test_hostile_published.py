"""Quantised checkpoints as an attacker, or a bad disk, would have them: refused before memory is taken."""

from __future__ import annotations

import json
import random
import shutil
import struct
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from stowage.errors import CheckpointError, StowageError
from stowage.models import loading
from stowage.planner.model import read_model
from stowage.weights.checkpoint import stored_in
from tests.weights import published_files as files

FP8 = {"quant_method": "fp8", "weight_block_size": [128, 128]}
LAYER = "model.layers.0.mlp.down_proj"
NVFP4 = {"quant_method": "modelopt", "quant_algo": "NVFP4", "ignore": ["lm_head"]}


@pytest.fixture(scope="module")
def published(tmp_path_factory: pytest.TempPathFactory) -> Path:
    quantiser = files.fp8(128, 128, "weight_scale_inv")
    return files.write("llama", tmp_path_factory.mktemp("hostile"), FP8, quantiser)[0]


@pytest.fixture(scope="module")
def of_two_scales(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return files.write("llama", tmp_path_factory.mktemp("hostile"), NVFP4, files.nvfp4(False))[0]


def header_of(raw: bytes) -> tuple[dict[str, Any], bytes]:
    (length,) = struct.unpack("<Q", raw[:8])
    return json.loads(raw[8 : 8 + length]), raw[8 + length :]


def test_a_header_that_lies_is_refused(published: Path, tmp_path: Path) -> None:
    header, data = header_of((published / "model.safetensors").read_bytes())
    name = f"{LAYER}.weight"

    def refused(match: str, entry: Any, data: bytes = data) -> None:
        text = json.dumps({**header, name: entry}).encode()
        path = tmp_path / "model.safetensors"
        path.write_bytes(struct.pack("<Q", len(text)) + text + data)
        with pytest.raises(CheckpointError, match=match):
            stored_in(path)

    own = header[name]
    refused("lies outside of the file", own | {"data_offsets": [0, 1 << 62]})
    refused("lies outside of the file", own | {"data_offsets": [9, 4]})
    refused("lies outside of the file", own, data[:100])
    refused("another size than its shape", own | {"shape": [1 << 40, 1 << 40]})
    refused("lies outside of the file", own | {"shape": [-1, -65536]})
    refused("another size than its shape", own | {"dtype": "F64"})
    refused("is damaged", own | {"shape": "large"})
    refused("is damaged", {"dtype": "U8"})
    refused("is damaged", 7)


def test_a_config_with_absurdly_many_layers_is_refused_before_any_is_made(published: Path, tmp_path: Path) -> None:
    said = json.loads((published / "config.json").read_text())
    path = tmp_path / "config.json"
    path.write_text(json.dumps(said | {"num_hidden_layers": 1_000_000_000}))
    with pytest.raises(CheckpointError, match=r"says that the model has 1000000000 layers"):
        read_model(tmp_path)
    shutil.copy(published / "model.safetensors", tmp_path)
    with pytest.raises(CheckpointError, match=r"says that the model has 1000000000 layers"):
        read_model(tmp_path)


@pytest.mark.parametrize("seed", range(40))
@pytest.mark.parametrize("made", ["published", "of_two_scales"])
def test_damaged_files_are_refused_or_mean_numbers(
    made: str, seed: int, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    published, chance = request.getfixturevalue(made), random.Random(seed)
    raw = bytearray((published / "model.safetensors").read_bytes())
    (length,) = struct.unpack("<Q", raw[:8])
    if seed % 4 == 0:
        raw = raw[: chance.randrange(8 + length + 1000)]
    else:
        for _ in range(1 + seed % 3):
            raw[chance.randrange(8 if seed % 4 == 1 else 8 + length)] = chance.randrange(256)
    for path in published.iterdir():
        if path.suffix != ".safetensors":
            (tmp_path / path.name).write_bytes(path.read_bytes())
    (tmp_path / "model.safetensors").write_bytes(raw)
    try:
        loading.load(tmp_path)
    except StowageError as error:
        assert str(error)


ODD: tuple[Any, ...] = (
    {"quant_method": "fp8", "weight_block_size": "128"},
    {"quant_method": "fp8", "weight_block_size": [0, -1], "modules_to_not_convert": 7},
    {"quant_method": "fp8", "modules_to_not_convert": [["a"], 3, "re:("]},
    {"quant_method": "gptq", "bits": 4, "group_size": "many", "dynamic": [3]},
    {"quant_method": "awq", "bits": 4, "group_size": -128, "version": {}},
    {"quant_method": "compressed-tensors", "config_groups": 3, "ignore": 9},
    {"quant_method": "compressed-tensors", "config_groups": {"g": 1, "h": {"weights": 2, "targets": 5}}},
    {"quant_method": "compressed-tensors", "config_groups": {"g": {"weights": {"type": "int", "num_bits": [4]}}}},
    {"quant_method": "compressed-tensors", "sparsity_config": "x", "config_groups": {}},
    {"quant_method": "compressed-tensors", "config_groups": {"g": {"weights": {"type": "float", "num_bits": 4}}}},
    {"quant_method": "modelopt"},
    {"quant_method": "modelopt", "quant_algo": ["NVFP4"], "ignore": {"a": 1}},
    {"quant_method": "modelopt", "quant_algo": "NVFP4", "ignore": ["[", "*" * 50, 7, None], "exclude_modules": 3},
    {"quant_method": "modelopt", "quant_algo": "MIXED_PRECISION", "quantized_layers": [1]},
    {"quant_method": "modelopt", "quant_algo": "MIXED_PRECISION", "quantized_layers": {"a": {"quant_algo": {}}}},
    {"quant_method": ["fp8"]},
    {"quant_method": "x" * 5000},
    ["fp8"],
    "fp8",
)


@pytest.mark.parametrize("number", range(len(ODD)))
def test_odd_configs_are_refused_or_planned(number: int, published: Path, tmp_path: Path) -> None:
    entries = json.loads((published / "config.json").read_text()) | {"quantization_config": ODD[number]}
    (tmp_path / "config.json").write_text(json.dumps(entries))
    (tmp_path / "model.safetensors").write_bytes((published / "model.safetensors").read_bytes())
    for attempt in (read_model, loading.load):
        try:
            attempt(tmp_path)
        except StowageError as error:
            assert 0 < len(str(error)) < 2000
    (tmp_path / "model.safetensors").unlink()
    try:
        assert read_model(tmp_path).total_bytes > 0
    except StowageError as error:
        assert 0 < len(str(error)) < 2000


def test_scales_of_another_shape_are_refused(published: Path, tmp_path: Path) -> None:
    state = load_file(published / "model.safetensors")
    home = tmp_path / "odd"
    home.mkdir()
    (home / "config.json").write_bytes((published / "config.json").read_bytes())
    for scales in (torch.ones(5, 2), torch.ones(0, 2), torch.ones(2, 2, 2), torch.ones(2, 2, dtype=torch.int64)):
        files.rewrite(home, {**state, f"{LAYER}.weight_scale_inv": scales})
        with pytest.raises(CheckpointError, match="different checkpoints"):
            loading.load(home)
