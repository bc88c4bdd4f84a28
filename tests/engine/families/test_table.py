"""The table of families, the engine's lists and the documentation say the same."""

import pytest
from scripts.models_doc import HEAD, PAGE, SAME, not_tried, tail
from transformers import AutoConfig

from stowage.config.memory import Memory
from stowage.engine.engine import Engine
from stowage.errors import UnsupportedModelError
from stowage.models import families, layout
from stowage.testing import tiny_models
from stowage.testing.tiny_models import TinySize

MEMORY = Memory(kv_cache_memory="8MiB")


@pytest.mark.parametrize("family", "llama gemma4 gpt_oss ernie4_5_moe afmoe deepseek_v3 deepseek_v4 rwkv".split())
def test_every_weight_of_a_tiny_model_matters(family):
    """None is what a forgotten one would be: a norm of ones, or a bias, a correction or a table of zeros."""
    weights = tiny_models.build(family).state_dict()
    assert [name for name, weight in weights.items() if weight.numel() > 1 and len(weight.unique()) == 1] == []
    assert not {0.0, 1.0} & {weight.item() for weight in weights.values() if weight.numel() == 1}


def test_what_is_proved_is_what_is_tested():
    assert {family.model_type for family in tiny_models.TABLE.values()} == families.PROVED
    assert {family.model_type for family in tiny_models.REFUSED.values()} == families.REFUSED.keys()
    lists = [families.PROVED, families.OUTER.keys(), families.REFUSED.keys(), families.NO_TEXT_MODELS.keys()]
    assert len(set().union(*lists)) == sum(map(len, lists))
    assert families.SINGLY <= families.ALONE <= families.PROVED and families.DECODERS <= families.PROVED


def test_every_causal_model_of_transformers_is_in_a_list():
    """Of the version that tests run with; another one may have more, which are refused as not supported yet."""
    assert not_tried() == []
    assert {name: AutoConfig.for_model(name).model_type for name in SAME} == SAME


def test_the_page_is_up_to_date():
    """Each row is held to its model where that is run (``test_batches_and_reuse``)."""
    text = PAGE.read_text()
    assert text.startswith(HEAD) and text.endswith(tail()), "make reference"
    rows = [line.split("`")[1] for line in text.removeprefix(HEAD).removesuffix(tail()).splitlines() if "| `" in line]
    assert rows == list(tiny_models.TABLE)


@pytest.mark.parametrize("family", tiny_models.REFUSED)
def test_refused_by_name_and_for_what_it_does(family, monkeypatch):
    """With the reason; and a family of another name that did the same would be refused too, where it can be seen."""
    row = tiny_models.REFUSED[family]
    model = tiny_models.build(family, TinySize(layers=2, context_tokens=256))
    with pytest.raises(UnsupportedModelError) as caught:
        Engine(model, MEMORY).close()
    assert families.REFUSED[row.model_type] in str(caught.value)
    if not row.refused:
        return
    monkeypatch.setattr(layout, "refuse_unsupported", lambda _: None)
    before = model.config._attn_implementation
    with pytest.raises(UnsupportedModelError) as caught:
        Engine(model, MEMORY).close()
    assert row.refused in str(caught.value)
    assert model.config._attn_implementation == before
