"""What goes wrong for one request is that request's alone: the others get their answers, and the engine lives on."""

import math
from itertools import product
from types import SimpleNamespace

import pytest
import torch

from stowage.core.geometry import Kind
from stowage.engine.sampling_params import SamplingParams
from stowage.errors import ModelError, StowageError
from tests.depth import mostly_rare
from tests.engine.conftest import assert_same, assert_well, greedy, random_prompt

FAMILIES = ("llama", "gemma3", "nemotron_h", "deepseek_v3", "jamba")
PROMPT = random_prompt(200)


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
    assert_well(engine, references, "llama", PROMPT)


def test_a_huge_temperature_draws_anything(engines, references):
    engine = engines("llama")
    params = SamplingParams(max_new_tokens=8, temperature=1.7e308, ignore_eos=True)
    assert len(engine.generate([PROMPT], params)[0].token_ids) == 8
    assert_well(engine, references, "llama", PROMPT)


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


@pytest.mark.parametrize(
    ("family", "value"),
    mostly_rare(
        [
            *((family, math.nan) for family in FAMILIES),
            *(
                pytest.param(family, value, marks=() if family == "llama" else pytest.mark.every_family)
                for family, value in product(FAMILIES, (math.inf, -math.inf))
            ),
        ],
        ["llama", "gemma3", "nemotron_h", "deepseek_v3"],
    ),
)
def test_logits_that_are_no_numbers(family, value, engines, references):
    """The request fails, its neighbours do not, and nothing of it is found by anybody who asks the same."""
    engine = engines(family, host_memory="32MiB", snapshot_tokens=128)
    other = random_prompt(150, seed=5)
    heal = spoil(engine, PROMPT, value)
    good, bad = engine.submit(other, greedy(8)), engine.submit(PROMPT, greedy(8))
    assert good.wait(60) and bad.wait(60)
    with pytest.raises(ModelError, match="logits that are not numbers"):
        bad.result()
    assert_same(good.result(), references(family).answer(other, 8))
    heal()
    assert sum(assert_well(engine, references, family, PROMPT).values()) == 0


@pytest.mark.parametrize("params", [{}, {"temperature": 0.7}, {"prompt_logprobs": 0}])
def test_logits_that_are_no_numbers_later_on(params, engines, references):
    """What was computed before stays: it was right."""
    engine = engines("llama", host_memory="32MiB", max_num_batched_tokens=64)
    heal = spoil(engine, PROMPT, math.nan, from_tokens=128)
    request = engine.submit(PROMPT, SamplingParams(max_new_tokens=8, **params))
    assert request.wait(60)
    with pytest.raises(ModelError):
        request.result()
    heal()
    assert sum(assert_well(engine, references, "llama", PROMPT).values()) == 128


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
    engine = engines(family, kv_cache_memory="2MiB")
    for pool in engine.parts.pools:
        pool.storage[1:].fill_(255)
    assert torch.isnan(engine.parts.pools[0].storage[1:2, :4].view(torch.float32)).all()
    prompts = [random_prompt(length, seed=length) for length in (3, 70, 130)]
    for prompt, completion in zip(prompts, engine.generate(prompts, greedy(8)), strict=True):
        assert_same(completion, references(family).answer(prompt, 8))


# What is done for one request


def poisoned(sequence):
    return sequence.tokens[: len(PROMPT)] == PROMPT


def raises(error):
    def method(*_, **__):
        raise error

    return method


def break_draw(engine, sequence):
    sequence.sampler = SimpleNamespace(takes_likeliest=False, sample=raises(ZeroDivisionError("a bug")))


def break_text(engine, sequence):
    sequence.text.push = raises(SystemExit("a bug"))


def break_last_text(engine, sequence):
    sequence.text.finish = raises(ZeroDivisionError("a bug"))


def break_keys(engine, sequence):
    sequence.keys.extend = raises(ZeroDivisionError("a bug"))


def break_score(engine, sequence):
    sequence.prompt_logprobs = None


def break_report(engine, sequence):
    sequence.reused = 5


BREAK = [break_draw, break_text, break_last_text, break_keys, break_score, break_report]


@pytest.mark.parametrize("how", BREAK)
@pytest.mark.parametrize("family", ["llama", "nemotron_h"])
def test_what_goes_wrong_for_one_request(how, family, engines, references):
    """Whatever it is: drawing, text, keys, scores, telling."""
    engine = engines(family, host_memory="32MiB", snapshot_tokens=128)
    real = engine.parts.runner.run

    def run(work):
        for item in work:
            if poisoned(item.sequence):
                how(engine, item.sequence)
        return real(work)

    engine.parts.runner.run = run
    other = random_prompt(150, seed=5)
    good = engine.submit(other, greedy(20))
    bad = engine.submit(PROMPT, SamplingParams(max_new_tokens=8, prompt_logprobs=0 if how is break_score else None))
    assert good.wait(60) and bad.wait(60)
    with pytest.raises(StowageError, match=r"this request failed .*no other one with it"):
        bad.result()
    assert_same(good.result(), references(family).answer(other, 20))
    engine.parts.runner.run = real
    assert_well(engine, references, family, PROMPT)


