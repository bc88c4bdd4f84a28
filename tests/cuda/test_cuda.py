"""The engine on a CUDA device: parity with the CPU in float32, transfers to the byte, pinned memory, preemption."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from stowage.config.memory import Memory
from stowage.core.copy_plan import CopyPlan
from stowage.core.geometry import Geometry, Group, Kind, split_arena
from stowage.engine.engine import Engine
from stowage.engine.request import Completion
from stowage.executor.block_pool import bytes_needed
from stowage.executor.device import link
from stowage.transfer.pinning import is_unified, should_pin_memory
from tests.engine.conftest import check_and_close, greedy, random_prompt

pytestmark = pytest.mark.cuda
FAMILIES = ["llama", "gemma3", "llama4", "deepseek_v3", "qwen3_next", "nemotron_h", "gpt_oss", "mixtral"]
"""Every kind of group: full, sliding, chunked, latent, recurrent; sinks; experts."""
FALLBACK = ["bloom", "deepseek_v32"]
PROMPTS = [random_prompt(length, seed=length) for length in (90, 33, 150)]
FLOAT32_BOUND = 2e-3
BFLOAT16_BOUND = 0.5
"""By how much log-probabilities of the same token may differ from the CPU's in float32: of tiny models with weights
drawn wide, whose logits reach far; rounding in bfloat16 moves them most."""


@pytest.fixture
def opened(checkpoints: Callable[..., Path]):  # type: ignore[no-untyped-def]
    """Engines, closed at the end after checking their invariants."""
    made: list[Engine] = []

    def open_engine(family: str, device: str = "cuda", dtype: str = "float32", context: int = 4096, **memory: object):  # type: ignore[no-untyped-def]
        limits = {"kv_cache_memory": "8MiB", "snapshot_tokens": 64} | memory
        made.append(
            Engine(
                checkpoints(family, context),
                Memory(**limits),  # type: ignore[arg-type]
                device=device,
                dtype=dtype,
                batch_dependent=device == "cuda",  # which finds short prompts again, too; see test_exact
            )
        )
        assert made[-1].parts.pools[0].storage.device.type == device
        return made[-1]

    yield open_engine
    check_and_close(made)


def assert_near(found: Completion, expected: Completion, bound: float) -> None:
    """Log-probabilities up to the first token that differs, which must have been a near tie, are within ``bound``."""
    for here, there in zip(found.logprobs, expected.logprobs, strict=True):
        if here.token_id != there.token_id:
            assert there.logprob - dict(there.top).get(here.token_id, -100.0) < 2 * bound, "another token, and no tie"
            return
        assert abs(here.logprob - there.logprob) < bound


def ask(engine: Engine, prompts: list[list[int]] = PROMPTS, new_tokens: int = 6) -> list[Completion]:
    return engine.generate(prompts, replace(greedy(new_tokens), logprobs=20))


@pytest.mark.parametrize(
    ("family", "dtype", "bound"),
    [
        *((family, "float32", FLOAT32_BOUND) for family in FAMILIES + FALLBACK),
        *((family, "bfloat16", BFLOAT16_BOUND) for family in ("llama", "gemma3", "nemotron_h", "bloom")),  # no routers
    ],
)
def test_parity_with_the_cpu(family: str, dtype: str, bound: float, opened, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    """Computed, and from host and disk: what is loaded continues as what was computed."""
    expected = ask(opened(family, "cpu"))
    engine = opened(family, dtype=dtype, host_memory="32MiB", disk=f"{tmp_path / 'cache'}:64MiB")
    reused = []
    for drop in (lambda: None, engine.drop_device_cache, lambda: (engine.drop_device_cache(), engine.drop_host())):
        assert engine.flush()
        drop()
        completions = ask(engine)
        for found, there in zip(completions, expected, strict=True):
            assert_near(found, there, bound)
        reused.append({tier for tier, tokens in completions[2].reused_tokens.items() if tokens})
    assert reused[0] == set() and "host" in reused[1] and "disk" in reused[2]


@pytest.mark.parametrize("family", ["llama", "gemma3", "mixtral", "qwen3_next", "gpt_oss"])
@pytest.mark.parametrize("rules", ["*=stream", "*=prefetch", "last 1 of 2=prefetch"])
@pytest.mark.parametrize("switch", ["", "1"])
def test_weights_that_cross_over(family: str, rules: str, switch: str, opened, monkeypatch: pytest.MonkeyPatch) -> None:  # type: ignore[no-untyped-def]
    """Answers are those with all weights on the device, to the bit, pinned and not."""
    resident = opened(family)
    monkeypatch.setenv("STOWAGE_DISABLE_PIN_MEMORY", switch)
    engine = opened(family, host_memory="64MiB", weights=rules)
    for _ in range(2):  # computed, and found on the device
        (expected,), (found,) = ask(resident, [PROMPTS[0]]), ask(engine, [PROMPTS[0]])
        assert found.token_ids == expected.token_ids
        assert [t.logprob for t in found.logprobs] == [t.logprob for t in expected.logprobs]
    assert engine.stats()["weights"]["read_bytes"] > 0


@pytest.mark.parametrize("family", ["llama", "gemma3", "qwen3_next"])
def test_preempted(family: str, opened) -> None:  # type: ignore[no-untyped-def]
    layouts = opened(family, context=160).parts.layout.blocks
    prompts = [random_prompt(105 + i, seed=i) for i in range(5)]
    expected = ask(opened(family, "cpu", context=160), prompts, 45)
    kv_cache_memory = int(bytes_needed(layouts, 160, 64) * 1.7)
    engine = opened(
        family, context=160, kv_cache_memory=kv_cache_memory, max_num_batched_tokens=64, host_memory="32MiB"
    )
    for found, there in zip(ask(engine, prompts, 45), expected, strict=True):
        assert_near(found, there, FLOAT32_BOUND)
    assert engine.stats()["engine"]["preemptions"] > 0 == engine.stats()["engine"]["preemptions_recomputed"]


@pytest.mark.parametrize("family", ["llama", "deepseek_v3"])
def test_longer_than_the_device(family: str, opened) -> None:  # type: ignore[no-untyped-def]
    layouts = opened(family).parts.layout.blocks
    prompt = random_prompt(290, seed=1)
    (expected,) = ask(opened(family, "cpu"), [prompt])
    small = int(bytes_needed(layouts, 300, 64) * 0.5)
    engine = opened(family, kv_cache_memory=small, max_num_batched_tokens=64, host_memory="32MiB")
    assert_near(ask(engine, [prompt])[0], expected, FLOAT32_BOUND)
    assert engine.stats()["engine"]["blocks_moved_out"] > 0


@pytest.mark.parametrize("switch", ["", "1"])
def test_bytes_cross_over_and_back(switch: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Pinned and not, scattered blocks, more than one piece; the blocks are overwritten as soon as the store returns,
    and the host's copy as soon as the load is done.
    """
    monkeypatch.setenv("STOWAGE_DISABLE_PIN_MEMORY", switch)
    size, count, device = 1 << 20, 200, torch.device("cuda")
    slabs = split_arena(Geometry((Group(0, Kind.FULL, 16, 4, size),)), 2 * count * size)
    arena = np.zeros(max(slab.end_bytes for slab in slabs), dtype=np.uint8)
    way = link(device, arena, slabs)
    assert (way.pinned is not None) is (not switch and not is_unified(device)) is should_pin_memory(device)
    storage = torch.randint(0, 256, (count + 1, size), dtype=torch.uint8, device=device)
    rows = np.random.default_rng(0).permutation(np.arange(1, count + 1))
    plan = CopyPlan(0, rows, slabs[0].first_slot + np.arange(count) // 4, np.arange(count) % 4)
    for _ in range(3):
        storage.random_(0, 256)
        before = storage.clone()
        stored = way.transfer.store(plan, storage)
        storage.zero_()
        if stored is not None:
            stored.wait()
        loaded = way.transfer.load(plan, storage)
        if loaded is not None:
            loaded.wait()
        arena[:] = 0
        assert torch.equal(storage[1:], before[1:])
    way.close()


def test_the_arena_is_pinned_and_given_back(opened) -> None:  # type: ignore[no-untyped-def]
    engine = opened("llama", host_memory="32MiB")
    pinned = engine.parts.link.pinned
    assert (pinned is not None) is should_pin_memory(torch.device("cuda", 0))
    if pinned is not None:
        assert pinned.whole and torch.from_numpy(engine.store.arena.numpy()).is_pinned()
        engine.close()
        assert not pinned.whole
