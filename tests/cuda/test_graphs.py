"""Decode steps as CUDA graphs, for real: with the paged kernel and with torch's attention."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from stowage.config.memory import Memory
from stowage.engine.engine import Engine
from stowage.engine.request import Completion
from stowage.executor.replay.graphs.backend import GraphBackend
from tests.engine.conftest import check_and_close, greedy, random_prompt

pytestmark = pytest.mark.cuda
FAMILIES = ["llama", "gemma3", "llama4", "deepseek_v3", "qwen3_next", "lfm2", "gpt_oss", "gemma2", "jamba", "gpt2"]
PROMPTS = [random_prompt(length, seed=length) for length in (250, 20, 90, 33)]
NEW_TOKENS = (60, 12, 40, 25)
MIXTURES = {"llama4", "deepseek_v3", "qwen3_next", "gpt_oss", "jamba"}
BOUNDS = {"float32": 2e-3, "bfloat16": 0.5}
"""As in test_cuda.py: by how much a log-probability may differ from plain decoding's, of tiny models drawn wide."""


@pytest.fixture
def opened(checkpoints: Callable[..., Path]) -> Iterator[Callable[..., Engine]]:
    made: list[Engine] = []

    def open_engine(  # type: ignore[no-untyped-def]
        family: str, dtype: str = "float32", cuda_graphs: bool = True, timed: bool = False, **memory
    ) -> Engine:
        limits = {"kv_cache_memory": "512MiB", "host_memory": "32MiB", "snapshot_tokens": 64} | memory
        options = {"device": "cuda", "dtype": dtype, "cuda_graphs": cuda_graphs, "batch_dependent": True}
        made.append(Engine(checkpoints(family), Memory(**limits), **options))
        recorded = made[-1].parts.graphs
        assert (recorded is not None) is cuda_graphs
        if recorded is not None and not timed:
            recorded.clock = lambda: 0.0
        return made[-1]

    yield open_engine
    check_and_close(made)


def ask(engine: Engine) -> list[Completion]:
    requests = [engine.submit(p, replace(greedy(n), logprobs=20)) for p, n in zip(PROMPTS, NEW_TOKENS, strict=True)]
    assert all(request.wait(300) for request in requests)
    return [request.result() for request in requests]


def assert_near(found: list[Completion], expected: list[Completion], bound: float) -> None:
    """Up to the first token that differs, which must have been a near tie."""
    for completion, other in zip(found, expected, strict=True):
        for here, there in zip(completion.logprobs, other.logprobs, strict=True):
            if here.token_id != there.token_id:
                assert there.logprob - dict(there.top).get(here.token_id, -100.0) < 2 * bound, "no tie"
                break
            assert abs(here.logprob - there.logprob) < bound


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("dtype", list(BOUNDS))
@pytest.mark.parametrize("torchs", ["", "1"])
def test_answers_are_those_of_plain_decoding(family: str, dtype: str, torchs: str, opened, monkeypatch) -> None:  # type: ignore[no-untyped-def]
    monkeypatch.setenv("STOWAGE_TORCH_ATTENTION", torchs)
    expected = ask(opened(family, dtype, cuda_graphs=False))
    engine = opened(family, dtype)
    assert_near(ask(engine), expected, BOUNDS[dtype])
    assert engine.flush()
    engine.drop_device_cache()
    again = ask(engine)
    assert_near(again, expected, BOUNDS[dtype])
    assert again[0].reused_tokens["host"]
    stats = engine.stats()["graphs"]
    engine.check()
    if dtype == "float32" and family in MIXTURES and stats["refused"]:
        return  # as torch 2.11 multiplies them: one expert after the other, asking the device how many chose it
    assert stats["captured_steps"] > 40 and stats["refused"] == 0
    assert 0 < stats["bytes"] <= stats["limit_bytes"]


@pytest.mark.parametrize("torchs", ["", "1"])
def test_a_replay_is_what_was_recorded(torchs: str, opened, monkeypatch: pytest.MonkeyPatch) -> None:  # type: ignore[no-untyped-def]
    """The same kernels on the same inputs, started one by one."""
    monkeypatch.setenv("STOWAGE_TORCH_ATTENTION", torchs)
    engine = opened("llama")
    replay, compared = GraphBackend.replay, []

    def both(recorded, graph, work):  # type: ignore[no-untyped-def]
        found = replay(recorded, graph, work)  # keys are written at the same places again
        compared.append(float((recorded.forward(graph.inputs)[: len(work)].cpu() - found).abs().max()))
        return found

    monkeypatch.setattr(GraphBackend, "replay", both)
    ask(engine)
    assert len(compared) > 20 and max(compared) < 1e-5


def test_what_is_quicker_is_kept(opened) -> None:  # type: ignore[no-untyped-def]
    """By the clock: a tiny model's step is nearly all starting of kernels."""
    engine = opened("llama", timed=True)
    for _ in range(3):
        ask(engine)
    stats = engine.stats()["graphs"]
    assert stats["captured_steps"] > stats["plain_steps"]


def test_memory_is_given_back(opened) -> None:  # type: ignore[no-untyped-def]
    engine = opened("llama")
    recorded = engine.parts.graphs
    assert sum(pool.nbytes for pool in engine.parts.pools) + recorded.limit_bytes <= 512 << 20
    ask(engine)
    torch.cuda.empty_cache()
    before, held = torch.cuda.memory_reserved(), recorded.backend.recorder.nbytes
    assert held > 0
    engine.close()
    torch.cuda.empty_cache()
    assert recorded.nbytes == 0 and before - torch.cuda.memory_reserved() >= held


def test_others_compute_while_a_graph_is_recorded(opened) -> None:  # type: ignore[no-untyped-def]
    """Two engines, a thread each, on one device; one recording is not spoilt by what the other does."""
    engines = [opened(family) for family in ("llama", "gemma3")]
    requests = [
        (engine, [engine.submit(p, greedy(n)) for p, n in zip(PROMPTS, NEW_TOKENS, strict=True)]) for engine in engines
    ]
    for engine, own in requests:
        assert all(request.wait(300) for request in own)
        assert all(request.result().token_ids for request in own)
        stats = engine.stats()["graphs"]
        assert stats["refused"] == 0 < stats["captured_steps"]


def test_a_family_that_asks_the_device(opened) -> None:  # type: ignore[no-untyped-def]
    expected = ask(opened("phi4_mini", cuda_graphs=False))
    engine = opened("phi4_mini")
    assert_near(ask(engine), expected, BOUNDS["float32"])
    stats = engine.stats()["graphs"]
    assert stats["captured_steps"] == 0 < stats["refused"]
    assert_near(ask(engine), expected, BOUNDS["float32"])  # and the device goes on after a capture that failed
