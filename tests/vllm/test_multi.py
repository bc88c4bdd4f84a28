"""Beside other connectors, under vLLM's ``MultiConnector``: the same bits, and failed copies that cost no request."""

from __future__ import annotations

import shutil
from pathlib import Path
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


def example(directory: Path, role: str) -> dict[str, Any]:
    """vLLM's connector that brings a prompt's blocks from a prefiller to a decoder through a directory."""
    return {
        "kv_connector": "ExampleConnector",
        "kv_role": role,
        "kv_connector_extra_config": {"shared_storage_path": str(directory)},
    }


@pytest.mark.parametrize("ours", ["prefiller", "decoder", "both"])
def test_a_prompt_is_prefilled_by_one_engine_and_decoded_by_another(ours: str, start: Start, tmp_path: Path) -> None:
    """With Stowage below one of them or both, before the transport or behind it: the same numbers as a plain hit."""
    options = {"max_num_batched_tokens": 1024}  # that connector takes no prompt in pieces
    plain = start("llama", **options)
    tokens = prompt(700)
    plain.generate(tokens)
    expected = plain.generate(tokens)
    plain.close()
    produce, consume = example(tmp_path, "kv_producer"), example(tmp_path, "kv_consumer")
    first = [connector() | {"kv_role": "kv_producer"}, produce] if ours != "decoder" else [produce]
    second = [consume, connector() | {"kv_role": "kv_consumer"}] if ours != "prefiller" else [consume]
    prefiller = start("llama", several(*first) | {"kv_role": "kv_producer"}, **options)
    prefiller.generate(tokens, 1)
    if ours != "decoder":  # what it has lost from its device comes back from Stowage
        prefiller.forget()
        assert prefiller.generate(tokens, 1).external == expected.local
    prefiller.close()
    decoder = start("llama", several(*second) | {"kv_role": "kv_consumer"}, **options)
    came = decoder.generate(tokens)
    assert (came.external, came.distance(expected)) == (expected.local, 0.0)
    if ours != "prefiller":  # what was brought once is Stowage's, when the transport has it no more
        shutil.rmtree(tmp_path)
        tmp_path.mkdir()
        decoder.forget()
        again = decoder.generate(tokens)
        assert (again.external, again.distance(expected)) == (expected.local, 0.0)
        decoder.ask("check")
