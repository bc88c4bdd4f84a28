"""Every family of the table: what plain Transformers answers, however its prefix arrived, whoever runs beside it."""

from __future__ import annotations

from pathlib import Path

import pytest
from scripts.models_doc import PAGE, row

from stowage.config.memory import Memory
from stowage.core.geometry import Kind
from stowage.engine.engine import Engine
from stowage.executor.block_pool import bytes_needed
from stowage.testing import tiny_models
from tests.depth import mostly_rare
from tests.engine.conftest import check_and_close, greedy, random_prompt
from tests.engine.families.world import World
from tests.families import MOST_UNLIKE, ONE_OF_EACH, all_of

LONG = random_prompt(187)
CUTS = (131, 75)
"""Where a prompt leaves the long one: after 70 % of it, and earlier."""

STATES = ("mamba", "mamba2", "falcon_mamba")
"""Those that keep a state and nothing else."""
EXACT = ONE_OF_EACH - {*tiny_models.ALONE}
"""All families pass, and every engine makes sure when it opens; it takes twice as long."""


@pytest.mark.parametrize(
    "family",
    mostly_rare(
        all_of(tiny_models.FAMILIES),
        [
            *MOST_UNLIKE,
            *("bitnet", "mimo_v2_flash", "kimi_linear", "bamba", "falcon_h1"),
            *("mamba2", "deepseek_v32", "falcon", "doge"),
        ],
    ),
)
def test_batches_and_reuse(family, tmp_path):
    """A batch of unequal prompts, cold, in pieces of 64 tokens; then prompts that share a part of one of them, which
    comes from the device, from host, from disk, and from disk after a restart. Blocks of 16 tokens.
    """
    check_batches_and_reuse(World(family), tmp_path)


@pytest.mark.parametrize("before", [False, True], ids=["gated first", "normed first"])
def test_a_norm_that_mixes_up_the_sequences_of_a_batch(before, tmp_path):
    """Falcon-H1's, up to Transformers 5.17: there ``generate()`` fails with two prompts."""
    norm = {"mamba_rms_norm": True, "mamba_norm_before_gate": before, "mamba_n_groups": 2}
    world = World("falcon_h1", **norm)
    check_batches_and_reuse(world, tmp_path)
    with Engine(world.model, Memory(kv_cache_memory="8MiB"), deterministic=True) as engine:
        (alone,) = engine.generate([LONG], greedy(5))
        (among, _) = engine.generate([LONG, random_prompt(30, 1)], greedy(5))
        assert (among.token_ids, among.logprobs) == (alone.token_ids, alone.logprobs)
        world.check(LONG, alone)


