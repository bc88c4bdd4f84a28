"""Chunks that lie packed in host memory come back to the bit, and count within host memory."""

import pytest

from stowage.config.memory import Memory
from stowage.errors import ConfigError
from stowage.native.switches import PURE_PYTHON
from tests.depth import mostly_rare
from tests.engine.conftest import assert_same, greedy, random_prompt


@pytest.mark.parametrize("family", mostly_rare(["llama", "gemma3", "qwen3_next"], ["llama", "gemma3"]))
def test_answers_are_the_same(family, engines, references, tmp_path):
    engine = engines(
        family, host_memory="32MiB", host_packed="75%", disk=f"{tmp_path / 'cache'}:64MiB", snapshot_tokens=128
    )
    prompts = [random_prompt(400, seed=seed) for seed in range(3)]
    expected = [references(family).answer(prompt, 12) for prompt in prompts]
    for tier in (None, "host", "packed", "disk"):
        engine.drop_device_cache()
        if tier in ("packed", "disk"):
            assert engine.flush()
            engine.drop_host()
        if tier == "disk":
            (packed,) = [tier for tier in engine.parts.store.tiers if tier.name == "packed"]
            packed.discard(list(packed._chunks))
        for prompt, answer in zip(prompts, expected, strict=True):
            (completion,) = engine.generate([prompt], greedy(12))
            assert_same(completion, answer)
            assert tier is None or completion.reused_tokens[tier] >= 400 - 64
    stats = engine.stats()
    assert stats["store"]["packed.bytes_limit"] == 24 << 20
    assert engine.parts.store.arena.bytes <= 8 << 20


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"host_packed": "80%"}, "host_packed is 80%, and host_memory auto"),
        ({"host_memory": "1MiB", "host_packed": "1MiB"}, "leave room there for the longest prompt"),
        ({"host_memory": "1MiB", "host_packed": "much"}, "host_packed cannot be used"),
        ({"host_memory": "1MiB", "host_packed": 1.5}, "host_packed is 1.5: it must be a size"),
        ({"host_memory": "1MiB", "host_packed": "120%"}, "host_packed cannot be used"),
    ],
)
def test_what_cannot_be_used(settings, said):
    with pytest.raises(ConfigError, match=said):
        Memory(**settings)


def test_without_compiled_code_it_is_refused(engines, monkeypatch):
    monkeypatch.setenv(PURE_PYTHON, "1")
    with pytest.raises(ConfigError, match="Install a C compiler"):
        engines("llama", host_memory="32MiB", host_packed="50%")
