"""A pool smaller than the sequences need: they take turns through host memory; nothing is computed twice or wrong."""

import pytest

from stowage.testing.tiny_models import KINDS
from tests.depth import mostly_rare
from tests.engine.conftest import assert_same, greedy, random_prompt, small_pool


@pytest.mark.parametrize("family", mostly_rare(KINDS, ["llama", "gemma3", "nemotron_h"]))
def test_spilled_and_loaded_back(family, engines, references):
    engine = small_pool(engines, family, host_memory="32MiB", snapshot_tokens=64)
    prompts = [random_prompt(60 + i, seed=i) for i in range(4)]
    for prompt, completion in zip(prompts, engine.generate(prompts, greedy(90)), strict=True):
        assert_same(completion, references(family).answer(prompt, 90))
    counters = engine.stats()["engine"]
    assert counters["preemptions"] > 0
    assert counters["preemptions_recomputed"] == 0
    computed_once = sum(len(p) + 89 for p in prompts)
    assert counters["tokens_computed"] == computed_once, "a preempted sequence was computed again"
    store = engine.stats()["store"]
    assert store is not None
    engine.check()


@pytest.mark.parametrize("family", mostly_rare(["llama", "gemma3", "nemotron_h"], ["llama", "nemotron_h"]))
def test_without_host_it_is_computed_again(family, engines, references):
    engine = small_pool(engines, family)
    prompts = [random_prompt(60 + i, seed=i) for i in range(4)]
    for prompt, completion in zip(prompts, engine.generate(prompts, greedy(90)), strict=True):
        assert_same(completion, references(family).answer(prompt, 90))
        assert not any(completion.reused_tokens.values()), "its own prompt, computed again, is no reuse"
    counters = engine.stats()["engine"]
    assert counters["preemptions"] == counters["preemptions_recomputed"] > 0


def test_host_too_small_for_the_spill(engines, references):
    """The arena holds a few chunks only: some sequences cannot be spilled and are recomputed; answers stay right."""
    engine = small_pool(engines, "llama", host_memory="128KiB")
    prompts = [random_prompt(60 + i, seed=i) for i in range(6)]
    for prompt, completion in zip(prompts, engine.generate(prompts, greedy(90)), strict=True):
        assert_same(completion, references("llama").answer(prompt, 90))
    assert engine.stats()["engine"]["preemptions_recomputed"] > 0


def test_more_requests_than_max_num_seqs(engines, references):
    engine = engines("qwen3", max_num_seqs=2, host_memory="16MiB")
    prompts = [random_prompt(30 + 7 * i, seed=i) for i in range(7)]
    for prompt, completion in zip(prompts, engine.generate(prompts, greedy(8)), strict=True):
        assert_same(completion, references("qwen3").answer(prompt, 8))
