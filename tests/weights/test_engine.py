"""Case A on the engine: every delivery of weights with every cache geometry; answers are the same to the bit."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from transformers import AutoModelForCausalLM

from stowage import BudgetError, ConfigError, Engine, Memory, SamplingParams
from stowage.cache import cost_model
from stowage.engine.memory_budget import activation_bytes
from stowage.engine.placement_report import placement, weights_bytes
from stowage.testing import tiny_models
from tests.depth import mostly_rare
from tests.weights.conftest import bytes_of

FAMILIES = ("llama", "gemma3", "mixtral", "nemotron_h", "qwen3_next", "qwen3_5_moe", "deepseek_v3")
BLOCKS: tuple[dict[str, Any], ...] = (
    {"block_size": 16},
    {"block_size": 32, "group_block_size": {"sliding": 16, "recurrent": 128}},
    {"block_size": 16, "group_block_size": {"recurrent": 528}, "chunk_blocks": 3},
)
MIXED = "last 1 of 3=stream,*embed*=mapped,last 1 of 2=prefetch,lm_head=stream"
PARAMS = SamplingParams(max_new_tokens=6, ignore_eos=True, logprobs=1)


@pytest.fixture(autouse=True)
def _patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a tier has is loaded, however slow the machine is at the moment."""
    monkeypatch.setattr(cost_model, "_DEADLINE_LEAST_S", 60.0)
    monkeypatch.setattr(cost_model.CostModel, "worth_loading", lambda *_: True)


