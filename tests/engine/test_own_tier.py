"""A tier of the user's own below the others: found, exact, closed with the engine; and what is refused."""

import asyncio
import contextlib
import os
import sys
import threading
import time

import numpy as np
import pytest

from docs.examples.dict_tier import DictTier
from stowage.cache import cost_model, flow
from stowage.config.memory import Memory
from stowage.engine.engine import Engine
from stowage.errors import ConfigError
from stowage.storage.protocol import Outcome
from tests.depth import mostly_rare
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
    memory = Memory(
        kv_cache_memory="16MiB", host_memory="32MiB", disk=f"{tmp_path / 'cache'}:64MiB", snapshot_tokens=128
    )
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
    memory = Memory(kv_cache_memory="8MiB", host_memory="8MiB", disk=f"{tmp_path / 'cache'}:8MiB")
    with pytest.raises(ConfigError, match=f"name is {name!r}"):
        Engine(checkpoints("llama"), memory, tiers=[tier, other])
    assert not tier.closed and not (tmp_path / "cache").exists()


def test_a_tier_without_host_memory_is_refused(checkpoints):
    with pytest.raises(ConfigError, match="give it a size"):
        Engine(checkpoints("llama"), Memory(kv_cache_memory="8MiB"), tiers=[DictTier(1 << 20)])


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
    with Engine(
        checkpoints("llama"), Memory(kv_cache_memory="8MiB", host_memory="8MiB", load_timeout_s=60), tiers=[tier]
    ) as engine:
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


class SilentTier(DictTier):
    """Takes what is stored, and brings nothing back."""

    loads = 0

    def load(self, transfer):
        self.loads += 1


@pytest.mark.hurried
def test_a_tier_that_takes_and_never_brings_costs_few_prompts_their_deadline(checkpoints):
    """Each waited as long as its recompute takes: what was stored in between kept the circuit breaker closed."""
    tier = SilentTier(64 << 20)
    with Engine(checkpoints("llama"), Memory(kv_cache_memory="8MiB", host_memory="8MiB"), tiers=[tier]) as engine:
        for number in range(12):
            prompt = random_prompt(PROMPT_TOKENS, seed=number)
            for _ in range(2):
                (completion,) = engine.generate([prompt], greedy(1))
                assert not any(completion.reused_tokens.values())
                assert engine.flush()
                engine.drop_device_cache()
                engine.drop_host()
        stats = engine.stats()
        assert stats["store"]["dict.breaker"] == "closed"
        assert 2 <= tier.loads <= 5 and stats["engine"]["loads_refused"] >= 7
        engine.close(timeout_s=1.0)


@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_what_host_has_is_used_where_the_rest_is_not_worth_loading(family, checkpoints, references, monkeypatch):
    tier = DictTier(64 << 20)
    prompt = random_prompt(PROMPT_TOKENS)
    expected = references(family).answer(prompt, 4)
    with Engine(checkpoints(family), Memory(kv_cache_memory="8MiB", host_memory="8MiB"), tiers=[tier]) as engine:
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


@pytest.mark.parametrize("family", ["llama", "qwen3_next"])
def test_what_a_quick_tier_has_is_loaded_where_a_slow_one_has_the_rest(family, checkpoints, references, monkeypatch):
    """As where other machines have continued a conversation, and their store is slow."""
    near, far = DictTier(64 << 20), DictTier(64 << 20)
    far.name = "far"
    prompt = random_prompt(PROMPT_TOKENS)
    expected = references(family).answer(prompt, 4)
    memory = Memory(kv_cache_memory="16MiB", host_memory="16MiB", snapshot_tokens=128)
    with Engine(checkpoints(family), memory, tiers=[near, far]) as engine:
        engine.generate([prompt[:200]], greedy(1))
        assert engine.flush()
        first = list(near._chunks)
        engine.generate([prompt], greedy(4))
        assert engine.flush()
        near.discard([key for key in near._chunks if key not in first])
        engine.drop_device_cache()
        engine.drop_host()
        monkeypatch.setattr(cost_model.CostModel, "worth_loading", lambda _self, _tokens, below: 2 not in below)
        monkeypatch.setattr(cost_model.CostModel, "slowest", lambda _self, below: max(below))
        (completion,) = engine.generate([prompt], greedy(4))
        assert_same(completion, expected)
        assert completion.reused_tokens["dict"] >= 128 and not completion.reused_tokens["far"]
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
    with Engine(checkpoints("llama"), Memory(kv_cache_memory="8MiB", host_memory="8MiB"), tiers=[tier]) as engine:
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


def raises(*_):
    raise ZeroDivisionError("the tier's own bug")


def cancelled(*_):
    raise asyncio.CancelledError


class EvilError(Exception):
    def __str__(self):
        raise ZeroDivisionError

    __repr__ = __str__


def raises_evil(*_):
    raise EvilError


