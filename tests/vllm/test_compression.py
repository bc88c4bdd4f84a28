"""Packed chunks, in host memory and on disk: what comes back is what vLLM itself would have had."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.vllm.conftest import Start
from tests.vllm.oracle import connector, prompt, prove


@pytest.mark.slow
@pytest.mark.parametrize("name", ["llama-bf16", "qwen3_next"])
def test_packed_prefixes_come_back_exactly(name: str, start: Start, tmp_path: Path) -> None:
    settings = connector("24MiB", tmp_path / "cache", host_packed="80%", compression="on")
    tokens = prompt(1300)
    engine = start(name, settings)
    local = prove(engine, tokens)
    for seed in range(1, 20):  # until host memory holds others
        engine.generate(prompt(1300, seed))
        if engine.stats()["evictions"] > 40:
            break
    engine.forget()
    before = engine.hits("packed")
    external = engine.generate(tokens)
    assert (external.local, external.external) == (0, local.local) and external.distance(local) == 0.0
    assert engine.hits("packed") > before
    stats = engine.stats()
    assert stats["packed.packed"] > 0 and stats["disk.packed"] > 0
    engine.ask("check")
    engine.close()
    again = start(name, settings)
    external = again.generate(tokens)
    assert (external.local, external.external) == (0, local.local) and external.distance(local) == 0.0
    assert again.hits("disk") > 0
    again.ask("check")
