"""What goes wrong for one request is that request's alone: the others get their answers, and the engine lives on."""

from __future__ import annotations

import math

import pytest
import torch

from stowage.core.geometry import Kind
from stowage.engine.sampler import SamplingParams
from stowage.errors import ModelError
from tests.engine.conftest import assert_same, greedy, random_prompt

FAMILIES = ("llama", "gemma3", "nemotron_h", "deepseek_v3", "jamba")
PROMPT = random_prompt(200)


def assert_well(engine, references, family, prompt=PROMPT):
    """It answers, and right, and nothing is held that nobody has."""
    (completion,) = engine.generate([prompt], greedy(8))
    assert_same(completion, references(family).answer(prompt, 8))
    engine.check()
    assert all(pool["used"] == 0 for pool in engine.stats()["pools"])
    return completion.reused_tokens


# Sampling


@pytest.mark.parametrize(
    "odd",
    [
        {"temperature": 1e-38}, {"temperature": 5e-324}, {"temperature": 1e-45, "top_k": 4}, {"top_p": 5e-324},
        {"temperature": 1e-38, "top_p": 0.5, "min_p": 0.5}, {"temperature": 1e-300, "min_p": math.nextafter(1.0, 0)},
    ],
)  # fmt: skip
def test_what_is_almost_greedy_draws_the_likeliest(odd, engines, references):
    """These overflowed to NaN, which ended the engine for everybody."""
    engine = engines("llama")
    params = SamplingParams(**{"temperature": 1.0, "max_new_tokens": 8, "ignore_eos": True} | odd)
    (completion,) = engine.generate([PROMPT], params)
    assert completion.token_ids == references("llama").answer(PROMPT, 8).tokens
    assert_well(engine, references, "llama")


def test_a_huge_temperature_draws_anything(engines, references):
    engine = engines("llama")
    params = SamplingParams(max_new_tokens=8, temperature=1.7e308, ignore_eos=True)
    assert len(engine.generate([PROMPT], params)[0].token_ids) == 8
    assert_well(engine, references, "llama")


# Logits that are no numbers


def spoil(engine, prompt, value, from_tokens=0):
    """From now on whatever is computed of ``prompt`` comes out as ``value``, its keys and values too."""
    real = engine.parts.runner.run

    @torch.inference_mode()
    def run(work):
        outputs = real(work)
        for item, logits in zip(work, outputs, strict=True):
            if item.sequence.tokens[: len(prompt)] == prompt and item.start + item.count > from_tokens:
                logits.fill_(value)
                for pool in engine.parts.pools:
                    table = item.sequence.table(pool.group.index)
                    if pool.group.kind is not Kind.RECURRENT:
                        table = table[item.start // pool.group.block_tokens :]
                    pool.storage[table[table >= 0]] = 255  # NaN, as float32 and as bfloat16
        return outputs

    engine.parts.runner.run = run
    return lambda: setattr(engine.parts.runner, "run", real)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("family", FAMILIES)
def test_logits_that_are_no_numbers(family, value, engines, references):
    """The request fails, its neighbours do not, and nothing of it is found by anybody who asks the same."""
    engine = engines(family, host="32MiB", snapshot_tokens=128)
    other = random_prompt(150, seed=5)
    heal = spoil(engine, PROMPT, value)
    good, bad = engine.submit(other, greedy(8)), engine.submit(PROMPT, greedy(8))
    assert good.wait(60) and bad.wait(60)
    with pytest.raises(ModelError, match="logits that are not numbers"):
        bad.result()
    assert_same(good.result(), references(family).answer(other, 8))
    heal()
    assert sum(assert_well(engine, references, family).values()) == 0


@pytest.mark.parametrize("params", [{}, {"temperature": 0.7}, {"prompt_logprobs": 0}])
def test_logits_that_are_no_numbers_later_on(params, engines, references):
    """What was computed before stays: it was right."""
    engine = engines("llama", host="32MiB", step_tokens_max=64)
    heal = spoil(engine, PROMPT, math.nan, from_tokens=128)
    request = engine.submit(PROMPT, SamplingParams(max_new_tokens=8, **params))
    assert request.wait(60)
    with pytest.raises(ModelError):
        request.result()
    heal()
    assert sum(assert_well(engine, references, "llama").values()) == 128


def test_tokens_that_are_never_drawn(engines, references):
    """Minus infinity at some tokens is how a model says so."""
    engine = engines("llama")
    real = engine.parts.runner.run

    @torch.inference_mode()
    def run(work):
        outputs = real(work)
        for logits in outputs:
            logits[:, 10:] = -math.inf
        return outputs

    engine.parts.runner.run = run
    for temperature in (0.0, 1.0):
        params = SamplingParams(max_new_tokens=8, temperature=temperature, ignore_eos=True)
        assert set(engine.generate([PROMPT], params)[0].token_ids) <= set(range(10))
    engine.parts.runner.run = real


@pytest.mark.parametrize("family", FAMILIES)
def test_what_others_left_in_a_block_is_never_seen(family, engines, references):
    """Not even where it is no number: zero times NaN is NaN."""
    engine = engines(family, device_kv="2MiB")
    for pool in engine.parts.pools:
        pool.storage[1:].fill_(255)
    assert torch.isnan(engine.parts.pools[0].storage[1:2, :4].view(torch.float32)).all()
    prompts = [random_prompt(length, seed=length) for length in (3, 70, 130)]
    for prompt, completion in zip(prompts, engine.generate(prompts, greedy(8)), strict=True):
        assert_same(completion, references(family).answer(prompt, 8))
