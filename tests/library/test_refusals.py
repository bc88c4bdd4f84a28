"""What cannot be kept exactly is refused with words that say what to do; nothing is kept under a name not its own."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from transformers import AutoConfig, AutoModelForSeq2SeqLM, DynamicCache, EncoderDecoderCache, StaticCache
from transformers.models.gemma3 import Gemma3ForConditionalGeneration

from stowage import BudgetError, ConfigError, ModelError, PrefixCache, RequestError, StowageError, UnsupportedModelError
from stowage.testing import tiny_models
from tests.library.conftest import COMMON, SIZE, answer, assert_as_plain, model_of, restored, tokens

PROMPT = tokens(100)


def own(family: str = "llama", **overrides: object) -> torch.nn.Module:
    return tiny_models.build(family, SIZE, **overrides)


# models


def seq2seq() -> nn.Module:
    config = AutoConfig.for_model("t5", d_model=32, d_kv=8, d_ff=32, num_layers=1, num_heads=2, vocab_size=512)
    return AutoModelForSeq2SeqLM.from_config(config).eval()


def with_pictures() -> nn.Module:
    text = COMMON | {"head_dim": 16}
    vision = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "image_size": 16, "patch_size": 8}
    vision["intermediate_size"] = 32
    config = AutoConfig.for_model("gemma3", text_config=text, vision_config=vision, mm_tokens_per_image=4)
    return Gemma3ForConditionalGeneration(config).eval()


def with_adapters() -> nn.Module:
    model = own()
    model.peft_config = {"default": object()}
    return model


def quantised() -> nn.Module:
    return torch.ao.quantization.quantize_dynamic(own(), {nn.Linear}, dtype=torch.qint8)


@pytest.mark.parametrize(
    ("make", "error", "says"),
    [
        (seq2seq, UnsupportedModelError, "encoder-decoder"),
        (with_pictures, UnsupportedModelError, "more than text"),
        (with_adapters, UnsupportedModelError, "merge_and_unload"),
        (quantised, UnsupportedModelError, "quantised"),
        (lambda: own().to("meta"), UnsupportedModelError, "not in memory"),
        (lambda: own().train(), ModelError, "model.eval"),
        (lambda: model_of("jamba"), UnsupportedModelError, "forgets a recurrent state"),
        (
            lambda: own(rope_parameters={"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}),
            ModelError,
            "dynamic",
        ),
        (lambda: nn.Linear(2, 2), UnsupportedModelError, "Linear is no Transformers model"),
        (lambda: own("minimax"), UnsupportedModelError, "a cache of a class of its own"),
        (lambda: own("mpt"), UnsupportedModelError, "its whole prompt again"),
        (lambda: own("recurrent_gemma"), UnsupportedModelError, "keeps a state outside of its cache"),
        (lambda: own("doge"), UnsupportedModelError, "attends to tokens that come later"),
        (lambda: own("big_bird"), UnsupportedModelError, "attends to tokens that come later"),
        (lambda: own("xlstm"), UnsupportedModelError, "does not run with Transformers' dynamic cache"),
        (lambda: own("gemma3", sliding_window=3), UnsupportedModelError, "window of 3"),
    ],
    ids=(
        "seq2seq pictures adapters quantised meta training jamba rope linear minimax mpt state doge later xlstm window"
    ).split(),
)
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_models(make, error, says):
    with pytest.raises(error, match=says):
        PrefixCache(make())


@pytest.mark.parametrize(
    ("settings", "error", "says"),
    [
        ({"host_memory": 0}, ConfigError, "host_memory is 0"),
        ({"host_memory": "4KiB"}, BudgetError, "set host_memory to at least"),
        ({"host_memory": "1MiB", "dsk": "x:1GiB"}, ConfigError, "'dsk'"),
        ({"snapshot_token": 3}, ConfigError, "Did you mean 'snapshot_tokens'"),
        ({"kv_cache_memory": "1GiB"}, ConfigError, "kv_cache_memory"),
        ({"disk": "here"}, ConfigError, "DIRECTORY:SIZE"),
    ],
)
def test_settings(settings, error, says):
    with pytest.raises(error, match=says):
        PrefixCache(model_of("llama"), **settings)


@pytest.mark.parametrize(
    "change",
    [
        lambda model: model.to(torch.float64),
        lambda model: nn.init.ones_(model.model.layers[0].mlp.up_proj.weight),
        lambda model: setattr(model.lm_head, "weight", nn.Parameter(torch.zeros(512, 64))),
        lambda model: setattr(model, "peft_config", {"default": object()}),
        lambda model: model.set_attn_implementation("eager"),
        lambda model: model.train(),
        lambda model: model.model.rotary_emb.inv_freq.mul_(0.5),
        lambda model: model.model.layers[0].register_forward_hook(lambda *_: None),
        lambda model: setattr(model.model.layers[0].mlp, "forward", lambda x: x),
        lambda model: setattr(model.config, "attention_dropout", 0.5),
    ],
    ids="cast,in place,replaced,adapter,attention,training,buffer,hook,forward,config".split(","),
)
def test_a_model_that_was_changed_meanwhile(change, prefix_caches):
    model = own()
    prefixes = prefix_caches(model)
    cache = prefixes.restore(PROMPT)
    out = answer(model, PROMPT, cache)[0]
    prefixes.keep(cache, out)
    change(model)
    for call in (lambda: prefixes.restore(PROMPT), lambda: prefixes.keep(cache, out), lambda: prefixes.prefill(PROMPT)):
        with pytest.raises(ModelError):
            call()


# caches and tokens


def test_caches(prefix_caches):
    model, prefixes = model_of("llama"), prefix_caches("llama")
    out = answer(model, PROMPT)[0]
    static = StaticCache(config=model.config, max_cache_len=128)
    other = DynamicCache(config=model_of("gemma3").config)
    answer(model_of("gemma3"), PROMPT, other)
    batch = DynamicCache(config=model.config)
    answer(model, tokens(100, rows=2), batch)
    restored_elsewhere = prefix_caches("llama", salt="another").restore(PROMPT)
    answer(model, PROMPT, restored_elsewhere)
    for cache, says in (
        (static, "StaticCache"),
        (EncoderDecoderCache(DynamicCache(), DynamicCache()), "EncoderDecoderCache"),
        (None, "NoneType"),
        (DynamicCache(), "0 layers"),
        (other, "4 layers"),
        (restored_elsewhere, "another PrefixCache"),
        (batch, "with 1 rows"),
        ([(1, 2)], "list"),
    ):
        with pytest.raises(RequestError, match=says):
            prefixes.keep(cache, out)
    assert prefixes.stats()["prefixes"]["tokens_kept"] == 0


def test_tokens_that_the_cache_has_not_seen(prefix_caches):
    prefixes = prefix_caches("llama")
    cache = prefixes.restore(PROMPT)
    out = answer(model_of("llama"), PROMPT, cache)[0]
    with pytest.raises(RequestError, match="give all of them"):
        prefixes.keep(cache, out[:, 100:])
    with pytest.raises(RequestError, match="does not begin with the prompt"):
        prefixes.keep(cache, tokens(106, seed=1))
    with pytest.raises(RequestError, match="does not begin with the prompt"):
        prefixes.keep(cache, out.repeat(2, 1))
    assert prefixes.keep(cache, out[0].tolist()) == 64


@pytest.mark.parametrize("family", ["llama", "deepseek_v3", "falcon_h1", "gemma3"])
def test_rows_in_another_order(family, prefix_caches):
    """As a beam search leaves a cache of the caller's own: its rows were kept under the other ones' tokens."""
    prefixes, ids = prefix_caches(family), tokens(70, rows=3)
    cache = DynamicCache(config=model_of(family).config)
    out = answer(model_of(family), ids, cache)[0]
    moved = copy.deepcopy(cache)
    moved.reorder_cache(torch.tensor([0, 2, 1]))
    with pytest.raises(RequestError, match="hold other tokens than ids"):
        prefixes.keep(moved, out)
    assert prefixes.stats()["prefixes"]["tokens_kept"] == 0
    prefixes.keep(cache, out)
    assert prefixes.stats()["prefixes"]["tokens_kept"] == 3 * 64
    assert prefixes.restore(ids).get_seq_length() == (64 if family in ("llama", "deepseek_v3") else 0)


@pytest.mark.parametrize(
    ("ids", "says"),
    [
        (torch.zeros(1, 0, dtype=torch.long), "empty"),
        ([[1, 2], [3]], "unequal lengths"),
        (torch.ones(1, 4), "integers"),
        ({"input_ids": PROMPT}, "its input_ids"),
        ([], "empty"),
        ([-1, 2], "0 or more"),
        (torch.tensor([[0, 5, 6], [4, 5, 6]]), "begins with the pad token 0"),
        (torch.tensor([[0, 5, 6]]), "begins with the pad token 0"),
    ],
)
def test_prompts(ids, says, prefix_caches):
    with pytest.raises(RequestError, match=says):
        prefix_caches("llama").restore(ids)


def test_an_attention_mask_with_zeros(prefix_caches):
    mask = torch.ones_like(PROMPT)
    mask[:, :3] = 0
    with pytest.raises(RequestError, match="padded batches are not supported"):
        prefix_caches("llama").restore(PROMPT, attention_mask=mask)
    with pytest.raises(RequestError, match="is a tensor, not list"):
        prefix_caches("llama").restore(PROMPT, attention_mask=mask.tolist())


def test_a_pad_token_inside_a_prompt(prefix_caches):
    """Without a mask ``generate()`` takes it for padding: what follows is not kept. With one it is a token."""
    model, prompt = model_of("llama"), tokens(160)
    prompt[:, 70] = 0
    prefixes = prefix_caches("llama")
    options = {"max_new_tokens": 4, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    for _ in range(2):
        cache = prefixes.restore(prompt)
        out = model.generate(prompt, past_key_values=cache, **options)
        assert torch.equal(out, model.generate(prompt, **options))
        assert prefixes.keep(cache, out) == 64
    assert restored(prefixes) == 64
    prompt = torch.cat([prompt, tokens(60, seed=1)], dim=1)
    whole = torch.ones_like(prompt)
    for _ in range(2):
        cache = prefixes.restore(prompt, attention_mask=whole)
        prefixes.keep(cache, assert_as_plain("llama", prompt, cache), attention_mask=whole)
    assert restored(prefixes) == 64 + 64 + 192


@pytest.mark.parametrize("rows", [1, 2])
@pytest.mark.parametrize("pad", [0, 2], ids=["pad", "end of text"])
def test_nothing_is_kept_of_prompts_that_were_padded(pad, rows, prefix_caches):
    """On the left, in a cache of the caller's own: their tokens do not name it, as positions count without padding."""
    model = own()
    model.generation_config.pad_token_id = pad
    prefixes, ids, cache = prefix_caches(model), tokens(160, rows=rows), DynamicCache(config=model.config)
    ids[:, :70] = pad
    mask = torch.ones_like(ids)
    mask[:, :70] = 0
    out = model.generate(ids, attention_mask=mask, past_key_values=cache, max_new_tokens=4, pad_token_id=pad)
    assert prefixes.keep(cache, out) == 0
    assert prefixes.restore(ids, attention_mask=torch.ones_like(ids)).get_seq_length() == 0


