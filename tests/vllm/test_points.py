"""Long prompts of hybrids: windows and states are kept for few places, and where prompts were seen to part."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from tests.vllm.conftest import Start
from tests.vllm.models import FAMILIES
from tests.vllm.oracle import Engine, connector, prompt

STORED, SHARED = 3500, 2900
POINT = 2048
"""The last point before SHARED; beyond 2,048 they are 1,024 apart."""
LONG: dict[str, Any] = {"max_model_len": 4096, "kv_cache_memory_bytes": 64 << 20}


def engine_of(start: Start, name: str, transfer: dict[str, Any] | None = None) -> Engine:
    fields = {**FAMILIES[name].fields, "max_position_embeddings": 8192}
    more = LONG if transfer else {**LONG, "prefix_cache_retention_interval": None}
    return start(f"{name}-long", transfer, family=dataclasses.replace(FAMILIES[name], fields=fields), **more)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "kept"),
    [
        # Of 27 chunks of 128 tokens: all up to 512, the window's two before 768, 1024, 1536, 2048 and 3072, and those
        # before the prompt's end, in two groups.
        ("gemma3", 2 * (4 + 5 * 2 + 2)),
        # States, where steps of 512 tokens end: all but that after 2560, and that of the prompt's end, in three groups.
        # Chunks have 128 tokens, or 256 where the processor's kernel wants states in float32.
        ("qwen3_next", 3 * 6),
    ],
)
def test_a_prompt_that_parts_resumes_at_a_point_and_the_next_where_it_parted(
    start: Start, name: str, kept: int
) -> None:
    stored = prompt(STORED)
    second, third = (stored[:SHARED] + prompt(200, seed) for seed in (1, 2))
    engine = engine_of(start, name, connector())
    chunk = max(128, engine.ask("layout")["hit_tokens"])
    engine.generate(stored, 1)
    assert engine.counted("stores") == STORED // chunk + kept
    engine.forget()
    parted = engine.generate(second)
    assert (parted.local, parted.external) == (0, POINT)
    engine.forget()
    learned = engine.generate(third)
    assert (learned.local, learned.external) == (0, SHARED // chunk * chunk)
    engine.forget()
    assert engine.generate(stored).external == (STORED - 1) // chunk * chunk
    engine.ask("check")
    engine.close()
    plain = engine_of(start, name)  # computes the same pieces: what lies before the point, then the second prompt
    plain.generate(stored[: POINT + 2])
    for answer, asked in ((parted, second), (learned, third)):
        if asked is third and FAMILIES[name].recurrent:  # by itself vLLM ends no step where the second parted
            assert plain.ask("reset", connector=False)
            plain.generate(stored[: learned.external + 2])
        local = plain.generate(asked)
        assert local.local == answer.external
        assert answer.distance(local) == 0.0
