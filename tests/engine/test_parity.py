"""The first promise: the engine answers what plain ``generate()`` answers, for one family of every kind of group."""

import pytest
import torch

from stowage.testing.tiny_models import KINDS
from tests.depth import mostly_rare
from tests.engine.conftest import assert_same, greedy, random_prompt

LENGTHS = (1, 2, 15, 16, 17, 63, 64, 65, 100, 200, 333)


@pytest.mark.parametrize("family", mostly_rare(KINDS, ["llama", "gemma3", "nemotron_h", "deepseek_v3"]))
def test_alone_and_in_pieces(family, engines, references):
    engine = engines(family, max_num_batched_tokens=48)
    for i, length in enumerate(LENGTHS):
        prompt = random_prompt(length, seed=i)
        (completion,) = engine.generate([prompt], greedy(12))
        assert_same(completion, references(family).answer(prompt, 12))


@pytest.mark.parametrize("family", mostly_rare(KINDS, ["llama", "gemma3", "nemotron_h", "deepseek_v3"]))
def test_mixed_batch(family, engines, references):
    engine = engines(family, max_num_batched_tokens=96)
    prompts = [random_prompt(length, seed=50 + i) for i, length in enumerate(LENGTHS)]
    for prompt, completion in zip(prompts, engine.generate(prompts, greedy(20)), strict=True):
        assert_same(completion, references(family).answer(prompt, 20))


@pytest.mark.parametrize("family", mostly_rare(KINDS, ["gemma3", "nemotron_h"]))
@pytest.mark.parametrize("sizes", [{"block_size": 32, "chunk_blocks": 2}, {"block_size": 16, "chunk_blocks": 1}])
def test_block_sizes(family, sizes, engines, references):
    engine = engines(family, **sizes)
    prompts = [random_prompt(length, seed=70 + i) for i, length in enumerate((31, 150, 260))]
    for again in (False, True):
        for prompt, completion in zip(prompts, engine.generate(prompts, greedy(10)), strict=True):
            assert_same(completion, references(family).answer(prompt, 10))
            assert not again or completion.reused_tokens["device"] >= len(prompt) - 64 - 32


@pytest.mark.parametrize(
    ("family", "sizes"),
    [
        ("gemma3", {"full": 16, "sliding": 32}),
        ("gemma3", {"full": 32, "sliding": 16}),
        ("llama4", {"full": 16, "chunked": 48}),
        ("qwen3_next", {"full": 528}),
        ("nemotron_h", {"full": 32, "recurrent": 96}),
        ("nemotron_h", {"full": 1056}),
    ],
)
def test_groups_with_unequal_blocks(family, sizes, engines, references, tmp_path):
    """Each group has a block size of its own, also one forced by the size of a recurrent state (528, 1056 tokens)."""
    memory = {
        "host_memory": "32MiB",
        "disk": f"{tmp_path / 'cache'}:64MiB",
        "snapshot_tokens": 96,
        "kv_cache_memory": "16MiB",
    }
    engine = engines(family, group_block_size=sizes, chunk_blocks=1 if max(sizes.values()) > 500 else 2, **memory)
    prompt = random_prompt(1200, seed=5)
    for where in ("cold", "device", "host"):
        (completion,) = engine.generate([prompt], greedy(8))
        assert_same(completion, references(family).answer(prompt, 8))
        if where != "cold":
            assert completion.reused_tokens[where] > 0
        if where == "device":
            engine.drop_device_cache()


def test_a_model_in_memory_is_shared_and_given_back(references):
    """Two engines on one model object, one after the other closed; afterwards plain ``generate()`` works as before."""
    from stowage.config.memory import Memory
    from stowage.engine.engine import Engine
    from stowage.testing import tiny_models

    model = tiny_models.build("gemma3")
    attention = model.config._attn_implementation
    prompt = random_prompt(100)
    expected = references("gemma3").answer(prompt, 6)
    with Engine(model, Memory(kv_cache_memory="4MiB")) as first:
        with Engine(model, Memory(kv_cache_memory="4MiB", host_memory="4MiB")) as second:
            assert_same(second.generate([prompt], greedy(6))[0], expected)
        assert_same(first.generate([prompt], greedy(6))[0], expected)
    assert model.config._attn_implementation == attention
    out = model.generate(torch.tensor([prompt]), max_new_tokens=6, do_sample=False, eos_token_id=None)
    assert out[0, 100:].tolist() == expected.tokens
