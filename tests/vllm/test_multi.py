"""Beside other connectors, under vLLM's ``MultiConnector``: the same bits, and failed copies that cost no request."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from stowage.metrics import VLLM
from tests.vllm.conftest import Start
from tests.vllm.oracle import Engine, connector, prompt, prove

HANDSHAKER = {"kv_connector": "Handshaker", "kv_connector_module_path": "tests.vllm.handshaker", "kv_role": "kv_both"}


def several(*children: dict[str, Any]) -> dict[str, Any]:
    """vLLM's setting; its policy for failed loads is the default, which fails requests."""
    return {
        "kv_connector": "MultiConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {"connectors": list(children)},
    }


@pytest.mark.parametrize(
    ("name", "first", "second"),
    [("llama", HANDSHAKER, connector()), ("gemma3", connector(), HANDSHAKER)],
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


def offloading(nbytes: int) -> dict[str, Any]:
    """vLLM's own, with a worker that needs no GPU."""
    extra = {"cpu_bytes_to_use": nbytes, "spec_name": "CopyingSpec"}
    return {
        "kv_connector": "OffloadingConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {**extra, "spec_module_path": "benchmarks.peers.vllm_offloading"},
    }


def lmcache(gib: float) -> dict[str, Any]:
    """The real one, with copies in plain memory: it has none for a CPU."""
    extra = {"lmcache.chunk_size": 128, "lmcache.max_local_cpu_size": gib}
    return {
        "kv_connector": "LMCacheInPlainMemory",
        "kv_connector_module_path": "benchmarks.peers.vllm_lmcache",
        "kv_role": "kv_both",
        "kv_connector_extra_config": extra,
    }


OTHERS: dict[str, Callable[[int], dict[str, Any]]] = {
    "offloading": offloading,
    "lmcache": lambda nbytes: lmcache(nbytes / (1 << 30)),
}


@pytest.mark.slow
@pytest.mark.parametrize("ours_first", [True, False], ids=["ours-first", "ours-second"])
@pytest.mark.parametrize(("other", "name"), [("offloading", "llama"), ("offloading", "gemma3"), ("lmcache", "llama")])
def test_beside_another_that_offloads(other: str, name: str, ours_first: bool, start: Start) -> None:
    """vLLM's own and LMCache, in either order, and whichever of the two still has the prompt: the numbers of plain
    vLLM's own hit. The first one has memory for one prompt and a bit.
    """
    theirs = OTHERS[other]
    plain = start(name)
    tokens = prompt(700)
    cold, hit = plain.generate(tokens), plain.generate(tokens)
    plain.close()
    first = connector("1200KiB", eviction_policy="lru") if ours_first else theirs(5 << 18)
    engine = start(name, several(first, theirs(64 << 20) if ours_first else connector()))

    def forget() -> None:
        engine.generate(prompt(40, seed=9))  # vLLM's child stores with the step behind
        engine.forget()

    def again() -> float:
        """What of the hit Stowage loaded."""
        before = engine.counted("tokens_loaded")
        answer = engine.generate(tokens)
        assert (answer.local, answer.external, answer.distance(hit)) == (0, hit.local, 0.0)
        return engine.counted("tokens_loaded") - before

    assert engine.generate(tokens).distance(cold) == 0.0
    forget()
    assert again() == (hit.local if ours_first else 0), "the first one has it"
    for seed in (1, 2, 3):
        engine.generate(prompt(700, seed))
    forget()
    assert again() == (0 if ours_first else hit.local), "the first one lost it to other prompts"
    fails_in_ours(engine, forget, ours_first=ours_first)


def fails_in_ours(engine: Engine, forget: Callable[[], None], *, ours_first: bool) -> None:
    """The other one has it, or it is computed."""
    tokens = prompt(700, seed=4)
    cold = engine.generate(tokens)
    for seed in () if ours_first else (5, 6, 7):  # the other one loses it
        engine.generate(prompt(700, seed))
    forget()
    engine.ask("fault", kind="fail_load", count=1)
    answer = engine.generate(tokens)
    assert engine.counted("loads_failed") == 1
    assert answer.finish == "length" and answer.distance(cold) == 0.0
    assert (answer.external > 0) == ours_first
    engine.ask("check")


@pytest.mark.slow
def test_a_second_engine_in_one_process(start: Start) -> None:
    """As plain vLLM: its series take the place of the first one's."""
    engine = start("llama", connector(), fresh=True)
    engine.generate(prompt(300))
    engine.ask("close_engine")
    engine.ask("start_again")
    prove(engine, prompt(300, seed=1))
    told = engine.ask("metrics")
    assert [row.metric for row in VLLM if not any(name.startswith(f"{row.metric}{{engine=0,") for name in told)] == []


def example(directory: Path, role: str) -> dict[str, Any]:
    """vLLM's connector that brings a prompt's blocks from a prefiller to a decoder through a directory."""
    return {
        "kv_connector": "ExampleConnector",
        "kv_role": role,
        "kv_connector_extra_config": {"shared_storage_path": str(directory)},
    }


@pytest.mark.slow
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
