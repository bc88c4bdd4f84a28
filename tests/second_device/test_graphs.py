"""Recorded decode steps on a device that is not the CPU: what a step takes from the host, or asks the device, is seen
there as a copy, and refused as a capture would.
"""

from __future__ import annotations

import shutil
from dataclasses import replace

import pytest
import torch

from stowage.config.memory import Memory
from stowage.cuda.paged_attention import launch
from stowage.engine import assembly
from stowage.engine.engine import Engine
from stowage.executor import kernels, runner, static_steps
from stowage.executor.replay.backend import CaptureError
from stowage.executor.replay.graphs import backend, budget
from stowage.testing import tiny_models
from tests.engine.conftest import assert_same, check_and_close, greedy, random_prompt
from tests.engine.tape import Recording, TapeRecorder
from tests.second_device.interpreting import interpreting

pytestmark = [
    pytest.mark.device,
    pytest.mark.skipif(shutil.which("g++") is None, reason="the second device needs a C++ compiler"),
]
FAMILIES = ["llama", "gemma3", "llama4", "deepseek_v3", "qwen3_next", "lfm2", "gpt_oss", "gemma3n"]
FAMILIES += ["mixtral", "qwen3_moe", "nemotron_h", "kimi_linear", "falcon_h1"]
PROMPTS = [random_prompt(length, seed=length) for length in (57, 20, 70)]


@pytest.fixture
def opened(device, references, monkeypatch):  # type: ignore[no-untyped-def]
    monkeypatch.setattr(static_steps, "TOKENS_LEAST", 64)
    monkeypatch.setattr(budget, "SHARE", 2)
    monkeypatch.setattr(budget, "SHARE_LEAST_BYTES", 1)
    monkeypatch.setattr(assembly, "recorder", lambda device: TapeRecorder())
    made: list[Engine] = []

    def open_engine(family: str, **memory: object) -> Engine:
        limits = {"kv_cache_memory": "16MiB", "host_memory": "8MiB", "snapshot_tokens": 64} | memory
        made.append(Engine(references(family).path, Memory(**limits), device=str(device)))  # type: ignore[arg-type]
        recorded = made[-1].parts.graphs
        assert recorded is not None
        recorded.rules = replace(recorded.rules, warm_steps=1)
        recorded.backend.steps.octave, recorded.clock = 1, lambda: 0.0
        return made[-1]

    yield open_engine
    check_and_close(made)


def test_the_tape_sees_copies(device: torch.device) -> None:
    x = torch.arange(4.0, device=device)
    for step in (lambda: x + torch.ones(4).to(device), lambda: x.to("cpu"), lambda: x.copy_(torch.ones(4))):
        with torch.inference_mode(), pytest.raises(CaptureError, match=r"copies between devices|reads from the device"):
            TapeRecorder().capture(step)


@pytest.mark.parametrize("family", FAMILIES)
def test_answers_are_the_cpus(family: str, opened, references) -> None:  # type: ignore[no-untyped-def]
    engine = opened(family)
    for prompt, completion in zip(PROMPTS, engine.generate(PROMPTS, greedy(16)), strict=True):
        assert_same(completion, references(family).answer(prompt, 16))
    stats = engine.stats()["graphs"]
    assert stats["refused"] == 0 < stats["captured_steps"]


class Again(TapeRecorder):
    """Replays by computing again: the interpreter of Triton is no operation of torch, so there is nothing to record."""

    def capture(self, function):  # type: ignore[no-untyped-def]
        result = function()
        return Recording(lambda: result.copy_(function()), result)


@pytest.mark.parametrize("family", ["llama4", "deepseek_v3"])
def test_the_paged_kernel_reads_static_inputs(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Padded sequences, tables wider than what is seen: the kernel's answers are torch's."""
    monkeypatch.setattr(kernels, "wanted", lambda *_: False)
    monkeypatch.setattr(assembly, "recorder", lambda _: Again())
    monkeypatch.setattr(budget, "SHARE_LEAST_BYTES", 1)
    rules = backend.rules  # asked before an engine tries its first shape; an interpreter is quick by chance
    monkeypatch.setattr(runner, "rules", lambda dtype, exact: replace(rules(dtype), warm_steps=0, quicker=False))
    model = tiny_models.build(family).eval()
    found = []
    for triton in (True, False):
        monkeypatch.setattr(launch, "wanted", lambda *_, triton=triton: triton)
        with interpreting(), Engine(model, Memory(kv_cache_memory="8MiB"), cuda_graphs=triton) as engine:
            recorded = engine.parts.graphs
            if triton:
                assert recorded.backend.steps.attend is launch.attend and recorded.backend.steps.octave == 1
            found.append(engine.generate(PROMPTS, greedy(4)))
            assert not triton or engine.stats()["graphs"]["captured_steps"] > 0 == engine.stats()["graphs"]["refused"]
    for here, there in zip(*found, strict=True):
        assert here.token_ids == there.token_ids
        pairs = zip(here.logprobs, there.logprobs, strict=True)
        assert max(abs(one.logprob - other.logprob) for one, other in pairs) < 1e-4
