"""A prefix comes back from every tier, after a restart, from within an earlier prompt, and never changes an answer."""

from __future__ import annotations

import pytest

from stowage.testing.tiny_models import KINDS
from tests.depth import mostly_rare
from tests.engine.conftest import assert_same, greedy, random_prompt

PROMPT_TOKENS = 400


@pytest.mark.parametrize("family", ["qwen3_next", "nemotron_h"])
@pytest.mark.parametrize("chunk_blocks", [1, 8])
def test_a_snapshot_stands_where_a_chunk_ends(family, chunk_blocks, engines, references):
    """Below the device only whole chunks are found: a snapshot in the middle of one would be of no use."""
    engine = engines(family, host_memory="32MiB", chunk_blocks=chunk_blocks)
    prompt = random_prompt(200)
    expected = references(family).answer(prompt, 4)
    for least in (0, 200 - max(64, chunk_blocks * 16)):
        (completion,) = engine.generate([prompt], greedy(4))
        assert_same(completion, expected)
        assert sum(completion.reused_tokens.values()) >= least
        engine.drop_device_cache()


@pytest.mark.parametrize("family", mostly_rare(KINDS, ["llama", "gemma3", "nemotron_h", "deepseek_v3"]))
def test_every_tier(family, engines, references, tmp_path):
    memory = {"host_memory": "32MiB", "disk": f"{tmp_path / 'cache'}:64MiB", "snapshot_tokens": 128}
    engine = engines(family, **memory)
    prompt = random_prompt(PROMPT_TOKENS)
    expected = references(family).answer(prompt, 16)

    def ask() -> dict[str, int]:
        (completion,) = engine.generate([prompt], greedy(16))
        assert_same(completion, expected)
        return dict(completion.reused_tokens)

    assert sum(ask().values()) == 0
    device = ask()
    assert device["device"] >= PROMPT_TOKENS - 64 and device["host"] == device["disk"] == 0
    engine.drop_device_cache()
    host = ask()
    assert host["host"] == sum(host.values()) >= PROMPT_TOKENS - 64
    assert engine.flush()
    engine.drop_device_cache()
    engine.drop_host()
    disk = ask()
    assert disk["disk"] == sum(disk.values()) >= PROMPT_TOKENS - 64
    engine.close()
    engine = engines(family, **memory)
    again = ask()
    assert again["disk"] == sum(again.values()) >= PROMPT_TOKENS - 64


@pytest.mark.parametrize("family", mostly_rare(KINDS, ["llama", "gemma3", "llama4", "nemotron_h"]))
@pytest.mark.parametrize("tier", ["device", "host", "disk"])
def test_middle_hit(family, tier, engines, references, tmp_path):
    """F10: a prompt that shares the first 60 % of an earlier one reuses it, on sliding and recurrent models too."""
    engine = engines(
        family, host_memory="32MiB", disk=f"{tmp_path / 'cache'}:64MiB", snapshot_tokens=128, kv_cache_memory="16MiB"
    )
    stored = random_prompt(1300)
    shared = 780
    engine.generate([stored], greedy(4))
    assert engine.flush()
    if tier != "device":
        engine.drop_device_cache()
    if tier == "disk":
        engine.drop_host()
    prompt = stored[:shared] + random_prompt(200, seed=9)
    (completion,) = engine.generate([prompt], greedy(12))
    assert_same(completion, references(family).answer(prompt, 12))
    assert completion.reused_tokens[tier] >= shared - 128 - 64


@pytest.mark.parametrize("family", mostly_rare(["llama", "gemma3", "qwen3_next"], ["llama", "gemma3"]))
def test_next_turn(family, engines, references, tmp_path):
    """A conversation goes on: the earlier prompt and its answer are the next prompt's prefix."""
    engine = engines(family, host_memory="32MiB", snapshot_tokens=64)
    history = random_prompt(150)
    for turn in range(4):
        (completion,) = engine.generate([history], greedy(90))
        assert_same(completion, references(family).answer(history, 90))
        if turn:
            assert sum(completion.reused_tokens.values()) >= len(history) - 17 - 128
        history = history + completion.token_ids + random_prompt(17, seed=turn)
        if turn % 2:
            engine.drop_device_cache()


