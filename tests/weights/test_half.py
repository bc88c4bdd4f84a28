"""Half precision, with models large enough that everything a placement moves is moved as in real ones: no threshold is
lowered here. ``STOWAGE_TEST_FAMILIES=all`` tries every family of the table.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from transformers import AutoModelForCausalLM

import stowage
from stowage.testing import tiny_models
from stowage.weights.weight_unit import Delivery
from tests.depth import mostly_rare
from tests.weights import published_files
from tests.weights.conftest import bytes_of, logits, prompt
from tests.weights.test_parity import FAMILIES
from tests.weights.test_published import METHODS

pytestmark = pytest.mark.usefixtures("real_units")
LEFT_OUT = {
    "deepseek_v4": "plain Transformers multiplies float32 and half precision, and fails",
    "cohere_compass": "its tiny model has no other size",
}
TRIED = (
    [family for family in tiny_models.FAMILIES if family not in LEFT_OUT]
    if os.environ.get("STOWAGE_TEST_FAMILIES") == "all"
    else FAMILIES
)
HALVES = ("bfloat16", "float16")
CASES = [
    pytest.param(family, dtype, marks=() if dtype == "bfloat16" or family == "llama" else pytest.mark.every_family)
    for family in TRIED
    for dtype in HALVES
]


@pytest.mark.parametrize(
    ("family", "dtype"),
    mostly_rare(
        CASES,
        [
            ("llama", "float16"),
            ("gemma3", "bfloat16"),
            ("qwen3_next", "bfloat16"),
            ("deepseek_v3", "bfloat16"),
            ("gpt2", "bfloat16"),
        ],
    ),
)
def test_every_placement_answers_in_half_precision_as_plain_transformers(
    family: str, dtype: str, tmp_path: Path
) -> None:
    size = tiny_models.TinySize(hidden=256, layers=max(2, tiny_models.TABLE[family].layers))
    directory = tiny_models.write(family, tmp_path / family, size, dtype=dtype)
    whole = AutoModelForCausalLM.from_pretrained(directory, dtype="auto").eval()
    assert whole.dtype is getattr(torch, dtype)
    asked = [prompt(20), prompt(1, 3)]
    expected = [logits(whole, ids) for ids in asked]
    seen, total = set[Delivery](), bytes_of(whole)
    budgets: list[dict[str, Any]] = [
        {"weights": "*=stream"},
        {"weights": "*=prefetch", "host_memory": "1GiB"},
        {"weights": "*=mapped", "host_memory": "1GiB"},
        {"device_memory": int(total * 0.75)},
    ]
    if any(p.dim() == 3 and "experts" in name for name, p in whole.named_parameters()):
        budgets.append({"weights": "*.experts=experts,*=resident"})
    for budget in budgets:
        try:
            model = stowage.offload(directory, disk=f"{tmp_path}:1GiB", **budget)
        except (stowage.ConfigError, stowage.UnsupportedModelError):  # too little, or its experts go by layers
            assert "weights" not in budget or "experts" in budget["weights"]
            continue
        for ids, wanted in zip(asked, expected, strict=True):
            assert torch.equal(bits(logits(model, ids)), bits(wanted)), budget
        moved = model.stowage.placement
        seen.update(moved.deliveries)
        if budget.get("weights", "").startswith("*="):
            offloaded = moved.nbytes(*(set(Delivery) - {Delivery.RESIDENT}))
            assert offloaded > total // 2, "most of it is offloaded"
        model.stowage.check()
        model.stowage.close()
    assert seen >= {Delivery.STREAM, Delivery.PREFETCH, Delivery.MAPPED}


def bits(values: torch.Tensor) -> torch.Tensor:
    return values.contiguous().view(torch.int16) if values.element_size() == 2 else values


@pytest.mark.parametrize("dtype", HALVES)
def test_texts_and_saved_models_in_half_precision(dtype: str, tmp_path: Path, checkpoints: Callable[..., Path]) -> None:
    directory = tiny_models.write("gemma3", tmp_path / "model", tiny_models.TinySize(hidden=256, layers=6), dtype=dtype)
    whole = AutoModelForCausalLM.from_pretrained(directory, dtype="auto").eval()
    asked = {"max_new_tokens": 10, "do_sample": False}
    expected = whole.generate(prompt(), **asked)
    model = stowage.offload(directory, weights="*=stream")
    assert torch.equal(model.generate(prompt(), **asked), expected)
    model.save_pretrained(tmp_path / "saved")
    again = stowage.offload(tmp_path / "saved", device_memory=int(bytes_of(whole) * 0.8))
    assert again.dtype is getattr(torch, dtype)
    assert torch.equal(again.generate(prompt(), **asked), expected)


def test_a_type_may_be_torchs_and_what_is_said_otherwise_is_told(checkpoints: Callable[..., Path]) -> None:
    directory = checkpoints("llama")
    model = stowage.offload(directory, dtype=torch.bfloat16, device_memory="500KiB", trust_remote_code=False)
    assert model.dtype is torch.bfloat16
    assert torch.equal(
        logits(model, prompt()), logits(stowage.offload(directory, dtype="bfloat16", weights="*=resident"), prompt())
    )
    asked: dict[str, Any] = {"trust_remote_code": True}
    with pytest.raises(stowage.ConfigError, match="no code that comes with a checkpoint"):
        stowage.offload(directory, weights="*=stream", **asked)
    for name, value in (("device_map", "auto"), ("max_memory", {"cpu": "1GiB"})):
        with pytest.raises(stowage.ConfigError, match=rf"{name}: .*Leave it out"):
            stowage.offload(directory, weights="*=stream", **{name: value})


@pytest.mark.parametrize("name", ["device_memry", "config", "output_loading_info"])
def test_what_transformers_does_not_take_is_told_by_its_name(
    name: str, checkpoints: Callable[..., Path], tmp_path: Path
) -> None:
    published, _ = published_files.write("llama", tmp_path, *METHODS["int4-32"][1:])
    for source in (checkpoints("llama"), published):
        with pytest.raises(stowage.ConfigError, match=rf"^{name}='3GiB' cannot be given: .*Leave it out, or correct"):
            stowage.offload(source, weights="*=stream", **{name: "3GiB"})
    with pytest.raises(stowage.ConfigError, match="give one of them"):
        stowage.offload(published, weights="*=stream", dtype="float16", torch_dtype="bfloat16")


@pytest.mark.parametrize("rules", ["*=stream", "*=mapped", "lm_head=mapped"])
def test_another_type_is_refused_for_placed_weights_and_given_to_what_was_added(rules: str, tmp_path: Path) -> None:
    """PEFT keeps adapters in float32. ``to`` of weights that are all mapped, or of an adapter, was silently undone."""
    directory = tiny_models.write("llama", tmp_path, dtype="bfloat16")
    config = peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"], init_lora_weights=False)
    found = []
    for base in (
        AutoModelForCausalLM.from_pretrained(directory, dtype="auto"),
        stowage.offload(directory, weights=rules, host_memory="1GiB"),
    ):
        torch.manual_seed(0)
        model = peft.get_peft_model(base.eval(), config)
        before = logits(model, prompt())
        after = logits(model.to(torch.bfloat16), prompt())
        assert {parameter.dtype for parameter in model.parameters()} == {torch.bfloat16}
        assert not torch.equal(before, after)
        found.append([before, after])
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(*found, strict=True))
    for change in (base.float, base.double, lambda: base.to("meta")):
        with pytest.raises(stowage.ModelError, match="keep their dtype and their device"):
            change()
    assert torch.equal(logits(model, prompt()), found[1][1])
