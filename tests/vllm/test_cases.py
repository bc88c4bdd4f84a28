"""Cases C and D (docs/internals.md) on what a real vLLM allocates, and on the plans that its block tables lead to."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from stowage.config.memory import ram_total_bytes
from tests.vllm.child import FULL, Run
from tests.vllm.conftest import Start
from tests.vllm.models import FAMILIES, Family
from tests.vllm.oracle import connector, prompt, prove

UNEQUAL = replace(
    FAMILIES["gemma4"], fields={**FAMILIES["gemma4"].fields, "global_head_dim": 128, "num_hidden_layers": 3}
)
"""A layer with full attention has twice the bytes of one with a window."""
ALIGNMENT = 4096


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "family", "more", "spec"),
    [
        ("gemma4-unequal", UNEQUAL, {"disable_hybrid_kv_cache_manager": True}, "UniformTypeKVCacheSpecs"),
        ("gemma4", FAMILIES["gemma4"], {}, "SlidingWindowSpec"),
        ("qwen3_next", FAMILIES["qwen3_next"], {}, "MambaSpec"),
    ],
)
def test_case_c_capacity_is_what_vllm_has_allocated(
    name: str, family: Family, more: dict[str, Any], spec: str, start: Start
) -> None:
    """One group whose page is a sum over layers of unequal sizes; groups with unequal block sizes; states that are two
    tensors each, of padded pages. Then host memory is filled beyond its end.
    """
    host = 3 << 20
    engine = start(name, connector(str(host)), family=family, **more)
    real, arena = engine.ask("allocated"), engine.ask("arena")
    assert spec in arena["specs"]
    assert arena["block_bytes"] == real["block_bytes"], "each tensor once"
    assert sum(real["tensors"]) > 1
    assert max(real["block_bytes"]) * real["blocks"] <= real["storage"]
    assert_slots_fit(arena, host)
    for seed in range(20):
        engine.generate(prompt(1500, seed), 1)
        if engine.stats()["evictions"] > 0:
            break
    else:
        raise AssertionError("30,000 tokens fit, which cannot be")
    engine.ask("check")
    prove(engine, prompt(700, seed=99))


def assert_slots_fit(arena: dict[str, Any], host: int) -> None:
    """As many chunks as the formula of case C gives, none beyond the arena, none over another."""
    assert arena["bytes"] <= host
    end = slots = 0
    for slab in arena["slabs"]:
        assert (slab["offset_bytes"], slab["first_slot"]) == (end, slots), "one after the other"
        for group in slab["groups"]:
            payload = arena["block_bytes"][group] * arena["chunk_blocks"][group]
            assert slab["slot_bytes"] == math.ceil(payload / ALIGNMENT) * ALIGNMENT
        end += slab["slots"] * slab["slot_bytes"]
        slots += slab["slots"]
    assert end <= arena["bytes"]
    assert host - end < min(slab["slot_bytes"] for slab in arena["slabs"]), "room for one more was left"


@pytest.mark.parametrize(
    ("host", "message"),
    [
        (None, "StowageConnector needs host memory"),
        ("0", "StowageConnector needs host memory"),
        ("-1GiB", "host"),
        ("lots", "host"),
        ("64KiB", "set host_memory to at least"),
        (str(2 * ram_total_bytes()), "this machine or container has"),
    ],
)
def test_case_c_a_host_size_that_cannot_be(host: str | None, message: str, run: Run) -> None:
    """vLLM does not start, and its last words say why."""
    run(refused, host, message)


def refused(directory: Path, host: str | None, message: str) -> None:
    from stowage.errors import StowageError
    from tests.vllm.pipeline import Engine

    with pytest.raises(StowageError, match=message):
        Engine(directory, FULL, host=host)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "fields", "chunk_blocks"),
    [("gemma3", {"sliding_window": 48}, 4), ("llama4", {"attention_chunk_size": 96}, 5)],
)
def test_case_d_chunks_across_the_edge_of_what_is_seen(
    name: str, fields: dict[str, Any], chunk_blocks: int, start: Start
) -> None:
    """Chunks are longer than the window and steps shorter than a block's chunk: when a chunk is whole, vLLM has given
    its first blocks away. They are never read, the rest comes back as it was, and answers are right.
    """
    family = replace(FAMILIES[name], fields={**FAMILIES[name].fields, **fields})
    named = f"{name}-{chunk_blocks}"
    options = {"family": family, "block_size": 32, "max_num_batched_tokens": 32}
    engine = start(named, connector(chunk_blocks=chunk_blocks), **options)
    engine.ask("watch")
    for seed, length in enumerate([500, 161]):
        tokens = prompt(length, seed)
        cold = engine.generate(tokens)
        engine.forget()
        again = engine.generate(tokens)
        assert again.external >= length - 1 - 32 * chunk_blocks
        assert again.tokens == cold.tokens
        engine.forget()
        other = tokens[: length // 2] + prompt(100, seed=50 + seed)
        assert engine.generate(other).tokens == engine.generate(other).tokens
        engine.forget()
    seen = engine.ask("watched")
    assert seen["partial"] > 0 and seen["loaded"] > 0, "else nothing was tested"
    assert seen["null"] == seen["different"] == seen["totals"] == 0
    engine.ask("check")
