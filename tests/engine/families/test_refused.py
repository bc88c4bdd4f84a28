"""What is said of refused families is what Transformers does with their tiny models."""

from __future__ import annotations

import inspect

import pytest
import torch

from stowage.config.memory import Memory
from stowage.engine.engine import Engine
from stowage.errors import UnsupportedModelError
from stowage.models import families
from stowage.testing import tiny_models
from tests.engine.conftest import random_prompt

IDS = torch.tensor([random_prompt(60)])


def named(reason: str) -> list[str]:
    return [name for name, row in tiny_models.REFUSED.items() if families.REFUSED[row.model_type] == reason]


FUTURE = named(families.FUTURE)
POSITIONS = named(families.POSITIONS)
FORGETS = named(families.FORGETS)


def build(family: str):
    return tiny_models.build(family, tiny_models.TinySize(layers=2, context_tokens=256))


def test_every_reason_is_held_against_its_models():
    assert {*FUTURE, *POSITIONS, *FORGETS, "reformer"} == tiny_models.REFUSED.keys()


@torch.inference_mode()
@pytest.mark.parametrize("family", [*FUTURE, "bert", "llama"])
def test_what_comes_later_changes_an_answer(family):
    """A causal model computes the beginning of a prompt alike whatever follows."""
    model = build(family)
    off = float((model(IDS).logits[:, :30] - model(IDS[:, :30]).logits).abs().max())
    assert (off > 0.1) == (family in FUTURE), "Transformers was repaired"


@torch.inference_mode()
@pytest.mark.parametrize("family", [*POSITIONS, "bert"])
def test_positions_of_generate_are_not_those_of_a_forward(family):
    model, given = build(family), []
    hook = model.register_forward_pre_hook(lambda _, args, kwargs: given.append(kwargs), with_kwargs=True)
    model.generate(IDS, attention_mask=torch.ones_like(IDS), max_new_tokens=1, do_sample=False)
    hook.remove()
    assert given[0]["position_ids"].tolist() == [list(range(60))]
    off = float((model(IDS, position_ids=given[0]["position_ids"]).logits - model(IDS).logits).abs().max())
    assert (off > 0.1) == (family in POSITIONS), "Transformers was repaired"


@torch.inference_mode()
@pytest.mark.parametrize("family", FORGETS)
def test_nothing_is_kept(family):
    out = build(family)(IDS, use_cache=True)
    assert not {"past_key_values", "cache_params", "state", "mems"} & out.keys(), "Transformers was repaired"


@torch.inference_mode()
def test_hashes_in_a_cache_of_their_own():
    model = build("reformer")
    assert "past_key_values" not in inspect.signature(model.forward).parameters
    assert type(model(IDS, use_cache=True).past_buckets_states).__name__ == "ReformerDynamicCache"


@pytest.mark.parametrize("kind", sorted(families.NO_TEXT_MODELS))
def test_refused_by_name(kind):
    from stowage.models.layout import refuse_unsupported

    config = type("Config", (), {"model_type": kind})
    with pytest.raises(UnsupportedModelError) as caught:
        refuse_unsupported(config)
    assert str(caught.value).endswith(families.NO_TEXT_MODELS[kind])


@pytest.mark.parametrize("family", ["bert", "electra"])
def test_an_encoder_is_no_decoder(family):
    model = tiny_models.build(family, tiny_models.TinySize(layers=2, context_tokens=256), is_decoder=False)
    with pytest.raises(UnsupportedModelError, match='"is_decoder": true'):
        Engine(model, Memory(kv_cache_memory="8MiB")).close()
