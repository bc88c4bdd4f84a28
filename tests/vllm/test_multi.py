"""Beside other connectors, under vLLM's ``MultiConnector``: the same bits, and failed copies that cost no request."""

from __future__ import annotations

from typing import Any

import pytest

from tests.vllm.conftest import Start
from tests.vllm.oracle import connector, prompt, prove

HANDSHAKER = {
    "kv_connector": "Handshaker",
    "kv_connector_module_path": "tests.vllm.handshaker",
    "kv_role": "kv_both",
}


def several(*children: dict[str, Any]) -> dict[str, Any]:
    """vLLM's setting; its policy for failed loads is the default, which fails requests."""
    return {
        "kv_connector": "MultiConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {"connectors": list(children)},
    }


@pytest.mark.parametrize(
    ("name", "first", "second"),
    [
        ("llama", HANDSHAKER, connector()),
        ("gemma3", connector(), HANDSHAKER),
    ],
    ids=["handshake-first", "handshake-second"],
)
def test_answers_come_back_beside_another(
    name: str, first: dict[str, Any], second: dict[str, Any], start: Start
) -> None:
    engine = start(name, several(first, second))
    engine.generate(prompt(40, seed=9))  # workers that have no handshake tell their parts with the first step
    prove(engine, prompt(700))
    engine.forget()
    engine.ask("fault", kind="fail_load", count=1)
    computed = engine.generate(prompt(700))
    assert computed.finish == "length" and len(computed.tokens) == len(engine.generate(prompt(700)).tokens)
    assert engine.counted("loads_failed") == 1
    engine.ask("check")


def test_a_second_engine_in_one_process(start: Start) -> None:
    """As plain vLLM: its series take the place of the first one's."""
    engine = start("llama", connector(), fresh=True)
    engine.generate(prompt(300))
    engine.ask("close_engine")
    engine.ask("start_again")
    prove(engine, prompt(300, seed=1))
    assert any(name.startswith("stowage_requests_total") for name in engine.ask("metrics"))
