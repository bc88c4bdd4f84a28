"""`benchmarks.capacity` computes with vLLM's layout for published models: here vLLM's own code is asked about them."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("vllm")

from vllm.v1.core import kv_cache_utils
from vllm.v1.core.single_type_kv_cache_manager import MambaManager, SlidingWindowManager
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheLayout, MambaSpec, SlidingWindowSpec

from benchmarks.capacity import MODELS, Model, tail_blocks
from stowage.core.geometry import Group, Kind
from stowage.core.resume_points import Points
from stowage.plugins.vllm import settings

KINDS = {FullAttentionSpec: Kind.FULL, SlidingWindowSpec: Kind.SLIDING, MambaSpec: Kind.RECURRENT}


def specs(model: Model) -> dict[str, Any]:
    """Of all layers, of one head with as many bytes as the model's heads together."""
    block = model.block_tokens
    attention = {"block_size": block, "num_kv_heads": 1, "head_size": model.token_bytes // 4, "dtype": torch.bfloat16}
    page = block * model.token_bytes
    made: dict[str, Any] = {f"full.{at}": FullAttentionSpec(**attention) for at in range(model.full)}
    for at in range(model.sliding):
        made[f"sliding.{at}"] = SlidingWindowSpec(**attention, sliding_window=model.window)
    for at in range(model.recurrent):
        shapes = ((model.state_bytes // 2,),)
        made[f"recurrent.{at}"] = MambaSpec(
            block, shapes, (torch.bfloat16,), page_size_padded=page, mamba_cache_mode="align"
        )
    return made


@pytest.mark.parametrize("name", MODELS)
def test_groups_and_pages_are_those_of_vllm(name: str) -> None:
    model = MODELS[name]
    config = SimpleNamespace(
        scheduler_config=SimpleNamespace(disable_hybrid_kv_cache_manager=False),
        attention_config=SimpleNamespace(hisparse_config=None),
        speculative_config=None,
        cache_config=SimpleNamespace(
            block_size=model.block_tokens, get_resolved_kv_cache_layout=lambda: KVCacheLayout.LBHNC
        ),
    )
    groups = kv_cache_utils.get_kv_cache_groups(config, specs(model))
    theirs = [(KINDS[type(group.kv_cache_spec)], len(group.layer_names)) for group in groups]
    assert sorted(theirs) == sorted(model.groups())
    nbytes = kv_cache_utils._get_kv_cache_bytes_per_block(groups, KVCacheLayout.LBHNC)
    widest = max(layers for _, layers in model.groups())
    assert nbytes == widest * model.block_tokens * model.token_bytes


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("interval", [0, 2048, None])
@pytest.mark.parametrize("length", [1000, 4096, 10_000])
def test_what_is_kept_in_the_middle_is_what_vllm_keeps(name: str, interval: int | None, length: int) -> None:
    model = MODELS[name]
    block = model.block_tokens
    if interval:
        interval = math.ceil(interval / block) * block
    spec = specs(model)["recurrent.0" if model.recurrent else "sliding.0"]
    manager = MambaManager if model.recurrent else SlidingWindowManager
    mask = manager.reachable_block_mask(
        0,
        length // block,
        block,
        spec,
        use_eagle=False,
        retention_interval=interval,
        reachable_boundaries=() if interval is None else (length - 1,),
        final_segment_end_block=length // block if interval is None else None,
    )
    theirs = set(range(length // block)) if mask is None else {at for at, kept in enumerate(mask) if kept}
    assert tail_blocks(model, length, interval) == theirs


def test_states_are_expected_as_far_apart_as_steps_end() -> None:
    """But for what the user says; short prompts have states too."""

    def spacing(step_tokens: int, **extra: Any) -> int:
        return settings.state_spacing(settings.read({"host_memory": "1GiB", **extra}), step_tokens)

    assert [spacing(tokens) for tokens in (64, 512, 1024, 2048, 8192)] == [512, 512, 1024, 2048, 2048]
    assert spacing(8192, snapshot_tokens=512) == 512 and spacing(512, snapshot_tokens=4096) == 4096


def test_which_models_keep_everything() -> None:
    """Those where points would be of no use, or cannot work; the others begin with a chunk that all groups have."""
    full, window = Group(0, Kind.FULL, 16, 8, 1024), Group(1, Kind.SLIDING, 32, 12, 1024, 500)
    state = Group(2, Kind.RECURRENT, 512, 1, 1024)

    def points(*groups: Group, **extra: Any) -> Points:
        return settings.resume_points(settings.read({"host_memory": "1GiB", **extra}), groups)

    assert all(points(*some).everywhere for some in ([full], [window], [state], [full, window, state]))
    assert points(full, window) == Points(384, 2) and points(full, state) == Points(512, 2)
    assert points(full, window, resume_points=1000) == Points(1152) and points(
        full, window, resume_points="ends"
    ) == Points(0)
    assert points(full, window, resume_points="all").everywhere
