"""A tier of the user's own below the others: found, exact, closed with the engine; and what is refused."""

from __future__ import annotations

import threading

import pytest

from docs.examples.dict_tier import DictTier
from stowage.cache import cost_model, flow
from stowage.config.memory import Memory
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
        engine.forget_costs()
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


class SlowTier(DictTier):
    """Brings the first transfer, and is not done with the second one before anybody has lost patience."""

    loads = 0

    def load(self, transfer):
        self.loads += 1
        if self.loads == 1:
            super().load(transfer)


def test_a_tier_that_is_late_is_learned(checkpoints, references, monkeypatch):
    """It costs one prompt its deadline, not every one."""
    monkeypatch.setattr(cost_model, "_DEADLINE_LEAST_S", 0.2)
    monkeypatch.setattr(flow, "TRANSFER_BYTES_MAX", 1)
    tier = SlowTier(64 << 20)
    prompt = random_prompt(PROMPT_TOKENS)
    expected = references("llama").answer(prompt, 4)
    with Engine(checkpoints("llama"), Memory(device_kv="8MiB", host="8MiB", load_timeout_s=60), tiers=[tier]) as engine:
        assert_same(engine.generate([prompt], greedy(4))[0], expected)
        assert engine.flush()
        engine.drop_device_cache()
        engine.drop_host()
        engine._cost_model.forget()
        engine._cost_model.computed(1000, 1e-3)  # whatever this machine is, the deadline is the least one
        (completion,) = engine.generate([prompt], greedy(4))
        assert_same(completion, expected)
        assert completion.reused_tokens["dict"] == 0
        assert list(engine._cost_model.bytes_per_s) == [1]
        assert engine._cost_model.bytes_per_s[1] <= sum(len(payload) for _, payload in tier._chunks.values()) / 0.2
        monkeypatch.undo()
        assert not engine._cost_model.worth_loading(PROMPT_TOKENS, {1: 1 << 20})
        tier.load = lambda _: pytest.fail("a tier that was too slow is not asked again")
        engine.drop_device_cache()
        engine.drop_host()
        assert_same(engine.generate([prompt], greedy(4))[0], expected)


@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_what_host_has_is_used_where_the_rest_is_not_worth_loading(family, checkpoints, references, monkeypatch):
    tier = DictTier(64 << 20)
    prompt = random_prompt(PROMPT_TOKENS)
    expected = references(family).answer(prompt, 4)
    with Engine(checkpoints(family), Memory(device_kv="8MiB", host="8MiB"), tiers=[tier]) as engine:
        engine.generate([prompt], greedy(4))
        assert engine.flush()
        engine.drop_device_cache()
        engine.drop_host()
        engine.generate([prompt[:200]], greedy(1))  # three chunks come into host
        engine.drop_device_cache()
        monkeypatch.setattr(cost_model.CostModel, "worth_loading", lambda _self, _tokens, below: not below)
        (completion,) = engine.generate([prompt], greedy(4))
        assert_same(completion, expected)
        assert completion.reused_tokens == {"device": 0, "host": 192, "dict": 0}
        assert engine.stats()["engine"]["loads_refused"] == 1
        engine.check()


class PatientTier(DictTier):
    """Says nothing of what it was given until it is let go."""

    let_go = False

    def poll(self):
        return super().poll() if self.let_go else []


def test_requests_go_on_while_somebody_waits_for_a_flush(checkpoints):
    tier = PatientTier(64 << 20)
    flushed = []
    with Engine(checkpoints("llama"), Memory(device_kv="8MiB", host="8MiB"), tiers=[tier]) as engine:
        engine.generate([random_prompt(PROMPT_TOKENS)], greedy(1))
        waiting = threading.Thread(target=lambda: flushed.append(engine.flush(60)))
        waiting.start()
        engine.generate([random_prompt(PROMPT_TOKENS, seed=1)], greedy(4))
        assert waiting.is_alive() and not flushed
        tier.let_go = True
        waiting.join(60)
        assert flushed == [True]
        tier.let_go = False
        engine.generate([random_prompt(PROMPT_TOKENS, seed=2)], greedy(1))
        assert engine.flush(0.01) is False
        tier.let_go = True
