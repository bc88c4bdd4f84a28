"""The engine on a device that is not the CPU: nothing is mixed up between the two, and answers are the CPU's."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from stowage.config.memory import Memory
from stowage.engine.engine import Engine
from stowage.errors import ConfigError
from stowage.evaluation import pack
from stowage.executor.block_pool import bytes_needed
from stowage.executor.determinism import pieces as prompt_pieces
from stowage.plugins.transformers.offload import offload
from stowage.plugins.transformers.prefix_cache import PrefixCache
from stowage.testing import tiny_models
from stowage.weights.weight_unit import Delivery
from tests.engine.conftest import Reference, assert_same, check_and_close, greedy, random_prompt

pytestmark = [
    pytest.mark.device,
    pytest.mark.skipif(shutil.which("g++") is None, reason="the second device needs a C++ compiler"),
]
FAMILIES = ["llama", "gemma3", "deepseek_v3", "qwen3_next", "jamba", "gpt_oss", "cohere2", "llama4", "gemma4", "bloom"]
FAMILIES += ["deepseek_v32", "qwen3_5_moe", "lfm2", "gpt2"]
PROMPTS = [random_prompt(length, seed=length) for length in (90, 33, 150)]


@pytest.fixture
def opened(device: torch.device, references: Callable[[str], Reference]):  # type: ignore[no-untyped-def]
    """Engines on the second device, closed at the end after checking their invariants."""
    made: list[Engine] = []

    def open_engine(family: str, path: Path | None = None, **memory: object) -> Engine:
        limits = {"kv_cache_memory": "2MiB", "host_memory": "8MiB", "snapshot_tokens": 64} | memory
        made.append(Engine(path or references(family).path, Memory(**limits), device=str(device)))  # type: ignore[arg-type]
        assert made[-1].model.device == made[-1].parts.pools[0].storage.device == device
        return made[-1]

    yield open_engine
    check_and_close(made)


def test_it_is_another_device(device: torch.device) -> None:
    """Or nothing here proves anything."""
    there = torch.ones(4, device=device)
    assert torch.equal((there + there).cpu(), torch.full((4,), 2.0))
    with pytest.raises(RuntimeError, match="same device"):
        there + torch.ones(4)


@pytest.mark.parametrize("family", FAMILIES)
def test_answers_are_the_cpus(family: str, opened, references, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    """Computed, and from every tier."""
    engine = opened(family, disk=f"{tmp_path / 'cache'}:32MiB")
    reused = []
    for drop in (lambda: None, engine.drop_device_cache, lambda: (engine.drop_device_cache(), engine.drop_host())):
        assert engine.flush(120)
        drop()
        completions = engine.generate(PROMPTS, greedy(6))
        for prompt, completion in zip(PROMPTS, completions, strict=True):
            assert_same(completion, references(family).answer(prompt, 6))
        reused.append({tier for tier, tokens in completions[2].reused_tokens.items() if tokens})
    assert reused[0] == set() and "host" in reused[1] and "disk" in reused[2]


@pytest.mark.parametrize("family", ["llama", "gemma3", "qwen3_next"])
def test_preempted(family: str, opened, references, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    path = tiny_models.write(family, tmp_path / "short", tiny_models.TinySize(context_tokens=160))
    layouts = opened(family, path).parts.layout.blocks
    engine = opened(family, path, kv_cache_memory=int(bytes_needed(layouts, 160, 64) * 1.7), max_num_batched_tokens=64)
    prompts = [random_prompt(105 + i, seed=i) for i in range(3)]
    for prompt, completion in zip(prompts, engine.generate(prompts, greedy(50)), strict=True):
        assert_same(completion, references(family).answer(prompt, 50))
    assert engine.stats()["engine"]["preemptions"] > 0 == engine.stats()["engine"]["preemptions_recomputed"]


@pytest.mark.parametrize("family", ["llama", "deepseek_v3"])
def test_longer_than_the_device(family: str, opened, references) -> None:  # type: ignore[no-untyped-def]
    """The oldest blocks are brought from host memory in pieces."""
    layouts = opened(family).parts.layout.blocks
    engine = opened(family, kv_cache_memory=int(bytes_needed(layouts, 300, 64) * 0.5), max_num_batched_tokens=64)
    prompt = random_prompt(290, seed=1)
    (completion,) = engine.generate([prompt], greedy(6))
    assert_same(completion, references(family).answer(prompt, 6))
    assert engine.stats()["engine"]["blocks_moved_out"] > 0


def test_a_model_in_memory_stays_where_it_is(device: torch.device, references) -> None:  # type: ignore[no-untyped-def]
    model = tiny_models.build("llama").to(device)
    with Engine(model, Memory(kv_cache_memory="2MiB")) as engine:
        assert engine.parts.pools[0].storage.device == device
        assert_same(engine.generate([PROMPTS[1]], greedy(4))[0], references("llama").answer(PROMPTS[1], 4))
    with pytest.raises(ConfigError, match=r"give it model\.to\('cpu'\)"):
        Engine(model, Memory(kv_cache_memory="2MiB"), device="cpu")


@pytest.mark.parametrize(("family", "at_once"), [("llama", True), ("gemma3", True), ("gpt2", False), ("lfm2", False)])
def test_exact_answers_of_a_device(
    family: str, at_once: bool, device: torch.device, references, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:  # type: ignore[no-untyped-def]
    """In pieces, several of them one forward where nothing but linear layers multiplies; single tokens in one shape."""
    monkeypatch.setattr(prompt_pieces, "DEVICES", frozenset({device.type}))
    monkeypatch.setattr(prompt_pieces, "TILE_PIECE_TOKENS", 64)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    memory = Memory(kv_cache_memory="8MiB", host_memory="16MiB")
    prompts = [random_prompt(length, seed=length) for length in (300, 200, 20)]
    found = []
    for _ in range(2):  # tried, and remembered
        with Engine(references(family).path, memory, device=str(device), deterministic=True) as engine:
            assert engine.exact and engine.parts.pieces.grid == 64
            assert engine.parts.runner.forwards.pieces_at_once is at_once
            for prompt in prompts:
                (one,) = engine.generate([prompt], greedy(6))
                assert_same(one, references(family).answer(prompt, 6))
                found.append([report.logprob for report in one.logprobs])
            assert engine.flush()
            engine.drop_device_cache()
            together = engine.generate(prompts, greedy(6))
            assert together[0].reused_tokens["host"] == 256
            found += [[report.logprob for report in one.logprobs] for one in together]
    assert all(found[at : at + 3] == found[:3] for at in (3, 6, 9))


def test_what_is_there_on_cpus_only(device: torch.device, references) -> None:  # type: ignore[no-untyped-def]
    path = references("llama").path
    with pytest.raises(ConfigError, match="exact answers are there on CPUs and CUDA devices"):
        Engine(path, Memory(kv_cache_memory="2MiB"), device=str(device), deterministic=True)
    with pytest.raises(ConfigError, match="delivered as mapped, and hold:0 cannot read it in host memory"):
        Engine(path, Memory(kv_cache_memory="2MiB", host_memory="8MiB", weights="*=mapped"), device=str(device))
    with pytest.raises(ConfigError, match="give its checkpoint's directory"):
        Engine(
            tiny_models.build("llama").to(device),
            Memory(kv_cache_memory="2MiB", host_memory="8MiB", weights="*=stream"),
        )


@pytest.mark.parametrize("family", ["llama", "gemma3", "qwen3_moe", "gpt_oss", "qwen3_next", "deepseek_v32"])
@pytest.mark.parametrize("rules", ["*=stream", "last 1 of 2=prefetch"])
def test_weights_that_cross_over(family: str, rules: str, opened, references) -> None:  # type: ignore[no-untyped-def]
    engine = opened(family, host_memory="64MiB", weights=rules)
    for prompt, completion in zip(PROMPTS, engine.generate(PROMPTS, greedy(4)), strict=True):
        assert_same(completion, references(family).answer(prompt, 4))
    assert engine.stats()["weights"]["read_bytes"] > 0
    offloaded = engine.weights.placement.nbytes(Delivery.STREAM, Delivery.PREFETCH)
    assert offloaded > 0 and engine.model.device == engine.weights.device


@pytest.mark.parametrize("form", ["int8", "int4"])
def test_packed_weights_that_cross_over(form: str, opened, references, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    packed = tmp_path / "packed"
    pack.pack(str(references("llama").path), packed, form)
    expected = [
        Engine(packed, Memory(kv_cache_memory="2MiB")),
        opened("llama", packed, host_memory="64MiB", weights="*=stream"),
    ]
    answers = [engine.generate([PROMPTS[0]], greedy(6))[0] for engine in expected]
    expected[0].close()
    assert answers[0].token_ids == answers[1].token_ids


def test_offload(device: torch.device, references) -> None:  # type: ignore[no-untyped-def]
    """Two lines in a script of Transformers."""
    model = offload(references("llama").path, weights="*=stream", host_memory="64MiB", device=str(device))
    prompt = torch.tensor([PROMPTS[0]], device=device)
    options = {"max_new_tokens": 6, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    out = model.generate(prompt, attention_mask=torch.ones_like(prompt), **options)
    assert out[0, len(PROMPTS[0]) :].tolist() == references("llama").answer(PROMPTS[0], 6).tokens
    model.stowage.close()


def test_caches_of_two_devices_never_meet(opened, references, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    """Another device rounds otherwise."""
    disk = f"{tmp_path / 'cache'}:32MiB"
    there = opened("llama", disk=disk)
    there.generate([PROMPTS[2]], greedy(1))
    assert there.flush(120)
    there.close()
    with Engine(references("llama").path, Memory(kv_cache_memory="2MiB", host_memory="8MiB", disk=disk)) as here:
        assert not any(here.generate([PROMPTS[2]], greedy(1))[0].reused_tokens.values())


def test_prefix_cache(device: torch.device, tmp_path: Path) -> None:
    """Transformers' own generate() on the device, with a prefix from the disk."""
    model, prompt = tiny_models.build("llama").to(device).eval(), torch.tensor([PROMPTS[2]])
    answers, found = [], []
    for _ in range(2):
        with PrefixCache(model, host_memory="8MiB", disk=f"{tmp_path / 'cache'}:32MiB") as cache:
            past = cache.restore(prompt.to(device), timeout_s=60)
            found.append(past.get_seq_length())
            options = {"max_new_tokens": 6, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
            out = model.generate(prompt.to(device), past_key_values=past, **options)
            cache.keep(past, out)
            assert cache.flush(120)
            answers.append(out.cpu().tolist())
    assert answers[0] == answers[1] and found[0] == 0 < found[1]