def test_a_request_that_cannot_even_be_queued(engines, references, monkeypatch):
    engine = engines("llama")
    real = engine._scheduler._admissions.announce

    def announce(sequence):
        if poisoned(sequence):
            raise ZeroDivisionError("a bug")
        real(sequence)

    monkeypatch.setattr(engine._scheduler._admissions, "announce", announce)
    request = engine.submit(PROMPT, greedy(4))
    assert request.wait(60)
    with pytest.raises(StowageError, match="a bug"):
        request.result()
    monkeypatch.undo()
    assert_well(engine, references, "llama", PROMPT)


# Forwards that raise


@pytest.mark.parametrize(
    ("family", "when"),
    mostly_rare(
        [
            *product(("llama", "nemotron_h"), ("before", "after")),
            *(("gemma3", "after"), ("deepseek_v3", "before"), ("jamba", "after"), ("deepseek_v4", "after")),
            *(
                pytest.param(*more, marks=pytest.mark.every_family)
                for more in (
                    ("gemma3", "before"),
                    ("deepseek_v3", "after"),
                    ("jamba", "before"),
                    ("deepseek_v4", "before"),
                )
            ),
        ],
        [
            ("llama", "before"),
            ("llama", "after"),
            ("nemotron_h", "before"),
            ("nemotron_h", "after"),
            ("deepseek_v3", "before"),
        ],
    ),
)
def test_a_forward_that_one_request_makes_raise(family, when, engines, references):
    """The others are computed again without it, whatever the forward had left in their blocks."""
    engine = engines(family, host_memory="32MiB", snapshot_tokens=128, max_num_batched_tokens=256)
    real = engine.parts.runner.run

    def run(work):
        outputs = real(work) if when == "after" else []
        if any(poisoned(item.sequence) and item.start + item.count > 150 for item in work):
            raise ZeroDivisionError("a bug")
        return outputs if when == "after" else real(work)

    engine.parts.runner.run = run
    prompts = [random_prompt(length, seed=length) for length in (30, 150, 90)]
    good = [engine.submit(prompt, greedy(20)) for prompt in prompts]
    bad = engine.submit(PROMPT, greedy(20))
    good.append(engine.submit(random_prompt(70, seed=70), greedy(20)))
    prompts.append(random_prompt(70, seed=70))
    assert bad.wait(60)
    with pytest.raises(StowageError, match=r"this request failed \(ZeroDivisionError\('a bug'\)\)"):
        bad.result()
    for prompt, request in zip(prompts, good, strict=True):
        assert request.wait(60)
        assert_same(request.result(), references(family).answer(prompt, 20))
    engine.parts.runner.run = real
    assert_well(engine, references, family, PROMPT)


@pytest.mark.parametrize("family", ["llama", "nemotron_h"])
def test_states_of_a_forward_that_raised_are_not_gone_on_with(family, engines, references):
    """It had changed them already."""
    engine = engines(family, host_memory="32MiB", snapshot_tokens=128)
    real, raised = engine.parts.runner.run, []

    def run(work):
        outputs = real(work)
        if len(work) == 3 and not raised:
            raised.append(work)
            raise ZeroDivisionError("a bug")
        return outputs

    engine.parts.runner.run = run
    prompts = [random_prompt(length, seed=length) for length in (30, 150, 90)]
    for prompt, completion in zip(prompts, engine.generate(prompts, greedy(20)), strict=True):
        assert_same(completion, references(family).answer(prompt, 20))
    assert raised
    engine.parts.runner.run = real
    assert_well(engine, references, family, PROMPT)


def test_forwards_that_are_too_large_together(engines, references):
    """Nobody's fault: fewer are computed at once, and all get their answers."""
    engine = engines("llama")
    real, sizes = engine.parts.runner.run, []

    def run(work):
        sizes.append(len(work))
        if len(work) > 2:
            raise MemoryError
        return real(work)

    engine.parts.runner.run = run
    prompts = [random_prompt(40, seed=seed) for seed in range(9)]
    with engine._lock:  # so that all of them are there when the first step is put together
        requests = [engine.submit(prompt, greedy(20)) for prompt in prompts]
    for prompt, request in zip(prompts, requests, strict=True):
        assert request.wait(60)
        assert_same(request.result(), references("llama").answer(prompt, 20))
    assert sum(size > 2 for size in sizes) <= 3 and sizes.count(2) > 20
    engine.check()
    engine.parts.runner.run = real