def tokens(length: int, seed: int) -> list[int]:
    return torch.randint(5, 500, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


def answers(engine: Engine, prompts: list[list[int]]) -> list[tuple[list[int], list[float], int]]:
    found = engine.generate(list(prompts), PARAMS)
    return [(a.token_ids, [r.logprob for r in a.logprobs], a.reused_tokens) for a in found]


def told(engine: Engine, folder: Path) -> list[Any]:
    """Alone, as a mixed batch, from the device, from host and from disk."""
    prompts = [tokens(150, 1), tokens(40, 2), tokens(97, 3)]
    said: list[Any] = [answers(engine, prompts[:1]), answers(engine, prompts)]
    engine.drop_device_cache()
    said.append(answers(engine, prompts[:1]))
    assert engine.flush()
    engine.drop_device_cache()
    engine.drop_host()
    said.append(answers(engine, prompts[:1]))
    assert any(folder.iterdir())
    engine.check()
    return said


@pytest.mark.parametrize(
    "family",
    mostly_rare(
        [
            pytest.param(family, marks=pytest.mark.every_family) if family in ("mixtral", "qwen3_5_moe") else family
            for family in FAMILIES
        ],
        ["llama", "gemma3", "nemotron_h"],
    ),
)
def test_every_geometry_answers_as_with_all_weights_in_memory(
    family: str, checkpoints: Callable[..., Path], plain: Callable[..., Any], tmp_path: Path
) -> None:
    blocks = BLOCKS[FAMILIES.index(family) % 2 :: 2] if family != "nemotron_h" else BLOCKS
    rules: list[dict[str, Any]] = [{"weights": "*=stream"}, {"weights": MIXED}]
    for number, geometry in enumerate(blocks):
        memory = {"kv_cache_memory": "8MiB", "host_memory": "64MiB", **geometry}
        with Engine(checkpoints(family), Memory(**memory, disk=f"{tmp_path}/whole{number}:64MiB")) as engine:
            expected = told(engine, tmp_path / f"whole{number}")
        asked = rules[number % 2]
        folder = tmp_path / f"placed{number}"
        with Engine(checkpoints(family), Memory(**memory, **asked, disk=f"{folder}:64MiB")) as engine:
            assert told(engine, folder) == expected, (geometry, asked)
            assert engine.weights is not None
            engine.weights.check()
        reused = [answer[0][2] for answer in expected[2:]]
        assert all(reused), "host and disk were asked"


@pytest.mark.parametrize("family", mostly_rare(["gemma3", "mixtral"], ["gemma3"]))
def test_the_batch_is_rebuilt_at_any_time_and_weights_do_not_notice(
    family: str, checkpoints: Callable[..., Path]
) -> None:
    """More sequences than the pool holds: they leave and come back, in the middle of answers."""
    prompts = [tokens(60 + 7 * n, n) for n in range(6)]
    params = SamplingParams(max_new_tokens=40, ignore_eos=True)
    with Engine(checkpoints(family), Memory(kv_cache_memory="64MiB")) as engine:
        expected = [a.token_ids for a in engine.generate(list(prompts), params)]
    size = "190KiB" if family == "mixtral" else "300KiB"
    with Engine(checkpoints(family), Memory(kv_cache_memory=size, host_memory="32MiB", weights="*=stream")) as engine:
        assert [a.token_ids for a in engine.generate(list(prompts), params)] == expected
        assert engine.stats()["engine"]["preemptions"] > 0
        engine.check()


def test_one_budget_holds_weights_kv_and_steps(checkpoints: Callable[..., Path], plain: Callable[..., Any]) -> None:
    whole = bytes_of(plain("mixtral"))
    memory = {"kv_cache_memory": "1MiB", "host_memory": "4MiB", "max_num_batched_tokens": 128, "max_num_seqs": 2}
    with Engine(checkpoints("mixtral"), Memory(**memory)) as engine:
        expected = answers(engine, [tokens(50, 1)])
    with Engine(checkpoints("mixtral"), Memory(**memory, device_memory=(1 << 20) + (1 << 20) + whole // 2)) as engine:
        assert answers(engine, [tokens(50, 1)]) == expected
        assert engine.weights is not None
        held = engine.weights.placement
        pools = sum(pool.nbytes for pool in engine.parts.pools)
        assert held.device_bytes + pools <= engine.memory.device_memory_bytes
        assert engine.store is not None
        assert held.host_bytes + engine.store.arena.numpy().nbytes <= 4 << 20
        assert weights_bytes(engine) == held.device_bytes < whole
        said = "\n".join(map(str, placement(engine)))
        assert "weights, resident" in said
        assert "stowage_weights_passes_total" in engine.metrics()
        assert engine.stats()["weights"]["passes"] > 5


@pytest.mark.parametrize(
    ("memory", "error", "match"),
    [
        ({"device_memory": "1MiB", "kv_cache_memory": "1MiB"}, ConfigError, "kv_cache_memory"),
        ({"device_memory": "3MiB", "kv_cache_memory": "1MiB"}, BudgetError, "max_num_batched_tokens"),
        (
            {"device_memory": "1750KiB", "kv_cache_memory": "1MiB", "max_num_batched_tokens": 64, "max_num_seqs": 2},
            BudgetError,
            "at least",
        ),
        ({"weights": "*=mapped", "kv_cache_memory": "1MiB"}, BudgetError, "host"),
        ({"weights": "*=banana", "kv_cache_memory": "1MiB"}, ConfigError, "not understood"),
    ],
)
def test_budgets_that_cannot_work_say_what_would(
    memory: dict[str, Any], error: type[Exception], match: str, checkpoints: Callable[..., Path]
) -> None:
    with pytest.raises(error, match=match):
        Engine(checkpoints("mixtral"), Memory(**memory))


@pytest.mark.parametrize("asked", [{}, {"kv_cache_memory": "1MiB"}, {"adapter": True, "device_memory": "20KiB"}])
def test_the_least_that_is_told_is_what_works(
    asked: dict[str, Any], checkpoints: Callable[..., Path], tmp_path: Path
) -> None:
    """With what a step computes with, the KV pool and adapters counted, however little was given."""
    sizes = {"max_num_batched_tokens": 64, "max_num_seqs": 2}
    memory = {"device_memory": "1025KiB", **sizes, **asked}
    adapter = {}
    if memory.pop("adapter", False):
        base = AutoModelForCausalLM.from_pretrained(checkpoints("mixtral"))
        lora = peft.LoraConfig(r=2, target_modules=["q_proj"], init_lora_weights=False)
        peft.get_peft_model(base, lora).save_pretrained(tmp_path / "lora")
        adapter = {"adapter": tmp_path / "lora"}
    with pytest.raises(BudgetError, match=r"Of device_memory \(.*give device_memory at least \d+ bytes") as raised:
        Engine(checkpoints("mixtral"), Memory(**memory), **adapter)
    least = int(str(raised.value).rpartition("device_memory at least ")[2].split()[0])
    with Engine(checkpoints("mixtral"), Memory(**memory | {"device_memory": least}), **adapter) as engine:
        assert engine.weights is not None
        taken = engine.weights.placement.device_bytes + sum(pool.nbytes for pool in engine.parts.pools)
        assert taken + activation_bytes(engine.memory, engine.model.config) <= least
        assert engine.generate([tokens(50, 1)], SamplingParams(max_new_tokens=2))
    with pytest.raises(BudgetError, match="at least"):
        Engine(checkpoints("mixtral"), Memory(**memory | {"device_memory": least - 1}), **adapter)


def test_a_budget_for_the_device_alone_fits_the_kv_pool(
    checkpoints: Callable[..., Path], plain: Callable[..., Any]
) -> None:
    """With room for all weights the pool has what they leave; without it, what was set aside: a quarter here."""
    whole = bytes_of(plain("llama"))
    device_bytes = whole + (72 << 20)
    sizes = {"max_num_batched_tokens": 64, "max_num_seqs": 2}
    with Engine(checkpoints("llama"), Memory(kv_cache_memory="1MiB", **sizes)) as engine:
        expected = answers(engine, [tokens(50, 1)])
    with Engine(checkpoints("llama"), Memory(device_memory=device_bytes, **sizes)) as engine:
        assert answers(engine, [tokens(50, 1)]) == expected
        assert engine.weights is not None
        held = engine.weights.placement.device_bytes
        pools = sum(pool.nbytes for pool in engine.parts.pools)
        steps = activation_bytes(engine.memory, engine.model.config)
        assert held >= whole and held + pools + steps <= device_bytes
        assert pools > device_bytes - held - steps - (1 << 20)
    tight = whole + steps + (64 << 10)
    with Engine(checkpoints("llama"), Memory(device_memory=tight, **sizes)) as engine:
        assert answers(engine, [tokens(50, 1)]) == expected
        assert engine.weights is not None and engine.weights.placement.device_bytes < whole
        pools = sum(pool.nbytes for pool in engine.parts.pools)
        assert pools + engine.weights.placement.device_bytes <= tight and pools > tight // 4 - (1 << 16)


@pytest.mark.parametrize("family", mostly_rare(["llama", "gemma3", "qwen3_next"], ["llama", "gemma3"]))
def test_norms_that_come_and_go_are_summed_as_those_that_stay(family: str, tmp_path: Path) -> None:
    """Norms of more than 16 KiB are delivered with their layer: of 8,192 inputs and more in bfloat16, 4,096 in float32.
    Those of these sizes are here, and two ways to sum squares differ in last bits.
    """
    source = tiny_models.write(family, tmp_path / family, tiny_models.TinySize(hidden=256, layers=2))
    scored = SamplingParams(max_new_tokens=4, ignore_eos=True, logprobs=1, prompt_logprobs=0)
    said = []
    for weights in ("auto", "*=stream", "*=mapped"):
        with Engine(source, Memory(kv_cache_memory="16MiB", host_memory="64MiB", weights=weights)) as engine:
            said.append(
                [(a.prompt_logprobs, a.logprobs) for a in engine.generate([tokens(90, 1), tokens(7, 2)], scored)]
            )
    assert said[1] == said[0]
    assert said[2] == said[0]