METHODS = ["lookup", "load", "store", "poll", "discard", "probe", "stats", "close"]
BROKEN = {
    "lookup raises": {"lookup": raises},
    "lookup raises what cannot be shown": {"lookup": raises_evil},
    "lookup answers nothing": {"lookup": lambda keys: None},
    "lookup answers a list": {"lookup": lambda keys: [1] * len(keys)},
    "lookup answers too much": {"lookup": lambda keys: np.ones(len(keys) + 1, np.uint64)},
    "lookup answers floats": {"lookup": lambda keys: np.ones(len(keys))},
    "load raises": {"load": raises},
    "store raises": {"store": raises},
    "poll raises": {"poll": raises},
    "poll answers nothing": {"poll": lambda: None},
    "poll answers something": {"poll": lambda: [None, 3, Outcome(None, None, None), Outcome([1], "ab", {})]},
    "reports say nothing": {"poll": lambda: [Outcome(n, None, "x") for n in range(1000)]},
    "discard raises": {"load": lambda transfer: None, "discard": raises},
    "probe raises": {"probe": raises},
    "probe answers nothing": {"probe": lambda inquiries: None},
    "stats raises": {"stats": raises},
    "stats answers nothing": {"stats": lambda: None},
    "close raises": {"close": raises},
    "everything raises": dict.fromkeys(METHODS, raises),
    "everything was cancelled": dict.fromkeys(METHODS, cancelled),
    "everything exits": dict.fromkeys(METHODS, lambda *_: sys.exit(1)),
}


@pytest.mark.parametrize("broken", BROKEN.values(), ids=BROKEN)
@pytest.mark.parametrize("when", mostly_rare(["from the start", "later"], ["later"]))
def test_a_tier_that_is_broken_costs_hits_only(broken, when, checkpoints, references):
    tier = DictTier(64 << 20)
    prompts = [random_prompt(PROMPT_TOKENS), random_prompt(PROMPT_TOKENS, seed=2)]
    memory = Memory(kv_cache_memory="8MiB", host_memory="8MiB", load_timeout_s=0.5)
    if when == "from the start":
        vars(tier).update(broken)
    with Engine(checkpoints("llama"), memory, tiers=[tier]) as engine:
        for asked in (prompts[0], *prompts, prompts[1], prompts[0]):
            assert_same(engine.generate([asked], greedy(8))[0], references("llama").answer(asked, 8))
            engine.flush(0.2)
            engine.drop_device_cache()
            engine.drop_host()
            vars(tier).update(broken)
        assert engine.alive
        assert "dict.breaker" in engine.stats()["store"]
        engine.check()
        engine.close(1.0)


def test_a_tier_that_keeps_raising_is_left_alone(checkpoints):
    """As one whose transfers fail: after some failures it is not asked any more."""
    tier, asked = DictTier(64 << 20), []

    def lookup(keys):
        asked.append(len(keys))
        raise ZeroDivisionError

    tier.lookup, tier.store = lookup, raises
    with Engine(checkpoints("llama"), Memory(kv_cache_memory="8MiB", host_memory="8MiB"), tiers=[tier]) as engine:
        for seed in range(6):
            engine.generate([random_prompt(100, seed=seed)], greedy(1))
        assert engine.stats()["store"]["dict.breaker_opened"] == 1
        assert len(asked) <= 5


class WritesInTheEnd(DictTier):
    """Raises instead of loading, and has begun all the same. ``write`` is what it does much later."""

    def __init__(self, reading):
        super().__init__(64 << 20)
        self.reading, self.lent, self.pipes, self.threads = reading, [], [], []

    def load(self, transfer):
        self.lent += transfer.buffers
        if self.reading:
            self.pipes += [os.pipe() for _ in transfer.buffers]
            pairs = zip(self.pipes, transfer.buffers, strict=True)
            self.threads = [threading.Thread(target=os.readv, args=(out, [view])) for (out, _), view in pairs]
            for thread in self.threads:
                thread.start()
            time.sleep(0.3)  # so that the reads have begun
        raise ZeroDivisionError

    def write(self):
        for view in self.lent:
            with contextlib.suppress(ValueError):  # it was taken back
                view[:] = b"\xff" * view.nbytes

    def finish_reading(self):
        for _, into in self.pipes:
            os.write(into, b"\xff" * 4096)
        for thread in self.threads:
            thread.join(10)


@pytest.mark.parametrize("reading", [False, True])
def test_memory_that_a_tier_kept_is_not_overwritten(reading, checkpoints, references):
    """Whoever lies there now would have other bytes."""
    tier = WritesInTheEnd(reading)
    prompt, others = random_prompt(PROMPT_TOKENS), [random_prompt(PROMPT_TOKENS, seed=n) for n in range(20, 32)]
    memory = Memory(kv_cache_memory="4MiB", host_memory="1MiB", load_timeout_s=0.5)
    with Engine(checkpoints("llama"), memory, tiers=[tier]) as engine:
        engine.generate([prompt], greedy(1))
        assert engine.flush()
        engine.drop_device_cache()
        engine.drop_host()
        assert_same(engine.generate([prompt], greedy(8))[0], references("llama").answer(prompt, 8))
        assert len(tier.lent) > 0
        tier.load = lambda transfer: None
        for other in others:
            engine.generate([other], greedy(1))
            tier.write()
            if other is others[-1]:
                tier.finish_reading()
            engine.drop_device_cache()
            assert_same(engine.generate([other], greedy(8))[0], references("llama").answer(other, 8))
        engine.check()
        engine.close(1.0)


@pytest.mark.parametrize("lacking", ["lookup", "load", "store", "poll", "discard", "close", "name"])
def test_what_is_no_tier_is_refused(lacking, checkpoints):
    class Partial(DictTier):
        pass

    setattr(Partial, lacking, None)
    with pytest.raises(ConfigError, match=f"tiers has a Partial, which is no tier: it lacks .*{lacking}"):
        Engine(checkpoints("llama"), Memory(kv_cache_memory="8MiB", host_memory="8MiB"), tiers=[Partial(1 << 20)])
    with pytest.raises(ConfigError, match="tiers"):
        Engine(checkpoints("llama"), Memory(kv_cache_memory="8MiB", host_memory="8MiB"), tiers=5)
