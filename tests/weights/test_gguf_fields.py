"""Fields of GGUF files: each changes what is computed as llama.cpp means it, or the file is refused."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch

from stowage import CheckpointError, UnsupportedModelError
from stowage.models import loading
from tests.weights import gguf_files
from tests.weights.conftest import logits, prompt
from tests.weights.gguf_models import FAMILIES, VARIANTS, made, model_of


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


@pytest.mark.parametrize("family", ["gemma3", "cohere2", "olmo3"])
@pytest.mark.parametrize("said", [2, 3, [True, True, False, False]])
def test_which_layers_have_a_window_is_what_a_file_says(family: str, said: Any, tmp_path: Path) -> None:
    each = said if isinstance(said, list) else [(layer + 1) % said > 0 for layer in range(4)]
    kinds = ["sliding_attention" if window else "full_attention" for window in each]
    changed = FAMILIES[family] | {"layer_types": kinds, "sliding_window": 8, "num_hidden_layers": 4}
    plain = model_of(family, tmp_path / "model", **changed)
    own = {f"{gguf_files.arch_of(plain.config)}.attention.sliding_window_pattern": said}
    loaded = loading.load(gguf_files.write(plain, tmp_path / "model.gguf", tokens=own)).model
    assert torch.allclose(logits(loaded, prompt(100)), logits(plain, prompt(100)), atol=5e-4)


def test_mistral_small_3_has_no_window_where_its_file_names_none(tmp_path: Path) -> None:
    """Transformers' config would have one of 4,096 tokens."""
    plain = model_of("mistral", tmp_path / "model", sliding_window=None, num_hidden_layers=1)
    fields = gguf_files.fields(plain.config, "mistral3")
    own = {"general.architecture": "mistral3", **fields}
    loaded = loading.load(gguf_files.write(plain, tmp_path / "model.gguf", tokens=own)).model
    assert loaded.config.model_type == "mistral"
    ids = prompt(4200)
    with torch.no_grad():
        ours, theirs = (model(ids, logits_to_keep=1).logits for model in (loaded, plain))
    assert torch.allclose(ours, theirs, atol=1e-4)


def test_numbers_that_are_said_of_each_layer_and_are_the_same_are_one(tmp_path: Path) -> None:
    plain = model_of("llama", tmp_path / "model")
    names = ("attention.head_count", "attention.head_count_kv", "feed_forward_length")
    said = gguf_files.fields(plain.config, "llama")
    own = {f"llama.{name}": [said[f"llama.{name}"]] * plain.config.num_hidden_layers for name in names}
    loaded = loading.load(gguf_files.write(plain, tmp_path / "model.gguf", tokens=own)).model
    assert torch.allclose(logits(loaded, prompt()), logits(plain, prompt()), atol=1e-5)


@pytest.mark.parametrize(
    ("family", "config", "field"),
    [
        ("cohere2", {"logit_scale": 1.0}, "logit_scale"),
        ("granite", {"residual_multiplier": 1.0}, "residual_scale"),
        ("glm4_moe", {"routed_scaling_factor": 1.0}, "expert_weights_scale"),
        ("gemma4", {"final_logit_softcapping": None}, "final_logit_softcapping"),
        ("glm4", {"partial_rotary_factor": 1.0}, "rope.dimension_count"),
        ("stablelm", {"partial_rotary_factor": 1.0}, "rope.dimension_count"),
    ],
)
def test_zeros_change_nothing(family: str, config: dict[str, Any], field: str, tmp_path: Path) -> None:
    """And where no part of a head is said to be rotated, all of it is."""
    changed = FAMILIES[family] | config
    if "rope" in field:
        changed = {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, **config}}
    plain = model_of(family, tmp_path / "model", **changed)
    own = {f"{gguf_files.arch_of(plain.config)}.{field}": 0 if "rope" in field else 0.0}
    loaded = loading.load(gguf_files.write(plain, tmp_path / "model.gguf", tokens=own)).model
    assert torch.allclose(logits(loaded, prompt()), logits(plain, prompt()), atol=5e-4)


YARN = {"rope.scaling.type": "yarn", "rope.scaling.original_context_length": 64}


