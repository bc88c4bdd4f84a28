"""Copies that go on while the engine does: answers are the same, and host memory is used in the right order."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from stowage.config.memory import Memory
from stowage.engine import assembly
from stowage.engine.engine import Engine
from stowage.executor.block_pool import bytes_needed
from stowage.executor.device import DeviceLink
from stowage.transfer.staged import StagedTransfer
from tests.depth import mostly_rare
from tests.engine.conftest import assert_same, check_and_close, greedy, random_prompt
from tests.late_copies import LateCopies

FAMILIES = ["llama", "gemma3", "qwen3_next"]
PROMPTS = [random_prompt(270 + 17 * seed, seed) for seed in range(3)]
Opened = Callable[..., tuple[Engine, LateCopies]]


@pytest.fixture
def opened(checkpoints: Callable[..., Path], monkeypatch: pytest.MonkeyPatch) -> Opened:  # type: ignore[misc]
    """Engines whose copies are late, and what makes them so."""
    made: list[tuple[Engine, LateCopies]] = []

    def open_engine(  # type: ignore[no-untyped-def]
        family: str, *, patience: int = 4, failing: tuple[int, ...] = (), context_tokens: int = 4096, **memory: object
    ):
        copies = LateCopies(patience, failing)
        monkeypatch.setattr("stowage.transfer.staged.STAGING_BYTES", 1 << 16)
        monkeypatch.setattr(assembly, "link", lambda _, arena, slabs: DeviceLink(StagedTransfer(arena, slabs, copies)))
        limits = {"kv_cache_memory": "8MiB", "host_memory": "16MiB", "snapshot_tokens": 128} | memory
        made.append((Engine(checkpoints(family, context_tokens), Memory(**limits)), copies))  # type: ignore[arg-type]
        return made[-1]

    yield open_engine
    check_and_close([engine for engine, _ in made])
    for engine, copies in made:
        engine.close()
        assert copies.violations == []
        assert not copies.leaving.open and not copies.coming.open, "something is under way after the end"


@pytest.mark.parametrize("family", mostly_rare(FAMILIES, ["gemma3"]))
def test_reuse_from_host_and_disk(family: str, opened: Opened, references, tmp_path: Path) -> None:
    """Every answer is plain Transformers', and prefixes do come back."""
    engine, copies = opened(family, disk=f"{tmp_path / 'cache'}:64MiB")
    for drop in (lambda: None, engine.drop_device_cache, lambda: (engine.drop_device_cache(), engine.drop_host())):
        assert engine.flush()
        drop()
        for prompt, completion in zip(PROMPTS, engine.generate(PROMPTS, greedy(4)), strict=True):
            assert_same(completion, references(family).answer(prompt, 4))
    assert copies.begun > 10
    assert completion.reused_tokens["disk"] >= 256


@pytest.mark.parametrize("family", mostly_rare(FAMILIES, ["llama", "gemma3"]))
@pytest.mark.parametrize("patience", [2, 6])
def test_host_memory_under_pressure(family: str, patience: int, opened: Opened, references) -> None:
    """Slots are wanted again as soon as they may be: not all prompts have room, and every one comes twice."""
    engine, _ = opened(family, patience=patience, host_memory="384KiB")
    for _ in range(2):
        engine.drop_device_cache()
        for prompt in PROMPTS:
            assert_same(engine.generate([prompt], greedy(4))[0], references(family).answer(prompt, 4))
            engine.check()
    assert engine.stats()["store"]["evictions"] > 0


@pytest.mark.parametrize("family", mostly_rare(FAMILIES, ["gemma3"]))
def test_preempted(family: str, opened: Opened, references) -> None:
    """What was put into host memory is there before it is read, and stays until it has been."""
    layouts = opened(family, context_tokens=160)[0].parts.layout.blocks
    kv_cache_memory = int(bytes_needed(layouts, 160, 64) * 1.7)
    engine, copies = opened(
        family, patience=1 << 30, context_tokens=160, kv_cache_memory=kv_cache_memory, max_num_batched_tokens=64
    )
    prompts = [random_prompt(105 + i, seed=i) for i in range(3)]
    for prompt, completion in zip(prompts, engine.generate(prompts, greedy(45)), strict=True):
        assert_same(completion, references(family).answer(prompt, 45))
    counters = engine.stats()["engine"]
    assert counters["preemptions"] > 0 == counters["preemptions_recomputed"] and copies.begun


def test_a_copy_that_fails_on_its_way(opened: Opened, references) -> None:
    """F2: what did not arrive is not found, whatever came after it; everything else is."""
    engine, _ = opened("llama", failing=(0,))
    answer = references("llama").answer(PROMPTS[0], 4)
    assert_same(engine.generate([PROMPTS[0]], greedy(4))[0], answer)
    assert engine.flush()
    assert engine.stats()["engine"]["copies_failed"] == 1
    engine.check()
    for hits in (False, True):
        engine.drop_device_cache()
        (completion,) = engine.generate([PROMPTS[0]], greedy(4))
        assert_same(completion, answer)
        assert bool(completion.reused_tokens["host"]) is hits
        assert engine.flush()


def test_idle_engines_finish_what_is_under_way(opened: Opened) -> None:
    """Nobody asks for anything more, and the chunks are stored all the same."""
    engine, copies = opened("llama", patience=5)
    engine.generate([PROMPTS[0]], greedy(1))
    deadline = 600
    while copies.leaving.open and deadline:
        deadline -= 1
        engine._loop.thread.join(0.1)
    assert not copies.leaving.open and engine.store.stats()["slab0.bytes_used"] > 0
