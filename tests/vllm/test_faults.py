"""Copies that fail cost a recompute, never a request or the engine; and the proof notices copies that lie."""

from __future__ import annotations

import pytest

from tests.vllm.conftest import Start
from tests.vllm.oracle import Engine, assert_comes_back, connector, prompt, prove

KINDS = ["llama", "gemma3", "gemma4", "qwen3_next", "lfm2"]


@pytest.mark.slow
@pytest.mark.parametrize("name", KINDS)
def test_copies_that_lie_and_copies_that_fail(name: str, start: Start) -> None:
    """One engine, a prompt of its own for each."""
    engine = start(name, connector())
    the_proof_notices_zeroed_copies(engine, prompt(700))
    a_failed_load(engine, prompt(700, seed=1))
    a_failed_store(engine, prompt(700, seed=2))
    engine.ask("check")
    prove(engine, prompt(700, seed=3))


def the_proof_notices_zeroed_copies(engine: Engine, tokens: list[int]) -> None:
    """A test of the tests: a load that writes zeros instead of the data fails them."""
    local = prove(engine, tokens)
    engine.ask("fault", kind="zero_load", count=None)
    with pytest.raises(AssertionError, match="the numbers are others"):
        assert_comes_back(engine, tokens, local)
    engine.ask("fault", kind="zero_load", count=0)


def a_failed_load(engine: Engine, tokens: list[int]) -> None:
    """Case F2: the prompt is computed; the next request has its hit."""
    engine.forget()
    cold = engine.generate(tokens)
    engine.forget()
    engine.ask("fault", kind="fail_load", count=1)
    computed = engine.generate(tokens)
    assert computed.finish == "length"
    assert computed.distance(cold) == 0.0
    assert engine.counted("loads_failed") == 1
    engine.forget()
    assert engine.generate(tokens).external > 0


def a_failed_store(engine: Engine, tokens: list[int]) -> None:
    """Nothing of it is found; what is stored later is."""
    engine.forget()
    engine.ask("fault", kind="fail_store", count=None)
    cold = engine.generate(tokens)
    assert engine.counted("stores_failed") > 0
    engine.forget()
    engine.ask("fault", kind="fail_store", count=0)
    computed = engine.generate(tokens)
    assert computed.external == 0
    assert computed.distance(cold) == 0.0


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