@pytest.mark.parametrize(
    ("family", "own", "match"),
    [
        ("gemma4", {"rope.scaling.type": "linear", "rope.scaling.factor": 4.0}, "in the way 'linear'"),
        ("llama", YARN | {"rope.scaling.factor": 0.0}, "in the way 'yarn'"),
        ("ministral3", {"rope.scaling.type": "none"}, "temperature_scale"),
        ("cohere2", {"rope.dimension_count_swa": 8}, "dimension_count_swa = 8"),
        ("afmoe", {"attention.sliding_window_pattern": 2}, "sliding_window_pattern = 2"),
        ("minimax_m2", {"expert_gating_func": 1}, "expert_gating_func = 1"),
        ("qwen3_moe", {"expert_used_count": 0}, "how many experts"),
        ("afmoe", {"rope.freq_base_swa": 500.0}, r"freq_base_swa = 500\.0"),
        ("llama4", {"rope.freq_base_swa": 500.0}, r"freq_base_swa = 500\.0"),
        ("cohere2", {"attention.sliding_window": 0}, "sliding_window = 0"),
        ("gemma3", {"attention.sliding_window": 0}, "sliding_window = 0"),
        ("gemma3", {"attention.sliding_window": None}, "sliding_window = 0"),
        ("gemma4", {"rope.dimension_count": 8}, "rotated as a whole"),
        ("glm4", {"rope.dimension_sections": [4, 2, 2, 0]}, "dimension_sections = a list"),
        ("granite", {"rope.scaling.finetuned": False}, "finetuned = False"),
        ("llama", YARN | {"rope.scaling.factor": 0.5}, "in the way 'yarn'"),
        ("minicpm", {"logit_scale": None}, "embeddings, residuals and logits"),
        ("afmoe", {"expert_weights_norm": None}, "add up to one"),
        ("deepseek_v2", {"expert_weights_norm": True}, "add up to one"),
        ("deepseek_v2", {"expert_gating_func": 4}, "expert_gating_func = 4"),
        ("lfm2", {"attention.sliding_window": 4}, "sliding_window = 4"),
        ("glm_moe_dsa", YARN | {"rope.scaling.factor": 4.0}, "in the way 'yarn'"),
        ("phi3", {"rope.dimension_count": 32}, "dimension_count = 32"),
        ("phi4_mini", {"rope.scaling.factor": 4.0}, "in the way 'linear' and by a list"),
        ("minicpm 3 with long rope", YARN | {"rope.scaling.factor": 4.0}, "in the way 'yarn' and by a list"),
        ("mimo_v2_flash", YARN | {"rope.scaling.factor": 4.0, "rope.scaling.attn_factor": 0.7}, "attn_factor"),
    ],
)
def test_what_would_be_computed_otherwise_or_not_at_all_is_refused(
    family: str, own: dict[str, Any], match: str, tmp_path: Path
) -> None:
    plain = made(family, tmp_path / "model")
    arch = gguf_files.arch_of(plain.config)
    fields = {f"{arch}.{key}": value for key, value in own.items()}
    with pytest.raises((CheckpointError, UnsupportedModelError), match=match):
        loading.load(gguf_files.write(plain, tmp_path / "model.gguf", tokens=fields))


def _long(original: int, **more: Any) -> dict[str, Any]:
    lists = {"short_factor": [1.0, 1.5, 2.0, 2.5], "long_factor": [1.0, 3.0, 5.0, 7.0]}
    return {
        "rope_type": "longrope",
        "rope_theta": 10000.0,
        "original_max_position_embeddings": original,
        **lists,
        **more,
    }


PHI = {"sliding_window": None, "max_position_embeddings": 256}
ALPHA = 1000.0 * 4.0 ** (16 / 14)


@pytest.mark.parametrize(
    ("family", "config", "own"),
    [
        (
            "phi4_mini",
            {**PHI, "original_max_position_embeddings": 32, "rope_parameters": _long(32, partial_rotary_factor=0.5)},
            {},
        ),
        (
            "phi4_mini",
            {
                **PHI,
                "original_max_position_embeddings": 32,
                "rope_parameters": _long(32, partial_rotary_factor=0.5, attention_factor=0.7),
            },
            {"rope.scaling.attn_factor": 0.7, "rope.scaling.type": "longrope"},
        ),
        (
            "phi4_mini",
            {
                **PHI,
                "original_max_position_embeddings": 32,
                "rope_parameters": _long(32, partial_rotary_factor=0.5, attention_factor=1.0),
            },
            {"rope.scaling.attn_factor": None},
        ),
        ("minicpm 3 with long rope", {"rope_parameters": _long(32, factor=1.0)}, {"rope.scaling.attn_factor": None}),
        (
            "minicpm 3 with long rope",
            {"rope_parameters": _long(32, factor=1.0, attention_factor=0.7)},
            {"rope.scaling.attn_factor": 0.7},
        ),
        (
            "hunyuan_dense",
            {"rope_parameters": {"rope_type": "default", "rope_theta": ALPHA}},
            {"rope.freq_base": 1000.0, "rope.scaling.alpha": 4.0},
        ),
        ("granite", {"attention_multiplier": 0.25}, {"attention.scale": 0.0}),
        ("granitemoehybrid", {"position_embedding_type": "rope"}, {"rope.scaling.finetuned": None}),
        ("cohere", {"logit_scale": 1.0}, {"logit_scale": None}),
        (
            "exaone4",
            {"layer_types": ["full_attention"] * 4, "sliding_window": None, "sliding_window_pattern": None},
            {"attention.sliding_window": 0},
        ),
    ],
)
def test_fields_mean_what_they_mean_to_llama_cpp(
    family: str, config: dict[str, Any], own: dict[str, Any], tmp_path: Path
) -> None:
    """Also where they are left out, and where Transformers' config would say something else then."""
    family, changed = VARIANTS.get(family) or (family, FAMILIES[family])
    plain = model_of(family, tmp_path / "model", **{**changed, **config})
    fields = {f"{gguf_files.arch_of(plain.config)}.{key}": value for key, value in own.items()}
    loaded = loading.load(gguf_files.write(plain, tmp_path / "model.gguf", tokens=fields)).model
    assert torch.allclose(logits(loaded, prompt(100)), logits(plain, prompt(100)), atol=5e-4)


def test_biases_of_a_hybrid_whose_first_layer_has_no_attention_are_read(tmp_path: Path) -> None:
    plain = model_of("granitemoehybrid", tmp_path / "model", **FAMILIES["granitemoehybrid"], attention_bias=True)
    assert plain.config.layer_types[0] == "linear_attention"
    loaded = loading.load(gguf_files.write(plain, tmp_path / "model.gguf")).model
    assert torch.allclose(logits(loaded, prompt()), logits(plain, prompt()), atol=1e-4)
