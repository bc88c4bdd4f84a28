"""Exact answers on a CUDA device: the same bits from every tier, alone and beside others, recorded and not."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from stowage.config.memory import Memory
from stowage.engine.engine import Engine
from stowage.errors import ConfigError
from tests.answers import bits
from tests.engine.conftest import greedy, random_prompt

pytestmark = pytest.mark.cuda
FAMILIES = ["llama", "gemma3", "gemma2", "qwen3", "lfm2", "falcon_h1", "phi3", "gpt2"]
"""Full, sliding, soft-capped; convolutions and states beside attention. None has experts."""
MIXTURES = ["mixtral", "qwen3_moe", "deepseek_v3", "gpt_oss", "qwen3_next"]
CASES = [(family, dtype) for family in FAMILIES for dtype in ("bfloat16", "float16", "float32")]
CASES += [(family, "bfloat16") for family in MIXTURES]
PROMPTS = [random_prompt(length, seed=length) for length in (700, 300, 20, 513)]
PROMPTS.append([*PROMPTS[0][:600], *random_prompt(90, seed=3)])
PARAMS = replace(greedy(24), logprobs=5)


def opened(path: Path, dtype: str, **given: Any) -> Engine:
    limits = {"kv_cache_memory": "512MiB", "snapshot_tokens": 256} | given.pop("memory", {})
    engine = Engine(path, Memory(**limits), device="cuda", dtype=dtype, deterministic=True, **given)
    assert engine.exact
    if engine.parts.graphs is not None:  # which is quicker does not matter here
        engine.parts.graphs.clock = lambda: 0.0
    return engine


def answers(engine: Engine, prompts: Sequence[list[int]], *, together: bool = False) -> list[Any]:
    found = engine.generate(list(prompts), PARAMS) if together else [engine.generate([p], PARAMS)[0] for p in prompts]
    return bits(found)


@pytest.mark.parametrize(("family", "dtype"), CASES)
def test_nothing_differs(family: str, dtype: str, checkpoints: Callable[..., Path], tmp_path: Path) -> None:
    path = checkpoints(family, 4096)
    expected = []
    for prompt in PROMPTS:
        with opened(path, dtype, cuda_graphs=False, memory={"kv_cache_memory": "64MiB", "max_num_seqs": 3}) as engine:
            expected += answers(engine, [prompt])
    tiers = {"host_memory": "64MiB", "disk": f"{tmp_path / 'kv'}:256MiB"}
    with opened(path, dtype, memory=tiers) as engine:
        assert answers(engine, PROMPTS, together=True) == expected, "as one batch"
        assert answers(engine, PROMPTS) == expected, "from the device"
        assert engine.flush()
        engine.drop_device_cache()
        assert answers(engine, PROMPTS, together=True) == expected, "from host memory"
        assert engine.stats()["graphs"]["captured_steps"] > 20 and engine.stats()["graphs"]["refused"] == 0
        assert engine.stats()["engine"]["tokens_reused"] > 0
        assert engine.flush()
    with opened(path, dtype, memory=tiers) as engine:
        assert answers(engine, PROMPTS) == expected, "from disk, after a restart"
        assert engine.stats()["store"]["hits.disk"] > 0


@pytest.mark.parametrize("rules", ["*=prefetch", "*=stream"])
def test_nothing_differs_when_weights_cross_over(rules: str, checkpoints: Callable[..., Path]) -> None:
    path = checkpoints("llama", 4096)
    with opened(path, "float32") as engine:
        expected = answers(engine, PROMPTS)
    with opened(path, "float32", memory={"host_memory": "64MiB", "weights": rules}) as engine:
        assert answers(engine, PROMPTS, together=True) == expected


def test_experts_are_refused(checkpoints: Callable[..., Path]) -> None:
    with pytest.raises(ConfigError, match="how many chose it"):
        opened(checkpoints("mixtral", 4096), "float32")