def test_nothing_is_kept_of_an_empty_cache(prefix_caches):
    assert prefix_caches("llama").keep(DynamicCache(config=model_of("llama").config), tokens(160, rows=2)) == 0


def test_rows_that_ended_early_are_kept_without_their_padding(prefix_caches):
    """What ``generate()`` returns for a batch is filled up with pad tokens on the right."""
    prefixes = prefix_caches("llama")
    model, ids = model_of("llama"), tokens(120, rows=2)
    end = int(answer(model, ids)[0][0, 121])
    cache = prefixes.restore(ids)
    options = {"attention_mask": torch.ones_like(ids), "do_sample": False, "eos_token_id": end, "pad_token_id": 0}
    out = model.generate(ids, past_key_values=cache, max_new_tokens=20, **options)
    assert 0 in out[0, 120:].tolist()
    assert prefixes.keep(cache, out) == 64
    assert_as_plain("llama", ids[:1], prefixes.restore(ids[:1]))


# the end


def test_closed(prefix_caches):
    prefixes = prefix_caches("llama")
    cache = prefixes.prefill(PROMPT)
    prefixes.close()
    prefixes.close()
    assert_as_plain("llama", PROMPT, cache)
    for call in (lambda: prefixes.restore(PROMPT), lambda: prefixes.keep(cache, PROMPT), prefixes.stats):
        with pytest.raises(StowageError, match="closed"):
            call()


def test_a_deep_copy_of_the_model_has_the_same_prefixes(prefix_caches, tmp_path):
    disk = f"{tmp_path / 'cache'}:64MiB"
    prefixes = prefix_caches("llama", disk=disk)
    prefixes.prefill(PROMPT)
    assert prefixes.flush()
    again = prefix_caches(copy.deepcopy(model_of("llama")), disk=disk)
    again.restore(PROMPT, timeout_s=30)
    assert restored(again) == 64
