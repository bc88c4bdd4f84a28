"""Fields of GGUF files: each changes what is computed as llama.cpp means it, or the file is refused."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch

from stowage import UnsupportedModelError
from stowage.models import loading
from tests.weights import gguf_files
from tests.weights.conftest import logits, prompt
from tests.weights.gguf_models import model_of


def test_linear_scaling_is_read_however_a_file_says_it(tmp_path: Path) -> None:
    """Older files name the factor alone, or otherwise; llama.cpp takes a way that is not said for linear."""
    scaled = {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0}
    plain = model_of("llama", tmp_path / "model", rope_parameters=scaled)
    for said in (
        {"scaling.type": "linear", "scaling.factor": 4.0},
        {"scaling.type": "linear", "scaling.factor": 4},
        {"scaling.factor": 4.0},
        {"scale_linear": 4.0},
    ):
        own = {f"llama.rope.{key}": value for key, value in said.items()}
        loaded = loading.load(gguf_files.write(plain, tmp_path / "model.gguf", tokens=own)).model
        assert loaded.config.rope_parameters == scaled, said
        assert torch.allclose(logits(loaded, prompt()), logits(plain, prompt()), atol=1e-5)


def test_a_factor_of_attention_multiplies_what_yarn_makes_of_it(tmp_path: Path) -> None:
    """So llama.cpp has it, where Transformers' number is the product."""
    scaled = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 64}
    said = {
        "llama.rope.scaling.type": "yarn",
        "llama.rope.scaling.factor": 4.0,
        "llama.rope.scaling.original_context_length": 64,
    }
    for times in (0.5, 1.0):
        product = {"attention_factor": times * (1 + 0.1 * math.log(4.0))}
        plain = model_of("llama", tmp_path / f"model {times}", rope_parameters=scaled | product)
        own = said | {"llama.rope.scaling.attn_factor": times}
        loaded = loading.load(gguf_files.write(plain, tmp_path / "model.gguf", tokens=own)).model
        assert torch.allclose(logits(loaded, prompt()), logits(plain, prompt()), atol=1e-5)
    twice = said | {"llama.rope.scaling.yarn_log_multiplier": 0.1}
    plain = model_of("llama", tmp_path / "plain")
    for others in ({}, twice):
        own = others | {"llama.rope.scaling.attn_factor": 0.5}
        with pytest.raises(UnsupportedModelError, match=r"attn_factor = 0\.5"):
            loading.load(gguf_files.write(plain, tmp_path / "model.gguf", tokens=own))


def test_experts_in_groups_are_refused_of_families_that_choose_among_all(tmp_path: Path) -> None:
    plain = model_of("mixtral", tmp_path / "model")
    own = {"llama.expert_group_count": 1, "llama.expert_group_used_count": 1}
    loading.load(gguf_files.write(plain, tmp_path / "model.gguf", tokens=own))
    with pytest.raises(UnsupportedModelError, match="expert_group_count = 2"):
        loading.load(gguf_files.write(plain, tmp_path / "model.gguf", tokens=own | {"llama.expert_group_count": 2}))
