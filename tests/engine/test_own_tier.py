"""A tier of the user's own below the others: found, exact, closed with the engine; and what is refused."""

from __future__ import annotations

import pytest

from docs.examples.dict_tier import DictTier
from stowage.config import Memory
from stowage.engine.engine import Engine
from stowage.errors import ConfigError
from tests.engine.conftest import assert_same, greedy, random_prompt

PROMPT_TOKENS = 400


class ClosingTier(DictTier):
    closed = 0

    def close(self, deadline_s):
        self.closed += 1
        super().close(deadline_s)


@pytest.mark.parametrize("family", ["llama", "gemma3", "qwen3_next"])
def test_a_prefix_comes_back_from_it(family, checkpoints, references, tmp_path):
    tier = ClosingTier(64 << 20)
    memory = Memory(device_kv="16MiB", host="32MiB", disk=f"{tmp_path / 'cache'}:64MiB", snapshot_tokens=128)
    prompt = random_prompt(PROMPT_TOKENS)
    expected = references(family).answer(prompt, 16)
    with Engine(checkpoints(family), memory, tiers=[tier]) as engine:
        assert engine.store is not None and [t.name for t in engine.store.tiers] == ["disk", "dict"]
        assert_same(engine.generate([prompt], greedy(16))[0], expected)
        assert engine.flush()
        engine.drop_device_cache()
        engine.drop_host()
        disk, own = engine.store.tiers
        disk.discard(list(tier._chunks))  # the disk, which is asked first, has nothing any more
        engine.forget_pace()
        (completion,) = engine.generate([prompt], greedy(16))
        assert_same(completion, expected)
        assert completion.reused_tokens["dict"] == sum(completion.reused_tokens.values()) >= PROMPT_TOKENS - 64
        stats = engine.stats()["store"]
        assert stats["hits.dict"] > 0 and stats["dict.bytes_used"] > 0 and stats["dict.breaker"] == "closed"
        assert own is tier and not tier.closed
        engine.check()
    assert tier.closed == 1


@pytest.mark.parametrize("name", ["host", "device", "disk", "a.b", "", "Dict", "dict"])
def test_tiers_that_cannot_be_told_apart_are_refused(name, checkpoints, tmp_path):
    tier, other = ClosingTier(1 << 20), ClosingTier(1 << 20)
    other.name = name
    memory = Memory(device_kv="8MiB", host="8MiB", disk=f"{tmp_path / 'cache'}:8MiB")
    with pytest.raises(ConfigError, match=f"name is {name!r}"):
        Engine(checkpoints("llama"), memory, tiers=[tier, other])
    assert not tier.closed and not (tmp_path / "cache").exists()


def test_a_tier_without_host_memory_is_refused(checkpoints):
    with pytest.raises(ConfigError, match="add a host size"):
        Engine(checkpoints("llama"), Memory(device_kv="8MiB"), tiers=[DictTier(1 << 20)])
