"""Two engines of one node, as data parallelism has them: what one has computed the other loads from its memory."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.vllm.conftest import Start
from tests.vllm.oracle import connector, prompt


@pytest.mark.slow
def test_a_prompt_of_one_engine_is_a_hit_of_the_other(start: Start, tmp_path: Path) -> None:
    """With the log-probabilities of plain vLLM's own hit; also when the first one was killed in between."""
    plain = start("gemma3")
    tokens, later = prompt(700), prompt(700, seed=1)
    plain.generate(tokens)
    hit = plain.generate(tokens)
    plain.close()
    environ = {"XDG_RUNTIME_DIR": str(tmp_path)}
    transfer = connector("16MiB", node_host_memory="32MiB")
    first, second = (start("gemma3", transfer, fresh=True, environ=environ) for _ in range(2))
    for asked in (tokens, later):
        assert first.generate(asked).external == 0
    answer = second.generate(tokens)
    assert (answer.local, answer.external, answer.distance(hit)) == (0, hit.local, 0.0)
    assert second.hits("neighbours") > 0 and second.stats()["neighbours.read_bytes"] > 0
    second.ask("check")
    first.kill()
    second.forget()
    again = second.generate(tokens)
    assert (again.external, again.distance(hit)) == (hit.local, 0.0), "it has become the second one's"
    assert second.generate(later).external == 0, "the memory of the first one is gone"
    second.ask("check")
    second.close()
    assert len(os.listdir(tmp_path / f"stowage-{os.getuid()}" / "budgets" / "vllm")) <= 3