def check_batches_and_reuse(world: World, tmp_path: Path) -> None:
    sizes = {"kv_cache_memory": "8MiB", "host_memory": "16MiB", "block_size": 16, "chunk_blocks": 2}
    memory = Memory(**sizes, disk=f"{tmp_path / 'cache'}:32MiB", max_num_batched_tokens=64, snapshot_tokens=64)
    engine = Engine(world.model, memory)
    prompts = [random_prompt(1, 1), random_prompt(17, 2), LONG, random_prompt(100, 3)]
    completions = engine.generate(prompts, greedy(5))
    world.check_all(prompts, completions)
    assert completions[2].token_ids == world.generate(LONG, 5)
    assert not any(sum(c.reused_tokens.values()) for c in completions)
    grid = 64 if engine.parts.layout.recurrent else 32
    for tier in ("device", "host", "disk"):
        for cut in CUTS:
            ask(world, engine, tier, cut, cut // grid * grid)
    assert row(world.family, engine.parts.layout) in PAGE.read_text(), "make reference"
    check_and_close([engine])
    engine = Engine(world.fresh(), memory)
    ask(world, engine, "disk", CUTS[0], CUTS[0] // grid * grid)
    check_and_close([engine])


def ask(world: World, engine: Engine, tier: str, cut: int, expected: int) -> None:
    """A prompt that nobody has asked before, but for its first ``cut`` tokens, which lie in ``tier``."""
    if tier == "disk":
        assert engine.flush()
        engine.drop_host()
    if tier != "device":
        engine.drop_device_cache()
    prompt = LONG[:cut] + random_prompt(20, seed=1000 * len(tier) + cut)
    (completion,) = engine.generate([prompt], greedy(3))
    world.check(prompt, completion)
    assert completion.reused_tokens[tier] == sum(completion.reused_tokens.values()) == expected


SMALL = [family for family in tiny_models.FAMILIES if family != "doge"]
"""Doge reads the keys that it finds largest: of near-equal ones Transformers itself takes others token by token."""
ONE_OF_EACH_CACHE = frozenset(
    "llama deepseek_v3 gemma3n llama4 longcat_flash qwen3_next nemotron_h jamba lfm2 mamba2 "
    "deepseek_v4 recurrent_gemma rwkv".split()
)
"""What moves to host memory: full, latent, windowed, shared, chunked, doubled keys, every state, the fallback's."""


@pytest.mark.parametrize(
    "family",
    mostly_rare(
        all_of(SMALL, pytest.mark.slow, of=ONE_OF_EACH_CACHE),
        ["llama", "qwen3_next", "llama4", "deepseek_v3", "nemotron_h", "lfm2"],
    ),
)
def test_a_small_pool(family):
    """The device holds one and a half sequences: they take turns through host memory, and nothing is computed twice.
    Blocks of 32 tokens. Some are deterministic: the same to the bit as one that was asked alone and had room.
    """
    exact = family in EXACT
    world = World(family, context_tokens=128)
    sizes = {
        "block_size": 32,
        "chunk_blocks": 2,
        "host_memory": "16MiB",
        "max_num_batched_tokens": 144,
        "snapshot_tokens": 128,
    }
    # of prompts 0 to 2 DeepSeek-V3.2 scores two keys 5e-7 apart: which it takes is the processor's choice
    first = 10 if family == "deepseek_v32" else 0
    prompts = [random_prompt(58 + i, seed=first + i) for i in range(3)]
    with Engine(world.model, Memory(kv_cache_memory="8MiB", **sizes), deterministic=exact) as engine:
        need = bytes_needed(engine.parts.layout.blocks, 128, 144)
        alone = engine.generate(prompts[2:], greedy(45))[0] if exact else None
    engine = Engine(world.model, Memory(kv_cache_memory=int(need * 1.7), **sizes), deterministic=exact)
    completions = engine.generate(prompts, greedy(45))
    world.check_all(prompts, completions)
    if alone is not None:
        assert (completions[2].token_ids, completions[2].logprobs) == (alone.token_ids, alone.logprobs)
    counters = engine.stats()["engine"]
    grows = any(b.group.kind is not Kind.RECURRENT for b in engine.parts.layout.blocks)  # else there is room, or none
    assert (counters["preemptions"] > 0) == grows
    assert counters["preemptions_recomputed"] == 0
    assert counters["tokens_computed"] == sum(len(p) + 44 for p in prompts)
    check_and_close([engine])


@pytest.mark.parametrize(
    "family",
    mostly_rare(
        [family for family in tiny_models.HYBRIDS if family not in STATES],
        ["qwen3_next", "falcon_h1", "lfm2_moe", "zamba2"],
    ),
)
def test_a_block_forced_by_the_state(family):
    """A block of attention that takes as many bytes as a large state does: 528 tokens; 576 where torch scans 64 at a
    time, since states are kept at multiples of both.
    """
    tokens = 576 if family == "zaya" else 528
    world = World(family, context_tokens=1024)
    memory = Memory(kv_cache_memory="32MiB", host_memory="32MiB", group_block_size={"full": tokens}, chunk_blocks=1)
    engine = Engine(world.model, memory)
    assert {b.group.block_tokens for b in engine.parts.layout.blocks if b.group.kind is Kind.FULL} == {tokens}
    prompt = random_prompt(tokens + 32)
    for where in ("cold", "host"):
        (completion,) = engine.generate([prompt], greedy(3))
        world.check(prompt, completion)
        assert sum(completion.reused_tokens.values()) == (0 if where == "cold" else tokens)
        engine.drop_device_cache()
    check_and_close([engine])
