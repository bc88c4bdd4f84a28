"""What every family must do: KV that comes back from host memory and from disk is what vLLM itself would have had."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.vllm.conftest import Start
from tests.vllm.models import FAMILIES
from tests.vllm.oracle import Engine, connector, prompt, prove

LENGTH, SHARED = 1300, 1040
RESUMABLE = [name for name in FAMILIES if name != "deepseek_v3"]  # which is in test_refused.py
LIKE_LLAMA = {"llama-bf16", "qwen3", "mixtral", "qwen3_moe"}
"""One cache group of full attention, as Llama has."""


@pytest.mark.slow
@pytest.mark.parametrize("name", RESUMABLE)
def test_prefixes_come_back_exactly(name: str, start: Start, tmp_path: Path) -> None:
    """From host memory, and after a restart from disk, with nothing left on the device."""
    tokens = prompt(LENGTH)
    engine = start(name, connector(disk=tmp_path / "cache"))
    local = prove(engine, tokens)
    assert engine.hits("host") > 0
    engine.ask("check")
    engine.close()
    again = start(name, connector(disk=tmp_path / "cache"))
    external = again.generate(tokens)
    assert (external.local, external.external) == (0, local.local)
    assert external.distance(local) == 0.0
    assert again.hits("disk") > 0
    again.ask("check")


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in RESUMABLE if name not in LIKE_LLAMA])
def test_hits_in_the_middle(name: str, start: Start) -> None:
    """Case F10: a prompt that shares 80 % of a stored one. Held against an unmodified vLLM that keeps every state and
    window (by default it keeps those of a prompt's end only, and has no such hit on hybrids at all).
    """
    stored = prompt(LENGTH)
    asked = stored[:SHARED] + prompt(LENGTH - SHARED, seed=1)
    plain = start(name, prefix_cache_retention_interval=None)
    plain.generate(stored)
    local = plain.generate(asked)
    assert local.local > SHARED - plain.ask("layout")["hit_tokens"]
    plain.close()
    engine = start(name, connector())
    engine.generate(stored)
    engine.forget()
    external = engine.generate(asked)
    assert (external.local, external.external) == (0, local.local)
    assert external.distance(local) == 0.0


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in RESUMABLE if FAMILIES[name].recurrent])
def test_states_where_prompts_part(name: str, start: Start) -> None:
    """With vLLM's usual steps a whole prompt is one step, and leaves one state. The second prompt with a prefix keeps a
    state where it parts from the first, from which the third has a hit.
    """
    shared = prompt(SHARED)
    engine = start(name, connector(), max_num_batched_tokens=2048)
    step = engine.ask("layout")["hit_tokens"]
    own = max(200, (SHARED // step + 1) * step - SHARED + 10)  # the state that is left lies behind what is shared
    first, second, third = (engine.generate(shared + prompt(own, seed)) for seed in (1, 2, 3) if forget(engine))
    assert first.external == second.external == 0
    assert SHARED - step < third.external <= SHARED
    again = engine.generate(shared + prompt(own, seed=3))  # vLLM's own hit, of the whole prompt
    assert again.local > third.external
    assert again.tokens == third.tokens


def forget(engine: Engine) -> bool:
    engine.forget()
    return True


@pytest.mark.slow
@pytest.mark.parametrize("name", ["llama", "gemma3", "gemma4", "qwen3_next"])
def test_what_was_generated_is_stored_too(name: str, start: Start) -> None:
    """The next turn of a conversation: the prompt and the answer before it are hits."""
    engine = start(name, connector())
    first = prompt(500)
    answer = engine.generate(first, 300)
    engine.forget()
    second = first + answer.tokens + prompt(100, seed=1)
    step = engine.ask("layout")["hit_tokens"]
    external = engine.generate(second)
    assert external.external >= 800 // step * step - step  # the last token of an answer is never computed
    assert external.external > 500
    local = engine.generate(second)  # a longer hit: what the load did not cover was computed meanwhile
    assert local.tokens == external.tokens


@pytest.mark.slow
@pytest.mark.parametrize("name", ["llama", "gemma3", "llama4"])
def test_chunks_of_several_blocks(name: str, start: Start, tmp_path: Path) -> None:
    """Blocks of 32 tokens, case D: windows end inside of a chunk, and begin in the middle of one."""
    tokens = prompt(700)
    plain = start(name, block_size=32, prefix_cache_retention_interval=None)
    plain.generate(tokens)
    local = plain.generate(tokens)
    for chunk_blocks in (1, 4):
        disk = tmp_path / f"cache-{chunk_blocks}"
        engine = start(name, connector(disk=disk, chunk_blocks=chunk_blocks), block_size=32)
        cold = engine.generate(tokens)
        engine.forget()
        external = engine.generate(tokens)
        grain = 32 * chunk_blocks
        assert external.external >= 700 // grain * grain - grain
        assert external.tokens == cold.tokens
        if external.external == local.local:
            assert external.distance(local) == 0.0
        asked = tokens[: external.external] + prompt(200, seed=chunk_blocks)  # the same boundary for both
        engine.forget()
        middle, own = engine.generate(asked), plain.generate(asked)
        assert middle.external == own.local == external.external
        assert middle.distance(own) == 0.0
        engine.close()