def test_partial_tiers_are_combined(engines, references, tmp_path):
    """The beginning from the device, the rest from host: one prefix."""
    engine = engines("llama", host_memory="32MiB")
    long = random_prompt(512)
    engine.generate([long], greedy(2))
    engine.drop_device_cache()
    engine.generate([long[:200]], greedy(2))
    (completion,) = engine.generate([long], greedy(8))
    assert_same(completion, references("llama").answer(long, 8))
    assert completion.reused_tokens["device"] >= 128
    assert completion.reused_tokens["host"] >= 256


def test_another_salt_shares_nothing(checkpoints, tmp_path):
    from stowage.config.memory import Memory
    from stowage.engine.engine import Engine

    memory = Memory(kv_cache_memory="8MiB", host_memory="16MiB", disk=f"{tmp_path / 'cache'}:32MiB")
    prompt = random_prompt(300)
    for salt in ("a", "b"):
        with Engine(checkpoints("llama"), memory, salt=salt) as engine:
            (completion,) = engine.generate([prompt], greedy(2))
            assert sum(completion.reused_tokens.values()) == 0
            engine.flush()
    with Engine(checkpoints("llama"), memory, salt="a") as engine:
        (completion,) = engine.generate([prompt], greedy(2))
        assert completion.reused_tokens["disk"] > 0


def test_another_model_shares_nothing(tmp_path):
    """Same config, names, shapes and sizes, other values: a fine-tuned model never sees its base's cache (case F3)."""
    from stowage.config.memory import Memory
    from stowage.engine.engine import Engine
    from stowage.testing import tiny_models

    memory = Memory(kv_cache_memory="8MiB", host_memory="16MiB", disk=f"{tmp_path / 'cache'}:32MiB")
    prompt = random_prompt(300)
    for seed, expected in ((0, 0), (1, 0), (0, 256)):
        path = tmp_path / f"model{seed}-{expected}"
        tiny_models.write("llama", path, seed=seed)
        with Engine(path, memory) as engine:
            (completion,) = engine.generate([prompt], greedy(2))
            assert completion.reused_tokens["disk"] >= expected
            assert expected or not sum(completion.reused_tokens.values())
            engine.flush()


@pytest.mark.parametrize("family", mostly_rare(KINDS, ["gemma3", "nemotron_h"]))
def test_the_first_1024_of_1300_tokens(family, engines, references, tmp_path):
    """A prompt of 1,300 tokens is stored, its first 1,024 are asked with another end: all 1,024 are reused, by default
    settings, from host and from disk. (vLLM 0.32 reuses none of them on sliding-window and recurrent models.)
    """
    engine = engines(family, host_memory="32MiB", disk=f"{tmp_path / 'cache'}:64MiB", kv_cache_memory="16MiB")
    stored = random_prompt(1300)
    engine.generate([stored], greedy(1))
    assert engine.flush()
    for seed, tier in enumerate(("host", "disk")):
        engine.drop_device_cache()
        if tier == "disk":
            engine.drop_host()
        prompt = stored[:1024] + random_prompt(50, seed=20 + seed)
        (completion,) = engine.generate([prompt], greedy(8))
        assert_same(completion, references(family).answer(prompt, 8))
        assert completion.reused_tokens[tier] == sum(completion.reused_tokens.values()) == 1024


@pytest.mark.parametrize("family", ["nemotron_h", "qwen3_next"])
def test_snapshots_are_no_further_apart_than_they_were_asked_to_be(family, engines, references):
    """Rounded up to the grid, 512 came to be 720 tokens, and nothing of a shared part of 700 was found."""
    engine = engines(
        family, block_size=48, chunk_blocks=5, snapshot_tokens=512, kv_cache_memory="32MiB", host_memory="64MiB"
    )
    shared = random_prompt(700)
    for tail in (1, 2):
        prompt = shared + random_prompt(60, seed=tail)
        (completion,) = engine.generate([prompt], greedy(4))
        assert_same(completion, references(family).answer(prompt, 4))
    assert sum(completion.reused_tokens.values()) == 480
