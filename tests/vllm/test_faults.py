"""Copies that fail cost a recompute, never a request or the engine; and the proof notices copies that lie."""

from __future__ import annotations

import pytest

from tests.vllm.conftest import Start
from tests.vllm.oracle import assert_comes_back, connector, prompt, prove

KINDS = ["llama", "gemma3", "gemma4", "qwen3_next", "lfm2"]
TOKENS = prompt(700)


@pytest.mark.parametrize("name", KINDS)
def test_the_proof_notices_zeroed_copies(name: str, start: Start) -> None:
    """A test of the tests: a load that writes zeros instead of the data fails them."""
    engine = start(name, connector())
    local = prove(engine, TOKENS)
    engine.ask("fault", kind="zero_load", count=None)
    with pytest.raises(AssertionError, match="the numbers are others"):
        assert_comes_back(engine, TOKENS, local)


@pytest.mark.parametrize("name", KINDS)
def test_a_failed_load(name: str, start: Start) -> None:
    """Case F2: the prompt is computed; the next request has its hit."""
    engine = start(name, connector())
    cold = engine.generate(TOKENS)
    engine.forget()
    engine.ask("fault", kind="fail_load", count=1)
    computed = engine.generate(TOKENS)
    assert computed.finish == "length"
    assert computed.distance(cold) == 0.0
    assert engine.counted("loads_failed") == 1
    engine.forget()
    assert engine.generate(TOKENS).external > 0
    engine.ask("check")


@pytest.mark.parametrize("name", ["llama", "gemma3"])
def test_every_load_fails(name: str, start: Start) -> None:
    """Many at once: all are answered, none is asked for twice."""
    engine = start(name, connector())
    prompts = [prompt(500, seed) for seed in range(4)]
    expected = [engine.generate(tokens).tokens for tokens in prompts]
    engine.forget()
    engine.ask("fault", kind="fail_load", count=None)
    assert [answer.tokens for answer in engine.generate_all(prompts)] == expected
    assert engine.counted("loads_failed") == 4
    assert not engine.ask("queues")["requests"]
    engine.ask("check")


@pytest.mark.parametrize("name", KINDS)
def test_a_failed_store(name: str, start: Start) -> None:
    """Nothing of it is found; what is stored later is."""
    engine = start(name, connector())
    engine.ask("fault", kind="fail_store", count=None)
    cold = engine.generate(TOKENS)
    assert engine.counted("stores_failed") > 0
    engine.forget()
    engine.ask("fault", kind="fail_store", count=0)
    computed = engine.generate(TOKENS)
    assert computed.external == 0
    assert computed.distance(cold) == 0.0
    engine.ask("check")
    prove(engine, prompt(700, seed=1))
