"""Options of an engine that change what the same weights compute: engines that differ in one never meet in a directory;
and those with which no part of a prompt can come from a cache.
"""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.vllm.conftest import Start
from tests.vllm.models import Family
from tests.vllm.oracle import EngineError, connector, prompt

LONGROPE = Family(
    "phi3",
    {
        "head_dim": None,
        "num_key_value_heads": 4,
        "original_max_position_embeddings": 1024,
        "rope_parameters": {
            "rope_type": "longrope",
            "rope_theta": 10000.0,
            "original_max_position_embeddings": 1024,
            "short_factor": [1.0] * 16,
            "long_factor": [4.0] * 16,
        },
    },
)


@pytest.mark.slow
def test_rope_for_short_and_for_long_prompts_never_meet(start: Start, tmp_path: Path) -> None:
    """vLLM takes LongRoPE's short factors where no prompt can be longer than the original length."""
    setting = connector(disk=tmp_path / "cache")
    long = start("phi3", family=LONGROPE).generate(prompt(700))
    first = start("phi3", setting, family=LONGROPE, max_model_len=1024)
    assert first.generate(prompt(700)).distance(long) > 0
    first.close()
    second = start("phi3", setting, family=LONGROPE)
    found = second.generate(prompt(700))
    assert found.external == 0 and found.distance(long) == 0.0
    second.close()
    assert start("phi3", setting, family=LONGROPE, max_model_len=2000).generate(prompt(700)).external == 640


def config(**more: Any) -> Any:
    fields = {
        "hf_config": SimpleNamespace(to_dict=dict, architectures=["LlamaForCausalLM"]),
        "max_model_len": 4096,
        "quantization_config": None,
        "model_class_overrides": {},
        "multimodal_config": SimpleNamespace(mm_processor_kwargs=None),
        "override_generation_config": {},
        "try_get_generation_config": dict,
    }
    lora = more.pop("lora_config", None)
    return SimpleNamespace(model_config=SimpleNamespace(**{**fields, **more}), lora_config=lora)


TUNED = "attn_temperature_tuning"
LLAMA4 = SimpleNamespace(to_dict=dict, architectures=["Llama4ForConditionalGeneration"])


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ({}, {"quantization_config": {"linear": "fp8"}}),
        ({}, {"multimodal_config": SimpleNamespace(mm_processor_kwargs={"num_crops": 4})}),
        ({}, {"lora_config": SimpleNamespace(target_modules=["q_proj"])}),
        ({"hf_config": LLAMA4}, {"hf_config": LLAMA4, "max_model_len": 65536}),
        ({"hf_config": LLAMA4}, {"hf_config": LLAMA4, "try_get_generation_config": lambda: {TUNED: True}}),
        ({"hf_config": LLAMA4}, {"hf_config": LLAMA4, "override_generation_config": {TUNED: True}}),
    ],
)
def test_what_an_engine_was_told_is_in_its_name(one: dict[str, Any], other: dict[str, Any]) -> None:
    pytest.importorskip("vllm")
    from stowage.plugins.vllm.namespace import _option_fields

    assert _option_fields(config(**one)) != _option_fields(config(**other))
    assert _option_fields(config(**other)) == _option_fields(config(**other))


def test_an_engine_that_was_told_nothing_has_the_name_that_it_had() -> None:
    pytest.importorskip("vllm")
    from stowage.plugins.vllm.namespace import _option_fields

    assert _option_fields(config()) == {} == _option_fields(config(max_model_len=65536))


@pytest.mark.parametrize(
    ("load_format", "elsewhere", "files", "shared"),
    [
        ("auto", "", ["config.json", "model.safetensors"], True),
        ("runai_streamer", "", ["config.json", "model.safetensors"], True),
        ("auto", "", ["config.json", "modeling.py"], False),
        ("runai_streamer", "s3://bucket/model", ["config.json"], False),
        ("tensorizer", "", ["config.json", "model.safetensors"], False),
    ],
)
def test_weights_that_nobody_has_seen_are_one_processes_own(
    load_format: str, elsewhere: str, files: list[str], shared: bool, tmp_path: Path
) -> None:
    """vLLM fetches only texts of a model that it streams from an object store: another's may be the same."""
    pytest.importorskip("vllm")
    from stowage.plugins.vllm.namespace import _weights

    for name in files:
        (tmp_path / name).write_bytes(b"the same")
    plain = SimpleNamespace(_commit_hash=None)
    told = {"model": str(tmp_path), "model_weights": elsewhere, "hf_config_path": None, "revision": None}
    model = SimpleNamespace(**told, hf_config=plain)
    loading = SimpleNamespace(load_config=SimpleNamespace(load_format=load_format))
    assert (_weights(model, loading) == _weights(model, loading)) is shared


def test_weights_in_a_file_are_named_by_all_that_it_is_split_over(tmp_path: Path) -> None:
    """And not by the revision of the repository that the config is taken from."""
    pytest.importorskip("vllm")
    from stowage.plugins.vllm.namespace import _weights

    first, second = (tmp_path / f"m-0000{number}-of-00002.gguf" for number in (1, 2))
    first.write_bytes(b"first")
    config = SimpleNamespace(_commit_hash="0" * 40)
    model = SimpleNamespace(model=str(first), hf_config=config, hf_config_path="org/model", revision=None)
    loading = SimpleNamespace(load_config=SimpleNamespace(load_format="gguf"))
    names = []
    for written in (b"second", b"tuned", b"second"):
        second.write_bytes(written)
        names.append(_weights(model, loading))
    assert names[0] == names[2] != names[1]
    model.model = "org/model:Q4_K_M"  # a revision of another repository says nothing of it
    assert _weights(model, loading) != _weights(model, loading)


@pytest.mark.slow
@pytest.mark.parametrize("pooling", ["MEAN", "CLS"])
def test_pooling_of_all_hidden_states_is_refused(pooling: str, start: Start) -> None:
    """vLLM ends the engine where a part of such a prompt is not computed."""
    told = {"runner": "pooling", "pooler_config": {"seq_pooling_type": pooling}}
    with pytest.raises(EngineError, match="pools all of a prompt's hidden states"):
        start("llama", connector(), max_num_batched_tokens=2048, **told)
