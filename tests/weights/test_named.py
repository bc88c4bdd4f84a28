"""Options of ``from_pretrained`` that say which checkpoint is meant: it is loaded, under its own name, or none is."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import stowage
from stowage import CheckpointError, ConfigError
from stowage.models import loading
from stowage.testing import tiny_models
from tests.weights import gguf_files
from tests.weights.conftest import logits, prompt
from tests.weights.gguf_models import model_of


def test_a_checkpoint_or_a_file_within_a_directory(checkpoints: Callable[..., Path], tmp_path: Path) -> None:
    directory = Path(shutil.copytree(checkpoints("llama"), tmp_path / "model"))
    within = tiny_models.write("qwen3", directory / "within")
    file = gguf_files.write(model_of("llama", tmp_path / "other"), directory / "within" / "other.gguf")
    for meant, options in (
        (within, {"subfolder": "within"}),
        (file, {"subfolder": "within", "gguf_file": "other.gguf"}),
        (file, {"gguf_file": "within/other.gguf"}),
        (directory, {"subfolder": "", "gguf_file": None, "revision": "main", "use_safetensors": True}),
    ):
        expected, given = loading.load(meant), dict[str, Any](options)
        model = stowage.offload(directory, weights="*=stream", **given)
        assert model.stowage.identity == expected.identity
        assert torch.equal(logits(model, prompt()), logits(expected.model, prompt()))
        model.stowage.close()
    for options in ({"gguf_file": "none.gguf"}, {"gguf_file": "x"}, {"subfolder": "none"}):
        with pytest.raises(CheckpointError, match=rf"model/{next(iter(options.values()))} does not exist"):
            stowage.offload(directory, weights="*=stream", **dict[str, Any](options))


def test_what_would_be_another_checkpoint_than_is_looked_at_is_refused(checkpoints: Callable[..., Path]) -> None:
    cases: tuple[tuple[Any, dict[str, Any], str], ...] = (
        (checkpoints("llama"), {"variant": "fp16"}, "variant: .*under their usual names"),
        (checkpoints("llama"), {"gguf_file": 3}, "gguf_file is a int"),
        ("some/model", {"revision": "v2"}, "revision='v2' is not taken .*snapshot_download"),
        ("some/model", {"subfolder": "a"}, "subfolder='a' is not taken .*download it"),
        ("some/model", {"token": "secret"}, "token.* is not taken .*set HF_TOKEN"),
    )
    for model, options, match in cases:
        with pytest.raises(ConfigError, match=match):
            stowage.offload(model, weights="*=stream", **options)
